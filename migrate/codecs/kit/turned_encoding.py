"""Encoding into parts whose rows are columns of the numbers (`transposed`).

What is stored by columns is encoded by rows, and each box is turned as it is written. So whose
arithmetic encodes, and in which boxes, is said once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from .layout import Grid, Packing

if TYPE_CHECKING:
    from ...ops.base import Array, Box, Meter
    from .encoding import TensorEncoding
    from .layout import NumberLayout


def by_rows(layout: NumberLayout) -> NumberLayout:
    """The layout with all its parts stored by rows."""
    codes, zero = layout.codes, layout.zero
    return replace(
        layout,
        codes=replace(codes, transposed=False, padded=codes.padded[::-1])
        if isinstance(codes, Packing)
        else codes,
        zero=zero and _grid_by_rows(zero),
        scale=tuple(
            term._replace(what=_grid_by_rows(term.what)) if isinstance(term.what, Grid) else term
            for term in layout.scale
        ),
    )


def _grid_by_rows(grid: Grid) -> Grid:
    high, wide = grid.padded
    return replace(grid, transposed=False, padded=(wide, high)) if grid.transposed else grid


def turned_roles(layout: NumberLayout) -> set[str]:
    """The roles of the parts that are stored by columns, where codes are; scales alone need no
    turning.
    """
    if not isinstance(layout.codes, Packing) or not layout.codes.transposed:
        return set()
    return {layout.role, *(grid.role for grid in layout.grids() if grid.transposed)}


def turned_spec(spec: Spec) -> Spec:
    return Spec(spec.dtype, _turn(spec.shape))


def turned_parts(found: Mapping[str, Any], turned: set[str]) -> dict[str, Any]:
    """Whole parts as numpy arrays, those of `turned` by columns."""
    import numpy as np

    return {
        role: np.ascontiguousarray(part.swapaxes(-1, -2)) if role in turned else part
        for role, part in found.items()
    }


class TurnedEncoding:
    """A `TensorEncoding` of parts by rows, some of which are stored by columns."""

    def __init__(self, rows: TensorEncoding, turned: set[str]) -> None:
        self.rows, self.turned = rows, turned
        self.surveyed, self.survey, self.remembers = rows.surveyed, rows.survey, rows.remembers

    def needs(self, role: str, box: Box) -> Box:
        return self.rows.needs(role, self._turned(role, box))

    def grain(self, role: str) -> tuple[int, ...]:
        sides: tuple[int, ...] = self._turned(role, self.rows.grain(role))
        return sides

    def encode(
        self,
        array: Any,
        role: str,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        memo: dict[str, Any] | None = None,
        survey: Array | None = None,
    ) -> None:
        room = self._room(role, out)
        self.rows.encode(array, role, self._turned(role, box), room, meter, memo, survey)
        self._deliver(role, room, out)

    def recall(
        self,
        role: str,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None = None,
        survey: Array | None = None,
    ) -> bool:
        room = self._room(role, out)
        found = self.rows.recall(role, self._turned(role, box), room, memo, survey)
        if found:
            self._deliver(role, room, out)
        return found

    def _turned(self, role: str, sides: Any) -> Any:
        return _turn(sides) if role in self.turned else sides

    def _room(self, role: str, out: Any) -> Any:
        if role not in self.turned:
            return out
        import numpy as np

        shape = _turn(tuple(out.shape))
        return np.empty(shape, out.dtype) if isinstance(out, np.ndarray) else out.new_empty(shape)

    def _deliver(self, role: str, room: Any, out: Any) -> None:
        if role in self.turned:
            out[...] = room.swapaxes(-1, -2)


def _turn(sides: Sequence[Any]) -> tuple[Any, ...]:
    return (*sides[:-2], sides[-1], sides[-2])
