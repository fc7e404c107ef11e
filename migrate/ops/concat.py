"""`concat`: tensors become one along an axis they have.

Without `sizes` the parts must be equal, for the inverse could not tell where one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import (
    Array,
    Capture,
    Integer,
    OneWay,
    Op,
    OpCall,
    OpError,
    Shape,
    Sizes,
    arg,
    axis,
    dataclass,
    format_shape,
    number_of,
    same_dtypes,
    same_shapes,
    step,
    uncounted,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Concat(Op):
    kind = "join"
    summary = "joins tensors along an axis they have"

    @dataclass(frozen=True, slots=True)
    class Args:
        over: Capture = arg("the capture whose values are laid one after the other, in their order")
        dim: Integer = arg("the axis along which they are joined", default=0)
        sizes: Sizes | None = arg(
            "the length of each part; without it all are equal", least=0, default=None
        )
        count: Integer | None = arg(
            "how many tensors there must be; the inverse over an int capture needs it",
            least=1,
            default=None,
        )
        start: Integer = arg("the first value of an int capture", default=0)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        label = f"concat over {{{args.over}}}"
        number_of(label, views, args.count, args.sizes)
        dim = axis("concat", args.dim, views[0].shape)
        same_shapes(label, [v.shape for v in views], but=dim)
        lengths = tuple(v.shape[dim] for v in views)
        if args.sizes is None and len(set(lengths)) > 1:
            message = (
                f"{label}: the parts have {format_shape(lengths)} elements along axis {dim}; "
                "without `sizes` they must be equal"
            )
            raise OpError(
                "M301", message, help="write `sizes`, as a list or by the capture's values"
            )
        if args.sizes is not None and lengths != tuple(args.sizes):
            raise OpError(
                "M301",
                f"{label}: the parts have {format_shape(lengths)} elements along axis {dim}, "
                f"sizes are {format_shape(args.sizes)}",
            )
        return [view.concat(views, dim)]

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        same_dtypes(f"concat over {{{args.over}}}", specs)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return [np.concatenate(arrays, args.dim)]

    by_rows = True

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
        import numpy as np

        if args.dim % len(specs[0].shape):
            return np.concatenate(
                [part(number, start, stop) for number in range(len(specs))], args.dim
            )
        found, first = [], 0
        for number, spec in enumerate(specs):
            low, high = max(start - first, 0), min(stop - first, spec.shape[0])
            found += [part(number, low, high)] if low < high else []
            first += spec.shape[0]
        return np.concatenate(found)

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        counted = enumerated or args.count is not None or args.sizes is not None
        return uncounted("concat", args.over, counted) or step(
            "split",
            into=args.over,
            dim=args.dim,
            sizes=args.sizes,
            count=args.count,
            start=args.start,
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"over": "w"}, [(2, 3)] * 3
        yield {"over": "w", "dim": 1, "sizes": [3, 1, 0]}, [(2, 3), (2, 1), (2, 0)]
        yield {"over": "w", "dim": -1, "count": 2, "start": 1}, [(2, 3, 2)] * 2


OP = Concat()
