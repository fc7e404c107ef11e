"""Relations between two checkpoints with the same weights, by their values.

Equal bytes first, then elements that stand in the same runs, first as they are, then after a cast,
then but for a power of two. What the values leave open (equal tensors, tensors of few values) names
decide, or it is a question. Each relation is run on the old tensors before it is believed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import frexp
from typing import TYPE_CHECKING, Any

from ...core.errors import MigrateError, OpError
from ...core.spec import BITS, Spec
from ...elements.codes import number_of
from ..relations import Relation
from . import names, proof, ranks
from .blocks import moved_blocks
from .compared import ComparedTensor
from .encoded import decoded, parts_that_follow
from .layouts import NoLayout, PartLayout, Shape, lay_out, reshaped
from .places import Region, is_certain, places, read_strides
from .reading import FEW, read_both
from .samples import (
    KnownRuns,
    Pairs,
    Runs,
    consistent,
    is_sampled,
    runs_of,
    sampling,
    single_elements,
)
from .wholes import apart, through_whole

if TYPE_CHECKING:
    import numpy as np

    from ...source.index import Source

    Array = np.ndarray[Any, Any]
    OpTexts = tuple[Mapping[str, Any], ...]

FLOATS = ("float16", "bfloat16", "float32", "float64")
_CASTS = (*FLOATS, "float8_e4m3fn", "float8_e5m2")
_DROP = "in no tensor of the new checkpoint"


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A tensor of the new checkpoint that nothing explains, and what comes nearest."""

    key: str
    why: str


@dataclass(slots=True)
class Search:
    """What is found so far, and what is left of either side."""

    old: Source
    new: Source
    compare: proof.StreamedComparison
    back: proof.StreamedComparison
    # of how many runs one was taken, when both sides were read, and what was
    bits: int = 0
    runs: tuple[dict[str, Runs], dict[str, Runs]] = field(default_factory=lambda: ({}, {}))
    relations: list[Relation] = field(default_factory=list)
    questions: list[names.Question] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)
    olds: dict[str, Spec] = field(default_factory=dict)
    news: dict[str, Spec] = field(default_factory=dict)
    # key of the first rank -> those of all ranks, where these have the same bytes
    of_ranks: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = field(
        default_factory=lambda: ({}, {})
    )
    # what is found is proven later
    unproven: bool = False
    # of keys whose bytes another key has too, or that have few values
    doubtful: dict[tuple[str, Shape, bytes], tuple[list[str], list[str]]] = field(
        default_factory=dict
    )

    def add(self, relation: Relation) -> None:
        """Takes what a relation explains from what is left."""
        self.relations.append(relation)
        for key in relation.sources:
            self.olds.pop(key, None)
        for key in relation.targets:
            self.news.pop(key, None)

    def prove(self, relation: Relation) -> bool:
        """Adds a relation if it makes what the new checkpoint has, else says where it does not."""
        if self.unproven:
            self.add(relation)
            return True
        try:
            found = self.compare.difference(relation)
        except (OpError, ValueError):
            return False
        if found is None:
            self.add(relation)
            return True
        wanted = self.new.index.tensors[found.key].spec
        made = ", ".join(relation.sources[:3]) + ("" if len(relation.sources) < 4 else ", …")
        what = f"what {names.written(relation.ops)} makes of {made}"
        why = (
            f"differs from {what} in {found.count} of {wanted.numel} elements, the first at "
            f"{list(found.index)}"
        )
        if wanted.shape and not found.index:
            why = f"is {wanted}, and {what} is not"
        self.why.setdefault(found.key, why)
        return False


