"""Which keys a file's patterns can take, decided on the patterns alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..core.errors import Diagnostic, PatternError, Span, listed, printable
from ..core.keys import FOREIGN, CaptureType, Pattern, foreign, narrower, parse
from ..core.matching import Integer, Literal, Part, PathHead
from ..core.overlap import apart, common, shared_key, takes
from ..ops.base import OneWay
from ..planning.match import alike_ranked
from ..planning.pathstate import invert
from ..rules.compiled import CompiledRule
from ..ruletests.binding import CompiledFile
from .inputs import FileSet, directed, finding

# every key has one segment, or two, or begins and ends with more; patterns that have all of these
# have every key
_EVERYTHING = tuple(
    tuple(map(parse, texts))
    for texts in (("{a}",), ("{a}.{b}",), ("{a}.{b}.{c}.{k...}", "{k...}.{a}.{b}.{c}"))
)
MOST_VARIANTS = 64
# pairs of patterns that one check of an edge compares, and problems that it names: a file may have
# thousands of rules that are all alike
MOST_PAIRS = 5000
MOST_FOUND = 100
# pairs that are distinguished segment by segment, which costs next to nothing
_MOST_LOOKS = 200_000
# characters of the text at an end of a pattern that are looked up
_END = 64


class _Side(NamedTuple):
    """One pattern that a rule reads or writes."""

    file: CompiledFile
    rule: CompiledRule
    role: str | None
    pattern: Pattern

    @property
    def always(self) -> bool:
        """Whether the pattern alone decides what the rule takes."""
        return not (self.rule.rule.where or self.rule.rule.when or self.pattern.params)

    def span(self, side: str) -> Span:
        """Its place; `side` is `from` or `to`."""
        return self.file.span(self.rule, side, *(() if self.role is None else (self.role,)))


class _Near:
    """Which patterns may have a key in common with another: those whose ends agree with its own.

    Each that is handed out is counted. Beyond MOST_PAIRS there are no more, and `short` is set.
    """

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._ends = [tuple(_end(pattern, at) for at in (0, -1)) for pattern in patterns]
        self._sorted = [
            sorted((ends[at], number) for number, ends in enumerate(self._ends)) for at in (0, 1)
        ]
        self._lengths = [sorted({len(ends[at]) for ends in self._ends}) for at in (0, 1)]
        self._segments = [_segments(pattern) for pattern in patterns]
        self._looks, self.left, self.short = _MOST_LOOKS, MOST_PAIRS, False

    def of(self, pattern: Pattern, after: int = -1) -> Iterator[int]:
        """The numbers of those patterns, in order, from behind `after` on."""
        if self.short:
            return
        ends = tuple(_end(pattern, at) for at in (0, -1))
        numbers = min((self._alike(at, ends[at]) for at in (0, 1)), key=len)
        segments = _segments(pattern)
        for number in sorted(numbers):
            if number <= after:
                continue
            self._looks -= 1
            alike = all(_agree(a, b) for a, b in zip(ends, self._ends[number], strict=True))
            if self._looks >= 0 and not (alike and _fit(segments, self._segments[number])):
                continue
            if not self.left or self._looks < 0:
                self.short = True
                return
            self.left -= 1
            yield number

    def stop(self) -> None:
        """Hands out no more."""
        self.short, self.left = True, 0

    def _alike(self, at: int, end: str) -> list[int]:
        """The patterns whose text is a beginning of `end`, or begins with it."""
        found: list[int] = []
        for length in self._lengths[at]:
            if length < len(end):
                found += self._between(at, end[:length], end[:length])
        return found + self._between(at, end, end + chr(0x10FFFF))

    def _between(self, at: int, low: str, high: str) -> list[int]:
        known = self._sorted[at]
        return [
            number
            for _, number in known[
                bisect_left(known, (low, -1)) : bisect_right(known, (high, len(known)))
            ]
        ]


def _end(pattern: Pattern, at: int) -> str:
    """The text that all keys of the pattern begin or (-1, backwards) end with; "" if unknown"""
    part = pattern.parts[at] if pattern.parts else None
    # a pattern that does not speak of ranks takes a key on each of them
    if not isinstance(part, Literal) or (at and "@" in part.text):
        return ""
    return part.text[:_END] if at == 0 else part.text[: -_END - 1 : -1]


def _segments(pattern: Pattern) -> list[str] | None:
    """The segments of each key of the pattern, empty where a capture decides; None if unknown."""
    if (
        any(kind.kind in ("path", "enum") for kind in pattern.types.values())
        or pattern.has_flat
        or "@" in pattern.text
    ):
        return None
    return ["" if "{" in segment or "}" in segment else segment for segment in pattern.segments]


def _fit(one: list[str] | None, other: list[str] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a == b or not a or not b for a, b in zip(one, other, strict=True)
    )


def _agree(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M612 to M619, M625, M650 and M651."""
    for file in fileset.files:
        yield from _keeps(file)
        yield from _foreign(file)
        yield from _prefix(file)
        yield from _counts(file)
    yield from _foreign_signs(fileset)
    edges = fileset.edges
    for (lineage, start, goal), files in edges.items():
        rules = [(file, rule) for file in files for rule in file.rules]
        reads = [
            _Side(file, rule, role, p)
            for file, rule in rules
            for role, p in rule.sources.items()
            if not p.has_flat
        ]
        writes = [
            _Side(file, rule, role, p)
            for file, rule in rules
            for role, p in rule.targets.items()
            if not p.has_flat
        ]
        read = {code: _Near([side.pattern for side in reads]) for code in ("M613", "M614", "M615")}
        written = _Near([side.pattern for side in writes])
        yield from _without_effect(reads, read["M613"])
        yield from _shadowed(reads, read["M614"])
        yield from _twice(reads, read["M615"])
        turned = start != goal and (lineage, goal, start) in edges
        yield from _written_twice(writes, reads, written, turned=turned)
        yield from _not_compared(
            [code for code, near in (*read.items(), ("M617 and M619", written)) if near.short],
            f"{start} to {goal}",
            files[0],
        )
    yield from _unreachable(fileset)


