"""A rule made ready to bind: patterns parsed, ops resolved, captures accounted for; forwards and, if it can, backwards.

`compile_rule` checks the capture algebra of one rule (what is bound, consumed, produced) without looking at any key and
without needing params; `direct` fills the params in and answers with a `DirectedRule` for one direction. Values of
captures are always those of the `from` side: a `map` is undone when a target pattern is read and done when one is
written, so `over`, `only`, `sizes` and `where` mean the same in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import ops
from ..core.diagnostics import Report, Span, did_you_mean
from ..core.errors import OpError, PatternError
from ..core.keys import CaptureType, Pattern, parse
from ..ops._op import OneWay, Op
from .arguments import resolve
from .model import LoadedFile, Rule

ROLE = "role"


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """One op with its arguments resolved. `capture` is what it consumes (join) or produces (part)."""

    name: str
    op: Op
    args: Any
    capture: str | None
    span: Span

    @property
    def only(self) -> Mapping[str, list[Any]] | None:
        return getattr(self.args, "only", None)


@dataclass(frozen=True, slots=True)
class Side:
    """One pattern with its role; `undo` turns matched values into `from` values (None: no such value), `do` the way out."""

    role: str | None
    pattern: Pattern
    undo: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    do: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class DirectedRule:
    """A rule in one direction: what it reads, what it does, what it writes."""

    id: str
    name: str
    file: str
    span: Span
    reads: tuple[Side, ...]
    writes: tuple[Side, ...]
    steps: tuple[CompiledStep, ...]
    types: Mapping[str, CaptureType]
    where: Mapping[str, Any]
    when: Mapping[str | None, Mapping[str, Any]]
    optional: bool
    optional_roles: frozenset[str]
    keep_source: bool
    if_exists: str
    backwards: bool
    why: str
    # backwards of a `keep_source` rule: the forward rule, run on the restored keys to see what it would make
    forward: DirectedRule | None = None

    @property
    def label(self) -> str:
        return f"{self.name} ({self.span})"


@dataclass(frozen=True, eq=False, slots=True)
class CompiledRule:
    """A rule whose patterns and capture algebra hold, before params are known."""

    loaded: LoadedFile
    rule: Rule
    path: tuple[Any, ...]
    sources: Mapping[str | None, Pattern]
    targets: Mapping[str | None, Pattern]
    types: Mapping[str, CaptureType]
    maps: Mapping[str, Mapping[Any, Any]]


def compile_file(loaded: LoadedFile, report: Report) -> tuple[list[CompiledRule], list[Pattern]]:
    """The file's rules and `keep` patterns; problems go into the report."""
    rules = []
    for number, rule in enumerate(loaded.model.rules):
        compiled = compile_rule(loaded, rule, ("rules", number), report)
        if compiled is not None:
            rules.append(compiled)
    keep = []
    for number, text in enumerate(loaded.model.keep):
        pattern = _parse(loaded, ("keep", number), text, {}, report)
        if pattern is not None:
            keep.append(pattern)
    return rules, keep


def compile_rule(loaded: LoadedFile, rule: Rule, path: tuple[Any, ...], report: Report) -> CompiledRule | None:
    """The rule with its patterns parsed, or None after its problems were added to the report."""
    before = len(report.diagnostics)
    span = loaded.span
    maps = {name: dict(values) for name, values in (rule.map or {}).items()}
    overrides = {
        name: CaptureType("enum", tuple(str(v) for v in values))
        for name, values in maps.items()
        if _declared_plain(name, rule.sources.values())
    }
    types: dict[str, CaptureType] = dict(overrides)
    sources = _parse_side(loaded, (*path, "from"), rule.sources, types, report)
    types = {**_types_of(sources.values()), **overrides}
    target_types = dict(types)
    for name, values in maps.items():
        kind = types.get(name)
        if kind is None:
            report.add("M203", f"map names {{{name}}}, which `from` does not define", spans=(span(*path, "map"),), help=_names_help(types))
        elif kind.kind == "path":
            continue
        else:
            if kind.kind == "enum" and set(kind.values) != {str(k) for k in values}:
                missing = [v for v in kind.values if v not in {str(k) for k in values}]
                extra = [str(k) for k in values if str(k) not in kind.values]
                report.add(
                    "M114",
                    f"map of {{{name}}} must list every value: missing {missing}, unknown {extra}",
                    spans=(span(*path, "map", name),),
                )
            target_types[name] = CaptureType("enum", tuple(str(values[k]) for k in _in_order(kind, values)))
    targets = _parse_side(loaded, (*path, "to"), rule.targets, target_types, report)
    if len(report.diagnostics) > before:
        return None
    types.update({n: t for n, t in _types_of(targets.values()).items() if n not in types and n not in maps})
    if None not in sources:
        types[ROLE] = CaptureType("enum", tuple(str(r) for r in sources))
    elif None not in targets and targets:
        types[ROLE] = CaptureType("enum", tuple(str(r) for r in targets))
    compiled = CompiledRule(loaded, rule, path, sources, targets, types, maps)
    _check_captures(compiled, report)
    return compiled if len(report.diagnostics) == before else None


