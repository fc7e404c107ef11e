"""What one tensor is, without torch: dtype, shape, bytes.

A dtype is torch's name as a string. Sub-byte dtypes carry their *logical* shape, as safetensors
writes it: a torch `float4_e2m1fn_x2` of shape [4, 8] is here `float4_e2m1fn` of shape [4, 16]. The
6-bit floats have no torch dtype and are named after their safetensors names.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import copysign, isfinite, prod

# name -> bits per element
BITS: dict[str, int] = {
    "bool": 8, "uint8": 8, "int8": 8, "uint16": 16, "int16": 16, "uint32": 32, "int32": 32,
    "uint64": 64, "int64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64,
    "complex128": 128,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3fn": 6, "float6_e3m2fn": 6, "float4_e2m1fn": 4,
}  # fmt: skip

# Spellings that people write for a name above.
ALIASES = {
    "float4_e2m1fn_x2": "float4_e2m1fn",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "long": "int64",
}

# (exponent bits, mantissa bits, bias, has infinities) of the floats that struct cannot write;
# source: OCP OFP8 and MX specifications, torch/headeronly/util/Float8_*.h
_MINIFLOATS = {
    "bfloat16": (8, 7, 127), "float8_e4m3fn": (4, 3, 7), "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16), "float6_e2m3fn": (2, 3, 1), "float6_e3m2fn": (3, 2, 3),
    "float4_e2m1fn": (2, 1, 1),
}  # fmt: skip
_STRUCT = {
    "bool": "<?", "uint8": "<B", "int8": "<b", "uint16": "<H", "int16": "<h", "uint32": "<I",
    "int32": "<i", "uint64": "<Q",
    "int64": "<q", "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """dtype (torch's name) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, packed row-major; sub-byte dtypes round up to whole bytes."""
        return (prod(self.shape) * BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def total_bytes(specs: Iterable[Spec]) -> int:
    """The bytes of all these tensors. Few specs stand for many tensors, so each is computed
    once.
    """
    held = list(specs)
    counts = Counter(map(id, held))
    return sum(counts[number] * found.nbytes for number, found in {id(s): s for s in held}.items())


@lru_cache(maxsize=65536)
def spec(dtype: str, shape: tuple[int, ...]) -> Spec:
    """The one Spec object of these values: equal specs made here are identical, so `is` and `id`
    compare them.
    """
    return Spec(dtype, shape)


def unit(dtype: str) -> tuple[int, int]:
    """(elements, bytes) of the smallest whole-byte group: (1, itemsize), (2, 1) for 4 bits, (4, 3)
    for 6 bits.
    """
    bits = BITS[dtype]
    return (1, bits // 8) if bits % 8 == 0 else (2, 1) if bits == 4 else (4, 3)


def coordinates(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index along each axis of element number `index`, in row-major order; () of a scalar."""
    out: list[int] = []
    for length in reversed(shape[1:]):
        index, here = divmod(index, length)
        out.append(here)
    return (index, *reversed(out)) if shape else ()


def encode(dtype: str, value: float) -> bytes:
    """The bytes of one `unit` of `dtype` whose elements all equal `value` exactly; ValueError if it
    cannot hold it.

    Little endian. Source of the small floats: OCP OFP8 and OCP MX v1.0.
    """
    elements, size = unit(dtype)
    if dtype in _STRUCT:
        if dtype not in ("float16", "float32", "float64"):
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
        half = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}[dtype]
        return encode(half, value) + encode(half, 0)
    if dtype == "float8_e8m0fnu":
        for code in range(255):
            if 2.0 ** (code - 127) == value:
                return bytes([code])
        raise ValueError(f"{dtype} holds powers of two only, not {value}")
    code = _minifloat_code(dtype, float(value))
    if elements == 1:
        return code.to_bytes(size, "little")
    packed = sum(code << (BITS[dtype] * i) for i in range(elements))
    return packed.to_bytes(size, "little")


def _minifloat_code(dtype: str, value: float) -> int:
    exponent_bits, mantissa_bits, bias = _MINIFLOATS[dtype]
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
