"""What goes on is what Transformer Engine 2.x writes itself, and holds the numbers that were
read.
"""

from __future__ import annotations

import json
import pickletools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from te_streams import archive, dumps, recipe, scaling, transformer_engine, vector

from migrate.core.errors import OpError
from migrate.extra_state.decode import decode
from migrate.extra_state.record import ScalingState, StateForm, StateRecord, StateTensor, normal
from migrate.extra_state.write import pickled

GENUINE = [
    "HEAD_linear_DelayedScaling.pkl",
    "v2.17_linear_DelayedScaling.pkl",
    "v2.0_linear_DelayedScaling.pkl",
    "crafted_delayed_proto4.pkl",
    "v2.17_linear_MXFP8BlockScaling.pkl",
    "v2.17_linear_NVFP4BlockScaling.pkl",
    "crafted_memo_stateless_then_delayed.pkl",
]
OLD = [
    "v0.8_linear_DelayedScaling.pkl",
    "v1.13_linear_DelayedScaling.bytesio.pt",
    "v1.13_linear_DelayedScaling_cuda0.bytesio.pt",
    "v1.13_linear_DelayedScaling_hist1024.bytesio.pt",
]


def opcodes(payload: bytes) -> list[tuple[str, Any]]:
    """The opcodes with their arguments; the keys of storages, which are addresses, and the lengths
    that follow from them, made alike.
    """
    out = []
    for opcode, argument, _ in pickletools.genops(payload):
        name = "BYTES" if isinstance(argument, bytes) else opcode.name
        if isinstance(argument, bytes):
            argument = re.sub(rb"X.\x00\x00\x00\d+q", b"KEY", argument, flags=re.DOTALL)
        out.append((name, None if name == "FRAME" else argument))
    return out


@pytest.mark.parametrize("name", GENUINE)
def test_what_a_release_of_2_x_wrote_is_written_again_opcode_for_opcode(name: str) -> None:
    payload = vector(name)
    assert opcodes(pickled(decode(payload, name), name)) == opcodes(payload)


def states(payload: bytes) -> dict[str, ScalingState]:
    return {mode: state for mode, state in decode(payload, "x").states.items() if state is not None}


@pytest.mark.parametrize(
    "name",
    [
        *GENUINE,
        *OLD,
        "v1.13_ops_basic_linear_DelayedScaling.pkl",
        "HEAD_dpa_CurrentScaling_local_recipes.pkl",
    ],
)
def test_what_is_written_decodes_to_the_same_scales_and_amaxes_bit_for_bit(name: str) -> None:
    record = decode(vector(name), name)
    again = states(pickled(record, name))
    assert {mode: state.tensors for mode, state in again.items()} == {
        mode: dict(s.tensors) for mode, s in normal(record).items()
    }
    if record.api == "module":
        (state,) = record.states.values()
        assert state is not None
        assert again[""].tensors == {key: state.tensors[key] for key in state.scaling}


@pytest.mark.parametrize("name", OLD)
def test_a_state_of_1_x_gets_the_recipe_that_its_shapes_and_numbers_say(name: str) -> None:
    found = states(pickled(decode(vector(name), name), name))[""]
    assert found.recipe is not None
    assert found.recipe.name == "DelayedScaling"
    assert found.recipe.fields["amax_history_len"] == (1024 if "1024" in name else 16)
    assert found.recipe.format == StateForm(448, 57344)
    assert dict(found.extras) == {
        "fp8_checkpoint": True,
        "num_gemms": 1,
        "fp8_max_fwd": 448,
        "fp8_max_bwd": 57344,
    }


@pytest.mark.parametrize(
    ("pair", "name"), [((448, 57344), "HYBRID"), ((448, 448), "E4M3"), ((57344, 57344), "E5M2")]
)
def test_the_format_is_told_by_the_largest_numbers(pair: tuple[int, int], name: str) -> None:
    held = {
        **scaling(),
        "extra_fp8_variables": dict(zip(("fp8_max_fwd", "fp8_max_bwd"), pair, strict=True)),
    }
    found = normal(decode(archive(held), "x"))[""].format
    assert found is not None
    assert found.name == name


def test_a_state_that_does_not_say_its_format_or_history_is_no_2_x_state() -> None:
    for held, what in (
        ({**scaling(), "extra_fp8_variables": {"fp8_max_fwd": 1}}, "known format"),
        ({"scale_fwd": torch.ones(3)}, "a history"),
    ):
        with pytest.raises(OpError, match=what):
            pickled(decode(dumps(held), "x"), "x")


def columns(tensor: StateTensor) -> list[list[float]]:
    width = tensor.shape[-1]
    numbers = torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).reshape(-1, width)
    return numbers.T.tolist()  # type: ignore[no-any-return]


