"""One edge over one virtual index: rules take keys, ops make tensors, and every key on both sides
is accounted for.

Binding never sees a file. It maps key -> Tensor to key -> Tensor, so the next edge of a path binds
to what this one made. Conditions on values that decide which keys come out are asked through
`same_bytes`; the others become checks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from ..core.errors import Report, fail, listed, option, printable
from ..core.keys import NegativeIndex, Pattern
from ..core.templates import Template, rank_of, split_rank
from ..core.types import records
from ..ops.base import Decided, ValueOp
from ..rules.compiled import ROLE, CompiledCall, DirectedRule
from .graph import Item, Program, Tensor, ValueCheck
from .match import RANK, MatchedKey, Matching, Reader, keep_rest, match, when_test
from .parts import Keeper, PartFacts, bytes_of_part
from .pipeline import MOST_TENSORS, SUFFIX, RefusedGroup, Views, run_ops
from .request import STALE_OPTIMIZER
from .tensor_params import Asked
from .unmatched import idle_alternatives, require_keys, unmatched_values

# what the header of a safetensors file may have
MOST_TEXT = 100_000_000


class Provenance(NamedTuple):
    """Who made an output key, of which keys."""

    rule: DirectedRule
    keys: tuple[str, ...]


class Followed(NamedTuple):
    """A tensor of state that follows: the rule of its parameter, the keys before, the tensor, and
    the key that the parameter has now.
    """

    rule: DirectedRule
    keys: tuple[str, ...]
    tensor: Tensor
    parameter: str


@dataclass(slots=True)
class StepResult:
    """What an edge makes: tensors, who made each (absent: unchanged), what went, and notes."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)
    dropped: dict[str, DirectedRule] = field(default_factory=dict)
    # keys that went because an equal target stood there, by the rule that would have made it
    redundant: dict[str, DirectedRule] = field(default_factory=dict)
    # and the targets for whose sake they went
    settled: set[str] = field(default_factory=set)
    # the keys that `keep` lets stay, by form; the caller takes them away again
    kept: list[Template] = field(default_factory=list)
    # values that are no tensors and that rules made, by name
    named: set[str] = field(default_factory=set)
    checks: list[ValueCheck] = field(default_factory=list)
    # what of it needs permission, by the rule that it goes through
    lost: dict[str, DirectedRule] = field(default_factory=dict)
    # (key, whether it went) of the targets of keep_source rules met backwards, and of tensors whose
    # bytes decide what becomes of them; they decide keys and enter the digest
    decided: dict[str, bool] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # (capture, values that `where` lists) -> those that no key has; mostly a misspelt module
    unmatched: dict[tuple[str, tuple[str, ...]], list[str]] = field(default_factory=dict)
    # (name of a rule, capture) -> alternatives that no key has; mostly misspelt
    idle: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    # characters of the names that rules made
    text: int = 0
    # the names of values that are None, for a stamp
    nothing: list[str] = field(default_factory=list)
    # names of optional parts that tensors lacked, for a stamp; None: no rule has such parts
    absent: list[str] | None = None
    # key -> hash of the bytes of small parts that say what no header does; they enter the digest
    values: dict[str, str] = field(default_factory=dict)
    # key -> why numbers have no use for a part that goes where the others are decoded
    unused: dict[str, str] = field(default_factory=dict)
    # what is odd about a state that goes on, and the keys of such states
    odd: dict[str, list[str]] = field(default_factory=dict)
    # state of optimizers that went with its parameters, by its new keys; keys of what was dropped
    followed: dict[str, Followed] = field(default_factory=dict)
    left_behind: dict[str, DirectedRule] = field(default_factory=dict)
    # where settings of such parameters go that are values: (name without the setting's, rank)
    settings: dict[tuple[str, int], list[tuple[str, int]]] = field(default_factory=dict)


