"""Each rule takes its own keys and no others: by `where` if its patterns say too much, and else in
the parts that it was made of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ..core.keys import Pattern, TwoReadings, narrower, parse
from ..core.templates import PER_KEY, Template, bind, group, seen_by
from ._lines import Hole, Line, Segments, holes, text


class _Reading(NamedTuple):
    pattern: Pattern
    # key -> the values of the pattern's captures
    rows: dict[str, tuple[Any, ...]]


class _Ambiguous(Exception):  # noqa: N818 - an answer: the pattern is of no use
    pass


class KnownKeys:
    """The keys of one side by their templates, and the number of the template of each."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.templates = group(keys)
        self.number = {key: at for at, form in enumerate(self.templates) for key in form.keys}


def settle(
    lines: Sequence[Line],
    targets: Mapping[str, Sequence[str]],
    sources: KnownKeys,
    made: KnownKeys,
) -> list[Line]:
    """The lines so that each takes what is its own of the source keys, and so that on the way back
    each takes what it made. `targets` maps a source key to the target keys of its relation;
    `sources` and `made` are the keys of both sides.
    """
    work = list(lines)
    # what neither a condition nor its parts can help; who applies the rules finds out
    left: dict[int, Line] = {}
    while True:
        wrong = _wrong(work, sources, made, targets)
        if all(id(work[number]) in left for number in wrong):
            return work
        out = []
        for number, line in enumerate(work):
            if number not in wrong:
                out.append(line)
                continue
            narrowed = wrong[number] and _narrowed(line, wrong[number])
            if narrowed:
                out.append(narrowed)
            elif line.parts:
                out += line.parts
            else:
                left[id(line)] = line
                out.append(line)
        work = out


def _wrong(
    lines: Sequence[Line],
    sources: KnownKeys,
    made: KnownKeys,
    targets: Mapping[str, Sequence[str]],
) -> dict[int, list[tuple[list[Any], list[Any], str]]]:
    """The lines that take foreign keys: for each integer capture its own and the foreign values;
    an empty list where nothing but the parts helps.
    """
    out: dict[int, list[tuple[list[Any], list[Any], str]]] = {}
    for side, known_keys in (("from", sources), ("to", made)):
        if _is_exact(lines, side, known_keys, targets):
            continue
        readings: list[list[_Reading]] = []
        owner: dict[str, list[int]] = defaultdict(list)
        strange = False
        for number, line in enumerate(lines):
            own = _own(line, side, targets)
            for key in own:
                owner[key].append(number)
            try:
                readings.append([_read(p, known_keys.templates) for p in _patterns(line, side)])
                known = set(own)
                strange = strange or any(not r.rows.keys() <= known for r in readings[-1])
            except _Ambiguous:
                out[number] = []
                readings.append([])
        if not strange:
            continue
        taken: dict[str, list[tuple[int, _Reading]]] = defaultdict(list)
        for number, of in enumerate(readings):
            for reading in of:
                limited = bool(lines[number].where)
                for key in reading.rows:
                    if not (limited and _excluded(lines[number], reading, key)):
                        taken[key].append((number, reading))
        foreign: dict[int, set[str]] = defaultdict(set)
        for key, by in taken.items():
            if len(by) == 1 and by[0][0] in owner[key]:
                continue
            for number, reading in by:
                if number in owner[key] or lines[number].kept:
                    continue
                if lines[number].fields.get("keep_source") and side == "from":
                    foreign[number].add(key)
                    continue
                rivals = [r for n, r in by if n in owner[key]]
                if any(not lines[n].kept for n, _ in by if n in owner[key]) and all(
                    narrower(rival.pattern, reading.pattern) for rival in rivals
                ):
                    continue
                foreign[number].add(key)
        for number, keys in foreign.items():
            if number in out:
                continue
            found = out.setdefault(number, [])
            for reading in readings[number]:
                own_keys = [k for k in reading.rows if number in owner[k]]
                for at, name in enumerate(reading.pattern.captures):
                    if reading.pattern.types[name].kind != "int":
                        continue
                    ours = sorted({reading.rows[k][at] for k in own_keys})
                    theirs = sorted({reading.rows[k][at] for k in keys if k in reading.rows})
                    found.append((ours, theirs, name))
    return out


