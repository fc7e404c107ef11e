"""`reshape`: the same elements in row-major order under another shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import (
    Array,
    Integers,
    OneWay,
    Only,
    Op,
    OpCall,
    OpError,
    Shape,
    arg,
    dataclass,
    format_shape,
    step,
)

if TYPE_CHECKING:
    from ..core.view import View


class Reshape(Op):
    summary = "gives the elements, in row-major order, another shape"

    @dataclass(frozen=True, slots=True)
    class Args:
        to: Integers = arg(
            "the shape after; one length may be -1 and follows from the others", least=-1, once=-1
        )
        from_: Integers | None = arg(
            "the shape before, checked, and what the inverse restores; one length may be -1",
            alias="from",
            least=-1,
            once=-1,
            default=None,
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.validate(args)
        out = []
        for v in views:
            if args.from_ is not None and not _fits(v.shape, args.from_):
                raise OpError(
                    "M307",
                    f"reshape: the shape is {format_shape(v.shape)}, `from` says "
                    f"{format_shape(args.from_)}",
                )
            out.append(view.reshape(v, _filled_in(v.shape, args.to)))
        return out

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [a.reshape(args.to) for a in arrays]

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.from_ is None:
            return OneWay(
                "reshape does not say which shape there was before",
                "write `from`: the shape before",
            )
        return step("reshape", to=args.from_, from_=args.to, only=args.only)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"to": [6], "from": [2, 3]}, [(2, 3)]
        yield {"to": [-1, 4], "from": [2, -1, 4]}, [(2, 3, 4)]
        yield {"to": [3, 2, -1]}, [(6, 4)]
        yield {"to": []}, [(1, 1)]


def _fits(shape: Shape, stated: Sequence[int]) -> bool:
    return len(shape) == len(stated) and all(
        b in (-1, a) for a, b in zip(shape, stated, strict=True)
    )


def _filled_in(shape: Shape, to: Sequence[int]) -> Shape:
    numel, known = prod(shape), prod(n for n in to if n != -1)
    if -1 not in to:
        if numel != known:
            raise OpError(
                "M301",
                f"reshape: {format_shape(shape)} has {numel} elements, "
                f"{format_shape(to)} has {known}",
            )
        return tuple(to)
    if known == 0 or numel % known:
        raise OpError(
            "M302",
            f"reshape: {format_shape(shape)} has {numel} elements, not divisible by the "
            f"{known} that {format_shape(to)} names",
        )
    return tuple(numel // known if n == -1 else n for n in to)


OP = Reshape()
