"""Codes of e4m3 times scales as bfloat16, in numpy alone.

The exponent and mantissa of a code are those of the float32 with the same bits, subnormals
included, times 2^-120, which the scale takes back. A step is a few passes over what a second-level
cache holds. Rounding takes four passes only where a product can lie halfway between two numbers.
That follows from the scales: a code has one of eight significands, so that a scale makes eight
products, exponents apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...elements.raw import scratch
from .lookup import has_nan

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# numbers of a step: their words stay in a second-level cache, and a pass over them takes much
# longer than waking a thread that waits for the interpreter, which half as many do not
STEP = 1 << 18
# below it a scale times 2^120 is finite; from the other on no product is subnormal
_LARGEST, _LEAST = 2.0**6, 2.0**-117
# columns from which on the entry of a group is a loop of its own, and a row one that numpy begins
_LONG, _WIDE = 32, 1 << 10
# exponent and mantissa of a code where a float32 has them, and its sign; half of the last bit of a
# bfloat16
_SHIFT, _KEPT, _HALF = 20, 0x87F00000, 0x8000


def fill_products(
    codes: Array, scales: Array, each: tuple[int, int], skip: tuple[int, int], out: Array
) -> bool:
    """Fills `out` [rows, columns], raw bfloat16, with e4m3 codes (uint8) times scales; False, and
    nothing is filled, where one is NaN, or a scale too large or too small.

    An entry of `scales` (float32) is that of `each` rows and columns, 0 of all, the first without
    the `skip` rows and columns before these.
    """
    import numpy as np

    largest = np.abs(scales)
    some = largest[largest > 0]
    # NaN is not below anything
    if not (largest.max(initial=0) < _LARGEST and some.min(initial=1) >= _LEAST) or has_nan(codes):
        return False
    rows, columns = codes.shape
    high, wide = each
    exact = _are_powers(scales)
    ties = _with_ties(scales) if not exact else None
    grouped = high == 1 and wide >= _LONG and not skip[1] and columns % wide == 0
    factors = scales * np.float32(2.0**120)
    if scales.shape[1] > 1 and not grouped:
        factors = np.repeat(factors, wide, 1)[:, skip[1] : skip[1] + columns]
    down = max(1, STEP // columns)
    rounded = ties is not None and bool(ties.any())
    steps: dict[tuple[int, bool], _Step] = {}
    top, buffer = 0, np.getbufsize()
    if not grouped and columns >= _WIDE:
        # numpy joins rows that are shorter than its buffer, and copies what is broadcast over them,
        # which takes longer than the product; multiples of 16 are taken
        np.setbufsize(min(buffer, columns // 16 * 16))
    try:
        while top < rows:
            bottom = min(top + down, rows)
            entry = top if high == 1 else 0
            if high > 1:
                # as far as the block goes
                entry = (top + skip[0]) // high
                bottom = min(bottom, (entry + 1) * high - skip[0])
            last = entry + (bottom - top if high == 1 else 1)
            kind = bottom - top, ties is not None and rounded and bool(ties[entry:last].any())
            step = steps.get(kind) or steps.setdefault(
                kind, _Step(bottom - top, columns, wide if grouped else 0, kind[1], exact)
            )
            part = factors[entry:last]
            step.fill(codes[top:bottom].view("i1"), part, out[top:bottom])
            top = bottom
    finally:
        np.setbufsize(buffer)
    return True


class _Step:
    """Room for some rows, as the passes over it want to see it: making a view takes as long as a
    tenth of a pass.
    """

    def __init__(self, count: int, columns: int, group: int, ties: bool, exact: bool) -> None:
        import numpy as np

        self._exact = exact

        # one word more, behind the last
        words = scratch("kit words", 4 * (count * columns + 1)).view("<u4")
        self._words = words[:-1].reshape(count, columns)
        self._signed, self._floats = self._words.view("<i4"), self._words.view("<f4")
        self._groups = self._floats.reshape(count, -1, group) if group else None
        self._odd: Array | None = None
        if ties:
            self._odd = scratch("kit odd", self._words.nbytes).view("<u4").reshape(count, columns)
        # a word that begins two bytes later has the upper half as its lower one
        self._upper: Array = np.ndarray((count, columns), "<u4", words, 2)

    def fill(self, codes: Array, factors: Array, out: Array) -> None:
        import numpy as np

        words, odd = self._words, self._odd
        np.copyto(self._signed, codes)
        np.left_shift(words, _SHIFT, out=words)
        np.bitwise_and(words, _KEPT, out=words)
        if self._groups is not None:
            np.multiply(self._groups, factors[..., None], out=self._groups)
        else:
            np.multiply(self._floats, factors, out=self._floats)
        if odd is not None:
            np.right_shift(words, 16, out=odd)
            np.bitwise_and(odd, 1, out=odd)
            np.add(odd, 0x7FFF, out=odd)
            np.add(words, odd, out=words)
        elif not self._exact:
            np.add(words, _HALF, out=words)
        np.copyto(out, self._upper, casting="unsafe")


def _are_powers(scales: Array) -> bool:
    """Whether all scales are powers of two or zero: no product has more digits than the code's
    significand, so that nothing is rounded.
    """
    return not (scales.view("<u4") & 0x7FFFFF).any()


def _with_ties(scales: Array) -> Array:
    """Whether the product of a scale of each row and a significand can lie halfway between two
    bfloat16.
    """
    import numpy as np

    products = scales[..., None] * np.arange(1, 2, 0.125, dtype="f4")
    found: Array = ((products.view("<u4") & 0xFFFF) == 0x8000).any((1, 2))
    return found
