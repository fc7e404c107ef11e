"""`resize`: an axis gets another length, and what is cut off its end is kept for the way back.

What is cut goes beside the tensors of the output, under the name of the rule. Where the axis grows
again, by the inverse or by the same rule, it is put back first; what is then missing is `value`.
So `resize` is the inverse of itself, and fits padding whose numbers are not constant and mean
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from ..elements.raw import check_holds, raw
from .base import (
    Array,
    Integer,
    Number,
    OneWay,
    Only,
    Op,
    OpCall,
    Shape,
    arg,
    axis,
    dataclass,
    stated,
    step,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Resize(Op):
    summary = "makes an axis longer or shorter; what is cut is kept beside the tensors"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis whose end moves")
        size: Integer | None = arg(
            "the length of the axis after; without it the axis stays as long as it is",
            least=0,
            default=None,
        )
        of: Integer | None = arg(
            "the length of the axis before, checked, and what the inverse restores",
            least=0,
            default=None,
        )
        value: Number = arg(
            "what new elements equal where nothing was kept that could be put back", default=0
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    keeps = True

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        out = []
        for v in views:
            dim = axis("resize", args.dim, v.shape)
            stated("resize", dim, v.shape[dim], args.of)
            size = v.shape[dim] if args.size is None else args.size
            stays = view.slice_(v, dim, 0, min(size, v.shape[dim]))
            out.append(view.pad(stays, dim, 0, max(0, size - v.shape[dim]), args.value))
        return out

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        check_holds("resize: `value`", specs, args.value)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        out = []
        for a in arrays:
            rows = a.swapaxes(0, args.dim)
            size = len(rows) if args.size is None else args.size
            made = np.empty((size, *rows.shape[1:]), a.dtype)
            made[...] = raw(dtypes[0], args.value)
            made[: len(rows)] = rows[:size]
            out.append(made.swapaxes(0, args.dim))
        return out

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.of is None and args.size is not None:
            return OneWay(
                "resize does not say how long the axis was", "write `of`: the length before"
            )
        return step(
            "resize", dim=args.dim, size=args.of, of=args.size, value=args.value, only=args.only
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0, "size": 3, "of": 3}, [(3, 2)]
        yield {"dim": -1, "size": 4, "of": 2, "value": 1}, [(2, 2)]
        yield {"dim": 1}, [(2, 3)]


OP = Resize()
