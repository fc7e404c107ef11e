"""The hook with dicts and modules as they are found: arrays, small dtypes, both layouts at once,
real wrappers; and what it holds on to.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from built import module, untouched
from marks import thorough
from old_layouts import FUSE, Model, holds, old, photo, refused, rule, same, wanted
from torch import nn

import migrate

STACK = 'rules: [{name: s, from: "w{i:int}", to: weight, via: [{stack: {over: i}}]}]\n'


@pytest.fixture
def fuse(tmp_path):
    return rule(tmp_path, FUSE)


@pytest.fixture
def world():
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# what a hook holds on to


def without(key):
    def change(state):
        del state[key]

    return change


def reshaped(state):
    state["layers.0.ln.weight"] = torch.ones(3)


@pytest.mark.parametrize("assign", thorough([False, True]))
@pytest.mark.parametrize(
    "change", [None, without("layers.0.proj.half0"), without("layers.0.ln.bias"), reshaped]
)
def test_nothing_of_a_state_dict_is_held_once_it_is_loaded_or_refused(fuse, change, assign):
    gc.collect()
    gc.disable()
    try:
        model, state = Model(), old()
        migrate.attach(model, rules=fuse)
        held = [weakref.ref(value) for value in state.values()]
        if change is not None:
            change(state)
            with pytest.raises(RuntimeError):
                model.load_state_dict(state, assign=assign)
        else:
            model.load_state_dict(state, assign=assign)
        del state
        assert not any(tensor() is not None for tensor in held)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("hook", [True, False])
def test_what_values_are_computed_from_is_not_held_either(tmp_path, hook):
    file = rule(tmp_path, "rules: [{name: r, from: w, to: weight, via: [{affine: {mul: 3}}]}]\n")
    model = nn.Linear(2, 2, bias=False)
    state = {"w": torch.ones(2, 2), "extra._extra_state": {"a": torch.ones(1)}}
    held = [weakref.ref(state["w"]), weakref.ref(state["extra._extra_state"]["a"])]
    gc.collect()
    gc.disable()
    try:
        if hook:
            migrate.attach(model, rules=file, allow="lossy")
            model.load_state_dict(state, strict=False)
            assert model.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        else:
            new = migrate.migrate_state_dict(state, rules=file, allow="lossy")
            assert new["weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
            del new
        del state
        assert not any(tensor() is not None for tensor in held)
    finally:
        gc.enable()


PEAK = """
import resource, sys, torch, migrate
from torch import nn
wide, layers = 2048, 8
model = nn.ModuleDict({f"l{i}": nn.Linear(wide, wide, bias=False) for i in range(layers)})
state = {f"l{i}.w{h}": torch.ones(wide // 2, wide) for i in range(layers) for h in range(2)}
migrate.attach(model, rules=sys.argv[1], allow="lossy")
small = nn.ModuleDict({"l0": nn.Linear(4, 4, bias=False)})
migrate.attach(small, rules=sys.argv[1], allow="lossy")
small.load_state_dict({f"l0.w{h}": torch.ones(2, 4) for h in range(2)})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.load_state_dict(state)
assert all((one.weight == int(sys.argv[2])).all() for one in model.values())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (wide * wide * 4 / 1024))
"""


@pytest.mark.parametrize(("more", "value"), thorough([("", 1), (", {affine: {mul: 3}}", 3)]))
def test_the_peak_is_one_tensor_above_the_dict_and_the_module(tmp_path, more, value):
    file = rule(
        tmp_path,
        'rules: [{name: r, from: "{l}.w{i:int}", to: "{l}.weight", via: [{concat: '
        f"{{over: i, dim: 0}}}}{more}]}}]\n",
    )
    root = str(Path(migrate.__file__).parents[1])
    child = subprocess.run(
        [sys.executable, "-c", PEAK, str(file), str(value)],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    # in tensors of the module, of which there are eight
    assert float(child.stdout) < 2


# dicts


class Own(Mapping):
    def __init__(self, inner):
        self.inner = inner

    def __getitem__(self, key):
        return self.inner[key]

    def __iter__(self):
        return iter(self.inner)

    def __len__(self):
        return len(self.inner)


@pytest.mark.parametrize("kind", [dict, Own, lambda d: defaultdict(lambda: torch.zeros(1), d)])
def test_any_mapping_will_do(fuse, kind):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    given = kind(state)
    model.load_state_dict(given)
    holds(model, wanted(state))
    new = migrate.migrate_state_dict(given, rules=fuse)
    assert all(torch.equal(new[key], value) for key, value in wanted(state).items())
    assert list(given) == list(state)


@pytest.mark.parametrize("assign", [False, True])
def test_arrays_in_an_old_dict_are_read_whatever_their_order(fuse, assign):
    model = Model()
    migrate.attach(model, rules=fuse)
    for order in ("C", "F", "C"):
        state = old()
        given = {key: np.array(value.numpy(), order=order) for key, value in state.items()}
        given["layers.0.ln.bias"] = given["layers.0.ln.bias"].astype(">f4")
        model.load_state_dict(given, assign=assign)
        holds(model, wanted(state))
        new = migrate.migrate_state_dict(given, rules=fuse, device="cpu")
        assert all(torch.equal(new[key], value) for key, value in wanted(state).items())


DTYPES = [
    "float4_e2m1fn_x2",
    "float8_e4m3fn",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
    "bool",
    "uint16",
    "int8",
    "bfloat16",
    "float16",
]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", [(2, 4), (0, 4), ()])
@pytest.mark.parametrize("name", DTYPES)
def test_all_dtypes_and_shapes_go_through(tmp_path, name, shape, assign):
    dtype = getattr(torch, name)
    if name.startswith("float4") and not shape:
        pytest.skip("torch holds pairs of these, and one number is none")

    if name.startswith("float4") and not assign and torch.__version__.startswith("2.8."):
        pytest.skip(
            "torch 2.8 copies no float4, so that loading without assign is impossible there"
        )

    def filled(shape, value):
        of_bytes = torch.full(shape, value, dtype=torch.uint8)
        return (
            of_bytes.view(dtype)
            if dtype.itemsize == 1 and not name.startswith("bool")
            else of_bytes.to(dtype)
        )

    def bits(tensor):
        return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []

    model = nn.Module()
    model.register_buffer("weight", filled((2, *shape), 0))
    migrate.attach(model, rules=rule(tmp_path, STACK))
    state = {f"w{i}": filled(shape, i + 1) for i in range(2)}
    model.load_state_dict(state, assign=assign)
    assert model.weight.shape == (2, *shape)
    assert bits(model.weight) == bits(state["w0"]) + bits(state["w1"])


def test_a_dict_that_is_loaded_again_after_it_was_assigned_gives_the_same(fuse):
    model, state = Model(), old()
    migrate.attach(model, rules=fuse)
    expected = {key: value.clone() for key, value in wanted(state).items()}
    for assign in (True, False, True):
        other = Model()
        migrate.attach(other, rules=fuse)
        for one in (model, other):
            one.load_state_dict(state, assign=assign)
            holds(one, expected)


def both(state, new, how):
    if how == "all of both":
        return {**state, **new}
    return {
        key: value
        for key, value in {**state, **new}.items()
        if ("layers.0" in key) == ("block_sparse_moe" in key)
    }


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("how", ["all of both", "a layer of each"])
def test_a_dict_in_which_two_layouts_of_a_lineage_stand_side_by_side_is_refused(how, strict):
    state = {}
    for i in range(2):
        at = f"model.layers.{i}.block_sparse_moe"
        state |= {
            f"{at}.experts.{e}.{w}.weight": torch.randn(2, 2)
            for e in range(2)
            for w in ("w1", "w2", "w3")
        }
        state[f"{at}.gate.weight"] = torch.randn(2, 2)
    new = dict(migrate.migrate_state_dict(state, to="hf-mixtral@v5"))
    model = module(new)
    migrate.attach(model, to="hf-mixtral@v5")
    text = refused(model, both(state, new, how), "M504", strict=strict)
    assert untouched(model)
    assert "not v4: model.layers." in text
    assert "not v5: model.layers.0.block_sparse_moe.experts.0.w1.weight" in text


def test_a_dict_that_may_be_in_either_layout_is_refused(tmp_path):
    home = tmp_path / "rules" / "demo"
    (home / "v2").mkdir(parents=True)
    (home / "layouts.yaml").write_text(
        "lineage: demo\ntitle: t\nlayouts:\n  v1: {title: a, detect: {present: '{m}.w'}}\n  v2: "
        "{title: b, detect: {present: '{m}.{k}'}}\n"
    )
    (home / "v2" / "r.yaml").write_text(
        "id: demo/v2/r\ntitle: t\nlineage: demo\nedge: [v1, v2]\nrules: [{name: r, from: '{m}.w', "
        "to: '{m}.v'}]\n"
    )
    model = nn.ModuleDict({"m": nn.ParameterDict({"v": torch.zeros(2)})})
    migrate.attach(model, to="demo@v2", rules=tmp_path / "rules")
    assert "fits the layouts v1 and v2" in refused(
        model, {"m.w": torch.ones(2)}, "M503", strict=False
    )


# modules


KINDS = {
    "lstm": lambda: nn.LSTM(2, 3, 2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "batch norm": lambda: nn.BatchNorm2d(3),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_module_of_any_kind_is_what_torch_loads_by_the_new_names(tmp_path, kind, assign):
    file = rule(tmp_path, 'rules: [{name: r, from: "old.{k...}", to: "new.{k}"}]\n')
    state = KINDS[kind]().state_dict()
    migrated, plain = (nn.ModuleDict({"new": KINDS[kind]()}) for _ in range(2))
    migrate.attach(migrated, rules=file)
    migrated.load_state_dict(
        {f"old.{key}": value.clone() for key, value in state.items()}, assign=assign
    )
    plain.load_state_dict(
        {f"new.{key}": value.clone() for key, value in state.items()}, assign=assign
    )
    holds(migrated, plain.state_dict())


def test_a_model_in_data_parallel_is_migrated_at_any_depth_of_wrappers(fuse, world):
    from torch.nn.parallel import DistributedDataParallel

    def compiled(module):
        return torch.compile(module, backend="eager")

    inside = Model()
    migrate.attach(inside, rules=fuse)
    for wrap, lead in (
        (DistributedDataParallel, "module."),
        (lambda m: compiled(DistributedDataParallel(m)), "_orig_mod.module."),
        (lambda m: DistributedDataParallel(compiled(m)), "module._orig_mod."),
    ):
        state = old()
        wrap(inside).load_state_dict({lead + key: value for key, value in state.items()})
        holds(inside, wanted(state))
        outside = wrap(Model())
        migrate.attach(outside, rules=fuse)
        state = old()
        outside.load_state_dict(state)
        holds(outside, {lead + key: value for key, value in wanted(state).items()})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_sharded_module_stays_sharded_when_it_is_assigned(fuse, world, device):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with torch.device(device):
        model = Model()
    for block in model.layers:
        fully_shard(block, mesh=world)
    fully_shard(model, mesh=world)
    migrate.attach(model, rules=fuse)
    state = old()
    model.load_state_dict(state, assign=True)
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(
        torch.equal(p.full_tensor(), wanted(state)[name]) for name, p in model.named_parameters()
    )


def test_modules_that_attach_a_hook_to_themselves_are_named_when_they_refuse(fuse):
    class Own(Model):
        def __init__(self):
            super().__init__()
            migrate.attach(self, rules=fuse)

    root = nn.ModuleDict({"a": Own(), "b": Own()})
    states = {name: old() for name in "ab"}
    joined = {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }
    root.load_state_dict(joined)
    for name, state in states.items():
        holds(root[name], wanted(state))
    del joined["b.layers.0.ln.bias"]
    before = photo(root["b"])
    with pytest.raises(RuntimeError, match="1 key of the module would not be filled") as caught:
        root.load_state_dict(joined)
    assert "all of it below b\n" in str(caught.value)
    assert same(photo(root["b"]), before)


def test_an_old_handle_does_not_take_off_a_newer_hook(fuse):
    model, state = Model(), old()
    first = migrate.attach(model, rules=fuse)
    first.remove()
    migrate.attach(model, rules=fuse)
    first.remove()
    model.load_state_dict(state)
    holds(model, wanted(state))


USES = {
    "times": lambda w: w * 2, "minus": lambda w: 1 - w, "compared": lambda w: (w > 0).float(),
    "negated": lambda w: -w,
    "multiplied": lambda w: w @ torch.eye(3), "array": lambda w: torch.from_numpy(np.asarray(w)),
    "rows": lambda w: torch.stack(list(w)),
    "asked": lambda w: w if w.sum() != 0 else None,
    "torch's": lambda w: torch.cat(torch.split(w, 1)), "method": lambda w: w.double(),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_module_that_computes_with_what_it_loads_sees_tensors(tmp_path, use):
    class Computing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3))

        def _load_from_state_dict(self, state, prefix, *rest):
            state[f"{prefix}weight"] = USES[use](state[f"{prefix}weight"])
            super()._load_from_state_dict(state, prefix, *rest)

    model = nn.ModuleDict({"x": Computing()})
    migrate.attach(model, rules=rule(tmp_path, STACK.replace("weight", "x.weight")))
    state = OrderedDict((f"w{i}", torch.randn(3)) for i in range(2))
    model.load_state_dict(state)
    assert torch.equal(model["x"].weight, USES[use](torch.stack([*state.values()])).float())