def _not_compared(codes: Sequence[str], edge: str, file: CompiledFile) -> Iterator[Diagnostic]:
    """M618: what was not looked at, because it would have taken too long."""
    if codes:
        yield finding(
            "M618",
            f"the rules from {edge} are too many and too similar: {listed(list(codes))} stopped "
            f"after {MOST_PAIRS:,} pairs or {MOST_FOUND} problems",
            file.span(file.rules[0]),
            "fix the reported problems, or write fewer rules with broader patterns, and run lint "
            "again",
        )


def _keeps(file: CompiledFile) -> Iterator[Diagnostic]:
    """M612: what leaves every key as it is, an entry of `keep`, a rule, or all entries together."""
    places = [
        (f"`{pattern}` keeps", pattern, file.loaded.span("keep", number))
        for number, pattern in enumerate(file.keep)
    ]
    places += [
        (f"rule `{rule.rule.name}` keeps", rule.sources[None], file.span(rule))
        for rule in file.rules
        if _leaves(rule)
    ]
    found = [(who, span) for who, pattern, span in places if _everything([pattern])]
    if not found and _everything(file.keep):
        found = [
            (
                f"{listed([f'`{pattern}`' for pattern in file.keep])} together keep",
                file.loaded.span("keep", 0),
            )
        ]
    for who, span in found:
        yield finding(
            "M612",
            f"{who} everything: a key that the rules should have taken silently stays as it is",
            span,
            "name the keys that stay, or say in a comment why they cannot be named",
        )


