"""The padding of the scales of quantized tensors: memory that is neither read nor initialised.

Kernels ask for scales in whole tiles, and what a tensor does not fill of its last tiles is left as
it was allocated. So two equal checkpoints differ there, and what fills it up counts for nothing
when checkpoints are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import view as views
from ..core.errors import listed
from ..core.view import TooManyPieces, View
from ..source.component_grids import ComponentGrid, padded, unpadded
from ..source.quantized_layouts import layout_of
from ..source.tree import objects_of
from .eager import copy_pieces

if TYPE_CHECKING:
    import numpy as np

    from ..source.index import Index


class FilledUp(NamedTuple):
    """A component that is filled up: its grid over a tensor of `shape`, or over each of so many
    `members` of this shape.
    """

    grid: ComponentGrid
    shape: tuple[int, ...]
    members: int

    def zeroed(self, stored: View) -> View | None:
        """The component with zeros where it is filled up; None if that is not to be seen."""
        try:
            if not self.members:
                return padded(self.grid, unpadded(self.grid, stored, self.shape), self.shape)
            made = [
                padded(self.grid, unpadded(self.grid, one, self.shape), self.shape)
                for one in views.unbind(stored, 0)
            ]
            found = views.stack(made, 0)
        except (ValueError, TooManyPieces):
            return None
        return found if found.shape == stored.shape else None


def filled_up(indexes: Iterable[Index]) -> dict[str, FilledUp]:
    """The components that are filled up in any of these checkpoints, by key."""
    out: dict[str, FilledUp] = {}
    for index in indexes:
        tree = index.tree
        for part in () if tree is None else tree.parts:
            for _, value in objects_of(part.root):
                layout = layout_of(value.encoding)
                if layout is None:
                    continue
                members = value.encoding.members
                shape = value.encoding.shape[1 if members else 0 :]
                for name, record in value.components:
                    grid = layout.grids.get(name)
                    key = tree and tree.names.get(id(record))
                    if key and grid is not None and grid.tile != (1, 1):
                        out[key] = FilledUp(grid, shape, members)
    return out


def without_padding(elements: np.ndarray[Any, Any], filled: FilledUp) -> np.ndarray[Any, Any]:
    """The elements of a component with zeros where it is filled up."""
    import numpy as np

    view = filled.zeroed(views.stored(0, elements.shape))
    if view is None or view.shape != elements.shape:
        return elements
    out = np.zeros_like(elements, order="C")
    copy_pieces(view, [np.ascontiguousarray(elements).reshape(-1)], out)
    return out


def padding_note(keys: Iterable[str]) -> list[str]:
    """The note on components that differ in nothing but padding, if there are any."""
    found = listed(list(keys), 8)
    return [f"differs only in padding, which is undefined and counts for nothing: {found}"] * bool(
        found
    )
