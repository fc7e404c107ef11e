"""Relations between two checkpoints by names, shapes and dtypes alone. What is found is a guess.

Only renames are found so: which tensors were joined or cut headers do not say. A key that both
sides have with one spec stays.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...source.index import Index
from ..relations import Relation
from . import names
from .by_values import Unexplained


def search(
    old: Index, new: Index, answers: Mapping[str, str], ask: names.Ask | None = None
) -> tuple[list[Relation], list[names.Question], list[Unexplained]]:
    """All that headers say: relations, what has to be asked, and new tensors that nothing fits."""
    olds = {k: t.spec for k, t in old.tensors.items()}
    news = {k: t.spec for k, t in new.tensors.items()}
    relations = list(names.answered(answers, olds, news))
    for relation in relations:
        for key in relation.sources:
            olds.pop(key)
        for key in relation.targets:
            news.pop(key)
    for key in [k for k in news if k in olds and olds[k] == news[k]]:
        relations.append(Relation((key,), (key,), guessed=True))
        olds.pop(key)
        news.pop(key)
    pairs, told, questions = names.match(olds, news, ask)
    relations += [Relation((a,), (b,)) for a, b in told]
    relations += [Relation((a,), (b,), guessed=True, note="by name and shape") for a, b in pairs]
    done = {k for r in relations for k in r.targets} | {k for q in questions for k in q.keys}
    rest = [
        Unexplained(key, f"no old tensor that is left is {spec} with the same indices")
        for key, spec in news.items()
        if key not in done
    ]
    taken = {k for r in relations for k in r.sources}
    if not rest and not questions:
        relations += [
            Relation((k,), (), ({"drop": {"why": "nothing of the new checkpoint fits"}},), True)
            for k in olds
            if k not in taken
        ]
    return relations, questions, rest
