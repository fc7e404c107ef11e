"""A box of a quantized tensor as the tensor that it is by itself: the opposite of joining.

Of each component the grid of the whole is taken out of what is stored around it, the box's part of
it is cut out, and stored as the class stores that of a tensor of the box's size, filled up with
zeros. It is layout and nothing else, and exact where the box ends on borders of blocks, which is
the test for joining (`component_grids.misplaced`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeAlias

from ..core import view as views
from ..core.spec import Spec
from ..core.view import TooManyPieces, View
from .component_grids import ComponentGrid, misplaced, padded, segments, unpadded
from .pickle.tree import Encoding
from .quantized_layouts import layout_of

# where a box begins in a tensor, and its sizes
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def uncut(encoding: Encoding, components: Iterable[str], box: Box) -> str | None:
    """Why a box of a tensor of this encoding is no tensor without loss; None if it is one."""
    if box[1] == encoding.shape:
        return None
    layout = layout_of(encoding)
    names = [name for name in components if "." not in name]
    if layout is None or any(name not in layout.grids for name in names):
        return f"how {encoding.name} ({encoding.format}) is cut is not known"
    first = 1 if encoding.members else 0
    starts, sizes = box
    if first and sizes[first:] != encoding.shape[first:]:
        shared = [name for name in names if layout.grids[name].shared]
        if shared:
            return f"members are cut that have one {shared[0]} each"
    return misplaced(layout, names, encoding.shape[first:], starts[first:], sizes[first:])


def component_of(encoding: Encoding, name: str, whole: View, dtype: str, box: Box) -> View:
    """The component of a box, given that of the whole tensor; ValueError if that has another shape
    than the encoding says. `uncut` has nothing against the box.
    """
    layout = layout_of(encoding)
    if "." in name or layout is None or box[1] == encoding.shape:
        # the tensors of a quantizer are not of the tensor's shape
        return whole
    grid, (starts, sizes) = layout.grids[name].borders(Spec(dtype, ())), box
    if not encoding.members:
        return _cut(grid, whole, encoding.shape, starts, sizes)
    members = views.unbind(whole, 0)[starts[0] : starts[0] + sizes[0]]
    inner = encoding.shape[1:]
    return views.stack([_cut(grid, one, inner, starts[1:], sizes[1:]) for one in members], 0)


def views_of(encoding: Encoding, wholes: Mapping[str, tuple[View, str]], box: Box) -> list[View]:
    """The components of a box, given the view and the dtype of each of the whole tensor; the whole
    ones where the box is no tensor without loss.
    """
    if uncut(encoding, wholes, box) is None:
        with suppress(ValueError, TooManyPieces):
            return [
                component_of(encoding, name, whole, dtype, box)
                for name, (whole, dtype) in wholes.items()
            ]
    return [whole for whole, _ in wholes.values()]


class ComponentCut(NamedTuple):
    """The component `name` of a box, cut from the output `key`, which is that of the whole.

    `anew` has the outputs of all components where the box is decoded and encoded anew.
    """

    key: str
    encoding: Encoding
    name: str
    box: Box
    anew: Mapping[str, str] | None = None

    def view_of(self, whole: View, dtype: str) -> View:
        """The component, given the output's view; ValueError as `component_of`."""
        return component_of(self.encoding, self.name, whole, dtype, self.box)


def shape_anew(encoding: Encoding, name: str, whole: Spec, box: Box) -> tuple[int, ...]:
    """The shape of a component of a box that is an object of its own; ValueError where it is not
    known how the class is cut.
    """
    layout = layout_of(encoding)
    if layout is None or name not in layout.grids:
        raise ValueError(f"how {encoding.name} ({encoding.format}) is cut is not known")
    grid, sizes = layout.grids[name].borders(whole), box[1]
    if encoding.members:
        inner = whole.shape[1:] if grid.shared else grid.stored_shape(sizes[1:])
        return sizes[0], *inner
    return whole.shape if grid.shared else grid.stored_shape(sizes)


def is_shared(encoding: Encoding, name: str) -> bool:
    """Whether every box of a tensor has this component as it is."""
    layout = layout_of(encoding)
    return "." in name or (
        layout is not None and layout.grids[name].shared and not encoding.members
    )


def _cut(
    grid: ComponentGrid,
    whole: View,
    shape: tuple[int, ...],
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
) -> View:
    if grid.shared or sizes == shape:
        return whole
    own = unpadded(grid, whole, shape)
    if grid.columns and shape:
        first, last = starts[-1], starts[-1] + sizes[-1]
        own = views.slice_(own, 1, first // grid.columns, -(-last // grid.columns))
    if grid.rows:
        runs = [
            views.slice_(own, 0, run.whole // grid.rows, -(-(run.whole + run.size) // grid.rows))
            for run in segments(shape, starts, sizes)
        ]
        own = views.concat(runs, 0) if len(runs) > 1 else runs[0]
    return padded(grid, own, sizes)
