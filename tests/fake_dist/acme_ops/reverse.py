"""A third party's op: all axes in reverse order."""

from __future__ import annotations

from migrate.core.view import permute
from migrate.ops.base import Only, Op, OpCall, arg, dataclass


class Reverse(Op):
    name = "acme_reverse"
    summary = "puts the axes in reverse order"

    @dataclass(frozen=True, slots=True)
    class Args:
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def trace(self, args, views, parts=1):
        return [permute(v, tuple(range(len(v.shape)))[::-1]) for v in views]

    def eager(self, args, arrays, parts=1, dtype=""):
        return [a.T for a in arrays]

    def invert(self, args, enumerated=False):
        return OpCall("acme_reverse", args)

    def samples(self):
        yield {}, [(2, 3, 4)]


OP = Reverse()
