"""Records taken apart into codes and entries, and put together of these, for `recode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from .geometry import Extents
from .layout import Field, Grid, NumberLayout
from .nibbles import halves_in_turn, halves_of_turn, put_rows
from .unpacking import Run, field_codes, field_numbers, field_runs, records

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


def bytes_in_turn(geo: Extents, raw: Array, full: Box) -> Array | None:
    """The codes of such a box in turn, one or two a byte; None where they do not lie so."""
    import numpy as np

    layout = geo.layout
    plane = _plane(layout)
    if plane is None:
        return None
    held = records(_rows(raw, full), layout.record.nbytes).reshape(-1, layout.record.nbytes)
    found: Array = held[:, plane.first : plane.first + plane.length]
    if plane.length < layout.record.codes:
        return halves_in_turn(found)
    out = np.empty(found.shape, "u1")
    put_rows(found, out)
    return out


def records_of(
    layout: NumberLayout, grid: Grid, codes: Array, entries: Array, turned: bool = False
) -> Array:
    """Records of codes and the raw entries of the one grid [..., rows, records]: bytes
    [..., rows, records * nbytes]. Codes are one a byte, or, `turned`, what `bytes_in_turn` makes.
    """
    import numpy as np

    field, scale, record = layout.codes, grid.field, layout.record
    if not isinstance(field, Field) or scale is None:
        raise TypeError(layout)
    made = np.zeros((entries.size, record.nbytes), "u1")
    width = entries.itemsize
    raw = np.ascontiguousarray(entries).reshape(-1, 1).view("u1")
    put_rows(raw, made[:, scale.at : scale.at + width])
    plane = _plane(layout)
    codes = codes.reshape(entries.size, -1)
    if turned and plane is not None:
        target = made[:, plane.first : plane.first + plane.length]
        if plane.length < record.codes:
            halves_of_turn(codes, target)
        else:
            put_rows(codes, target)
        return made.reshape(*entries.shape[:-1], -1)
    for piece in field.pieces:
        mask = np.uint8((1 << piece.bits) - 1)
        for run in field_runs(piece):
            bits = codes[:, run.at : run.at + run.length] >> np.uint8(piece.left) & mask
            made[:, run.first : run.first + run.length] |= bits << np.uint8(run.shift)
    return made.reshape(*entries.shape[:-1], -1)


def _plane(layout: NumberLayout) -> Run | None:
    """The bytes that hold all codes of a record and nothing else: one each, or the first half of
    the codes in their lower halves and the others in the upper ones.
    """
    if not isinstance(layout.codes, Field) or len(layout.codes.pieces) > 1:
        return None
    (piece,), count = layout.codes.pieces, layout.record.codes
    first, *more = field_runs(piece)
    if piece.bits == 8 and not more and first.length == count:
        return first
    upper = Run(count // 2, first.first, count // 2, 4)
    whole = piece.bits == 4 and first.shift == 0 and first.length == count // 2
    return first if whole and more == [upper] and count % 4 == 0 else None


def _rows(raw: Array, full: Box) -> Array:
    """A box of a part with all axes of the numbers."""
    return raw.reshape(*(high - low for low, high in full[:-1]), raw.shape[-1])
