"""Numbers as the elements that a checkpoint stores, and back: with integers and `struct` alone, so
that a test of a rule needs no torch.

A code is the element's bits as an unsigned integer. 16-, 32- and 64-bit IEEE floats are rounded to
the nearest, as any parser of decimals does; every other dtype must hold a number exactly, because
there the nearest is rarely what was meant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import inf, isfinite, isinf, isnan, nan
from typing import TypeAlias

from .spec import BITS, encode

Number: TypeAlias = "float | int | bool | complex"

_ROUNDED = {"float16": "<e", "float32": "<f", "float64": "<d"}
_INTEGERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"}
# (exponent bits, mantissa bits, bias); source: OCP OFP8 and MX specifications
_FLOATS = {
    "bfloat16": (8, 7, 127), "float16": (5, 10, 15), "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15), "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16), "float6_e2m3fn": (2, 3, 1), "float6_e3m2fn": (3, 2, 3),
    "float4_e2m1fn": (2, 1, 1),
}  # fmt: skip
_NAN = {
    "bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float64": 0x7FF8 << 48,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F,
    "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF,
}  # fmt: skip
_INF = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C}


def code(dtype: str, value: float) -> int:
    """The code of `value`; ValueError, which names both, where the dtype cannot hold it."""
    if isnan(value):
        if dtype not in _NAN:
            raise ValueError(f"{dtype} has no NaN")
        return _NAN[dtype]
    if isinf(value) and dtype in _INF:
        return _INF[dtype] | (value < 0) << (BITS[dtype] - 1)
    if dtype in _ROUNDED:
        try:
            return int.from_bytes(struct.pack(_ROUNDED[dtype], value), "little")
        except OverflowError:
            raise ValueError(f"{dtype} cannot hold {value}") from None
    if dtype == "bfloat16":
        return _top_half(value)
    try:
        unit = encode(dtype, value)
    except OverflowError:
        raise ValueError(f"{dtype} cannot hold {value}") from None
    return int.from_bytes(unit, "little") & ((1 << BITS[dtype]) - 1)


def _top_half(value: float) -> int:
    """The bfloat16 that equals `value`: a float32 whose lower half is zero."""
    try:
        raw = struct.pack("<f", value)
    except OverflowError:
        raw = b"\1"
    if raw[:2] != b"\0\0" or struct.unpack("<f", raw)[0] != value:
        raise ValueError(f"bfloat16 cannot hold {value} exactly")
    return int.from_bytes(raw[2:], "little")


def pack(dtype: str, codes: Iterable[int]) -> bytes:
    """The packed bytes of the codes; below a byte the first element lies in the low bits."""
    bits = BITS[dtype]
    if bits >= 8:
        return b"".join(c.to_bytes(bits // 8, "little") for c in codes)
    whole = count = 0
    for count, c in enumerate(codes, 1):
        whole |= c << (bits * (count - 1))
    return whole.to_bytes((count * bits + 7) // 8, "little")


def at(dtype: str, packed: bytes | memoryview, index: int) -> int:
    """The code of element `index` of packed bytes."""
    bits = BITS[dtype]
    if bits >= 8:
        size = bits // 8
        return int.from_bytes(packed[index * size : (index + 1) * size], "little")
    start = index * bits
    near = int.from_bytes(packed[start // 8 : (start + bits + 7) // 8], "little")
    return (near >> (start % 8)) & ((1 << bits) - 1)


def value(dtype: str, code: int) -> Number:
    """The number that a code stands for."""
    bits = BITS[dtype]
    if dtype == "bool":
        return bool(code) if code < 2 else code
    if dtype in _INTEGERS:
        return code - (1 << bits) if dtype[0] == "i" and code >> (bits - 1) else code
    if dtype.startswith("complex"):
        half = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}[dtype]
        low = (1 << bits // 2) - 1
        return complex(
            float(value(half, code & low).real), float(value(half, code >> bits // 2).real)
        )
    if dtype == "float8_e8m0fnu":
        return nan if code == 0xFF else 2.0 ** (code - 127)
    if dtype in ("float32", "float64"):
        return float(struct.unpack(_ROUNDED[dtype], code.to_bytes(bits // 8, "little"))[0])
    return _small(dtype, code)


def close(got: Number, wish: Number, rtol: float | None) -> bool:
    """Whether a test that asks for `wish` within the relative tolerance takes `got`, where their
    bits differ; any NaN is a NaN.
    """
    if isinstance(got, complex) or isinstance(wish, complex):
        return False
    if isnan(got) or isnan(wish):
        return isnan(got) and isnan(wish)
    # near infinity is everything, and so it is with an infinite tolerance
    return (
        rtol is not None
        and isfinite(got)
        and isfinite(rtol * abs(wish))
        and abs(got - wish) <= rtol * abs(wish)
    )


def _small(dtype: str, code: int) -> float:
    exponent_bits, mantissa_bits, bias = _FLOATS[dtype]
    negative = code >> (exponent_bits + mantissa_bits)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    full = exponent == (1 << exponent_bits) - 1
    if (dtype.endswith("fnuz") and code == 0x80) or (
        dtype == "float8_e4m3fn" and code & 0x7F == 0x7F
    ):
        return nan
    if full and dtype in ("bfloat16", "float16", "float8_e5m2"):
        return nan if mantissa else (-inf if negative else inf)
    scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    magnitude = (mantissa + ((1 << mantissa_bits) if exponent else 0)) * scale
    return -magnitude if negative else magnitude
