"""Rules backwards: each op inverted, in reverse order, with the same capture values."""

from __future__ import annotations

from dataclasses import replace

from .. import ops
from ..ops.base import OneWay
from ..rules.compiled import CompiledCall, DirectedRule


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
