"""One operation of each number of a matrix with the entry of its tile."""

from __future__ import annotations

from typing import Any

from .magnitudes import SHORT
from .rounding import Lanes


def apply(lanes: Lanes, numbers: Any, grid: Any, tile: tuple[int, int], op: Any) -> None:
    """`op` of each of the numbers and the entry of its tile, in place; numbers begin with a tile.

    A grid of one entry, of one for each row or of one for each number is also taken.
    """
    xp = lanes.xp
    (rows, columns), (down, across) = tuple(numbers.shape), tuple(grid.shape)
    high, wide = tile
    if (down in (1, rows) and across in (1, columns)) and (high >= rows or down == rows):
        op(numbers, grid, out=numbers)
        return
    if high == 1:
        whole = columns // wide
        if lanes.device is None and wide <= SHORT:
            # longer than a short loop for each entry
            op(numbers, xp.repeat(grid, wide, 1)[:, :columns], out=numbers)
            return
        head = numbers if whole * wide == columns else numbers[:, : whole * wide]
        head = head.reshape(rows, whole, wide)
        op(head, grid[:, :whole, None], out=head)
        if whole < across:
            rest = numbers[:, whole * wide :]
            op(rest, grid[:, whole:], out=rest)
        return
    if lanes.device is None:
        spread = xp.repeat(grid, wide, 1)[:, :columns]
    else:
        spread = grid.unsqueeze(-1).expand(down, across, wide).flatten(-2)[:, :columns]
    whole = rows // high
    head = numbers[: whole * high].reshape(whole, high, columns)
    op(head, spread[:whole, None], out=head)
    if whole < down:
        rest = numbers[whole * high :]
        op(rest, spread[whole:], out=rest)
