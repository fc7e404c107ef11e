"""A path of edges composed into one graph: each step binds to what the step before it produced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Diagnostic, MigrateError, Report, listed, option, plural, printable
from ..core.keys import Pattern, parse
from ..core.spec import BITS
from ..core.templates import (
    Template,
    group,
    matching,
    rank_of,
    seen_by,
    split_rank,
    without_rank,
)
from ..ops.base import Loss, ValueOp
from ..rules.compiled import DirectedRule, holds
from ..source.blobs import StoredTensor
from ..source.jsontext import collector_paused
from . import pairs
from .bind import DROP, BindContext, StepResult, bind, find_taken_keys
from .following import Following
from .graph import ComputedTensor, Graph, Program, ReadKey, Tensor, computations, stored_keys
from .items import Items, carry_items, fitting_items, rules_of_items
from .pathstate import PathStep, directed, refuse_without_codes
from .pipeline import Views
from .request import DELAYED_SCALING, STALE_OPTIMIZER
from .stored import initial, untouched_key
from .tensor_params import Asked
from .unchanged import fold_keys, unfold_keys

if TYPE_CHECKING:
    from .kept import Kept, KeptPart
    from .pathstate import PathState
    from .state_keys import StateKeys


class LossOf(NamedTuple):
    """What a rule loses: kind "lossy" or "drop", how many keys it touches, the author's reason."""

    rule: DirectedRule
    kind: str
    keys: tuple[str, ...]
    why: str


@dataclass(slots=True)
class Composition:
    """The whole path over one checkpoint: graph, steps, losses, and whether it can be undone."""

    graph: Graph
    steps: list[tuple[PathStep, StepResult]]
    losses: list[LossOf]
    programs: dict[str, Program] = field(default_factory=dict)
    # what values that are no tensors are called, None where there are none
    items: Items | None = None
    # and what they were called
    item_names: AbstractSet[str] = frozenset()
    # of each step the keys that stayed as they were and that its way back would take; a stamp
    # remembers them, and they stay
    kept: list[list[str]] = field(default_factory=list)
    # why a downgrade with the stamp would not bring the source back; empty when it is exact
    inexact: list[str] = field(default_factory=list)
    # what the way back makes, over the tensors of the source; None where it cannot be walked
    back: Mapping[str, Tensor] | None = None
    # whether values that are no tensors stay away
    values_lost: bool = False
    # the optimizers whose state follows, None where there is none
    following: Following | None = None
    # what the proof of the way back is asked with, where it is asked again
    context: BindContext | None = None
    # what is kept beside the tensors in the end, by name; None where no op cuts and puts back, or
    # nothing can be kept
    parts: Mapping[str, KeptPart] | None = None
    # values that are no tensors and are put back, by name, with its rank
    put_back: Mapping[str, Any] = field(default_factory=dict)
    # the tensors of the source that stand for values, and each of these
    lifted: Mapping[str, Any] = field(default_factory=dict)


NOTHING: Mapping[str, StoredTensor] = {}
# no format stores a tensor in more parts
MOST_PARTS = 16
# what every key fits, or every key of several names
_ANYTHING = (parse("{k...}"), parse("{p...}.{k}"))


