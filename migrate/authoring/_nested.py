"""Joins of joins, and parts of parts, as one: of all tensors, and an axis that is taken apart.

`stack` of pairs and then `concat` of these can be written if the keys are all combinations of two
captures. Those of `a, d` and `c, b` are not, while the four of them can be stacked, and the axis
rearranged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from string import ascii_lowercase
from typing import Any, TypeAlias

OpText: TypeAlias = "Mapping[str, Any]"

_JOINS = ("stack", "concat")
_PARTS = {"unbind": "stack", "split": "concat"}


def as_one(ops: Sequence[OpText], sources: int, targets: int) -> list[OpText] | None:
    """The ops with one join for the joins of so many sources that follow each other, or else one
    part for the parts of so many targets; None where they are not two or more of equal lengths.
    """
    for kinds, joins, count in ((_JOINS, True, sources), (tuple(_PARTS), False, targets)):
        at = [number for number, op in enumerate(ops) if next(iter(op)) in kinds]
        if len(at) < 2 or at != list(range(at[0], at[-1] + 1)):
            continue
        levels = [next(iter(op.items())) for op in ops[at[0] : at[-1] + 1]]
        if not joins:
            levels = [(_PARTS[name], args) for name, args in reversed(levels)]
        found = _rearranged(levels, count)
        if found is None:
            return None
        apart, together, axes = found
        if joins:
            one = [{"stack": {"dim": 0}}, _rearrange(apart, together, axes)]
        else:
            one = [_rearrange(together, apart, axes), {"unbind": {"dim": 0}}]
        return [*ops[: at[0]], *one, *ops[at[-1] + 1 :]]
    return None


def _rearrange(before: str, after: str, axes: Mapping[str, int]) -> OpText:
    return {"rearrange": {"pattern": f"{before} -> {after}", "axes": dict(axes)}}


def _rearranged(
    levels: Sequence[tuple[str, Mapping[str, Any]]], count: int
) -> tuple[str, str, dict[str, int]] | None:
    """The tensors stacked, and joined level by level from the innermost: two sides of a pattern,
    and the lengths of the axes that tell the levels apart.
    """
    if any(set(args) - {"dim", "count"} or args.get("dim", -1) < 0 for _, args in levels):
        return None
    counts = [args.get("count") for _, args in levels[:-1]]
    if not all(isinstance(one, int) and one > 0 for one in counts) or count % prod(counts):  # type: ignore[arg-type]
        return None
    counts.append(count // prod(counts))  # type: ignore[arg-type]
    letters = iter(ascii_lowercase)
    known = [next(letters) for _ in levels]
    axes: list[str] = []
    own: list[str] = []
    for name, (op, args) in zip(known, levels, strict=True):
        stacked, dim = op == "stack", args["dim"]
        while len(axes) < dim + (not stacked):
            letter = next(letters, None)
            if letter is None:
                return None
            own.append(letter)
            axes.append(letter)
        if stacked:
            axes.insert(dim, name)
        else:
            axes[dim] = f"{name} {axes[dim]}"
    outermost_first = " ".join(reversed(known))
    apart = " ".join((f"({outermost_first})", *own, "..."))
    together = " ".join((*(f"({a})" if " " in a else a for a in axes), "..."))
    return apart, together, dict(zip(known, counts, strict=True))  # type: ignore[arg-type]