def _own(line: Line, side: str, targets: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """The keys of one side that are a line's."""
    if side == "from":
        return line.keys
    return dict.fromkeys(chain.from_iterable(map(targets.__getitem__, line.keys)))


def _is_exact(
    lines: Sequence[Line],
    side: str,
    keys: KnownKeys,
    targets: Mapping[str, Sequence[str]],
) -> bool:
    """Whether each line takes whole templates, of which all keys are its own, and no others: what
    is so of templates need not be looked at key by key.
    """
    for line in lines:
        own = Counter(map(keys.number.__getitem__, _own(line, side, targets)))
        for pattern in _patterns(line, side):
            parsed = parse(text(pattern, set()))
            for at, template in enumerate(keys.templates):
                try:
                    binding = bind(parsed, seen_by(parsed, template))
                except TwoReadings:
                    return False
                if binding is None:
                    continue
                if binding is PER_KEY or binding.partial or binding.agreeing:
                    return False
                if own[at] != len(template.keys):
                    return False
    return True


def _patterns(line: Line, side: str) -> Iterator[Segments]:
    if side == "from":
        yield from line.sources
        return
    for pattern in line.targets:
        yield tuple(
            tuple(
                replace(atom, values=tuple(line.map[atom.name][v] for v in atom.values))
                if isinstance(atom, Hole) and atom.kind == "enum" and atom.name in line.map
                else atom
                for atom in segment
            )
            for segment in pattern
        )


def _read(pattern: Segments, templates: Iterable[Template]) -> _Reading:
    parsed = parse(text(pattern, set()))
    rows: dict[str, tuple[Any, ...]] = {}
    for template in templates:
        seen = seen_by(parsed, template)
        try:
            binding = bind(parsed, seen)
            if binding is None:
                continue
            if binding is PER_KEY:
                found = [parsed.match(key) for key in seen.keys]
            else:
                found = binding.rows()
        except TwoReadings:
            raise _Ambiguous from None
        rows.update(
            (k, row) for k, row in zip(template.keys, found, strict=True) if row is not None
        )
    return _Reading(parsed, rows)


def rest_of(pattern: Segments, keys: Iterable[str]) -> set[str]:
    """What stands for the last capture of the pattern in these keys; none where that is unclear."""
    try:
        reading = _read(pattern, group(keys))
    except _Ambiguous:
        return set()
    at = len(reading.pattern.captures) - 1
    return {str(row[at]) for row in reading.rows.values()}


def _excluded(line: Line, reading: _Reading, key: str) -> bool:
    values = dict(zip(reading.pattern.captures, reading.rows[key], strict=True))
    for name, asked in line.where.items():
        value = values.get(name)
        if not isinstance(value, int):
            continue
        if isinstance(asked, Mapping):
            low, high = asked.get("min"), asked.get("max")
            step, rest = asked.get("multiple_of", 1), asked.get("remainder", 0)
            if (
                (low is not None and value < low)
                or (high is not None and value > high)
                or value % step != rest
            ):
                return True
        elif value not in asked:
            return True
    return False


def _narrowed(line: Line, found: Sequence[tuple[list[Any], list[Any], str]]) -> Line | None:
    """The line with the shortest `where` that leaves the foreign keys out; None without one."""
    apart = [(o, f, n) for o, f, n in found if o and f and not set(o) & set(f)]
    ints = {hole.name for pattern in line.sources for hole in holes(pattern)}
    for ours, theirs, name in apart:
        if name not in ints or name in line.where:
            continue
        inside = [f for f in theirs if ours[0] <= f <= ours[-1]]
        if not inside:
            limits: dict[str, Any] = {}
            if theirs[0] < ours[0]:
                limits["min"] = ours[0]
            if theirs[-1] > ours[-1]:
                limits["max"] = ours[-1]
            return replace(line, where={**line.where, name: limits})
    for ours, theirs, name in apart:
        if name not in ints or name in line.where:
            continue
        for step in range(2, 9):
            rests = {o % step for o in ours}
            if len(rests) == 1 and not any(f % step in rests for f in theirs):
                rest = rests.pop()
                asked = {"multiple_of": step, **({"remainder": rest} if rest else {})}
                return replace(line, where={**line.where, name: asked})
        return replace(line, where={**line.where, name: ours})
    return None
