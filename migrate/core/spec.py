"""What one tensor is, without torch: dtype, shape, bytes.

A dtype is torch's name as a string. Sub-byte dtypes carry their *logical* shape, as safetensors
writes it: a torch `float4_e2m1fn_x2` of shape [4, 8] is here `float4_e2m1fn` of shape [4, 16]. The
6-bit floats have no torch dtype and are named after their safetensors names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

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

# torch holds two elements of float4_e2m1fn in one of this dtype
PACKED = "float4_e2m1fn_x2"

# Spellings that people write for a name above.
ALIASES = {
    PACKED: "float4_e2m1fn",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "long": "int64",
}


@dataclass(frozen=True, slots=True)
class Spec:
    """The dtype, by torch's name, and the shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, packed row-major; sub-byte dtypes round up to whole bytes."""
        return (prod(self.shape) * BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def total_bytes(specs: Iterable[Spec]) -> int:
    """The bytes of all these tensors. Few specs stand for many, so each is computed once."""
    held = list(specs)
    counts = Counter(map(id, held))
    return sum(counts[number] * found.nbytes for number, found in {id(s): s for s in held}.items())


@lru_cache(maxsize=65536)
def spec(dtype: str, shape: tuple[int, ...]) -> Spec:
    """The one Spec of these values: equal ones made here are identical, for `is` and `id`."""
    return Spec(dtype, shape)


def unit(dtype: str) -> tuple[int, int]:
    """(elements, bytes) of the smallest whole-byte group: (1, itemsize), (2, 1) or (4, 3)."""
    bits = BITS[dtype]
    return (1, bits // 8) if bits % 8 == 0 else (2, 1) if bits == 4 else (4, 3)


def coordinates(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index along each axis of element number `index`, in row-major order; () of a scalar."""
    out: list[int] = []
    for length in reversed(shape[1:]):
        index, here = divmod(index, length)
        out.append(here)
    return (index, *reversed(out)) if shape else ()