def search(
    old: Source, new: Source, answers: Mapping[str, str], ask: names.Ask | None = None
) -> tuple[Search, list[Unexplained]]:
    """All that values and, where these leave it open, names say."""
    olds, news = ({k: t.spec for k, t in side.index.tensors.items()} for side in (old, new))
    found = Search(
        old,
        new,
        proof.StreamedComparison(old, new),
        proof.StreamedComparison(new, old),
        olds=olds,
        news=news,
    )
    found.bits = _sampling(*_as_they_are(found))
    labels, few = _read(found)
    for relation in names.answered(answers, found.olds, found.news):
        if not found.prove(relation):
            key = (relation.targets or relation.sources)[0]
            names.refuse_answer(relation, found.why.get(key))
    _equal_bytes(found, labels, few)
    _follow_codes(found)
    _settle_doubtful(found)
    _moved_whole(found)
    _moved(found, *_as_they_are(found), found.bits)
    _by_analogy(found)
    if found.news:
        _after_casts(found)
    if found.news:
        _scaled(found)
        for one in decoded(old, new, found.olds, found.news):
            if one.relation is not None:
                found.add(one.relation)
            else:
                found.why[one.key] = one.why
    _by_analogy(found)
    _follow_codes(found)
    _settle_doubtful(found)
    _settle_by_names(found, ask)
    asked = {key for question in found.questions for key in question.keys}
    rest = [
        Unexplained(
            key, found.why.get(key, "has no elements in common with an old tensor that is left")
        )
        for key in found.news
        if key not in asked
    ]
    if not rest and not found.questions:
        for key in list(found.olds):
            found.add(Relation((key,), (), ({"drop": {"why": _DROP}},)))
    if any(found.of_ranks):
        found.relations = [
            whole for one in found.relations for whole in ranks.expanded(one, *found.of_ranks)
        ]
    return found, rest


# --- equal bytes


def _sampling(*sides: Iterable[ComparedTensor]) -> int:
    """How thinly runs are sampled: what is enough for the larger side, and the same for both."""
    return max(sampling(sum(t.spec.numel for t in side)) for side in sides)


_Labels = dict[tuple[str, bytes], list[str]]


def _read(found: Search) -> tuple[tuple[_Labels, _Labels], set[tuple[str, bytes]]]:
    """The keys of either side by their bytes, and of which bytes there are few values. Of what all
    ranks have alike the first is left.
    """
    sides_read = (found.old, found.olds), (found.new, found.news)
    readers = read_both(sides_read, found.bits)
    found.runs = readers[0].runs, readers[1].runs
    found.compare.blocks = readers[0].blocks, readers[1].blocks
    found.back.blocks = readers[1].blocks, readers[0].blocks
    few = readers[0].few | readers[1].few
    labels = readers[0].keys, readers[1].keys
    both = labels[0].keys() & labels[1].keys()
    for side, specs, of_ranks in zip(labels, (found.olds, found.news), found.of_ranks, strict=True):
        of_ranks |= ranks.alike(side, specs, both | (side.keys() - few))
        others = {key for keys in of_ranks.values() for key in keys[1:]}
        for key in others:
            specs.pop(key)
        if others:
            for label, keys in side.items():
                side[label] = [key for key in keys if key not in others]
    return labels, few


def _equal_bytes(
    found: Search, sides: tuple[_Labels, _Labels], few: Collection[tuple[str, bytes]]
) -> None:
    left = [
        {label: some for label, keys in side.items() if (some := [k for k in keys if k in specs])}
        for side, specs in zip(sides, (found.olds, found.news), strict=True)
    ]
    for label, new in left[1].items():
        old = left[0].get(label, [])
        if label not in few and len(old) == 1:
            _same_elements(found, old[0], new)
        elif old:
            for shape in {found.news[k].shape for k in new}:
                one = [k for k in old if found.olds[k].shape == shape]
                other = [k for k in new if found.news[k].shape == shape]
                if one:
                    found.doubtful[label[0], shape, label[1]] = (one, other)


