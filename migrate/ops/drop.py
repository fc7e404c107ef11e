"""`drop`: a tensor does not go on, and the rule says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .base import Array, Loss, OneWay, Op, Shape, Text, arg, dataclass

if TYPE_CHECKING:
    from ..core.view import View


class Drop(Op):
    kind = "end"
    summary = "leaves a tensor behind"

    @dataclass(frozen=True, slots=True)
    class Args:
        why: Text = arg("why it will not be missed; printed in the plan")

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        return []

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        return []

    def loss(self, args: Args) -> Loss:
        return Loss.DESTRUCTIVE

    def invert(self, args: Args, enumerated: bool = False) -> OneWay:
        return OneWay("what is dropped cannot be brought back")

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"why": "the model computes it again"}, [(2, 3)]


OP = Drop()
