"""Which rule takes which key. One reading, one rule: the narrower pattern wins, else it is an error
that shows them.

A rule with several roles takes all parts of a group or none. Many number formats call a part
`weight_scale`, so where several rules could take a key the rest of its group decides: a rule whose
`when` refuses another part stands back; then the narrower pattern wins; and where none is narrower,
the rule that finds all of its parts. Only keys that several rules could take are looked at so.

Keys are grouped into templates first, so a pattern is matched once per architecture and not once
per key; inside that, only rules whose rarest literal segment is in the template are tried.

Keys that stand in several files are written `key@0`, `key@1`. All keys of a template have the same
rank, so a rule that does not speak of ranks is matched against the template without it and carries
the rank along as one more value (RANK).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

from ..core.errors import Report, listed, option, printable, together
from ..core.keys import Pattern, TwoReadings, narrower, nearest, parse
from ..core.spec import ALIASES, Spec
from ..core.templates import (
    PER_KEY,
    Ranked,
    Template,
    bind,
    group,
    matching,
    names_rank,
    rank_of,
    ranked,
    seen_by,
    with_rank_0,
)
from ..core.types import records
from ..rules.compiled import DirectedRule, Side
from ..rules.conditions import allows
from .request import OPTIMIZER_PARAM, STALE_OPTIMIZER

# value of a capture that the item's role does not have
ABSENT = None
# name of the value that a rule without `@` carries along; no capture can have it
RANK = "@"


class MatchedKey(NamedTuple):
    """One key taken by a rule in a role; `values` are aligned with the rule's `names`."""

    key: str
    role: str | None
    values: tuple[Any, ...]


@dataclass(slots=True)
class Reader:
    """A rule while it is matched: its capture names in one order, and what it has taken so far."""

    rule: DirectedRule
    names: tuple[str, ...]
    # the places in `values` of what several roles have in common, which is what binds a group
    shared: list[int]
    taken: list[MatchedKey] = field(default_factory=list)
    # keys under the rule's patterns whose tensors it does not take: by `when` or by its ops
    refused: list[MatchedKey] = field(default_factory=list)
    # keys under the rule's patterns that a narrower rule takes
    yielded: list[MatchedKey] = field(default_factory=list)
    # some of its keys are another rule's as much as its own
    contested: bool = False

    def key_of(self, side: Side, values: tuple[Any, ...], key: str) -> str:
        """The name of the part in another role of the group that `key` is in, the pattern if the
        values do not tell it.
        """
        known = dict(zip(self.names, values, strict=True))
        try:
            rank = rank_of(key) if RANK in known else None
            return side.pattern.expand(known) + ("" if rank is None else f"@{rank}")
        except (KeyError, ValueError, TypeError):
            return side.pattern.text


@dataclass(slots=True)
class Matching:
    """Which rule takes which keys."""

    readers: list[Reader]
    # keys that no rule took, in order
    rest: list[str]
    # keys that a `keep_source` rule reads
    read: set[str]
    # keys that a rule may take, and that it cannot read one way
    unread: list[str]
    # ties of inverted rules whose `when` can still decide them; all of them took the keys
    undecided: Report


class _Entry(NamedTuple):
    number: int
    reader: Reader
    side: Side
    # the rule does not speak of ranks: it is matched without them and carries them along
    carries: bool
    order: tuple[int, ...] | None
    check: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None
    when: Callable[[Spec], bool] | None


_Rows = list["tuple[Any, ...] | None"]
_Hit = tuple[_Entry, _Rows]
Excluded = frozenset[tuple[int, str]]


