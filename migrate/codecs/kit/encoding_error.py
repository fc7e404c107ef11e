"""What encoding refuses, and what it tells a meter of the error it makes.

Errors are measured on some rows of a large tensor, the same ones however it is cut into boxes;
what saturates or becomes zero is counted in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

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


def sampled_rows(spec_numel: int, top: int) -> slice:
    """The rows of a box from row `top` on whose error is measured."""
    every = min(SPARSEST, max(1, spec_numel // MEASURED))
    return slice(-top % every, None, every)


def tell(
    meter: Meter,
    encoding: PartBoxes,
    lanes: Lanes,
    given: Any,
    codes: Any,
    scales: Scales,
    zero: Array | None,
    largest: Array,
    tile: tuple[int, int],
    top: int,
    tame: bool,
) -> None:
    """Tells `meter` of some rows of a matrix, raw `given` and their `codes` (u1), which begin with
    row `top` and a tile: the error of the sampled ones, and counts of all.
    """
    import numpy as np

    elements, dtype = encoding.layout.elements, encoding.spec.dtype
    table = numbers_of(elements)
    if zero is not None:
        table = np.arange(-(1 << (elements.bits - 1)), 1 << (elements.bits - 1), dtype="f4")
    back = scales.stored if scales.back is None else scales.back

    def spread(grid: Array, rows: slice, shape: tuple[int, ...]) -> Array:
        down = (rows.start + rows.step * np.arange(shape[0])) // tile[0]
        found = grid[down if grid.shape[0] > 1 else np.zeros(shape[0], int)]
        wide: Array = np.repeat(found, tile[1], -1)[:, : shape[1]] if grid.shape[1] > 1 else found
        return wide

    def decoded(rows: slice, of: Array) -> Array:
        with np.errstate(all="ignore"):
            numbers = table[of]
            if zero is not None:
                numbers = numbers - spread(zero, rows, of.shape)
            product: Array = numbers * spread(back, rows, of.shape)
        return product

    def here(array: Any) -> Array:
        if isinstance(array, np.ndarray):
            return array
        if array.is_floating_point():
            array = array.view(lanes.xp.int16 if BITS[dtype] == 16 else lanes.xp.int32)
        found: Array = array.cpu().numpy()
        return found

    raw = f"<u{BITS[dtype] // 8}"
    sampled = sampled_rows(encoding.spec.numel, top)
    rows = here(given[sampled]).view(raw)
    wanted = widened(np.ascontiguousarray(rows), dtype)
    got = decoded(sampled, here(codes[sampled]))
    amax = np.broadcast_to(spread(largest, sampled, wanted.shape), wanted.shape)
    saturated = underflowed = non_finite = 0
    underflowed = _vanished(lanes, given, codes, elements, dtype, zero is not None)
    if not tame or float(np.abs(back).max(initial=0)) * largest_of(elements) > FAR:
        every = slice(0, None, 1)
        all_wanted = widened(np.ascontiguousarray(here(given).view(raw)), dtype)
        all_got = decoded(every, here(codes))
        fine = np.isfinite(all_got)
        lost = ~fine & (all_wanted != all_got) & ~np.isnan(all_wanted)
        non_finite = int(np.count_nonzero(lost))
        # an infinity may come back as one
        saturated = int(np.count_nonzero(np.isinf(all_wanted) & (all_wanted != all_got)))
    meter.add(
        wanted, got, amax, saturated=saturated, underflowed=underflowed, non_finite=non_finite,
        sure=sampled.step == 1,
    )  # fmt: skip


def _vanished(
    lanes: Lanes, given: Any, codes: Any, elements: ElementType, dtype: str, shifted: bool
) -> int:
    """How many numbers became zero that were not."""
    import numpy as np

    if shifted:
        # what stands for zero differs from block to block
        return 0
    zero = elements.values().index(0.0)
    mask = (1 << (elements.bits - bool(elements.dtype))) - 1
    if lanes.device is not None and lanes.device.type != "cpu":
        return int(((codes & mask) == zero).logical_and_(typed(given, dtype) != 0).sum())
    if lanes.device is not None:
        codes, given = codes.numpy(), typed(given, f"int{BITS[dtype]}").numpy()
    if elements.dtype and elements.bits == 8:
        return _rare(codes, given, dtype, mask)
    made = np.bitwise_and(codes, mask, out=scratch("vanished", codes.size).reshape(codes.shape))
    zeros = np.equal(made, zero, out=made.view("?"))
    return int(np.count_nonzero(np.logical_and(zeros, _some(given, dtype), out=zeros)))


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

    room = scratch("vanished", codes.size).reshape(codes.shape)
    made, of = np.bitwise_and(codes, mask, out=room).reshape(-1), given.reshape(-1)
    whole = made.size // RUN * RUN
    runs, beside = made[:whole].reshape(-1, RUN), of[:whole].reshape(-1, RUN)
    at = np.flatnonzero(np.minimum.reduce(runs, 1) == 0)
    found = int(np.count_nonzero((made[whole:] == 0) & _some(of[whole:], dtype)))
    if not at.size:
        return found
    few = at.size < len(runs) // 4
    runs, beside = (runs[at], beside[at]) if few else (runs, beside)
    return found + int(np.count_nonzero((runs == 0) & _some(np.ascontiguousarray(beside), dtype)))