def _declared_plain(name: str, texts: Iterable[str]) -> bool:
    return any("{" + name + "}" in text for text in texts)


def _in_order(kind: CaptureType, values: Mapping[Any, Any]) -> list[Any]:
    if kind.kind == "enum":
        return [next(k for k in values if str(k) == v) for v in kind.values if v in {str(k) for k in values}]
    return list(values)


def _types_of(patterns: Iterable[Pattern]) -> dict[str, CaptureType]:
    types: dict[str, CaptureType] = {}
    for pattern in patterns:
        for name, kind in pattern.types.items():
            if kind.kind != "flat" and (name not in types or types[name].kind == "plain"):
                types[name] = kind
    return types


def _parse_side(
    loaded: LoadedFile, path: tuple[Any, ...], texts: Mapping[str | None, str], types: Mapping[str, CaptureType], report: Report
) -> dict[str | None, Pattern]:
    parsed: dict[str | None, Pattern] = {}
    known = dict(types)
    for role, text in texts.items():
        where = path if role is None else (*path, int(role) if isinstance(role, str) and role.isdigit() else role)
        pattern = _parse(loaded, where, text, known, report)
        if pattern is not None:
            parsed[role] = pattern
            known.update({n: t for n, t in pattern.types.items() if t.kind != "flat" and n not in known})
    return parsed


def _parse(loaded: LoadedFile, path: tuple[Any, ...], text: str, types: Mapping[str, CaptureType], report: Report) -> Pattern | None:
    try:
        return parse(text, types)
    except PatternError as error:
        whole = loaded.span(*path)
        # a quoted scalar's text begins one column after its span
        shift = 1 if whole.text[whole.column - 1 : whole.column] in ("'", '"') else 0
        place = Span(whole.file, whole.line, whole.column + shift + error.start, max(1, error.end - error.start), whole.text)
        report.add(error.code, error.message, spans=(place,), help=error.help)
        return None


def _names_help(types: Iterable[str]) -> str:
    names = ", ".join(f"{{{n}}}" for n in types)
    return f"defined here: {names}" if names else "`from` has no captures"


def _check_captures(compiled: CompiledRule, report: Report) -> None:
    """What is bound by `from`, consumed by `over` and produced by `into` must end as exactly the captures of `to`."""
    rule, path, span, types = compiled.rule, compiled.path, compiled.loaded.span, compiled.types
    bound = {name for p in compiled.sources.values() for name in p.captures}
    flat = {n for p in compiled.sources.values() for n, t in p.types.items() if t.kind == "flat"}
    for name in sorted(flat - {n for p in compiled.sources.values() for n, t in p.types.items() if t.kind == "path"}):
        report.add("M203", f"{{{name}:flat}} needs another role with {{{name}...}}", spans=(span(*path, "from"),))
    if None not in compiled.sources:
        bound.add(ROLE)
    dropped = False
    for number, step in enumerate(rule.via):
        place = span(*path, "via", number, step.op)
        if dropped:
            report.add("M204", "nothing is left after drop", spans=(place,), help="drop is the last op of its rule")
        op = ops.get(step.op)
        capture = _capture_of(step.args)
        if op.kind == "end":
            dropped = True
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
                    help=f"write {{{capture}:int}} or {{{capture}:first|second}} in `from`, or give it a map",
                )
            bound.discard(capture)
        elif op.kind == "part" and capture is not None:
            if capture in bound:
                report.add("M204", f"{step.op} into {{{capture}}}, which is bound already", spans=(place,))
            elif capture not in types:
                report.add("M203", f"{step.op} into {{{capture}}}, which `to` does not use", spans=(place,), help=_names_help(types))
            elif types[capture].kind not in ("int", "enum"):
                report.add(
                    "M205",
                    f"{step.op} into {{{capture}}}: a plain capture has no values to take",
                    spans=(place,),
                    help=f"write {{{capture}:int}} or {{{capture}:first|second}} in `to`",
                )
            bound.add(capture)
        for name in (step.args or {}).get("only") or {}:
            if name not in bound:
                report.add("M203", f"only names {{{name}}}, which is not bound here", spans=(place,), help=did_you_mean(name, sorted(bound)))
    for name in rule.where or {}:
        if not name.startswith("$") and name not in types:
            shape = " (`when` tests the tensor)" if name in ("dtype", "ndim") else ""
            report.add("M203", f"where names {{{name}}}, which is not a capture{shape}", spans=(span(*path, "where"),), help=_names_help(types))
    if dropped:
        return
    wanted = {name for p in compiled.targets.values() for name in p.captures}
    wanted |= {n for p in compiled.targets.values() for n, t in p.types.items() if t.kind == "flat"}
    if compiled.targets and None not in compiled.targets:
        wanted.add(ROLE)
    # a single target for several roles that stand beside each other would be written twice
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


