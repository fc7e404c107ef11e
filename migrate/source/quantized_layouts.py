"""The table of quantized classes: which rows and columns share an element of which component, and
how that is stored.

A class is one row: its format -> a function that says of one encoding the grid of each component.
Rows stand in files of their own, one for each library. To add a class is to add a function there;
nothing else that joins or cuts knows classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from . import _grids_ao, _grids_te
from .component_grids import ComponentLayout
from .pickle.tree import Encoding

LAYOUTS: Mapping[str, Callable[[Encoding], ComponentLayout]] = {
    **_grids_te.LAYOUTS,
    **_grids_ao.LAYOUTS,
}


def layout_of(encoding: Encoding) -> ComponentLayout | None:
    """The layout of a tensor of this encoding; None of a class that is not in the table."""
    row = LAYOUTS.get(encoding.format)
    return None if row is None else row(encoding)
