"""Where all of a subtree moves or stays, one rule says so with `{k...}`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._lines import Hole, Line, Segment, Segments, holes

REST: Segment = (Hole("k", "path"),)


class _Move(NamedTuple):
    before: Segments
    after: Segments
    kept: bool
    guessed: bool
    note: str | None


def merge_subtrees(lines: Sequence[Line], alone: bool = False) -> list[Line]:
    """The lines with one for each subtree of which all keys that there are move alike.

    A subtree is never the whole checkpoint: an unforeseen key would go along. What other
    rules take from it, by longer patterns, is no part of it. `alone`: subtrees of one key, too.
    """
    counts = _Counts(lines)
    groups: dict[_Move, list[tuple[Line, Segments]]] = defaultdict(list)
    out: list[Line] = []
    for line in lines:
        if not line.plain or line.fields or line.map:
            out.append(line)
            continue
        before, after, rest = split(line)
        move = _Move(before, after, line.kept, line.guessed, line.note)
        groups[move].append((line, rest))
    for move, members in groups.items():
        out += _moved(move.before, move.after, members, counts, move.kept, alone)
    return out


def split(line: Line) -> tuple[Segments, Segments, Segments]:
    """(what the source begins with, what the target has instead, what both end in)."""
    source, target = line.sources[0], line.targets[0]
    if line.kept:
        return (), (), source
    same, most = 0, min(len(source) - 1, len(target))
    while same < most and source[-1 - same] == target[-1 - same]:
        same += 1
    before = {hole.name for hole in holes(target[: len(target) - same])}
    while same and any(hole.name in before for hole in holes(source[len(source) - same :])):
        # what the target says in two places is no part of a rest
        same -= 1
        before |= {hole.name for hole in holes(target[len(target) - same - 1 : len(target) - same])}
    return source[: len(source) - same], target[: len(target) - same], source[len(source) - same :]


class _Counts:
    """How many patterns begin with some segments: of sources and targets, kept or moved, and of
    those in rules that name no more than these segments."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.sources: Counter[Segments] = Counter()
        self.kept: Counter[Segments] = Counter()
        self.kept_targets: Counter[Segments] = Counter()
        self.short: Counter[Segments] = Counter()
        for line in lines:
            before = len(split(line)[0]) if line.plain and not (line.fields or line.map) else None
            for pattern in line.sources:
                for end in range(len(pattern) + 1):
                    self.sources[pattern[:end]] += 1
                    self.kept[pattern[:end]] += line.kept
                    self.short[pattern[:end]] += before is not None and before <= end
            for pattern in line.targets:
                for end in range(len(pattern) + 1):
                    self.kept_targets[pattern[:end]] += line.kept


def _moved(
    before: Segments,
    after: Segments,
    members: Sequence[tuple[Line, Segments]],
    counts: _Counts,
    kept: bool,
    alone: bool,
) -> list[Line]:
    """One line for all members, or one for each branch below, or the members themselves."""
    whole = False
    if before and all(rest for _, rest in members) and (len(members) > 1 or alone):
        own = len(members)
        if kept:
            whole = counts.sources[before] == own
        else:
            whole = (
                not counts.kept[before]
                and not counts.kept_targets[after]
                and counts.short[before] == own
                and 2 * own > counts.sources[before]
            )
    branches: dict[Segment, list[tuple[Line, Segments]]] = defaultdict(list)
    out: list[Line] = []
    for line, rest in members:
        if rest:
            branches[rest[0]].append((line, rest[1:]))
        else:
            out.append(line)
    for segment, below in branches.items():
        out += _moved((*before, segment), (*after, segment), below, counts, kept, alone)
    if not whole:
        return out
    # what the line does not take exactly is taken by those below it
    first = members[0][0]
    return [
        Line(
            ((*before, REST),),
            ((*after, REST),),
            fields=first.fields,
            guessed=first.guessed,
            note=first.note,
            keys=tuple([key for line, _ in members for key in line.keys]),
            parts=tuple(out),
        )
    ]
