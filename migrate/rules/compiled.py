"""A rule made ready to bind, both ways: patterns parsed, ops resolved, captures accounted for.

`compile_rule` checks the capture algebra of one rule (what is bound, consumed, produced) without
looking at any key and without needing params; `direct` fills the params in and answers with a
`DirectedRule` for one direction. Values of captures are always those of the `from` side: a `map` is
undone when a target pattern is read and done when one is written, so `over`, `only`, `sizes` and
`where` mean the same in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.errors import OpError, PatternError, Report, Span, did_you_mean, listed, printable
from ..core.keys import CaptureType, Pattern, parse
from ..ops.base import Op, OpCall, ValueOp
from .arguments import PARAM, is_reference, resolve, unset
from .arguments import ROLE as ROLE
from .conditions import resolve_conditions, written
from .exchanged_roles import check_exchange

if TYPE_CHECKING:
    from ..core.errors import Diagnostic
    from .files import LoadedFile
    from .model import Rule

# a value that a capture of type int can have
_NUMBER = re.compile("0|[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """One op with its arguments resolved. `capture` is what it consumes (join) or produces (part).

    `unset`: the arguments that count as not written because they are a param without a value, with
    how to give it.
    """

    name: str
    op: Op
    args: Any
    capture: str | None
    span: Span
    unset: Mapping[str, str] = field(default_factory=dict)

    def advice(self, help: str | None) -> str | None:
        """`help` of the op; where it asks for an argument that is written, as a param without a
        value, how to give that.
        """
        return next((how for word, how in self.unset.items() if help == f"write `{word}`"), help)

    @property
    def only(self) -> Mapping[str, list[Any]] | None:
        return getattr(self.args, "only", None)


@dataclass(frozen=True, slots=True)
class Side:
    """One pattern with its role; `undo` turns matched values into `from` values (None: no such
    value), `do` the way out.
    """

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
    steps: tuple[CompiledCall, ...]
    types: Mapping[str, CaptureType]
    where: Mapping[str, Any]
    when: Mapping[str | None, Mapping[str, Any]]
    optional: bool
    optional_roles: frozenset[str]
    # capture -> alternatives that no key need have
    optional_values: Mapping[str, frozenset[str]]
    keep_source: bool
    if_exists: str
    backwards: bool
    why: str
    # the params that the rule's patterns and `where` ask for, with their values
    params: Mapping[str, Any]
    # backwards of a `keep_source` rule: the forward rule, to see what it makes of restored keys
    forward: DirectedRule | None = None
    # what becomes of optimizer state of the rule's parameters: None (it follows), "drop", "zeros"
    optimizer: str | None = None
    # why there is no way back, where the rule says that there is none
    one_way: str = ""
    # whether what it drops is kept for the way back
    keeps: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} ({self.span})"


@dataclass(frozen=True, eq=False, slots=True)
class CompiledRule:
    """A rule whose patterns and capture algebra hold, before params are known. A `spare` one may
    match nothing, whatever it says.
    """

    loaded: LoadedFile
    rule: Rule
    path: tuple[Any, ...]
    sources: Mapping[str | None, Pattern]
    targets: Mapping[str | None, Pattern]
    types: Mapping[str, CaptureType]
    maps: Mapping[str, Mapping[Any, Any]]
    spare: bool = False

    def title(self, param: str) -> str:
        """The title of a param, as words in brackets that follow its name; "" without one."""
        declared = self.loaded.model.params.get(param)
        return f" ({declared.title})" if declared is not None and declared.title else ""


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


def compile_file_once(
    loaded: LoadedFile, report: Report
) -> tuple[list[CompiledRule], list[Pattern]]:
    """`compile_file`, once for each of the last files."""
    rules, keep, problems = _compile_file(loaded)
    report.diagnostics += problems
    return rules, keep


@lru_cache(maxsize=64)
def _compile_file(loaded: LoadedFile) -> tuple[list[CompiledRule], list[Pattern], list[Diagnostic]]:
    report = Report()
    return *compile_file(loaded, report), report.diagnostics


def compile_rule(
    loaded: LoadedFile, rule: Rule, path: tuple[Any, ...], report: Report
) -> CompiledRule | None:
    """The rule with its patterns parsed, or None after its problems were added to the report."""
    before = len(report.diagnostics)
    span = loaded.span
    maps: dict[str, Mapping[Any, Any]] = {
        name: dict(values) for name, values in (rule.map or {}).items()
    }
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
            report.add(
                "M203",
                f"map names {{{name}}}, which `from` does not define",
                spans=(span(*path, "map"),),
                help=_names_help(types),
            )
        elif kind.kind == "path":
            continue
        else:
            if kind.kind == "enum":
                values = _whole(loaded, (*path, "map", name), name, kind, values, report)
                maps = {**maps, name: values}
            if kind.kind == "int" and (
                unfit := [str(k) for k in values if not _NUMBER.fullmatch(str(k))]
            ):
                report.add(
                    "M114",
                    f"map of {{{name}}}, which is an int, has {listed(unfit)}",
                    spans=(span(*path, "map", name),),
                    help="its keys are decimal numbers without leading zeros",
                )
            target_types[name] = CaptureType(
                "enum", tuple(str(values[k]) for k in _in_order(kind, values))
            )
    targets = _parse_side(loaded, (*path, "to"), rule.targets, target_types, report)
    if len(report.diagnostics) > before:
        return None
    types.update(
        {n: t for n, t in _types_of(targets.values()).items() if n not in types and n not in maps}
    )
    if None not in sources:
        types[ROLE] = CaptureType("enum", tuple(str(r) for r in sources))
    elif None not in targets and targets:
        types[ROLE] = CaptureType("enum", tuple(str(r) for r in targets))
    compiled = CompiledRule(loaded, rule, path, sources, targets, types, maps)
    _check_captures(compiled, report)
    return compiled if len(report.diagnostics) == before else None


def _whole(
    loaded: LoadedFile,
    path: tuple[Any, ...],
    name: str,
    kind: CaptureType,
    values: Mapping[Any, Any],
    report: Report,
) -> dict[str, str]:
    """The map of a capture with alternatives, in their order; those it does not list stay."""
    listed_ = {str(word): str(to) for word, to in values.items()}
    for word in (w for w in listed_ if w not in kind.values):
        hint = (
            did_you_mean(word, list(kind.values)) or f"its values are {listed(list(kind.values))}"
        )
        place = loaded.key_span(*path, word)
        report.add(
            "M114", f"map: {{{name}}} is never {printable(word)!r}", spans=(place,), help=hint
        )
    whole = {value: listed_.get(value, value) for value in kind.values}
    for word, to in listed_.items():
        if to in whole and to not in listed_:
            report.add(
                "M114",
                f"map: {printable(word)!r} of {{{name}}} becomes {printable(to)!r}, and so does "
                f"{printable(to)!r}, which stays",
                spans=(loaded.span(*path, word),),
                help="each needs a value of its own, or nothing could distinguish them afterwards",
            )
    return whole


def _declared_plain(name: str, texts: Collection[str]) -> bool:
    return any("{" + name + "}" in text for text in texts) and not any(
        "{" + name + ":" in text for text in texts
    )


def _in_order(kind: CaptureType, values: Mapping[Any, Any]) -> list[Any]:
    if kind.kind == "enum":
        return [
            next(k for k in values if str(k) == v)
            for v in kind.values
            if v in {str(k) for k in values}
        ]
    return list(values)


def _types_of(patterns: Iterable[Pattern]) -> dict[str, CaptureType]:
    types: dict[str, CaptureType] = {}
    for pattern in patterns:
        for name, kind in pattern.types.items():
            if kind.kind != "flat" and (name not in types or types[name].kind == "plain"):
                types[name] = kind
    return types


def _parse_side(
    loaded: LoadedFile,
    path: tuple[Any, ...],
    texts: Mapping[str | None, str],
    types: Mapping[str, CaptureType],
    report: Report,
) -> dict[str | None, Pattern]:
    parsed: dict[str | None, Pattern] = {}
    known = dict(types)
    for role, text in texts.items():
        where = (
            path
            if role is None
            else (*path, int(role) if isinstance(role, str) and role.isdigit() else role)
        )
        pattern = _parse(loaded, where, text, known, report)
        if pattern is not None:
            parsed[role] = pattern
            known.update(
                {n: t for n, t in pattern.types.items() if t.kind != "flat" and n not in known}
            )
    return parsed


def _parse(
    loaded: LoadedFile,
    path: tuple[Any, ...],
    text: str,
    types: Mapping[str, CaptureType],
    report: Report,
) -> Pattern | None:
    try:
        return parse(text, types)
    except PatternError as error:
        whole = loaded.span(*path)
        # a quoted scalar's text begins one column after its span
        shift = 1 if whole.text[whole.column - 1 : whole.column] in ("'", '"') else 0
        place = Span(
            whole.file,
            whole.line,
            whole.column + shift + error.start,
            max(1, error.end - error.start),
            whole.text,
        )
        report.add(error.code, error.message, spans=(place,), help=error.help)
        return None


def _undo(values: Mapping[Any, Any], kind: CaptureType) -> Callable[[Any], Any]:
    if kind.kind == "path":
        return _segment_map({str(v): k for k, v in values.items() if v})
    table = {str(v): (int(k) if kind.kind == "int" else str(k)) for k, v in values.items()}
    return lambda value: table.get(str(value))


def _do(values: Mapping[Any, Any], kind: CaptureType) -> Callable[[Any], Any]:
    if kind.kind == "path":
        return _segment_map(values)
    table = {(int(k) if kind.kind == "int" else str(k)): str(v) for k, v in values.items()}
    return lambda value: table.get(value)


def _segment_map(values: Mapping[str, str | None]) -> Callable[[str], str]:
    """A function that replaces (None, "": removes) whole segments: leftmost, longest, once."""
    runs = sorted(
        ((k.split("."), v.split(".") if v else []) for k, v in values.items()),
        key=lambda run: -len(run[0]),
    )
    by_first: dict[str, list[tuple[list[str], list[str]]]] = {}
    for run in runs:
        by_first.setdefault(run[0][0], []).append(run)

    def replace(path: str) -> str:
        if not path:
            return path
        segments = path.split(".")
        out: list[str] = []
        at = 0
        while at < len(segments):
            for run, replacement in by_first.get(segments[at], ()):
                if segments[at : at + len(run)] == run:
                    out += replacement
                    at += len(run)
                    break
            else:
                out.append(segments[at])
                at += 1
        return ".".join(out)

    return lru_cache(maxsize=65536)(replace)


def _names_help(types: Iterable[str]) -> str:
    names = ", ".join(f"{{{n}}}" for n in types)
    return f"defined here: {names}" if names else "`from` has no captures"


def _check_captures(compiled: CompiledRule, report: Report) -> None:
    """What `from` binds, `over` consumes and `into` makes must end as just the captures of `to`."""
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
    dropped = exchanged = False
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
        capture = _capture_of(step.args)
        if op.kind == "end":
            dropped = True
        elif op.kind == "exchange" and isinstance(op, ValueOp):
            exchanged = True
            sides = {"from": compiled.sources, "to": compiled.targets}
            check_exchange(step, rule.via, sides, bound, place, report)
        elif isinstance(op, ValueOp) and op.roles(_codec_of(step.args)):
            _check_roles_of(compiled, step, op, bound, place, report)
        elif isinstance(op, ValueOp) and is_reference(_codec_of(step.args)):
            # which roles it takes or makes is known with the param
            (bound.discard if op.kind == "join" else bound.add)(ROLE)
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
                    help=_names_help(types),
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
    if rule.where:
        _check_where(compiled, report)
    if isinstance(rule.optional, dict):
        _check_optional(compiled, rule.optional, report)
    if dropped:
        return
    wanted = {name for p in compiled.targets.values() for name in p.captures}
    wanted |= {n for p in compiled.targets.values() for n, t in p.types.items() if t.kind == "flat"}
    if compiled.targets and None not in compiled.targets:
        wanted.add(ROLE)
    if (
        ROLE in bound & wanted
        and not exchanged
        and {str(r) for r in compiled.targets} != set(types[ROLE].values)
    ):
        report.add(
            "M203",
            f"the roles of `to` are {_roles(compiled.targets)}, those that arrive there are "
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
    step: OpCall,
    op: ValueOp,
    bound: set[str],
    place: Span,
    report: Report,
) -> None:
    """An op that takes or makes roles finds them in `from` or in `to`, under its own names."""
    codec, joins = _codec_of(step.args), op.kind == "join"
    roles = op.roles(codec)
    side, there = ("from", compiled.sources) if joins else ("to", compiled.targets)
    verb, least = "takes", roles[:1]
    if not joins:
        verb, least = "makes", tuple(r for r in roles if r not in op.may_lack(codec))
    odd = [str(r) for r in there if r not in roles]
    missing = [r for r in least if r not in there]
    if odd or missing:
        # those that would only be dropped need not be named
        spare = op.unused(codec) if codec and roles else ()
        roles = tuple(r for r in roles if r not in spare)
        report.add(
            "M203",
            f"{step.op} {verb} the roles {', '.join(roles)}; `{side}` has "
            f"{_roles(there) if None not in there else 'none'}",
            spans=(place,),
            help=f"write `{side}: {{{', '.join(f'{r}: …' for r in roles)}}}`",
        )
    if joins:
        bound.discard(ROLE)
    else:
        bound.add(ROLE)


def _check_named_codec(
    compiled: CompiledRule, op: ValueOp, args: Any, place: Span, report: Report
) -> None:
    """What is asked of a step whose codec a param names, now that it is known; OpError M308."""
    op.validate(args)
    call = OpCall(op.name, {"codec": args.codec})
    _check_roles_of(compiled, call, op, set(), place, report)


def _roles(patterns: Iterable[str | None]) -> str:
    return ", ".join(str(role) for role in patterns)


def _check_where(compiled: CompiledRule, report: Report) -> None:
    """`where` names captures of `from` with possible values, and limits only of numbers."""
    types, place = compiled.types, compiled.loaded.span(*compiled.path, "where")
    captures = {name for pattern in compiled.sources.values() for name in pattern.captures}
    for name, wanted in (compiled.rule.where or {}).items():
        if name.startswith("$"):
            continue
        if name not in captures:
            hint = (
                "`when` tests the tensor"
                if name in ("dtype", "ndim")
                else did_you_mean(name, sorted(captures)) or _names_help(captures)
            )
            report.add(
                "M203",
                f"where names {{{name}}}, which is not a capture of `from`",
                spans=(place,),
                help=hint,
            )
            continue
        values = wanted.get("not", ()) if isinstance(wanted, Mapping) else wanted
        _check_values("where", name, types[name], values, place, report)
        limits = ", ".join(n for n in wanted if n != "not") if isinstance(wanted, Mapping) else ""
        if limits and types[name].kind != "int":
            report.add(
                "M205",
                f"where limits {{{name}}} by {limits}, but it is not a number",
                spans=(place,),
                help=f"write {{{name}:int}} in `from`",
            )


def _check_optional(
    compiled: CompiledRule, alternatives: Mapping[str, Any], report: Report
) -> None:
    """M114 for alternatives that may be missing and that there are not."""
    for name, words in alternatives.items():
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


def _capture_of(args: Mapping[str, Any] | None) -> str | None:
    args = args or {}
    return args.get("over") or args.get("into")


def holds(asked: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    """Whether the params are what the names `$param` of the mapping ask for, a value or one of
    several; an unset optional param counts as not asked for.
    """
    for name, wanted in asked.items():
        if name.startswith("$") and (value := params.get(name[1:])) is not None:
            allowed = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            if not any(_same_value(value, a) for a in allowed):
                return False
    return True


def _same_value(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return str(value).lower() == str(wanted).lower()
    return str(value) == str(wanted)


def direct(
    compiled: CompiledRule, params: Mapping[str, Any], report: Report
) -> DirectedRule | None:
    """The rule forwards with its params filled in; None after its problems were reported."""
    rule, path, types = compiled.rule, compiled.path, compiled.types
    steps = []
    for number, step in enumerate(rule.via):
        capture = _capture_of(step.args)
        kind = types.get(capture) if capture is not None else None
        values = list(kind.values) if kind is not None and kind.kind == "enum" else None
        place = compiled.loaded.span(*path, "via", number, step.op)
        op = ops.get(step.op)
        try:
            args = resolve(step.op, step.args, params, values)
            # a `$param`, whose value is known by now
            if isinstance(op, ValueOp) and str(step.args.get("codec", ""))[:1] == "$":
                _check_named_codec(compiled, op, args, place, report)
        except OpError as error:
            report.add(
                error.code, error.message, spans=(place,), notes=error.notes, help=error.help
            )
            return None
        without = unset(step.args, params, compiled.title)
        steps.append(CompiledCall(step.op, op, args, capture, place, without))
    try:
        where = (
            resolve_conditions(rule.where or {}, types, compiled.maps, params)
            if rule.where or compiled.maps
            else {}
        )
    except OpError as error:
        report.add(
            error.code,
            error.message,
            spans=(compiled.loaded.span(*path, "where"),),
            help=error.help,
        )
        return None
    optional = compiled.spare or (bool(rule.optional) and rule.may_be_idle)
    patterns = [*compiled.sources.values(), *compiled.targets.values()]
    return DirectedRule(
        id=compiled.loaded.model.id,
        name=rule.name,
        file=str(compiled.loaded.path),
        span=compiled.loaded.span(*path, "name"),
        reads=tuple(
            Side(role, p.with_params(params) if p.params else p)
            for role, p in compiled.sources.items()
        ),
        writes=tuple(
            Side(
                role,
                p.with_params(params) if p.params else p,
                undo={n: _undo(v, types[n]) for n, v in compiled.maps.items()},
                do={n: _do(v, types[n]) for n, v in compiled.maps.items()},
            )
            for role, p in compiled.targets.items()
        ),
        steps=tuple(steps),
        types=types,
        where=where,
        when=_when(rule, compiled.sources) if rule.when else {},
        optional=optional,
        optional_roles=frozenset(rule.optional_roles),
        optional_values={n: frozenset(v) for n, v in rule.optional.items()}
        if isinstance(rule.optional, dict)
        else {},
        keep_source=bool(rule.keep_source),
        if_exists=rule.if_exists,
        optimizer=rule.optimizer,
        one_way=rule.inverse["refuse"] if isinstance(rule.inverse, Mapping) else "",
        keeps=rule.inverse == "keep",
        backwards=False,
        params={name: params.get(name) for name in _asked_for(compiled, patterns)}
        if rule.where or any(p.params for p in patterns)
        else {},
        why=next((why for s in steps if (why := getattr(s.args, "why", ""))), ""),
    )


def _asked_for(compiled: CompiledRule, patterns: Iterable[Pattern]) -> list[str]:
    names = [name for p in patterns for name in p.params]
    for name, condition in compiled.rule.where.items():
        names += [name[1:]] if name.startswith("$") else []
        names += [
            found
            for _, value in written(condition)
            if isinstance(value, str)
            for found in PARAM.findall(value)
        ]
    return list(dict.fromkeys(names))


def _when(rule: Rule, sources: Mapping[str | None, Pattern]) -> dict[str | None, dict[str, Any]]:
    when = rule.when
    if None in sources:
        return {None: dict(when)}
    if set(when) <= {str(r) for r in sources}:
        return {role: dict(test) for role, test in when.items()}
    return {role: dict(when) for role in sources}
