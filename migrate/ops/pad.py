"""`pad`: an axis grows to a size, or to the next multiple of one, filled with a value."""

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
    OpError,
    Shape,
    arg,
    axis,
    dataclass,
    format_shape,
    require_least,
    stated,
    step,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Pad(Op):
    summary = "makes an axis longer, filled with a value"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis that grows")
        start: Integer = arg(
            "how many elements are put before; the others come after", least=0, default=0
        )
        size: Integer | None = arg("the length of the axis after", least=0, default=None)
        multiple_of: Integer | None = arg(
            "instead of `size`: the length after is the next multiple of this",
            least=1,
            default=None,
        )
        of: Integer | None = arg(
            "the length of the axis before, checked, and what the inverse restores",
            least=0,
            default=None,
        )
        value: Number = arg("what the new elements equal", default=0)
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        if (args.size is None) == (args.multiple_of is None):
            raise OpError("M308", "pad: exactly one of `size` and `multiple_of` is needed")
        require_least("pad", "size", args.size, args.start + (args.of or 0))

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.validate(args)
        out = []
        for v in views:
            dim = axis("pad", args.dim, v.shape)
            stated("pad", dim, v.shape[dim], args.of)
            size = _size(args, v.shape[dim])
            after = size - args.start - v.shape[dim]
            if after < 0:
                before = (
                    f"{args.start} before and {v.shape[dim]}" if args.start else f"{v.shape[dim]}"
                )
                raise OpError(
                    "M301",
                    f"pad: axis {dim} has {before} elements, more than size {size}; shape "
                    f"{format_shape(v.shape)}",
                )
            out.append(view.pad(v, dim, args.start, after, args.value))
        return out

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        check_holds("pad: `value`", specs, args.value)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        out = []
        for a in arrays:
            rows = a.swapaxes(0, args.dim)
            grown = np.empty((_size(args, len(rows)), *rows.shape[1:]), a.dtype)
            grown[...] = raw(dtypes[0], args.value)
            grown[args.start : args.start + len(rows)] = rows
            out.append(grown.swapaxes(0, args.dim))
        return out

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.of is None:
            return OneWay("pad does not say how long the axis was", "write `of`: the length before")
        size = _size(args, args.of)
        return step(
            "slice",
            dim=args.dim,
            start=args.start,
            stop=args.start + args.of,
            of=size,
            value=args.value,
            only=args.only,
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0, "size": 5, "of": 3}, [(3, 2)]
        yield {"dim": -1, "start": 1, "size": 4, "of": 2, "value": 1}, [(2, 2)]
        yield {"dim": 1, "multiple_of": 4, "of": 3}, [(2, 3, 2)]
        yield {"dim": 0, "multiple_of": 4}, [(4,)]


def _size(args: Pad.Args, length: int) -> int:
    if args.size is not None:
        return args.size
    multiple = args.multiple_of or 1
    return -(-(args.start + length) // multiple) * multiple


OP = Pad()
