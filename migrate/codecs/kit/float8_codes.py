"""Numbers over or times scales as floats of eight bits, in numpy alone.

A float32 that is multiplied by a power of two has its exponent where the code has its own, so that
the code is its upper bits, rounded: half of the last one is added, and where a number can lie
halfway between an odd and an even code below it, one less. Of bfloat16 that follows from the
scales: a number has one of 128 significands, so that a scale makes 128 results, exponents apart.

What becomes a subnormal code or zero was rounded to a subnormal float32 before, and is made again
by itself (`rounding.looked_up`): in weights few numbers are so small.

A step is some fifteen passes over what a second-level cache holds; a pass of one or two bytes a
number takes half as long as one of four, and those that numpy has no vector instructions for (the
maximum with one number, shifts of bytes, every other element) three times as long.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...elements.raw import scratch
from .layout import ElementType
from .magnitudes import widened
from .rounding import Lanes, largest_of, looked_up, nearest_below
from .scale_rules import Scales, rounded_to
from .spreading import apply

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# numbers of a step
STEP = 1 << 16
# numbers of a tile from which on its significands are looked at, and of a row from which on numpy
# is kept from copying what is broadcast (`products`)
_LARGE, _WIDE = 1 << 11, 1 << 10
# the least normal float32
_LEAST = 2.0**-126


class _Form(NamedTuple):
    """Of a float of eight bits: where its last bit lies in a float32 with its exponent, what a
    float32 is multiplied by for that, and the first of its normal codes.
    """

    shift: int
    unit: float
    normal: int


@cache
def _form(elements: ElementType) -> _Form:
    values = elements.values()
    one = values.index(1.0)
    digits = values.index(2.0) - one
    return _Form(24 - digits.bit_length(), 2.0 ** (one // digits - 127), digits)


def fill_codes(
    raw: Array,
    dtype: str,
    scales: Scales,
    tile: tuple[int, int],
    largest: Array,
    elements: ElementType,
    out: Array,
) -> None:
    """Fills `out` (u1) with the codes of finite numbers, raw elements of `dtype` [rows, columns]
    that begin with a tile, over or times the factors of their tiles, rounded to the dtype of
    `scales` first; too large ones saturate. `largest` are the largest magnitudes of the tiles.
    """
    import numpy as np

    form, factor = _form(elements), np.ascontiguousarray(scales.factor, "f4")
    with np.errstate(all="ignore"):
        turned = factor / np.float32(form.unit) if scales.divides else factor * form.unit
        turned = turned.astype("f4", copy=False)
        most = largest / factor if scales.divides else largest * factor
        # NaN is not below anything
        held = bool(
            (np.abs(turned) >= _LEAST).all()
            and np.isfinite(turned).all()
            and (most < 2 * largest_of(elements)).all()
        )
        if not held:
            _fill_slowly(raw, dtype, scales, tile, elements, out)
            return
        over = bool((most * (1 + 2**-7) >= nearest_below(elements)).any())
        scaled = _Scaled(raw, dtype, factor, turned, scales, tile)
    ties = _with_ties(scaled, form)
    _fill(scaled, form, ties is None, largest_code(elements) if over else 0, out)
    if ties is not None and ties.any():
        again = scaled.picked(ties)
        made = np.empty(again.raw.shape, "u1")
        _fill(again, form, True, largest_code(elements) if over else 0, made)
        out.reshape(len(out), -1, scaled.wide)[np.broadcast_to(ties, scaled.tiles)] = made
    _settle(scaled, form, elements, out)


@cache
def largest_code(elements: ElementType) -> int:
    """The code of the largest finite number."""
    return elements.values().index(largest_of(elements))


class _Scaled(NamedTuple):
    """Numbers, raw elements of `dtype` [rows, columns], and the factors of their tiles, as they are
    and turned so that results have the exponents of codes.
    """

    raw: Array
    dtype: str
    factor: Array
    turned: Array
    scales: Scales
    tile: tuple[int, int]

    @property
    def high(self) -> int:
        """The rows that have one row of factors."""
        rows, down = len(self.raw), len(self.factor)
        return rows if down == 1 else 1 if down == rows else self.tile[0]

    @property
    def wide(self) -> int:
        """The columns of a row that have one factor."""
        columns, across = self.raw.shape[1], self.factor.shape[1]
        return columns if across == 1 else 1 if across == columns else self.tile[1]

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows, and runs of columns in them that have one factor."""
        return len(self.raw), self.raw.shape[1] // self.wide

    def picked(self, runs: Array) -> _Scaled:
        """Runs of columns as rows; `runs` broadcasts to `tiles`."""
        import numpy as np

        rows, here = self.tiles, np.broadcast_to(runs, self.tiles)
        found = self.raw.reshape(*rows, self.wide)[here]

        def of(factors: Array) -> Array:
            return np.ascontiguousarray(np.broadcast_to(factors, rows)[here][:, None])

        given = of(self.factor), of(self.turned)
        return _Scaled(found, self.dtype, *given, self.scales, (1, self.wide))


