"""Which rule takes which key. One reading, one rule: the narrower pattern wins, else it is an error that shows them.

Keys are grouped into templates first, so a pattern is matched once per architecture and not once per key; inside that,
only rules whose rarest literal segment stands in the template are tried at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.diagnostics import Report, listed, printable
from ..core.keys import Pattern, TwoReadings, narrower_any, nearest
from ..core.spec import ALIASES, Spec
from ..core.templates import PER_KEY, Template, bind, group
from ..rules.compiled import DirectedRule, Side

# value of a capture that the item's role does not have
ABSENT = None


class Taken(NamedTuple):
    """One key taken by a rule in a role; `values` are aligned with the rule's `names`."""

    key: str
    role: str | None
    values: tuple[Any, ...]


@dataclass(slots=True)
class Reader:
    """A rule while it is matched: its capture names in one order, and what it has taken so far."""

    rule: DirectedRule
    names: tuple[str, ...]
    taken: list[Taken] = field(default_factory=list)


@dataclass(slots=True)
class Matching:
    readers: list[Reader]
    # keys that no rule took, in order
    rest: list[str]
    # keys that a `keep_source` rule reads
    read: set[str]


class _Entry(NamedTuple):
    reader: Reader
    side: Side
    order: tuple[int, ...] | None
    check: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None
    when: Mapping[str, Any] | None


def match(rules: Sequence[DirectedRule], specs: Mapping[str, Spec], report: Report) -> Matching:
    """Assigns every key to at most one rule; keys under no rule are `rest`. Ambiguities go into the report."""
    matcher = Matcher(rules)
    templates = group(specs)
    rest: list[str] = []
    read: set[str] = set()
    for template in templates:
        matcher.assign(template, specs, rest, read, frozenset(), report)
    matcher.expand_flat(specs, rest, report)
    return Matching(matcher.readers, rest, read)


class Matcher:
    """The rules of one edge, indexed by the literal segments their keys must contain."""

    def __init__(self, rules: Sequence[DirectedRule]) -> None:
        self.readers = [_reader(rule) for rule in rules]
        self._entries: list[_Entry] = []
        counts: Counter[str] = Counter()
        for reader in self.readers:
            for side in reader.rule.reads:
                counts.update(side.pattern.anchors)
        self._by_anchor: dict[str, list[_Entry]] = {}
        self._anywhere: list[_Entry] = []
        for reader in self.readers:
            for side in reader.rule.reads:
                if side.pattern.has_flat:
                    continue
                entry = _entry(reader, side)
                anchors = sorted(side.pattern.anchors, key=lambda a: (counts[a], a))
                (self._by_anchor.setdefault(anchors[0], []) if anchors else self._anywhere).append(entry)
        self._ambiguous: dict[frozenset[int], list[str]] = {}

    def assign(
        self,
        template: Template,
        specs: Mapping[str, Spec],
        rest: list[str],
        read: set[str],
        excluded: frozenset[tuple[int, str]],
        report: Report,
    ) -> None:
        """Gives the template's keys to their rules, or to `rest`; `excluded` are (id of rule, key) that do not match after all."""
        hits: list[tuple[_Entry, list[tuple[Any, ...] | None]]] = []
        for entry in self._candidates(template):
            try:
                rows = _rows(entry, template)
            except TwoReadings as error:
                report.add(
                    "M202",
                    f"{printable(error.key)} has two readings under {entry.side.pattern.text!r} of rule {entry.reader.rule.name!r}",
                    spans=(entry.reader.rule.span,),
                    notes=(f"one: {error.first}", f"other: {error.second}"),
                    help="name a literal segment between the captures",
                )
                continue
            if rows is None:
                continue
            if entry.when:
                allowed = entry.when
                rows = [
                    row if row is not None and holds(allowed, specs[key]) else None for row, key in zip(rows, template.keys, strict=True)
                ]
            if excluded:
                me = id(entry.reader.rule)
                rows = [None if (me, key) in excluded else row for row, key in zip(rows, template.keys, strict=True)]
            hits.append((entry, rows))
        takers = [hit for hit in hits if not _only_reads(hit[0].reader.rule)]
        for entry, rows in hits:
            if _only_reads(entry.reader.rule):
                taken, role = entry.reader.taken, entry.side.role
                for key, row in zip(template.keys, rows, strict=True):
                    if row is not None:
                        taken.append(Taken(key, role, row))
                        read.add(key)
        if not takers:
            rest.extend(template.keys)
        elif len(takers) == 1:
            entry, rows = takers[0]
            taken, role = entry.reader.taken, entry.side.role
            for key, row in zip(template.keys, rows, strict=True):
                if row is None:
                    rest.append(key)
                else:
                    taken.append(Taken(key, role, row))
        else:
            self._contest(template, takers, rest, report)

    def _candidates(self, template: Template) -> Iterable[_Entry]:
        found = list(self._anywhere)
        for segment in set(template.text.split(".")):
            found += self._by_anchor.get(segment, ())
        return found

    def _contest(
        self, template: Template, takers: list[tuple[_Entry, list[tuple[Any, ...] | None]]], rest: list[str], report: Report
    ) -> None:
        winners: dict[tuple[int, ...], int | None] = {}
        for position, key in enumerate(template.keys):
            present = tuple(n for n, (_, rows) in enumerate(takers) if rows[position] is not None)
            if not present:
                rest.append(key)
                continue
            if present not in winners:
                winners[present] = _narrowest([takers[n][0] for n in present], present)
                if winners[present] is None:
                    _report_contest(key, [takers[n][0] for n in present], len(template.keys), report)
            winner = winners[present]
            if winner is not None:
                entry, rows = takers[winner]
                row = rows[position]
                if row is not None:
                    entry.reader.taken.append(Taken(key, entry.side.role, row))

    def expand_flat(self, specs: Mapping[str, Spec], rest: list[str], report: Report) -> None:
        """Keys of `{k:flat}` roles, made from the values that the other roles found, never parsed."""
        waiting: set[str] | None = None
        for reader in self.readers:
            for side in reader.rule.reads:
                if not side.pattern.has_flat:
                    continue
                waiting = set(rest) if waiting is None else waiting
                made: dict[str, str] = {}
                for taken in list(reader.taken):
                    key = side.pattern.expand(dict(zip(reader.names, taken.values, strict=True)))
                    if key not in specs:
                        continue
                    if key in made:
                        report.add(
                            "M202",
                            f"{printable(key)} stands for two keys, {printable(made[key])} and {printable(taken.key)}",
                            spans=(reader.rule.span,),
                        )
                    elif key not in waiting:
                        report.add(
                            "M208",
                            f"{printable(key)} belongs to rule {reader.rule.name!r} by {side.pattern.text!r} and to another rule",
                            spans=(reader.rule.span,),
                        )
                    else:
                        made[key] = taken.key
                        reader.taken.append(Taken(key, side.role, taken.values))
                if made:
                    waiting -= made.keys()
                    rest[:] = [key for key in rest if key not in made]


