"""`flip`: an axis runs backwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import Array, Integer, Only, Op, OpCall, Shape, arg, axis, dataclass, step

if TYPE_CHECKING:
    from ..core.view import View


class Flip(Op):
    summary = "reverses an axis"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis that is reversed")
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        return [view.flip(v, axis("flip", args.dim, v.shape)) for v in views]

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return [np.flip(a, args.dim) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("flip", dim=args.dim, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0}, [(4, 3)]
        yield {"dim": -1}, [(2, 5)]
        yield {"dim": 1}, [(2, 3, 2)]


OP = Flip()
