"""`transpose`: two axes change places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import Array, Integers, Only, Op, OpCall, Shape, arg, axis, dataclass, step

if TYPE_CHECKING:
    from ..core.view import View


class Transpose(Op):
    summary = "swaps two axes"

    @dataclass(frozen=True, slots=True)
    class Args:
        dims: Integers = arg("the two axes", length=2, distinct=True)
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.validate(args)
        out = []
        for v in views:
            a, b = (axis("transpose", d, v.shape) for d in args.dims)
            order = list(range(len(v.shape)))
            order[a], order[b] = b, a
            out.append(view.permute(v, tuple(order)))
        return out

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [a.swapaxes(*args.dims) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("transpose", dims=args.dims, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dims": [0, 1]}, [(2, 3)]
        yield {"dims": [-1, 1]}, [(2, 3, 4, 5)]


OP = Transpose()
