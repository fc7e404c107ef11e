"""What names say of which tensor became which: only where values, or headers, leave a choice.

Templates are compared, not keys: names with their indices left out. The most certain pair is
decided first, and only if it beats the next best one of either side by a margin; what another one
comes near to is a question. One answer decides its neighbours by exclusion.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, NoReturn, TypeAlias

from ...core.errors import fail, listed, option, printable
from ...core.keys import parse
from ...core.templates import SLOT, Template, group, is_integer, rank_of
from ..relations import Relation

# how much better than the next best the score of a match has to be
MARGIN = 0.1
_SLOTS = "nmijklxyz"
# a word that ends in a number
_NUMBERED = re.compile(r"([a-z]+)([0-9]+)")
# what says where in a block something stands, by which the names of its neighbour come near: Meta's
# `attention_norm` is the `input_layernorm` of others, and not their `post_attention_layernorm`.
_PLACES = frozenset(
    ("pre", "post", "in", "out", "input", "output", "before", "after", "first", "last", "final")
)


@dataclass(frozen=True, slots=True)
class Question:
    """Which of several old patterns became a new one. `candidates` are (pattern, score), the best
    first.
    """

    target: str
    candidates: tuple[tuple[str, float], ...]
    why: str
    keys: tuple[str, ...]


# answers with the number of a candidate, None to leave it open
Ask: TypeAlias = "Callable[[Question], int | None]"


def some(keys: Iterable[str]) -> str:
    """A few of the keys."""
    return listed(list(keys), 3)


def written(ops: Sequence[Mapping[str, Any]]) -> str:
    """Ops in a message."""
    return " and ".join(next(iter(op)) for op in ops) or "a new name"


def pattern_of(template: Template) -> str:
    """The pattern of a template."""
    if template.literal:
        return template.text
    text = template.text.replace("{", "{{").replace("}", "}}")
    if len(template.keys) == 1:
        return template.keys[0].replace("{", "{{").replace("}", "}}")
    for name in _SLOTS[: text.count(SLOT)]:
        text = text.replace(SLOT, f"{{{name}:int}}", 1)
    return text


@lru_cache(maxsize=65536)
def _words(text: str) -> tuple[str, ...]:
    return tuple(w for w in re.split(r"[._\W]+", text.replace(SLOT, "#").lower()) if w)


@lru_cache(maxsize=65536)
def _ratio(one: Any, other: Any) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def score(one: Template, other: Template) -> float:
    """How alike two templates are called."""
    a, b = one.text, other.text
    value = _ratio(_words(a), _words(b)) + 0.5 * _ratio(a, b)
    if _words(a)[-1:] == _words(b)[-1:]:
        value += 0.3
    if one.ints == other.ints or set(one.ints) == set(other.ints):
        value += 0.5
    return value


class _Labelled:
    """Templates of one side, with a number for the label of each key."""

    def __init__(self, labels: Mapping[str, Hashable], numbers: dict[Hashable, int]) -> None:
        self.templates = group(labels)
        # keys share the objects of a few labels, which are hashed once
        objects = {id(label): label for label in labels.values()}
        known = {at: numbers.setdefault(one, len(numbers)) for at, one in objects.items()}
        self.labels = [[known[id(labels[key])] for key in t.keys] for t in self.templates]
        self._at: dict[int, dict[tuple[int, ...], int]] = {}

    def by_integers(self, number: int) -> dict[tuple[int, ...], int]:
        """The labels of a template's keys by their integers."""
        found = self._at.get(number)
        if found is None:
            ints = self.templates[number].ints
            found = self._at[number] = dict(zip(ints, self.labels[number], strict=True))
        return found


def _compatible(olds: _Labelled, i: int, news: _Labelled, j: int) -> bool:
    old, new = olds.templates[i], news.templates[j]
    if old.text.count(SLOT) != new.text.count(SLOT) or len(old.keys) < len(new.keys):
        return False
    if old.ints == new.ints:
        return olds.labels[i] == news.labels[j]
    at = olds.by_integers(i)
    return all(at.get(ints) == label for ints, label in zip(new.ints, news.labels[j], strict=True))


def _places(side: Sequence[Template]) -> list[frozenset[Any]]:
    """Of each template its words of place, and for a word that ends in a number, which numbers
    there are: `norm1` of `norm0` and `norm1` is not that of `norm1` and `norm2`.
    """
    numbers: dict[str, set[str]] = defaultdict(set)
    found = [[m for w in _words(t.text) if (m := _NUMBERED.fullmatch(w))] for t in side]
    for word in {m for those in found for m in those}:
        numbers[word[1]].add(word[2])
    return [
        _PLACES.intersection(_words(t.text)) | {frozenset(numbers[m[1]]) for m in those}
        for t, those in zip(side, found, strict=True)
    ]