def _capture_of(args: Mapping[str, Any] | None) -> str | None:
    args = args or {}
    return args.get("over") or args.get("into")


def _undo(values: Mapping[Any, Any], kind: CaptureType) -> Callable[[Any], Any]:
    if kind.kind == "path":
        backwards = {str(v): k for k, v in values.items() if v}
        return lambda path: replace_segments(backwards, path)
    table = {str(v): (int(k) if kind.kind == "int" else str(k)) for k, v in values.items()}
    return lambda value: table.get(str(value))


def _do(values: Mapping[Any, Any], kind: CaptureType) -> Callable[[Any], Any]:
    if kind.kind == "path":
        return lambda path: replace_segments(values, path)
    table = {(int(k) if kind.kind == "int" else str(k)): str(v) for k, v in values.items()}
    return lambda value: table.get(value)


def replace_segments(values: Mapping[str, str | None], path: str) -> str:
    """`path` with runs of whole segments replaced: leftmost, longest, once; None or "" removes the run."""
    if not path:
        return path
    segments = path.split(".")
    runs = sorted(((k.split("."), v) for k, v in values.items()), key=lambda run: -len(run[0]))
    out: list[str] = []
    at = 0
    while at < len(segments):
        for run, replacement in runs:
            if segments[at : at + len(run)] == run:
                if replacement:
                    out += replacement.split(".")
                at += len(run)
                break
        else:
            out.append(segments[at])
            at += 1
    return ".".join(out)


def is_active(compiled: CompiledRule, params: Mapping[str, Any]) -> bool:
    """Whether the rule's `where` on params holds; an unset optional param counts as not written."""
    for name, wanted in (compiled.rule.where or {}).items():
        if name.startswith("$") and params.get(name[1:]) is not None:
            value = params[name[1:]]
            allowed = wanted if isinstance(wanted, list) else [wanted]
            if str(value).lower() not in {str(a).lower() for a in allowed}:
                return False
    return True


def direct(compiled: CompiledRule, params: Mapping[str, Any], report: Report) -> DirectedRule | None:
    """The rule forwards with its params filled in; None after its problems were added to the report."""
    rule, path, types = compiled.rule, compiled.path, compiled.types
    steps = []
    for number, step in enumerate(rule.via):
        capture = _capture_of(step.args)
        values = list(types[capture].values) if capture in types and types[capture].kind == "enum" else None
        place = compiled.loaded.span(*path, "via", number, step.op)
        try:
            args = resolve(step.op, step.args, params, values)
        except OpError as error:
            report.add(error.code, error.message, spans=(place,), notes=error.notes, help=error.help)
            return None
        steps.append(CompiledStep(step.op, ops.get(step.op), args, capture, place))
    optional = rule.optional is True
    roles = frozenset(rule.optional) if isinstance(rule.optional, (list, tuple)) else frozenset()
    return DirectedRule(
        id=compiled.loaded.model.id,
        name=rule.name,
        file=str(compiled.loaded.path),
        span=compiled.loaded.span(*path, "name"),
        reads=tuple(Side(role, p.with_params(params)) for role, p in compiled.sources.items()),
        writes=tuple(
            Side(
                role,
                p.with_params(params),
                undo={n: _undo(v, types[n]) for n, v in compiled.maps.items()},
                do={n: _do(v, types[n]) for n, v in compiled.maps.items()},
            )
            for role, p in compiled.targets.items()
        ),
        steps=tuple(steps),
        types=types,
        where={n: _resolved(w, params) for n, w in (rule.where or {}).items() if not n.startswith("$")}
        | {n: v for n, v in _mapped_ints(compiled).items()},
        when=_when(rule, compiled.sources),
        optional=optional,
        optional_roles=roles,
        keep_source=bool(rule.keep_source),
        if_exists=rule.if_exists,
        backwards=False,
        why=next((s.args.why for s in steps if s.name == "drop"), ""),
    )


def _mapped_ints(compiled: CompiledRule) -> dict[str, Any]:
    """A mapped int capture takes exactly the numbers its map lists, beside what `where` says of it."""
    return {f"{n}\0map": [int(k) for k in v] for n, v in compiled.maps.items() if compiled.types[n].kind == "int"}


def _resolved(condition: Any, params: Mapping[str, Any]) -> Any:
    from .arguments import integer

    if isinstance(condition, str) and condition.startswith("$"):
        return params.get(condition[1:])
    if isinstance(condition, Mapping):
        return {k: integer(v, params) for k, v in condition.items()}
    return condition


def _when(rule: Rule, sources: Mapping[str | None, Pattern]) -> dict[str | None, dict[str, Any]]:
    when = rule.when
    if not when:
        return {}
    if None in sources:
        return {None: dict(when)}
    if set(when) <= {str(r) for r in sources}:
        return {role: dict(test) for role, test in when.items()}
    return {role: dict(when) for role in sources}
