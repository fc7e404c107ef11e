"""How the components of a quantized tensor lie: which rows and columns share an element, and how
what is shared is stored. This is the table by which shards of such tensors are joined and cut.

A tensor of any shape is seen as a matrix: its last dimension are the columns, all others the rows.
A component is a grid over it: one element for so many rows and columns. As it is stored, a grid may
lie with the columns first, be filled up to multiples of a tile and be swizzled for one kernel.
What fills it up is undefined memory, so only the grid counts.

Which class has which grids is the table of `quantized_layouts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import NamedTuple

from ..core import view as views
from ..core.spec import Spec
from ..core.view import View

# all rows, or all columns, share one element
ALL = 0
# cuBLAS and CUTLASS read the scales of blocks in tiles of so many rows and columns, and in each
# tile row i of column j at (i % 32) * 16 + i // 32 * 4 + j
TILE = (128, 4)


class ComponentGrid(NamedTuple):
    """One component: an element for each `rows` x `columns` of the tensor (`ALL`: one for all).

    As it is stored: with the columns first if `turned`, each axis filled up to a multiple of
    `tile`, and if `swizzled`, in the order of `TILE`; "turned" where the order is that of the
    transposed array. It has two dimensions, or those of the tensor if `deep`, or one if `line`; if
    `folded`, a quarter of the rows that it has in tiles, and four times the columns.
    """

    rows: int = 1
    columns: int = 1
    turned: bool = False
    tile: tuple[int, int] = (1, 1)
    swizzled: str = ""
    deep: bool = False
    line: bool = False
    folded: bool = False

    @property
    def shared(self) -> bool:
        """Whether the whole tensor has one element."""
        return self.rows == ALL and self.columns == ALL

    def size(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """RowRun and columns of the grid over a tensor of this shape."""
        rows, columns = matrix(shape)
        return _count(rows, self.rows), _count(columns, self.columns)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which the component of such a tensor is stored."""
        high, wide = self.size(shape)
        if self.deep and len(shape) < 2:
            return (wide,) if shape else ()
        if self.deep and len(shape) > 2:
            # where rows share an element, those of the dimension before the last do
            leading = (*shape[:-2], _count(shape[-2], self.rows))
            return (wide, *leading) if self.turned else (*leading, wide)
        if self.line:
            return (high * wide,)
        first, second = self.filled_shape(shape)
        return (first // 4, second * 4) if self.folded else (first, second)

    def filled_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns as they lie, with what fills them up."""
        high, wide = self.size(shape)
        first, second = (wide, high) if self.turned else (high, wide)
        return _up(first, self.tile[0]), _up(second, self.tile[1])

    def borders(self, spec: Spec) -> ComponentGrid:
        """The grid over the elements of such a component: two numbers of 4 bits are one byte, but
        two elements of a 4-bit dtype.
        """
        if spec.dtype != "float4_e2m1fn":
            return self
        if self.turned:
            return self._replace(rows=self.rows // 2)
        return self._replace(columns=self.columns // 2)


class ComponentLayout(NamedTuple):
    """The grids of one tensor by component, and where it may be cut: at multiples of `cut`, rows
    and columns, beyond what the grids ask for.
    """

    grids: Mapping[str, ComponentGrid]
    cut: tuple[int, int] = (1, 1)


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """RowRun and columns of a tensor; one without dimensions is one element."""
    return prod(shape[:-1]), shape[-1] if shape else 1


def unpadded(grid: ComponentGrid, stored: View, shape: tuple[int, ...]) -> View:
    """The grid, [rows, columns], of a tensor of `shape` whose component is `stored`; ValueError if
    that has another shape than such a component.
    """
    high, wide = grid.size(shape)
    flat = _flat(grid, stored.shape, shape)
    v = views.reshape(stored, flat)
    if grid.swizzled:
        v = _unswizzled(v, grid.swizzled == "turned")
    if grid.turned:
        v = views.permute(v, (1, 0))
    if v.shape[0] < high or v.shape[1] < wide:
        raise ValueError(f"a component of shape {list(stored.shape)}")
    return views.slice_(views.slice_(v, 0, 0, high), 1, 0, wide)


def padded(grid: ComponentGrid, v: View, shape: tuple[int, ...]) -> View:
    """The component of a tensor of `shape` from its grid, filled up with zeros."""
    if grid.turned:
        v = views.permute(v, (1, 0))
    stored = grid.stored_shape(shape)
    if grid.deep or grid.line:
        return views.reshape(v, stored)
    for axis, size in enumerate(grid.filled_shape(shape)):
        v = views.pad(v, axis, 0, size - v.shape[axis], 0)
    if grid.swizzled:
        v = _swizzled(v, grid.swizzled == "turned")
    return views.reshape(v, stored)


def _flat(grid: ComponentGrid, stored: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """The stored component as a matrix."""
    if grid.shared:
        if prod(stored) != 1:
            raise ValueError(f"a component of shape {list(stored)}")
        return 1, 1
    if grid.deep or grid.line:
        high, wide = grid.size(shape)
        if prod(stored) != high * wide:
            raise ValueError(f"a component of shape {list(stored)}")
        return (wide, high) if grid.turned else (high, wide)
    if grid.folded and len(stored) == 2 and stored[1] % 4 == 0:
        stored = (stored[0] * 4, stored[1] // 4)
    if len(stored) != 2 or (grid.swizzled and not _fits(stored, grid.swizzled == "turned")):
        raise ValueError(f"a component of shape {list(stored)}")
    return stored[0], stored[1]


def _fits(stored: tuple[int, ...], turned: bool) -> bool:
    high, wide = stored[::-1] if turned else stored
    return high % TILE[0] == 0 and wide % TILE[1] == 0


def _unswizzled(v: View, turned: bool) -> View:
    """What lies in the order of `TILE`, in the order of rows."""
    high, wide = v.shape[::-1] if turned else v.shape
    tiles = views.reshape(v, (high // 128, wide // 4, 32, 4, 4))
    plain = views.reshape(views.permute(tiles, (0, 3, 2, 1, 4)), (high, wide))
    return views.permute(plain, (1, 0)) if turned else plain


def _swizzled(v: View, turned: bool) -> View:
    """What lies in the order of rows, in the order of `TILE`."""
    if turned:
        v = views.permute(v, (1, 0))
    high, wide = v.shape
    tiles = views.reshape(v, (high // 128, 4, 32, wide // 4, 4))
    return views.reshape(views.permute(tiles, (0, 3, 2, 1, 4)), (high * wide,))


def _count(size: int, step: int) -> int:
    return 1 if step == ALL else -(-size // step)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


class RowRun(NamedTuple):
    """A run of `size` rows of a box: where it begins in the whole tensor, and in the box."""

    whole: int
    own: int
    size: int


def segments(
    shape: tuple[int, ...], starts: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[RowRun]:
    """The runs of rows of a box of a tensor, in order."""
    leading, own = shape[:-1], 0
    # dimensions that the box has whole at the end run on
    whole = len(leading)
    while whole and sizes[whole - 1] == leading[whole - 1]:
        whole -= 1
    inner = prod(leading[whole:])
    count = inner * (sizes[whole - 1] if whole else 1)
    for outer in product(*map(range, sizes[: max(0, whole - 1)])):
        at = 0
        for n, start, size in zip((*outer, 0), starts, leading, strict=False):
            at = at * size + start + n
        yield RowRun(at * inner if whole else 0, own, count)
        own += count


def misplaced(
    layout: ComponentLayout,
    attributes: Iterable[str],
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
) -> str | None:
    """Why a box of a tensor has no grids of its own, for these components; None if it has."""
    rows, columns = matrix(shape)
    first = starts[-1] if shape else 0
    last = first + (sizes[-1] if shape else 1)
    steps = [(layout.cut, "")]
    steps += [((g.rows, g.columns), f" of {a}") for a in attributes if (g := layout.grids[a])]
    for (high, wide), of in steps:
        if (high, wide) == (ALL, ALL):
            continue
        wide = wide or columns
        if cut := _inside((first, last), wide, columns):
            return f"column {cut} lies inside a block of {wide} columns{of}"
        high = high or rows
        for run in segments(shape, starts, sizes):
            if cut := _inside((run.whole, run.whole + run.size), high, rows):
                return f"row {cut} lies inside a block of {high} rows{of}"
            if run.own % high:
                return f"the rows from {run.whole} begin inside a block of {high} rows{of}"
    return None


def _inside(borders: tuple[int, int], step: int, size: int) -> int:
    """The border that is none of blocks of `step`; 0 if both are."""
    return next((one for one in borders if one % step and one != size), 0)