def _only_reads(rule: DirectedRule) -> bool:
    return rule.keep_source and not rule.backwards


def _reader(rule: DirectedRule) -> Reader:
    names: list[str] = []
    for side in rule.reads:
        names += [n for n in side.pattern.captures if n not in names]
    return Reader(rule, tuple(names))


def _entry(reader: Reader, side: Side) -> _Entry:
    rule, captures = reader.rule, side.pattern.captures
    order = None if captures == reader.names else tuple(captures.index(n) if n in captures else -1 for n in reader.names)
    tests = [_test(reader.names.index(name.split("\0")[0]), w) for name, w in rule.where.items() if name.split("\0")[0] in captures and w is not None]
    undo = [(reader.names.index(n), f) for n, f in side.undo.items() if n in captures]
    check: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None = None
    if tests or undo:

        def check(row: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if undo:
                values = list(row)
                for at, f in undo:
                    values[at] = f(values[at])
                    if values[at] is None:
                        return None
                row = tuple(values)
            return row if all(test(row) for test in tests) else None

    when = None if rule.backwards else rule.when.get(side.role)
    return _Entry(reader, side, order, check, when)


def _test(at: int, wanted: Any) -> Callable[[tuple[Any, ...]], bool]:
    if isinstance(wanted, Mapping):
        low, high = wanted.get("min"), wanted.get("max")
        multiple, remainder = wanted.get("multiple_of"), wanted.get("remainder") or 0

        def within(row: tuple[Any, ...]) -> bool:
            value = row[at]
            return (low is None or value >= low) and (high is None or value <= high) and (multiple is None or value % multiple == remainder)

        return within
    allowed = {str(v) for v in (wanted if isinstance(wanted, (list, tuple)) else [wanted])}
    return lambda row: str(row[at]) in allowed


def _rows(entry: _Entry, template: Template) -> list[tuple[Any, ...] | None] | None:
    """The values of each of the template's keys (None where one does not match), or None if none can match."""
    binding = bind(entry.side.pattern, template)
    if binding is None:
        return None
    rows: list[tuple[Any, ...] | None]
    if binding is PER_KEY:
        rows = [entry.side.pattern.match(key) for key in template.keys]
    else:
        rows = binding.rows()
    if entry.order is not None:
        order = entry.order
        rows = [None if row is None else tuple(row[i] if i >= 0 else ABSENT for i in order) for row in rows]
    if entry.check is not None:
        check = entry.check
        rows = [None if row is None else check(row) for row in rows]
    return rows


def holds(test: Mapping[str, Any], spec: Spec) -> bool:
    """Whether a tensor passes `when`: dtype among the named, ndim among the named."""
    dtypes = test.get("dtype")
    if dtypes is not None:
        dtypes = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
        if spec.dtype not in {ALIASES.get(d, d) for d in dtypes}:
            return False
    ndims = test.get("ndim")
    if ndims is not None:
        ndims = ndims if isinstance(ndims, (list, tuple)) else [ndims]
        if len(spec.shape) not in {int(n) for n in ndims}:
            return False
    return True


def _narrowest(entries: list[_Entry], positions: tuple[int, ...]) -> int | None:
    """The position of the one entry that is narrower than all others, or None.

    Rules are compared as wholes; the roles of one rule are compared with each other.
    """
    for entry, position in zip(entries, positions, strict=True):
        if all(other is entry or _is_narrower(entry, other) for other in entries):
            return position
    return None


def _is_narrower(a: _Entry, b: _Entry) -> bool:
    if a.reader is b.reader:
        return _narrower((a.side.pattern,), (b.side.pattern,))
    # files of one edge may not read the same keys, however narrow one of them is
    return a.reader.rule.file == b.reader.rule.file and _narrower(
        tuple(s.pattern for s in a.reader.rule.reads if not s.pattern.has_flat),
        tuple(s.pattern for s in b.reader.rule.reads if not s.pattern.has_flat),
    )


@lru_cache(maxsize=4096)
def _narrower(a: tuple[Pattern, ...], b: tuple[Pattern, ...]) -> bool:
    return narrower_any(a, b)


def _report_contest(key: str, entries: list[_Entry], count: int, report: Report) -> None:
    rules = {e.reader.rule.name for e in entries}
    what = f"rules {', '.join(repr(r) for r in sorted(rules))}" if len(rules) > 1 else f"two roles of rule {entries[0].reader.rule.name!r}"
    files = {e.reader.rule.file for e in entries}
    help = (
        "files of one edge must not read the same keys"
        if len(files) > 1
        else "make one pattern a special case of the other, or exclude with `where`"
    )
    report.add(
        "M208",
        f"{printable(key)} is taken by {what} and neither pattern is narrower",
        spans=tuple(e.reader.rule.span for e in entries),
        notes=tuple(e.side.pattern.text for e in entries) + ((f"{count} keys of this form",) if count > 1 else ()),
        help=help,
    )


def keep_rest(
    keep: Sequence[Pattern], rest: Sequence[str], read: set[str], report: Report, patterns: Sequence[Pattern]
) -> list[str]:
    """The keys of `rest` that a `keep` pattern or a `keep_source` rule lets stay; the others are unaccounted for, an error."""
    kept: list[str] = []
    for template in group(rest):
        missing = set(template.keys)
        for pattern in keep:
            binding = bind(pattern, template)
            if binding is None:
                continue
            if binding is PER_KEY:
                missing -= {key for key in missing if _matches(pattern, key)}
            else:
                missing -= {k for k, row in zip(template.keys, binding.rows(), strict=True) if row is not None}
            if not missing:
                break
        missing -= read
        kept += [key for key in template.keys if key not in missing] if missing else template.keys
        if missing:
            _report_unhandled([k for k in template.keys if k in missing], patterns, report)
    return kept


def _matches(pattern: Pattern, key: str) -> bool:
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return True  # kept under either reading


def _report_unhandled(keys: list[str], patterns: Sequence[Pattern], report: Report) -> None:
    near = nearest(patterns, keys[0])
    notes = []
    if near is not None:
        pattern, failure = near
        notes.append(f"nearest pattern: {pattern.text!r}; it fails at {printable(failure.found)!r}, where it takes {failure.expected}")
    if len(keys) > 1:
        notes.append(f"of the same form: {listed(keys[1:], 5)}")
    count = f" (and {len(keys) - 1} more of its form)" if len(keys) > 1 else ""
    report.add(
        "M211",
        f"{printable(keys[0])}{count} is handled by no rule and kept by no pattern",
        notes=tuple(notes),
        help="add a rule for it, name it under `keep`, or drop it with a rule that says why",
    )
