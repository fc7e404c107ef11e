"""Some rows of recoded parts, made plainly of some rows of the source's: what `verify` compares
large tensors with, a few rows at a time.

Numbers are cut where both formats have whole blocks, and the parts of the source with them. What
all rows share, as the scale of all numbers, is surveyed before or read whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...core.spec import spec as spec_of
from .geometry import Extents, geometry
from .layout import Grid
from .recoding import Recoding, stands_for
from .recoding_reference import recoded_parts, whole_of_powers
from .reference import _widened as widened

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array = np.ndarray[Any, Any]


@lru_cache(maxsize=256)
def unit_of(path: Recoding) -> int:
    """The rows of numbers at whose multiples the first axes of all parts can be cut; 0 where a part
    cannot be, or but for its end.
    """
    shape, sides = path.source.shape, (path.source, path.target)
    if len(shape) < 2:
        return 0
    unit = 1
    if len(shape) == 2:
        for geo in sides:
            for grid in geo.layout.grids():
                rows = geo.block(grid)[0]
                if grid.swizzled:
                    unit = lcm(unit, 128)
                elif 0 < rows < shape[0]:
                    unit = lcm(unit, rows)
    if unit >= shape[0]:
        return 0
    whole = path.chains[1].whole
    for geo in sides:
        shared = {grid.role for grid in geo.layout.grids() if _is_shared(geo, grid)}
        for role in geo.layout.roles():
            made_once = geo is path.target and (whole is None or role != whole.role)
            if not _is_cut(geo, role, unit, role in shared and not made_once):
                return 0
    grid = path.chains[0].grid
    entries = path.source.form(grid) == path.source.spec(grid.role).shape and not grid.swizzled
    entries = entries and (grid.leading or len(shape) == 2)
    return unit if entries or not path.surveyed else 0


def _is_shared(geo: Extents, grid: Grid) -> bool:
    """Whether all rows of numbers have the same entries of a grid."""
    if len(geo.shape) > 2:
        return not grid.leading
    return not 0 < geo.block(grid)[0] < geo.shape[0]


def _is_cut(geo: Extents, role: str, unit: int, shared: bool) -> bool:
    """Whether rows of a part are those of numbers; `shared`: or all of it is that of each."""
    every = tuple((0, n) for n in geo.spec(role).shape)
    count = geo.shape[0]
    if _box(geo, role, 0, count) != every:
        # what is padded has rows of no numbers
        return False
    first, second = (_box(geo, role, a, min(a + unit, count)) for a in (0, unit))
    if shared and first == second == every:
        return True
    if not every or first[1:] != every[1:] or second[1:] != every[1:]:
        return False
    rows = first[0][1]
    return first[0][0] == 0 and second[0] == (rows, min(2 * rows, every[0][1]))


def _box(geo: Extents, role: str, first: int, last: int) -> Box:
    return geo.needs(((first, last), *((0, n) for n in geo.shape[1:])))[role]


def recoded_rows(
    path: Recoding,
    role: str,
    start: int,
    stop: int,
    part: Callable[[str, int, int], Array],
    survey: Array | None = None,
) -> Array:
    """Rows `start` to `stop` of a part, or all of one that rows share.

    `part` reads rows of a part of the source, `survey` is what `survey_rows` found.
    """
    unit, count = unit_of(path), path.source.shape[0]
    cut = _box(path.target, role, 0, unit) != _box(path.target, role, 0, count)
    first, last = 0, unit
    if cut:
        each = _box(path.target, role, 0, unit)[0][1]
        first, last = start // each * unit, min(count, -(-stop // each) * unit)
    arrays, specs, made = {}, {}, {}
    for own in path.source.layout.roles():
        box = _box(path.source, own, first, last)
        arrays[own] = part(own, *(box[0] if box else (0, 1)))
        specs[own] = spec_of(path.source.spec(own).dtype, arrays[own].shape)
    for own, spec in path.parts.items():
        made[own] = spec_of(spec.dtype, _lengths(_box(path.target, own, first, last)))
    rows = _of_rows(path, specs, made)
    whole = None
    if survey is not None:
        whole = whole_of_powers(path, survey)
        whole = whole[first:last] if whole.ndim and len(whole) > 1 else whole
    found = recoded_parts(rows, arrays, whole)[role]
    low = _box(path.target, role, first, last)[0][0] if cut else 0
    return found[start - low : stop - low] if found.ndim else found


def _lengths(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)


def _of_rows(path: Recoding, specs: dict[str, Spec], made: dict[str, Spec]) -> Recoding:
    """The same path for some rows, the last of which may be less than a block."""
    layout = path.source.layout
    rows = Recoding(geometry(layout, specs), path.target.layout, made, path.exact_in)
    rows.coarse, rows.shift = path.coarse, path.shift
    return rows


def survey_rows(path: Recoding, start: int, array: Array, known: Array | None = None) -> Array:
    """The largest scale of each matrix, or of all, in float64, after the rows from `start` on of
    the stored scales; NaN where there is none yet.
    """
    import numpy as np

    grid = path.chains[0].grid
    found = np.full(path.source.full[:-2], np.nan) if known is None else known
    entries = widened(np.ascontiguousarray(array), stands_for(grid, path.source))
    if array.ndim == 2:
        largest = np.fmax.reduce(entries, axis=None, initial=np.nan)
        return np.asarray(np.fmax(found, largest))
    found[start : start + len(array)] = np.fmax.reduce(entries, axis=(-2, -1), initial=np.nan)
    return found


__all__ = ["recoded_rows", "survey_rows", "unit_of"]
