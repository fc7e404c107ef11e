"""`copy`: writes a tensor under several names, with bytes of its own where none can be shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .base import Array, Capture, Integer, Op, OpCall, Shape, arg, dataclass, parts_of, step

if TYPE_CHECKING:
    from ..core.view import View


class Copy(Op):
    kind = "part"
    summary = "gives one tensor several names"
    # whether the names are meant to share memory
    shares = False

    @dataclass(frozen=True, slots=True)
    class Args:
        into: Capture = arg("the capture that numbers the names, or lists them")
        count: Integer | None = arg("how many; an int capture needs it", least=1, default=None)
        start: Integer = arg("the first value of an int capture", default=0)

    def parts(self, args: Args, shape: Shape, values: int | None) -> int:
        return parts_of(f"{self.name} into {{{args.into}}}", values, args.count)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        return [views[0]] * self.parts(args, views[0].shape, parts)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return [arrays[0]] * parts

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("same", over=args.into, count=args.count, start=args.start)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"into": "w", "count": 2}, [(2, 3)]
        yield {"into": "r", "count": 3, "start": 1}, [(4,)]


OP = Copy()