def _foreign(file: CompiledFile) -> Iterator[Diagnostic]:
    """M625: patterns of rule files that hold letters of another notation."""
    places = [
        (pattern, file.loaded.span("keep", number)) for number, pattern in enumerate(file.keep)
    ]
    for rule in file.rules:
        for side, patterns in (("from", rule.sources), ("to", rule.targets)):
            places += [
                (p, file.span(rule, side, *(() if role is None else (role,))))
                for role, p in patterns.items()
            ]
    for name, param in file.model.params.items():
        for field in ("shape", "dtype"):
            asked = getattr(param, field)
            places += [
                (parse(text), file.loaded.span("params", name, field, "key"))
                for text in (asked.key if asked is not None else ())
            ]
    for pattern, span in places:
        yield from _letters(pattern, span)


def _foreign_signs(fileset: FileSet) -> Iterator[Diagnostic]:
    """M625: patterns of `detect`."""
    for layout in (
        fileset.lineage.layouts
        if fileset.lineage is not None and fileset.layouts is not None
        else ()
    ):
        for field in ("present", "absent", "dtype", "ndim", "shape", "module_version"):
            for text in getattr(layout.detect, field, ()):
                span = (
                    fileset.layouts.span(("layouts", layout.name, "detect", field))
                    if fileset.layouts
                    else None
                )
                yield from _letters(parse(text), span) if span else ()


def _letters(pattern: Pattern, span: Span) -> Iterator[Diagnostic]:
    if letters := foreign(pattern):
        what = (
            f"`{printable(pattern.text)}` takes {' and '.join(f'`{c}`' for c in letters)} literally"
        )
        yield finding("M625", what, span, FOREIGN)


def _everything(patterns: Sequence[Pattern]) -> bool:
    return all(
        any(pattern.includes(form) for pattern in patterns for form in forms)
        for forms in _EVERYTHING
    )


def _leaves(rule: CompiledRule) -> bool:
    """Whether the rule leaves all keys of its pattern unchanged; a param may switch it off."""
    said = rule.rule
    if (
        said.via
        or said.map
        or said.keep_source
        or said.when
        or not all(name.startswith("$") for name in said.where)
    ):
        return False
    return (
        None in rule.sources
        and None in rule.targets
        and _spelled(rule.sources[None]) == _spelled(rule.targets[None])
    )


def _spelled(pattern: Pattern) -> list[Part]:
    """The parts, however the author wrote them: a capture has its type in `from` only."""
    return [
        replace(part, source="") if isinstance(part, Integer) else part for part in pattern.parts
    ]


def _without_effect(reads: Sequence[_Side], near: _Near) -> Iterator[Diagnostic]:
    """M613: a rule from X to X exempts keys from a broader rule; where there is none it does
    nothing that `keep` would not.
    """
    for read in reads:
        rule = read.rule
        if rule.rule.via or rule.rule.map or read.role is not None or rule.rule.keep_source:
            continue
        target = rule.targets.get(None)
        if (
            target is None
            or _spelled(target) != _spelled(read.pattern)
            or _everything([read.pattern])
        ):
            continue
        # one that leaves its keys to the others takes none away
        takers = (
            other
            for n in near.of(read.pattern)
            if (other := reads[n]).rule is not rule and not other.rule.rule.keep_source
        )
        if not any(_broader(other.pattern, read.pattern) for other in takers) and not near.short:
            what = (
                f"rule `{rule.rule.name}` leaves its keys as they are, and no broader rule "
                "would take them"
            )
            yield finding(
                "M613",
                what,
                read.file.span(rule),
                "write the pattern under `keep`, or remove the rule",
            )


def _broader(other: Pattern, pattern: Pattern) -> bool:
    """Whether `other` may take all that the pattern takes; "no" is certain without params."""
    if other.params or pattern.params:
        return not apart(other, pattern)
    wide, narrow = alike_ranked(other, pattern)
    return wide.includes(narrow)


def _narrower(one: Pattern, other: Pattern) -> bool:
    return narrower(*alike_ranked(one, other))


