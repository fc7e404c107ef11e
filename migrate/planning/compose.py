"""A path of edges composed into one graph: each leg binds to the virtual index that the leg before
it produced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.diagnostics import Diagnostic, Report, listed, plural, printable
from ..core.errors import MigrateError
from ..core.keys import Pattern, parse
from ..core.ranks import fitting, without_rank
from ..core.spec import Spec
from ..core.spelling import option
from ..core.templates import Template, group
from ..core.view import View
from ..ops.base import Loss, OneWay, ValueOp
from ..rules.compiled import CompiledRule, DirectedRule, direct, is_active
from ..rules.files import LoadedFile
from ..source.blobs import Stored
from ..source.jsontext import collector_paused
from . import stranded
from .bind import Bound, Questions, bind, taken
from .graph import Expr, Graph, Read, Tensor, calls
from .invert import invert
from .kept import fold, unfold
from .pipeline import Views
from .values import Values, carry, fitted, named

if TYPE_CHECKING:
    from .walk import Walk


@dataclass(frozen=True, eq=False, slots=True)
class Leg:
    """One edge walked in one direction: its compiled rules with the params of their files, and what
    it keeps.

    `files` are its rule files. `memory` is what a stamp holds of it: the params that it once had,
    and, where it undoes what the stamp says was done, how side files were and which keys stayed as
    they were (`kept`; None: no stamp says so).
    """

    lineage: str
    start: str
    goal: str
    backwards: bool
    rules: tuple[tuple[CompiledRule, Mapping[str, Any]], ...]
    keep: tuple[Pattern, ...]
    files: tuple[LoadedFile, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    def reads(self) -> list[Pattern]:
        """The patterns of the keys that its rules take, in the direction in which it is walked;
        without those that params decide.
        """
        rules = [
            rule for rule, _ in self.rules if not (self.backwards and rule.rule.inverse == "skip")
        ]
        patterns = (
            pattern
            for rule in rules
            for pattern in (rule.targets if self.backwards else rule.sources).values()
        )
        return [pattern for pattern in patterns if not (pattern.params or pattern.has_flat)]


class LossOf(NamedTuple):
    """What a rule loses: kind "lossy" or "drop", how many keys it touches, and the author's
    reason.
    """

    rule: DirectedRule
    kind: str
    keys: tuple[str, ...]
    why: str


@dataclass(slots=True)
class Composition:
    """The whole path over one checkpoint: the graph, what each leg did, what it loses, and whether
    it can be undone.
    """

    graph: Graph
    legs: list[tuple[Leg, Bound]]
    losses: list[LossOf]
    programs: dict[str, Expr] = field(default_factory=dict)
    # what values that are no tensors are called, None where nobody asked
    values: Values | None = None
    # and what they were called
    held: AbstractSet[str] = frozenset()
    # of each leg the keys that stayed as they were and that its way back would take; a stamp
    # remembers them, and they stay
    kept: list[list[str]] = field(default_factory=list)
    # why a downgrade with the stamp would not bring the source back; empty when it is exact
    inexact: list[str] = field(default_factory=list)


# what every key fits, or every key of several names
_ANYTHING = (parse("{k...}"), parse("{p...}.{k}"))
SameBytes = Callable[[str, Tensor, Tensor], bool]
Payload = Callable[[Tensor], bytes]


def initial(tensors: Mapping[str, Stored], views: Views) -> dict[str, Tensor]:
    """The stored tensors as the graph sees them."""
    out = {}
    whole: dict[int, View] = {}
    for key, stored in tensors.items():
        spec = stored.spec
        view = whole.get(id(spec)) if stored.strides is None else None
        if view is None:
            view = views.stored(spec.shape, stored.strides)
            if stored.strides is None:
                whole[id(spec)] = view
        out[key] = Tensor(spec, view, (key,))
    return out


def compose(
    tensors: Mapping[str, Stored],
    legs: Sequence[Leg],
    allow: frozenset[str],
    same_bytes: SameBytes,
    report: Report,
    *,
    programs: bool = False,
    prove: bool = True,
    walk: Walk | None = None,
    payload: Payload | None = None,
    values: Values | None = None,
) -> Composition:
    """Binds all legs, one after the other. Problems of a leg go into the report and end the walk:
    the next has nothing to bind to.

    `walk` settles the params of each leg when it is reached; without it they are those that the
    legs come with. `payload` gives the bytes of a small tensor that decide what becomes of it;
    without it such tensors stay as they are.
    """
    # binding makes hundreds of thousands of objects and no cycles
    with collector_paused():
        return _compose(
            tensors,
            legs,
            Questions(same_bytes, "drop" in allow, payload, allow),
            report,
            programs,
            prove,
            walk,
            values,
        )


def _compose(
    tensors: Mapping[str, Stored],
    legs: Sequence[Leg],
    ask: Questions,
    report: Report,
    programs: bool,
    prove: bool,
    walk: Walk | None,
    values: Values | None,
) -> Composition:
    views = Views()
    current = initial(tensors, views)
    expressions: dict[str, Expr] | None = {key: Read(key) for key in tensors} if programs else None
    before: Mapping[str, str] = values.names if values is not None else {}
    done: list[tuple[Leg, Bound]] = []
    losses: list[LossOf] = []
    kept: list[list[str]] = []
    graph = Graph()
    for unsettled in legs:
        leg = walk.enter(unsettled, current) if walk is not None else unsettled
        rules = directed(leg, report)
        if report.has_errors():
            break
        if values is not None:
            ask = ask._replace(elsewhere=frozenset(map(id, named(rules, values.names))))
        stay = unfold(
            leg.memory.get("kept") or (),
            len(current) + (0 if values is None else len(values.names)),
        )
        bound = bind(rules, leg.keep, current, views, ask, report, expressions, stay)
        if values is not None and not report.has_errors():
            values = carry(rules, bound, values, report, stay)
        if report.has_errors():
            if walk is not None:
                walk.explain(report)
            break
        bound.notes += [
            f"no key has {{{name}}} = {listed(missing)}, which `where` names"
            for (name, _), missing in bound.unmatched.items()
            if missing
        ]
        bound.notes += [
            f"rule {rule!r}: no key has {{{name}}} = {listed(missing)}, which its pattern lists"
            for (rule, name), missing in bound.idle.items()
        ]
        bound.notes += _about_kept(leg, rules, bound, stay, () if values is None else values.names)
        if prove:
            kept.append(_kept(leg, bound, () if values is None else values.names, views))
        bound.kept = []
        if walk is not None:
            walk.leave(leg, bound, report)
            walk.remembered[-1].update({"kept": fold(kept[-1])} if prove and kept[-1] else {})
        losses += _losses(rules, bound)
        graph.checks += bound.checks
        done.append((leg, bound))
        current = bound.tensors
        expressions = bound.programs if programs else None
    _refuse_losses(
        losses, ask.allow, report, before.keys() | (values.known if values is not None else ())
    )
    graph.outputs = dict(current)
    if not report.has_errors():
        stranded.check(tensors, graph.outputs, [bound for _, bound in done], report)
    composition = Composition(graph, done, losses, expressions or {}, values, before.keys(), kept)
    if prove and not report.has_errors():
        composition.inexact = prove_downgrade(
            {k: t.spec for k, t in tensors.items()}, composition, ask.same_bytes
        )
        composition.inexact += walk.inexact if walk is not None else []
    return composition


def directed(leg: Leg, report: Report) -> list[DirectedRule]:
    """The leg's rules in its direction; rules that `where` on params switches off are left out,
    one-way rules are refused.
    """
    rules = []
    for compiled, params in leg.rules:
        if not is_active(compiled, params) or (leg.backwards and compiled.rule.inverse == "skip"):
            continue
        rule = direct(compiled, params, report)
        if rule is None:
            continue
        if not leg.backwards:
            rules.append(rule)
            continue
        back = invert(rule)
        if isinstance(back, OneWay):
            report.add(
                "M405",
                f"rule {rule.name!r} has no exact inverse: {back.because}",
                spans=(rule.span,),
                help=back.help
                or "`inverse: skip` leaves a rule out on a downgrade, if its tensors are computed "
                "again anyway",
            )
        else:
            rules.append(back)
    return rules


def _losses(rules: Sequence[DirectedRule], bound: Bound) -> list[LossOf]:
    keys_of: dict[int, list[str]] = {}
    for key, made in bound.made.items():
        keys_of.setdefault(id(made.rule), []).append(key)
    for key, rule in bound.dropped.items():
        keys_of.setdefault(id(rule), []).append(key)
    found = []
    for rule in rules:
        keys = keys_of.get(id(rule))
        if not keys:
            continue
        if Loss.DESTRUCTIVE in {step.op.loss(step.args) for step in rule.steps}:
            found.append(LossOf(rule, "drop", tuple(keys), rule.why))
        lost = [key for key in keys if bound.lost.get(key) is rule] if bound.lost else []
        if lost:
            found.append(LossOf(rule, "drop", tuple(lost), "state of delayed scaling"))
        changed = (
            [key for key in keys if key in bound.made and _changed_by(rule, bound.tensors[key])]
            if _computes(rule)
            else []
        )
        if changed:
            found.append(LossOf(rule, "lossy", tuple(changed), rule.why))
    return found


def _computes(rule: DirectedRule) -> bool:
    return any(isinstance(step.op, ValueOp) for step in rule.steps)


def _changed_by(rule: DirectedRule, tensor: Tensor) -> bool:
    return any(call.lossy and call.rule == rule.label for call in calls([tensor]))


def _refuse_losses(
    losses: Sequence[LossOf], allow: frozenset[str], report: Report, values: AbstractSet[str]
) -> None:
    for loss in losses:
        if loss.kind in allow:
            continue
        code, what = ("M402", "drops") if loss.kind == "drop" else ("M401", "changes values of")
        noun = (
            "tensor"
            if values.isdisjoint(loss.keys)
            else "value"
            if values >= set(loss.keys)
            else "key"
        )
        report.add(
            code,
            f"rule {loss.rule.name!r} {what} {plural(len(loss.keys), noun)}"
            + (f": {printable(loss.why)}" if loss.why else ""),
            spans=(loss.rule.span,),
            notes=(listed(list(loss.keys), 8),),
            help=f"if that is wanted: {option('allow', loss.kind)}",
            permit=loss.kind,
        )


def _about_kept(
    leg: Leg,
    rules: Sequence[DirectedRule],
    bound: Bound,
    stay: AbstractSet[str],
    values: Collection[str],
) -> list[str]:
    """What there is to say about keys that were no rule's on the way there, or may not have
    been.
    """
    if gone := sorted(key for key in stay if key not in bound.tensors and key not in values):
        return [f"the stamp says that {listed(gone, 4)} stay as they are, and they are not there"]
    if not leg.backwards or leg.memory.get("kept") is not None:
        return []
    # a `keep` for whatever else there is says nothing of these keys
    patterns = [pattern for pattern in leg.keep if not any(map(pattern.includes, _ANYTHING))]
    taken_by: dict[int, dict[str, None]] = {}
    for made in bound.made.values() if patterns else ():
        taken_by.setdefault(id(made.rule), {}).update(dict.fromkeys(made.keys))
    notes = []
    for rule in rules:
        alike = [key for t in group(taken_by.get(id(rule), ())) for key in _fitted(patterns, t)]
        if alike:
            what = (
                f"rule {rule.name!r} takes {listed(alike, 4)}, which `keep` may have left as "
                "they were on the way there"
            )
            notes.append(f"{what}: no stamp says so")
    return notes


def _fitted(patterns: Sequence[Pattern], template: Template) -> list[str]:
    fits = [fitting(pattern, template) for pattern in patterns]
    return [key for key, *found in zip(template.keys, *fits, strict=True) if any(found)]


def _segments(template: Template) -> set[str]:
    return {*without_rank(template)[0].text.split(".")} - {""}


def _kept(leg: Leg, bound: Bound, values: Iterable[str], views: Views) -> list[str]:
    """The keys that stayed as they were on the leg, and that its way back would take: what a stamp
    has to remember of them.
    """
    report = Report()
    rules = directed(replace(leg, backwards=not leg.backwards), report)
    if report.has_errors():
        return []
    patterns = [side.pattern for rule in rules for side in rule.reads]
    plain = [pattern for pattern in patterns if not pattern.has_flat]
    by_anchor: dict[str, list[Pattern]] = {}
    for pattern in plain:
        by_anchor.setdefault(min(pattern.anchors, default=""), []).append(pattern)
    found = [
        t
        for t in bound.kept
        if any(any(fitting(p, t)) for s in ("", *_segments(t)) for p in by_anchor.get(s, ()))
    ]
    # what a flat pattern takes follows from the keys of others
    if found and len(plain) < len(patterns):
        found = bound.kept
    keys = [
        key
        for t in found
        for key in t.keys
        if key in bound.tensors and key not in bound.made and key not in bound.settled
    ]
    try:
        keys = taken(rules, {key: bound.tensors[key] for key in keys}, views) if keys else []
    except MigrateError:
        # the proof of the downgrade says so
        keys = []
    return keys + [name for name in fitted(rules, values) if name not in bound.named]


def prove_downgrade(
    source: Mapping[str, Spec], composition: Composition, same_bytes: SameBytes
) -> list[str]:
    """Binds the way back to what is planned; what does not return as it was, by rule and key.
    Empty: the downgrade is exact.

    `same_bytes` is asked only of targets of `keep_source` rules that were there before: on the way
    back they go if they are what the rule would have made, and would not return.
    """
    views = Views()
    current: Mapping[str, Tensor] = composition.graph.outputs
    reasons: list[str] = []
    last = Bound()
    there = values = composition.values
    if values is not None:
        final = values
        there = Values(
            {name: name for name in final.names},
            final.ranks,
            lambda name: final.spelled(final.names[name]),
        )
    for number, (leg, bound) in reversed(list(enumerate(composition.legs))):
        stay = frozenset(composition.kept[number] if composition.kept else ())
        back = Leg(leg.lineage, leg.goal, leg.start, not leg.backwards, leg.rules, leg.keep)
        report = Report()
        rules = directed(back, report)
        if report.has_errors():
            return reasons + [_reason(d) for d in report.diagnostics]
        made = bound.made
        elsewhere = (
            frozenset(map(id, named(rules, there.names))) if there is not None else frozenset()
        )

        def equal(key: str, present: Tensor, again: Tensor, made: Mapping[str, Any] = made) -> bool:
            return key in made or same_bytes(key, present, again)

        try:
            bound_back = bind(
                rules,
                leg.keep,
                current,
                views,
                Questions(equal, True, elsewhere=elsewhere),
                report,
                stay=stay,
            )
        except MigrateError as error:
            return reasons + [_reason(d) for d in error.diagnostics]
        if there is not None and not report.has_errors():
            there = carry(rules, bound_back, there, report, stay)
        if report.has_errors():
            return reasons + [_reason(d) for d in report.diagnostics if d.severity == "error"]
        current, last = bound_back.tensors, bound_back
    changed = dict.fromkeys(call.rule for call in calls(current.values()) if call.lossy)
    reasons += [f"rule {label}: values do not return exactly" for label in changed]
    if values is not None and there is not None:
        returned = {values.names[was]: name for name, was in there.names.items()}
        if gone := sorted(name for name in composition.held if returned.get(name) != name):
            reasons.append(f"values not restored: {listed(gone, 4)}")
    return reasons + _differences(source, current, composition, last)


def _reason(diagnostic: Diagnostic) -> str:
    place = f" ({diagnostic.spans[0]})" if diagnostic.spans else ""
    return diagnostic.message + place


def _differences(
    source: Mapping[str, Spec], back: Mapping[str, Tensor], composition: Composition, last: Bound
) -> list[str]:
    """`last`: the last step of the way back."""
    extra = [key for key in back if key not in source]
    # equal specs are mostly one object
    wrong = [
        k
        for k, spec in source.items()
        if (there := back.get(k)) is None or (there.spec is not spec and there.spec != spec)
    ]
    if not (extra or wrong):
        return []
    owners = {key: made.rule for made in last.made.values() for key in made.keys} | last.dropped
    # who took a key of the source says more than who takes its name on the way back
    for _, bound in reversed(composition.legs):
        owners.update(
            {key: made.rule for made in bound.made.values() for key in made.keys}
            | bound.dropped
            | bound.redundant
        )
    lost: dict[str, list[str]] = {}
    for key in wrong:
        who = f"rule {owners[key].label}" if key in owners else "no rule"
        what = f"{source[key]} returns as {back[key].spec}" if key in back else "not restored"
        lost.setdefault(f"{who}: {what}", []).append(key)
    for key in extra:
        who = f"rule {last.made[key].rule.label}" if key in last.made else "no rule"
        lost.setdefault(f"{who}: returns and was not there", []).append(key)
    return [f"{what}: {listed(keys, 4)}" for what, keys in lost.items()]
