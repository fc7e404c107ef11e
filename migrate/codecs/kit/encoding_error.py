"""What encoding refuses, and what it tells a meter of the error it makes.

Errors are measured on some rows of a large tensor, the same ones however it is cut into boxes;
what saturates or becomes zero is counted in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...core.errors import OpError
from ...core.spec import BITS, coordinates
from ...elements.raw import scratch, typed
from .layout import ElementType
from .magnitudes import widened
from .rounding import Lanes, largest_of, numbers_of

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box, Meter
    from .encoding_boxes import PartBoxes
    from .scale_rules import Scales

    Array: TypeAlias = "np.ndarray[Any, Any]"

# errors are measured on at least so many elements of a tensor, and in a large one on one row of so
# many: a prime, so that the rows fall on all parts of blocks
MEASURED, SPARSEST = 1 << 13, 509
# elements that are looked at for zeros at a time
RUN = 1 << 12
# beyond it a product of two float32 numbers may be infinite
FAR = 2.0**118


def first_odd(matrix: Any, dtype: str, nan: bool = False) -> tuple[tuple[int, ...], float]:
    """The place of the first number of a matrix of raw elements that is not finite, or with `nan`
    that is NaN, and the number.
    """
    import numpy as np

    raw = matrix
    if not isinstance(raw, np.ndarray):
        raw = typed(raw, f"int{BITS[dtype]}").cpu().numpy()
    numbers = widened(np.ascontiguousarray(raw).view(f"<u{BITS[dtype] // 8}"), dtype)
    mask = np.isnan(numbers) if nan else ~np.isfinite(numbers)
    first = coordinates(int(mask.reshape(-1).argmax()), mask.shape)
    return first, float(numbers[first])


def not_finite(index: list[int], number: float, codeless: str = "") -> OpError:
    """M406 for a number that is not finite. `codeless`: a format without a code for it."""
    message = f"quantize: the number at {index} is {number}"
    if codeless:
        return OpError(
            "M406",
            message,
            help=f"{codeless} has no code for NaN; `non_finite: keep` does what `like` does",
        )
    return OpError(
        "M406",
        message,
        help="`non_finite: saturate` gives infinities the largest code and keeps NaN to itself; "
        "`keep` encodes as `like` does",
    )


def too_small(
    largest: Array, factor: Array, at: tuple[int, ...], full: Box, row: int, tile: tuple[int, int]
) -> OpError:
    """M406 for the first block whose factor is infinite because its numbers are so small."""
    import numpy as np

    first = coordinates(int((~np.isfinite(factor)).reshape(-1).argmax()), factor.shape)
    lead = [a + i for (a, _), i in zip(full[:-2], at, strict=True)]
    starts = [full[-2][0] + row, full[-1][0]]
    block = [*lead, *(s // t + i for s, t, i in zip(starts, tile, first, strict=True))]
    corner = [*lead, *((s // t + i) * t for s, t, i in zip(starts, tile, first, strict=True))]
    reason = f"its largest magnitude is {float(largest[first]):g}, so that the factor is infinite"
    message = f"quantize: block {block}, from {corner} on, has no scale: {reason}"
    return OpError(
        "M406",
        message,
        help="with `scale_fmt: ue8m0` or `like: deepseek` it has one; `non_finite: keep` stores "
        "what `like` makes: 0 and NaN",
    )


class Made(NamedTuple):
    """What became of some rows of a matrix: raw numbers, codes (u1), which of them lie beyond the
    codes where that was looked for, and of their tiles scales, zeros and magnitudes. `tame`: all
    magnitudes and factors are finite.
    """

    part: Any
    codes: Any
    over: Any
    scales: Scales
    zero: Array | None
    largest: Array
    tame: bool


class MeasuredPlace(NamedTuple):
    """The rows and columns that a meter hears of; the entry of the grid of row i is that of number
    (`first` + i) // `high`, and of column j (`left` + j) // `wide`. The error of those that are
    sampled is measured.
    """

    rows: slice
    columns: slice
    first: int
    high: int
    left: int
    wide: int
    sampled_rows: Array
    sampled_columns: Array


def place(
    encoding: PartBoxes,
    full: Box,
    row: int,
    shape: tuple[int, ...],
    entries: tuple[int, ...],
    inside: tuple[slice, slice],
) -> MeasuredPlace:
    """The place of rows from row `row` of the numbers `full` on, of which these are `inside`: the
    same rows of a tensor are measured however it is cut into boxes, all of small ones.
    """
    import numpy as np

    every = min(SPARSEST, max(1, encoding.spec.numel // MEASURED))
    high, wide = encoding.tile
    if encoding.layout.flat:
        # rows are tiles here, and side by side in `inside`
        first, last = row * shape[1], row * shape[1] + shape[0] * shape[1]
        low = max(inside[1].start, first)
        stop = max(low, min(inside[1].stop, last))
        tiles = np.arange((low - first) // wide, -(-(stop - first) // wide))
        tiles = tiles[(full[-1][0] // wide + row + tiles) % every == 0]
        sampled = (tiles[:, None] * wide + np.arange(wide)).reshape(-1) - (low - first)
        sampled = sampled[(sampled >= 0) & (sampled < stop - low)]
        one = np.zeros(1, int)
        columns = slice(low - first, stop - first)
        return MeasuredPlace(slice(0, 1), columns, 0, 1, low - first, wide, one, sampled)
    low = max(inside[0].start, row)
    stop = max(low, min(inside[0].stop, row + shape[0]))
    # of the rows of the tensor each `every`th
    sampled = np.arange(-(full[-2][0] + low) % every, stop - low, every)
    if encoding.surveys_tiles:
        # entries of single rows and columns, or one
        high, wide = (1 if n > 1 else max(m, 1) for n, m in zip(entries, shape, strict=True))
    left = inside[1].start
    every_column = np.arange(inside[1].stop - left if sampled.size else 0)
    return MeasuredPlace(
        slice(low - row, stop - row), inside[1], low - row, high, left, wide, sampled, every_column
    )


def tell(meter: Meter, encoding: PartBoxes, lanes: Lanes, made: Made, at: MeasuredPlace) -> None:
    """Tells `meter` the error of the sampled numbers at a place, and counts of all of them."""
    import numpy as np

    elements, dtype = encoding.layout.elements, encoding.spec.dtype
    flat = encoding.layout.flat

    def within(array: Any) -> Any:
        return (array.reshape(1, -1) if flat else array)[at.rows, at.columns]

    part, codes = within(_raw(made.part, dtype)), within(made.codes)
    over = None if made.over is None else within(made.over)
    if 0 in part.shape:
        return
    if lanes.device is not None and lanes.on_cpu:
        part, codes = part.numpy(), codes.numpy()
    table = numbers_of(elements)
    if made.zero is not None and not elements.negative:
        table = np.arange(-(1 << (elements.bits - 1)), 1 << (elements.bits - 1), dtype="f4")
    back = made.scales.stored if made.scales.back is None else made.scales.back

    def here(array: Any, rows: Any, columns: Any) -> Array:
        kept = array[rows if isinstance(array, np.ndarray) else lanes.of(rows)]
        found: Array = kept if isinstance(kept, np.ndarray) else kept.cpu().numpy()
        return found if columns.size == found.shape[1] else found[:, columns]

    def spread(grid: Array, rows: Any, columns: Any) -> Array:
        found: Array = (grid.reshape(1, -1) if flat else grid)[(at.first + rows) // at.high]
        if columns.size == part.shape[1]:
            skip = at.left // at.wide * at.wide
            low = at.left - skip
            every = np.repeat(found[:, skip // at.wide :], at.wide, 1)
            return every[:, low : low + columns.size]
        across: Array = found[:, (at.left + columns) // at.wide]
        return across

    def compared(rows: Any, columns: Any) -> tuple[Array, Array]:
        raw = np.ascontiguousarray(here(part, rows, columns))
        wanted = widened(raw.view(f"<u{BITS[dtype] // 8}"), dtype)
        with np.errstate(all="ignore"):
            got = table[here(codes, rows, columns)]
            if made.zero is not None:
                got = got - spread(made.zero, rows, columns)
            got = got * spread(back, rows, columns)
        return wanted, got

    if made.tame and float(np.abs(back).max(initial=0)) * largest_of(elements) <= FAR:
        non_finite = 0
        saturated = 0 if over is None else lanes.count(over)
        underflowed = _vanished(part, codes, elements, dtype, made.zero is not None)
    else:
        every = np.arange(part.shape[0]), np.arange(part.shape[1])
        non_finite, saturated, underflowed = _lost(
            *compared(*every), None if over is None else here(over, *every)
        )
    wanted = got = amax = np.empty(0, "f4")
    if at.sampled_rows.size:
        wanted, got = compared(at.sampled_rows, at.sampled_columns)
        amax = spread(made.largest, at.sampled_rows, at.sampled_columns)
    sure = wanted.size == part.shape[0] * part.shape[1]
    meter.add(
        wanted, got, amax, saturated=saturated,
        underflowed=underflowed, non_finite=non_finite, sure=sure,
    )  # fmt: skip


def _raw(array: Any, dtype: str) -> Any:
    """Raw elements of numpy or torch as integers that both can look at."""
    import numpy as np

    return array if isinstance(array, np.ndarray) else typed(array, f"int{BITS[dtype]}")


def _lost(wanted: Array, got: Array, over: Array | None) -> tuple[int, int, int]:
    """How many numbers came back infinite or undefined that were not, how many lie beyond the codes
    and did not come back, and how many became zero.
    """
    import numpy as np

    differs = wanted != got
    lost = ~np.isfinite(got) & differs & ~np.isnan(wanted)
    # an infinity may come back as one
    beyond = 0 if over is None else int(np.count_nonzero(over & differs))
    return int(np.count_nonzero(lost)), beyond, int(np.count_nonzero((got == 0) & differs))


def _vanished(part: Any, codes: Any, elements: ElementType, dtype: str, shifted: bool) -> int:
    """How many numbers became zero that were not: raw elements, and their codes."""
    import numpy as np

    if shifted:
        # what stands for zero differs from block to block
        return 0
    zero = int(np.argmax(numbers_of(elements) == 0))
    mask = (1 << (elements.bits - bool(elements.dtype))) - 1
    if not isinstance(part, np.ndarray):
        magnitudes = part & ((1 << BITS[dtype] - 1) - 1)
        return int(((codes & mask) == zero).logical_and_(magnitudes != 0).sum())
    if elements.dtype and elements.bits == 8:
        return _rare(codes, part, dtype, mask)
    # a zero that was given has the code of zero, whatever the scale is: both are counted by
    # themselves, which is a pass less than looking at both
    made = np.bitwise_and(codes, mask, out=scratch("vanished", codes.size).reshape(codes.shape))
    if elements.numbers.count(0) > 1:
        # several codes stand for zero
        made = numbers_of(elements)[made]
    elif zero:
        np.bitwise_xor(made, zero, out=made)
    kept = np.count_nonzero(made)
    magnitudes = scratch("not zero", part.nbytes).view(part.dtype).reshape(part.shape)
    np.bitwise_and(part, (1 << BITS[dtype] - 1) - 1, out=magnitudes)
    return int(np.count_nonzero(magnitudes) - kept)


def _some(given: Array, dtype: str) -> Array:
    """Which raw floats are not zero."""
    import numpy as np

    room = scratch("not zero", given.nbytes).view(given.dtype).reshape(given.shape)
    magnitudes = np.bitwise_and(given, (1 << BITS[dtype] - 1) - 1, out=room)
    found: Array = np.not_equal(
        magnitudes, 0, out=scratch("some", given.size).view("?").reshape(given.shape)
    )
    return found


def _rare(codes: Array, given: Array, dtype: str, mask: int) -> int:
    """How many codes without a sign are 0 where what was given is not: where few are, few runs of
    them need a second look.
    """
    import numpy as np

    made, of = codes.reshape(-1), given.reshape(-1)
    whole = made.size // RUN * RUN
    runs, beside = made[:whole].reshape(-1, RUN), of[:whole].reshape(-1, RUN)
    # zero is the least code, and with a sign the least signed one
    least = np.minimum.reduce(runs, 1) == 0
    least |= np.minimum.reduce(runs.view("i1"), 1) == -128
    at = np.flatnonzero(least)
    found = int(np.count_nonzero((made[whole:] & mask == 0) & _some(of[whole:], dtype)))
    if not at.size:
        return found
    few = at.size < len(runs) // 4
    runs, beside = (runs[at], beside[at]) if few else (runs, beside)
    some = _some(np.ascontiguousarray(beside), dtype)
    return found + int(np.count_nonzero((runs & mask == 0) & some))