def _shadowed(reads: Sequence[_Side], near: _Near) -> Iterator[Diagnostic]:
    """M614: every key of a rule belongs to narrower ones."""
    for read in reads:
        if len(read.rule.sources) > 1 or read.rule.rule.keep_source:
            continue
        others = [
            o
            for o in map(reads.__getitem__, near.of(read.pattern))
            if o.rule is not read.rule
            and o.always
            and not o.rule.rule.keep_source
            and _narrower(o.pattern, read.pattern)
        ]
        if others and all(
            any(o.pattern.includes(v) for o in others) for v in _variants(read.pattern)
        ):
            names = listed(list(dict.fromkeys(f"`{o.rule.rule.name}`" for o in others)))
            yield finding(
                "M614",
                f"rule `{read.rule.rule.name}` never takes a key: narrower rules take all of them",
                read.file.span(read.rule),
                "remove it, or make its pattern broader",
                notes=(f"the narrower ones: {names}",),
            )


def _variants(pattern: Pattern) -> list[Pattern]:
    """The pattern with its alternatives written out; as it is with none or too many of them."""
    enums = {name: kind.values for name, kind in pattern.types.items() if kind.kind == "enum"}
    if not enums or prod(len(values) for values in enums.values()) > MOST_VARIANTS:
        return [pattern]
    others = {name: kind for name, kind in pattern.types.items() if name not in enums}
    out = []
    for chosen in product(*enums.values()):
        text = pattern.text
        for name, value in zip(enums, chosen, strict=True):
            literal = value.replace("{", "{{").replace("}", "}}")
            for written in (f"{{{name}:{'|'.join(enums[name])}}}", f"{{{name}}}"):
                text = text.replace(written, literal)
        try:
            out.append(parse(text, others))
        except PatternError:
            return [pattern]
    return out


def _twice(reads: Sequence[_Side], near: _Near) -> Iterator[Diagnostic]:
    """M615: two rules match one key and neither is narrower: a plan over such a key is refused."""
    found = 0
    for one, other in _pairs(reads, near):
        if one.rule is other.rule or not _together(one, other):
            continue
        if one.rule.rule.keep_source or other.rule.rule.keep_source:
            continue
        # among files of one edge nothing decides which is the narrower one
        apart = one.file is not other.file
        if not apart and (
            _narrower(one.pattern, other.pattern) or _narrower(other.pattern, one.pattern)
        ):
            continue
        key = shared_key(one.pattern, other.pattern)
        if key:
            spans = (other.file.span(other.rule, "from"), one.file.span(one.rule, "from"))
            why = "they are in two files of one edge" if apart else "neither is narrower"
            what = (
                f"rules `{one.rule.rule.name}` and `{other.rule.rule.name}` both take "
                f"`{printable(key)}`, and {why}"
            )
            yield Diagnostic(
                "M615", what, spans, (), "narrow one of them by its pattern, `where` or `when`"
            )
            if (found := found + 1) == MOST_FOUND:
                near.stop()


def _pairs(sides: Sequence[_Side], near: _Near) -> Iterator[tuple[_Side, _Side]]:
    """Each two that may have a key in common."""
    return (
        (one, sides[at]) for number, one in enumerate(sides) for at in near.of(one.pattern, number)
    )


