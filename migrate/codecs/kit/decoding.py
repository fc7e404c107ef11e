"""Numbers out of the parts of a layout, box by box."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...elements.numbers import is_numpy
from .box_decoding import BoxDecoder
from .decoding_error import check_entries, check_exact, measure
from .exactness import is_exact
from .geometry import Extents, geometry
from .layout import NumberLayout

if TYPE_CHECKING:
    from ...ops.base import Box, Meter


def decode(
    layout: NumberLayout,
    specs: Mapping[str, Spec],
    arrays: Mapping[str, Any],
    dtype: str,
    box: Box,
    out: Any,
    meter: Meter | None = None,
) -> None:
    """Fills `out`, raw elements of `dtype`, with the numbers of `box`.

    `arrays` holds the raw elements of the boxes that `Extents.needs` names, numpy's or torch's, as
    `out` is; the bits do not depend on which. OpError as `geometry`.

    OpError M406 for an entry that its grid does not take (`check_entries`).

    What `is_exact` says is checked: OpError M406 names the first number that `dtype` cannot hold.
    Else `meter`, if there is one, is given the error of a sample of the numbers, and how many of
    all became infinite or zero.
    """
    decode_box(geometry(layout, specs), arrays, dtype, box, out, meter)


def decode_box(
    geo: Extents,
    arrays: Mapping[str, Any],
    dtype: str,
    box: Box,
    out: Any,
    meter: Meter | None = None,
) -> None:
    """`decode` of a tensor whose geometry is known."""
    layout = geo.layout
    if 0 in out.shape:
        return
    full = geo.inner(box)
    work = BoxDecoder(geo, arrays, dtype, full)
    for grid in layout.grids():
        odd = grid.misread is not None
        if grid.positive or grid.finite or grid.nonzero or grid.powers or odd:
            check_entries(geo, work, grid, full)
    if layout.flat:
        target, own = _row(full, out)
    else:
        target, own = out.reshape([high - low for low, high in full]), False
    work.into(target)
    if is_exact(layout, geo.specs, dtype):
        check_exact(geo, work, dtype, full, target)
    elif meter is not None:
        measure(geo, work, dtype, full, target, meter)
    if own:
        _pick(geo, box, target, out)


def _row(full: Box, out: Any) -> tuple[Any, bool]:
    """One row for the numbers of a flat box from its first to its last, and whether it has memory
    of its own.
    """
    low, high = full[-1]
    if high - low == prod(out.shape) and _is_contiguous(out):
        return out.reshape(1, -1), False
    if is_numpy(out):
        import numpy as np

        return np.empty((1, high - low), out.dtype), True
    return out.new_empty((1, high - low)), True


def _pick(geo: Extents, box: Box, row: Any, out: Any) -> None:
    """Fills `out` with the numbers of a box out of the row from its first to its last."""
    lengths = [stop - first for first, stop in box]
    strides = [prod(geo.shape[axis + 1 :]) for axis in range(len(box))]
    if is_numpy(out):
        import numpy as np

        out[...] = np.lib.stride_tricks.as_strided(
            row, lengths, [s * row.itemsize for s in strides], writeable=False
        )
    else:
        out.copy_(row.as_strided(lengths, strides))


def _is_contiguous(array: Any) -> bool:
    return bool(array.flags.c_contiguous if is_numpy(array) else array.is_contiguous())