# binding makes hundreds of thousands of objects and no cycles
@collector_paused()
def compose(
    tensors: Mapping[str, StoredTensor],
    steps: Sequence[PathStep],
    context: BindContext,
    report: Report,
    *,
    programs: bool = False,
    prove: bool = True,
    path_state: PathState | None = None,
    items: Items | None = None,
    follow: Sequence[StateKeys] = (),
    outside: Mapping[str, StoredTensor] | None = None,
    kept_parts: Mapping[str, tuple[str, StoredTensor]] | None = None,
    lifted: Mapping[str, Any] | None = None,
) -> Composition:
    """Binds all steps, one after the other. Problems of a step go into the report and end the walk:
    the next has nothing to bind to.

    `path_state` settles the params of each step when it is reached; without it they are those
    that the steps come with. State of optimizers to `follow` is among `tensors`, or among those
    `outside` of what rules see. `kept_parts` is what was kept of tensors, by name; None: the output
    has no place for such parts, and what is cut is lost. `lifted`: the values that
    some of `tensors` stand for.
    """
    views = Views()
    following = Following.of(follow, {**tensors, **(outside or {})}, views) if follow else None
    current: Mapping[str, Tensor] = initial(tensors, views)
    items = items if items is not None and items.names else None
    expressions: dict[str, Program] | None = (
        {key: ReadKey(key) for key in tensors} if programs else None
    )
    before: Mapping[str, str] = items.names if items is not None else {}
    cut: Kept | None = None
    done: list[tuple[PathStep, StepResult]] = []
    losses: list[LossOf] = []
    kept: list[list[str]] = []
    put_back: Mapping[str, Any] = {}
    graph = Graph()
    for unsettled in steps:
        step = path_state.enter_step(unsettled, current) if path_state is not None else unsettled
        rules = directed(step, report)
        refuse_without_codes(step, rules, report)
        if report.has_errors():
            break
        if items is not None:
            context = context._replace(
                elsewhere=frozenset(map(id, rules_of_items(rules, items.names)))
            )
        keeping = [
            rule
            for rule, params in step.rules
            if rule.rule.inverse == "keep" and holds(rule.rule.where or {}, params)
        ]
        if cut is None and (keeping or any(call.op.keeps for rule in rules for call in rule.steps)):
            from .kept import Kept, stored_parts

            cut = Kept(stored_parts(kept_parts or {}, views), context.payload)
            context = context._replace(kept=cut)
            if following is not None:
                following.kept = cut
        stay: AbstractSet[str] = frozenset()
        if remembered := step.memory.get("kept"):
            stay = unfold_keys(
                remembered, len(current) + (0 if items is None else len(items.names))
            )
        absent = step.memory.get("absent")
        if absent is not None:
            absent = unfold_keys(absent, MOST_PARTS * len(current))
        context = context._replace(absent=absent)
        bound_to = current
        if following is not None:
            bound_to = following.take_out(rules, current, views)
        if path_state is not None:
            # the forms of keys are many, and nothing asks for them later
            context = context._replace(asked=path_state.entered)
            path_state.entered = Asked(current, path_state.sides.partial)
        bound = bind(rules, step.keep, bound_to, views, context, report, expressions, stay)
        context = context._replace(asked=None)
        if following is not None and not report.has_errors():
            following.follow(bound, bound_to, views, report)
        if items is not None and not report.has_errors():
            items = carry_items(rules, bound, items, report, stay)
        if report.has_errors():
            if path_state is not None:
                path_state.explain_problems(report)
            break
        put_back = {}
        if keeping and cut is not None and not report.has_errors():
            if step.backwards:
                names = unfold_keys(step.memory.get("nothing") or (), MOST_PARTS * len(current))
                put_back = cut.put_back(keeping, bound, names)
            else:
                cut.keep_dropped(bound, bound_to, expressions, lifted or {}, kept_parts is not None)
        bound.notes += [
            f"no key has {{{name}}} = {listed(missing)}, which `where` names"
            for (name, _), missing in bound.unmatched.items()
            if missing
        ]
        bound.notes += [
            f"rule {rule!r}: no key has {{{name}}} = {listed(missing)}, which its pattern lists"
            for (rule, name), missing in bound.idle.items()
        ]
        if stay or step.backwards:
            bound.notes += _about_kept(
                step, rules, bound, stay, () if items is None else items.names
            )
        if prove:
            back = replace(step, backwards=not step.backwards, undo=context.undo)
            kept.append(_kept(back, bound, () if items is None else items.names, views))
        bound.kept = []
        if path_state is not None:
            path_state.leave_step(step, bound, report)
            if prove and kept[-1]:
                path_state.remembered[-1]["kept"] = fold_keys(kept[-1])
            if bound.absent is not None:
                path_state.remembered[-1]["absent"] = fold_keys(bound.absent)
            if bound.nothing:
                path_state.remembered[-1]["nothing"] = fold_keys(bound.nothing)
        losses += _losses(rules, bound, cut, kept_parts is not None)
        graph.checks += bound.checks
        done.append((step, bound))
        current = bound.tensors
        expressions = bound.programs if programs else None
    if losses:
        known = before.keys() | (items.known if items is not None else ())
        _refuse_losses(losses, context.allow, report, known)
    graph.outputs = dict(current)
    lifted = lifted or {}
    # a part of a tensor is left behind only where one is stored in a number format; what stands for
    # a value is not
    stored_as = {tensor.spec.dtype for key, tensor in tensors.items() if key not in lifted}
    if not report.has_errors() and any(
        BITS[dtype] <= 8 or dtype in pairs.PACKED_IN for dtype in stored_as
    ):
        pairs.check_pairs(tensors, graph.outputs, [bound for _, bound in done], report)
    composition = Composition(graph, done, losses, expressions or {}, items, before.keys(), kept)
    composition.put_back = put_back
    composition.lifted = lifted
    if cut is not None:
        if kept_parts is not None:
            composition.parts = cut.parts
        for _, last in done[-1:]:
            last.notes += cut.account(kept_parts is not None)
    if following is not None:
        composition.following = following
        if programs:
            parts = following.outside().items()
            composition.programs.update((key, part.program) for key, part in parts)
    if prove and not report.has_errors():
        composition.context = context
        composition.inexact = prove_downgrade(tensors, composition, path_state)
        if cut is not None and cut.rules and kept_parts is None:
            composition.inexact.append("what is cut off is not kept")
        composition.inexact += path_state.inexact if path_state is not None else []
    return composition