class BindContext(NamedTuple):
    """What binding asks of its caller. `same_bytes(key, present, made)`: does the present tensor
    hold what the rule would make. `allow` is what the request permits. `payload(tensor)` are the
    bytes of a small tensor that decide what becomes of it; None: they cannot be read, and it stays
    as it is. What ops cut goes to what is `kept`; None: it is lost.
    """

    same_bytes: Callable[[str, Tensor, Tensor], bool]
    allow: frozenset[str] = frozenset()
    payload: Callable[[Tensor], bytes] | None = None
    # the bytes of a small part of a tensor that say what no header does; None: they are not known
    part: Callable[[Tensor], bytes] | None = None
    # rules that take values which are no tensors, and so may match no key, by identity
    elsewhere: frozenset[int] = frozenset()
    # the optional parts that a stamp says were not there; None: no stamp says anything
    absent: AbstractSet[str] | None = None
    # which of these tensors are state of an optimizer; None: nothing is
    states: Callable[[Mapping[str, Any]], AbstractSet[str]] | None = None
    # what the way back does not bring back will be kept
    undo: bool = False
    kept: Keeper | None = None
    # what params asked of a step's tensors, with the forms of their keys
    asked: Asked | None = None
    # one part of what was cut is here, and what some rules take is in the others
    partial: bool = False


DROP = frozenset(("drop",))


def bind(
    rules: Sequence[DirectedRule],
    keep: Sequence[Pattern],
    tensors: Mapping[str, Tensor],
    views: Views,
    context: BindContext,
    report: Report,
    programs: Mapping[str, Program] | None = None,
    stay: AbstractSet[str] = frozenset(),
) -> StepResult:
    """Applies the rules of one edge to all keys. Problems go into the report, all of them; then the
    result means nothing.

    `stay`: keys that no rule takes, whatever the patterns say.
    """
    matching, finished, out = _run_all(rules, tensors, views, context, report, programs, stay)
    for reader, names, items in finished:
        _write(reader, names, items, out, report)
    derived = [r for r in matching.readers if r.rule.forward]
    read = matching.read
    if derived:
        read = read | _read_forwards(derived, matching.rest, tensors)
    # a target of a keep_source rule is accounted for here alone
    known = {t.key: None for r in derived for t in r.taken}
    patterns = [*(s.pattern for r in rules for s in r.reads if not s.pattern.has_flat), *keep]
    out.kept = keep_rest(
        keep,
        [k for k in matching.rest if k not in known],
        read,
        report,
        patterns,
        partial(context.states, tensors) if context.states is not None else frozenset,
        STALE_OPTIMIZER in context.allow,
    )
    kept = [*(key for template in out.kept for key in template.keys), *known]
    settles = any(rule.if_exists == "keep" for rule in rules)
    _merge(kept, tensors, out, context, report, settles)
    if programs is not None:
        for key in kept:
            if key in out.tensors and key not in out.provenance:
                out.programs[key] = programs[key]
    if derived:
        _remove_derived(derived, tensors, out, views, context)
    if any("@" in key for key in out.tensors):
        _settle_ranks(out, tensors, report)
    if any(r.rule.where for r in matching.readers):
        out.unmatched = unmatched_values(matching.readers)
    out.idle = idle_alternatives(matching.readers, context.elsewhere)
    for reader in matching.readers:
        if reader.yielded and reader.rule.backwards:
            from .match import chosen_alternatives

            out.notes += chosen_alternatives(matching.readers)
            break
    out.notes += [
        f"{what}, and stays as it is: {listed(keys, 4)}" for what, keys in out.odd.items()
    ]
    if not all(reader.taken for reader in matching.readers):
        out.notes += require_keys(
            matching.readers, tensors, report, stay, context.elsewhere, partial=context.partial
        )
    return out


def _read_forwards(
    derived: Sequence[Reader], rest: Sequence[str], tensors: Mapping[str, Tensor]
) -> set[str]:
    """The keys that `keep_source` rules read forwards: kept then, so there on the way back."""
    forward = [r.rule.forward for r in derived if r.rule.forward is not None]
    return (
        match(forward, {key: tensors[key].spec for key in rest}, Report()).read
        if forward
        else set()
    )


def find_taken_keys(
    rules: Sequence[DirectedRule], tensors: Mapping[str, Tensor], views: Views
) -> list[str]:
    """The keys that the rules would take if alone, or refuse because they have two readings."""
    matching, _, _ = _run_all(rules, tensors, views, BindContext(lambda *_: False), Report())
    rest = set(matching.rest).difference(matching.unread)
    return [key for key in tensors if key not in rest]


_Finished = tuple[Reader, tuple[str, ...], list[Item]]