class Matched(NamedTuple):
    """Pairs of keys that names tell apart, pairs that a person did, and what is still open."""

    pairs: list[tuple[str, str]]
    told: list[tuple[str, str]]
    questions: list[Question]


def match(
    labels_old: Mapping[str, Hashable],
    labels_new: Mapping[str, Hashable],
    ask: Ask | None = None,
) -> Matched:
    """Pairs of keys with equal labels. `ask` answers questions one by one, and each answer may
    decide others.
    """
    numbers: dict[Hashable, int] = {}
    sides = _Labelled(labels_old, numbers), _Labelled(labels_new, numbers)
    olds, news = sides[0].templates, sides[1].templates
    places = [_places(olds), _places(news)]
    scores: dict[tuple[int, int], float] = {}
    for j, new in enumerate(news):
        for i, old in enumerate(olds):
            if _compatible(sides[0], i, sides[1], j):
                scores[i, j] = score(old, new) if old.text != new.text else 9.0
    found = Matched([], [], [])
    while scores:
        best, into = _surest(scores, *places, told=bool(found.told)), found.pairs
        if best is None:
            j = min(j for _, j in scores)
            question, candidates = _question(news[j], j, olds, scores)
            answer = ask(question) if ask is not None else None
            if answer is None:
                found.questions.append(question)
                # what is not answered leaves open what else its candidates became
                left = {ij: s for ij, s in scores.items() if ij[1] != j}
                if ask is None:
                    rest = sorted({b for _, b in left})
                    found.questions.extend(_question(news[b], b, olds, scores)[0] for b in rest)
                    break
                scores = left
                continue
            best, into = (candidates[answer], j), found.told
        i, j = best
        at = dict(zip(olds[i].ints, olds[i].keys, strict=True))
        into += [(at[ints], key) for ints, key in zip(news[j].ints, news[j].keys, strict=True)]
        scores = {(a, b): s for (a, b), s in scores.items() if a != i and b != j}
    return found


def _question(
    new: Template, j: int, olds: Sequence[Template], scores: Mapping[tuple[int, int], float]
) -> tuple[Question, list[int]]:
    """Which of the old templates became the new one, number `j`, and the numbers of these."""
    found = sorted(((value, i) for (i, b), value in scores.items() if b == j), reverse=True)[:8]
    question = Question(
        pattern_of(new),
        tuple((pattern_of(olds[i]), round(value, 2)) for value, i in found),
        "their names are about as near" if len(found) > 1 else "its name is not near",
        tuple(new.keys),
    )
    return question, [i for _, i in found]


def _surest(
    scores: Mapping[tuple[int, int], float],
    olds: Sequence[frozenset[str]],
    news: Sequence[frozenset[str]],
    *,
    told: bool,
) -> tuple[int, int] | None:
    """The pair that beats the next best of both of its sides by the most, and by the margin, of
    those that have the same words of place; or, where a person has `told` others, the last one.
    """
    rows: dict[int, list[float]] = defaultdict(list)
    columns: dict[int, list[float]] = defaultdict(list)
    for (i, j), value in scores.items():
        rows[i].append(value)
        columns[j].append(value)
    for side in (*rows.values(), *columns.values()):
        side.sort(reverse=True)
    best: tuple[float, tuple[int, int]] | None = None
    for (i, j), value in scores.items():
        last = told and len(rows[i]) == len(columns[j]) == 1
        if olds[i] != news[j] and not last:
            continue
        ahead = 9.0
        for side in (rows[i], columns[j]):
            if value < side[0] or (len(side) > 1 and value - side[1] < MARGIN):
                break
            ahead = min(ahead, value - side[1]) if len(side) > 1 else ahead
        else:
            # what nothing comes near to may still be called otherwise
            if value >= 0.6 and (best is None or ahead > best[0]):
                best = (ahead, (i, j))
    return best and best[1]


