"""`slice`: a range of an axis stays.

What is cut is gone, so the op destroys unless the rule says what was cut: `value`, which the run
checks, and `of`, how long the axis was. With both the inverse is `pad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from ..elements.raw import check_holds
from .base import (
    Array,
    Check,
    Integer,
    Loss,
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


class Slice(Op):
    summary = "keeps a range of an axis"

    @dataclass(frozen=True, slots=True)
    class Args:
        dim: Integer = arg("the axis that is cut")
        start: Integer = arg("the first element that stays", least=0, default=0)
        stop: Integer | None = arg(
            "the first element after it that does not stay; without it all to the end stay",
            least=0,
            default=None,
        )
        of: Integer | None = arg(
            "the length of the axis before, checked, and what the inverse restores",
            least=0,
            default=None,
        )
        value: Number | None = arg(
            "what all cut elements must equal, checked, and what the inverse restores", default=None
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        require_least("slice", "stop", args.stop, args.start)
        require_least("slice", "of", args.of, args.start if args.stop is None else args.stop)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        out = []
        for v in views:
            dim, start, stop = _range(args, v.shape)
            out.append(view.slice_(v, dim, start, stop))
        return out

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> None:
        check_holds("slice: `value`", specs, args.value)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [
            a.swapaxes(0, args.dim)[args.start : args.stop].swapaxes(0, args.dim) for a in arrays
        ]

    def checks(self, args: Args, views: Sequence[View], parts: int = 1) -> list[Check]:
        if args.value is None:
            return []
        cut = []
        for v in views:
            dim, start, stop = _range(args, v.shape)
            ends = ((0, start), (stop, v.shape[dim]))
            cut += [view.slice_(v, dim, a, b) for a, b in ends if a < b]
        cut = [v for v in cut if 0 not in v.shape]
        if not cut:
            return []
        return [
            Check(
                "filled",
                tuple(cut),
                args.value,
                f"slice: not all elements cut from axis {args.dim} equal {args.value:g}",
            )
        ]

    def loss(self, args: Args) -> Loss:
        if args.start == 0 and args.stop is None:
            return Loss.LOSSLESS
        known = args.of is not None and (args.value is not None or _cuts_nothing(args))
        return Loss.LOSSLESS if known else Loss.DESTRUCTIVE

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.of is None and args.start == 0 and args.stop is None:
            return step("slice", dim=args.dim, only=args.only)
        if args.of is None:
            return OneWay(
                "slice does not say how long the axis was",
                "write `of`: the length before, and `value`: what is cut",
            )
        if args.value is None and not _cuts_nothing(args):
            return OneWay(
                "slice does not say what it cuts", "write `value`: what all cut elements equal"
            )
        stays = (args.of if args.stop is None else args.stop) - args.start
        # where nothing is cut nothing is filled in either, and the value does not matter
        value = 0 if args.value is None else args.value
        return step(
            "pad",
            dim=args.dim,
            start=args.start,
            size=args.of,
            of=stays,
            value=value,
            only=args.only,
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"dim": 0, "stop": 3, "of": 5, "value": 0}, [(5, 2)]
        yield {"dim": -1, "start": 1, "stop": 3, "of": 4, "value": 1}, [(2, 4)]
        yield {"dim": 1, "start": 1, "of": 3, "value": 0}, [(2, 3, 2)]
        yield {"dim": 0, "start": 1, "stop": 2}, [(3,)]
        yield {"dim": 0, "stop": 3, "of": 3}, [(3,)]
        yield {"dim": 1}, [(2, 3)]


def _cuts_nothing(args: Slice.Args) -> bool:
    return args.start == 0 and args.stop in (None, args.of)


def _range(args: Slice.Args, shape: Shape) -> tuple[int, int, int]:
    dim = axis("slice", args.dim, shape)
    stated("slice", dim, shape[dim], args.of)
    stop = shape[dim] if args.stop is None else args.stop
    if not 0 <= args.start <= stop <= shape[dim]:
        raise OpError(
            "M301",
            f"slice: {args.start} to {stop} does not lie in axis {dim} of {shape[dim]} elements, "
            f"shape {format_shape(shape)}",
        )
    return dim, args.start, stop


OP = Slice()