def _losses(
    rules: Sequence[DirectedRule], bound: StepResult, cut: Kept | None, kept: bool
) -> list[LossOf]:
    """What is lost by these rules: unless it is `kept`, also what was `cut`, and what those drop
    that keep it.
    """
    short, held = (set(), set()) if cut is None else (cut.rules, cut.kept_keys)
    keys_of: dict[int, list[str]] = {}
    for key, made in bound.provenance.items():
        keys_of.setdefault(id(made.rule), []).append(key)
    for key, rule in (*bound.dropped.items(), *bound.left_behind.items()):
        keys_of.setdefault(id(rule), []).append(key)
    found = []
    for rule in rules:
        keys = keys_of.get(id(rule))
        if not keys:
            continue
        destroys = Loss.DESTRUCTIVE in {s.op.loss(s.args) for s in rule.steps}
        gone = keys if destroys or (not kept and id(rule) in short) else []
        if kept and rule.keeps:
            gone = [key for key in gone if key not in held]
        if gone:
            found.append(LossOf(rule, "drop", tuple(gone), rule.why))
        elif bound.left_behind and (left := [key for key in keys if key in bound.left_behind]):
            found.append(LossOf(rule, "drop", tuple(left), "state of the optimizer"))
        lost = [key for key in keys if key not in held and bound.lost.get(key) is rule]
        if lost:
            found.append(LossOf(rule, "drop", tuple(lost), "state of delayed scaling"))
        if bound.unused:
            found += _unused(rule, keys, bound.unused, bound.dropped)
        changed = (
            [
                key
                for key in keys
                if key in bound.provenance and _changed_by(rule, bound.tensors[key])
            ]
            if any(isinstance(step.op, ValueOp) for step in rule.steps)
            else []
        )
        if changed:
            found.append(LossOf(rule, "lossy", tuple(changed), rule.why))
    return found


