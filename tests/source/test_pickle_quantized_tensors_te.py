"""Quantized tensors of Transformer Engine: genuine files, every form that a release wrote, and
forms that none did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from quantized_streams import FUNCTIONS, Made, mxfp8, stand_ins
from torch_streams import decoded, saved, tree

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.source.pickle import emit, machine, policy
from migrate.source.pickle.nodes import ARCHIVE
from migrate.source.pickle.tree import Composite, Opaque

GENUINE = Path(__file__).parents[1] / "data" / "te" / "tensors"
EXPECTED = json.loads((GENUINE / "expected.json").read_text())


@pytest.fixture
def te() -> Iterator[dict[str, ModuleType]]:
    with stand_ins() as modules:
        yield modules


def components(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file as its index places them."""
    out = {}
    source = formats.open(path)
    try:
        for key, at in source.index.tensors.items():
            buffer = bytearray(at.spec.nbytes)
            source.blobs[at.blob].readinto(at.offset, memoryview(buffer))
            out[key] = torch.frombuffer(buffer, dtype=getattr(torch, at.spec.dtype)).reshape(
                at.spec.shape
            )
    finally:
        source.close()
    return out


def float8(held: dict[str, torch.Tensor]) -> torch.Tensor:
    return held["weight._data"].view(torch.float8_e4m3fn).float() * held["weight._scale_inv"]


