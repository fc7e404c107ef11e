"""What is done alike on each rank is written without ranks: such a rule works on each alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..core.templates import rank_of
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
    for by_rank in alike.values():
        ordered = [relation for _, relation in sorted(by_rank.items())]
        bare = _bare(ordered[0])
        if any(
            side[key] != by_rank.keys()
            for side, keys in zip(held, (bare.sources, bare.targets), strict=True)
            for key in keys
        ):
            out += ordered
            continue
        out.append(bare)
        for number, key in enumerate(bare.sources):
            stands[key] = tuple(relation.sources[number] for relation in ordered)
    return out, stands


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
