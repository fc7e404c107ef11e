"""`same`: tensors that must be equal bit for bit become one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .base import (
    Array,
    Capture,
    Check,
    Integer,
    OneWay,
    Op,
    OpCall,
    Shape,
    arg,
    dataclass,
    number_of,
    same_dtypes,
    same_shapes,
    step,
    uncounted,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Same(Op):
    kind = "join"
    summary = "keeps one of several tensors that must be equal bit for bit"

    @dataclass(frozen=True, slots=True)
    class Args:
        over: Capture = arg("the capture whose values name the equal tensors; the first goes on")
        count: Integer | None = arg(
            "how many tensors there must be; the inverse over an int capture needs it",
            least=1,
            default=None,
        )
        start: Integer = arg("the first value of an int capture", default=0)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        label = f"same over {{{args.over}}}"
        number_of(label, views, args.count)
        same_shapes(label, [v.shape for v in views])
        return [views[0]]

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        same_dtypes(f"same over {{{args.over}}}", specs)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [arrays[0]]

    def checks(self, args: Args, views: Sequence[View], parts: int = 1) -> list[Check]:
        # views that read the same elements are equal without looking
        if all(v == views[0] for v in views):
            return []
        return [
            Check(
                "equal",
                tuple(views),
                None,
                f"same over {{{args.over}}}: the tensors are not equal bit for bit",
            )
        ]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        counted = enumerated or args.count is not None
        return uncounted("same", args.over, counted) or step(
            "copy", into=args.over, count=args.count, start=args.start
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"over": "r", "count": 3}, [(2, 3)] * 3
        yield {"over": "w", "start": 1}, [(4,)] * 2


OP = Same()
