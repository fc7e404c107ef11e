"""Specs and the bytes of single elements, against torch."""

import math

import pytest
import torch

from migrate.core.spec import BITS, Spec, spec, unit
from migrate.elements.codes import encode

TORCH = [name for name in BITS if hasattr(torch, name)]


def test_equal_specs_made_by_spec_are_one_object():
    assert spec("float32", (2, 3)) is spec("float32", (2, 3))
    assert spec("float32", (2, 3)) == Spec("float32", (2, 3))


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("bfloat16", (3, 5), 30),
        ("float4_e2m1fn", (3, 3), 5),
        ("float6_e2m3fn", (4,), 3),
        ("int64", (), 8),
    ],
)
def test_bytes_are_packed_and_rounded_up(dtype, shape, nbytes):
    assert Spec(dtype, shape).nbytes == nbytes


@pytest.mark.parametrize(
    "dtype",
    [
        n
        for n in TORCH
        if n not in ("float8_e8m0fnu", "complex32", "bool") and not n.startswith("uint")
    ],
)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -1.5, 448.0])
def test_an_element_is_encoded_as_torch_does_or_refused(dtype, value):
    kind = getattr(torch, dtype)
    made = torch.tensor(value, dtype=torch.float64).to(kind)
    back = made.to(torch.complex128).real if dtype.startswith("complex") else made.to(torch.float64)
    exact = back.item() == value
    if dtype.endswith("fnuz") and math.copysign(1, value) < 0 and value == 0:
        exact = False
    if not exact:
        with pytest.raises(ValueError, match=dtype):
            encode(dtype, value)
        return
    assert encode(dtype, value) == made.reshape(1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 256),
        ("uint8", -1),
        ("int8", 0.5),
        ("bool", 2),
        ("int32", math.inf),
        ("bfloat16", 1.001),
        ("float8_e4m3fn", 480.0),
    ],
)
def test_what_a_dtype_cannot_hold_is_refused(dtype, value):
    with pytest.raises(ValueError, match=dtype):
        encode(dtype, value)


def test_elements_below_a_byte_fill_their_unit():
    assert unit("float4_e2m1fn") == (2, 1)
    assert unit("float6_e3m2fn") == (4, 3)
    assert encode("float4_e2m1fn", 6.0) == b"\x77"  # code 0111 twice
    assert encode("float6_e2m3fn", 7.5) == bytes([0xDF, 0xF7, 0x7D])  # code 011111 four times
    assert encode("float8_e8m0fnu", 1.0) == b"\x7f"