def _same_elements(found: Search, old: str, new: Sequence[str]) -> None:
    """Relations of one old tensor and the new ones that hold its bytes."""
    here = found.olds[old]
    alike = [k for k in new if found.news[k].shape == here.shape]
    if len(new) == 1:
        there = found.news[new[0]]
        ops = () if there.shape == here.shape else (reshaped(here.shape, there.shape)[0],)
        found.add(Relation((old,), (new[0],), ops))
    elif len(alike) == len(new):
        places = {_place(found.new, k) for k in new}
        op = "tie" if len(places) == 1 and None not in places else "copy"
        targets = sorted(new, key=lambda k: (k != old, new.index(k)))
        found.add(Relation((old,), tuple(targets), ({op: {"count": len(new)}},)))


def _place(source: Source, key: str) -> Any:
    """What tensors that share memory have in common."""
    at: Any = source.index.tensors[key]
    shared = getattr(at, "storage", None)
    return None if shared is None else (shared, at.offset)


def _follow_codes(found: Search) -> None:
    """Parts of encoded tensors whose codes were found, by the codecs' tables of names."""
    codes = {
        r.sources[0]: r.targets[0]
        for r in found.relations
        if not r.ops and len(r.sources) == len(r.targets) == 1
    }
    for source, target in parts_that_follow(found.old, found.new, codes, found.news.keys()):
        if source in found.olds:
            found.prove(Relation((source,), (target,)))


def _settle_doubtful(found: Search) -> None:
    """Equal tensors, by names of which the others leave no doubt."""
    for one, other in found.doubtful.values():
        # that two of them did not change places only their names say
        several = len(one) > 1 and len(other) > 1
        for key in [k for k in other if k in one and k in found.olds and k in found.news]:
            found.add(Relation((key,), (key,), guessed=several))
    labels_old, labels_new = _open_labels(found)
    for old, new in names.learned(found.relations, labels_old, labels_new):
        found.add(Relation((old,), (new,)))


_OpenLabels = dict[str, tuple[str, Shape, bytes]]


def _open_labels(found: Search) -> tuple[_OpenLabels, _OpenLabels]:
    """The keys of either side that are left among equal ones, and which those are."""
    olds = {k: label for label, (one, _) in found.doubtful.items() for k in one if k in found.olds}
    news = {
        k: label for label, (_, other) in found.doubtful.items() for k in other if k in found.news
    }
    return olds, news


def _settle_by_names(found: Search, ask: names.Ask | None) -> None:
    """Equal tensors, by names that come nearest, and by questions."""
    labels_old, labels_new = _open_labels(found)
    pairs, told, questions = names.match(labels_old, labels_new, ask)
    for old, new in told:
        found.add(Relation((old,), (new,)))
    for old, new in pairs:
        found.add(Relation((old,), (new,), guessed=True, note="equal tensors, told apart by names"))
    found.questions += questions
    left = [k for k in labels_new if k in found.news]
    asked = {key for question in found.questions for key in question.keys}
    for key in left:
        if key in asked:
            continue
        one, _ = found.doubtful[labels_new[key]]
        taken = [
            r for r in found.relations if not r.ops and len(r.sources) == 1 and r.sources[0] in one
        ]
        if len(taken) == 1 and len(one) == 1:
            first = taken[0]
            found.relations.remove(first)
            found.add(
                Relation(
                    first.sources, (*first.targets, key), ({"copy": {"count": 2}},), guessed=True
                )
            )
        else:
            found.why[key] = "equals several old tensors that have other places"


# --- elements that moved


def _as_they_are(found: Search) -> tuple[list[ComparedTensor], list[ComparedTensor]]:
    return (
        [ComparedTensor(k, s, found.old) for k, s in found.olds.items()],
        [ComparedTensor(k, s, found.new) for k, s in found.news.items()],
    )


def _moved_whole(found: Search) -> None:
    """Relations of tensors that consist of the same blocks; whatever else they may be is left to
    their runs.
    """
    if not found.bits or found.compare.blocks is None:
        return
    olds, news = _as_they_are(found)
    links, complete = moved_blocks(*found.compare.blocks, (olds, news))
    why = dict(found.why)
    for part_olds, part_news in _components(links):
        if complete[0].issuperset(part_olds) and complete[1].issuperset(part_news):
            _solve(
                found,
                [olds[i] for i in part_olds],
                [news[j] for j in part_news],
                _renumbered(links, part_olds, part_news),
            )
    found.why = why