def _unused(
    rule: DirectedRule,
    keys: Iterable[str],
    unused: Mapping[str, str],
    dropped: Mapping[str, DirectedRule],
) -> list[LossOf]:
    """The parts that go because numbers have no use for them, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for key in keys:
        if key in unused and dropped.get(key) is rule:
            by_reason.setdefault(unused[key], []).append(key)
    return [LossOf(rule, "drop", tuple(gone), why) for why, gone in by_reason.items()]


def _changed_by(rule: DirectedRule, tensor: Tensor) -> bool:
    return any(call.lossy and call.rule == rule.label for call in computations([tensor]))


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
    step: PathStep,
    rules: Sequence[DirectedRule],
    bound: StepResult,
    stay: AbstractSet[str],
    values: Collection[str],
) -> list[str]:
    """What to say about keys that were no rule's on the way there, or may not have been."""
    if gone := sorted(key for key in stay if key not in bound.tensors and key not in values):
        return [f"the stamp says that {listed(gone, 4)} stay as they are, and they do not exist"]
    if not step.backwards or step.memory.get("kept") is not None:
        return []
    # a `keep` for whatever else there is says nothing of these keys
    patterns = [pattern for pattern in step.keep if not any(map(pattern.includes, _ANYTHING))]
    taken_by: dict[int, dict[str, None]] = {}
    for made in bound.provenance.values() if patterns else ():
        taken_by.setdefault(id(made.rule), {}).update(dict.fromkeys(made.keys))
    notes = []
    for rule in rules:
        alike = [key for t in group(taken_by.get(id(rule), ())) for key in _fitted(patterns, t)]
        if alike:
            what = (
                f"rule {rule.name!r} takes {listed(alike, 4)}, which `keep` may have left "
                "unchanged on the way there"
            )
            notes.append(f"{what}: no stamp says so")
    return notes


def _fitted(patterns: Sequence[Pattern], template: Template) -> list[str]:
    fits = [matching(pattern, seen_by(pattern, template)) for pattern in patterns]
    return [key for key, *found in zip(template.keys, *fits, strict=True) if any(found)]


def _kept(back: PathStep, bound: StepResult, values: Iterable[str], views: Views) -> list[str]:
    """The keys that stayed as they were on a step, and that its way back would take: what a stamp
    has to remember of them.
    """
    report = Report()
    rules = directed(back, report)
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
        if any(
            any(matching(p, seen_by(p, t)))
            for s in {"", *t.text.split("."), *without_rank(t)[0].text.split(".")}
            for p in by_anchor.get(s, ())
        )
    ]
    # what a flat pattern takes follows from the keys of others
    if found and len(plain) < len(patterns):
        found = bound.kept
    keys = [
        key
        for t in found
        for key in t.keys
        if key in bound.tensors and key not in bound.provenance and key not in bound.settled
    ]
    try:
        keys = (
            find_taken_keys(rules, {key: bound.tensors[key] for key in keys}, views) if keys else []
        )
    except MigrateError:
        # the proof of the downgrade says so
        keys = []
    if not values:
        return keys
    return keys + [name for name in fitting_items(rules, values) if name not in bound.named]


