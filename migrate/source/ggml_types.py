"""The types of tensors in GGUF files: their numbers, names and sizes.

From `ggml_type` in ggml.h and the sizes of its blocks; numbers that are not here were never
released or are withdrawn. A type of one element a block is a plain dtype, any other is a block of
codes and scales.
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """A type: its number in files, its name, and how many elements so many bytes hold. `dtype` is
    torch's name of a plain one.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: str | None = None


_PLAIN = (
    (0, "f32", "float32", 4), (1, "f16", "float16", 2), (24, "i8", "int8", 1),
    (25, "i16", "int16", 2), (26, "i32", "int32", 4), (27, "i64", "int64", 8),
    (28, "f64", "float64", 8), (30, "bf16", "bfloat16", 2),
)  # fmt: skip
_BLOCKS = (
    (2, "q4_0", 32, 18), (3, "q4_1", 32, 20), (6, "q5_0", 32, 22), (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34), (9, "q8_1", 32, 40), (10, "q2_k", 256, 84), (11, "q3_k", 256, 110),
    (12, "q4_k", 256, 144), (13, "q5_k", 256, 176), (14, "q6_k", 256, 210), (15, "q8_k", 256, 292),
    (16, "iq2_xxs", 256, 66), (17, "iq2_xs", 256, 74), (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50), (20, "iq4_nl", 32, 18), (21, "iq3_s", 256, 110), (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136), (29, "iq1_m", 256, 56), (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66), (39, "mxfp4", 32, 17), (40, "nvfp4", 64, 36), (41, "q1_0", 128, 18),
)  # fmt: skip

# number -> type
TYPES: dict[int, GgmlType] = {
    **{number: GgmlType(number, name, 1, size, dtype) for number, name, dtype, size in _PLAIN},
    **{number: GgmlType(number, name, count, size) for number, name, count, size in _BLOCKS},
}
# name -> type
NAMED: dict[str, GgmlType] = {known.name: known for known in TYPES.values()}


def type_name(number: int) -> str:
    """The name of a type, or that its number is unknown, for messages."""
    known = TYPES.get(number)
    return f"type {number}, which is unknown" if known is None else known.name
