"""`permute`: all axes in a new order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import (
    Array,
    Integers,
    Only,
    Op,
    OpCall,
    OpError,
    Shape,
    arg,
    axis,
    dataclass,
    format_shape,
    step,
)

if TYPE_CHECKING:
    from ..core.view import View


class Permute(Op):
    summary = "puts the axes in another order"

    @dataclass(frozen=True, slots=True)
    class Args:
        dims: Integers = arg("for each axis of the result, the axis it comes from", distinct=True)
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        rank = len(args.dims)
        if {d % rank for d in args.dims} != set(range(rank)) or any(
            not -rank <= d < rank for d in args.dims
        ):
            raise OpError(
                "M308",
                f"permute: `dims` is {format_shape(args.dims)}, it must name each of {rank} axes "
                "once",
            )

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.validate(args)
        return [view.permute(v, self._order(args, v.shape)) for v in views]

    def _order(self, args: Args, shape: Shape) -> tuple[int, ...]:
        if len(args.dims) != len(shape):
            raise OpError(
                "M304",
                f"permute: `dims` names {len(args.dims)} axes, the tensor has rank {len(shape)}, "
                f"shape {format_shape(shape)}",
            )
        return tuple(axis("permute", d, shape) for d in args.dims)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [a.transpose(args.dims) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        order = [d % len(args.dims) for d in args.dims]
        return step(
            "permute", dims=tuple(order.index(i) for i in range(len(order))), only=args.only
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dims": [2, 0, 1]}, [(2, 3, 4)]
        yield {"dims": [-1, 0, 1, -2]}, [(2, 3, 4, 5)]
        yield {"dims": []}, [()]


OP = Permute()
