"""Integers of at most eight bits, less zeros, times scales, as float16 or bfloat16, in numpy.

Integers less their zeros are bytes until they become floats, and what is made of them are a few
passes over what a second-level cache holds. A scale has at most 11 significant bits and an integer
at most 8, so that products are exact in float32, with digits to spare: that is what makes rounding
to 11 or 8 bits three operations on floats.

    big = x * (2^d + 1);  rounded = big + (x - big)

`big` is the sum of x * 2^d, a multiple of twice its last place, and of x rounded to that place,
half to even (Veltkamp 1968; ties are even because x * 2^d is); x - big is -x * 2^d, rounded, and
what is left of x is all digits but the last d.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ...elements.raw import scratch
from . import tables
from .layout import ElementType, Packing

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# numbers of a step: a pass over their floats takes longer than waking a thread that waits for the
# interpreter
STEP = 1 << 18
# columns from which on the entry of a group is a loop of its own
_LONG = 32
# the largest finite float32; from the other on no product has fewer digits than it could
_FINITE, _LEAST = (2 - 2.0**-23) * 2.0**127, 2.0**-90
# the dtypes of scales whose products have so few digits, by that of numbers: those of float16 are
# multiples of its smallest number too, so that none that is subnormal is rounded
SHORT = {"float16": ("float16",), "bfloat16": ("float16", "bfloat16")}
# magnitudes up to which products are rounded here
_LARGEST = {"float16": 65504.0, "bfloat16": 2.0**100}


class GroupEntries(NamedTuple):
    """Entries [rows or 1, groups] of neighbouring columns, `each` of which share one."""

    values: Array
    each: int

    def spread(self, target: Array, top: int) -> Iterator[tuple[Array, Array]]:
        """Rows of numbers from `top` on, and entries that spread over them."""
        import numpy as np

        rows, columns = target.shape
        values = self.values if len(self.values) == 1 else self.values[top : top + rows]
        groups = values.shape[1]
        if groups in (1, columns):
            yield target, values
        elif self.each >= _LONG:
            yield target.reshape(rows, groups, self.each), values[..., None]
        else:
            yield target, np.repeat(values, self.each, 1)


def integers_of_bytes(codes: Array, elements: ElementType) -> Array | None:
    """int8 [rows, columns]: integers whose codes lie in contiguous bytes [rows, n], of four bits
    the first in the lower ones. As `integers_of_codes`.
    """
    import numpy as np

    if elements.bits == 8:
        return integers_of_codes(codes, elements)
    rows, count = codes.shape
    pairs = _room("kit integers", (rows, 2 * count)).view("<u2")
    over = _room("kit beside", (rows, 2 * count)).view("<u2")
    np.copyto(pairs, codes)
    np.left_shift(pairs, 4, out=over)
    np.bitwise_or(pairs, over, out=pairs)
    np.bitwise_and(pairs, 0x0F0F, out=pairs)
    return integers_of_codes(pairs.view("u1"), elements)


def integers_of_words(words: Array, packing: Packing, elements: ElementType) -> Array | None:
    """int8 [8 * n, columns]: integers of four bits in contiguous words of 32 bits [n, columns],
    each of which holds those of eight rows. As `integers_of_codes`.
    """
    import numpy as np

    count, columns = words.shape
    made = _room("kit integers", (8 * count, columns))
    kept = _room("kit words", (words.size + 1, 4)).view("<u4").reshape(-1)
    byte = _room("kit beside", words.shape)
    kept[:-1] = words.reshape(-1)
    rows, places = made.reshape(count, 8, columns), packing.order or tuple(range(8))
    for at in range(4):
        # a word that begins so many bytes later has that byte as its lowest
        later: Array = np.ndarray(words.shape, "<u4", kept, at)
        np.copyto(byte, later, casting="unsafe")
        np.bitwise_and(byte, 15, out=rows[:, places.index(2 * at)])
        np.right_shift(byte, 4, out=rows[:, places.index(2 * at + 1)])
    return integers_of_codes(made, elements)


def integers_of_codes(codes: Array, elements: ElementType) -> Array | None:
    """int8: the integers of codes, each of which is a byte; those of 8 bits are left as they are,
    others are in memory that may be overwritten. None where int8 has no room for them.
    """
    import numpy as np

    half = 1 << (elements.bits - 1)
    if elements.bits == 8:
        if elements.negative:
            return codes.view("i1")
        made: Array = np.bitwise_xor(codes, 128, out=_room("kit integers", codes.shape))
        return made.view("i1") if elements.offset == 128 else None
    if elements.negative:
        np.bitwise_xor(codes, half, out=codes)
    if offset := half if elements.negative else elements.offset:
        # bytes wrap, and so it is exact
        np.subtract(codes, offset, out=codes)
    return codes.view("i1")


def _room(name: str, shape: tuple[int, ...]) -> Array:
    return scratch(name, prod(shape)).reshape(shape)


def fill_integers(
    codes: Array, zeros: GroupEntries | None, scales: GroupEntries, dtype: str, out: Array
) -> bool:
    """Fills `out` [rows, columns], raw elements of `dtype`, with integers less their zeros, all of
    them int8, times scales, float32 that numbers of a dtype of `SHORT` are; False, and nothing is
    filled, where a scale is infinite or NaN.

    Where there are zeros, `codes` is overwritten.
    """
    import numpy as np

    low, high = float(scales.values.min()), float(scales.values.max())
    # NaN is not below anything
    if not (-_FINITE <= low <= high <= _FINITE):
        return False
    rows, columns = codes.shape
    down = max(1, STEP // columns)
    # a scale of zero, or below it, makes zeros with a sign, which this way of rounding loses
    torch = tables.imported()
    others = torch is not None or low < _LEAST or high * 128 > _LARGEST[dtype]
    if torch is not None and not scales.values.flags.writeable:
        scales = scales._replace(values=scales.values.copy())
    elif not others and dtype == "float16":
        # of a float16 with this exponent more, float32 has the same bits
        scales = scales._replace(values=scales.values * np.float32(2.0**-112))
    for top in range(0, rows, down):
        part, target = codes[top : top + down], out[top : top + down]
        if zeros is not None:
            for these, entries in zeros.spread(part, top):
                np.subtract(these, entries, out=these)
        # one word more, behind the last
        words = scratch("kit floats", 4 * part.size + 4).view("<u4")
        floats = words[:-1].view("<f4").reshape(part.shape)
        np.copyto(floats, part)
        for these, entries in scales.spread(floats, top):
            if torch is not None:
                torch.from_numpy(these).mul_(torch.from_numpy(entries))
            else:
                np.multiply(these, entries, out=these)
        if others:
            tables.narrowed(floats, dtype, target, True)
            continue
        _round(floats, 13 if dtype == "float16" else 16)
        # a word that begins two bytes later has the upper half as its lower one
        upper: Array = np.ndarray(part.shape, "<u4", words, 2)
        if dtype == "bfloat16":
            np.copyto(target, upper, casting="unsafe")
            continue
        # the exponent loses the three bits that are 0, and the sign, which the integer has
        np.left_shift(words, 3, out=words)
        halves, signs = (_room(f"kit {n}", (2, part.size)).view("<i2") for n in ("halves", "signs"))
        halves, signs = halves.reshape(part.shape), signs.reshape(part.shape)
        np.copyto(halves, upper, casting="unsafe")
        np.copyto(signs, part)
        np.bitwise_and(signs, -0x8000, out=signs)
        np.bitwise_or(halves.view("<u2"), signs.view("<u2"), out=target)
    return True


def _round(floats: Array, digits: int) -> None:
    """Rounds off the last `digits` of float32 of at most 19, half to even."""
    import numpy as np

    big = scratch("kit big", floats.nbytes).view("<f4").reshape(floats.shape)
    np.multiply(floats, np.float32((1 << digits) + 1), out=big)
    np.subtract(floats, big, out=floats)
    np.add(floats, big, out=floats)
