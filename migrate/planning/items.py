"""Values that are no tensors, along the edges of a path.

Those that a rule names obey it, all others follow the modules that they belong to, and settings of
an optimizer (`param_groups.<parameter>.lr`) the moments of their parameter. A value has no
dtype and no shape, so only rules that rename, drop, copy or ask for equality can take one, and only
one that spells the value's last name: `{m...}._extra_state` does, and `{m...}.{k}` speaks of
tensors. The tensors are bound without them; values are bound by the same matcher, on their own, as
if each were a tensor without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from ..core.errors import Report, listed, option, printable, together
from ..core.keys import Pattern, TwoReadings
from ..core.spec import spec
from ..core.templates import rank_of
from ..core.view import View
from ..rules.compiled import DirectedRule
from .bind import DROP, BindContext, StepResult, bind
from .graph import Tensor, assumed
from .module_names import ModuleMoves
from .pipeline import Views
from .request import OPTIMIZER_PARAM, STALE_OPTIMIZER

OPS = frozenset({"drop", "copy", "same"})
_ACCOUNTING = ("M206", "M211")
# how get_optimizer_state_dict of torch flattens what it has of a parameter
_SETTINGS, _MOMENTS = "param_groups.", "state."


class Items(NamedTuple):
    """What values there are: their names now -> what they were called in the checkpoint, `ranks`:
    names end in `@r`.

    `spelled(name)` is the text of the value under this name: equal for equal values.
    """

    names: Mapping[str, str]
    ranks: bool
    spelled: Callable[[str], str]
    # what any of them was called behind an edge
    known: frozenset[str] = frozenset()


def rules_of_items(rules: Iterable[DirectedRule], names: Iterable[str]) -> list[DirectedRule]:
    """The rules that take at least one of these values."""
    short = [_split(name)[0] for name in names]
    return [
        rule for rule in rules if short and _takes(rule) and any(_fits(rule, key) for key in short)
    ]


def fitting_items(rules: Sequence[DirectedRule], names: Iterable[str]) -> list[str]:
    """The values that one of the rules may take."""
    able = [rule for rule in rules if _takes(rule)]
    return [name for name in names if any(_fits(rule, _split(name)[0]) for rule in able)]


def _takes(rule: DirectedRule) -> bool:
    plain = all(side.role is None and not side.pattern.has_flat for side in rule.reads)
    return plain and rule.forward is None and all(step.name in OPS for step in rule.steps)


def _fits(rule: DirectedRule, key: str) -> bool:
    return any(
        _last(side.pattern) == key.rpartition(".")[2] and _matches(side.pattern, key)
        for side in rule.reads
    )


def _last(pattern: Pattern) -> str | None:
    """The last name that the pattern spells, without a rank; None where it is open."""
    text = pattern.text.partition("@")[0].rpartition(".")[2]
    return None if "{" in text else text


def _matches(pattern: Pattern, key: str) -> bool:
    try:
        return pattern.match(f"{key}@0" if "@" in pattern.text else key) is not None
    except TwoReadings:
        return True


def _split(name: str) -> tuple[str, int]:
    rank = rank_of(name) if "@" in name else None
    return (name, 0) if rank is None else (name.rpartition("@")[0], rank)


def carry_items(
    rules: Sequence[DirectedRule],
    bound: StepResult,
    values: Items,
    report: Report,
    stay: AbstractSet[str] = frozenset(),
) -> Items:
    """The values behind the edge that `bound` is of; what rules make and drop and what there is to
    know is added to `bound`.

    `stay`: names that no rule takes. M404 where `same` finds values that differ, M212 where a
    tensor is called like a value.
    """
    taken = rules_of_items(rules, values.names)
    out: dict[str, str] = {}
    handled: set[str] = set()
    if taken:
        views = Views()
        nothing: View = views.stored((0,), None)
        asked = {
            name: Tensor(spec("uint8", (0,)), nothing, (name,))
            for name in values.names
            if name not in stay and any(_fits(r, _split(name)[0]) for r in taken)
        }
        problems = Report()
        own = bind(
            [replace(rule, optional=True, when={}) for rule in taken],
            [],
            asked,
            views,
            BindContext(lambda *_: True, DROP),
            problems,
        )
        report.diagnostics += [d for d in problems.diagnostics if d.code not in _ACCOUNTING]
        rule_of = {(rule.id, rule.name): rule for rule in taken}
        for key, made in own.provenance.items():
            out[key] = values.names[made.keys[0]]
            handled.update(() if made.rule.keep_source else made.keys)
            unlike = [
                k for k in made.keys if values.spelled(values.names[k]) != values.spelled(out[key])
            ]
            if unlike:
                report.add(
                    "M404",
                    f"rule {made.rule.name!r}: the values {listed([made.keys[0], *unlike], 4)} "
                    "differ",
                    spans=(made.rule.span,),
                    help=assumed(made.rule),
                )
        handled.update(own.dropped)
        bound.named.update(own.provenance)
        for listed_, missing in own.unmatched.items():
            if listed_ in bound.unmatched:
                bound.unmatched[listed_] = [
                    value for value in bound.unmatched[listed_] if value in missing
                ]
        bound.dropped.update(
            {key: rule_of[rule.id, rule.name] for key, rule in own.dropped.items()}
        )
        changed = [
            f"{printable(was)} is now {printable(key)}"
            for key, made in own.provenance.items()
            # that ranks are others says nothing of a value
            if _split(was := made.keys[0])[0] != _split(key)[0]
        ]
        if changed:
            more = f", and {len(changed) - 1:,} more" if len(changed) > 1 else ""
            bound.notes.append(f"values that rules name: {changed[0]}{more}")
    out.update(
        _followed(
            [name for name in values.names if name not in handled], values, bound, {*out}, report
        )
    )
    return values._replace(names=out, known=values.known | out.keys())


def _followed(
    names: Sequence[str], values: Items, bound: StepResult, made: set[str], report: Report
) -> dict[str, str]:
    """Where values go that no rule takes: with their modules, or stay where names would clash."""
    tensors = (
        {_split(key) for key in bound.tensors}
        if values.ranks
        else {(key, 0) for key in bound.tensors}
    )
    used = tensors | {_split(key) if values.ranks else (key, 0) for key in made}
    split = {name: _split(name) if values.ranks else (name, 0) for name in names}
    moves = ModuleMoves(bound) if bound.provenance or bound.dropped else None
    there = _with_modules(split, moves, bound)
    equal = _equal(there, split, moves, values)
    settings = [
        name
        for name in there
        if (split[name][0].rpartition(".")[0], split[name][1]) in bound.settings
    ]
    equal |= _agreed(settings, there, values, report)
    stay: list[str] = []
    while True:
        asked: dict[tuple[str, int], set[str]] = {}
        for name, goals in there.items():
            for goal in goals:
                asked.setdefault(goal, set()).add(equal.get(name, name))
        back = [
            name
            for name, goals in there.items()
            if goals != (split[name],)
            and any(goal in used or len(asked[goal]) > 1 for goal in goals)
        ]
        if not back:
            break
        stay += back
        there.update({name: (split[name],) for name in back})
    if stay:
        bound.notes.append(
            "values that keep their names, because others would get the same name: "
            f"{listed(sorted(stay), 4)}"
        )
    if both := sorted(name for name, goals in there.items() if used.intersection(goals)):
        what = (
            f"{listed(both, 4)} would be written twice: a value that is not a tensor has this "
            "name, and no rule takes it"
        )
        report.add(
            "M212",
            what,
            help="give the tensor another name, or name the value in a rule of its own",
        )
    out: dict[str, str] = {}
    merged: list[str] = []
    for name, goals in there.items():
        for key, rank in goals:
            called = f"{key}@{rank}" if values.ranks else key
            out.setdefault(called, values.names[name])
            if equal.get(name, name) != name:
                merged.append(f"{printable(name)} is now {printable(called)}")
    copied = [
        f"{printable(name)} is now {listed([key for key, _ in goals])}"
        for name, goals in there.items()
        if len(goals) > 1
    ]
    if copied:
        bound.notes.append(f"values that are copied with their modules: {listed(copied, 4)}")
    if merged:
        bound.notes.append(f"values that are equal, as their modules are: {listed(merged, 4)}")
    return out


def _with_modules(
    split: Mapping[str, tuple[str, int]], moves: ModuleMoves | None, bound: StepResult
) -> dict[str, tuple[tuple[str, int], ...]]:
    """Where values go with their modules, several names where the tensors are copied; without those
    whose tensors are all dropped, which `bound` counts as dropped.
    """
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, (key, rank) in split.items():
        module, _, last = key.rpartition(".")
        if (module, rank) in bound.settings:
            out[name] = tuple((f"{goal}.{last}", at) for goal, at in bound.settings[module, rank])
            continue
        goals: tuple[str, ...] = (module,)
        if moves is not None and module:
            # a flattened optimizer has the settings of a parameter apart from its moments
            state = module.replace(_SETTINGS, _MOMENTS, 1)
            state = state if module.startswith(_SETTINGS) else module
            found = moves.copies(state) or moves.goals(state)
            # who drops moments does not say that the parameter goes
            rule = None if found or state != module else moves.dropper(module)
            if rule is not None:
                bound.dropped[name] = rule
                continue
            if state != module and all(goal.startswith(_MOMENTS) for goal in found):
                found = tuple(goal.replace(_MOMENTS, _SETTINGS, 1) for goal in found)
            if len(found) == 1 or found == moves.copies(state):
                goals = found or goals
        out[name] = tuple((f"{goal}.{last}" if goal else last, rank) for goal in goals)
    return out


def _agreed(
    settings: Sequence[str],
    there: Mapping[str, tuple[tuple[str, int], ...]],
    values: Items,
    report: Report,
) -> dict[str, str]:
    """Setting -> the first of those that become one with it; M410 where they differ."""
    out: dict[str, str] = {}
    first: dict[tuple[str, int], str] = {}
    for name in settings:
        for goal in there[name]:
            other = out.setdefault(name, first.setdefault(goal, name))
            if values.spelled(values.names[name]) != values.spelled(values.names[other]):
                way = together(option("params", f"{OPTIMIZER_PARAM}=drop"), option("allow", "drop"))
                report.add(
                    "M410",
                    "the optimizer state cannot follow: settings of parameters that become one "
                    f"differ: {listed([other, name])}",
                    help=f"begin with a new optimizer: {way}; or carry it all as it is: "
                    f"{option('allow', STALE_OPTIMIZER)}",
                    permit=STALE_OPTIMIZER,
                )
    return out


def _equal(
    there: Mapping[str, tuple[tuple[str, int], ...]],
    split: Mapping[str, tuple[str, int]],
    moves: ModuleMoves | None,
    values: Items,
) -> dict[str, str]:
    """Value -> the first one that it is equal to and gets the same name as, where `same` makes one
    module of theirs.
    """
    out: dict[str, str] = {}
    first: dict[tuple[tuple[str, int], str], str] = {}
    for name, goals in there.items():
        module = split[name][0].rpartition(".")[0]
        if moves is not None and len(goals) == 1 and module and moves.is_same(module):
            out[name] = first.setdefault((goals[0], values.spelled(values.names[name])), name)
    return out
