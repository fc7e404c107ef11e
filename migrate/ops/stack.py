"""`stack`: tensors of equal shape become one along a new axis."""

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
    arg,
    axis,
    dataclass,
    number_of,
    same_dtypes,
    same_shapes,
    step,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Stack(Op):
    kind = "join"
    summary = "joins tensors of equal shape along a new axis"

    @dataclass(frozen=True, slots=True)
    class Args:
        over: Capture = arg("the capture whose values become the new axis, in their order")
        dim: Integer = arg("where the new axis stands in the result", default=0)
        count: Integer | None = arg("how many tensors there must be", least=1, default=None)
        start: Integer = arg("the first value of an int capture", least=0, default=0)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        label = f"stack over {{{args.over}}}"
        number_of(label, views, args.count)
        same_shapes(label, [v.shape for v in views])
        return [view.stack(views, axis("stack", args.dim, views[0].shape, extra=1))]

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        same_dtypes(f"stack over {{{args.over}}}", specs)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        return [np.stack(arrays, args.dim)]

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

        shape = specs[0].shape
        if args.dim % (len(shape) + 1):
            return np.stack([part(number, start, stop) for number in range(len(specs))], args.dim)
        return np.stack(
            [part(number, 0, shape[0] if shape else 0) for number in range(start, stop)]
        )

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("unbind", into=args.over, dim=args.dim, count=args.count, start=args.start)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"over": "e"}, [(2, 3)] * 4
        yield {"over": "e", "dim": -1, "count": 3}, [(2, 4)] * 3
        yield {"over": "e", "dim": 1, "start": 1}, [(2, 3, 2)] * 2
        yield {"over": "e"}, [()] * 3


OP = Stack()