def _moved(
    found: Search,
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    bits: int | None = None,
) -> None:
    """Relations of tensors whose elements stand in common runs, of which more and more are looked
    at while these do not say enough, from one in 2**bits on.
    """
    runs, found.runs = found.runs, ({}, {})
    if bits is None:
        bits = _sampling(olds, news)
    while True:
        _moved_by(found, olds, news, bits, runs)
        olds = [t for t in olds if t.key in found.olds]
        news = [t for t in news if t.key in found.news]
        if not bits or not olds or not news:
            return
        runs, bits = ({}, {}), max(0, min(bits - 3, _sampling(olds, news)))
        if sampling(max(sum(t.spec.numel for t in side) for side in (olds, news)) >> bits):
            return


def _moved_by(
    found: Search,
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    bits: int,
    held: tuple[dict[str, Runs], dict[str, Runs]],
) -> None:
    def taken(tensor: ComparedTensor, side: int) -> Runs:
        runs = held[side].pop(tensor.key, None)
        return runs_of(tensor, bits) if runs is None else runs

    known = KnownRuns(taken(t, 0) for t in olds)
    links: dict[tuple[int, int], Pairs] = {}
    for j, tensor in enumerate(news):
        for i, pairs in known.pairs(taken(tensor, 1), is_sampled(tensor.spec, bits)):
            if len(pairs.old):
                links[i, j] = pairs
    del known
    _same_multisets(olds, news, links, bits)
    for some, others in _components(links):
        # a wrong link by chance is one of few pairs
        strong = _without_chance(links, some, others)
        for part_olds, part_news in _components(strong):
            _solve(
                found,
                [olds[i] for i in part_olds],
                [news[j] for j in part_news],
                _renumbered(strong, part_olds, part_news),
            )


def _renumbered(
    links: Mapping[tuple[int, int], Pairs], olds: Sequence[int], news: Sequence[int]
) -> dict[tuple[int, int], Pairs]:
    return {
        (a, b): links[i, j]
        for a, i in enumerate(olds)
        for b, j in enumerate(news)
        if (i, j) in links
    }


def _same_multisets(
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    links: dict[tuple[int, int], Pairs],
    bits: int,
) -> None:
    """Links small tensors of which one has the elements of the other in another order, where runs
    say nothing.
    """
    import numpy as np

    if bits:
        return
    linked_old, linked_new = {i for i, _ in links}, {j for _, j in links}
    sides: list[dict[tuple[str, int, bytes], list[int]]] = []
    for tensors, linked in ((olds, linked_old), (news, linked_new)):
        by: dict[tuple[str, int, bytes], list[int]] = defaultdict(list)
        for n, tensor in enumerate(tensors):
            if (
                n not in linked
                and 1 < tensor.spec.numel <= 1 << 16
                and BITS[tensor.spec.dtype] <= 64
            ):
                by[
                    tensor.spec.dtype,
                    tensor.spec.numel,
                    np.sort(tensor.read().reshape(-1)).tobytes(),
                ].append(n)
        sides.append(by)
    for label, new in sides[1].items():
        old = sides[0].get(label, [])
        if len(old) == len(new) == 1:
            empty = np.empty(0, np.int64)
            links[old[0], new[0]] = Pairs(empty, empty)


