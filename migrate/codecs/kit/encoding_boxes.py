"""Which box of the numbers a box of codes, scales or zeros is encoded from. Integers alone:
planning asks for them.

`full` are the axes [..., rows, columns] that all is worked out over: numbers of fewer axes get axes
of length 1 in front, those of a flat layout are one row of all of them. `entries` are the axes of
the grid of scales, stored or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm, prod
from typing import TYPE_CHECKING

from ...core.spec import BITS, Spec
from .layout import Grid, NumberLayout, Packing

if TYPE_CHECKING:
    from ...ops.base import Box

# the numbers of the largest tile that a box must hold whole
TILE_MOST = 1 << 20


class PartBoxes:
    """Which numbers of `spec` the boxes of `parts`, role -> Spec, come from.

    The layout's codes lie along the last axis, and its scale is one grid, or one and that of the
    whole tensor.
    """

    def __init__(self, layout: NumberLayout, spec: Spec, parts: Mapping[str, Spec]) -> None:
        self.layout, self.spec, self.parts = layout, spec, dict(parts)
        grids = [term.what for term in layout.scale if isinstance(term.what, Grid)]
        self.grid = grids[0]
        # the scale of the whole tensor, where blocks have their own as well
        self.whole = grids[1] if len(grids) > 1 else None
        self.full = (1, spec.numel) if layout.flat else (1,) * (2 - len(spec.shape)) + spec.shape
        high, wide = (b or n for b, n in zip(self.grid.block, self.full[-2:], strict=True))
        self.tile = (max(1, min(high, self.full[-2])), max(1, min(wide, self.full[-1])))
        self.leading = self.grid.leading or len(self.full) == 2
        # the tiles that no box holds: their magnitudes are in the survey
        self.surveys_tiles = not self.leading or prod(self.tile) > TILE_MOST
        self.surveyed = self.surveys_tiles or self.whole is not None
        lead = self.full[:-2] if self.leading else ()
        self.entries = (
            *lead,
            *(-(-n // t) for n, t in zip(self.full[-2:], self.tile, strict=True)),
        )
        if not isinstance(layout.codes, Packing):
            raise ValueError(f"{layout.name}: codes in records are decoded only")
        self.packing = layout.codes
        self.word = BITS[self.parts[layout.role].dtype]
        # an array has one raw element for each code of fewer bits than a byte
        self.unit = 1 if self.word < 8 else self.packing.unit(self.parts[layout.role].dtype)[0]

    def needs(self, role: str, box: Box) -> Box:
        """The box of the numbers that a box of the part comes from; empty where the survey tells
        all of it.
        """
        full = self._numbers(role, box)
        return tuple((0, 0) for _ in self.spec.shape) if full is None else self._outer(full)

    def grain(self, role: str) -> tuple[int, ...]:
        """Multiples at which boxes of the part are cut at little cost."""
        shape = self.parts[role].shape
        if not shape:
            return ()
        if role != self.layout.role:
            if role == self.grid.role and self.grid.swizzled:
                return (*(1,) * (len(shape) - 2), self.grid.tile[0], shape[-1])
            return (1,) * len(shape)
        high, wide = (1, 1) if self.surveys_tiles else self.tile
        columns = lcm(self.unit, wide)
        if self.layout.flat:
            return (columns // self._per_word(), *(1,) * (len(shape) - 1))
        if self.packing.run:
            return (*(1,) * (len(shape) - 3), high, 1, self.packing.run)[-len(shape) :]
        return (*(1,) * (len(shape) - 2), high, -(-columns // self._per_word()))[-len(shape) :]

    def _per_word(self) -> int:
        return 1 if self.word < 8 else max(1, self.word // self.packing.bits)

    def _numbers(self, role: str, box: Box) -> Box | None:
        """The whole tiles of numbers, a box of `full`, that a box of a part comes from."""
        if role == self.layout.role:
            found = self._of_codes(box)
            return found if self.surveys_tiles else self._on_tiles(found)
        if role not in (self.grid.role, self._zero) or self.surveys_tiles:
            return None
        return self._of_entries(self._entries_box(role, box))

    def _of_entries(self, box: Box) -> Box:
        """The numbers whose entries of the grid these are."""
        sides = zip(box[-2:], self.tile, self.full[-2:], strict=True)
        return (*box[:-2], *((low * t, min(n, high * t)) for (low, high), t, n in sides))

    @property
    def _zero(self) -> str:
        return "" if self.layout.zero is None else self.layout.zero.role

    def _grid_of(self, role: str) -> Grid:
        """The grid that is stored as this part."""
        zero = self.layout.zero
        return self.grid if zero is None or role == self.grid.role else zero

    def _packing_of(self, role: str) -> Packing | None:
        """How several entries of a part lie in one word; None where each is an element."""
        packing = self._grid_of(role).packing
        return packing if packing and packing.bits < BITS[self.parts[role].dtype] else None

    def _of_codes(self, box: Box) -> Box:
        """The numbers, a box of `full`, whose codes lie in a box of the part of codes."""
        rows: Box = box[:-1]
        low, high = box[-1] if box else (0, 1)
        if self.layout.flat:
            # [words, 1]: of what is counted in words
            low, high = box[0]
            rows = ((0, 1),)
        elif self.packing.run:
            rows, (low, high) = (
                box[:-2],
                (box[-2][0] * self.packing.run, box[-2][1] * self.packing.run),
            )
        if self.word >= 8:
            codes, words = self.packing.unit(self.parts[self.layout.role].dtype)
            low, high = low // words * codes, -(-high // words) * codes
        last = self.full[-1]
        rows = (*((0, 1),) * (len(self.full) - 1 - len(rows)), *rows)
        return (*rows, (min(low, last), min(high, last)))

    def _on_tiles(self, box: Box) -> Box:
        # a tile need not begin with a word: 128 numbers are no words of ten codes each
        starts = (self.tile[0], lcm(self.tile[1], self.unit))
        sides = zip(box[-2:], starts, self.tile, self.full[-2:], strict=True)
        return (*box[:-2], *((a // s * s, min(n, -(-b // t) * t)) for (a, b), s, t, n in sides))

    def _entries_box(self, role: str, box: Box) -> Box:
        """The entries, a box of `entries`, that a box of a stored grid holds."""
        grid = self._grid_of(role)
        shape = self.parts[role].shape
        if grid.repeated > 1:
            return self._repeated_box(grid, box)
        if grid.swizzled:
            (low, high), (_, _) = box[-2:]
            tile = grid.tile[0]
            rows = (low // tile * 128, min(self.entries[-2], -(-high // tile) * 128))
            return (*box[:-2], rows, (0, self.entries[-1]))
        if (packing := self._packing_of(role)) is not None:
            # along the rows: one of zeros holds several
            codes, words = packing.unit(self.parts[role].dtype)
            (low, high), columns = box[-2:]
            last = self.entries[-2]
            rows = (min(last, low // words * codes), min(last, -(-high // words) * codes))
            return (*box[:-2], rows, columns)
        if len(shape) < len(self.entries):
            # an axis of length 1 is not stored
            kept = self._stored_axes(shape)
            return tuple(
                box[kept.index(i)] if i in kept else (0, n) for i, n in enumerate(self.entries)
            )
        if len(shape) > len(self.entries):
            return box[-len(self.entries) :]
        if grid.transposed:
            box = (*box[:-2], box[-1], box[-2])
        return tuple((min(a, n), min(b, n)) for (a, b), n in zip(box, self.entries, strict=True))

    def _repeated_box(self, grid: Grid, box: Box) -> Box:
        """`_entries_box` of a grid whose entries stand in several rows."""
        (low, high), columns = box[-2:]
        if grid.swizzled:
            low, high = low // grid.tile[0] * 128, -(-high // grid.tile[0]) * 128
            columns = (0, self.entries[-1])
        rows = (low // grid.repeated, -(-high // grid.repeated))
        inner = zip((rows, columns), self.entries[-2:], strict=True)
        return (*box[:-2], *((min(a, n), min(b, n)) for (a, b), n in inner))

    def _stored_axes(self, shape: tuple[int, ...]) -> list[int]:
        """The axes of `entries` that a part of fewer axes has: the others have length 1."""
        kept: list[int] = []
        for axis, length in enumerate(self.entries):
            # of several of length 1 either will do
            if len(kept) < len(shape) and length == shape[len(kept)]:
                kept.append(axis)
        return kept

    def _outer(self, full: Box) -> Box:
        """A box of `full` as one of the numbers: around a stretch of flat ones, whole rows."""
        shape = self.spec.shape
        if not self.layout.flat:
            return full[len(full) - len(shape) :] if shape else ()
        low, high = full[-1]
        if not shape:
            return ()
        inner = max(1, prod(shape[1:]))
        return ((low // inner, -(-high // inner)), *((0, n) for n in shape[1:]))


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(b - a for a, b in box)