def _run_all(
    rules: Sequence[DirectedRule],
    tensors: Mapping[str, Tensor],
    views: Views,
    context: BindContext,
    report: Report,
    programs: Mapping[str, Program] | None = None,
    stay: AbstractSet[str] = frozenset(),
) -> tuple[Matching, list[_Finished], StepResult]:
    """All rules matched and run.

    A key that the ops of an inverted rule cannot take, or whose result fails `when`, is none of its
    matches; then all is matched again without it, because the key may complete another group.
    """
    specs = {key: t.spec for key, t in tensors.items() if key not in stay}
    asked = context.asked
    same = asked is not None and asked.tensors is tensors and not stay
    # none where no param asked for them
    templates = vars(asked).get("templates") if same else None
    excluded: set[tuple[int, str]] = set()
    while True:
        attempt, out, before = Report(), StepResult(), len(excluded)
        matching = match(rules, specs, attempt, frozenset(excluded), templates)
        finished, made = [], 0
        for reader in matching.readers:
            if not reader.rule.forward:
                finished.append(
                    _run_rule(reader, tensors, programs, views, context, out, excluded, attempt)
                )
                made += max(0, len(finished[-1][2]) - len(reader.taken))
                if made > MOST_TENSORS:
                    _refuse_many(made, reader.rule)
        if len(excluded) == before:
            report.diagnostics += matching.undecided.diagnostics + attempt.diagnostics
            matching.rest += [key for key in tensors if key in stay] if stay else ()
            return matching, finished, out


def _refuse_many(made: int, rule: DirectedRule) -> NoReturn:
    fail(
        "M313",
        f"the rules of the edge up to {rule.name!r} make {made:,} tensors more than they take, at "
        f"most {MOST_TENSORS:,} are allowed",
        spans=(rule.span,),
        help="correct `count`, `sizes` or the patterns: a number this large is a mistake",
    )


def _run_rule(
    reader: Reader,
    tensors: Mapping[str, Tensor],
    programs: Mapping[str, Program] | None,
    views: Views,
    context: BindContext,
    out: StepResult,
    excluded: set[tuple[int, str]],
    report: Report,
) -> _Finished:
    rule = reader.rule
    roles = rule.reads[0].role is not None
    names = (*reader.names, ROLE) if roles else reader.names
    lone = _check_roles(reader, report) if roles else set[str]()
    keys = [t.key for t in reader.taken]
    items = records(
        Item,
        [(*t.values, t.role) if roles else t.values for t in reader.taken],
        map(tensors.__getitem__, keys),
        zip(keys),
        repeat(None) if programs is None else map(programs.get, keys),
    )
    if reader.refused:
        _check_refused(reader, report)
    tests_result = rule.backwards and bool(rule.when)

    def refuse(refused: RefusedGroup) -> None:
        if tests_result and refused.diagnostic.code != "M207":
            excluded.update((id(rule), key) for key in refused.keys)
        elif refused.diagnostic.code != "M207" or not lone.issuperset(refused.keys):
            report.diagnostics.append(refused.diagnostic)

    last: tuple[Any, ...] = (None,)  # thousands of modules have one state, often none
    met: list[tuple[Decided, tuple[str, ...]]] = []

    def decide(step: CompiledCall, item: Item) -> Decided | None:
        nonlocal last
        if context.payload is None:
            return None
        spec, data = item.tensor.spec, context.payload(item.tensor)
        if step is not last[0] or data != last[2] or spec != last[1]:
            said = step.op.decide(step.args, spec, data, printable(item.keys[0]), context.allow)
            last = (step, spec, data, said)
        decided: Decided = last[3]
        met.append((decided, item.keys))
        return decided

    def read(role: str, item: Item, most: int) -> bytes:
        found = bytes_of_part(role, item, most, context.part)
        seen = hashlib.sha256(found).hexdigest()
        out.values.update(dict.fromkeys(item.keys, seen))
        return found

    def absent(found: Iterable[str]) -> None:
        out.absent = [*(out.absent or ()), *found]

    def unused(keys: tuple[str, ...], why: str) -> None:
        out.dropped.update(dict.fromkeys(keys, rule))
        out.unused.update(dict.fromkeys(keys, why))

    facts = PartFacts(read, absent, context.absent, unused)
    checks: list[ValueCheck] = []
    bound, made = run_ops(rule, names, items, views, refuse, checks, decide, facts, context.kept)
    for decided, alike in groupby(met, itemgetter(0)):
        _enter_decided(decided, rule, [keys for _, keys in alike], out)
    if tests_result:
        role_at = bound.index(ROLE) if ROLE in bound else None
        tests = {role: when_test(when) for role, when in rule.when.items()}
        for item in made:
            test = tests.get(item.values[role_at] if role_at is not None else None)
            if test is not None and not test(item.tensor.spec):
                excluded.update((id(rule), key) for key in item.keys)
    out.checks += checks
    if any(step.op.kind == "end" for step in rule.steps):
        out.dropped.update((t.key, rule) for t in reader.taken)
    return reader, bound, made