def _components(links: Iterable[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """The sets of tensors, as numbers of old and new ones, that links connect."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def root(x: tuple[str, int]) -> tuple[str, int]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for i, j in links:
        parent[root(("old", i))] = root(("new", j))
    out: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for side, number in sorted(parent):
        out.setdefault(root((side, number)), ([], []))[side == "new"].append(number)
    return list(out.values())


def _without_chance(
    links: Mapping[tuple[int, int], Pairs], olds: Sequence[int], news: Sequence[int]
) -> dict[tuple[int, int], Pairs]:
    mine = {(i, j): p for (i, j), p in links.items() if i in set(olds) and j in set(news)}
    if len(olds) == 1 or len(news) == 1:
        return mine
    most = max(len(p.old) for p in mine.values())
    return {ij: p for ij, p in mine.items() if len(p.old) * 50 >= most}


def _solve(
    found: Search,
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    links: Mapping[tuple[int, int], Pairs],
) -> None:
    """The relation of tensors that share elements."""
    if min(len(olds), len(news)) > 1:
        if _solve_through_whole(found, olds, news, links):
            return
        for tensor in news:
            found.why[tensor.key] = (
                f"shares elements with {names.some(t.key for t in olds)}, which "
                f"{names.some(t.key for t in news)} share too"
            )
        return
    pairs = [links[i, j] for i in range(len(olds)) for j in range(len(news))]
    joined = len(news) == 1 and (len(olds) > 1 or olds[0].spec.numel <= news[0].spec.numel)
    parts, whole = (olds, news[0]) if joined else (news, olds[0])
    if not sampling(sum(t.spec.numel for t in (*parts, whole))):
        singles = (
            single_elements([t.read() for t in olds], news[0].read())
            if joined or len(news) == 1
            else [single_elements([olds[0].read()], t.read())[0] for t in news]
        )
        pairs = [
            consistent(Pairs(*(_join(a, b) for a, b in zip(p, q, strict=True))))
            for p, q in zip(pairs, singles, strict=True)
        ]
    regions: list[Region] = []
    shares = []
    for part, pair in zip(parts, pairs, strict=True):
        at, to = (pair.old, pair.new) if joined else (pair.new, pair.old)
        order = at.argsort()
        at, to = at[order], to[order]
        shares.append((part, len(at)))
        # parts of one shape lie alike
        region = _as_another(regions, parts, part.spec.shape, at, to)
        if region is None:
            region = read_strides(at, to, part.spec.numel)
        if region is None or not is_certain(region, at, part.spec.numel):
            break
        regions.append(region)
    else:
        relation = _laid_out(found, parts, whole, regions, joined)
        if relation is not None and found.prove(relation):
            return
        if relation is not None:
            return
    if len(olds) == len(news) == 1 and olds[0].spec == news[0].spec:
        rolled = _rolled(olds[0].spec.shape, pairs[0])
        if rolled is not None and found.prove(
            Relation((olds[0].key,), (news[0].key,), (*olds[0].before, *rolled))
        ):
            return
    if max(len(olds), len(news)) > 1 and _solve_through_whole(found, olds, news, links):
        return
    part, count = max(shares, key=lambda s: s[1])
    for tensor in news:
        one = (
            f"{count} elements stand in both, of {part.spec.numel} of {part.key}"
            if count
            else "equal elements"
        )
        found.why.setdefault(
            tensor.key,
            f"is nearest to {names.some(t.key for t in olds)}: {one}, but no ops say how they lie",
        )


def _solve_through_whole(
    found: Search,
    olds: Sequence[ComparedTensor],
    news: Sequence[ComparedTensor],
    links: Mapping[tuple[int, int], Pairs],
) -> bool:
    """Whether one side, laid side by side, says how the other is made or cut."""
    for relation, back in through_whole(olds, news, links):
        if back is not None and not _holds(found.back, back):
            continue
        each = apart(relation)
        if len(each) > 1 and all(_holds(found.compare, one) for one in each):
            for one in each:
                found.add(one)
            return True
        if len(each) == 1 and found.prove(relation):
            return True
    return False


def _as_another(
    regions: Sequence[Region],
    parts: Sequence[ComparedTensor],
    shape: Shape,
    at: Array,
    to: Array,
) -> Region | None:
    """The region of a part before this one, moved, if these places lie in it."""
    for region, part in zip(reversed(regions), reversed(parts[: len(regions)]), strict=True):
        if part.spec.shape == shape and len(at):
            moved = Region(int(to[0] - places(region, at[:1])[0]) + region.offset, region.digits)
            return moved if (places(moved, at) == to).all() else None
    return None


def _join(one: Array, other: Array) -> Array:
    import numpy as np

    return np.concatenate((one, other))


def _laid_out(
    found: Search,
    parts: Sequence[ComparedTensor],
    whole: ComparedTensor,
    regions: Sequence[Region],
    joined: bool,
) -> Relation | None:
    shapes = [t.spec.shape for t in parts]
    try:
        layout = lay_out(shapes, regions, whole.spec.shape)
        if layout.outside is not None:
            value = _around(found, parts, whole, layout, joined)
            if value is None and joined:
                return None
            layout = lay_out(shapes, regions, whole.spec.shape, value)
    except NoLayout:
        return None
    keys = tuple(parts[k].key for k in layout.order)
    before = parts[0].before if joined else whole.before
    if joined:
        return Relation(keys, (whole.key,), (*before, *layout.join))
    return Relation((whole.key,), keys, (*before, *layout.cut))


def _around(
    found: Search,
    parts: Sequence[ComparedTensor],
    whole: ComparedTensor,
    layout: PartLayout,
    joined: bool,
) -> float | None:
    """What an element of the whole that is in no part is; None if others may not be so. Where the
    parts make the whole, that is proven with the relation.
    """
    at = layout.outside or 0
    element = next(
        flat[at - start] for start, count, flat in whole.stretches() if at < start + count
    )
    if element.dtype.kind == "V":
        return None
    number = number_of(whole.spec.dtype, int(element))
    # of few elements only a number that people pad with says that they are padding
    if whole.spec.numel - sum(t.spec.numel for t in parts) < FEW and number not in (0, 1, -1):
        return None
    if isinstance(number, complex) or number != number or number in (float("inf"), float("-inf")):
        return None
    value = int(number) if number == int(number) and str(float(number))[0] != "-" else float(number)
    if joined or whole.before:
        return value if joined else None
    pad = [dict(op["pad"], value=value) if "pad" in op else None for op in layout.join]
    join = [{"pad": given} if given else op for op, given in zip(layout.join, pad, strict=True)]
    keys = tuple(parts[k].key for k in layout.order)
    back = Relation(keys, (whole.key,), tuple(join))
    return value if _holds(found.back, back) else None


def _rolled(shape: Shape, pairs: Pairs) -> OpTexts | None:
    """The rolls of axes that explain pairs of two tensors of one shape. A roll by half of an axis
    is two halves that change places, whatever its length.
    """
    import numpy as np

    size = int(np.prod(shape))
    order = pairs.old.argsort()
    at, to = pairs.old[order], pairs.new[order]
    if not len(at) or not is_certain(Region(0, ((size, 1),)), at, size):
        return None
    ops: list[Mapping[str, Any]] = []
    for axis, (a, b) in enumerate(
        zip(np.unravel_index(at, shape), np.unravel_index(to, shape), strict=True)
    ):
        shifts = np.unique((b - a) % shape[axis])
        if len(shifts) != 1:
            return None
        shift = int(shifts[0])
        if shift and 2 * shift == shape[axis]:
            ops += [{"flip": {"dim": axis}}] if shift == 1 else _swapped(axis)
        elif shift:
            ops.append(
                {
                    "roll": {
                        "dim": axis,
                        "shift": shift if 2 * shift <= shape[axis] else shift - shape[axis],
                    }
                }
            )
    return tuple(ops)


def _swapped(axis: int) -> list[Mapping[str, Any]]:
    """The ops that exchange the two halves of an axis, whatever axes follow."""
    before = "".join(f"x{n} " for n in range(axis))
    whole, apart = f"{before}(two half) ...", f"{before}two half ..."
    ways = (f"{whole} -> {apart}", f"{apart} -> {whole}")
    first, last = ({"rearrange": {"pattern": way, "axes": {"two": 2}}} for way in ways)
    return [first, {"flip": {"dim": axis}}, last]


# --- elements that changed


def _after_casts(found: Search) -> None:
    for dtype in sorted({s.dtype for s in found.news.values()} & set(_CASTS)):
        news = [ComparedTensor(k, s, found.new) for k, s in found.news.items() if s.dtype == dtype]
        for held in sorted({s.dtype for s in found.olds.values()} & set(_CASTS) - {dtype}):
            cast: OpTexts = ({"cast": {"to": dtype, "from": held}},)
            olds = [
                ComparedTensor(k, Spec(dtype, s.shape), found.old, cast)
                for k, s in found.olds.items()
                if s.dtype == held
            ]
            if olds and news:
                # numbers that the dtype does not have were not cast to it
                with suppress(OpError):
                    _moved(found, olds, [t for t in news if t.key in found.news])


def _scaled(found: Search) -> None:
    """Tensors that are others times a power of two."""
    for dtype in sorted({s.dtype for s in found.news.values()} & set(FLOATS)):
        powers: list[dict[str, int]] = []
        sides: list[list[ComparedTensor]] = []
        for source, specs in ((found.old, found.olds), (found.new, found.news)):
            power, tensors = {}, []
            for key, spec in specs.items():
                plain = ComparedTensor(key, spec, source)
                top = _top(plain) if spec.dtype == dtype else None
                if top is not None:
                    power[key] = top
                    tensors.append(replace(plain, before=({"affine": {"mul": 2.0**-top}},)))
            powers.append(power)
            sides.append(tensors)
        by: dict[int, Any] = defaultdict(lambda: ([], []))
        for n, side in enumerate(sides):
            for tensor in side:
                by[0][n].append(tensor)
        olds, news = by[0]
        if not olds or not news:
            continue
        trial = Search(
            found.old,
            found.new,
            found.compare,
            found.back,
            olds={t.key: t.spec for t in olds},
            news={t.key: t.spec for t in news},
            unproven=True,
        )
        _moved(trial, olds, news)
        for relation in trial.relations:
            if len(relation.sources) == len(relation.targets) == 1:
                mul = 2.0 ** (powers[1][relation.targets[0]] - powers[0][relation.sources[0]])
                scale = {"affine": {"mul": int(mul) if mul >= 1 else mul, "exact": True}}
                found.prove(
                    Relation(relation.sources, relation.targets, (scale, *relation.ops[1:]))
                )


def _top(tensor: ComparedTensor) -> int | None:
    """The exponent of the largest finite number of a tensor; None without one but 0."""
    import numpy as np

    from ...elements.numbers import numbers, widened

    dtype, top = tensor.spec.dtype, 0.0
    for _, count, flat in tensor.stretches():
        values = numbers(flat[:count], dtype)
        values = np.abs(values if dtype == "float64" else widened(values))
        values = values[np.isfinite(values)]
        top = max(top, float(values.max())) if values.size else top
    return frexp(top)[1] if top else None


# --- tensors whose values say nothing


def _by_analogy(found: Search) -> None:
    """Tensors of few values follow the rule of their neighbours: of another index, or of another
    last word (`bias` beside `weight`).
    """
    moved = [r for r in found.relations if r.targets]
    for key in list(found.news):
        if key not in found.news:
            continue
        fitting: dict[tuple[Any, ...], Relation] = {}
        for relation in moved:
            like = names.transferred(relation, key)
            if (
                like is not None
                and all(k in found.olds for k in like.sources)
                and all(k in found.news for k in like.targets)
                and _holds(found.compare, like)
            ):
                fitting.setdefault((like.sources, like.targets, repr(like.ops)), like)
        if len(fitting) == 1:
            found.add(next(iter(fitting.values())))


def _holds(compare: proof.StreamedComparison, relation: Relation) -> bool:
    try:
        return compare.difference(relation) is None
    except (OpError, MigrateError, ValueError, IndexError):
        return False
