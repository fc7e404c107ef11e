"""One step of a path: an edge in the direction in which it is walked, its rules turned that way.

Backwards each op is inverted, in reverse order, with the same capture values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import ops
from ..core.errors import Report
from ..core.keys import Pattern
from ..ops.base import OneWay
from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule, direct, is_active
from ..rules.files import LoadedFile


@dataclass(frozen=True, eq=False, slots=True)
class PathStep:
    """One edge in the direction in which it is walked: the rules of its files and their params.

    `start` and `goal` are layouts of `lineage`; `backwards` when the inverses of the rules are what
    runs. `memory` is what a stamp holds of the edge: the params that it once had, and, where it
    undoes what the stamp says was done, how side files were and which keys stayed as they were
    (`kept`; None: no stamp says so).
    """

    lineage: str
    start: str
    goal: str
    backwards: bool
    rules: tuple[tuple[CompiledRule, Mapping[str, Any]], ...] = ()
    # patterns of keys that stay as they are
    keep: tuple[Pattern, ...] = ()
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


def directed(step: PathStep, report: Report) -> list[DirectedRule]:
    """The step's rules in its direction; rules that `where` on params switches off are left out,
    one-way rules are refused.
    """
    rules = []
    for compiled, params in step.rules:
        if not is_active(compiled, params) or (step.backwards and compiled.rule.inverse == "skip"):
            continue
        rule = direct(compiled, params, report)
        if rule is None:
            continue
        if not step.backwards:
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


def invert(rule: DirectedRule) -> DirectedRule | OneWay:
    """The rule backwards, reading what it wrote; or why that cannot be exact.

    Backwards of a `keep_source` rule reads its targets and keeps the forward rule beside it:
    whether a target goes is decided by what the forward rule would make of the restored keys.
    """
    if rule.keep_source:
        return replace(
            rule, reads=rule.writes, writes=rule.reads, steps=(), backwards=True, forward=rule
        )
    steps = []
    for step in reversed(rule.steps):
        enumerated = step.capture is not None and rule.types[step.capture].kind == "enum"
        inverse = step.op.invert(step.args, enumerated=enumerated)
        if isinstance(inverse, OneWay):
            return OneWay(f"{step.name}: {inverse.because}", inverse.help)
        capture = getattr(inverse.args, "over", None) or getattr(inverse.args, "into", None)
        steps.append(
            CompiledCall(inverse.op, ops.get(inverse.op), inverse.args, capture, step.span)
        )
    return replace(rule, reads=rule.writes, writes=rule.reads, steps=tuple(steps), backwards=True)