def prove_downgrade(
    tensors: Mapping[str, StoredTensor],
    composition: Composition,
    path_state: PathState | None = None,
    kept: Mapping[str, StoredTensor] = NOTHING,
) -> list[str]:
    """Binds the way back to what is planned; what does not return as it was, by rule and key.
    Empty: the downgrade is exact.

    `kept` are tensors that stand among the outputs and were not made of `tensors`, which were made
    of them: what is computed of these again is what it was, rounded or not.

    The way back is that of the inverses, and of rule files that lead it where there are such: they
    are not derived from what they undo, so it is looked at where their tensors come from.

    `context.same_bytes` is asked only of targets of `keep_source` rules that were there before: on
    the way back they go if they are what the rule would have made, and would not return.
    """
    context = composition.context
    if context is None:
        raise ValueError("composed without a proof")
    views, restored = Views(), set[str]()
    allow = DROP | context.allow.intersection((STALE_OPTIMIZER,))
    if kept:
        # there are bytes of what is put back, and what was made of it was permitted
        back_context = context._replace(allow=allow | {DELAYED_SCALING}, partial=False)
    else:
        back_context = context._replace(allow=allow, payload=None, part=None, partial=False)
    if context.kept is not None:
        back_context = back_context._replace(kept=context.kept.again())
    current: Mapping[str, Tensor] = composition.graph.outputs
    following = composition.following.turned() if composition.following is not None else None
    if following is not None:
        following.kept = back_context.kept
    reasons: list[str] = []
    last = StepResult()
    there = items = composition.items
    if items is not None:
        final = items
        there = Items(
            {name: name for name in final.names},
            final.ranks,
            lambda name: final.spelled(final.names[name]),
        )
    for number, (step, bound) in reversed(list(enumerate(composition.steps))):
        stay = frozenset(composition.kept[number] if composition.kept else ())
        if kept:
            # a tensor that is put back in the place of one that stayed does not stay
            stay = frozenset(k for k in stay if k not in current or not _is_of(current[k], kept))
        back = PathStep(
            step.lineage,
            step.goal,
            step.start,
            not step.backwards,
            step.rules,
            step.keep,
            undo=context.undo,
        )
        if step.back and path_state is not None:
            try:
                back = path_state.settle_way_back(step, number, current)
            except MigrateError as error:
                return reasons + [_reason(d) for d in error.diagnostics]
        report = Report()
        rules = directed(back, report)
        if report.has_errors():
            return reasons + [_reason(d) for d in report.diagnostics]
        made = bound.provenance
        keeping = [
            rule
            for rule, params in step.rules
            if rule.rule.inverse == "keep" and holds(rule.rule.where or {}, params)
        ]
        elsewhere = (
            frozenset(map(id, rules_of_items(rules, there.names)))
            if there is not None
            else frozenset()
        )

        def equal(key: str, present: Tensor, again: Tensor, made: Mapping[str, Any] = made) -> bool:
            return key in made or context.same_bytes(key, present, again)

        if following is not None:
            current = following.take_out(rules, current, views)
        try:
            bound_back = bind(
                rules,
                back.keep,
                current,
                views,
                back_context._replace(
                    same_bytes=equal,
                    elsewhere=elsewhere,
                    absent=None if bound.absent is None else frozenset(bound.absent),
                    payload=context.payload if step.back or keeping else back_context.payload,
                ),
                report,
                stay=stay,
            )
        except MigrateError as error:
            return reasons + [_reason(d) for d in error.diagnostics]
        if following is not None and not report.has_errors():
            following.follow(bound_back, current, views, report)
        if there is not None and not report.has_errors():
            there = carry_items(rules, bound_back, there, report, stay)
        if report.has_errors():
            return reasons + [_reason(d) for d in report.diagnostics if d.severity == "error"]
        restored = set()
        if keeping and back.backwards and back_context.kept is not None:
            restored = {*back_context.kept.put_back(keeping, bound_back, bound.nothing)}
        current, last = bound_back.tensors, bound_back
    composition.back = current
    if following is not None and composition.following is not None:
        reasons += following.differences(composition.following)
    changed = dict.fromkeys(
        call.rule
        for call in computations(current.values())
        if call.lossy and not (kept and any(_is_of(tensor, kept) for tensor in call.inputs))
    )
    reasons += [f"rule {label}: values do not return exactly" for label in changed]
    if items is not None and there is not None:
        spelled, again = items.spelled, there.names
        returned = {
            name
            for name in composition.item_names & again.keys()
            if (was := items.names[again[name]]) == name or spelled(was) == spelled(name)
        }
        if gone := sorted(composition.item_names - returned):
            reasons.append(f"values not restored: {listed(gone, 4)}")
        if more := sorted(again.keys() - composition.item_names):
            reasons.append(f"values return that were not there before: {listed(more, 4)}")
        if gone or more:
            composition.values_lost = True
    strange: list[str] = []
    if any(step.back for step, _ in composition.steps):
        strange = [
            key
            for key, made in current.items()
            if key in tensors and made.spec.nbytes and not _returns(key, made, tensors, kept)
        ]
    if restored:
        restored = _without_ranks(restored, composition.lifted, tensors)
    if more := sorted(restored - composition.lifted.keys()):
        reasons.append(f"values return that were not there before: {listed(more, 4)}")
        restored &= composition.lifted.keys()
    return reasons + _differences(tensors, restored, current, composition, last, strange)


