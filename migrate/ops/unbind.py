"""`unbind`: one tensor becomes as many as an axis is long, and the axis goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from .base import Array, Capture, Integer, Op, OpCall, OpError, Shape, arg, axis, dataclass, step

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..core.view import View


class Unbind(Op):
    kind = "part"
    summary = "takes an axis apart, one tensor per index"

    @dataclass(frozen=True, slots=True)
    class Args:
        into: Capture = arg("the capture that numbers the tensors, or lists their names")
        dim: Integer = arg("the axis that is taken apart", default=0)
        count: Integer | None = arg("how long the axis must be", least=1, default=None)
        start: Integer = arg("the first value of an int capture", least=0, default=0)

    def parts(self, args: Args, shape: Shape, values: int | None) -> int:
        dim = axis("unbind", args.dim, shape)
        for name, wanted in (
            ("count says", args.count),
            (f"the values of {{{args.into}}} are", values),
        ):
            if wanted is not None and wanted != shape[dim]:
                raise OpError(
                    "M305",
                    f"unbind into {{{args.into}}}: axis {dim} has {shape[dim]} elements, {name} "
                    f"{wanted}",
                )
        if shape[dim] == 0:
            raise OpError(
                "M305",
                f"unbind into {{{args.into}}}: axis {dim} has 0 elements, nothing would be left "
                "of the tensor",
            )
        return shape[dim]

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.parts(args, views[0].shape, parts)
        return list(view.unbind(views[0], axis("unbind", args.dim, views[0].shape)))

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        # with the ellipsis, what has one axis gives arrays too
        return [np.moveaxis(arrays[0], args.dim, 0)[i, ...] for i in range(parts)]

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
        if args.dim % len(specs[0].shape):
            made: Array = part(0, start, stop).take(output, args.dim)
        else:
            made = part(0, output, output + 1)[0][start:stop]
        return made

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("stack", over=args.into, dim=args.dim, count=args.count, start=args.start)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"into": "e"}, [(4, 2, 3)]
        yield {"into": "e", "dim": -1, "count": 3}, [(2, 4, 3)]
        yield {"into": "e", "dim": 1, "start": 1}, [(2, 3)]


OP = Unbind()
