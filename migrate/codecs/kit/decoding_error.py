"""What decoding refuses, and what it tells a meter of the error it makes.

Errors are measured on some rows of a large tensor, the same ones however it is cut into boxes; what
becomes infinite or zero is counted in all, where scales are such that anything can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import inf, isfinite, prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...core.errors import OpError
from ...core.spec import coordinates
from ...elements.codes import FLOATS
from ...elements.numbers import is_numpy
from .box_decoding import BoxDecoder
from .geometry import Extents, Held
from .layout import FLOATS as WIDE
from .layout import ElementType, Grid, Packing, Term
from .tables import values, widened

if TYPE_CHECKING:
    from ...ops.base import Box, Meter

# errors are measured on at least so many elements of a tensor, and in a large one on one row of so
# many: a prime, so that the rows fall on all parts of blocks
MEASURED, SPARSEST = 1 << 13, 509
# numbers that are measured together; rows that are shorter are measured several at a time
_TOGETHER = 1 << 10
# of bytes whose numbers grow with their codes, the bits that are no sign; all are set in NaN
_ORDERED = {"float8_e4m3fn": 0x7F, "float8_e8m0fnu": 0xFF}


class _Refusal(NamedTuple):
    """Which entries of a grid are refused, and what is said of the first of them."""

    odd: Callable[[Any], Any]
    said: str
    help: str


def check_entries(geo: Extents, work: BoxDecoder, grid: Grid, full: Box) -> None:
    """OpError M406 at the first entry that a box needs and that the grid does not take: one that is
    not `positive`, `finite` or `nonzero`, or neither NaN nor one of `powers` where its dtype has
    others; or where all are `misread`.
    """
    has_others = grid.powers and geo.spec(grid.role).dtype in WIDE
    if not has_others and _all_positive(geo, work, grid):
        return
    for at in work.matrices() if grid.field is not None else [()]:
        entries = work.known(grid) if grid.field is None else work.entries(grid, at)
        if 0 in entries.shape[-2:]:
            continue
        low, high = float(entries.min()), float(entries.max())
        if grid.misread is not None and low == high == grid.misread:
            _refuse_misread(geo, grid)
        # NaN is not within anything
        within = low > (-inf if grid.finite else 0) or (grid.zeros and low == 0)
        if within and high < inf and not has_others:
            continue
        found = _near(entries)
        for refusal in _refusals(geo, grid, has_others):
            wrong = refusal.odd(found)
            if not wrong.any():
                continue
            index = coordinates(int(wrong.reshape(-1).argmax()), wrong.shape)
            whose = _whose(geo, grid, full, (*at, *index))
            said = refusal.said.format(float(found[index]))
            of = f"the {grid.role}" if grid.field is None else f"a scale in the {grid.role}"
            raise OpError("M406", f"dequantize: {of} of {whose} {said}", help=refusal.help)


def _refuse_misread(geo: Extents, grid: Grid) -> NoReturn:
    """OpError M406 for zeros that all are the middle of the codes in the other form."""
    form, other = ("v1", "v2") if grid.packing and grid.packing.plus else ("v2", "v1")
    middle = 1 << (geo.layout.elements.bits - 1)
    raise OpError(
        "M406",
        f"dequantize: all of the {grid.role} are {grid.misread} as {form}, and as {other} "
        f"{middle}, the middle of the codes, as of weights that are symmetric",
        help=f"numbers would be off by a step of their scale: correct `checkpoint_format` in the "
        f"configuration, or `form: {form}` in the rule",
    )


def _all_positive(geo: Extents, work: BoxDecoder, grid: Grid) -> bool:
    """Whether bytes say of all entries that a box needs that they are positive and finite."""
    found = work.stored(grid)
    if found is None or not found.size:
        return False
    dtype = geo.spec(grid.role).dtype
    dtype = grid.byte if dtype == "uint8" else dtype
    most = _ORDERED.get(dtype, 0)
    # the code 0 is zero, but for that of E8M0
    least = 0 if dtype == "float8_e8m0fnu" else 1
    return int(found.max()) < most and int(found.min()) >= least


def _refusals(geo: Extents, grid: Grid, has_others: bool) -> Iterator[_Refusal]:
    """What a grid refuses."""
    if grid.positive:
        # the least float32 above zero
        least = 0.0 if grid.zeros else 2.0**-149
        yield _Refusal(
            lambda e: ~((e >= least) & (e < inf)), "is {:g}",
            "a scale is positive and finite, and numbers under another would be zero, NaN or of "
            "the wrong sign: look where it comes from; `non_finite: keep` decodes what is stored",
        )  # fmt: skip
    if grid.finite:
        yield _Refusal(
            lambda e: ~((e > -inf) & (e < inf)), "is {:g}",
            "no encoder makes it, and numbers under it would be infinite or NaN: the file is "
            "damaged or of another type; `non_finite: keep` decodes what is stored",
        )  # fmt: skip
    if grid.nonzero:
        largest = (1 << geo.layout.elements.bits) - 1
        yield _Refusal(
            lambda e: e == 0,
            f"is stored as {largest}, which less 1 can be 0 or {largest + 1}",
            "GPTQModel subtracts 1 from whole words, and reads it as 0 that borrowed from its "
            "neighbour: `zeros: words` does the same",
        )
    if has_others:
        yield _Refusal(
            _are_no_powers,
            f"is {{:g}}, which is not a power of two, as scales of {geo.layout.name} are",
            "the parts belong to different tensors, or are of another format",
        )


def _are_no_powers(entries: Any) -> Any:
    import numpy as np

    return (np.frexp(entries)[0] != 0.5) & ~np.isnan(entries)


def check_exact(geo: Extents, work: BoxDecoder, dtype: str, full: Box, made: Any) -> None:
    """OpError M406 at the first number that is not the product of its code and scale."""
    import numpy as np

    for at in work.matrices():
        low, high = _scales_between(geo, work, at)
        if _is_tame(geo, work, at, high, dtype) and _stays(geo, work, low, dtype):
            continue
        for chunk, got in _parts(_doubtful(geo, work, at, dtype, full), full, made[at]):
            codes, scale, _ = (_near(x) for x in work.plain(at, chunk))
            with np.errstate(all="ignore"):
                wanted = codes * scale
            lost = np.isfinite(wanted) & (_widened(got, dtype) != wanted)
            if lost.any():
                index = coordinates(int(lost.reshape(-1).argmax()), lost.shape)
                factor = float(np.broadcast_to(scale, lost.shape)[index])
                place = _place(geo, (*at, *index), chunk, full)
                raise OpError(
                    "M406",
                    f"dequantize: the number at {place} is {float(codes[index]):g} times "
                    f"{factor:g}, which {dtype} cannot hold",
                    help="no weight is of that size: look where the scale comes from",
                )


def _doubtful(
    geo: Extents, work: BoxDecoder, at: tuple[int, ...], dtype: str, full: Box
) -> list[Held]:
    """The parts of a matrix that may hold a product out of the range of `dtype`: rows of which one
    scale is so small or large. A block of zeros alone has the smallest scale that there is.
    """
    import numpy as np

    (term, *more), packing = geo.layout.scale, geo.layout.codes
    grid = term.what
    by_rows = isinstance(packing, Packing) and packing.axis == -1
    if more or not by_rows or not isinstance(grid, Grid) or not grid.block[0]:
        return work.chunks()
    least, largest = _magnitudes(geo, work)
    entries, form = abs(_near(work.entries(grid, at))), FLOATS[dtype]
    with np.errstate(all="ignore"):
        small = (entries * least < form.quantum) & (entries > 0)
        rows = (small | (entries * largest > form.largest)).any(1)
    # one for each row of numbers
    first = geo.entries_held(grid, full).rows[0] * grid.block[0]
    rows = np.repeat(rows, grid.block[0])
    out = []
    for (low, high), columns in work.chunks():
        found = np.flatnonzero(rows[low - first : high - first]) + low
        if found.size:
            # neighbours together
            runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
            out += [Held((int(run[0]), int(run[-1]) + 1), columns) for run in runs]
    return out


def _whose(geo: Extents, grid: Grid, full: Box, index: Sequence[int]) -> str:
    """The numbers that an entry of those that a box needs belongs to."""
    held, block = geo.entries_held(grid, full), geo.block(grid)
    if grid.index:
        return f"row {index[-2] + held.rows[0]} and group {index[-1]}"
    lead = [low * grid.leading + i for (low, _), i in zip(full[:-2], index, strict=False)]
    inner = [(i + low) * b for i, (low, _), b in zip(index[-2:], held, block, strict=True)]
    first = [*lead, *inner][-len(geo.shape) :] if geo.shape else []
    if geo.layout.flat:
        first = list(coordinates(inner[-1], geo.shape))
    return f"the numbers from {first} on"


def measure(geo: Extents, work: BoxDecoder, dtype: str, full: Box, made: Any, meter: Meter) -> None:
    """Gives `meter` the error of a sample, and how many of all became infinite or zero."""
    import numpy as np

    sampled, sure = _sampled(geo, full), _every(geo) == 1
    _, largest = _magnitudes(geo, work)
    after = geo.layout.after or 1.0
    for at in work.matrices():
        lost, zeros = _lost(geo, work, at, dtype, full, made[at])
        for chunk, got in _parts(sampled, full, made[at]):
            codes, scale, less = (_near(x) for x in work.plain(at, chunk))
            with np.errstate(all="ignore"):
                wanted = _product(codes, scale * after, less)
                reach = np.abs(scale * after) * largest
            meter.add(wanted, _widened(got, dtype), reach, non_finite=0, sure=sure)
        none = np.empty(0)
        meter.add(none, none, saturated=lost, underflowed=zeros, non_finite=lost, sure=sure)


def _lost(
    geo: Extents, work: BoxDecoder, at: tuple[int, ...], dtype: str, full: Box, made: Any
) -> tuple[int, int]:
    """How many finite products of a matrix became infinite, and how many that are not 0 did."""
    import numpy as np

    low, high = _scales_between(geo, work, at)
    count, vanish = not _is_tame(geo, work, at, high, dtype), not _stays(geo, work, low, dtype)
    lost = zeros = 0
    after = geo.layout.after or 1.0
    if count or vanish:
        for chunk, raw in _parts(work.chunks(), full, made):
            codes, scale, less = (_near(x) for x in work.plain(at, chunk))
            got = _widened(raw, dtype)
            with np.errstate(all="ignore"):
                finite = np.isfinite(_product(codes, scale * after, less))
            lost += int((np.isinf(got) & finite).sum())
            zeros += int(((got == 0) & (codes != 0) & (scale != 0)).sum()) if vanish else 0
    return lost, zeros


def _product(codes: Any, scale: Any, less: Any) -> Any:
    """The number before it is rounded."""
    made = codes * scale
    return made if less is None else made - less


def _near(array: Any) -> Any:
    """float64 of numpy."""
    import numpy as np

    if array is None:
        return None
    # a NaN of float16 stays one that warns
    with np.errstate(invalid="ignore"):
        return (array if is_numpy(array) else array.cpu().numpy()).astype("f8")


def _widened(raw: Any, dtype: str) -> Any:
    import numpy as np

    found = np.ascontiguousarray(raw if is_numpy(raw) else raw.cpu().numpy())
    return widened(found.view(f"<u{found.itemsize}"), dtype).astype("f8")


def _parts(chunks: list[Held], full: Box, matrix: Any) -> Iterator[tuple[Held, Any]]:
    """Chunks of a box, and what was made of them."""
    (top, _), (left, _) = full[-2:]
    for chunk in chunks:
        rows, columns = chunk
        yield chunk, matrix[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left]


def _every(geo: Extents) -> int:
    """One row of so many is measured."""
    return min(SPARSEST, max(1, prod(geo.full) // MEASURED))


def _sampled(geo: Extents, full: Box) -> list[Held]:
    """The parts of a matrix of a box whose error is measured: the same of a tensor however it is
    cut into boxes. Measuring all would take longer than computing them.
    """
    every, (rows, columns) = _every(geo), full[-2:]
    if every == 1:
        return [Held(rows, columns)]
    if geo.full[-2] == 1:
        return [Held(rows, side) for side in _one_of(columns, _TOGETHER, every)]
    step = max(1, _TOGETHER // max(1, geo.full[-1]))
    return [Held(side, columns) for side in _one_of(rows, step, every)]


def _one_of(side: tuple[int, int], step: int, every: int) -> list[tuple[int, int]]:
    """Of the parts of `step` of an axis one of `every`, as far as they lie in a side."""
    low, high = side
    starts = range(low // (step * every) * step * every, high, step * every)
    found = [(max(start, low), min(start + step, high)) for start in starts]
    return [(first, stop) for first, stop in found if first < stop]


def _magnitudes(geo: Extents, work: BoxDecoder) -> tuple[float, float]:
    """The smallest magnitude of a code that is not zero, and the largest."""
    elements = geo.layout.elements
    if elements.part:
        found = _near(work.values())
        return _least(found), _largest(found)
    return _magnitudes_of(elements)


@lru_cache(maxsize=64)
def _magnitudes_of(elements: ElementType) -> tuple[float, float]:
    found = values(elements).astype("f8")
    return _least(found), _largest(found)


def _largest(numbers: Any) -> float:
    import numpy as np

    finite = np.abs(numbers[np.isfinite(numbers)])
    return float(finite.max()) if finite.size else 0.0


def _least(numbers: Any) -> float:
    """The least magnitude that is not zero; infinity if there is none."""
    import numpy as np

    magnitudes = np.abs(numbers)
    if magnitudes.dtype == np.float32 and magnitudes.size:
        # the bits of positive floats are in their order, NaN on top; less 1 a zero comes after all
        words = np.ascontiguousarray(magnitudes).view("<u4")
        first = (words - np.uint32(1)).min(keepdims=True) + np.uint32(1)
        found = float(first.reshape(-1).view("<f4")[0])
        return found if found > 0 else float("inf")
    some = magnitudes[magnitudes > 0]
    return float(some.min()) if some.size else float("inf")


def _scales_between(geo: Extents, work: BoxDecoder, at: tuple[int, ...]) -> tuple[float, float]:
    """Bounds of the scales of a matrix, as `_bounds`."""
    low, high = _bounds(geo, work, at, geo.layout.scale)
    after = 1.0 if geo.layout.after is None else abs(geo.layout.after)
    return low * after, high * after


def _bounds(
    geo: Extents, work: BoxDecoder, at: tuple[int, ...], terms: tuple[Term, ...]
) -> tuple[float, float]:
    """Bounds of the magnitudes of what a chain makes for a matrix, from below of those that are not
    zero; NaN where one is NaN.
    """
    low = high = 1.0
    for how, what in terms:
        below, above = (
            _extremes(geo, work, what, at) if isinstance(what, Grid) else (abs(what),) * 2
        )
        if how == "*":
            low, high = low * below, high * above
        elif how == "/":
            low, high = low / above if above else 0.0, high / below if below else float("inf")
        else:
            low, high = 0.0, high + above
    return low, high


def _extremes(
    geo: Extents, work: BoxDecoder, grid: Grid, at: tuple[int, ...]
) -> tuple[float, float]:
    """The smallest magnitude of the entries of a grid that is not zero, and the largest."""
    import numpy as np

    bytes_of = work.stored(grid, at)
    dtype = "" if bytes_of is None else geo.spec(grid.role).dtype
    dtype = grid.byte if dtype == "uint8" else dtype
    if bytes_of is not None and bytes_of.size and dtype in _ORDERED:
        # without its sign a code is the larger the larger its number is, and NaN is the largest
        codes = bytes_of & np.uint8(_ORDERED[dtype])
        least = codes if dtype == "float8_e8m0fnu" else codes - np.uint8(1)
        # of zeros alone it is 255, to which 1 is 0 again
        first = int(least.min()) + (dtype != "float8_e8m0fnu") & 0xFF
        below, above = widened(np.array([first, codes.max()], "u1"), dtype)
        return float(below) or float("inf"), float(above)
    found = abs(work.entries(grid, at))
    return _least(found if is_numpy(found) else _near(found)), float(found.max())


def _is_tame(geo: Extents, work: BoxDecoder, at: tuple[int, ...], high: float, dtype: str) -> bool:
    """Whether no product with scales up to `high` can become infinite."""
    _, reach = _magnitudes(geo, work)
    if geo.layout.zero is not None:
        reach += 1 << geo.layout.elements.bits
    less = _bounds(geo, work, at, geo.layout.less)[1] if geo.layout.less else 0.0
    most = high * reach + less
    return isfinite(high) and isfinite(less) and most <= FLOATS[dtype].largest


def _stays(geo: Extents, work: BoxDecoder, low: float, dtype: str) -> bool:
    """Whether no product with scales from `low` on is so small that digits or all are lost."""
    step = 1.0 if geo.layout.zero is not None else _magnitudes(geo, work)[0]
    return low * step >= FLOATS[dtype].quantum or bool(geo.layout.less)


def _place(geo: Extents, index: tuple[int, ...], chunk: Held, full: Box) -> list[int]:
    """The index within the tensor of one within a chunk of a matrix."""
    *lead, row, column = index
    row, column = row + chunk.rows[0], column + chunk.columns[0]
    if geo.layout.flat:
        return list(coordinates(column, geo.shape))
    found = [*(i + low for i, (low, _) in zip(lead, full, strict=False)), row, column]
    return found[len(found) - len(geo.shape) :]