def _written_twice(
    writes: Sequence[_Side], reads: Sequence[_Side], near: _Near, *, turned: bool
) -> Iterator[Diagnostic]:
    """M617: two targets that have a key in common. `turned`: files of the reversed edge say what
    happens on the way back.

    One may stand for the other where only one of the sources is ever there, if the rules say so:
    `optional`, and `inverse: skip` for the way back, on which a narrower target decides as well as
    a narrower source does forwards. Of two that are both optional it would decide by how they are
    written: M619.
    """
    one_way: set[int] | None = None
    found = 0
    for one, other in _pairs(writes, near):
        if (
            (one.rule is other.rule and one.role == other.role)
            or not _together(one, other)
            or _rewrites(one)
            or _rewrites(other)
        ):
            continue
        pair = (one, other)
        alternatives = all(side.rule.rule.may_be_idle for side in pair)
        key = _undecided(one, other) or (alternatives and shared_key(one.pattern, other.pattern))
        made_of = [_made_of(side, key, reads) for side in pair if key]
        if not key or None in made_of:
            continue
        skipped = any(side.rule.rule.skipped_back for side in pair)
        if one_way is None:
            files = dict.fromkeys(side.file for side in writes)
            one_way = {
                id(rule)
                for file in files
                for rule, forwards in directed(file)
                if isinstance(invert(forwards), OneWay)
            }
        settled = turned or skipped or any(id(side.rule) in one_way for side in pair)
        if settled and (
            skipped
            or any(side.rule.rule.may_be_idle or side.rule.rule.optional_roles for side in pair)
        ):
            continue
        names = " and ".join(dict.fromkeys(f"`{side.rule.rule.name}`" for side in pair))
        notes = [f"it would be made of {' and of '.join(map(str, dict.fromkeys(made_of)))}"]
        spans = (other.span("to"), one.span("to"))
        if alternatives and one.rule is not other.rule:
            yield Diagnostic(
                "M619",
                f"rules {names} are alternatives for `{printable(key)}`, and nothing says which "
                "of its sources a downgrade makes",
                spans,
                tuple(notes),
                "write `where` with a param in both, such as `where: {$spec: te}`; or, where one "
                "spelling is never written again, `inverse: skip`",
            )
        else:
            who = (
                f"rules {names} both write"
                if one.rule is not other.rule
                else f"two targets of rule {names} are both"
            )
            if not settled:
                notes.append("on a downgrade nothing decides which of them takes it")
            hint = (
                "correct one `to`; rules of which only one finds its keys say `optional: true` "
                "and, all but one, `inverse: skip`"
            )
            what = f"{who} `{printable(key)}`"
            yield Diagnostic("M617", what, spans, tuple(notes), hint)
        if (found := found + 1) == MOST_FOUND:
            near.stop()


def _undecided(one: _Side, other: _Side) -> str | None:
    """A key of both, of which no narrower pattern decides whose it is on the way back; among files
    of one edge none decides.
    """
    if common(one.pattern.parts, other.pattern.parts) is None:
        return None
    for mine, theirs in product(_variants(one.pattern), _variants(other.pattern)):
        if one.file is not other.file or not (_narrower(mine, theirs) or _narrower(theirs, mine)):
            key = shared_key(mine, theirs)
            if key:
                return key
    return None


def _together(one: _Side, other: _Side) -> bool:
    """Whether nothing divides the keys between the rules: no condition, or the same on params."""
    if one.always and other.always:
        return True
    said, else_said = one.rule.rule, other.rule.rule
    if said.when or else_said.when or one.pattern.params or other.pattern.params:
        return False
    return said.where == else_said.where and all(name.startswith("$") for name in said.where)


def _rewrites(side: _Side) -> bool:
    """Whether a `map` rewrites a path on its way to the pattern, which then shows less."""
    return any(side.rule.types[name].kind == "path" for name in side.rule.maps)


def _made_of(side: _Side, key: str, reads: Sequence[_Side]) -> str | None:
    """A key of which the rule would make `key`; None where a narrower rule takes it, or unknown."""
    rule = side.rule
    values: dict[str, Any] = dict(
        zip(side.pattern.captures, side.pattern.match(key) or (), strict=True)
    )
    for name, table in rule.maps.items():
        back = {str(to): was for was, to in table.items()}
        if name in values:
            values[name] = back.get(str(values[name]))
    for read in reads:
        if read.rule is not rule:
            continue
        sample = {
            name: values[name] if name in values else _any(rule.types[name])
            for name in read.pattern.captures
        }
        if None in sample.values() or read.pattern.params:
            return None
        source = read.pattern.expand(sample)
        takers = (
            r
            for r in reads
            if _may_take(r.pattern, source)
            and r.rule is not rule
            and not r.rule.rule.keep_source
            and not r.pattern.params
        )
        if rule.rule.keep_source or all(
            _narrower(read.pattern, r.pattern) for r in takers if takes(r.pattern, source)
        ):
            return f"`{printable(source)}`"
    return None


