"""What a number format is, as data: a table, a packing, a map from numbers to scales.

Every format here is one formula. With `code` the integer stored for a number,

    number = RN_dtype(RN_32(table[code - zero] * scale) [* after] [- less])

where `scale` is a chain of float32 steps, RN_32 rounds each step to float32, and RN_dtype rounds
once more where the numbers are narrower. So a `NumberLayout` says what codes stand for
(`ElementType`), how they lie in words (`Packing`) or in records of bytes (`Record`, `Field`), and
which entry of which part belongs to which number (`Grid`).

Shapes: numbers are [..., N, K]; a tensor of fewer axes counts as [1, K] or [1, 1]. `block`, `axis`
and `order` speak of numbers, `transposed`, `padded` and `run` of how the tensor is stored.

Roles name the parts of a codec (`weight`, `scale`, `zero`). Nothing here imports numpy or torch:
shapes and boxes are worked out while planning (`geometry`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Literal, NamedTuple, TypeAlias

from ...core.spec import BITS
from ...elements.codes import number_of

# what an entry can be that is itself a number
FLOATS = ("float32", "bfloat16", "float16")
NUMBERS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ElementType:
    """What codes of `bits` bits stand for. Made by `floats`, `integers`, `signed`, `table` and
    `table_of`.
    """

    bits: int
    # codes of this float dtype
    dtype: str = ""
    # two's complement
    negative: bool = False
    # subtracted from each code
    offset: int = 0
    # the number of each code
    numbers: tuple[float, ...] = ()
    # the role of the part that holds the number of each code
    part: str = ""

    @property
    def whole(self) -> bool:
        """Whether codes are integers, from which a zero can be taken before they are scaled."""
        return not (self.dtype or self.numbers or self.part)

    def values(self) -> tuple[float, ...]:
        """The number of each code, in order; () of a table that is a part."""
        if self.part:
            return ()
        if self.numbers:
            return self.numbers
        if self.dtype:
            return _numbers_of(self.dtype, self.bits)
        codes = range(1 << self.bits)
        half = 1 << (self.bits - 1)
        return tuple(
            float((code - (code >= half) * 2 * half if self.negative else code) - self.offset)
            for code in codes
        )


@cache
def _numbers_of(dtype: str, bits: int) -> tuple[float, ...]:
    return tuple(float(number_of(dtype, code).real) for code in range(1 << bits))


def floats(dtype: str) -> ElementType:
    """The codes of a float dtype of at most 8 bits: "float8_e4m3fn", "float4_e2m1fn"."""
    return ElementType(BITS[dtype], dtype=dtype)


def integers(bits: int, offset: int = 0) -> ElementType:
    """Unsigned integers from which `offset` is taken."""
    return ElementType(bits, offset=offset)


def signed(bits: int) -> ElementType:
    """Integers in two's complement."""
    return ElementType(bits, negative=True)


def table(numbers: tuple[float, ...]) -> ElementType:
    """One number for each code; their count is a power of two. All must be float32 numbers."""
    return ElementType((len(numbers) - 1).bit_length(), numbers=numbers)


def table_of(part: str, bits: int) -> ElementType:
    """The float32 numbers that the part of this role holds, one for each code."""
    return ElementType(bits, part=part)


