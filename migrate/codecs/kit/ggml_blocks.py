"""The block formats of GGUF as layouts: a type is a line of the table in `block_layouts`.

A block holds codes and scales together. A number is code * scale, of K types
code * (d * s) - dmin * m, each step in float32 as in gguf-py. Offsets are those of the structures
in llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ...source.ggml_types import NAMED
from .layout import (
    BitPiece,
    ElementType,
    Field,
    Grid,
    NumberLayout,
    Record,
    Term,
    bit_plane,
    integers,
    signed,
    table,
    times,
)

# the numbers of e2m1, of which that of -0 is 0 here
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Block(NamedTuple):
    """A type: what codes stand for, where their bits lie, what they are multiplied by, and what is
    taken off.
    """

    elements: ElementType
    codes: tuple[BitPiece, ...]
    scale: tuple[Term, ...]
    less: tuple[Term, ...] = ()


@cache
def block_layouts(finite: bool) -> dict[str, NumberLayout]:
    """Type -> layout; `finite`: scales that are not are refused."""

    def at(byte: int, *more: Grid | float, dtype: str = "float16", finite: bool = finite) -> Any:
        return times(Grid("data", field=Field(dtype=dtype, at=byte), finite=finite), *more)

    plane = bit_plane
    # a number is the scale of a block of one, whose code takes no bits
    one, none = table((1.0,)), (BitPiece((0,), (0,), 0),)
    # of each of sixteen bytes the low half is a scale, the high one a minimum
    low, high = (_small(integers(4), BitPiece(tuple(range(16)), (s,) * 16, 4)) for s in (0, 4))
    # sixteen scales of 6 bits in twelve bytes, and of 8 bits in sixteen
    sixes = _small(integers(6, 32), plane(16, 4, 96, 8), plane(16, 2, 104, 4, 4))
    eights = _small(signed(8), plane(16, 8, 192, 16))
    blocks = {
        "q4_0": Block(integers(4, 8), (plane(32, 4, 2, 16),), at(0)),
        "q4_1": Block(integers(4), (plane(32, 4, 4, 16),), at(0), at(2, -1.0)),
        "q5_0": Block(integers(5, 16), (plane(32, 4, 6, 16), plane(32, 1, 2, 1, 4)), at(0)),
        "q5_1": Block(
            integers(5), (plane(32, 4, 8, 16), plane(32, 1, 4, 1, 4)), at(0), at(2, -1.0)
        ),
        "q8_0": Block(signed(8), (plane(32, 8, 2, 32),), at(0)),
        "q2_k": Block(integers(2), (plane(256, 2, 16, 32),), at(80, low), at(82, high)),
        "q3_k": Block(
            integers(3, 4), (plane(256, 2, 32, 32), plane(256, 1, 0, 32, 2)), at(108, sixes)
        ),
        "q4_k": Block(integers(4), (plane(256, 4, 16, 32),), at(0, _sixes(0)), at(2, _sixes(1))),
        "q5_k": Block(
            integers(5),
            (plane(256, 4, 48, 32), plane(256, 1, 16, 32, 4)),
            at(0, _sixes(0)),
            at(2, _sixes(1)),
        ),
        "q6_k": Block(
            integers(6, 32), (plane(256, 4, 0, 64), plane(256, 2, 128, 32, 4)), at(208, eights)
        ),
        "mxfp4": Block(table(E2M1), (plane(32, 4, 1, 16),), at(0, dtype="float8_e8m0fnu")),
        "f16": Block(one, none, at(0, finite=False)),
        "bf16": Block(one, none, at(0, dtype="bfloat16", finite=False)),
    }
    return {
        name: NumberLayout(
            f"gguf {name}",
            block.elements,
            Field(block.codes),
            block.scale,
            less=block.less,
            role="data",
            record=Record(NAMED[name].elements, NAMED[name].nbytes),
        )
        for name, block in blocks.items()
    }


def _small(elements: ElementType, *pieces: BitPiece) -> Grid:
    """Scales that are codes of few bits themselves."""
    return Grid("data", elements=elements, field=Field(pieces))


def _sixes(least: int) -> Grid:
    """Of the twelve bytes from byte 4 on the eight scales of 6 bits, or the eight minima."""
    low = tuple(4 + j + 4 * least if j < 4 else 8 + j for j in range(8))
    high = tuple(j + 4 * least + 4 * (j < 4) for j in range(8))
    one, other = (0,) * 4 + (4 * least,) * 4, (4,) * 4 + (6,) * 4
    return _small(integers(6), BitPiece(low, one, 4), BitPiece(high, other, 2, 4))
