"""Checks of a compiled rule that need no checkpoint: every capture and role is bound once, used,
and of a fit kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.diagnostics import Report, Span, did_you_mean
from ..core.keys import CaptureType
from ..ops._op import ValueOp

if TYPE_CHECKING:
    from .compiled import CompiledRule

# what the roles of a rule are called where a capture can stand
ROLE = "role"


def names_help(types: Iterable[str]) -> str:
    names = ", ".join(f"{{{n}}}" for n in types)
    return f"defined here: {names}" if names else "`from` has no captures"


def check_captures(compiled: CompiledRule, report: Report) -> None:
    """What is bound by `from`, consumed by `over` and produced by `into` must end as exactly the
    captures of `to`.
    """
    rule, path, span, types = compiled.rule, compiled.path, compiled.loaded.span, compiled.types
    bound = {name for p in compiled.sources.values() for name in p.captures}
    flat = {n for p in compiled.sources.values() for n, t in p.types.items() if t.kind == "flat"}
    for name in sorted(
        flat
        - {n for p in compiled.sources.values() for n, t in p.types.items() if t.kind == "path"}
    ):
        report.add(
            "M203",
            f"{{{name}:flat}} needs another role with {{{name}...}}",
            spans=(span(*path, "from"),),
        )
    has_roles = None not in compiled.sources or bool(
        compiled.targets and None not in compiled.targets
    )
    if has_roles and any(
        ROLE in p.captures for p in (*compiled.sources.values(), *compiled.targets.values())
    ):
        report.add(
            "M204",
            f"{{{ROLE}}} is what the roles of this rule are called",
            spans=(span(*path, "from"),),
            help="rename the capture",
        )
    if None not in compiled.sources:
        bound.add(ROLE)
    dropped = False
    for number, step in enumerate(rule.via):
        place = span(*path, "via", number, step.op)
        if dropped:
            report.add(
                "M204",
                "nothing is left after drop",
                spans=(place,),
                help="drop is the last op of its rule",
            )
        op = ops.get(step.op)
        capture = capture_of(step.args)
        if op.kind == "end":
            dropped = True
        elif isinstance(op, ValueOp) and op.roles(_codec_of(step.args)):
            _check_roles_of(
                compiled,
                step.op,
                op.roles(_codec_of(step.args)),
                op.kind == "join",
                bound,
                place,
                report,
            )
        elif op.kind == "join" and capture is not None:
            if capture not in bound:
                names = sorted(bound)
                report.add(
                    "M203",
                    f"{step.op} over {{{capture}}}, which is not bound here",
                    spans=(place,),
                    notes=(f"bound here: {', '.join(names) or 'nothing'}",),
                    help=did_you_mean(capture, names),
                )
            elif types[capture].kind not in ("int", "enum"):
                report.add(
                    "M205",
                    f"{step.op} over {{{capture}}}: a plain capture has no order",
                    spans=(place,),
                    help=f"write {{{capture}:int}} or {{{capture}:first|second}} in `from`, or "
                    "give it a map",
                )
            bound.discard(capture)
        elif op.kind == "part" and capture is not None:
            if capture in bound:
                report.add(
                    "M204", f"{step.op} into {{{capture}}}, which is bound already", spans=(place,)
                )
            elif capture not in types:
                report.add(
                    "M203",
                    f"{step.op} into {{{capture}}}, which `to` does not use",
                    spans=(place,),
                    help=names_help(types),
                )
            elif types[capture].kind not in ("int", "enum"):
                report.add(
                    "M205",
                    f"{step.op} into {{{capture}}}: a plain capture has no values to take",
                    spans=(place,),
                    help=f"write {{{capture}:int}} or {{{capture}:first|second}} in `to`",
                )
            if capture in types:
                bound.add(capture)
        for name, wanted in ((step.args or {}).get("only") or {}).items():
            if name not in bound:
                message = f"only names {{{name}}}, which is not bound here"
                report.add("M203", message, spans=(place,), help=did_you_mean(name, sorted(bound)))
            else:
                _check_values("only", name, types[name], wanted, place, report)
    _check_where(compiled, report)
    _check_optional(compiled, report)
    if dropped:
        return
    wanted = {name for p in compiled.targets.values() for name in p.captures}
    wanted |= {n for p in compiled.targets.values() for n, t in p.types.items() if t.kind == "flat"}
    if compiled.targets and None not in compiled.targets:
        wanted.add(ROLE)
    if ROLE in bound & wanted and {str(r) for r in compiled.targets} != set(types[ROLE].values):
        report.add(
            "M203",
            f"the roles of `to` are {_roles(compiled.targets)}, what arrives there are "
            f"{', '.join(types[ROLE].values)}",
            spans=(span(*path, "to"),),
            help="name the same roles on both sides, or make one tensor of them first, e.g. "
            "`concat: {over: role}`",
        )
    for name in sorted(wanted - bound):
        near = did_you_mean(name, sorted(bound))
        report.add(
            "M203",
            f"capture {{{name}}} is used in `to` but never defined",
            spans=(span(*path, "to"),),
            notes=(f"bound at the end of via: {', '.join(sorted(bound)) or 'nothing'}",),
            help=near or "define it in `from`, or produce it with `into`",
        )
    for name in sorted(bound - wanted):
        report.add(
            "M204",
            f"capture {{{name}}} is bound by `from` and neither consumed nor written in `to`",
            spans=(span(*path, "from"),),
            help=f"consume it, e.g. `stack: {{over: {name}}}`, or write it in `to`",
        )


def _codec_of(args: Any) -> str:
    return str((args or {}).get("codec", ""))


def _check_roles_of(
    compiled: CompiledRule,
    name: str,
    roles: Sequence[str],
    joins: bool,
    bound: set[str],
    place: Span,
    report: Report,
) -> None:
    """An op that takes or makes roles finds them in `from` or in `to`, under its own names."""
    side, there = ("from", compiled.sources) if joins else ("to", compiled.targets)
    verb, least = ("takes", roles[:1]) if joins else ("makes", roles)
    odd = [str(r) for r in there if r not in roles]
    missing = [r for r in least if r not in there]
    if odd or missing:
        report.add(
            "M203",
            f"{name} {verb} the roles {', '.join(roles)}; `{side}` has "
            f"{_roles(there) if None not in there else 'none'}",
            spans=(place,),
            help=f"write `{side}: {{{', '.join(f'{r}: …' for r in roles)}}}`",
        )
    if joins:
        bound.discard(ROLE)
    else:
        bound.add(ROLE)


def _roles(patterns: Iterable[str | None]) -> str:
    return ", ".join(str(role) for role in patterns)


def _check_where(compiled: CompiledRule, report: Report) -> None:
    """`where` names captures of `from`, with values that they can have and limits only where they
    are numbers.
    """
    types, place = compiled.types, compiled.loaded.span(*compiled.path, "where")
    captures = {name for pattern in compiled.sources.values() for name in pattern.captures}
    for name, wanted in (compiled.rule.where or {}).items():
        if name.startswith("$"):
            continue
        if name not in captures:
            hint = (
                "`when` tests the tensor"
                if name in ("dtype", "ndim")
                else did_you_mean(name, sorted(captures)) or names_help(captures)
            )
            report.add(
                "M203",
                f"where names {{{name}}}, which is not a capture of `from`",
                spans=(place,),
                help=hint,
            )
        elif not isinstance(wanted, Mapping):
            _check_values("where", name, types[name], wanted, place, report)
        elif types[name].kind != "int":
            limits = ", ".join(wanted)
            report.add(
                "M205",
                f"where limits {{{name}}} by {limits}, but it is no number",
                spans=(place,),
                help=f"write {{{name}:int}} in `from`",
            )


def _check_optional(compiled: CompiledRule, report: Report) -> None:
    """M114 for alternatives that may be missing and that there are not."""
    said = compiled.rule.optional
    for name, words in said.items() if isinstance(said, dict) else ():
        kind, place = (
            compiled.types.get(name),
            compiled.loaded.span(*compiled.path, "optional", name),
        )
        bound = (
            None not in compiled.sources
            if name == ROLE
            else any(name in p.captures for p in compiled.sources.values())
        )
        if kind is None or kind.kind != "enum" or not bound:
            what = (
                "`from` has no roles"
                if name == ROLE
                else f"{{{name}}} is not a capture of `from` with alternatives"
            )
            report.add(
                "M114",
                f"optional: {what}",
                spans=(place,),
                help="a rule that may match nothing says `optional: true`",
            )
        else:
            _check_values("optional", name, kind, words, place, report)


def _check_values(
    field: str, name: str, kind: CaptureType, wanted: Any, place: Span, report: Report
) -> None:
    """M114 for a value that the capture can never have: the condition would silently never hold."""
    for value in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
        text = str(value)
        if "$" in text:
            continue
        if kind.kind == "enum" and text not in kind.values:
            hint = (
                did_you_mean(text, list(kind.values)) or f"its values are {', '.join(kind.values)}"
            )
            report.add("M114", f"{field}: {{{name}}} is never {text!r}", spans=(place,), help=hint)
        elif kind.kind == "int" and not text.isdecimal():
            report.add(
                "M114",
                f"{field}: {{{name}}} is never {text!r}",
                spans=(place,),
                help="it is a number",
            )


def capture_of(args: Mapping[str, Any] | None) -> str | None:
    args = args or {}
    return args.get("over") or args.get("into")