def test_two_slots_forwards_become_three_and_one_backwards_two() -> None:
    tensors = scaling(rows=2, forward=4, backward=2)
    variables = {"num_gemms": 2, "fp8_max_fwd": 448, "fp8_max_bwd": 57344}
    found = normal(
        decode(dumps({**tensors, "global_fp8_buffer": {}, "extra_fp8_variables": variables}), "x")
    )[""].tensors
    assert {name: t.shape for name, t in found.items()} == {
        "scale_fwd": (6,),
        "amax_history_fwd": (2, 6),
        "scale_bwd": (4,),
        "amax_history_bwd": (2, 4),
    }
    one, none = [1.0], [0.0, 0.0]
    old = {name: t.reshape(-1, t.shape[-1]).T.tolist() for name, t in tensors.items()}
    for name, new in (("scale_fwd", one), ("amax_history_fwd", none)):
        first = old[name]
        assert columns(found[name]) == [first[0], first[1], new, first[2], first[3], new]
    for name, new in (("scale_bwd", one), ("amax_history_bwd", none)):
        first = old[name]
        assert columns(found[name]) == [first[0], new, first[1], new]


def test_input_and_parameter_of_1_13_are_the_two_slots_of_forward() -> None:
    before = decode(vector("v1.13_ops_basic_linear_DelayedScaling.pkl"), "x").states
    after = normal(decode(vector("v1.13_ops_basic_linear_DelayedScaling.pkl"), "x"))
    assert list(after) == ["forward", "backward"]
    for name in ("scale_fwd", "amax_history_fwd"):
        parts = [before[mode] for mode in ("input", "param")]
        assert columns(after["forward"].tensors[name]) == [
            columns(p.tensors[name])[0] for p in parts if p is not None
        ]
    last = before["grad_output"]
    assert last is not None
    assert after["backward"].tensors["amax_history_bwd"] == last.tensors["amax_history_bwd"]


def test_the_name_of_a_function_is_not_written() -> None:
    with transformer_engine() as te:
        payload = dumps({"recipe": recipe(te, "CustomRecipe", qfactory=print), **scaling()})
    with pytest.raises(OpError, match="print, which a loader would import"):
        pickled(decode(payload, "x"), "x")


def test_a_state_that_holds_nothing_is_written_as_nothing() -> None:
    for payload in (
        b"",
        vector("crafted_none.pkl"),
        vector("crafted_empty_dict.pkl"),
        vector("v1.13_linear_DelayedScaling_nofp8.bytesio.pt"),
    ):
        assert pickled(decode(payload, "x"), "x") == b""


# What Transformer Engine does with the bytes, with stubs in place of its classes: plain pickle, the
# keys that its loader reads, and the shapes that it copies into.
LOADER = """
import json, pickle, sys, types
import torch

class Enum:
    def __init__(self, pair):
        self.pair = pair

class Helper(tuple):
    def __new__(cls, *numbers):
        return tuple.__new__(cls, numbers)

module = types.ModuleType("transformer_engine.common.recipe")
for name in ("DelayedScaling", "MXFP8BlockScaling", "Float8CurrentScaling", "MMParams"):
    setattr(module, name, type(name, (), {"__module__": module.__name__}))
module.Format, module._FormatHelper = Enum, Helper
for name in ("transformer_engine", "transformer_engine.common", module.__name__):
    sys.modules[name] = module

out = {}
for path in sys.argv[1:]:
    state = pickle.loads(open(path, "rb").read())
    modes = state if set(state) <= {"forward", "backward"} else {"": state}
    found = {}
    for mode, held in modes.items():
        recipe = held["recipe"]
        assert type(held) is dict and type(held["extra_fp8_variables"]) is dict
        tensors = {k: v for k, v in held.items() if k not in ("recipe", "extra_fp8_variables")}
        for tensor in tensors.values():
            assert type(tensor) is torch.Tensor and tensor.dtype is torch.float32
            assert tensor.device.type == "cpu" and not tensor.requires_grad
        found[mode] = {
            "order": list(held),
            "recipe": type(recipe).__name__,
            "format": list(recipe.fp8_format.pair),
            "history": recipe.amax_history_len,
            "extras": sorted(held["extra_fp8_variables"]),
            "tensors": {k: [list(v.shape), v.numpy().tobytes().hex()] for k, v in tensors.items()},
        }
    out[path] = found
print(json.dumps(out))
"""


def test_plain_pickle_finds_the_structure_of_transformer_engine_in_what_is_written(
    tmp_path: Path,
) -> None:
    names = [
        n
        for n in (
            *GENUINE,
            *OLD,
            "v1.13_ops_basic_linear_DelayedScaling.pkl",
            "HEAD_dpa_CurrentScaling_local_recipes.pkl",
        )
        if "FP" not in n
    ]
    names.remove("crafted_memo_stateless_then_delayed.pkl")
    records: dict[str, StateRecord] = {}
    for name in names:
        records[str(tmp_path / name)] = record = decode(vector(name), name)
        (tmp_path / name).write_bytes(pickled(record, name))
    ran = subprocess.run(
        [sys.executable, "-c", LOADER, *records], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for path, found in json.loads(ran.stdout).items():
        for mode, state in normal(records[path]).items():
            assert found[mode]["order"] == ["recipe", *state.scaling, "extra_fp8_variables"]
            assert found[mode]["recipe"] == "DelayedScaling"
            assert found[mode]["format"] == [448, 57344]
            assert found[mode]["history"] == state.history
            assert found[mode]["tensors"] == {
                k: [list(t.shape), t.data.hex()] for k, t in state.tensors.items()
            }