def rows_of_32(held: dict[str, torch.Tensor]) -> torch.Tensor:
    data, scale = (
        held["weight._rowwise_data"].view(torch.float8_e4m3fn).float(),
        held["weight._rowwise_scale_inv"],
    )
    rows, columns = data.shape
    steps = torch.exp2(scale[:rows, : columns // 32].double() - 127).float()
    return data * steps.repeat_interleave(32, 1)


def tiles(held: dict[str, torch.Tensor]) -> torch.Tensor:
    data, scale = (
        held["weight._rowwise_data"].view(torch.float8_e4m3fn).float(),
        held["weight._rowwise_scale_inv"],
    )
    rows, columns = data.shape
    every = scale[:, : columns // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return data * every[:rows]


def pairs(held: dict[str, torch.Tensor]) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = held["weight._rowwise_data"].long()
    numbers = torch.stack([table[packed & 15], table[packed >> 4]], -1).reshape(packed.shape[0], -1)
    scale = (
        held["weight._rowwise_scale_inv"]
        .view(torch.float8_e4m3fn)
        .float()[: packed.shape[0], : numbers.shape[1] // 16]
    )
    factor = scale * held["weight._amax_rowwise"] * torch.tensor(1 / (6 * 448), dtype=torch.float32)
    return numbers * factor.repeat_interleave(16, 1)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("float8_current_e4m3", float8),
        ("mxfp8_96x160", rows_of_32),
        ("block128x128_pow2", tiles),
        ("nvfp4_2d_weight", pairs),
    ],
)
def test_the_components_of_a_genuine_file_mean_the_numbers_that_the_library_says(
    name: str, values: Any
) -> None:
    found = values(components(GENUINE / f"{name}.pt"))
    if name.startswith("float8"):
        found = found.bfloat16().float()
    assert list(found.shape) == EXPECTED[name]["shape"]
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == EXPECTED[name]["sha256_f32"]


@pytest.mark.parametrize(
    ("name", "format_", "number", "block", "dtype"),
    [
        ("float8_current_e4m3", "te-fp8", "float8_e4m3fn", None, "bfloat16"),
        ("mxfp8_96x160", "te-mxfp8", "float8_e4m3fn", [1, 32], "bfloat16"),
        ("block128x128_pow2", "te-fp8-block", "float8_e4m3fn", [128, 128], "float32"),
        ("nvfp4_2d_weight", "te-nvfp4", "float4_e2m1fn", [16, 16], "bfloat16"),
    ],
)
def test_inspect_says_what_an_object_is(
    name: str, format_: str, number: str, block: Any, dtype: str
) -> None:
    (told,) = migrate.inspect(GENUINE / f"{name}.pt").to_json()["objects"]
    assert (told["key"], told["format"], told["number"], told["block"], told["dtype"]) == (
        "weight",
        format_,
        number,
        block,
        dtype,
    )
    assert told["readings"] == {}
    assert told["roles"]["scale"].endswith("_scale_inv")


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def f32(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


SIZE = torch.Size((32, 64))
BOTH8 = (byte(32, 64), byte(128, 4), byte(32, 64), byte(4, 128))
BLOCK = (byte(32, 64), f32(1, 4), byte(64, 32), f32(1, 4))
FP4 = (byte(32, 32), byte(128, 4), byte(64, 16), byte(128, 4), f32(1), f32(1))


def arguments_of(cls: str, count: int, code: Any, te: dict[str, ModuleType]) -> tuple[Any, ...]:
    """What a release passes to the reconstructor, by the number of arguments."""
    quantizers = {
        "MXFP8Tensor": "mxfp8_tensor",
        "Float8BlockwiseQTensor": "float8_blockwise_tensor",
        "NVFP4Tensor": "nvfp4_tensor",
    }
    quantizer = None
    if cls in quantizers:
        name = {
            "MXFP8Tensor": "MXFP8Quantizer",
            "Float8BlockwiseQTensor": "Float8BlockQuantizer",
            "NVFP4Tensor": "NVFP4Quantizer",
        }[cls]
        quantizer = getattr(te[quantizers[cls]], name)(rowwise_usage=True, dtype=code)
    every = {
        "Float8Tensor": (byte(32, 64), code, f32(1), torch.bfloat16, SIZE, byte(64, 32)),
        "MXFP8Tensor": (*BOTH8, code, torch.bfloat16, SIZE, quantizer, False),
        "Float8BlockwiseQTensor": (
            SIZE,
            *BLOCK,
            code,
            torch.bfloat16,
            quantizer,
            True,
            te["transformer_engine_torch"].Float8BlockScaleTensorFormat(0),
        ),
        "NVFP4Tensor": (SIZE, *FP4, code, torch.bfloat16, quantizer, False, False, True, 256),
    }[cls]
    return every[:count]


FORMS = [("Float8Tensor", n) for n in (4, 5, 6)] + [("MXFP8Tensor", n) for n in (6, 7, 8, 9)]
FORMS += [("Float8BlockwiseQTensor", n) for n in (9, 10)] + [
    ("NVFP4Tensor", n) for n in (10, 11, 14)
]


def reconstructor(te: dict[str, ModuleType], cls: str, way: str) -> Any:
    module, function = FUNCTIONS[cls]
    if way == "function":
        return getattr(te[module], function)
    return getattr(
        te["old_float8_tensor"] if way == "oldest" else te[module], cls
    )._make_in_reduce_ex


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("way", ["function", "method"])
@pytest.mark.parametrize(("cls", "count"), FORMS)
def test_every_form_of_every_release_is_read_and_written_again(
    cls: str, count: int, way: str, protocol: int, te: Any
) -> None:
    code = te["constants"].DType(10 if cls == "NVFP4Tensor" else 7)
    made = Made(reconstructor(te, cls, way), arguments_of(cls, count, code, te))
    found = tree({"w": made}, protocol).get("w")
    assert type(found) is Composite
    assert (found.encoding.shape, found.encoding.dtype) == ((32, 64), "bfloat16")
    assert {name: record.shape for name, record in found.components} == {
        name: tuple(part.shape)
        for name, part in zip(
            NAMES[cls], [a for a in made.arguments if type(a) is torch.Tensor], strict=False
        )
    }
    # its node, written again, is read as the same
    data, records = saved({"w": made}, protocol)
    nodes = machine.read_pickle(data, ARCHIVE, name="x", persistent=True)
    again = machine.read_pickle(emit.emit(nodes, name="x"), ARCHIVE, name="x", persistent=True)
    other = policy.decode(again, "x", records).tree.get("w")
    assert other.encoding == found.encoding


NAMES = {
    "Float8Tensor": ("_data", "_scale_inv", "_transpose"),
    "MXFP8Tensor": ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data",
    "_columnwise_scale_inv"),
    "Float8BlockwiseQTensor": ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data",
    "_columnwise_scale_inv"),
    "NVFP4Tensor": (
        "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv",
        "_amax_rowwise", "_amax_columnwise",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "count", "way", "enum", "code", "number"),
    [
        # the form of the call tells the numbering
        ("Float8Tensor", 4, "oldest", "transformer_engine_extensions", 6, "float8_e4m3fn"),
        ("Float8Tensor", 4, "method", "transformer_engine_torch", 7, "float8_e5m2"),
        ("MXFP8Tensor", 6, "method", "transformer_engine_torch", 7, "float8_e5m2"),
        ("MXFP8Tensor", 8, "method", "transformer_engine_torch", 7, "float8_e4m3fn"),
        ("Float8BlockwiseQTensor", 10, "method", "transformer_engine_torch", 7, "float8_e4m3fn"),
        ("Float8Tensor", 5, "function", "transformer_engine_torch", 7, "float8_e4m3fn"),
        ("Float8Tensor", 5, "function", "constants", 8, "float8_e5m2"),
        # the integer does
        ("Float8Tensor", 5, "method", "transformer_engine_torch", 6, "float8_e4m3fn"),
        ("Float8Tensor", 5, "method", "transformer_engine_torch", 8, "float8_e5m2"),
        ("MXFP8Tensor", 7, "method", "transformer_engine_torch", 8, "float8_e5m2"),
        # nothing does
        ("Float8Tensor", 5, "method", "transformer_engine_torch", 7, None),
        ("MXFP8Tensor", 7, "method", "transformer_engine_torch", 7, None),
        ("Float8BlockwiseQTensor", 9, "method", "transformer_engine_torch", 7, None),
    ],
)
def test_the_integer_of_a_dtype_is_read_as_its_release_meant_it(
    cls: str, count: int, way: str, enum: str, code: int, number: str | None, te: Any
) -> None:
    made = Made(reconstructor(te, cls, way), arguments_of(cls, count, te[enum].DType(code), te))
    found = tree({"w": made}).get("w").encoding
    assert (found.number, found.code) == (number, code)
    if number is None:
        assert found.readings == {"0.8": "float8_e5m2", "2.4": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: byte(32, 63)}, "whose _rowwise_data is uint8 [32, 63]"),
        ({0: f32(32, 64)}, "whose _rowwise_data is float32"),
        ({1: byte(31, 4)}, "whose _rowwise_scale_inv is uint8 [31, 4]"),
        ({1: byte(128, 1)}, "whose _rowwise_scale_inv"),
        ({0: None, 2: None}, "without data"),
        ({1: None, 3: None}, "without scales"),
        ({4: 7}, "without the integer of its dtype"),
        ({5: 7}, "stands for no dtype"),
        ({6: "x"}, "whose shape is none"),
        ({0: "x"}, "whose components are not tensors"),
        ({8: []}, "is not a scalar"),
    ],
)
def test_parts_that_do_not_fit_are_a_contradiction(
    change: dict[int, Any], message: str, te: Any
) -> None:
    arguments = list(arguments_of("MXFP8Tensor", 9, te["constants"].DType(7), te))
    for at, value in change.items():
        arguments[at] = value
    with pytest.raises(CheckpointError, match="w: a ") as caught:
        decoded({"w": Made(reconstructor(te, "MXFP8Tensor", "function"), tuple(arguments))})
    assert [d.code for d in caught.value.diagnostics] == ["M936"]
    assert message in str(caught.value)


