"""`squeeze`: an axis of length 1 goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import (
    Array,
    Integer,
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


class Squeeze(Op):
    summary = "removes an axis of length 1"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis that goes")
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        out = []
        for v in views:
            dim = axis("squeeze", args.dim, v.shape)
            if v.shape[dim] != 1:
                raise OpError(
                    "M301",
                    f"squeeze: axis {dim} has {v.shape[dim]} elements, only an axis of 1 can be "
                    f"removed; shape {format_shape(v.shape)}",
                )
            out.append(view.reshape(v, v.shape[:dim] + v.shape[dim + 1 :]))
        return out

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [a.squeeze(args.dim) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("unsqueeze", dim=args.dim, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0}, [(1, 3)]
        yield {"dim": -1}, [(2, 3, 1)]
        yield {"dim": 1}, [(2, 1, 3)]


OP = Squeeze()