def _without_ranks(
    names: AbstractSet[str], lifted: Mapping[str, Any], tensors: Iterable[str]
) -> set[str]:
    """The names, with one in the place of those on all ranks that was lifted without a rank."""
    several: dict[str, list[str]] = {}
    for name in names:
        found = split_rank(name)
        if found is not None and found[0] in lifted:
            several.setdefault(found[0], []).append(name)
    if not several:
        return {*names}
    ranks = len({rank_of(key) for key in tensors} - {None})
    whole = {base: found for base, found in several.items() if len(found) == ranks}
    return (names - {*chain.from_iterable(whole.values())}) | whole.keys()


def _is_of(tensor: Tensor, kept: Mapping[str, StoredTensor]) -> bool:
    return any(key in kept for key in stored_keys(tensor))


def _returns(
    key: str,
    made: Tensor,
    tensors: Mapping[str, StoredTensor],
    kept: Mapping[str, StoredTensor],
) -> bool:
    """Whether what stands under a key again is the tensor that stood there, or computed from it, or
    made of what is `kept`.
    """
    if kept and _is_of(made, kept):
        return True
    if any(isinstance(source, ComputedTensor) for source in made.sources):
        return stored_keys(made) == [key]
    return untouched_key(made, tensors) == key


def _reason(diagnostic: Diagnostic) -> str:
    place = f" ({diagnostic.spans[0]})" if diagnostic.spans else ""
    return diagnostic.message + place


def _differences(
    source: Mapping[str, StoredTensor],
    restored: AbstractSet[str],
    back: Mapping[str, Tensor],
    composition: Composition,
    last: StepResult,
    strange: Sequence[str],
) -> list[str]:
    """What of the `source`, but for values that are `restored`, does not return. `last`: the last
    step of the way back; `strange`: keys of what is made of something else.
    """
    extra = [key for key in back if key not in source or key in restored]
    # equal specs are mostly one object
    wrong = [
        k
        for k, at in source.items()
        if k not in restored
        and (
            (there := back.get(k)) is None or (there.spec is not at.spec and there.spec != at.spec)
        )
    ]
    if not (extra or wrong or strange):
        return []
    owners = {
        key: made.rule for made in last.provenance.values() for key in made.keys
    } | last.dropped
    # who took a key of the source says more than who takes its name on the way back
    for _, bound in reversed(composition.steps):
        owners.update(
            {key: made.rule for made in bound.provenance.values() for key in made.keys}
            | bound.dropped
            | bound.redundant
        )
    lost: dict[str, list[str]] = {}
    for key in wrong:
        who = f"rule {owners[key].label}" if key in owners else "no rule"
        what = f"{source[key].spec} returns as {back[key].spec}" if key in back else "not restored"
        lost.setdefault(f"{who}: {what}", []).append(key)
    for key in strange:
        who = f"rule {last.provenance[key].rule.label}" if key in last.provenance else "no rule"
        if key not in wrong:
            lost.setdefault(f"{who}: other values return", []).append(key)
    for key in extra:
        who = f"rule {last.provenance[key].rule.label}" if key in last.provenance else "no rule"
        lost.setdefault(f"{who}: returns, but was not there before", []).append(key)
    return [f"{what}: {listed(keys, 4)}" for what, keys in lost.items()]
