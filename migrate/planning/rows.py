"""The rows of a plan: what rules make of which keys, alike ones together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ..core.templates import Collapsed, collapse
from ..rules.compiled import DirectedRule
from .bind import Followed, Provenance, StepResult
from .graph import ComputedTensor, Tensor, computations
from .pathstate import PathStep
from .pipeline import CODING

# source keys that are collapsed for the rows; above it a row shows the sources of one of its
# outputs
MOST_COLLAPSED = 20_000
# ops on numbers, which state of optimizers has of its own
NUMBERS = ("cast", *CODING)


def rows_of(step: PathStep, bound: StepResult, *, each: bool = False) -> list[dict[str, Any]]:
    """One row per rule, output template and spec; in the order of the rules. With `sample`, `from`
    is that of one output only. `each`: one row per output.
    """
    lines: Lines = _one_by_one if each else collapse
    followed: dict[str, dict[str, Followed]] = {}
    for key, one in bound.followed.items() if each else ():
        followed.setdefault(one.parameter, {})[key] = one
    by_rule: dict[int, tuple[DirectedRule, list[str]]] = {}
    for key, made in bound.provenance.items():
        by_rule.setdefault(id(made.rule), (made.rule, []))[1].append(key)
    rows = []
    budget = MOST_COLLAPSED
    for rule, keys in by_rule.values():
        specs = {key: bound.tensors[key].spec for key in keys if key in bound.tensors}
        groups = lines(list(specs), specs.__getitem__)
        for group in groups:
            made = bound.provenance[group.sample]
            sources, whole = made.keys, group.count == 1
            if len(groups) == 1 and group.count * len(sources) <= budget:
                sources, whole = (
                    tuple(dict.fromkeys(s for key in specs for s in bound.provenance[key].keys)),
                    True,
                )
                budget -= len(sources)
            rows.append(
                {
                    "change": change_of(rule, made, group.sample, bound.tensors[group.sample]),
                    "to": group.text,
                    "count": group.count,
                    "spec": str(specs[group.sample]),
                    "from": [c.text for c in collapse(list(sources))],
                    "sample": not whole,
                    "ops": [step.name for step in rule.steps],
                    "lossy": rounds(rule, bound.tensors[group.sample]),
                    "rule": rule.name,
                    "at": str(rule.span),
                    "leg": leg_of(step),
                }
            )
            if each:
                rows += _followed_rows(step, rule, followed.get(group.sample, {}), lines)
        if bound.followed and not each:
            own = {key: one for key, one in bound.followed.items() if one.rule is rule}
            rows += _followed_rows(step, rule, own, lines)
    for change, table in going(bound):
        gone: dict[int, tuple[DirectedRule, list[str]]] = {}
        for key, rule in table.items():
            gone.setdefault(id(rule), (rule, []))[1].append(key)
        for rule, keys in gone.values():
            rows += [
                {
                    "change": change,
                    "to": None,
                    "count": group.count,
                    "spec": None,
                    "from": [group.text],
                    "sample": False,
                    "ops": [step.name for step in rule.steps],
                    "rule": rule.name,
                    "at": str(rule.span),
                    "leg": leg_of(step),
                    "why": why_gone(bound, table, group.sample),
                }
                for group in lines(keys, None)
            ]
    return rows


Lines = Callable[[Sequence[str], "Callable[[str], Hashable] | None"], list[Collapsed]]


def _one_by_one(
    keys: Sequence[str], tag: Callable[[str], Hashable] | None = None
) -> list[Collapsed]:
    return [line for key in keys for line in collapse([key])]


def _followed_rows(
    step: PathStep, rule: DirectedRule, own: Mapping[str, Followed], lines: Lines
) -> list[dict[str, Any]]:
    """The rows of optimizer state that goes with the parameters of a rule."""
    return [
        {
            "change": "followed",
            "to": group.text,
            "count": group.count,
            "spec": str(own[group.sample].tensor.spec),
            "bytes": group.count * own[group.sample].tensor.spec.nbytes,
            "from": [c.text for c in collapse(list(own[group.sample].keys))],
            "sample": group.count > 1,
            "ops": [call.name for call in rule.steps if call.name not in NUMBERS],
            "lossy": False,
            "rule": rule.name,
            "at": str(rule.span),
            "leg": leg_of(step),
        }
        for group in lines(list(own), lambda key: own[key].tensor.spec)
    ]


def leg_of(step: PathStep) -> str:
    """The edge as rows name it."""
    return f"{step.lineage} {step.start} -> {step.goal}"


def rounds(rule: DirectedRule, tensor: Tensor) -> bool:
    """Whether an op of the rule rounds what the tensor is made of."""
    return any(call.lossy and call.rule == rule.label for call in computations([tensor]))


def going(bound: StepResult) -> tuple[tuple[str, Mapping[str, DirectedRule]], ...]:
    """The keys that an edge takes away, with the rules that do, by what happens to them."""
    return (
        ("dropped", bound.dropped),
        ("redundant", bound.redundant),
        ("dropped", bound.left_behind),
    )


def why_gone(bound: StepResult, table: Mapping[str, DirectedRule], key: str) -> str:
    """Why a key of one of the tables of `going` goes."""
    if table is bound.left_behind:
        return "state of the optimizer"
    return bound.unused.get(key, table[key].why)


def change_of(rule: DirectedRule, made: Provenance, key: str, tensor: Tensor) -> str:
    """What a rule does to the tensors that it makes one of, in a word."""
    kinds = {step.op.kind for step in rule.steps}
    if "make" in kinds:
        return "added"
    if ComputedTensor in map(type, tensor.sources):
        return "computed"
    if "exchange" in kinds:
        # of several parts, this one is a copy of one
        return "rearranged"
    if len(made.keys) > 1:
        return "merged"
    if "part" in kinds:
        return "split"
    if kinds:
        return "rearranged"
    return "unchanged" if made.keys == (key,) else "renamed"