def learned(
    relations: Iterable[Relation],
    labels_old: Mapping[str, Hashable],
    labels_new: Mapping[str, Hashable],
) -> list[tuple[str, str]]:
    """Pairs that are renamed as keys of the same template are that values told apart."""
    renames = [
        (r.sources[0], r.targets[0])
        for r in relations
        if not r.ops and not r.guessed and len(r.targets) == 1
    ]
    old_of = {
        k: (t.text, i)
        for t in group([a for a, _ in renames])
        for k, i in zip(t.keys, t.ints, strict=True)
    }
    new_of = {
        k: (t.text, i)
        for t in group([b for _, b in renames])
        for k, i in zip(t.keys, t.ints, strict=True)
    }
    ways: dict[str, set[str]] = defaultdict(set)
    for a, b in renames:
        if old_of[a][1] == new_of[b][1]:
            ways[old_of[a][0]].add(new_of[b][0])
    news = {(t.text, i): k for t in group(labels_new) for k, i in zip(t.keys, t.ints, strict=True)}
    out = []
    for template in group(labels_old):
        known = ways.get(template.text, set())
        if len(known) == 1:
            (text,) = known
            for key, ints in zip(template.keys, template.ints, strict=True):
                there = news.pop((text, ints), None)
                if there is not None and labels_new[there] == labels_old[key]:
                    out.append((key, there))
    return out


def transferred(relation: Relation, key: str) -> Relation | None:
    """The relation for other keys, `key` among them: of another index, another last word, or of
    another rank, where all of its keys are of one.
    """
    wanted, rank = _segments(key)
    ranks = {_segments(k)[1] for k in (*relation.sources, *relation.targets)}
    for target in relation.targets:
        here, other = _segments(target)
        if len(here) != len(wanted) or target == key or (other != rank and ranks != {other}):
            continue
        differing = [n for n, (a, b) in enumerate(zip(here, wanted, strict=True)) if a != b]
        words = [n for n in differing if not (is_integer(here[n]) and is_integer(wanted[n]))]
        if words not in ([], [len(here) - 1]):
            continue
        change = {here[n]: wanted[n] for n in differing}
        if len(change) != len({here[n] for n in differing}):
            continue
        moved = (other, rank)
        sides = [_changed(keys, change, moved) for keys in (relation.sources, relation.targets)]
        if None in sides or key not in (sides[1] or ()):
            continue
        return Relation(sides[0], sides[1], relation.ops, True, "few values: as its neighbours")  # type: ignore[arg-type]
    return None


def _changed(
    keys: tuple[str, ...], change: Mapping[str, str], moved: tuple[str, str]
) -> tuple[str, ...] | None:
    """The keys with segments replaced that all of them share, and of one rank for another."""
    split = [_segments(k) for k in keys]
    rows = [row for row, _ in split]
    if len({len(r) for r in rows}) != 1:
        return None
    shared = [len({r[n] for r in rows}) == 1 for n in range(len(rows[0]))]
    done = set()
    out = []
    for row, rank in split:
        made = []
        for n, segment in enumerate(row):
            word = not is_integer(segment)
            if segment in change and shared[n] and (not word or n == len(row) - 1):
                made.append(change[segment])
                done.add(segment)
            else:
                made.append(segment)
        out.append(".".join(made) + (moved[1] if rank == moved[0] else rank))
    return tuple(out) if done == set(change) else None


def _segments(key: str) -> tuple[list[str], str]:
    """The segments of a key, and the rank at its end as it is written."""
    rank = "" if rank_of(key) is None else key[key.rindex("@") :]
    return key[: len(key) - len(rank)].split("."), rank


# --- answers


def answered(
    answers: Mapping[str, str], olds: Mapping[str, Any], news: Mapping[str, Any]
) -> Iterator[Relation]:
    """The renames that a person's answers say: old pattern -> new pattern, empty to drop."""
    for before, after in answers.items():
        one = parse(before)
        other = parse(after, one.types) if after else None
        found = False
        for key in list(olds):
            values = one.match(key)
            if values is None:
                continue
            found = True
            if other is None:
                yield Relation((key,), (), ({"drop": {"why": "not needed any more"}},))
                continue
            made = other.expand(dict(zip(one.captures, values, strict=True)))
            if made not in news:
                fail(
                    "M115",
                    f"the answer {printable(before)}={printable(after)} names "
                    f"{printable(made)}, which is not in the new checkpoint or was answered twice",
                )
            yield Relation((key,), (made,))
        if not found:
            fail(
                "M115",
                f"the answer {printable(before)}={printable(after)} fits no key of the old "
                "checkpoint",
            )


def refuse_answer(relation: Relation, why: str | None) -> NoReturn:
    """M115: what an answer says is not so."""
    made = listed(list(islice(relation.targets, 3)))
    fail(
        "M115",
        f"the answer that makes {made} of {listed(list(relation.sources))} is not true"
        + (f": it {why}" if why else ""),
        help=f"leave it out of {option('answer')}",
    )