class _Groups:
    """What a rule with several roles finds of each of its groups, whichever rule takes them."""

    def __init__(self, reader: Reader, found: Sequence[tuple[Template, Sequence[_Hit]]]) -> None:
        shared = reader.shared
        # the values that all roles have in common; of most rules these are all
        self._group: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
        if len(shared) < len(reader.names):
            self._group = lambda row: tuple([row[at] for at in shared])
        self._wanted = [
            side
            for side in reader.rule.reads
            if side.role not in reader.rule.optional_roles and not side.pattern.has_flat
        ]
        # role -> its groups
        self._there: dict[str | None, set[tuple[Any, ...]]] = {}
        for _, hits in found:
            for entry, rows in hits:
                if entry.reader is reader:
                    known = self._there.setdefault(entry.side.role, set())
                    known.update(self._of(row for row in rows if row is not None))
        refused = reader.refused
        groups = self._of(one.values for one in refused)
        self._refused = dict(zip(groups, (one.key for one in refused), strict=True))

    def _of(self, rows: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
        return rows if self._group is None else map(self._group, rows)

    def refused(self, row: tuple[Any, ...]) -> str | None:
        """A key of the group that the rule refuses by `when`."""
        return self._refused.get(row if self._group is None else self._group(row))

    def missing(self, row: tuple[Any, ...]) -> list[Side]:
        """The roles that the rule asks for and that it does not find in the group."""
        group = row if self._group is None else self._group(row)
        return [side for side in self._wanted if group not in self._there.get(side.role, ())]


def match(
    rules: Sequence[DirectedRule],
    specs: Mapping[str, Spec],
    report: Report,
    excluded: Excluded = frozenset(),
    templates: Sequence[Ranked] | None = None,
) -> Matching:
    """Assigns every key to at most one rule; keys under none are `rest`. Ambiguities are reported.

    `excluded`: (id of a rule, key) that are no match although the patterns say so. `templates` are
    those of the keys, where they are known.
    """
    templates = ranked(specs) if templates is None else templates
    carries = any(rank for _, (_, rank) in templates)
    matcher = _Matcher(rules, carries, excluded, report)
    matcher.assign(templates, specs)
    if any(side.pattern.has_flat for rule in rules for side in rule.reads):
        matcher.expand_flat(specs)
    return Matching(matcher.readers, matcher.rest, matcher.read, matcher.unread, matcher.undecided)


class _Matcher:
    """The rules of one edge, indexed by the literal segments their keys must contain."""

    def __init__(
        self, rules: Sequence[DirectedRule], carries: bool, excluded: Excluded, report: Report
    ) -> None:
        self.readers = [_reader(rule, carries) for rule in rules]
        self.rest: list[str] = []
        self.read: set[str] = set()
        self.unread: list[str] = []
        self._excluded = excluded
        self._report = report
        self._found: list[tuple[Template, list[_Hit]]] = []
        self._groups: dict[int, _Groups] = {}
        self.undecided = Report()
        counts: Counter[str] = Counter()
        for reader in self.readers:
            for side in reader.rule.reads:
                counts.update(side.pattern.anchors)
        self._by_anchor: dict[str, list[_Entry]] = {}
        self._anywhere: list[_Entry] = []
        number = 0
        for reader in self.readers:
            for side in reader.rule.reads:
                if side.pattern.has_flat:
                    continue
                number += 1
                entry = _entry(number, reader, side, carries)
                anchors = sorted(side.pattern.anchors, key=lambda a: (counts[a], a))
                (self._by_anchor.setdefault(anchors[0], []) if anchors else self._anywhere).append(
                    entry
                )

    def assign(self, templates: Sequence[Ranked], specs: Mapping[str, Spec]) -> None:
        """Gives the keys of the templates to their rules, or to `rest`."""
        for template, (base, rank) in templates:
            hits: list[_Hit] = []
            for entry in self._candidates(template, base):
                try:
                    rows = _rows(entry, template, base, rank)
                except TwoReadings as error:
                    self._report_two_readings(entry, error)
                    self.unread += template.keys
                    continue
                if rows is None:
                    continue
                if entry.when or self._excluded:
                    rows = self._tested(entry, rows, template, specs)
                hits.append((entry, rows))
            self._found.append((template, hits))
        for template, hits in self._found:
            readers: dict[int, list[_Hit]] = {}
            takers = []
            for hit in hits:
                if _only_reads(hit[0].reader.rule):
                    readers.setdefault(id(hit[0].reader), []).append(hit)
                else:
                    takers.append(hit)
            for own in readers.values():
                self.read.update(self._take(template, own))
            taken = self._take(template, takers)
            self.rest += (
                [key for key in template.keys if key not in taken] if taken else template.keys
            )

    def _tested(
        self, entry: _Entry, rows: _Rows, template: Template, specs: Mapping[str, Spec]
    ) -> _Rows:
        me, test, excluded, refused = (
            id(entry.reader.rule),
            entry.when,
            self._excluded,
            entry.reader.refused,
        )
        out: _Rows = []
        for key, row in zip(template.keys, rows, strict=True):
            if row is not None and (
                (me, key) in excluded or (test is not None and not test(specs[key]))
            ):
                refused.append(MatchedKey(key, entry.side.role, row))
                row = None
            out.append(row)
        return out

    def _take(self, template: Template, hits: list[_Hit]) -> set[str]:
        """Gives each key to the narrowest hit; returns the keys that are taken, ties included."""
        if len(hits) > 1:
            return self._contest(template, hits)
        taken: list[MatchedKey] = []
        for entry, rows in hits:
            role = entry.side.role
            taken = records(MatchedKey, template.keys, repeat(role), rows)
            if None in rows:
                taken = [t for t in taken if t.values is not None]
            entry.reader.taken += taken
        return set(template.keys) if len(taken) == len(template.keys) else {t.key for t in taken}

    def _candidates(self, template: Template, base: Template) -> list[_Entry]:
        """The entries whose rarest segment stands in the template, with its rank or without, in the
        order of the rules.
        """
        found = list(self._anywhere)
        for segment in {*base.text.split("."), *template.text.split(".")}:
            found += self._by_anchor.get(segment, ())
        return sorted(found, key=itemgetter(0))

    def _contest(self, template: Template, hits: list[_Hit]) -> set[str]:
        winners: dict[tuple[int, ...], int | None] = {}
        tied: set[tuple[int, ...]] = set()
        spoken_for: set[str] = set()
        several = [len(entry.reader.rule.reads) > 1 for entry, _ in hits]
        for position, key in enumerate(template.keys):
            present = tuple([n for n, (_, rows) in enumerate(hits) if rows[position] is not None])
            if not present:
                continue
            spoken_for.add(key)
            left = present
            if len(present) > 1 and any(several[n] for n in present):
                left = self._by_groups(hits, present, position, winners)
            if left not in winners:
                winners[left] = _narrowest([hits[n][0] for n in left], left)
            winner = winners[left]
            if winner is None and left not in tied:
                tied.add(left)
                self._tie(key, [hits[n] for n in left], position, len(template.keys))
            decidable = [
                hits[n]
                for n in left
                if hits[n][0].reader.rule.backwards and hits[n][0].reader.rule.when
            ]
            for entry, rows in [hits[winner]] if winner is not None else decidable:
                row = rows[position]
                if row is not None:
                    entry.reader.taken.append(MatchedKey(key, entry.side.role, row))
            for n in present if winner is not None else ():
                if n != winner and (row := hits[n][1][position]) is not None:
                    hits[n][0].reader.yielded.append(MatchedKey(key, hits[n][0].side.role, row))
        return spoken_for

    def _by_groups(
        self,
        hits: list[_Hit],
        present: tuple[int, ...],
        position: int,
        winners: dict[tuple[int, ...], int | None],
    ) -> tuple[int, ...]:
        """Those of the hits that remain when the rest of the key's group is looked at: whose rule
        refuses no other part; and where none of these is narrower, whose rule finds all parts. All
        of them, if none would remain.
        """
        left = present
        if any(hits[n][0].reader.refused for n in present):
            left = (
                tuple([n for n in present if self._refuses(hits[n], position) is None]) or present
            )
        if left not in winners:
            winners[left] = _narrowest([hits[n][0] for n in left], left)
        if winners[left] is None:
            left = tuple([n for n in left if not self._lacks(hits[n], position)]) or left
        return left

    def _refuses(self, hit: _Hit, position: int) -> str | None:
        """A key of the group that the rule's `when` refuses."""
        entry, row = hit[0], hit[1][position]
        if row is None or len(entry.reader.rule.reads) < 2:
            return None
        return self._groups_of(entry.reader).refused(row)

    def _lacks(self, hit: _Hit, position: int) -> list[Side]:
        """The roles of the rule that the group lacks."""
        entry, row = hit[0], hit[1][position]
        if row is None or len(entry.reader.rule.reads) < 2:
            return []
        return self._groups_of(entry.reader).missing(row)

    def _groups_of(self, reader: Reader) -> _Groups:
        if id(reader) not in self._groups:
            self._groups[id(reader)] = _Groups(reader, self._found)
        return self._groups[id(reader)]

    def _tie(self, key: str, hits: list[_Hit], position: int, count: int) -> None:
        entries = [entry for entry, _ in hits]
        for entry in entries:
            entry.reader.contested = True
        if (
            len({id(entry.reader) for entry in entries}) > 1
            and not any(entry.reader.rule.backwards for entry in entries)
            and (why := self._why_alone(key, hits, position))
        ):
            self._report.add(
                "M207",
                f"{printable(key)} stands alone: no rule finds all parts of its group",
                spans=tuple(entry.reader.rule.span for entry in entries),
                notes=(*why, *((f"{count} keys of this form",) if count > 1 else ())),
                help="fetch the tensors that are missing, or narrow the rules by their patterns "
                "or `when`",
            )
            return
        decidable = any(e.reader.rule.backwards and e.reader.rule.when for e in entries)
        _report_contest(key, entries, count, self.undecided if decidable else self._report)

    def _why_alone(self, key: str, hits: list[_Hit], position: int) -> list[str]:
        """What keeps each of the rules from the group; empty where one could take it."""
        why = []
        for entry, rows in hits:
            name, hit = f"rule {entry.reader.rule.name!r}", (entry, rows)
            if (refused := self._refuses(hit, position)) is not None:
                why.append(f"{name}: its `when` refuses {printable(refused)}")
            elif lacking := self._lacks(hit, position):
                keys = [entry.reader.key_of(s, rows[position] or (), key) for s in lacking]
                why.append(f"{name}: missing {listed(keys)}")
            else:
                return []
        return why

    def _report_two_readings(self, entry: _Entry, error: TwoReadings) -> None:
        self._report.add(
            "M202",
            f"{printable(error.key)} has two readings under {entry.side.pattern.text!r} of rule "
            f"{entry.reader.rule.name!r}",
            spans=(entry.reader.rule.span,),
            notes=(f"one: {_reading(error.first)}", f"other: {_reading(error.second)}"),
            help="name a literal segment between the captures",
        )

    def expand_flat(self, specs: Mapping[str, Spec]) -> None:
        """Keys of `{k:flat}` roles, made from values that other roles found, never parsed."""
        waiting: set[str] | None = None
        for reader in self.readers:
            for side in reader.rule.reads:
                if side.pattern.has_flat:
                    waiting = set(self.rest) if waiting is None else waiting
                    made = self._expand_side(reader, side, specs, waiting)
                    reader.taken += made
                    keys = {t.key for t in made}
                    if _only_reads(reader.rule):
                        self.read |= keys
                    elif keys:
                        waiting -= keys
                        self.rest = [key for key in self.rest if key not in keys]

    def _expand_side(
        self, reader: Reader, side: Side, specs: Mapping[str, Spec], waiting: set[str]
    ) -> list[MatchedKey]:
        rule = reader.rule
        captures = {*side.pattern.captures, RANK}
        test = None if rule.backwards else when_test(rule.when.get(side.role))
        made: dict[str, MatchedKey] = {}
        origin: dict[str, str] = {}
        for taken in reader.taken:
            row = tuple(
                [
                    v if n in captures else ABSENT
                    for n, v in zip(reader.names, taken.values, strict=True)
                ]
            )
            values = {n: v for n, v in zip(reader.names, row, strict=True) if v is not ABSENT}
            rank = values.pop(RANK, None)
            if len(values) < len(side.pattern.captures):
                continue
            if rule.backwards:
                values.update({n: f(values[n]) for n, f in side.do.items() if n in values})
            plain = side.pattern.expand(values)
            key = (
                plain
                if rank is None or (rank == 0 and f"{plain}@0" not in specs)
                else f"{plain}@{rank}"
            )
            if (
                key not in specs
                or (id(rule), key) in self._excluded
                or (test is not None and not test(specs[key]))
            ):
                continue
            if key in made:
                if made[key].values != row:
                    message = (
                        f"{printable(key)} stands for two keys, {printable(origin[key])} "
                        f"and {printable(taken.key)}"
                    )
                    self._report.add("M202", message, spans=(rule.span,))
            elif key not in waiting and not _only_reads(rule):
                self._report.add(
                    "M208",
                    f"{printable(key)} belongs to rule {rule.name!r} by {side.pattern.text!r} and "
                    "to another rule",
                    spans=(rule.span,),
                )
            else:
                made[key] = MatchedKey(key, side.role, row)
                origin[key] = taken.key
        return list(made.values())


def _reading(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{{{name}}} = {printable(str(value)) or repr('')}" for name, value in values.items()
    )


def _only_reads(rule: DirectedRule) -> bool:
    return rule.keep_source and not rule.backwards


def _speaks_of_ranks(rule: DirectedRule) -> bool:
    return any(names_rank(side.pattern) for side in (*rule.reads, *rule.writes))


def _reader(rule: DirectedRule, carries: bool) -> Reader:
    names: list[str] = []
    for side in rule.reads:
        names += [n for n in side.pattern.captures if n not in names]
    if carries and not _speaks_of_ranks(rule):
        names.append(RANK)
    of_each = [set(side.pattern.captures) for side in rule.reads if not side.pattern.has_flat]
    common = set(names).intersection(*of_each) | {RANK}
    shared = [at for at, name in enumerate(names) if name in common]
    return Reader(rule, tuple(names), shared)


def _entry(number: int, reader: Reader, side: Side, carries: bool) -> _Entry:
    rule, captures = reader.rule, side.pattern.captures
    carries = carries and not _speaks_of_ranks(rule)
    found = (*captures, RANK) if carries else captures
    order = (
        None
        if found == reader.names
        else tuple(found.index(n) if n in found else -1 for n in reader.names)
    )
    tests = []
    for condition, wanted in rule.where.items():
        name = condition.partition("\0")[0]
        if name in captures and wanted is not None:
            tests.append(_test(reader.names.index(name), wanted))
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

    when = None if rule.backwards else when_test(rule.when.get(side.role))
    return _Entry(number, reader, side, carries, order, check, when)


def _test(at: int, wanted: Any) -> Callable[[tuple[Any, ...]], bool]:
    allowed = allows(wanted)
    return lambda row: allowed(row[at])


def _rows(entry: _Entry, template: Template, base: Template, rank: int | None) -> _Rows | None:
    """The values of each key of the template, None where it does not match; None if none can."""
    pattern = entry.side.pattern
    if entry.carries:
        template = base
    elif pattern.ranked:
        template = with_rank_0(pattern, template, rank)
    binding = bind(pattern, template)
    if binding is None:
        return None
    rows: _Rows = (
        [pattern.match(key) for key in template.keys]
        if binding is PER_KEY
        else list(binding.rows())
    )
    if entry.carries:
        # a plain key of a checkpoint of ranks is of rank 0, beside the `@0` of others
        rows = [None if row is None else (*row, rank or 0) for row in rows]
    if entry.order is not None:
        order = entry.order
        rows = [
            None if row is None else tuple([row[i] if i >= 0 else ABSENT for i in order])
            for row in rows
        ]
    if entry.check is not None:
        check = entry.check
        rows = [None if row is None else check(row) for row in rows]
    return rows


def when_test(when: Mapping[str, Any] | None) -> Callable[[Spec], bool] | None:
    """The test that `when` (or its part for one role) makes of a tensor: dtype and ndim among the
    named, axes of these lengths; None without any.
    """
    if not when:
        return None
    if (axes := when.get("shape")) is not None:
        rest = when_test({name: w for name, w in when.items() if name != "shape"})
        return lambda spec: _has_shape(spec, axes) and (rest is None or rest(spec))
    dtypes, ndims = (
        {*(w if isinstance(w, (list, tuple)) else [w])} if (w := when.get(n)) is not None else None
        for n in ("dtype", "ndim")
    )
    names = None if dtypes is None else {ALIASES.get(d, d) for d in dtypes}
    return lambda spec: (
        (names is None or spec.dtype in names) and (ndims is None or len(spec.shape) in ndims)
    )


def _has_shape(spec: Spec, axes: Sequence[Any]) -> bool:
    return len(spec.shape) == len(axes) and all(
        axis is None or (length >= axis["min"] if isinstance(axis, Mapping) else length == axis)
        for axis, length in zip(axes, spec.shape, strict=True)
    )


def _narrowest(entries: list[_Entry], positions: tuple[int, ...]) -> int | None:
    """The position of the one entry whose pattern is narrower than those of all others, or None."""
    for entry, position in zip(entries, positions, strict=True):
        if all(other is entry or _is_narrower(entry, other) for other in entries):
            return position
    return None


def _is_narrower(a: _Entry, b: _Entry) -> bool:
    # files of one edge may not read the same keys, however narrow one of them is
    if a.reader.rule.file != b.reader.rule.file:
        return False
    return _narrower(*alike_ranked(a.side.pattern, b.side.pattern))


def alike_ranked(one: Pattern, other: Pattern) -> tuple[Pattern, Pattern]:
    """Both with a rank, or both without: a pattern without one takes a key on each rank."""
    if names_rank(one) == names_rank(other):
        return one, other
    return _with_rank(one), _with_rank(other)


def _with_rank(pattern: Pattern) -> Pattern:
    if names_rank(pattern):
        return pattern
    return parse(pattern.text + "@{rank__:int}", pattern.types)


@lru_cache(maxsize=4096)
def _narrower(a: Pattern, b: Pattern) -> bool:
    return narrower(a, b)


def _report_contest(key: str, entries: list[_Entry], count: int, report: Report) -> None:
    rules = {e.reader.rule.name for e in entries}
    what = (
        f"rules {', '.join(repr(r) for r in sorted(rules))}"
        if len(rules) > 1
        else f"two roles of rule {entries[0].reader.rule.name!r}"
    )
    files = {e.reader.rule.file for e in entries}
    mend = (
        "files of one edge must not read the same keys"
        if len(files) > 1
        else "the rules are alternatives: let a param under `where` say which one applies"
        if all(e.reader.rule.backwards and e.reader.rule.optional for e in entries)
        else "make one pattern a special case of the other, or exclude keys with `where`"
    )
    report.add(
        "M208",
        f"{printable(key)} is taken by {what} and neither pattern is narrower",
        spans=tuple(e.reader.rule.span for e in entries),
        notes=tuple(e.side.pattern.text for e in entries)
        + ((f"{count} keys of this form",) if count > 1 else ()),
        help=mend,
    )


def chosen_alternatives(readers: Sequence[Reader]) -> list[str]:
    """Which of two optional rules makes its sources again of what either may have made: the one
    whose target is narrower, which no key of the checkpoint asks for.
    """
    contested = [
        reader
        for reader in readers
        if reader.yielded and reader.rule.backwards and reader.rule.optional
    ]
    if not contested:
        return []
    takers = {
        taken.key: reader.rule
        for reader in readers
        if reader.rule.backwards and reader.rule.optional
        for taken in reader.taken
    }
    notes = []
    for reader in contested:
        lost: dict[str, list[str]] = {}
        for one in reader.yielded:
            if one.key in takers:
                lost.setdefault(takers[one.key].name, []).append(one.key)
        notes += [
            f"rule {name!r} takes {listed(keys, 4)}, which rule {reader.rule.name!r} could take as "
            "well: its pattern is narrower; nothing says which of them made these keys"
            for name, keys in lost.items()
        ]
    return notes


def keep_rest(
    keep: Sequence[Pattern],
    rest: Sequence[str],
    read: set[str],
    report: Report,
    patterns: Sequence[Pattern],
    states: Callable[[], AbstractSet[str]],
    carry: bool,
) -> list[Template]:
    """The keys of `rest` that a `keep` pattern or a `keep_source` rule lets stay; the others are
    unaccounted for, an error.

    `states()` are the keys of optimizer state, which stay as well if that is allowed: `carry`.
    """
    kept: list[Template] = []
    own: AbstractSet[str] = frozenset()
    asked = False
    for template in group(rest):
        missing = {key for key in template.keys if key not in read}
        for pattern in keep:
            if not missing:
                break
            missing -= {
                key
                for key, stay in zip(
                    template.keys, matching(pattern, seen_by(pattern, template)), strict=True
                )
                if stay
            }
        if missing and not asked:
            own, asked = states(), True
        if carry:
            missing -= own
        if missing:
            keys = [k for k in template.keys if k in missing]
            _report_unhandled(keys, patterns, report, own >= missing)
        else:
            kept.append(template)
    return kept


def _report_unhandled(
    keys: list[str], patterns: Sequence[Pattern], report: Report, state: bool
) -> None:
    near = nearest(patterns, keys[0])
    notes = []
    if near is not None:
        pattern, failure = near
        notes.append(
            f"nearest pattern: {pattern.text!r}; it fails at {printable(failure.actual)!r}, where "
            f"it takes {failure.expected}"
        )
    if len(keys) > 1:
        notes.append(f"of the same form: {listed(keys[1:], 5)}")
    count = f" (and {len(keys) - 1} more of its form)" if len(keys) > 1 else ""
    report.add(
        "M211",
        f"{printable(keys[0])}{count} is handled by no rule and kept by no pattern",
        notes=tuple(notes),
        help="it is optimizer state: leave it out with "
        f"{together(option('params', f'{OPTIMIZER_PARAM}=drop'), option('allow', 'drop'))}, carry "
        f"it as it is with {option('allow', STALE_OPTIMIZER)}, or add a rule for it or name it "
        "under `keep`"
        if state
        else "add a rule for it, name it under `keep`, or drop it with a rule that says why",
        permit=STALE_OPTIMIZER if state else "",
    )
