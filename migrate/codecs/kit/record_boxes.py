"""Records taken apart into codes and entries, and put together of these, for `recode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from .geometry import Extents
from .layout import Field, Grid, NumberLayout
from .unpacking import field_codes, field_numbers, field_runs, records

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array: TypeAlias = "np.ndarray[Any, Any]"


def codes_in_records(geo: Extents, raw: Array, full: Box) -> Array:
    """The codes of a box of records, which `needs` names for the numbers `full`: those of whole
    records, [..., rows, columns].
    """
    layout = geo.layout
    if not isinstance(layout.codes, Field):
        raise TypeError(layout.codes)
    found: Array = field_codes(records(_rows(raw, full), layout.record.nbytes), layout.codes)
    return found.reshape(*found.shape[:-2], -1)


def entries_in_records(geo: Extents, grid: Grid, raw: Array, full: Box) -> Array:
    """The raw entries of a grid in such a box, [..., rows, records]."""
    if grid.field is None:
        raise TypeError(grid)
    found: Array = field_numbers(records(_rows(raw, full), geo.layout.record.nbytes), grid.field)
    return found[..., 0]


def records_of(layout: NumberLayout, grid: Grid, codes: Array, entries: Array) -> Array:
    """Records of codes [..., rows, columns], one a byte, and the raw entries of the one grid
    [..., rows, records]: bytes [..., rows, records * nbytes].
    """
    import numpy as np

    field, scale, record = layout.codes, grid.field, layout.record
    if not isinstance(field, Field) or scale is None:
        raise TypeError(layout)
    made = np.zeros((*entries.shape, record.nbytes), "u1")
    width = entries.itemsize
    made[..., scale.at : scale.at + width] = np.ascontiguousarray(entries)[..., None].view("u1")
    codes = codes.reshape(*entries.shape, record.codes)
    for piece in field.pieces:
        mask = np.uint8((1 << piece.bits) - 1)
        for run in field_runs(piece):
            bits = codes[..., run.at : run.at + run.length] >> np.uint8(piece.left) & mask
            made[..., run.first : run.first + run.length] |= bits << np.uint8(run.shift)
    return made.reshape(*entries.shape[:-1], -1)


def _rows(raw: Array, full: Box) -> Array:
    """A box of a part with all axes of the numbers."""
    return raw.reshape(*(high - low for low, high in full[:-1]), raw.shape[-1])
