"""What each dtype holds; numbers as the elements that a checkpoint stores, and back: with integers
and `struct` alone, so that a test of a rule needs neither numpy nor torch.

A code is the element's bits as an unsigned integer. 16-, 32- and 64-bit IEEE floats are rounded to
the nearest, as any parser of decimals does; every other dtype must hold a number exactly, because
there the nearest is rarely what was meant. Sources of the small floats: OCP OFP8 and MX v1.0,
torch/headeronly/util/Float8_*.h.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import copysign, inf, isfinite, isinf, isnan, nan
from typing import NamedTuple, TypeAlias

from ..core.spec import BITS, unit


class Float(NamedTuple):
    """`special`: "ieee" has infinities and NaNs, "fn" one NaN a sign, "fnuz" one NaN and no -0,
    "scale" is E8M0, "finite" has none.
    """

    exponent: int
    mantissa: int
    bias: int
    special: str

    @property
    def top(self) -> int:
        """The code of the largest finite number."""
        codes = 1 << (self.exponent + self.mantissa)
        return codes - 1 - {"ieee": 1 << self.mantissa, "fn": 1, "scale": 1}.get(self.special, 0)

    @property
    def largest(self) -> float:
        exponent, mantissa = divmod(self.top, 1 << self.mantissa)
        return float((1 + mantissa / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias))

    @property
    def quantum(self) -> float:
        """The smallest number above zero."""
        return float(
            2.0 ** (-self.bias if self.special == "scale" else 1 - self.bias - self.mantissa)
        )


FLOATS = {
    "float64": Float(11, 52, 1023, "ieee"), "float32": Float(8, 23, 127, "ieee"),
    "bfloat16": Float(8, 7, 127, "ieee"),
    "float16": Float(5, 10, 15, "ieee"), "float8_e5m2": Float(5, 2, 15, "ieee"),
    "float8_e4m3fn": Float(4, 3, 7, "fn"),
    "float8_e5m2fnuz": Float(5, 2, 16, "fnuz"), "float8_e4m3fnuz": Float(4, 3, 8, "fnuz"),
    "float8_e8m0fnu": Float(8, 0, 127, "scale"),
    "float6_e2m3fn": Float(2, 3, 1, "finite"), "float6_e3m2fn": Float(3, 2, 3, "finite"),
    "float4_e2m1fn": Float(2, 1, 1, "finite"),
}  # fmt: skip
INTEGERS = {
    "bool": (0, 1),
    **{f"int{n}": (-(1 << (n - 1)), (1 << (n - 1)) - 1) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (0, (1 << n) - 1) for n in (8, 16, 32, 64)},
}
# the parts of a complex number
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

_NAN = {
    "bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000, "float64": 0x7FF8 << 48,
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F,
    "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80, "float8_e8m0fnu": 0xFF,
}  # fmt: skip
_INF = {"bfloat16": 0x7F80, "float8_e5m2": 0x7C}
_STRUCT = {
    "bool": "<?", "uint8": "<B", "int8": "<b", "uint16": "<H", "int16": "<h", "uint32": "<I",
    "int32": "<i", "uint64": "<Q",
    "int64": "<q", "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip
_ROUNDED = ("float16", "float32", "float64")

Number: TypeAlias = "float | int | bool | complex"


def encode(dtype: str, value: float) -> bytes:
    """The bytes of one `unit` of `dtype`, each element exactly `value`; ValueError if it cannot be.

    Little endian. Source of the small floats: OCP OFP8 and OCP MX v1.0.
    """
    elements, size = unit(dtype)
    if dtype in _STRUCT:
        if dtype not in _ROUNDED:
            if not isfinite(value) or value != int(value):
                raise ValueError(f"{dtype} cannot hold {value}")
            value = int(value)
        if dtype == "bool" and value not in (0, 1):
            raise ValueError(f"bool cannot hold {value}")
        try:
            raw = struct.pack(_STRUCT[dtype], value)
        except (struct.error, OverflowError):
            raise ValueError(f"{dtype} cannot hold {value}") from None
        if struct.unpack(_STRUCT[dtype], raw)[0] != value:
            raise ValueError(f"{dtype} cannot hold {value} exactly")
        return raw
    if dtype.startswith("complex"):
        half = PARTS[dtype]
        return encode(half, value) + encode(half, 0)
    if dtype == "float8_e8m0fnu":
        for code in range(255):
            if 2.0 ** (code - 127) == value:
                return bytes([code])
        raise ValueError(f"{dtype} holds only powers of two, not {value}")
    code = _minifloat_code(dtype, float(value))
    if elements == 1:
        return code.to_bytes(size, "little")
    packed = sum(code << (BITS[dtype] * i) for i in range(elements))
    return packed.to_bytes(size, "little")


def _minifloat_code(dtype: str, value: float) -> int:
    exponent_bits, mantissa_bits, bias, _ = FLOATS[dtype]
    if value == 0:
        negative = copysign(1, value) < 0
        if negative and dtype.endswith("fnuz"):
            raise ValueError(f"{dtype} has no negative zero")
        return int(negative) << (exponent_bits + mantissa_bits)
    magnitude, sign = abs(value), int(value < 0)
    for exponent in range(2**exponent_bits):
        scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        mantissa = magnitude / scale - (2**mantissa_bits if exponent else 0)
        if mantissa == int(mantissa) and 0 <= mantissa < 2**mantissa_bits:
            code = (exponent << mantissa_bits) | int(mantissa)
            special = dtype in ("bfloat16", "float8_e5m2") and exponent == 2**exponent_bits - 1
            if special or (dtype == "float8_e4m3fn" and code == 0x7F):
                break
            return (sign << (exponent_bits + mantissa_bits)) | code
    raise ValueError(f"{dtype} cannot hold {value} exactly")


def element_code(dtype: str, value: float) -> int:
    """The code of `value`; ValueError, which names both, where the dtype cannot hold it."""
    if isnan(value):
        if dtype not in _NAN:
            raise ValueError(f"{dtype} has no NaN")
        return _NAN[dtype]
    if isinf(value) and dtype in _INF:
        return _INF[dtype] | (value < 0) << (BITS[dtype] - 1)
    if dtype in _ROUNDED:
        try:
            return int.from_bytes(struct.pack(_STRUCT[dtype], value), "little")
        except OverflowError:
            raise ValueError(f"{dtype} cannot hold {value}") from None
    if dtype == "bfloat16":
        return _top_half(value)
    try:
        raw = encode(dtype, value)
    except OverflowError:
        raise ValueError(f"{dtype} cannot hold {value}") from None
    return int.from_bytes(raw, "little") & ((1 << BITS[dtype]) - 1)


def _top_half(value: float) -> int:
    """The bfloat16 that equals `value`: a float32 whose lower half is zero."""
    try:
        raw = struct.pack("<f", value)
    except OverflowError:
        raw = b"\1"
    if raw[:2] != b"\0\0" or struct.unpack("<f", raw)[0] != value:
        raise ValueError(f"bfloat16 cannot hold {value} exactly")
    return int.from_bytes(raw[2:], "little")


def pack_codes(dtype: str, codes: Iterable[int]) -> bytes:
    """The packed bytes of the codes; below a byte the first element lies in the low bits."""
    bits = BITS[dtype]
    if bits >= 8:
        return b"".join(c.to_bytes(bits // 8, "little") for c in codes)
    whole = count = 0
    for count, c in enumerate(codes, 1):
        whole |= c << (bits * (count - 1))
    return whole.to_bytes((count * bits + 7) // 8, "little")


def code_at(dtype: str, packed: bytes | memoryview, index: int) -> int:
    """The code of element `index` of packed bytes."""
    bits = BITS[dtype]
    if bits >= 8:
        size = bits // 8
        return int.from_bytes(packed[index * size : (index + 1) * size], "little")
    start = index * bits
    near = int.from_bytes(packed[start // 8 : (start + bits + 7) // 8], "little")
    return (near >> (start % 8)) & ((1 << bits) - 1)


def number_of(dtype: str, code: int) -> Number:
    """The number that a code stands for."""
    bits = BITS[dtype]
    if dtype == "bool":
        return bool(code) if code < 2 else code
    if dtype in INTEGERS:
        return code - (1 << bits) if dtype[0] == "i" and code >> (bits - 1) else code
    if dtype.startswith("complex"):
        half = PARTS[dtype]
        low = (1 << bits // 2) - 1
        return complex(
            float(number_of(half, code & low).real), float(number_of(half, code >> bits // 2).real)
        )
    if dtype == "float8_e8m0fnu":
        return nan if code == 0xFF else 2.0 ** (code - 127)
    if dtype in ("float32", "float64"):
        return float(struct.unpack(_STRUCT[dtype], code.to_bytes(bits // 8, "little"))[0])
    return _small(dtype, code)


def is_close(got: Number, wish: Number, rtol: float | None) -> bool:
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
    exponent_bits, mantissa_bits, bias, _ = FLOATS[dtype]
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