@pytest.mark.parametrize("code", [0, 5, 6, 9, 10, -1])
def test_an_integer_that_is_no_dtype_of_quantized_numbers_is_a_contradiction(
    code: int, te: Any
) -> None:
    made = Made(
        reconstructor(te, "MXFP8Tensor", "function"),
        arguments_of("MXFP8Tensor", 9, te["constants"].DType(code), te),
    )
    with pytest.raises(CheckpointError, match="M936"):
        decoded({"w": made})


def test_one_tensor_in_two_places_of_an_object_is_a_contradiction(te: Any) -> None:
    arguments = list(mxfp8(te, 0).arguments)
    arguments[2] = arguments[0]
    with pytest.raises(CheckpointError, match="one tensor in two places"):
        decoded({"w": Made(mxfp8(te, 0).function, tuple(arguments))})


def test_other_numbers_of_arguments_and_other_methods_stay_outside(te: Any) -> None:
    full = mxfp8(te, 0)
    found = decoded({"w": Made(full.function, full.arguments[:5])})
    assert type(found.tree.get("w")) is Opaque
    assert "5 arguments" in found.outside[0].reason


def test_a_class_is_asked_for_no_other_method() -> None:
    stream = b"\x80\x04\x8c\x08builtins\x94\x8c\x07getattr\x94\x93\x8c\x02os\x94\x8c\x01x\x94\x93\x8c\x06system\x94\x86R)R."  # noqa: E501
    with pytest.raises(CheckpointError, match="M931"):
        machine.read_pickle(stream, ARCHIVE, name="x")


def test_a_method_of_any_other_class_is_a_name_outside_of_the_list() -> None:
    stream = b"\x80\x04\x8c\x08builtins\x94\x8c\x07getattr\x94\x93\x8c\x02os\x94\x8c\x01x\x94\x93\x8c\x12_make_in_reduce_ex\x94\x86R)R."  # noqa: E501
    found = policy.decode(machine.read_pickle(stream, ARCHIVE, name="x"), "x")
    assert [o.name for o in found.outside] == ["os.x._make_in_reduce_ex"]


def test_the_dotted_name_cannot_be_spelled_in_a_stream() -> None:
    stream = b"\x80\x02ctransformer_engine.pytorch.tensor.mxfp8_tensor\nMXFP8Tensor._make_in_reduce_ex\n)R."  # noqa: E501
    with pytest.raises(CheckpointError, match="M931"):
        machine.read_pickle(stream, ARCHIVE, name="x")
