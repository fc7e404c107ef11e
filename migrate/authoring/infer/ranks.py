"""Tensors that every rank holds alike: that of the first rank stands for all of them while the two
sides are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.spec import Spec
from ...core.templates import rank_of
from ..relations import Relation

# key of the first rank -> those of all ranks, in their order
Alike = Mapping[str, tuple[str, ...]]
_Label = Any


def alike(
    labels: Mapping[_Label, Sequence[str]], specs: Mapping[str, Spec], sure: Collection[_Label]
) -> dict[str, tuple[str, ...]]:
    """The tensors of which all ranks have the same bytes. `labels` are keys by their bytes; those
    that are `sure` count. One is equal on all ranks although it was cut: zeros.
    """
    counts = Counter(_base(key) for key in specs if rank_of(key) is not None)
    out = {}
    for label, keys in labels.items():
        if len(keys) < 2 or label not in sure:
            continue
        ranks: dict[tuple[str, Any], dict[int, str]] = defaultdict(dict)
        for key in keys:
            if (rank := rank_of(key)) is not None:
                ranks[_base(key), specs[key].shape][rank] = key
        for (base, _), found in ranks.items():
            if 1 < len(found) == counts[base] == max(found) + 1:
                out[found[0]] = tuple(found[rank] for rank in range(len(found)))
    return out


def expanded(relation: Relation, old: Alike, new: Alike) -> Iterator[Relation]:
    """The relation of all ranks that a relation of the first one stands for."""
    sources, targets = ([side.get(k) for k in keys] for side, keys in _sides(relation, old, new))
    if not any(sources) and not any(targets):
        yield relation
        return
    if not relation.targets:
        for keys in zip(*_all(sources, relation.sources), strict=True):
            yield replace(relation, sources=keys)
        return
    before, after = _count(sources), _count(targets)
    if before and before == after:
        for rank in range(before):
            yield replace(
                relation,
                sources=tuple(keys[rank] for keys in _all(sources, relation.sources)),
                targets=tuple(keys[rank] for keys in _all(targets, relation.targets)),
            )
        return
    if before:
        ops = ({"same": {"count": before}}, *relation.ops)
        relation = replace(relation, ops=ops, sources=_flat(sources))
    if after:
        ops = (*relation.ops, {"copy": {"count": after}})
        relation = replace(relation, ops=ops, targets=_flat(targets))
    yield relation


def _sides(
    relation: Relation, old: Alike, new: Alike
) -> tuple[tuple[Alike, tuple[str, ...]], tuple[Alike, tuple[str, ...]]]:
    return (old, relation.sources), (new, relation.targets)


def _all(found: Sequence[tuple[str, ...] | None], keys: Sequence[str]) -> list[tuple[str, ...]]:
    return [of or (key,) for of, key in zip(found, keys, strict=True)]


def _count(found: Sequence[tuple[str, ...] | None]) -> int:
    """On how many ranks all of them are; 0 where they are not on the same."""
    counts = {len(of or ()) for of in found}
    return counts.pop() if len(counts) == 1 else 0


def _flat(found: Sequence[tuple[str, ...] | None]) -> tuple[str, ...]:
    return tuple(key for of in found for key in of or ())


def _base(key: str) -> str:
    return key.rpartition("@")[0]