@dataclass(frozen=True, slots=True)
class Packing:
    """How codes lie in the words of a stored tensor.

    Word number w along the packed axis holds the codes from w * (word // bits) on, the first in its
    lowest bits; what is over in the last word, and bits of a word that hold no whole code, mean
    nothing.
    """

    bits: int
    # what the tensor may be stored as; a dtype of fewer than 8 bits is not packed: an array of its
    # raw elements has one code each
    dtypes: tuple[str, ...] = ("uint8",)
    # the axis of the numbers along which the codes of a word lie: -1 or -2
    axis: int = -1
    # which field of its word, counted from the lowest bits, each code lies in; (): in turn.
    # (1, 0) are nibbles with the high one first
    order: tuple[int, ...] = ()
    # codes go on across the borders of words
    dense: bool = False
    # the last two axes are stored in the other order
    transposed: bool = False
    # multiples up to which the last two stored axes, counted in codes, are padded
    padded: tuple[int, int] = (1, 1)
    # words of the last axis that lie on an axis of their own: 16 of [..., K / 32, 16]
    run: int = 0
    # added to each code, by one addition to the word that holds it, carries and all; to a dense
    # code by itself, within its bits
    plus: int = 0

    def word(self, dtype: str) -> int:
        """The bits of a word: those of the dtype, and of one code where it has fewer than 8."""
        return BITS[dtype]

    def unit(self, dtype: str) -> tuple[int, int]:
        """(codes, words) of the shortest stretch that begins and ends with a word and a code."""
        word = self.word(dtype)
        if self.dense:
            common = gcd(self.bits, word)
            return word // common, self.bits // common
        return word // self.bits, 1

    def words(self, codes: int, dtype: str) -> int:
        """The words that so many codes take."""
        if self.dense:
            return -(-codes * self.bits // self.word(dtype))
        return -(-codes // (self.word(dtype) // self.bits))

    def capacity(self, words: int, dtype: str) -> int:
        """The most codes that so many words hold."""
        word = self.word(dtype)
        return words * word // self.bits if self.dense else words * (word // self.bits)


def plain(*dtypes: str) -> Packing:
    """One code of a byte for each element of the stored tensor."""
    return Packing(8, dtypes)


class BitPiece(NamedTuple):
    """Bits of the codes of a record: `bits` of them from bit `shifts[i]` of byte `bytes[i]` on,
    which become those from bit `left` of code i on.
    """

    bytes: tuple[int, ...]
    shifts: tuple[int, ...]
    bits: int
    left: int = 0


def bit_plane(count: int, bits: int, at: int, run: int, left: int = 0) -> BitPiece:
    """`bits` of each of `count` codes, which become those from bit `left` on: first the lowest of
    `run` bytes from byte `at` on, then the next of the same bytes, then those of the bytes behind.
    """
    each = 8 // bits
    return BitPiece(
        tuple(at + i // (run * each) * run + i % run for i in range(count)),
        tuple(i // run % each * bits for i in range(count)),
        bits,
        left,
    )


@dataclass(frozen=True, slots=True)
class Field:
    """What a record holds: codes put together of `pieces`, or one number of `dtype` from byte `at`
    on, low byte first.
    """

    pieces: tuple[BitPiece, ...] = ()
    dtype: str = ""
    at: int = 0

    @property
    def count(self) -> int:
        """Entries in a record."""
        return len(self.pieces[0].bytes) if self.pieces else 1


@dataclass(frozen=True, slots=True)
class Record:
    """The last axis is stored as records of `nbytes` bytes (uint8), each of which holds codes and
    scales of `codes` numbers, as GGUF's blocks do.
    """

    codes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A part with one entry for each block of numbers: scales or zeros.

    Entry [..., i, j] belongs to the rows from i * block[0] and the columns from j * block[1] on;
    the last blocks may be smaller. A side of 0 is the whole axis, whose entry may lack its axis:
    a scale of the tensor is stored as [], [1] or [1, 1], one of rows as [N] or [N, 1].
    """

    role: str
    block: tuple[int, int] = (1, 1)
    # False: one entry for all leading axes as well
    leading: bool = True
    dtypes: tuple[str, ...] = FLOATS
    # the float dtype whose codes entries stored as uint8 are
    byte: str = "float8_e8m0fnu"
    # entries are powers of two, or NaN, whatever their dtype: any other is refused
    powers: bool = False
    # what entries stand for that are codes, and how these lie; zeros are integers
    elements: ElementType | None = None
    packing: Packing | None = None
    # where records hold it; `block` then follows from how many a record holds
    field: Field | None = None
    transposed: bool = False
    # multiples up to which the last two stored axes are padded
    padded: tuple[int, int] = (1, 1)
    # rows of what is stored that each entry stands in, one below the other
    repeated: int = 1
    # entries lie in the tiles of cuBLAS: 128 rows and 4 columns, 512 bytes one after the other
    swizzled: bool = False
    # the role of a part that holds, for each column, the number of its entry along the last axis
    index: str = ""
    # decoding refuses an entry that is zero, negative, infinite or NaN
    positive: bool = False
    # `positive` takes an entry of 0: blocks of zeros have one
    zeros: bool = False
    # decoding refuses an entry that is infinite or NaN
    finite: bool = False
    # decoding refuses an entry of 0: one that was stored less 1 may have been 2^bits
    nonzero: bool = False
    # decoding refuses entries that all are this: the middle of the codes, read in the wrong form
    misread: int | None = None

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that a tile of cuBLAS takes in the stored shape: 32 x 16, or where that
        is padded, as Transformer Engine's is, 128 x 4.
        """
        return (32, 16) if self.padded == (1, 1) else self.padded


How: TypeAlias = Literal["*", "/", "+"]


class Term(NamedTuple):
    """A step of a chain in float32: what was found so far times, over or plus a number."""

    how: How
    what: Grid | float


@dataclass(frozen=True, slots=True)
class NumberLayout:
    """A number format: everything that decoding needs to know beside shapes and dtypes."""

    name: str
    elements: ElementType
    codes: Packing | Field
    # the first term is a grid; the scale of a number is what the chain makes of its entries
    scale: tuple[Term, ...] = ()
    # integers taken from the codes, which are integers, before they are scaled
    zero: Grid | None = None
    # what the scaled number is multiplied by
    after: float | None = None
    # what is taken from it, a chain as `scale`
    less: tuple[Term, ...] = ()
    record: Record = Record(1, 1)
    # codes and grids follow the row-major order of all numbers, of which `block[1]` share an entry
    flat: bool = False
    # the shape of the numbers, where parts tell it only by their values; else as many as the words
    # have room for
    shape: tuple[int, ...] | None = None
    # the role of the codes
    role: str = "weight"
    # what numbers can be decoded to
    numbers: tuple[str, ...] = NUMBERS
    # the fewest axes that they have
    axes: int = 0

    def grids(self) -> tuple[Grid, ...]:
        """All grids: of the scale, of `less`, the zero."""
        found = [term.what for term in (*self.scale, *self.less) if isinstance(term.what, Grid)]
        return (*found, *(() if self.zero is None else (self.zero,)))

    def tables(self) -> dict[str, int]:
        """The roles of parts that are tables, and how many numbers each has."""
        used = [self.elements, *(g.elements for g in self.grids() if g.elements is not None)]
        return {e.part: 1 << e.bits for e in used if e.part}

    def roles(self) -> tuple[str, ...]:
        """The parts that decoding reads, each once, the codes first."""
        found = [self.role, *(g.role for g in self.grids())]
        found += [g.index for g in self.grids() if g.index]
        return tuple(dict.fromkeys([*found, *self.tables()]))

    def first_dtypes(self) -> dict[str, str]:
        """role -> the first dtype that codes and grids can be stored as."""
        stored = {g.role: (g.packing or g).dtypes for g in self.grids() if g.field is None}
        if isinstance(self.codes, Packing):
            stored[self.role] = self.codes.dtypes
        return {role: dtypes[0] for role, dtypes in stored.items()}

    def of_shape(self, shape: tuple[int, ...]) -> NumberLayout:
        """This layout of numbers of a shape that values or other parts tell."""
        return replace(self, shape=shape)


def times(*grids: Grid | float) -> tuple[Term, ...]:
    """The chain that multiplies these from the left."""
    return tuple(Term("*", what) for what in grids)


def in_squares(layout: NumberLayout) -> NumberLayout:
    """The layout whose blocks of a row are squares, the scale of each of which is stored for every
    row of it: it is decoded as before.
    """
    first, *rest = layout.scale
    if not isinstance(first.what, Grid):
        raise ValueError(f"{layout.name}: the first term is no grid")
    side = first.what.block[1]
    grid = replace(first.what, block=(side, side), repeated=side)
    return replace(layout, scale=(Term(first.how, grid), *rest))
