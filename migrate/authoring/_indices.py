"""Lines that differ in integers become one, whose integers are captures.

An integer of a source becomes a capture where integers of the targets follow from it: as they are,
or as a*n + b. One that no target has stays as it is, and tells rules apart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.templates import Template
from ._lines import Hole, Line, Segments, joined, line_of
from .relations import Relation

_Row = tuple[int, ...]
# of the targets: the source integer it follows, factor and offset; or a constant
_Follows = tuple[int, int, int]

_SLOT = "\0"
# a word that ends in a number
_ENDS_SO = re.compile(r"[^.0-9][0-9]+(?:\.|$)")
# what an integer is: a whole segment, a rank, or the end of a word
_WHOLE, _RANK, _END = range(3)
# values of a number at the end of a word that show an offset
_EVIDENT = 3


def capture_integers(
    relations: Iterable[Relation], params: Mapping[str, int], templates: Iterable[Template] = ()
) -> list[Line]:
    """The relations as lines with captures in place of integers, in the order of their first keys.
    `templates` are those of their keys, where these are known. ValueError if the ops of a relation
    do not fit its keys.
    """
    # what else stands for an integer, of a rank or in the key itself, is no slot of a template
    forms = {
        key: (template.text, ints, _ENDS_SO.search(template.text) is not None)
        for template in templates
        if "@" not in template.text and not template.literal
        for key, ints in zip(template.keys, template.ints, strict=True)
    }
    groups: dict[Hashable, _AlikeRelations] = {}
    for relation in relations:
        before = after = None
        if len(relation.sources) == len(relation.targets) == 1 and not (
            relation.ops or relation.roles or relation.fields
        ):
            before = forms.get(relation.sources[0])
            after = forms.get(relation.targets[0])
        if (
            before is not None
            and after is not None
            # else a number that a word ends in may be what the other has more
            and (len(before[1]) == len(after[1]) or not (before[2] or after[2]))
        ):
            # there are hundreds of thousands, of which only the first of a form becomes a line
            left, right = before[1], after[1]
            form: Hashable = (before[0], after[0], relation.guessed, relation.note)
        else:
            line = line_of(relation, params)
            left, right = _integers(line.sources), _integers(line.targets)
            form = (
                tuple(map(_skeleton, line.sources)),
                tuple(map(_skeleton, line.targets)),
                line.how(),
            )
        group = groups.get(form)
        if group is None:
            group = groups[form] = _AlikeRelations([], [], [], params)
        group.relations.append(relation)
        group.sources.append(left)
        group.targets.append(right)
    lines = [made for group in groups.values() for made in _solved(group)]
    return sorted(lines, key=lambda line: line.keys[0])


class _AlikeRelations(NamedTuple):
    """Relations whose lines differ in integers, and these integers."""

    relations: list[Relation]
    sources: list[_Row]
    targets: list[_Row]
    params: Mapping[str, int]

    def line(self, number: int) -> Line:
        return line_of(self.relations[number], self.params)


class _Lines(Sequence[Line]):
    """Some lines of a group, which are made when they are asked for."""

    def __init__(self, of: _AlikeRelations, rows: Sequence[int]) -> None:
        self._of, self._rows = of, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        rows = self._rows[at]
        return _as_written(self._of.line(rows)) if isinstance(rows, int) else _Lines(self._of, rows)


def _as_written(line: Line) -> Line:
    """The line with the numbers that words end in as parts of these words."""
    return replace(
        line, sources=tuple(map(joined, line.sources)), targets=tuple(map(joined, line.targets))
    )


def _skeleton(pattern: Segments) -> Hashable:
    return tuple(
        [
            tuple([_SLOT if isinstance(atom, int) else atom for atom in segment])
            for segment in pattern
        ]
    )


def _integers(patterns: Iterable[Segments]) -> _Row:
    return tuple(
        [a for pattern in patterns for segment in pattern for a in segment if isinstance(a, int)]
    )


def _kinds(line: Line) -> list[int | None]:
    """What each of a line's integers is; None for a rank that no capture can be, because others of
    the sources have none.
    """
    of_each = [
        [
            _WHOLE if at == 0 else _RANK if str(segment[at - 1]).endswith("@") else _END
            for segment in pattern
            for at, atom in enumerate(segment)
            if isinstance(atom, int)
        ]
        for pattern in (*line.sources, *line.targets)
    ]
    count = len(line.sources)
    ranked = [_RANK in kinds for kinds in of_each[:count]]
    apart = any(ranked) and not all(ranked)
    return [
        None if apart and kind == _RANK and number < count else kind
        for number, kinds in enumerate(of_each)
        for kind in kinds
    ]


def _solved(group: _AlikeRelations) -> list[Line]:
    sources, targets = group.sources, group.targets
    if not sources[0]:
        return [_as_written(group.line(number)) for number in range(len(sources))]
    start = group.line(0)
    own = len(_integers(start.sources[:1]))
    dropped = not start.targets
    kinds = _kinds(start)
    out: list[Line] = []
    stack = [list(range(len(sources)))]
    while stack:
        rows = stack.pop()
        left = [sources[r] for r in rows]
        right = [targets[r] for r in rows]
        found = _follow(left, right, own, dropped, kinds)
        if found is None and len(rows) > 1:
            stack += reversed(_cut(rows, sources, targets, own, dropped, kinds))
        else:
            out.append(_line(group, rows, found))
    return out


def _follow(
    left: Sequence[_Row],
    right: Sequence[_Row],
    own: int,
    dropped: bool,
    kinds: Sequence[int | None],
) -> dict[int, int | _Follows] | None:
    """For each integer of the other roles and of the targets, in this order, behind those of the
    first role, what it is; None if nothing says it.

    A dict from the position of each integer, sources and targets numbered on, to a constant or to
    what it follows; a captured integer of the first role follows itself.
    """
    columns = [*zip(*left, strict=True)]
    wanted = [*columns[own:], *zip(*right, strict=True)]
    varying = [len(set(column)) > 1 for column in columns[:own]]
    out: dict[int, int | _Follows] = {}
    used: list[int] = []
    for at, column in enumerate(wanted):
        place = own + at
        exact = place < len(columns)
        # that a number equals the rank, or what a word ends in, says nothing while neither varies
        could = [
            of if kinds[n] is not None and (varying[n] or kinds[n] == kinds[place]) else ()
            for n, of in enumerate(columns[:own])
        ]
        choice = _choice(could, column, used if not exact else [], at, varying)
        if (
            choice is not None
            and _END in (kinds[choice[0]], kinds[place])
            # an offset goes through any two values
            and (choice[1] != 1 or (choice[2] and len(set(column)) < _EVIDENT))
        ):
            choice = None
        if choice is None or (exact and choice[1:] != (1, 0)):
            if len(set(column)) > 1:
                return None
            out[place] = column[0]
            continue
        out[place] = choice
        used.append(choice[0])
    captured = {f[0] for at, f in out.items() if at >= len(columns) and isinstance(f, tuple)}
    if dropped:
        captured |= set(range(own))
    for place in range(own, len(columns)):
        # what no target has is no capture, in whatever roles it stands
        if isinstance(what := out[place], tuple) and what[0] not in captured:
            out[place] = columns[place][0]
    if any(vary and at not in captured for at, vary in enumerate(varying)):
        return None
    for at in range(own):
        out[at] = (at, 1, 0) if at in captured else columns[at][0]
    return out


def _choice(
    columns: Sequence[_Row], column: _Row, used: Sequence[int], at: int, varying: Sequence[bool]
) -> _Follows | None:
    """The source integer that the column follows: one of the same value, the next one not used
    before others; one that varies alone can be followed with a factor and an offset.
    """
    equal = [s for s, of in enumerate(columns) if of == column]
    if equal:
        unused = [s for s in equal if s not in used] or equal
        return (unused[0], 1, 0)
    for source, of in enumerate(columns):
        if not varying[source]:
            continue
        low = min(range(len(of)), key=of.__getitem__)
        high = max(range(len(of)), key=of.__getitem__)
        factor, rest = divmod(column[high] - column[low], of[high] - of[low])
        if rest or factor < 1:
            continue
        offset = column[low] - factor * of[low]
        if all(factor * a + offset == b for a, b in zip(of, column, strict=True)):
            return (source, factor, offset)
    return None


def _cut(
    rows: Sequence[int],
    sources: Sequence[_Row],
    targets: Sequence[_Row],
    own: int,
    dropped: bool,
    kinds: Sequence[int | None],
) -> list[list[int]]:
    """The rows in as few sets as can be, each of which can be followed or is nearer to it."""
    made = range(len(targets[rows[0]]))
    # what could tell rows apart: an integer of the source, of a target, and how far they lie apart
    columns: list[Iterable[int]] = [
        *([sources[r][s] for r in rows] for s in range(own)),
        *([targets[r][t] - sources[r][s] for r in rows] for s in range(own) for t in made),
        *([targets[r][t] for r in rows] for t in made),
    ]
    best: tuple[tuple[int, int], list[list[int]]] | None = None
    for column in columns:
        parts: dict[int, list[int]] = defaultdict(list)
        for row, told in zip(rows, column, strict=True):
            parts[told].append(row)
        if len(parts) < 2:
            continue
        sets = list(parts.values())
        unsolved = sum(
            _follow([sources[r] for r in p], [targets[r] for r in p], own, dropped, kinds) is None
            for p in sets
        )
        score = (unsolved, len(sets))
        if best is None or score < best[0]:
            best = (score, sets)
    return best[1] if best is not None else [[row] for row in rows]


def _line(
    group: _AlikeRelations, rows: Sequence[int], found: dict[int, int | _Follows] | None
) -> Line:
    first = group.line(rows[0])
    if found is None or not any(isinstance(f, tuple) for f in found.values()):
        return _as_written(first)
    counter = iter(range(len(found)))

    def filled(pattern: Segments) -> Segments:
        return joined(
            tuple(
                tuple(_filled(found[next(counter)]) if isinstance(a, int) else a for a in segment)
                for segment in pattern
            )
        )

    sources = tuple(filled(p) for p in first.sources)
    targets = tuple(filled(p) for p in first.targets)
    return Line(
        sources,
        targets,
        first.roles,
        first.via,
        first.fields,
        guessed=first.guessed,
        note=first.note,
        keys=tuple([key for row in rows for key in group.relations[row].sources]),
        parts=_Lines(group, rows),
    )


def _filled(what: int | _Follows) -> int | Hole:
    if isinstance(what, int):
        return what
    source, factor, offset = what
    return Hole(f"i{source}", "int", (), factor, offset)