def _enter_decided(
    decided: Decided, rule: DirectedRule, groups: Sequence[tuple[str, ...]], out: StepResult
) -> None:
    """Enters what became of the tensors with these keys, of which one was decided as the other."""
    keys = [key for group in groups for key in group]
    gone = not decided.outputs
    out.decided.update(dict.fromkeys(keys, gone))
    by_rule = dict.fromkeys(keys, rule)
    if gone:
        out.dropped.update(by_rule)
    if decided.loses:
        out.lost.update(by_rule)
    for what in decided.notes:
        out.odd.setdefault(what, []).extend([group[0] for group in groups])


def _check_refused(reader: Reader, report: Report) -> None:
    """M207 where a rule takes some members of a group and others are refused, so would lack."""
    rule = reader.rule
    joined = {step.capture or ROLE for step in rule.steps if step.op.kind in ("join", "exchange")}
    if not joined:
        return
    at = [i for i, name in enumerate(reader.names) if name not in joined]

    def group_of(taken: MatchedKey) -> tuple[Any, ...]:
        return (*[taken.values[i] for i in at], None if ROLE in joined else taken.role)

    groups: dict[tuple[Any, ...], str] = {}
    for taken in reader.taken:
        groups.setdefault(group_of(taken), taken.key)
    lacking: dict[tuple[Any, ...], list[str]] = {}
    for refused in reader.refused:
        group = group_of(refused)
        if group in groups:
            lacking.setdefault(group, []).append(refused.key)
    for group, keys in lacking.items():
        report.add(
            "M207",
            f"rule {rule.name!r} takes {printable(groups[group])} and, by `when`, not "
            f"{listed(keys, 5)} of the same group",
            spans=(rule.span,),
            help="all members of a group must pass `when`, or none",
        )


def _check_roles(reader: Reader, report: Report) -> set[str]:
    """Every group of the captures that all roles share has all roles that are not optional; the
    keys of those that have not.
    """
    rule = reader.rule
    sides = rule.reads
    at = reader.shared
    groups: dict[tuple[Any, ...], dict[Any, MatchedKey]] = {}
    for taken in reader.taken:
        groups.setdefault(tuple(taken.values[i] for i in at), {}).setdefault(taken.role, taken)
    wanted = [s.role for s in sides if s.role not in rule.optional_roles]
    lone: set[str] = set()
    for found in groups.values():
        missing = [s for s in sides if s.role in wanted and s.role not in found]
        if not missing:
            continue
        lone.update(taken.key for taken in found.values())
        example = next(iter(found.values()))
        expected = [reader.key_of(side, example.values, example.key) for side in missing]
        # numbers are computed of all parts or not at all, so `optional` would be another error
        decoded = any(
            isinstance(step.op, ValueOp)
            and step.op.kind in ("join", "exchange")
            and step.capture in (None, ROLE)
            for step in rule.steps
        )
        hint = "fetch the tensors that are missing, or narrow the rule by its pattern or `when`"
        report.add(
            "M207",
            f"rule {rule.name!r}: {printable(example.key)} stands alone, missing: "
            f"{listed(expected)}",
            spans=(rule.span,),
            help=hint
            if decoded
            else "roles that may be missing are listed as `optional: "
            f"[{', '.join(str(s.role) for s in missing)}]`",
        )
    return lone