def _may_take(pattern: Pattern, key: str) -> bool:
    return key.startswith(_end(pattern, 0)) and (
        key.endswith(_end(pattern, -1)[::-1]) or "@" in key
    )


def _any(kind: CaptureType) -> Any:
    """Some value of a capture that the key does not show, because an op joins over it."""
    return {"int": 0, "enum": (*kind.values, "")[0]}.get(kind.kind, "x")


def _unreachable(fileset: FileSet) -> Iterator[Diagnostic]:
    """M616: a rule whose keys no edge into its layout makes or keeps."""
    edges = fileset.edges
    for (lineage, start, goal), files in edges.items():
        before = [
            written
            for (name, source, target), written in edges.items()
            if (name, target) == (lineage, start) and source != goal
        ]
        produced = [p for written in before for file in written for p in _products(file)]
        if not produced or any(p.params or p.has_flat or "@" in p.text for p in produced):
            continue
        near = _Near(produced)
        for file in files:
            for rule in file.rules:
                for role, pattern in rule.sources.items():
                    if (
                        rule.rule.may_be_idle
                        or rule.rule.optional_roles
                        or pattern.has_flat
                        or pattern.params
                        or "@" in pattern.text
                    ):
                        continue
                    if (
                        all(apart(pattern, produced[n]) for n in near.of(pattern))
                        and not near.short
                    ):
                        what = (
                            f"rule `{rule.rule.name}` reads `{pattern}`, which no edge to "
                            f"`{start}` makes or keeps"
                        )
                        span = (
                            file.span(rule, "from")
                            if role is None
                            else file.loaded.span(*rule.path, "from", role)
                        )
                        yield finding(
                            "M616",
                            what,
                            span,
                            "correct the pattern, or say `optional: true` if other checkpoints "
                            f"in `{start}` have it",
                        )
        yield from _not_compared(["M616"] if near.short else [], f"{start} to {goal}", files[0])


def _products(file: CompiledFile) -> Iterator[Pattern]:
    for rule in file.rules:
        yield from rule.targets.values()
        if rule.rule.keep_source:
            yield from rule.sources.values()
    yield from file.keep


def _prefix(file: CompiledFile) -> Iterator[Diagnostic]:
    """M650: some rules of the file find their keys in a nested model and others do not."""
    nested = any(
        isinstance(p.parts[0], PathHead) for rule in file.rules for p in rule.sources.values()
    )
    if not nested:
        return
    for rule in file.rules:
        for pattern in rule.sources.values():
            first = pattern.parts[0]
            if (
                isinstance(first, Literal)
                and first.text.count(".") > 1
                and not any(isinstance(part, PathHead) for part in pattern.parts)
            ):
                what = (
                    f"rule `{rule.rule.name}` finds its keys only at the top level, and "
                    "others of the file at any depth"
                )
                yield finding(
                    "M650",
                    what,
                    file.span(rule, "from"),
                    'begin the pattern with "{p...}." and `to` with "{p}."',
                )
                break


def _counts(file: CompiledFile) -> Iterator[Diagnostic]:
    """M651: the last member of a group may be missing without notice."""
    for rule in file.rules:
        for number, step in enumerate(rule.rule.via):
            capture = (
                (step.args or {}).get("over") if step.op in ("stack", "concat", "same") else None
            )
            kind = rule.types.get(capture) if capture else None
            if kind is not None and kind.kind == "int" and not {"count", "sizes"} & set(step.args):
                yield finding(
                    "M651",
                    f"rule `{rule.rule.name}`: {step.op} over {{{capture}}} takes as many as "
                    "there are, so the last ones may be missing",
                    file.span(rule, "via", number, step.op),
                    "write `count`, with a param that has a `config:` place where the "
                    "configuration says it",
                )
