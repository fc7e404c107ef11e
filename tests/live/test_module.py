"""The slots of a module are the keys of its state dict, by both names: the wrappers' and the
model's own.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from migrate.core.spec import spec
from migrate.live.module import sides, slots, spec_of, state, unwrapped


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_parameter("none", None)

    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def tied():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    return model


MODULES = {
    "linear": lambda: nn.Linear(2, 3),
    "norm": lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "extra": lambda: nn.Sequential(Stateful(), Stateful()),
    "tied": tied,
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"),
    "inside": lambda: nn.Sequential(
        torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2)
    ),
    "checkpointed": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))),
    "parallel": lambda: nn.DataParallel(nn.Sequential(nn.Linear(2, 2))),
    "parameters": lambda: nn.ParameterDict({"x": torch.ones(1)}),
}


@pytest.mark.parametrize("name", MODULES)
def test_slots_have_the_names_and_the_order_of_the_state_dict(name):
    model = MODULES[name]()
    found, state = slots(model), model.state_dict()
    assert list(found) == list(state)
    for key, slot in found.items():
        assert slot.tensor is None or slot.tensor.data_ptr() == state[key].data_ptr()
        assert slot.tensor is None or getattr(slot.owner, slot.name) is slot.tensor


@pytest.mark.parametrize("name", MODULES)
def test_a_state_has_the_versions_that_the_state_dict_has(name):
    model = MODULES[name]()
    inner = {"compiled": "_orig_mod", "parallel": "module"}.get(name)
    expected = (model if inner is None else getattr(model, inner)).state_dict()._metadata
    if name in ("inside", "checkpointed"):
        expected = {
            key.replace("._orig_mod", "").replace("._checkpoint_wrapped_module", ""): said
            for key, said in expected.items()
        }
    assert state(model)._metadata == expected


@pytest.mark.parametrize("name", ["compiled", "inside", "checkpointed", "parallel"])
def test_the_plain_names_are_those_of_the_model_without_wrappers(name):
    plain = {
        "compiled": "0.weight",
        "inside": "0.weight",
        "checkpointed": "0.weight",
        "parallel": "0.weight",
    }[name]
    found = slots(MODULES[name]())
    assert plain in {slot.plain for slot in found.values()}
    assert not any(
        "_orig_mod" in slot.plain or slot.plain.startswith("module.") for slot in found.values()
    )


def test_a_submodule_called_module_is_no_wrapper():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert [slot.plain for slot in slots(Own()).values()] == ["module.weight", "module.bias"]


def test_keys_lose_the_segments_of_wrappers_and_no_others():
    keys = {"_orig_mod.a._orig_mod.w": 1, "module.b": 2}
    assert list(unwrapped(keys, parallel=True).values()) == ["a.w", "module.b"]
    assert list(unwrapped({"module.a": 1, "module.b": 2}, parallel=True).values()) == ["a", "b"]
    assert list(unwrapped({"module.a": 1, "module.b": 2}, parallel=False).values()) == [
        "module.a",
        "module.b",
    ]
    assert list(unwrapped({"my_orig_mod_x.w": 1}, parallel=True).values()) == ["my_orig_mod_x.w"]


def test_what_has_no_fixed_spec_has_none():
    assert spec_of(None) is None
    assert spec_of(nn.LazyLinear(3).weight) is None
    assert spec_of(torch.empty(2, dtype=torch.float16)) == spec("float16", (2,))
    assert spec_of(torch.empty(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)) == spec(
        "float4_e2m1fn", (2, 6)
    )


def test_the_configuration_is_that_of_the_model_inside_its_wrappers():
    class Config:
        def to_dict(self):
            return {"model_type": "mixtral", "dtype": torch.bfloat16}

    model = nn.Linear(1, 1)
    assert sides(model) == {}
    model.config = Config()
    for one in (model, torch.compile(model, backend="eager"), nn.DataParallel(model)):
        assert json.loads(sides(one)["config.json"]) == {
            "model_type": "mixtral",
            "dtype": "torch.bfloat16",
        }
    model.config = {"a": 1}
    assert json.loads(sides(model)["config.json"]) == {"a": 1}
    model.config = "none of ours"
    assert sides(model) == {}
