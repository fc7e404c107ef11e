"""With a migration attached that changes nothing, modules of many kinds load as they would without:
results, and the very same errors.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import OrderedDict

import pytest
import torch
from grouped_linear import Float8, GroupedLinear, Remapping
from marks import thorough
from old_layouts import rule
from torch import nn

import migrate

RULES = """
id: t/identity
title: t
lineage: t
edge: [a, b]
keep: ["{k...}"]
rules: [{name: same, from: "{k...}.nothing_is_called_so", to: "{k}.nothing_is_called_so", optional: true}]
"""  # noqa: E501
RENAMED = (
    RULES.replace('keep: ["{k...}"]\n', "").split("rules:")[0]
    + 'rules: [{name: all, from: "{k...}", to: "{k}"}]\n'
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight


class Stateful(nn.Linear):
    state: object = "fresh"

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Itself(nn.Module):
    """Loads by its own rules, and falls over a missing key."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        with torch.no_grad():
            self.weight.copy_(state_dict.pop(f"{prefix}half").repeat(3))

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}half"] = self.weight[:1].detach()


class Scaled(nn.Module):
    """Takes a scale that it has no slot for, and looks whether it is a tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.scale = None

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        self.scale = state_dict.pop(f"{prefix}scale")
        assert isinstance(self.scale, torch.Tensor)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


@pytest.mark.parametrize("via", ["", ", via: [{transpose: {dims: [0, 1]}}]"])
def test_a_module_that_loads_itself_is_given_what_it_has_no_slot_for(tmp_path, via):
    text = f'rules: [{{name: s, from: "old.scale", to: "x.scale"{via}}}]\nkeep: [x.weight]\n'
    model = nn.ModuleDict({"x": Scaled()})
    migrate.attach(model, rules=rule(tmp_path, text))
    scale = torch.arange(6.0).reshape(2, 3)
    model.load_state_dict({"x.weight": torch.ones(3), "old.scale": scale})
    assert torch.equal(model.x.weight, torch.ones(3))
    assert torch.equal(model.x.scale, scale.T if via else scale)


def renaming():
    """A module with a hook of its own, of the kind that packages have for their older releases."""
    module = nn.Linear(2, 2)

    def hook(module, state, prefix, *rest):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    module.register_load_state_dict_pre_hook(hook)
    return nn.Sequential(module)


def transformer():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    )


KINDS = {
    "linear": lambda: nn.Linear(3, 2),
    "without bias": lambda: nn.Linear(3, 2, bias=False),
    "convolution": lambda: nn.Conv2d(2, 3, 3),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)),
    "no running stats": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "transformer": transformer,
    "lstm": lambda: nn.LSTM(2, 3, 2, bidirectional=True),
    "tied": Tied,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    "nested": lambda: nn.ModuleDict(
        {"a": nn.ModuleList([nn.Linear(2, 2), nn.Sequential()]), "b": nn.PReLU()}
    ),
    "twice": lambda: nn.ModuleDict(dict.fromkeys("ab", nn.Linear(2, 2))),
    "extra state": lambda: nn.Sequential(Stateful(2, 2)),
    "loads itself": lambda: nn.ModuleDict({"x": Itself()}),
    "own hook": renaming,
    "scalars": lambda: nn.ParameterDict(
        {"s": nn.Parameter(torch.zeros(())), "n": nn.Parameter(torch.zeros(2))}
    ),
    "meta": lambda: nn.Linear(2, 2, device="meta"),
    "bfloat16": lambda: nn.Linear(2, 2, dtype=torch.bfloat16),
    "grouped": lambda: GroupedLinear(2, 3, 4),
    "grouped single": lambda: nn.ModuleDict(
        {"fc": Remapping(2, 3, 4, single_weight=True, single_bias=True)}
    ),
    "quantized": lambda: nn.Sequential(GroupedLinear(2, 3, 4, bias=False, scale=0.25)),
}


def random(state):
    return OrderedDict(
        (
            k,
            torch.randn(v.shape).to(v.dtype)
            if type(v) is torch.Tensor and v.is_floating_point() and not v.is_meta
            else v,
        )
        for k, v in state.items()
    )


def filled(kind):
    """A dict of such a module, after a forward where it takes its shapes from one."""
    module = KINDS[kind]()
    if kind == "lazy":
        module(torch.randn(4, 2))
    state = module.state_dict()
    out = random(state)
    out._metadata = state._metadata
    return out


def twin(make):
    torch.manual_seed(0)
    return make()


def copied(state):
    made = OrderedDict(
        (k, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in state.items()
    )
    if hasattr(state, "_metadata"):
        made._metadata = copy.deepcopy(state._metadata)
    return made


def first(state):
    return next(iter(state), None)


DICTS = {
    "good": lambda s: s,
    "no metadata": lambda s: dict(s),
    "empty": lambda s: {},
    "part": lambda s: dict([*s.items()][1:]),
    "strange keys": lambda s: {
        **s,
        "stray": torch.zeros(1),
        "a.b.c": torch.zeros(2),
        "": torch.zeros(1),
    },
    "other shape": lambda s: {**s, first(s): torch.zeros(7, 7)},
    "scalar in a row": lambda s: {
        k: v.reshape(1) if type(v) is torch.Tensor and v.ndim == 0 else v for k, v in s.items()
    },
    "no tensor": lambda s: {**s, first(s): "text"},
    "none": lambda s: {**s, first(s): None},
    "array": lambda s: {
        k: v.numpy()
        if type(v) is torch.Tensor and v.dtype == torch.float32 and not v.is_meta
        else v
        for k, v in s.items()
    },
    "other dtype": lambda s: {
        k: v.double() if type(v) is torch.Tensor and v.is_floating_point() else v
        for k, v in s.items()
    },
    "sparse": lambda s: {**s, "stray": torch.eye(2).to_sparse()},
    "complex": lambda s: {**s, "stray": torch.ones(2, dtype=torch.complex64).conj()},
    "prefixed": lambda s: {f"module.{k}": v for k, v in s.items()},
    "quantized stray": lambda s: {**s, "stray": Float8.of(torch.ones(2))},
    "meta values": lambda s: {
        k: v.to("meta") if type(v) is torch.Tensor else v for k, v in s.items()
    },
    "numbered": lambda s: {**s, 7: torch.zeros(1)},
    "kernel": lambda s: {k.replace("weight", "kernel"): v for k, v in s.items()},
}


def outcome(module, state, **how):
    """What a load does: its answer or error, its warnings, and what the module is afterwards."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            answer = tuple(map(list, module.load_state_dict(state, **how)))
        except Exception as error:  # noqa: BLE001 - compared
            answer = (type(error), str(error))
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    now = [(name, type(t), t.requires_grad, t._version, spelled(t)) for name, t in tensors]
    ties = [[i for i, (_, other) in enumerate(tensors) if other is t] for _, t in tensors]
    return (
        answer,
        [str(w.message) for w in heard],
        now,
        ties,
        [getattr(m, "state", None) for m in module.modules()],
    )


def spelled(tensor):
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    if tensor.is_meta:
        return str(tensor.shape)
    plain = tensor.detach().dequantize() if hasattr(tensor, "held") else tensor.detach()
    return re.sub(r"0x[0-9a-f]+", "", f"{tensor.dtype} {plain.tolist()!r}")


HOWS = ({}, {"strict": False}, {"assign": True})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "how"), thorough([(text, how) for how in HOWS for text in (RULES, RENAMED)], default=2)
)
def test_a_migration_that_changes_nothing_is_not_noticed(tmp_path, kind, text, how):
    file = tmp_path / "identity.yaml"
    file.write_text(text)
    state = filled(kind)
    for name, change in DICTS.items():
        with_hook, without = twin(KINDS[kind]), twin(KINDS[kind])
        migrate.attach(with_hook, rules=file)
        changed = change(state)
        one, other = copied(changed), copied(changed)
        got, wanted = outcome(with_hook, one, **how), outcome(without, other, **how)
        if kind == "lazy" and isinstance(wanted[0][0], type):
            # a load that failed leaves memory that nobody wrote
            got, wanted = got[:2], wanted[:2]
        assert got == wanted, (name, how)
