"""Some rows of recoded parts of integers, made plainly of what they come from: what `verify`
compares large tensors with, a few rows at a time.

Rows of a part are rows of the numbers or, where a format stores its parts by columns, columns of
them. So what is made is a window of the numbers, widened to where the words and the blocks of both
formats end, and each part is cut where the window ends. In a window groups are in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from ...core.errors import OpError
from ...core.spec import Spec
from ...core.spec import spec as spec_of
from ...elements.raw import carrier
from .geometry import Extents, geometry
from .layout import Grid, NumberLayout, Packing, Term
from .recoding_integers import IntegerRecoding
from .recoding_reference import recoded_integers

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array = np.ndarray[Any, Any]


@lru_cache(maxsize=256)
def units_of(path: IntegerRecoding) -> tuple[int, int]:
    """The rows and columns of numbers at whose multiples all parts can be cut; 0 where they cannot
    be.
    """
    rows = columns = 1
    for at, geo in enumerate((path.source, path.target)):
        high, wide = path.tiles[at]
        rows, columns = lcm(rows, high), lcm(columns, wide)
        codes = geo.layout.codes
        if getattr(codes, "axis", -1) == -2:
            rows = lcm(rows, geo.unit())
        else:
            columns = lcm(columns, geo.unit())
        padded = []
        if isinstance(codes, Packing):
            padded.append(_is_padded(codes.padded, codes.transposed))
        for grid in geo.layout.grids():
            if grid.packing is not None:
                # of entries, each of a block
                each, _ = grid.packing.unit(geo.spec(grid.role).dtype)
                if grid.packing.axis == -2:
                    rows = lcm(rows, each * high)
                else:
                    columns = lcm(columns, each * wide)
            padded.append(_is_padded(grid.padded, grid.transposed))
        rows = 0 if any(one[0] for one in padded) else rows
        columns = 0 if any(one[1] for one in padded) else columns
    return rows, columns


def _is_padded(multiples: tuple[int, int], transposed: bool) -> tuple[bool, bool]:
    """Whether rows and columns of the numbers are."""
    down, across = multiples[::-1] if transposed else multiples
    return down > 1, across > 1


def makes_rows(path: IntegerRecoding) -> bool:
    """Whether some rows of the codes come from less than all of the source's."""
    shape = path.source.shape
    if len(shape) < 2 or not prod(shape):
        return False
    try:
        _in_turn(path)
    except OpError:
        # groups that are not in turn are not of one length
        return False
    if len(shape) > 2:
        # each part has the leading axes, or is one for all of them
        return shape[0] > 1
    codes = path.target.layout.codes
    by_columns = isinstance(codes, Packing) and codes.transposed
    unit = units_of(path)[by_columns]
    return 0 < unit < shape[by_columns]


def rows_of(
    path: IntegerRecoding,
    role: str,
    start: int,
    stop: int,
    part: Callable[..., Array],
) -> Array:
    """Rows `start` to `stop` of a part, or all of one that has no axes.

    `part(role, low, high)` reads these rows of a part of the source, and with `(first, last)`
    behind them these columns of a matrix.
    """
    import numpy as np

    spec, (one, other) = path.parts[role], path.grids
    if role in path.bytes_of:
        said = np.frombuffer(path.bytes_of[role], carrier(spec.dtype)).reshape(spec.shape)
        return said[start:stop] if spec.shape else said
    if other.index and role == other.index:
        if one.index:
            return part(one.index, start, stop)
        width = np.dtype(carrier(spec.dtype)).itemsize
        group = np.arange(start, stop) // path.tiles[1][1]
        return group.astype(f"<i{width}").view(f"<u{width}")
    box = ((start, stop), *((0, n) for n in spec.shape[1:])) if spec.shape else ()
    window = _window(path, role, box)
    source, target = _in_turn(path)
    zero = source.layout.zero
    if role == target.layout.role:
        wanted = {source.layout.role, *([one.role] if other.field is not None else [])}
    elif role == other.role:
        wanted = {one.role}
    else:
        wanted = {zero.role} if zero is not None else set()
    boxes = _boxes(source, window)
    arrays = {own: _read(part, own, boxes[own], source.spec(own)) for own in wanted}
    found = recoded_integers(_of_window(source, target, window), arrays, role)
    if not spec.shape:
        return found
    low = _boxes(target, window)[role][0][0]
    return found[start - low : stop - low]


def _window(path: IntegerRecoding, role: str, box: Box) -> Box:
    """The numbers of a box of a part, with all axes, widened to what can be made by itself."""
    if role == path.target.layout.role:
        numbers = path.numbers_of_codes(box)
    else:
        numbers = path.of_entries(path.entries_in(role, box))
    inner, sides = [], path.source.full[-2:]
    for (low, high), unit, n in zip(numbers[-2:], units_of(path), sides, strict=True):
        whole = not unit or len(path.source.shape) > 2
        inner.append((0, n) if whole else (low // unit * unit, min(n, -(-high // unit) * unit)))
    return (*numbers[:-2], *inner)


def _read(part: Callable[..., Array], role: str, box: Box, spec: Spec) -> Array:
    if not box:
        return part(role, 0, 1)
    (low, high), inner = box[0], box[1:]
    if inner == tuple((0, n) for n in spec.shape[1:]):
        return part(role, low, high)
    return part(role, low, high, *inner)


def _boxes(geo: Extents, window: Box) -> dict[str, Box]:
    """role -> the box of each part; with its padding where the window goes from end to end."""
    every = geo.needs(tuple((0, n) for n in geo.shape))
    return {
        role: tuple(
            (0, n) if side == whole else side
            for side, whole, n in zip(box, every[role], geo.spec(role).shape, strict=True)
        )
        for role, box in geo.needs(_outer(window, geo)).items()
    }


def _outer(full: Box, geo: Extents) -> Box:
    return full[len(full) - len(geo.shape) :]


@lru_cache(maxsize=256)
def _in_turn(path: IntegerRecoding) -> tuple[Extents, Extents]:
    """The parts of both sides without an index: groups are in turn. OpError as `geometry`."""
    sides = []
    for geo, (_, each) in zip((path.source, path.target), path.tiles, strict=True):
        layout = _without_index(geo.layout, each).of_shape(path.source.shape)
        sides.append(geometry(layout, {role: geo.spec(role) for role in layout.roles()}))
    return sides[0], sides[1]


def _of_window(source: Extents, target: Extents, window: Box) -> IntegerRecoding:
    """The path between both sides for the numbers of a window."""
    shape, sides = tuple(b - a for a, b in _outer(window, source)), []
    for geo in (source, target):
        boxes, layout = _boxes(geo, window), geo.layout.of_shape(shape)
        specs = {
            role: spec_of(geo.spec(role).dtype, tuple(b - a for a, b in boxes[role]))
            for role in layout.roles()
        }
        sides.append((layout, specs))
    (layout, specs), (made, parts) = sides
    return IntegerRecoding(geometry(layout, specs), tuple(specs), made, parts, {})


def _without_index(layout: NumberLayout, each: int) -> NumberLayout:
    """The layout whose groups are in turn, of so many columns each."""

    def turned(grid: Grid) -> Grid:
        return replace(grid, index="", block=(grid.block[0], each)) if grid.index else grid

    scale = tuple(
        Term(how, turned(what) if isinstance(what, Grid) else what) for how, what in layout.scale
    )
    return replace(layout, scale=scale, zero=layout.zero and turned(layout.zero))