def _with_ties(scaled: _Scaled, form: _Form) -> Array | None:
    """Which runs of columns have numbers whose result can lie halfway between two codes, the lower
    of which is even, as far as it is worth knowing; None: all may.
    """
    import numpy as np

    rows, columns = scaled.raw.shape
    high, wide, factor = scaled.high, scaled.wide, scaled.factor
    if (
        scaled.dtype != "bfloat16"
        or scaled.scales.dtype != "float32"
        or min(high, rows) * wide < _LARGE
        or columns % wide
        or 1 < high < rows
    ):
        return None
    significands = np.arange(128, 256, dtype="f4") / np.float32(128)
    with np.errstate(all="ignore"):
        op = np.divide if scaled.scales.divides else np.multiply
        words = op(significands, factor[..., None]).view("<u4")
    found: Array = ((words & ((2 << form.shift) - 1)) == 1 << (form.shift - 1)).any(-1)
    return None if 4 * np.count_nonzero(found) > found.size else found


def _fill(scaled: _Scaled, form: _Form, even: bool, most: int, out: Array) -> None:
    """Fills `out` with codes, right but for those that are small; ties to even, or else up."""
    import numpy as np

    (rows, columns), high = scaled.raw.shape, scaled.high
    factor, divides = scaled.turned, scaled.scales.divides
    if len(factor) == 1 and factor.shape[1] > 1:
        factor = np.repeat(factor, scaled.wide, 1)[:, :columns]
    # an operation of rows with a number each, or with one row
    plain = factor.shape[1] in (1, columns)
    op, lanes = np.divide if divides else np.multiply, Lanes()
    down, top, buffer = max(1, STEP // columns), 0, np.getbufsize()
    steps: dict[int, _RoundingStep] = {}
    if columns >= _WIDE:
        np.setbufsize(min(buffer, columns // 16 * 16))
    try:
        with np.errstate(all="ignore"):
            while top < rows:
                bottom = min(top + down, rows)
                if 1 < high < rows:
                    bottom = min(bottom, (top // high + 1) * high)
                count = bottom - top
                step = steps.get(count) or steps.setdefault(
                    count, _RoundingStep(count, columns, form)
                )
                raw = scaled.raw[top:bottom]
                floats = lanes.widen(raw, scaled.dtype, step.floats)
                part = factor
                if len(factor) > 1:
                    part = factor[top:bottom] if high == 1 else factor[top // high :][:1]
                if plain:
                    op(floats, part, out=floats)
                else:
                    apply(lanes, floats, part, (high, scaled.wide), op)
                step.finish(raw, scaled.scales.dtype, even, most, out[top:bottom])
                top = bottom
    finally:
        np.setbufsize(buffer)


class _RoundingStep:
    """Room for some rows, as the passes over it want to see it."""

    def __init__(self, count: int, columns: int, form: _Form) -> None:
        size = count * columns
        self._bit = form.shift
        self._words = scratch("float8 words", 4 * size).view("<u4").reshape(count, columns)
        self.floats = self._words.view("<f4")
        self._odd = scratch("float8 odd", 4 * size).view("<u4").reshape(count, columns)
        self._signs = scratch("float8 signs", size).reshape(count, columns)
        self._below = self._signs.view("?")

    def finish(self, raw: Array, narrow: str, even: bool, most: int, out: Array) -> None:
        """Rounds `floats` to `narrow`, ties to even, and fills `out` with the codes and the signs
        of `raw`; larger ones than `most` are that, if it is not 0.
        """
        import numpy as np

        words, bit = self._words, self._bit
        if narrow != "float32":
            last = 16 if narrow == "bfloat16" else 13
            self._add_half(last)
            words &= (1 << 32) - (1 << last)
        if even:
            self._add_half(bit)
        else:
            np.add(words, 1 << (bit - 1), out=words)
        np.right_shift(words, bit, out=words)
        np.copyto(out, words, casting="unsafe")
        if most:
            np.minimum(out, np.full(out.shape[1], most, "u1"), out=out)
        np.less(raw.view(f"<i{raw.itemsize}"), 0, out=self._below)
        np.multiply(self._signs, 128, out=self._signs)
        np.bitwise_or(out, self._signs, out=out)

    def _add_half(self, bit: int) -> None:
        import numpy as np

        np.right_shift(self._words, bit, out=self._odd)
        np.bitwise_and(self._odd, 1, out=self._odd)
        np.add(self._odd, (1 << (bit - 1)) - 1, out=self._odd)
        np.add(self._words, self._odd, out=self._words)


def _settle(scaled: _Scaled, form: _Form, elements: ElementType, out: Array) -> None:
    """Makes the codes of small numbers once more, exactly."""
    import numpy as np

    least = form.normal
    if scaled.scales.dtype == "float16":
        # which has fewer digits below 2^-14
        least = max(least, sum(0 < n <= 2**-14 for n in elements.values()))
    room = scratch("float8 small", out.size).reshape(out.shape)
    small = room.view("?")
    np.bitwise_and(out, 127, out=room)
    np.less_equal(room, least, out=small)
    if 16 * np.count_nonzero(small) > small.size and not elements.dtype.endswith("uz"):
        # zeros, as a sparse weight has, are right, where zero has a sign
        np.logical_and(small, (scaled.raw << 1) != 0, out=small)
    found = np.flatnonzero(small)
    if not found.size:
        return
    rows, columns = np.divmod(found, scaled.raw.shape[1])
    high, down = scaled.high, len(scaled.factor)
    row = 0 if down == 1 else rows if high == 1 else rows // high
    factor = scaled.factor[row, columns // scaled.wide]
    picked = scaled.raw[rows, columns]
    out[rows, columns] = _codes(picked, scaled.dtype, factor, scaled.scales, elements)


def _codes(raw: Array, dtype: str, factor: Array, scales: Scales, elements: ElementType) -> Array:
    import numpy as np

    with np.errstate(all="ignore"):
        numbers = widened(raw, dtype)
        numbers = numbers / factor if scales.divides else numbers * factor
        return looked_up(rounded_to(numbers, scales.dtype), elements.dtype)


def _fill_slowly(
    raw: Array, dtype: str, scales: Scales, tile: tuple[int, int], elements: ElementType, out: Array
) -> None:
    """`fill_codes` for factors that are very large or small."""
    import numpy as np

    lanes = Lanes()
    numbers = lanes.widen(raw, dtype, np.empty(raw.shape, "f4"))
    op = np.divide if scales.divides else np.multiply
    with np.errstate(all="ignore"):
        apply(lanes, numbers, np.ascontiguousarray(scales.factor, "f4"), tile, op)
        out[...] = looked_up(rounded_to(numbers, scales.dtype), elements.dtype)


def too_large(
    codes: Array,
    raw: Array,
    dtype: str,
    scales: Scales,
    tile: tuple[int, int],
    elements: ElementType,
) -> Array:
    """Which numbers lie where no code is nearest; their codes are the largest."""
    import numpy as np

    most = largest_code(elements)
    found: Array = (codes & 127) == most
    rows, columns = np.nonzero(found)
    down, across = scales.factor.shape
    row = 0 if down == 1 else rows if down == len(raw) else rows // tile[0]
    column = 0 if across == 1 else columns if across == raw.shape[1] else columns // tile[1]
    with np.errstate(all="ignore"):
        numbers = widened(np.ascontiguousarray(raw[rows, columns]), dtype)
        factor = scales.factor[row, column]
        numbers = numbers / factor if scales.divides else numbers * factor
        numbers = rounded_to(numbers.astype("f4"), scales.dtype)
        found[rows, columns] = np.abs(numbers) >= nearest_below(elements)
    return found
