"""Quantized tensors of torchao, in files that torchao 0.18 wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch_streams import reduce

from migrate import formats, inspect
from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy
from migrate.source.pickle.nodes import Call, Dict, Global
from migrate.source.pickle.tree import Opaque

GENUINE = Path(__file__).parents[1] / "data" / "torchao"


@pytest.mark.parametrize(
    ("name", "format_", "number", "block", "specs"),
    [
        (
            "float8_row",
            "ao-fp8",
            "float8_e4m3fn",
            [1, 64],
            ["float8_e4m3fn [32, 64]", "float32 [32, 1]"],
        ),
        (
            "int8_dyn",
            "ao-int8",
            "int8",
            [1, 64],
            ["int8 [32, 64]", "float32 [32, 1]", "int8 [32, 1]"],
        ),
        (
            "int4",
            "ao-int4",
            "int4",
            [1, 32],
            ["int8 [32, 32]", "bfloat16 [2, 32]", "bfloat16 [2, 32]"],
        ),
        ("intx", "ao-intx", "int4", [1, 32], ["int8 [32, 64]", "bfloat16 [32, 2]", "int8 [32, 2]"]),
        (
            "mx",
            "ao-mx",
            "float8_e4m3fn",
            [1, 32],
            ["float8_e4m3fn [32, 64]", "float8_e8m0fnu [32, 2]"],
        ),
        (
            "nvfp4_two",
            "ao-nvfp4",
            "float4_e2m1fn",
            [1, 16],
            ["uint8 [32, 32]", "float8_e4m3fn [32, 4]", "float32 []"],
        ),
    ],
)
def test_a_genuine_file_is_read_as_its_components(
    name: str, format_: str, number: str, block: list[int], specs: list[str]
) -> None:
    (told,) = inspect(GENUINE / f"{name}.pt").to_json()["objects"]
    assert (told["format"], told["number"], told["block"], told["dtype"]) == (
        format_,
        number,
        block,
        "bfloat16",
    )
    source = formats.open(GENUINE / f"{name}.pt")
    source.close()
    assert [str(at.spec) for at in source.index.tensors.values()] == specs
    assert list(source.index.tensors) == [
        f"weight.{attribute}" for attribute in told["roles"].values()
    ]


def wrapped(cls: str = "Float8Tensor", module: str = "torchao.quantization", **fields: Any) -> Call:
    name = Global(module, cls)
    arguments = (name, Global("torch", "bfloat16"), (2, 2), (2, 1), 0, None, None, False)
    wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
    return reduce(
        "torch._tensor",
        "_rebuild_from_type_v2",
        wrapper,
        name,
        arguments,
        Dict(list(fields.items())),
    )


def test_a_class_that_is_not_known_stays_outside() -> None:
    found = policy.decode([wrapped("MarlinTensor")], "x")
    assert type(found.tree.items[0]) is Opaque
    assert "MarlinTensor" in found.outside[0].reason


def test_an_object_without_its_data_is_a_contradiction() -> None:
    with pytest.raises(CheckpointError, match="M936"):
        policy.decode([wrapped(block_size=[1, 2])], "x")


def test_settings_that_hold_what_is_not_known_leave_the_object_outside() -> None:
    setting = Call("newobj", Global("torchao.quantization.granularity", "PerRow"), ())
    setting.state = Dict([("dim", reduce("os", "system", "true"))])
    found = policy.decode([wrapped(act_quant_kwargs=setting)], "x")
    assert type(found.tree.items[0]) is Opaque
    assert [o.name for o in found.outside] == ["os.system"]
