"""Several tensors as one whole: what ranks hold of a tensor, laid side by side.

Where several old tensors became several new ones, as ranks of joined queries, keys and values do,
no tensor of either side is the whole of which the others are parts. The tensors of one side, in the
order of their numbers along one axis, are taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..relations import Relation
from .compared import ComparedTensor
from .layouts import NoLayout, lay_out
from .places import Region, is_certain, read_strides
from .samples import Pairs, consistent

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Shape = tuple[int, ...]

_DIGITS = re.compile(r"([0-9]+)")


class Whole(NamedTuple):
    """Tensors side by side: their numbers in that order, the axis, its lengths, and the shape."""

    order: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    shape: Shape

    def op(self) -> dict[str, Any]:
        """What a join or part says of it."""
        if len(set(self.lengths)) > 1:
            return {"dim": self.dim, "sizes": list(self.lengths)}
        return {"dim": self.dim, "count": len(self.lengths)}

    def places(self, number: int, at: Array) -> Array:
        """Where these places of a tensor lie in the whole."""
        position = self.order.index(number)
        inner = prod(self.shape[self.dim + 1 :])
        own, start = self.lengths[position] * inner, sum(self.lengths[:position]) * inner
        there: Array = at // own * (self.shape[self.dim] * inner) + start + at % own
        return there


def wholes(tensors: Sequence[ComparedTensor]) -> Iterator[Whole]:
    """The ways in which tensors can stand side by side, along each axis."""
    order = tuple(sorted(range(len(tensors)), key=lambda i: _natural(tensors[i].key)))
    shapes = [tensors[i].spec.shape for i in order]
    for dim in range(min(map(len, shapes))):
        if len({(*s[:dim], *s[dim + 1 :]) for s in shapes}) == 1:
            lengths = tuple(s[dim] for s in shapes)
            yield Whole(
                order, dim, lengths, (*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :])
            )


def _natural(key: str) -> list[Any]:
    return [int(t) if n % 2 else t for n, t in enumerate(_DIGITS.split(key))]


def through_whole(
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    links: Mapping[tuple[int, int], Pairs],
) -> Iterator[tuple[Relation, Relation | None]]:
    """All ways to make the new tensors of the old ones that the places permit: these joined and
    cut, or parts of these joined and those cut of it. Beside a way that leaves out zeros the one
    back, which holds if these are all that is left out.
    """
    if any(t.before for t in olds):
        return
    for joined, several, parts in ((True, olds, news), (False, news, olds)):
        for whole in wholes(several):
            regions = []
            for number, part in enumerate(parts):
                region = _region(whole, number, part, links, joined)
                if region is None:
                    break
                regions.append(region)
            else:
                try:
                    layout = lay_out([t.spec.shape for t in parts], regions, whole.shape)
                except NoLayout:
                    continue
                if layout.outside is not None and not joined:
                    continue
                side = tuple(several[i].key for i in whole.order)
                other = tuple(parts[k].key for k in layout.order)
                cut = Relation(side, other, ({"concat": whole.op()}, *layout.cut))
                join = Relation(other, side, (*layout.join, {"split": whole.op()}))
                if not joined:
                    yield join, None
                    continue
                yield cut, None if layout.outside is None else join
                if layout.outside is not None:
                    shapes = [t.spec.shape for t in parts]
                    layout = lay_out(shapes, regions, whole.shape, None)
                    yield replace(cut, ops=({"concat": whole.op()}, *layout.cut)), None


def apart(relation: Relation) -> list[Relation]:
    """The relation, or where tensors are joined only to be cut between them again, as chance has it
    with few values, one for those of each stretch.
    """
    kinds = [next(iter(op)) for op in relation.ops]
    if kinds != ["concat", "split"]:
        return [relation]
    join, cut = (dict(next(iter(op.values()))) for op in relation.ops)
    if join["dim"] != cut["dim"] or set(join) | set(cut) > {"dim", "count", "sizes"}:
        return [relation]
    size = sum(join.get("sizes") or cut.get("sizes") or ()) or join["count"] * cut["count"]
    sides = [of.get("sizes") or [size // of["count"]] * of["count"] for of in (join, cut)]
    ends = [list(accumulate(lengths)) for lengths in sides]
    out, before = [], [0, 0]
    for end in sorted(set(ends[0]) & set(ends[1])):
        after = [of.index(end) + 1 for of in ends]
        ops = []
        for kind, lengths, low, high in zip(kinds, sides, before, after, strict=True):
            own = lengths[low:high]
            if len(own) > 1:
                said = {"sizes": own} if len(set(own)) > 1 else {"count": len(own)}
                ops.append({kind: {"dim": join["dim"], **said}})
        keys = zip((relation.sources, relation.targets), before, after, strict=True)
        sources, targets = (side[low:high] for side, low, high in keys)
        out.append(replace(relation, sources=sources, targets=targets, ops=tuple(ops)))
        before = after
    return out


def _region(
    whole: Whole,
    number: int,
    part: ComparedTensor,
    links: Mapping[tuple[int, int], Pairs],
    joined: bool,
) -> Region | None:
    """Where a part lies in the whole, if its places say so for certain."""
    import numpy as np

    at, to = [], []
    for one in whole.order:
        pairs = links.get((one, number) if joined else (number, one))
        if pairs is not None:
            at.append(pairs.new if joined else pairs.old)
            to.append(whole.places(one, pairs.old if joined else pairs.new))
    if not at:
        return None
    # what stands in several of the tensors says nothing
    places, there = consistent(Pairs(np.concatenate(at), np.concatenate(to)))
    order = places.argsort()
    places, there = places[order], there[order]
    region = read_strides(places, there, part.spec.numel)
    if region is None or not is_certain(region, places, part.spec.numel):
        return None
    return region
