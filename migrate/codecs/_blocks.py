"""Matrices in blocks: their largest magnitudes, the entries of a grid for rows and columns, and
bands that fit a cache.

A grid has one entry for each block; a matrix may be a part of a larger one, [top:, left:], and
begin inside a block: its grid begins with that block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

# elements of one step: small enough for a last-level cache, so many that an op takes longer than
# the interpreter's lock to change hands, and than the barrier of torch's threads where an op is
# divided among them
CHUNK = 1 << 20


class Block(NamedTuple):
    """Rows and columns of a block."""

    rows: int
    columns: int


class Band(NamedTuple):
    """Rows of a matrix: some of one row of blocks, or all of several: so many (`blocks`) from row
    `first` of the grid on.
    """

    rows: slice
    first: int
    blocks: int


def bands(shape: tuple[int, ...], high: int, top: int, size: int) -> Iterator[Band]:
    """A matrix that begins at row `top` in parts of about `size` elements, one row of it at
    least.
    """
    rows, columns = shape
    step = max(1, size // max(1, columns))
    if step < high:
        # equal parts of a block: a rest would cost as many calls as a whole part
        step = -(-high // -(-high // step))
    at, first = 0, top // high
    while at < rows:
        block = (top + at) // high
        over = (top + at) % high
        blocks = 1 if over else max(1, min(step, rows - at) // high)
        stop = min(at + step, rows, (block + blocks) * high - top)
        yield Band(slice(at, stop), block - first, blocks)
        at = stop


def across(grid: np.ndarray[Any, Any], wide: int, left: int, width: int) -> np.ndarray[Any, Any]:
    """The entries of rows of a grid for `width` columns from column `left` on, which lies in the
    first block.
    """
    import numpy as np

    before = left % wide
    return np.repeat(grid, min(wide, before + width), axis=-1)[..., before : before + width]


def of_rows(
    grid: np.ndarray[Any, Any],
    block: Block,
    top: int,
    left: int,
    rows: slice,
    shape: tuple[int, ...],
) -> np.ndarray[Any, Any]:
    """The entries of a grid for each element of `rows` of a matrix, which are of this shape."""
    import numpy as np

    down = (top + rows.start + rows.step * np.arange(shape[0])) // block.rows - top // block.rows
    return across(grid[down], block.columns, left, shape[1])


def amax(bits: np.ndarray[Any, Any], block: Block) -> np.ndarray[Any, Any]:
    """The largest magnitude in each block, as bits: floats of one sign are ordered as their bits
    are, infinity and NaN on top.

    No pass takes the signs off: the largest of the signed integers is the largest positive number,
    and of the unsigned ones the largest negative one, if there is any.
    """
    import numpy as np

    signed, unsigned = bits.view(f"<i{bits.itemsize}"), bits.view(f"<u{bits.itemsize}")
    found, below = (
        _largest_in_runs(_largest_in_runs(words, 0, block.rows), 1, block.columns)
        for words in (signed, unsigned)
    )
    largest: np.ndarray[Any, Any] = np.maximum(
        found, (below & ((1 << 8 * bits.itemsize - 1) - 1)).view(signed.dtype)
    )
    return largest


def _largest_in_runs(words: np.ndarray[Any, Any], axis: int, length: int) -> np.ndarray[Any, Any]:
    """The largest of each `length` neighbours along one of the two axes; the last run may be
    shorter.
    """
    import numpy as np

    if length == 1:
        return words
    size = words.shape[axis]
    whole = size // length * length
    head, rest = np.split(words, [whole], axis) if whole < size else (words, None)
    parts = []
    if whole:
        runs = head.reshape(*words.shape[:axis], whole // length, length, *words.shape[axis + 1 :])
        parts.append(np.maximum.reduce(runs, axis + 1))
    if rest is not None:
        parts.append(np.maximum.reduce(rest, axis, keepdims=True))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
