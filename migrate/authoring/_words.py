"""Rules that differ in one place by words become one, with alternatives and a `map`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..core.notation import LONGEST_PATTERN
from ._lines import Hole, Line, Segments, literal, plain

# of a run of segments that become alternatives
MOST_SEGMENTS = 4
# what a rule has beside its patterns, in characters
_FIXED = 40


class _Alternative(NamedTuple):
    """The words of one line in a place where others could have others."""

    line: int
    source: str
    target: str


class _Around(NamedTuple):
    """What lines have in common that differ in one place: all but the words there."""

    how: str
    before: Segments
    after: Segments
    # of the target; None where it is the source's, or there is none
    left: Segments | None = None
    right: Segments | None = None


def merge_words(lines: Sequence[Line]) -> list[Line]:
    """The lines with alternatives, those that save the most characters first."""
    known = dict(enumerate(lines))
    places: dict[_Around, dict[int, _Alternative]] = defaultdict(dict)
    at: dict[int, list[_Around]] = defaultdict(list)
    # a dict, for its order: of several forms that save as much, the first is taken
    dirty: dict[_Around, None] = {}

    def add(number: int) -> None:
        for form, place in _places(number, known[number]):
            # the shorter of two places in one form: the words without what stands beside them
            places[form].setdefault(number, place)
            at[number].append(form)
            dirty[form] = None

    for number in known:
        add(number)
    savings: dict[_Around, int] = {}
    while True:
        for form in dirty:
            saved = _saved(form, [*places[form].values()]) if len(places[form]) > 1 else 0
            if saved > 0:
                savings[form] = saved
            else:
                savings.pop(form, None)
        dirty.clear()
        if not savings:
            return [known[n] for n in sorted(known, key=lambda n: known[n].keys[0])]
        best = max(savings, key=lambda form: (savings[form], len(places[form])))
        chosen = _distinct([*places[best].values()])
        made = _merged([known[p.line] for p in chosen], chosen, best)
        for place in chosen:
            for form in at.pop(place.line):
                places[form].pop(place.line, None)
                dirty[form] = None
            del known[place.line]
        number = min(p.line for p in chosen)
        known[number] = made
        add(number)


def _places(number: int, line: Line) -> Iterator[tuple[_Around, _Alternative]]:
    if line.roles or len(line.sources) != 1 or len(line.targets) > 1:
        return
    source = line.sources[0]
    how, kept = line.how(), line.kept
    target = line.targets[0] if line.targets else None
    for start, end in _runs(source):
        words = ".".join(map(plain, source[start:end]))
        left = (how, source[:start], source[end:])
        if kept or target is None:
            yield _Around(*left), _Alternative(number, words, words)
            continue
        for begin, stop in _runs(target):
            others = ".".join(map(plain, target[begin:stop]))
            yield _Around(*left, target[:begin], target[stop:]), _Alternative(number, words, others)


def _runs(pattern: Segments) -> Iterator[tuple[int, int]]:
    for start in range(len(pattern)):
        for end in range(start + 1, min(len(pattern), start + MOST_SEGMENTS) + 1):
            if not literal(pattern[end - 1]):
                break
            yield start, end


def _distinct(places: Sequence[_Alternative]) -> list[_Alternative]:
    """Those of the places whose words are not those of another one before."""
    sources: set[str] = set()
    targets: set[str] = set()
    out = []
    for place in places:
        if not (place.source and place.target):
            continue
        if place.source in sources or place.target in targets:
            continue
        sources.add(place.source)
        targets.add(place.target)
        out.append(place)
    return out


def _size(pattern: Segments | None) -> int:
    return sum(len(plain(s)) if literal(s) else 8 for s in pattern or ()) + len(pattern or ())


def _saved(form: _Around, places: Sequence[_Alternative]) -> int:
    """The characters that one rule for all of them saves; 0 or less: none."""
    places = _distinct(places)
    if len(places) < 2:
        return 0
    words = sum(len(p.source) + 1 for p in places)
    if words + _size(form.before) + _size(form.after) > LONGEST_PATTERN // 2:
        return 0
    mapped = any(p.source != p.target for p in places)
    shared = _FIXED + sum(map(_size, (form.before, form.after, form.left, form.right)))
    before = (len(places) - 1) * shared
    before += sum(len(p.source) for p in places)
    if form.left is not None:
        before += sum(len(p.target) for p in places)
    after = words + 6
    if mapped:
        after += 12 + sum(len(p.source) + len(p.target) + 4 for p in places)
    return before - after


def _merged(lines: Sequence[Line], places: Sequence[_Alternative], form: _Around) -> Line:
    _, before, after, left, right = form
    first = lines[0]
    hole = Hole(f"w{len(before)}_{len(after)}", "enum", tuple(p.source for p in places))
    source = (*before, (hole,), *after)
    if left is not None and right is not None:
        targets: tuple[Segments, ...] = ((*left, (hole,), *right),)
    else:
        targets = (source,) if first.kept else ()
    words: dict[str, str | None] = {p.source: p.target for p in places}
    mapped = {hole.name: words} if any(a != b for a, b in words.items()) else {}
    return replace(
        first,
        sources=(source,),
        targets=targets,
        map={**first.map, **mapped},
        keys=tuple([key for line in lines for key in line.keys]),
        parts=tuple(lines),
    )
