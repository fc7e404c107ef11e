"""What a rule loses, and whether the author says so.

An op that destroys or changes values, or that cannot be undone, is no mistake; a missing reason
is. A rule that only moves names back and forth needs no reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.diagnostics import Diagnostic
from ..ops.base import Loss, OneWay
from ..planning.pathstep import invert
from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule
from ..ruletests.binding import CompiledFile
from .inputs import FileSet, directed


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M606, M630 to M632."""
    edges = fileset.edges
    for file in fileset.files:
        lineage, start, goal = file.model.lineage, *file.model.edge
        written_back = (lineage, goal, start) in edges
        for rule, forwards in directed(file):
            yield from _reason(file, rule, forwards)
            if not written_back and rule.rule.inverse != "skip":
                yield from _way_back(file, rule, forwards)


def _reason(file: CompiledFile, rule: CompiledRule, forwards: DirectedRule) -> Iterator[Diagnostic]:
    """M606, M630, M631: a loss without a reason."""
    for number, step in enumerate(forwards.steps):
        span = file.span(rule, "via", number, step.name)
        if step.op.kind == "end":
            if not str(step.args.why).strip():
                yield Diagnostic(
                    "M631",
                    f"rule `{rule.rule.name}` drops its keys and gives no reason",
                    (span,),
                    (),
                    "write `drop: {why: …}`",
                )
            continue
        loss = step.op.loss(step.args)
        if loss is Loss.LOSSLESS or file.model.why:
            continue
        if loss is Loss.DESTRUCTIVE:
            yield Diagnostic(
                "M630",
                f"rule `{rule.rule.name}` destroys values, and the file gives no reason",
                (span,),
                (),
                _help(step),
            )
        else:
            yield Diagnostic(
                "M606",
                f"rule `{rule.rule.name}` changes values, and the file gives no reason",
                (span,),
                (),
                "write `why:` below the title",
            )


def _help(step: CompiledCall) -> str:
    inverse = step.op.invert(step.args, enumerated=False)
    told = inverse.help if isinstance(inverse, OneWay) else None
    return f"{told}; or write `why:` below the title" if told else "write `why:` below the title"


def _way_back(
    file: CompiledFile, rule: CompiledRule, forwards: DirectedRule
) -> Iterator[Diagnostic]:
    """M632: the edge can be walked back, as any edge, and this rule would stop it without the
    file saying so.
    """
    if any(step.op.kind == "end" for step in forwards.steps) or forwards.keep_source:
        return
    back = invert(forwards)
    if not isinstance(back, OneWay):
        return
    first = next(
        (n for n, step in enumerate(forwards.steps) if back.because.startswith(f"{step.name}: ")), 0
    )
    span = file.span(rule, "via", first, forwards.steps[first].name)
    hint = back.help or "say `inverse: skip` if the tensors are not needed on a downgrade"
    notes = (
        (
            "on a downgrade the plan is refused; a file with the reversed edge, or `inverse: "
            "skip`, "
            "would say what happens there"
        ),
    )
    yield Diagnostic(
        "M632", f"rule `{rule.rule.name}` has no inverse: {back.because}", (span,), notes, hint
    )
