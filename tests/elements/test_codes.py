"""Numbers as stored elements, against torch, and against every code of the small dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from migrate.core.spec import BITS
from migrate.elements.codes import code_at, element_code, number_of, pack_codes

IN_TORCH = [
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
SMALL = ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"]


@pytest.mark.parametrize("dtype", IN_TORCH)
def test_every_code_stands_for_the_number_that_torch_reads(dtype: str) -> None:
    bits = BITS[dtype]
    codes = torch.arange(1 << bits, dtype=torch.int32).to(
        torch.uint16 if bits == 16 else torch.uint8
    )
    numbers = codes.view(getattr(torch, dtype)).to(torch.float64).tolist()
    for code, number in enumerate(numbers):
        mine = float(number_of(dtype, code))
        assert mine == number or (math.isnan(mine) and math.isnan(number)), code
        assert math.copysign(1, mine) == math.copysign(1, number) or math.isnan(number), code


@pytest.mark.parametrize("dtype", [*IN_TORCH, *SMALL, "uint8", "int8", "uint16", "int16"])
def test_a_number_goes_back_to_its_code(dtype: str) -> None:
    for code in range(1 << BITS[dtype]):
        number = number_of(dtype, code)
        if isinstance(number, float) and math.isnan(number):
            assert math.isnan(float(number_of(dtype, element_code(dtype, math.nan))))
        else:
            assert element_code(dtype, number) == code


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "number", [0.1, -1 / 3, 1e-30, 6.1e-5, 1e-8, 2049, math.inf, -math.inf, -0.0]
)
def test_ieee_floats_are_rounded_as_torch_rounds(dtype: str, number: float) -> None:
    code = element_code(dtype, number)
    assert code == int.from_bytes(
        torch.tensor([number], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes(),
        "little",
    )


@pytest.mark.parametrize(
    ("dtype", "number"),
    [("bfloat16", 257), ("bfloat16", 0.1), ("int8", 128), ("uint8", -1), ("int64", 0.5),
    ("bool", 2), ("float8_e4m3fn", 449),
     ("float4_e2m1fn", 5), ("float8_e8m0fnu", 3), ("int32", math.nan), ("float8_e4m3fn", math.inf),
     ("float16", 1e6)],
)  # fmt: skip
def test_what_a_dtype_cannot_hold_is_refused_by_its_name(dtype: str, number: float) -> None:
    with pytest.raises(ValueError, match=dtype):
        element_code(dtype, number)


@pytest.mark.parametrize(
    ("dtype", "count"), [("float4_e2m1fn", 5), ("float6_e2m3fn", 7), ("int16", 4), ("complex64", 2)]
)
def test_packed_elements_are_found_again(dtype: str, count: int) -> None:
    codes = [n * 5 % (1 << min(BITS[dtype], 6)) for n in range(count)]
    packed = pack_codes(dtype, codes)
    assert len(packed) == (count * BITS[dtype] + 7) // 8
    assert [code_at(dtype, packed, n) for n in range(count)] == codes


def test_the_first_of_two_small_elements_lies_in_the_low_bits() -> None:
    assert pack_codes("float4_e2m1fn", [1, 2]) == b"\x21"


def test_complex_numbers_have_two_halves() -> None:
    assert number_of("complex64", element_code("complex64", 2.5)) == 2.5 + 0j
