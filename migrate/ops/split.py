"""`split`: one tensor becomes several, cut along an axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import (
    Array,
    Capture,
    Integer,
    Op,
    OpCall,
    Shape,
    Sizes,
    arg,
    axis,
    cut,
    dataclass,
    parts_of,
    step,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Split(Op):
    kind = "part"
    summary = "cuts an axis into parts, one tensor each"

    @dataclass(frozen=True, slots=True)
    class Args:
        into: Capture = arg("the capture that numbers the parts, or lists their names")
        dim: Integer = arg("the axis that is cut", default=0)
        sizes: Sizes | None = arg(
            "the length of each part; without it all are equal", least=0, default=None
        )
        count: Integer | None = arg(
            "how many parts; an int capture needs it unless there are sizes", least=1, default=None
        )
        start: Integer = arg("the first value of an int capture", default=0)

    def parts(self, args: Args, shape: Shape, values: int | None) -> int:
        return parts_of(f"split into {{{args.into}}}", values, args.count, args.sizes)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        label = f"split into {{{args.into}}}"
        dim = axis("split", args.dim, views[0].shape)
        parts_of(label, parts, args.count, args.sizes)
        return list(
            view.split(views[0], dim, cut(label, dim, views[0].shape[dim], parts, args.sizes))
        )

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return np.split(
            arrays[0], parts if args.sizes is None else np.cumsum(args.sizes)[:-1], args.dim
        )

    by_rows, copies = True, False

    def rows(
        self,
        args: Args,
        part: Callable[[int, int, int], Array],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
    ) -> Array:
        length, dim = specs[0].shape[args.dim], args.dim % len(specs[0].shape)
        if dim:
            return self.eager(args, [part(0, start, stop)], parts)[output]
        first = sum(args.sizes[:output]) if args.sizes is not None else length // parts * output
        return part(0, first + start, first + stop)

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step(
            "concat",
            over=args.into,
            dim=args.dim,
            sizes=args.sizes,
            count=args.count,
            start=args.start,
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"into": "r", "count": 3}, [(6, 2)]
        yield {"into": "w", "dim": 1, "sizes": [3, 1, 0]}, [(2, 4)]
        yield {"into": "r", "dim": -2, "count": 2, "start": 1}, [(2, 4, 3)]


OP = Split()
