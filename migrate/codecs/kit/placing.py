"""Codes and entries that were worked out, put where boxes of stored parts hold them: packed,
padded, transposed, swizzled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.spec import BITS
from . import rounding
from .encoding_boxes import PartBoxes, box_shape
from .rounding import Lanes

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array: TypeAlias = "np.ndarray[Any, Any]"


class PlacedParts(PartBoxes):
    """Fills boxes of parts with codes and entries."""

    def _place(self, role: str, entries: Array, box: Box, out: Any) -> None:
        """Fills `out` with a box of a stored grid, of which `entries` are what it holds."""
        import numpy as np

        grid = self._grid_of(role)
        if grid.repeated > 1:
            entries = np.repeat(entries, grid.repeated, axis=-2)
            if not grid.swizzled:
                # a box may begin within the rows of an entry
                first = box[-2][0] % grid.repeated
                entries = entries[..., first : first + box[-2][1] - box[-2][0], :]
        if grid.swizzled:
            rows, columns = (-(-n // m) for n, m in zip(entries.shape[-2:], (128, 4), strict=True))
            tiles = np.zeros((*entries.shape[:-2], rows * 128, columns * 4), entries.dtype)
            tiles[..., : entries.shape[-2], : entries.shape[-1]] = entries
            # the tile of 128 x 4 bytes of cuBLAS: row 32 r + i of it stands in line i
            tiles = tiles.reshape(*entries.shape[:-2], rows, 4, 32, columns, 4)
            entries = np.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
            high, wide = grid.tile
            entries = entries.reshape(*box_shape(box[:-2]), rows * high, columns * wide)
            first = box[-2][0] // high * high
            cut = (slice(box[-2][0] - first, box[-2][1] - first), slice(*box[-1]))
            place: tuple[Any, ...] = (..., *cut)
            copy_raw(out, entries[place])
            return
        if (packing := self._packing_of(role)) is not None:
            lanes = Lanes()
            packed = rounding.pack(
                lanes, np.ascontiguousarray(entries.swapaxes(-1, -2)), packing.bits,
                BITS[self.parts[role].dtype], packing.order, packing.dense,
            )  # fmt: skip
            words = packing.unit(self.parts[role].dtype)[1]
            first = box[-2][0] // words * words
            copy_raw(out, packed.swapaxes(-1, -2)[..., box[-2][0] - first : box[-2][1] - first, :])
            return
        if grid.transposed:
            entries = entries.swapaxes(-1, -2)
        shape = box_shape(box)
        if entries.size == prod(shape):
            copy_raw(out, entries.reshape(shape))
            return
        # what is over is padding
        out[...] = 0
        copy_raw(out[tuple(slice(0, n) for n in entries.shape)], entries)

    def _words(self, out: Any, full: Box, box: Box) -> Any:
        """Room for the words of the numbers `full`: `out` itself where it is that."""
        import numpy as np

        count = full[-1][1] - full[-1][0]
        if self.word >= 8:
            count = self.packing.words(count, self.parts[self.layout.role].dtype)
        shape = (*(b - a for a, b in full[:-1]), count)
        exact = prod(shape) == prod(out.shape) and self._of_codes(box) == full
        contiguous = out.flags.c_contiguous if isinstance(out, np.ndarray) else out.is_contiguous()
        if exact and (tuple(out.shape) == shape or contiguous):
            return out.reshape(shape)
        if isinstance(out, np.ndarray):
            return np.empty(shape, out.dtype)
        return out.new_empty(shape)

    def _deliver(self, out: Any, words: Any, cut: Sequence[slice], box: Box) -> None:
        """Copies what `box` holds of `words`, which begin with the tiles around it."""
        if _same_memory(out, words):
            return
        low = cut[-1].start
        if self.word >= 8:
            codes, per = self.packing.unit(self.parts[self.layout.role].dtype)
            low = low // codes * per
            # a box may begin within a unit
            low += (box[0] if self.layout.flat else box[-1])[0] % per
        if self.packing.run:
            last = slice(low, low + (box[-2][1] - box[-2][0]) * self.packing.run)
            place: tuple[Any, ...] = (*cut[:-1], last)
            wanted = words[place]
            wanted = wanted.reshape(*wanted.shape[:-1], -1, self.packing.run)
            copy_raw(out, wanted[..., box[-1][0] : box[-1][1]].reshape(tuple(out.shape)))
            return
        count = (
            (box[0][1] - box[0][0]) if self.layout.flat else (box[-1][1] - box[-1][0] if box else 1)
        )
        place = (*cut[:-1], slice(low, low + count))
        copy_raw(out, words[place].reshape(tuple(out.shape)))


def copy_raw(out: Any, made: Any) -> None:
    """Fills `out`, numpy or torch, with an array of numpy or torch of the same raw elements."""
    import numpy as np

    if isinstance(out, np.ndarray):
        out[...] = made if isinstance(made, np.ndarray) else np.asarray(made).view(out.dtype)
        return
    import torch

    if not isinstance(made, torch.Tensor):
        kind = f"i{made.itemsize}" if made.itemsize > 1 else "u1"
        made = torch.from_numpy(np.asarray(made, order="C").view(kind))
    out.copy_(made.view(out.dtype) if made.dtype != out.dtype else made)


def _same_memory(one: Any, other: Any) -> bool:
    import numpy as np

    if isinstance(one, np.ndarray):
        return bool(np.shares_memory(one, other))
    return bool(one.data_ptr() == other.data_ptr())
