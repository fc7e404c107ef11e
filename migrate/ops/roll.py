"""`roll`: an axis is shifted round its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import Array, Integer, Only, Op, OpCall, Shape, arg, axis, dataclass, step

if TYPE_CHECKING:
    from ..core.view import View


class Roll(Op):
    summary = "shifts an axis; what leaves at its end comes in at its start"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis that is shifted")
        shift: Integer = arg("by how many elements towards the end; negative towards the start")
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        return [view.roll(v, axis("roll", args.dim, v.shape), args.shift) for v in views]

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return [np.roll(a, args.shift, args.dim) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("roll", dim=args.dim, shift=-args.shift, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0, "shift": 1}, [(4, 3)]
        yield {"dim": -1, "shift": -2}, [(2, 5)]
        yield {"dim": 1, "shift": 7}, [(2, 3, 2)]


OP = Roll()