def _write(
    reader: Reader, names: tuple[str, ...], items: list[Item], out: StepResult, report: Report
) -> None:
    rule = reader.rule
    if not items or not rule.writes:
        return
    role_at = names.index(ROLE) if ROLE in names and rule.writes[0].role is not None else None
    writers: dict[
        Any, tuple[Callable[[tuple[Any, ...]], str], list[tuple[int, Callable[[Any], Any]]]]
    ] = {}
    for side in rule.writes:
        do = [(names.index(n), f) for n, f in side.do.items() if n in names]
        writers[side.role] = (side.pattern.expander(names), do)
    single = writers.get(None)
    rank_at = names.index(RANK) if RANK in names else None
    suffix_at = names.index(SUFFIX) if SUFFIX in names else None
    # the outputs of one group stand together and share what they were made of
    made = Provenance(rule, ())
    for item in items:
        expand, do = single if single is not None else writers[item.values[role_at or 0]]
        values = item.values
        if do:
            changed = list(values)
            for at, f in do:
                changed[at] = f(changed[at])
            values = tuple(changed)
        try:
            key = expand(values)
        except (NegativeIndex, KeyError, TypeError, ValueError) as error:
            report.add(
                "M209",
                f"rule {rule.name!r} cannot name the output of {printable(item.keys[0])}: {error}",
                spans=(rule.span,),
            )
            continue
        if suffix_at is not None:
            key += item.values[suffix_at]
        if rank_at is not None:
            key = f"{key}@{item.values[rank_at]}"
        out.text += len(key)
        if out.text > MOST_TEXT:
            fail(
                "M314",
                f"the names of what the rules make, up to rule {rule.name!r}, have more than "
                f"{MOST_TEXT:,} characters together",
                spans=(rule.span,),
                notes=(f"one of them has {len(key):,}: {printable(key)}",),
                help="no format holds such names; correct `to`",
            )
        if (
            key.count("@") > 1
            and rank_of(key) is not None
            and rank_of(key.rpartition("@")[0]) is not None
        ):
            report.add(
                "M209",
                f"rule {rule.name!r} carries the rank of {printable(item.keys[0])} along, and "
                "`to` gives the result another",
                spans=(rule.span,),
                help="name the rank in `from` too, as `@{name:int}`, and join over it, or leave "
                "the rank out of `to`",
            )
            continue
        if key in out.tensors:
            _report_two_writers(key, out.provenance.get(key), rule, item, report)
            continue
        out.tensors[key] = item.tensor
        if made.keys is not item.keys:
            made = Provenance(rule, item.keys)
        out.provenance[key] = made
        if item.program is not None:
            out.programs[key] = item.program


def _report_two_writers(
    key: str, first: Provenance | None, rule: DirectedRule, item: Item, report: Report
) -> None:
    notes = [f"{rule.name!r} makes it of {listed(list(item.keys), 3)}"]
    spans = [rule.span]
    if first is not None:
        notes.insert(0, f"{first.rule.name!r} makes it of {listed(list(first.keys), 3)}")
        spans.insert(0, first.rule.span)
    else:
        notes.insert(0, "it is also kept as it is")
    report.add(
        "M212",
        f"{printable(key)} would be written twice",
        spans=tuple(dict.fromkeys(spans)),
        notes=tuple(notes),
        help="drop one of the sources, or write `if_exists: keep` where an existing target may "
        "stay",
    )


def _merge(
    kept: Sequence[str],
    tensors: Mapping[str, Tensor],
    out: StepResult,
    context: BindContext,
    report: Report,
    settles: bool,
) -> None:
    """Puts kept keys beside the made ones; settles `if_exists: keep` group by group where asked."""
    clashes: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for key in kept:
        made = out.provenance.get(key) or (_made_as_rank_0(key, out) if settles else None)
        if made is None:
            out.tensors[key] = tensors[key]
        elif made.rule.if_exists == "keep":
            clashes.setdefault((id(made.rule), made.keys), []).append(key)
        else:
            _report_two_writers(key, None, made.rule, Item((), out.tensors[key], made.keys), report)
    if not clashes:
        return
    groups: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for key, made in out.provenance.items():
        where = (id(made.rule), made.keys)
        if where in clashes:
            groups.setdefault(where, []).append(key)
    for where, existing in clashes.items():
        rule = out.provenance[existing[0]].rule
        absent = [k for k in groups[where] if k not in set(existing)]
        if absent:
            report.add(
                "M210",
                f"rule {rule.name!r}: {listed(existing, 5)} exist and {listed(absent, 5)} do not",
                spans=(rule.span,),
                notes=(f"all are made of {listed(list(where[1]), 3)}",),
                help="a group of targets must exist whole or not at all; remove the partial one",
            )
            continue
        for key in existing:
            made_tensor = out.tensors[key]
            if not rule.keep_source:
                if made_tensor.spec != tensors[key].spec and "drop" not in context.allow:
                    report.add(
                        "M402",
                        f"{printable(key)} exists as {tensors[key].spec} and rule {rule.name!r} "
                        f"would make {made_tensor.spec}",
                        spans=(rule.span,),
                        notes=(f"made of {listed(list(where[1]), 3)}",),
                        help=f"{option('allow', 'drop')} keeps what exists and drops its sources",
                        permit="drop",
                    )
                elif "drop" not in context.allow:
                    message = (
                        f"{printable(key)} exists and differs from what rule {rule.name!r} "
                        f"makes of {listed(list(where[1]), 3)}"
                    )
                    both = (tensors[key], made_tensor)
                    out.checks.append(
                        ValueCheck("equal", both, None, "M404", message, rule.label, (key,))
                    )
                out.redundant.update((source, rule) for source in where[1])
                out.settled.add(key)
            out.tensors[key] = tensors[key]
            del out.provenance[key]
            out.programs.pop(key, None)


