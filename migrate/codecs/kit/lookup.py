"""Bytes of codes to numbers by tables of whole bytes and pairs of bytes, in numpy.

A gather costs about the same for 2 bytes as for 8, so that a table of all pairs of bytes answers
with several numbers at once. Where one byte is the scale of a number and all else is the same for
the whole tensor, one table of 65536 entries, for each scale byte and each byte of codes, has the
rounded numbers themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...core.spec import BITS
from ...elements.raw import carrier, scratch
from ...elements.transposes import flip_panel, is_turned
from . import tables
from .layout import ElementType, Grid, NumberLayout, Packing
from .tables import narrowed, widened
from .tables import values as table_of_values

if TYPE_CHECKING:
    import numpy as np

    from .geometry import Extents

    Array = np.ndarray[Any, Any]

# what a gather answers with: whole words of these sizes, and of 16 bytes
_BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
_HALVES = 0xBF80BF80BF80BF80 - (1 << 64)
# keys of a call, of each of which numpy makes an index of eight bytes
KEYS = 1 << 16
# the table that each thread made last
_KEPT = threading.local()
_WORDS = {2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


def codes_in_byte(packing: Packing, dtype: str) -> int:
    """How many codes a byte of stored words holds, of which the first lies in the first byte; 0
    where codes do not lie so, not even after `natural`.
    """
    word = packing.word(dtype)
    if word <= 8 and word == packing.bits:
        return 1
    if packing.plus or packing.bits not in (2, 4, 8) or word not in (8, 16, 32):
        return 0
    if packing.order and word == 16:
        return 0
    return 8 // packing.bits


def natural(words: Array, packing: Packing, dtype: str) -> Array:
    """Contiguous words as bytes, with the codes of 32-bit words in turn."""
    if packing.order and packing.word(dtype) == 32:
        low, high = _in_turn(packing.order, packing.bits)
        halves = words.view("<u2")
        words = low.take(halves[..., 0::2], mode="clip")
        words |= high.take(halves[..., 1::2], mode="clip")
    return words.view("u1")


@lru_cache(maxsize=8)
def _in_turn(order: tuple[int, ...], bits: int) -> tuple[Array, Array]:
    """The codes of all lower and of all upper halves of words, in turn."""
    import numpy as np

    every, mask = np.arange(1 << 16, dtype="<u4"), (1 << bits) - 1
    out = []
    for first in (0, 16):
        made = np.zeros(1 << 16, "<u4")
        for i, field in enumerate(order):
            if first <= field * bits < first + 16:
                made |= (every >> (field * bits - first) & mask) << (i * bits)
        out.append(made)
    return out[0], out[1]


def of_bytes(values: Array, packing: Packing, dtype: str) -> Array:
    """float32 [256, n]: the numbers of the codes of each byte, of which n are in one."""
    import numpy as np

    word = packing.word(dtype)
    each = codes_in_byte(packing, dtype)
    if each == 1:
        return np.resize(values, (256, 1))
    order = packing.order if word == 8 and packing.order else range(each)
    every, mask = np.arange(256), (1 << packing.bits) - 1
    return np.stack([values[every >> (field * packing.bits) & mask] for field in order], 1)


def _raw(numbers: Array, dtype: str) -> Array:
    """float32 [..., n] rounded to `dtype`, n raw elements of which make one word of a table."""
    import numpy as np

    out = np.empty(numbers.shape, carrier(dtype))
    narrowed(np.ascontiguousarray(numbers), dtype, out)
    return _as_words(out)


def _as_words(table: Array) -> Array:
    found: Array = table.view(_WORDS[table.shape[-1] * table.itemsize]).reshape(table.shape[:-1])
    return found


def of_pairs(table: Array) -> Array:
    """The table of two bytes, the lower one first, of a table of one: words twice as wide."""
    import numpy as np

    every = np.arange(1 << 16)
    return _as_words(np.stack([table[every & 255], table[every >> 8]], 1))


def gathered(table: Array, keys: Array, out: Array) -> None:
    """Fills `out`, contiguous rows of elements, with words of a table for keys of one or two
    bytes.
    """
    import numpy as np

    made, step = out.view(table.dtype), max(1, KEYS // max(1, keys.shape[1]))
    for row in range(0, len(keys), step):
        np.take(table, keys[row : row + step], out=made[row : row + step], mode="clip")


def pair_keys(scales: Array, codes: Array) -> Array:
    """uint16 [rows, n]: for each byte of codes that byte and, as the upper one, the byte of its
    scale; `scales` is [rows or 1, g] and each is that of n / g neighbours.
    """
    import numpy as np

    rows, count = codes.shape
    keys = scratch("kit keys", rows * count * 2).view("<u2").reshape(rows, count)
    np.copyto(keys, codes)
    each = count // scales.shape[1]
    upper = scales.astype("<u2") << np.uint16(8)
    if each % 4:
        keys.reshape(rows, -1, each)[...] |= upper[..., None]
        return keys
    # four keys at a time; short inner loops would take longer than the work
    words, four = keys.view("<u8"), upper.astype("<u8") * np.uint64(0x0001000100010001)
    for i in range(each // 4):
        words[:, i :: each // 4] |= four
    return keys


class ByteTable:
    """A table of rounded numbers for each byte of codes, or pair of bytes, or for each byte of a
    scale and byte of codes.
    """

    __slots__ = ("_dtype", "_each", "_table", "grid")

    def __init__(self, grid: Grid | None, table: Array, dtype: str, each: int) -> None:
        self.grid, self._table, self._dtype, self._each = grid, table, carrier(dtype), each

    def fill(self, codes: Array, scales: Array | None, out: Array) -> bool:
        """Fills `out` [rows, columns] with the numbers of bytes of codes, which are contiguous
        unless the columns of `out` are (`is_turned`); False where it cannot, for want of scales
        or because bytes do not come in pairs or are not full.
        """
        keys = codes
        if codes.shape[1] * self._each != out.shape[1]:
            return False
        if self.grid is not None:
            if scales is None or codes.shape[1] % scales.shape[1]:
                return False
        elif self._table.size > 256:
            if codes.shape[1] % 2:
                return False
            keys = codes.view("<u2")
        if scales is not None:
            if is_turned(out) and self.turns:
                self._fill_columns(codes, scales, out.T)
                return True
            keys = pair_keys(scales, codes)
        if out.flags.c_contiguous:
            gathered(self._table, keys, out)
        else:
            made = scratch("kit made", out.nbytes).view(self._dtype).reshape(out.shape)
            gathered(self._table, keys, made)
            out[...] = made
        return True

    @property
    def turns(self) -> bool:
        """Whether it has two numbers of half a word each for a byte of codes and one of a scale."""
        return self.grid is not None and self._each == 2 and self._table.itemsize == 4

    def _fill_columns(self, codes: Array, scales: Array, out: Array) -> None:
        """Fills `out` [columns, rows]. What changes places are the codes, whose bytes are a quarter
        of those of the numbers.
        """
        import numpy as np

        rows, count = codes.shape
        turned = scratch("kit turned", codes.size).reshape(count, rows)
        flip_panel(codes, turned)
        upper = np.ascontiguousarray(scales.T).astype("<u2") << np.uint16(8)
        each = count // len(upper)
        step = max(1, min(each, KEYS // 2 // rows))
        kept = scratch("kit keys", step * rows * 2).view("<u2").reshape(step, rows)
        made = scratch("kit made", step * rows * 4).view("<u4").reshape(step, rows)
        for first in range(0, count, each):
            for low in range(first, first + each, step):
                high = min(low + step, first + each)
                keys, words = kept[: high - low], made[: high - low]
                np.bitwise_or(turned[low:high], upper[first // each], out=keys)
                np.take(self._table, keys, out=words, mode="clip")
                # the lower halves by a cast, which is quicker than a strided copy
                np.copyto(out[2 * low : 2 * high : 2], words, casting="unsafe")
                out[2 * low + 1 : 2 * high : 2] = words.view("<u2")[:, 1::2]


class ByteTables:
    """Makes the tables of a layout, where it has any."""

    def __init__(self, layout: NumberLayout, geo: Extents, dtype: str) -> None:
        self._layout, self._geo, self._dtype = layout, geo, dtype
        self._last: tuple[Any, ByteTable] | None = None
        self._each, self._grid = self._fits()

    @property
    def turns(self) -> bool:
        """Whether its tables fill arrays whose columns are contiguous without a transpose."""
        return self._grid is not None and self._each == 2 and width(self._dtype) == 2

    def _fits(self) -> tuple[int, Grid | None]:
        """The codes of a byte, 0 where no table helps, and the grid that has an entry for several
        numbers only and a byte for each.
        """
        layout, geo, packing = self._layout, self._geo, self._layout.codes
        if not isinstance(packing, Packing) or packing.axis != -1 or layout.less or layout.zero:
            return 0, None
        each = codes_in_byte(packing, geo.spec(layout.role).dtype)
        if not each or each * width(self._dtype) > 8:
            return 0, None
        several = [
            grid
            for grid in layout.grids()
            if grid.index or grid.block != (0, 0) or (layout.flat and grid.block[1])
        ]
        if not several:
            return each, None
        (grid, *more) = several
        byte = geo.spec(grid.role).dtype in ("uint8", "float8_e8m0fnu", *_BYTES)
        short = grid.block[1] and grid.block[1] % each
        if each == 1 and layout.elements.dtype == "float8_e4m3fn":
            # arithmetic is faster than 16 million gathers
            return 0, None
        if more or grid.index or grid.elements is not None or not byte or short:
            return 0, None
        return each, grid

    def of(
        self, at: tuple[int, ...], values: Array, known: Callable[[Grid], Array]
    ) -> ByteTable | None:
        """The table of the matrix `at` of a box; None where there is none. `known` has the entries
        of a grid.
        """
        if not self._each:
            return None
        layout, geo = self._layout, self._geo
        scalars = [
            known(term.what)[at if term.what.leading else (0,) * len(at)].reshape(())
            for term in layout.scale
            if isinstance(term.what, Grid) and term.what is not self._grid
        ]
        key = tuple(s.tobytes() for s in scalars), values.tobytes() if layout.elements.part else b""
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        kept = _KEPT.__dict__
        whole = (
            layout,
            geo.spec(layout.role).dtype,
            self._dtype,
            self._grid and geo.spec(self._grid.role).dtype,
            key,
        )
        if kept.get("key") != whole:
            kept["table"], kept["key"] = self._made(scalars, values), whole
        self._last = key, kept["table"]
        return self._last[1]

    def _made(self, scalars: list[Array], values: Array) -> ByteTable:
        import numpy as np

        layout, geo, grid = self._layout, self._geo, self._grid
        packing = layout.codes
        if not isinstance(packing, Packing):
            raise TypeError(packing)
        numbers = of_bytes(values, packing, geo.spec(layout.role).dtype)[None]
        scale: Any = None
        left = iter(scalars)
        with np.errstate(all="ignore"):
            for how, what in layout.scale:
                step: Any = np.float32(what) if not isinstance(what, Grid) else None
                if what is grid and grid is not None:
                    dtype = geo.spec(grid.role).dtype
                    every = np.arange(256, dtype="u1")
                    step = widened(every, grid.byte if dtype == "uint8" else dtype)[:, None, None]
                elif step is None:
                    step = next(left)
                if scale is None:
                    scale = step
                else:
                    scale = (
                        scale * step if how == "*" else scale / step if how == "/" else scale + step
                    )
            if scale is not None:
                numbers = numbers * scale
            if layout.after is not None:
                numbers = numbers * np.float32(layout.after)
        table = _raw(numbers.astype("<f4"), self._dtype).reshape(-1)
        if grid is None and table.itemsize <= 4:
            table = of_pairs(table)
        return ByteTable(grid, table, self._dtype, self._each)


def floats_of(
    keys: Array,
    packing: Packing,
    dtype: str,
    elements: ElementType,
    table: Callable[[ElementType, Any], Array],
    out: Array,
) -> float:
    """Fills `out` (float32) with the numbers of contiguous bytes of codes, but for the factor that
    is returned; 0 is 1 where a number may be infinite or NaN.
    """
    each = codes_in_byte(packing, dtype)
    if each == 1:
        if elements.whole:
            return integers_of(keys, elements, out)
        if elements.dtype == "float8_e4m3fn" and not has_nan(keys):
            return _floats_of_e4m3(keys, out)
    words = (
        _float_words(elements, packing, dtype)
        if not elements.part
        else _words_of(table(elements, keys), packing, dtype)
    )
    if each == 1 and keys.shape[1] % 2 == 0:
        gathered(words[1], keys.view("<u2"), out)
    else:
        gathered(words[0], keys, out)
    return 0 if elements.part or elements.bits > 4 else 1


@lru_cache(maxsize=16)
def _float_words(elements: ElementType, packing: Packing, dtype: str) -> tuple[Array, Array]:
    return _words_of(table_of_values(elements), packing, dtype)


def _words_of(values: Array, packing: Packing, dtype: str) -> tuple[Array, Array]:
    """The float32 numbers of a byte, and of two where one byte is one code."""
    import numpy as np

    one = _as_words(np.ascontiguousarray(of_bytes(values, packing, dtype)))
    return one, of_pairs(one) if one.itemsize == 4 else one


def integers_of(codes: Array, elements: ElementType, out: Array) -> float:
    """Fills `out` (float32) with integers, each in a byte; 1.0."""
    import numpy as np

    if elements.negative and elements.bits < 8:
        np.take(table_of_values(elements), codes, out=out, mode="clip")
        return 1.0
    np.copyto(out, codes.view("i1") if elements.negative else codes)
    if elements.offset:
        np.subtract(out, np.float32(elements.offset), out=out)
    return 1.0


def has_nan(codes: Array) -> bool:
    """Whether an e4m3 code is NaN: 0x7F is the largest signed one, 0xFF the largest unsigned."""
    return codes.size > 0 and (int(codes.max()) == 0xFF or int(codes.view("i1").max()) == 0x7F)


def _floats_of_e4m3(codes: Array, out: Array) -> float:
    """Fills `out` (float32) with the numbers of e4m3 codes, none of them NaN, but for the power of
    two that is returned.

    The exponent and mantissa of a code are those of the float32 with the same bits, subnormals
    included, and of the float16, which torch widens by the processor's own conversion.
    """
    import numpy as np

    torch = tables.imported()
    if torch is None or not codes.flags.c_contiguous:
        words = out.view("<i4")
        np.copyto(words, codes.view("i1"))
        np.left_shift(words, 20, out=words)
        np.bitwise_and(words, -0x78100000, out=words)
        return 2.0**120
    size = -(-codes.size // 4) * 4
    kept = scratch("kit halves", size * 2)
    halves = kept.view("<i2")[: codes.size]
    np.copyto(halves, codes.view("i1").reshape(-1))
    # four codes a word; the mask takes off what the sign and a neighbour left beside them
    four = kept.view("<i8")
    np.left_shift(four, 7, out=four)
    np.bitwise_and(four, _HALVES, out=four)
    torch.from_numpy(out.reshape(-1)).copy_(torch.from_numpy(halves).view(torch.float16))
    return 2.0**8


def width(dtype: str) -> int:
    """Bytes of a raw element."""
    return BITS[dtype] // 8
