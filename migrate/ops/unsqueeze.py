"""`unsqueeze`: a new axis of length 1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import Array, Integer, Only, Op, OpCall, Shape, arg, axis, dataclass, step

if TYPE_CHECKING:
    from ..core.view import View


class Unsqueeze(Op):
    summary = "adds an axis of length 1"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("where the new axis stands in the result")
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        out = []
        for v in views:
            dim = axis("unsqueeze", args.dim, v.shape, extra=1)
            out.append(view.reshape(v, (*v.shape[:dim], 1, *v.shape[dim:])))
        return out

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return [np.expand_dims(a, args.dim) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("squeeze", dim=args.dim, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0}, [(2, 3)]
        yield {"dim": -1}, [(2, 3)]
        yield {"dim": 1}, [(2, 3)]
        yield {"dim": 0}, [()]


OP = Unsqueeze()
