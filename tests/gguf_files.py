"""GGUF files made byte by byte: from the description of the format alone, so that a test can write
what no library would.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ALIGNMENT = 32
# number of the type of a value, and how one is packed
SCALARS = {
    "u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"),
    "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"),
    "f64": (12, "d"),
}  # fmt: skip
TEXT, ARRAY = 8, 9
F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, IQ4_XS, BF16 = 0, 1, 2, 8, 12, 14, 23, 30


class Tensor(NamedTuple):
    """A tensor: ggml's lengths (the shortest step first), its type, its bytes, and where it claims
    to lie if that is not behind the one before.
    """

    lengths: Sequence[int]
    type: int
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, found: Any) -> bytes:
    """A value with its type: of a scalar kind, `str`, or `[kind]` for an array."""
    if kind == "str":
        return struct.pack("<I", TEXT) + text(found)
    if kind == "[str]":
        return struct.pack("<IIQ", ARRAY, TEXT, len(found)) + b"".join(map(text, found))
    if kind.startswith("["):
        number, form = SCALARS[kind[1:-1]]
        packed = struct.pack(f"<{len(found)}{form}", *found)
        return struct.pack("<IIQ", ARRAY, number, len(found)) + packed
    number, form = SCALARS[kind]
    return struct.pack(f"<I{form}", number, found)


def gguf(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (),
    values: Mapping[str, bytes] | Iterable[tuple[str, bytes]] = (),
    *,
    version: int = 3,
    order: str = "<",
    alignment: int = ALIGNMENT,
    counts: tuple[int, int] | None = None,
    behind: bytes = b"",
) -> bytes:
    """The bytes of a file; `counts` are those that it claims of tensors and key-values."""
    tensors = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    values = list(values.items() if isinstance(values, Mapping) else values)
    said = counts or (len(tensors), len(values))
    head = [b"GGUF", struct.pack(f"{order}I", version), struct.pack(f"{order}QQ", *said)]
    head += [text(key) + found for key, found in values]
    at, data = 0, []
    for name, tensor in tensors:
        offset = at if tensor.offset is None else tensor.offset
        head.append(text(name) + struct.pack("<I", len(tensor.lengths)))
        head.append(struct.pack(f"<{len(tensor.lengths)}Q", *tensor.lengths))
        head.append(struct.pack("<IQ", tensor.type, offset))
        data.append(padded(tensor.data, alignment))
        at += len(data[-1])
    header = b"".join(head)
    return padded(header, alignment) + b"".join(data) + behind if tensors else header + behind


def padded(data: bytes, alignment: int = ALIGNMENT) -> bytes:
    return data + bytes(-len(data) % alignment)


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def bfloat16(count: int) -> Tensor:
    """A vector of the numbers 0, 1, 2 … as their upper halves."""
    raw = b"".join(struct.pack("<f", n)[2:] for n in range(count))
    return Tensor((count,), BF16, raw)
