"""Ops that do something else than they say, to find out whether a test would notice.

A shape often does not show what an op did: a concat with its parts interchanged, a square transpose
left out, RoPE's halves in another order. So each such op is replaced by near mistakes of the same
kind, and whatever a test of the file cannot tell from the right op is not tested.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from ..core import view
from ..core.view import View
from ..ops.base import Op, ValueOp, axis
from ..rules.compiled import ROLE, CompiledCall, DirectedRule

_AXIS = re.compile(r"[^\W\d]\w*")
# permutations of up to so many axes are tried; of more, only those that interchange two neighbours
MOST_AXES = 4

_Trace = Callable[[Any, Sequence[View], int], list[View]]


class Mutant(NamedTuple):
    """A near mistake; `what` completes "if the op …".

    `step` is None where there is none to try: then only a test that states values would notice one.
    `shown` says that shapes show it unless lengths happen to be equal, so that any test of the rule
    will do for a start.
    """

    what: str
    step: CompiledCall | None
    shown: bool = False


class _Nothing(Op):
    """In place of an op that computes: what comes in goes out."""

    def trace(self, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        return list(views)


_NOTHING = _Nothing()


def mutants(rule: DirectedRule, step: CompiledCall, *, derived: bool = False) -> Iterator[Mutant]:
    """The near mistakes of one step of the rule that a shape can hide, in the same order whatever
    the params are.

    None for an op that its shape always shows. `derived`: the numbers of the step come from params.
    """
    name, args = step.name, step.args
    if name in ("stack", "concat", "unbind", "split"):
        yield from _orders(rule, step)
        yield from _axes(step)
    elif name == "transpose":
        yield Mutant(
            "left the axes as they are", _with(step, lambda args, views, parts: list(views))
        )
        yield from _pairs(step)
    elif name == "permute":
        for order in _permutations(list(args.dims)):
            yield Mutant(
                f"had `dims: {order}`", replace(step, args=replace(args, dims=tuple(order)))
            )
    elif name == "rearrange":
        before, after = args.pattern.split("->")
        names = _AXIS.findall(after)
        written = _AXIS.findall(before)
        # first the mistake that is nearest: nothing moves
        for order in sorted(_permutations(names), key=lambda order: order != written):
            # a mapping, because one axis' name may be part of another's
            other = dict(zip(names, order, strict=True))
            pattern = f"{before.strip()} -> {_AXIS.sub(lambda m, o=other: o[m[0]], after).strip()}"  # type: ignore[misc]
            yield Mutant(f'said "{pattern}"', replace(step, args=replace(args, pattern=pattern)))
    elif name in ("flip", "roll"):
        yield Mutant("moved nothing", _with(step, lambda args, views, parts: list(views)))
        yield from _axes(step)
        # a shift that depends on the model is half of the axis, which is the same both ways
        if name == "roll" and not derived:
            yield Mutant(
                f"had `shift: {-args.shift}`", replace(step, args=replace(args, shift=-args.shift))
            )
    elif name == "slice" and args.value is None:
        # with `value` the run itself looks at what is cut
        yield Mutant("kept the other end", _with(step, _other_end))
        yield from _axes(step)
    elif name == "pad":
        yield Mutant(
            "padded the other end",
            _with(step, lambda args, views, parts: _padded(step.op, args, views)),
        )
        yield from _axes(step)
    elif name != "cast" and (isinstance(step.op, ValueOp) or step.op.kind == "make"):
        if step.op.kind in ("each", "make"):
            yield Mutant("left the numbers as they are", replace(step, op=_NOTHING))
        yield Mutant("computed something else", None)


def _axes(step: CompiledCall) -> Iterator[Mutant]:
    """The same along a neighbouring axis; one that the tensor does not have is refused, and so
    seen.
    """
    for dim in _beside(step.args.dim):
        yield Mutant(
            f"had `dim: {dim}`", replace(step, args=replace(step.args, dim=dim)), shown=True
        )


def _pairs(step: CompiledCall) -> Iterator[Mutant]:
    """A transpose of which one axis is a neighbour of the right one."""
    one, other = step.args.dims
    for dims in [*((d, other) for d in _beside(one)), *((one, d) for d in _beside(other))]:
        if dims[0] != dims[1]:
            yield Mutant(
                f"had `dims: {list(dims)}`",
                replace(step, args=replace(step.args, dims=dims)),
                shown=True,
            )


def _beside(dim: int) -> list[int]:
    """The neighbours of an axis, counted from the same end: from the other one they could be the
    axis itself.
    """
    return [d for d in (dim - 1, dim + 1) if (d < 0) is (dim < 0)]


def _orders(rule: DirectedRule, step: CompiledCall) -> Iterator[Mutant]:
    """Two neighbouring values interchanged. The order of numbers is not a choice, so there is
    none for an int capture.
    """
    kind = rule.types[step.capture or ROLE]
    if kind.kind != "enum":
        return
    for number, (one, other) in enumerate(pairwise(kind.values)):
        order = list(range(len(kind.values)))
        order[number], order[number + 1] = number + 1, number
        yield Mutant(f"had {one} and {other} interchanged", _with(step, _reordered(step.op, order)))


def _reordered(op: Op, order: Sequence[int]) -> _Trace:
    def trace(args: Any, views: Sequence[View], parts: int) -> list[View]:
        sizes = getattr(args, "sizes", None)
        if sizes is not None:
            args = replace(args, sizes=tuple(sizes[i] for i in order))
        if op.kind == "join":
            return op.trace(
                args, [views[i] for i in order] if len(views) == len(order) else list(views), parts
            )
        made = op.trace(args, views, parts)
        return [made[i] for i in order] if len(made) == len(order) else made

    return trace


def _other_end(args: Any, views: Sequence[View], parts: int) -> list[View]:
    out = []
    for v in views:
        dim = axis("slice", args.dim, v.shape)
        stop = v.shape[dim] if args.stop is None else args.stop
        out.append(view.slice_(v, dim, v.shape[dim] - stop, v.shape[dim] - args.start))
    return out


def _padded(op: Op, args: Any, views: Sequence[View]) -> list[View]:
    out = []
    for v, made in zip(views, op.trace(args, views), strict=True):
        dim = axis("pad", args.dim, v.shape)
        out.append(view.roll(made, dim, made.shape[dim] - v.shape[dim] - 2 * args.start))
    return out


def _with(step: CompiledCall, trace: _Trace) -> CompiledCall:
    """The step with an op that traces as said, and is otherwise what it was."""

    def traced(self: Op, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        return trace(args, views, parts)

    def unchecked(self: Op, args: Any, views: Sequence[View], parts: int = 1) -> list[Any]:
        return []

    base = type(step.op)
    body = {"name": step.name, "trace": traced, "checks": unchecked, "__module__": base.__module__}
    return replace(step, op=type(base.__name__, (base,), body)())


def _permutations(things: list[Any]) -> Iterator[list[Any]]:
    if len(things) <= MOST_AXES:
        yield from (list(order) for order in permutations(things) if list(order) != things)
        return
    for at in range(len(things) - 1):
        yield [*things[:at], things[at + 1], things[at], *things[at + 2 :]]