def _made_as_rank_0(key: str, out: StepResult) -> Provenance | None:
    """What an `if_exists: keep` rule made for this key, if it spells it with `@0` and the
    checkpoint without, or the other way round.
    """
    other = key.removesuffix("@0") if key.endswith("@0") else f"{key}@0"
    made = out.provenance.get(other)
    if made is None or made.rule.if_exists != "keep":
        return None
    out.provenance[key] = out.provenance.pop(other)
    out.tensors[key] = out.tensors.pop(other)
    if other in out.programs:
        out.programs[key] = out.programs.pop(other)
    return made


def _remove_derived(
    derived: Sequence[Reader],
    tensors: Mapping[str, Tensor],
    out: StepResult,
    views: Views,
    context: BindContext,
) -> None:
    """Backwards of `keep_source`: a target goes if it holds what the rule makes of the restored
    keys, else it stays and is named.
    """
    targets = {t.key for r in derived for t in r.taken}
    # what the rules read is the checkpoint without any of their targets, in whatever order
    restored = {key: t for key, t in out.tensors.items() if key not in targets} if targets else {}
    for reader in derived:
        rule = reader.rule.forward
        if rule is None or not reader.taken:
            continue
        own = Report()
        _, finished, would = _run_all([rule], restored, views, context, own)
        for found, names, items in finished:
            _write(found, names, items, would, own)
        for taken in reader.taken:
            present, made = tensors[taken.key], would.tensors.get(taken.key)
            gone = (
                made is not None
                and made.spec == present.spec
                and context.same_bytes(taken.key, present, made)
            )
            out.decided[taken.key] = gone
            if gone:
                out.tensors.pop(taken.key, None)
                out.programs.pop(taken.key, None)
                out.dropped[taken.key] = rule
            else:
                out.notes.append(
                    f"{printable(taken.key)} stays: it is not what rule {rule.name!r} would make"
                )


def _settle_ranks(out: StepResult, tensors: Mapping[str, Tensor], report: Report) -> None:
    """Keys as an index of the written files would name them: `key@r` where several files have the
    key, else plain.

    Where nothing of a name was made and nothing of it went, it is left as it is: an `@0` may be
    part of a name.
    """
    ranks: dict[str, list[int]] = {}
    for key in out.tensors:
        if "@" in key and (found := split_rank(key)) is not None:
            ranks.setdefault(found[0], []).append(found[1])
    names: dict[str, str] = {}
    several: set[str] | None = None
    for base, numbers in ranks.items():
        if numbers != [0] and base not in out.tensors:
            continue
        first = f"{base}@0"
        made = next(
            (
                out.provenance[key]
                for key in (base, first, *(f"{base}@{r}" for r in numbers))
                if key in out.provenance
            ),
            None,
        )
        if base not in out.tensors:
            if numbers == [0] and made is None and several is None:
                several = {key.rpartition("@")[0] for key in tensors if rank_of(key)}
            if numbers == [0] and (made is not None or base in (several or ())):
                names[first] = base
        elif made is not None and 0 not in numbers:
            names[base] = first
        elif made is not None:
            _report_two_writers(
                base,
                out.provenance.get(first),
                made.rule,
                Item((), out.tensors[base], made.keys),
                report,
            )
    if names:
        out.tensors = {names.get(key, key): tensor for key, tensor in out.tensors.items()}
        out.provenance = {names.get(key, key): made for key, made in out.provenance.items()}
        out.programs = {names.get(key, key): program for key, program in out.programs.items()}


__all__ = ["BindContext", "Provenance", "StepResult", "bind", "find_taken_keys"]
