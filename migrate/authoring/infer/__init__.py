"""Two checkpoints with the same weights in two layouts, to the relations between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..relations import Relation

if TYPE_CHECKING:
    from ...source.index import Source
    from .by_values import Unexplained
    from .names import Ask, Question


@dataclass(frozen=True, slots=True)
class Inferred:
    """What two checkpoints say. `unexplained` are new tensors for which nothing was found; for
    `matched` bytes of the new checkpoint, of `total`, something was.
    """

    relations: tuple[Relation, ...]
    questions: tuple[Question, ...]
    unexplained: tuple[Unexplained, ...]
    matched: int
    total: int


def infer(
    old: Source,
    new: Source,
    *,
    headers: bool = False,
    answers: Mapping[str, str] | None = None,
    ask: Ask | None = None,
) -> Inferred:
    """The relations of two opened checkpoints; by names, shapes and dtypes alone with `headers`.
    `ask` is asked what is open, a question at a time.
    """
    if headers:
        from .by_headers import search as search_headers

        relations, questions, rest = search_headers(old.index, new.index, answers or {}, ask)
    else:
        from .by_values import search

        found, rest = search(old, new, answers or {}, ask)
        relations, questions = found.relations, found.questions
    # a spec is one object for many tensors
    specs = [new.index.tensors[key].spec for relation in relations for key in relation.targets]
    counts = Counter(map(id, specs))
    made = sum(spec.nbytes * counts[at] for at, spec in {id(s): s for s in specs}.items())
    order = {k: n for n, k in enumerate(old.index.tensors)}
    relations.sort(key=lambda r: (order[r.sources[0]], r.targets))
    return Inferred(tuple(relations), tuple(questions), tuple(rest), made, new.index.nbytes)
