"""What is done alike on each rank is written without ranks: such a rule works on each alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..core.templates import is_integer, rank_of
from .relations import Relation


def without_ranks(
    relations: Iterable[Relation],
) -> tuple[list[Relation], Mapping[str, tuple[str, ...]]]:
    """The relations, one for those of several ranks that say the same, and of each key that is
    written without its rank there the keys that it stands for.
    """
    known = list(relations)
    if not any("@" in key for one in known for key in (*one.sources, *one.targets)):
        return known, {}
    out: list[Relation] = []
    alike: dict[str, dict[int, Relation]] = defaultdict(dict)
    # on which ranks there is a key, by its name without them
    held: tuple[dict[str, set[int]], dict[str, set[int]]] = (defaultdict(set), defaultdict(set))
    for relation in known:
        rank = _rank(relation)
        for side, keys in zip(held, (relation.sources, relation.targets), strict=True):
            for key in keys:
                side[_base(key)].add(rank_of(key) or 0)
        if rank is None:
            out.append(relation)
        else:
            alike[repr(_bare(relation))][rank] = relation
    stands: dict[str, tuple[str, ...]] = {}
    of_all = []
    # forms of keys that rules of one rank take, which would take those of a rule without ranks too
    named = {
        _form(key)
        for one in out
        if any(rank_of(key) is not None for key in _keys(one))
        for key in _keys(one)
    }
    for by_rank in alike.values():
        ordered = [relation for _, relation in sorted(by_rank.items())]
        bare = _bare(ordered[0])
        forms = set(map(_form, _keys(bare)))
        of_all.append((bare, ordered, forms))
        if any(
            side[key] != by_rank.keys()
            for side, keys in zip(held, (bare.sources, bare.targets), strict=True)
            for key in keys
        ):
            named |= forms
    while more := set().union(*(f for _, _, f in of_all if not named.isdisjoint(f))) - named:
        named |= more
    for bare, ordered, forms in of_all:
        if not named.isdisjoint(forms):
            out += ordered
            continue
        out.append(bare)
        for number, key in enumerate(bare.sources):
            stands[key] = tuple(relation.sources[number] for relation in ordered)
    return out, stands


def _keys(relation: Relation) -> tuple[str, ...]:
    return (*relation.sources, *relation.targets)


def _form(key: str) -> str:
    """The key without its rank and with all integers alike."""
    return ".".join("0" if is_integer(segment) else segment for segment in _base(key).split("."))


def _rank(relation: Relation) -> int | None:
    """The rank of all keys of a relation, of which the first may have none; None where they are of
    several, or all without.
    """
    found = {rank_of(key) for key in (*relation.sources, *relation.targets)}
    if found == {None}:
        return None
    ranks = {rank or 0 for rank in found}
    return ranks.pop() if len(ranks) == 1 else None


def _bare(relation: Relation) -> Relation:
    return replace(
        relation,
        sources=tuple(map(_base, relation.sources)),
        targets=tuple(map(_base, relation.targets)),
    )


def _base(key: str) -> str:
    return key if rank_of(key) is None else key[: key.rindex("@")]
