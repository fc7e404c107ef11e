"""Rule files and `layouts.yaml` read as their authors wrote them, and what can be said against one
that is well formed: names, params, presence. All problems come out in one report, with their lines.

The algebra of captures (`from` against `via` against `to`) is in `compiled`, with the patterns.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from .. import ops
from ..core.errors import PatternError, Report, did_you_mean, listed, printable
from ..core.keys import parse
from ..core.notation import parse_expression
from ..source import yaml
from . import arguments, examples, file_patches, steps
from .arguments import MOST, NULL, PARAM, PATCH_WORDS, whole_number
from .conditions import written
from .fields import (
    COUNT,
    DTYPE,
    PATTERN,
    TEXT,
    UNPRINTABLE,
    Bool,
    Line,
    Model,
    Name,
    Problem,
    Requires,
    SidePath,
    Text,
    count,
    each,
    fits,
    kind_of,
    lone_pattern,
    mapping,
    match_whole,
    one_of,
    one_or_list,
    problems_of,
    read_dtype,
    read_text,
    refuse,
    sequence,
    unmet,
    word,
    wrong,
)
from .files import LoadedFile
from .lineage import Detect, Layout, Lineage
from .model import Rule, RuleFile
from .param_model import Groups, Param
from .params import RefusedError, convert, never

# the lists of files that were loaded last, by places and bytes
_MOST_KEPT = 16
_unchanged: OrderedDict[Any, list[LoadedFile]] = OrderedDict()
_CAPTURE = re.compile(r"\{([^{}]*)\}")
_Path = tuple[Any, ...]


def load_files(paths: Iterable[Path | str]) -> list[LoadedFile]:
    """The rule files at `paths`, in that order; raises all problems of all of them at once (M1xx,
    M508), exit status 2.
    """
    report = Report()
    loaded = read_files(paths, report)
    report.check()
    return loaded


def load_files_once(paths: Iterable[Path | str]) -> list[LoadedFile]:
    """`load_files`, but files with the bytes that they had the last time are not parsed again: a
    training process attaches the same rules to module after module.
    """
    places = list(paths)
    content = _content(places)
    loaded = _unchanged.get(content)
    if content is None or loaded is None:
        loaded = [replace(file, sealed=file.hash) for file in load_files(places)]
        # what was written to in the meantime is not known
        if content is not None and content == _content(places):
            _unchanged[content] = loaded
            while len(_unchanged) > _MOST_KEPT:
                _unchanged.popitem(last=False)
    return list(loaded)


def _content(paths: Iterable[Path | str]) -> tuple[tuple[str, bytes], ...] | None:
    try:
        return tuple((str(path), Path(path).read_bytes()) for path in paths)
    except OSError:
        return None


def read_files(paths: Iterable[Path | str], report: Report) -> list[LoadedFile]:
    """Those of the rule files that can be read; the problems of all go into the report."""
    loaded = [
        file
        for path in paths
        if (file := load_document(Path(path), yaml.read_file(path, report), report))
    ]
    if len(loaded) > 1:
        check_ids(loaded, report)
    return loaded


def load_document(path: Path, document: yaml.Document, report: Report) -> LoadedFile | None:
    """The rule file that the document at `path` holds; None, after its problems were added to the
    report, if it cannot be read.
    """
    if not document.whole:
        return None
    if not isinstance(document.data, dict):
        add_problem(
            report,
            document,
            (),
            Problem("M106", f"a rule file is a mapping, not {kind_of(document.data)}"),
        )
        return None
    if problem := unmet(document.data.get("requires")):
        add_problem(report, document, ("requires",), problem)
        return None
    model = validate_data(RuleFile, document, report)
    if model is None:
        return None
    loaded = LoadedFile(path, model, document)
    _check(loaded, report)
    return loaded


def validate_data(model: type[Model], document: yaml.Document, report: Report) -> Any:
    """`model` of the document's data; None after its problems were reported with their places."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for path, problem in problems_of(error, model):
            add_problem(report, document, path, problem)
        return None


def add_problem(
    report: Report, document: yaml.Document, path: tuple[str | int, ...], problem: Problem
) -> None:
    """Adds the problem at `path` of the document."""
    span = document.key_span(path) if problem.key or problem.code == "M101" else document.span(path)
    if problem.part is not None:
        quoted = span.text[span.column - 1 : span.column] in ("'", '"')
        start, end = problem.part
        if end <= span.length - 2 * quoted:
            span = replace(span, column=span.column + quoted + start, length=max(1, end - start))
    report.add(problem.code, problem.message, spans=(span,), help=problem.help)


def check_ids(loaded: Iterable[LoadedFile], report: Report) -> None:
    """M508 for each two files that have one id."""
    first: dict[str, LoadedFile] = {}
    for file in loaded:
        other = first.setdefault(file.model.id, file)
        if other is not file:
            spans = (file.span("id"), replace(other.span("id"), label="first written here"))
            report.add(
                "M508",
                f"two rule files have the id `{printable(file.model.id)}`",
                spans=spans,
                help="give one of them another id",
            )


def _check(loaded: LoadedFile, report: Report) -> None:
    """Adds what is wrong with the file to the report (M1xx)."""
    file = loaded.model
    for problem in _problems(loaded):
        add_problem(report, loaded.document, problem.at, problem)
    known = list(file.params)
    for path, name in used_params(loaded):
        in_patches = PATCH_WORDS if path[0] in ("files", "files_back") else (NULL,)
        if name in in_patches and str(path[0]).startswith("files"):
            continue
        if name not in file.params:
            hint = did_you_mean(name, known) or f"declare it: `params: {{{name}: {{type: int}}}}`"
            add_problem(
                report,
                loaded.document,
                path,
                Problem("M112", f"`${name}` is not a param of this file", hint),
            )


def _problems(loaded: LoadedFile) -> Iterator[Problem]:
    file = loaded.model
    if file.edge[0] == file.edge[1]:
        yield Problem("M114", f"an edge from `{printable(file.edge[0])}` to itself", at=("edge",))
    yield from _repeated("rule", ("rules",), [rule.name for rule in file.rules])
    yield from _repeated("test", ("tests",), [test.name for test in file.tests])
    if file.tests:
        yield from examples.problems(file.tests, file.params)
    above = set[str]()
    for name, param in file.params.items():
        for text in param.follows or ():
            if unknown := [one for one in parse_expression(text).names if one not in above]:
                yield Problem(
                    "M114",
                    f"`{printable(text)}` needs `{printable(unknown[0])}`, which is no param above",
                    "declare the params that others follow first",
                    at=("params", name, "follows"),
                )
        above.add(name)
        if name in PATCH_WORDS:
            yield Problem(
                "M114",
                f"`${name}` has a meaning of its own in patches of side files",
                "give the param another name",
                at=("params", name),
                key=True,
            )
        yield from (problem.below("params", name) for problem in _param(param))
    for number, rule in enumerate(file.rules):
        yield from (problem.below("rules", number) for problem in _rule(rule))
        if rule.where and file.params:
            # such a rule would silently never run
            for name, why in never(rule.where, file.params, "`where`"):
                yield Problem("M114", why, at=("rules", number, "where", name))
    if file.files or file.files_back or file.files_restored:
        yield from file_patches.problems(file)


def _repeated(kind: str, path: _Path, names: list[str]) -> Iterator[Problem]:
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            yield Problem(
                "M113",
                f"two {kind}s are called `{printable(name)}`",
                "give each a name of its own",
                at=(*path, number, "name"),
            )
        seen.add(name)


def _param(param: Param) -> Iterator[Problem]:
    numbers = param.type == "int" or (param.type == "list" and param.items == "int")
    for bound in ("minimum", "maximum"):
        if getattr(param, bound) is not None and not numbers:
            yield Problem(
                "M114", f"`{bound}` is for integers, this is a {param.type}", key=True, at=(bound,)
            )
    if param.minimum is not None and param.maximum is not None and param.minimum > param.maximum:
        yield Problem("M114", "`maximum` is below `minimum`", at=("maximum",))
    if param.items is not None and param.type != "list":
        yield Problem(
            "M114", f"`items` is for lists, this is a {param.type}", key=True, at=("items",)
        )
    if param.modules and (param.type != "list" or param.items == "int"):
        yield Problem("M114", "`modules` is for lists of text", key=True, at=("modules",))
    if param.shape is not None and param.type != "int":
        yield Problem(
            "M114", f"a size in a shape is an int, this is a {param.type}", key=True, at=("shape",)
        )
    if param.dtype is not None and param.type != "str":
        yield Problem("M114", f"a dtype is a str, this is a {param.type}", key=True, at=("dtype",))
    if param.absent is not None and param.type != "bool":
        yield Problem(
            "M114",
            f"whether a tensor is absent is a bool, this is a {param.type}",
            key=True,
            at=("absent",),
        )
    if param.present is not None and param.type != "str":
        kind = f"which tensor is present is a str, this is a {param.type}"
        yield Problem("M114", kind, key=True, at=("present",))
    for key in param.shape.key if param.shape is not None else ():
        if param.shape is not None and param.shape.count not in (None, *parse(key).captures):
            yield Problem(
                "M114",
                f"`{printable(key)}` has no capture `{printable(str(param.shape.count))}`",
                at=("shape", "count"),
            )
    if param.shape is not None and {"dim", "count"} <= param.shape.model_fields_set:
        yield Problem(
            "M114",
            "`dim` and `count` both say what the value is",
            "remove one of them",
            key=True,
            at=("shape", "count"),
        )
    if param.groups is not None:
        yield from (problem.below("groups") for problem in _groups(param, param.groups))
    for field, value in [
        ("default", param.default),
        *(("choices", choice) for choice in param.choices or ()),
        *(("present", value) for value in param.present or ()),
    ]:
        if value is None:
            continue
        try:
            chosen = field == "choices"
            convert(value, param, is_text=chosen and param.type == "float", choices=not chosen)
        except RefusedError as error:
            yield Problem("M114", f"`{field}`: {error}", at=(field,))


def _groups(param: Param, groups: Groups) -> Iterator[Problem]:
    if param.type != "list" or param.items == "int":
        kind = f"a list of {param.items}" if param.items else f"a {param.type}"
        yield Problem("M114", f"`groups` tells names, this is {kind}", key=True)
    pattern = parse(groups.key)
    for field in ("of", "over"):
        if (name := getattr(groups, field)) not in pattern.captures:
            hint = did_you_mean(name, list(pattern.captures))
            yield Problem(
                "M114",
                f"`{printable(groups.key)}` has no capture `{printable(name)}`",
                hint,
                at=(field,),
            )
        elif field == "over" and pattern.types[name].kind != "int":
            yield Problem(
                "M114",
                f"`{printable(name)}` is not an int capture",
                f"write {{{name}:int}}",
                at=(field,),
            )
        elif field == "of" and pattern.types[name].kind == "int":
            yield Problem(
                "M114",
                f"`{printable(name)}` is a number, and a list of names is expected",
                at=(field,),
            )


def _rule(rule: Rule) -> Iterator[Problem]:
    kinds = [ops.get(step.op).kind for step in rule.via]
    if not rule.targets and "end" not in kinds:
        hint = "only a rule that ends in drop has no `to`: `via: [{drop: {why: …}}]`"
        yield Problem("M101", f"rule `{printable(rule.name)}` has no `to`", hint)
    if rule.targets and "end" in kinds:
        yield Problem(
            "M114",
            "a rule that drops its keys has no `to`",
            "remove `to`, or remove the drop",
            key=True,
            at=("to",),
        )
    if rule.keep_source and "end" in kinds:
        yield Problem(
            "M114",
            "a rule cannot drop its keys and keep them",
            "remove `keep_source`",
            key=True,
            at=("keep_source",),
        )
    if rule.keep_source and isinstance(rule.inverse, Mapping):
        yield Problem(
            "M114",
            "backwards a rule that keeps its sources removes what it made, and needs no inverse",
            "remove `inverse`, or write `inverse: skip` to let it stay",
            key=True,
            at=("inverse",),
        )
    if isinstance(rule.optional, tuple):
        for number, role in enumerate(rule.optional):
            if role is not True and role not in rule.sources:
                roles = [str(r) for r in rule.sources if r is not None]
                hint = did_you_mean(role, roles) or (
                    f"the roles are {listed(roles)}" if roles else "write `optional: true`"
                )
                yield Problem(
                    "M114", f"`from` has no role `{printable(role)}`", hint, at=("optional", number)
                )
    if rule.when:
        yield from _when(rule)
    for name, words in rule.map.items():
        yield from _map(rule, name, words)
    for number, step in enumerate(rule.via):
        if problem := steps.fixed_problem(step.op, step.args):
            yield problem.below("via", number)


def _when(rule: Rule) -> Iterator[Problem]:
    if not any(isinstance(test, Mapping) for test in rule.when.values()):
        return
    roles = [str(r) for r in rule.sources if r is not None]
    for role in rule.when:
        if role not in roles:
            hint = did_you_mean(role, roles) or (
                f"the roles are {listed(roles)}" if roles else "write `when: {dtype: …}`"
            )
            yield Problem(
                "M114", f"`from` has no role `{printable(role)}`", hint, key=True, at=("when", role)
            )


def _map(rule: Rule, name: str, words: Mapping[str, str | None]) -> Iterator[Problem]:
    path = ("map", name)
    segments = any(
        f"{{{name}...}}" in pattern for pattern in (*rule.sources.values(), *rule.targets.values())
    )
    seen: dict[str, str] = {}
    for value, to in words.items():
        if not to and segments:
            continue
        if not to:
            hint = f"null removes segments of a `{{{name}...}}`; any other capture needs a value"
            yield Problem(
                "M114",
                f"value `{printable(value)}` of {{{printable(name)}}} is mapped to nothing",
                hint,
                at=(*path, value),
            )
        elif to in seen:
            message = (
                f"values `{printable(seen[to])}` and `{printable(value)}` of "
                f"{{{printable(name)}}} both become `{printable(to)}`"
            )
            yield Problem(
                "M114",
                message,
                "each needs a value of its own, or nothing could distinguish them afterwards",
                at=(*path, value),
            )
        else:
            seen[to] = value


def used_params(loaded: LoadedFile) -> Iterator[tuple[_Path, str]]:
    """(path, name) of each `$param` in the file."""
    file = loaded.model
    for number, rule in enumerate(file.rules):
        at: _Path = ("rules", number)
        for side, patterns in (("from", rule.sources), ("to", rule.targets)):
            for role, pattern in patterns.items():
                path = (*at, side) if role is None else (*at, side, role)
                path = path if path in loaded.document or role is None else (*at, side, int(role))
                for body in _CAPTURE.findall(pattern):
                    yield from ((path, name) for name in PARAM.findall(body))
        for name, condition in rule.where.items():
            if name.startswith("$"):
                yield (*at, "where", name), name[1:]
            for limit, value in written(condition):
                path = (*at, "where", name) if limit is None else (*at, "where", name, limit)
                yield from ((path, found) for found in _names(value))
        for index, step in enumerate(rule.via):
            yield from (
                ((*at, "via", index, step.op, *path), name)
                for path, name in arguments.used(step.op, step.args)
            )
    if file.files or file.files_back or file.files_restored:
        yield from file_patches.references(file)


def _names(value: Any) -> list[str]:
    return PARAM.findall(value) if isinstance(value, str) else []


STATUSES = ("current", "supported", "deprecated")


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(each(sequence([value] if isinstance(value, str) else value), lone_pattern))


def _by_pattern(value: Any, read: Any) -> dict[str, tuple[Any, ...]]:
    return _read_by_pattern(value, lambda item: tuple(each(_some(item), read)))


def _read_by_pattern(value: Any, read: Any) -> dict[str, Any]:
    bad = []
    for pattern in mapping(value):
        try:
            parse(pattern)
        except PatternError as error:
            bad.append(Problem(error.code, error.message, error.help, (pattern,), key=True))
    if bad:
        refuse(bad)
    return {str(pattern): items for pattern, items in each(value, read).items()}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _some(value: Any) -> list[Any]:
    return _listed(value) or wrong(
        "M114", "an empty list, which nothing matches", "list the values, or remove the condition"
    )


def _dtypes(value: Any) -> dict[str, tuple[str, ...]]:
    return _by_pattern(value, read_dtype)


def _counts(value: Any) -> dict[str, tuple[int, ...]]:
    return _by_pattern(value, count)


def _shapes(value: Any) -> dict[str, tuple[int | str | None, ...]]:
    return _read_by_pattern(value, lambda item: tuple(each(sequence(item), _axis)))


def _axis(value: Any) -> int | str | None:
    if yaml.is_null(value):
        return None
    if whole_number(value) is not None:
        return count(value)
    if not isinstance(value, str):
        wrong("M106", f"a size, a name, `$key.path` or null is expected, not {kind_of(value)}")
    name = word(value)
    if not fits(_AXIS, name):
        wrong(
            "M114",
            f"`{printable(name)}` is not an axis of a shape",
            "a size, null for any, `$key.path` in config.json, or a name",
        )
    return name


def _config(value: Any) -> dict[str, tuple[Any, ...]]:
    return {str(dotted): tuple(_listed(yaml.core(item))) for dotted, item in mapping(value).items()}


def _releases(value: Any) -> str:
    written = read_text(value)
    if not re.fullmatch(_RELEASES, written):
        wrong(
            "M114",
            f"`{printable(written)}` names no releases",
            "such as `2.0 to 2.17` or `2.18 and later`",
        )
    return written


def _layouts(value: Any) -> Any:
    names = mapping(value)
    if not names:
        wrong("M114", "a lineage has at least one layout")
    hint = "no `@`, no leading `+` or `-`, not `latest`"
    bad = [
        Problem("M114", f"`{printable(n)}` cannot name a layout", hint, (n,), key=True)
        for n in names
        if not _NAME.fullmatch(n)
    ]
    if bad:
        refuse(bad)
    return names


# what stands behind the `@` of `--to`
_NAME = re.compile(rf"(?!latest$)[^-+@{UNPRINTABLE}][^@{UNPRINTABLE}]*")
_RELEASES = r"[0-9]{1,3}\.[0-9]{1,3}( to [0-9]{1,3}\.[0-9]{1,3}| and later)"
_PATTERNS = {**PATTERN, "type": [*TEXT["type"], "array"], "items": PATTERN}
_BY_PATTERN = {
    "type": "object",
    "propertyNames": {name: PATTERN[name] for name in ("pattern", "maxLength")},
}
_WORDS = {**_BY_PATTERN, "additionalProperties": one_or_list(DTYPE)}
_NUMBERS = {**_BY_PATTERN, "additionalProperties": one_or_list(COUNT)}
# one axis of a shape
_AXIS = {"type": ["integer", "string", "null"], "minimum": 0, "maximum": MOST,
         "pattern": match_whole(rf"[A-Za-z_][A-Za-z0-9_]*|\$[^.#{UNPRINTABLE}]+(?:\.[^.#{UNPRINTABLE}]+)*")}  # fmt: skip  # noqa: E501
_SHAPES = {**_BY_PATTERN, "additionalProperties": {"type": "array", "items": _AXIS}}
Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns), WithJsonSchema(_PATTERNS)]
Counts = Annotated[dict[str, tuple[int, ...]], BeforeValidator(_counts), WithJsonSchema(_NUMBERS)]


class DetectFields(Model):
    """The signs by which a checkpoint shows that it is in the layout; all must hold."""

    present: Patterns = Field(
        (),
        description="patterns of which each fits some key",
        examples=["{p...}.experts.{e:int}.w1.weight"],
    )
    absent: Patterns = Field(
        (),
        description="patterns of which none fits any key",
        examples=["{p...}.experts.gate_up_proj"],
    )
    dtype: Annotated[
        dict[str, tuple[str, ...]], BeforeValidator(_dtypes), WithJsonSchema(_WORDS)
    ] = Field(
        default_factory=dict,
        description="pattern -> dtypes, one of which some fitting key has",
        examples=[{"{p...}.weight": "float8_e4m3fn"}],
    )
    ndim: Counts = Field(
        default_factory=dict,
        description="pattern -> number of axes that some fitting key has",
        examples=[{"{m...}.weight": 3}],
    )
    shape: Annotated[
        dict[str, tuple[int | str | None, ...]], BeforeValidator(_shapes), WithJsonSchema(_SHAPES)
    ] = Field(
        default_factory=dict,
        description="pattern -> shape that some fitting key has: sizes, null for any, $key.path "
        "in config.json, names for equal sizes",
        examples=[{"{p...}.experts.gate_up_proj": ["experts", "$hidden_size", None]}],
    )
    config: Annotated[
        dict[str, tuple[Any, ...]], BeforeValidator(_config), WithJsonSchema({"type": "object"})
    ] = Field(
        default_factory=dict,
        description="key.path in config.json -> value, or a list of possible ones; or under `not` "
        "those that it must not have",
        examples=[{"model_type": "mixtral"}],
    )
    configured: Bool = Field(
        False, description="there has to be a config.json; without it the layout is another"
    )
    module_version: Counts = Field(
        default_factory=dict,
        description="pattern of module names -> version in the file's _metadata",
        examples=[{"{m...}.norm": 2}],
    )
    extra_state: Annotated[
        str,
        BeforeValidator(_releases),
        WithJsonSchema({"type": "string", "pattern": match_whole(_RELEASES)}),
    ] = Field(
        "",
        description="releases of Transformer Engine; the latest that can have written all extra "
        "states is one of them",
        examples=["2.0 to 2.17"],
    )
    unless: DetectFields | None = Field(
        None,
        description="signs of something else: where all of these hold, the layout does not",
        examples=[{"config": {"model_type": "deepseek_v3"}}],
    )


def _made(value: Any) -> Any:
    """An object, or several that are merged in order."""
    found = tuple(each(value, _made)) if isinstance(value, (list, tuple)) else None
    return yaml.core(mapping(value)) if found is None else found or wrong("M114", "nothing is made")


_OBJECTS = {"type": ["object", "array"], "items": {"type": "object"}, "minItems": 1}
Made = Annotated[Any, BeforeValidator(_made), WithJsonSchema(_OBJECTS)]


class LayoutFields(Model):
    """One layout of a lineage."""

    title: Line = Field(
        description="what the layout is, in one line",
        examples=["one weight per projection, all experts stacked"],
    )
    detect: DetectFields | None = Field(
        None,
        description="how a checkpoint is recognised; without it the caller has to name the layout",
    )
    status: Annotated[
        Literal["current", "supported", "deprecated"], BeforeValidator(one_of(*STATUSES))
    ] = Field("supported", description="deprecated: each plan that touches it prints the message")
    message: Text = Field(
        "",
        description="of a deprecated layout: what to use instead, printed once by each plan",
        examples=["use v5"],
    )
    note: Text = Field(
        "",
        description="what detection cannot tell",
        examples=["some checkpoints of v1 pass for v2"],
    )
    files: Annotated[dict[SidePath, Made], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="side file -> the JSON object that is written where a checkpoint comes into "
        "the layout without the file, or several that are merged in order; `$param`, `$null` and "
        "conditions as in `files` of a rule file",
        examples=[{"config.json": {"model_type": "llama", "hidden_size": "$hidden_size"}}],
    )


class LayoutsFile(Model):
    """One independent axis of change and its layouts, the oldest first."""

    lineage: Name = Field(
        description="the name of the axis; that of the folder", examples=["hf-mixtral"]
    )
    title: Line = Field(
        description="the axis of change, in one line",
        examples=["Experts of Mixtral in transformers"],
    )
    ordered: Bool = Field(
        True, description="true: releases, one after the other; false: spellings, any way goes"
    )
    requires: Requires | None = Field(
        None,
        description="releases of migrate that may read the file; checked first",
        examples=[">=0.1"],
    )
    layouts: Annotated[dict[Line, LayoutFields], BeforeValidator(_layouts)] = Field(
        json_schema_extra={
            "minProperties": 1,
            "propertyNames": {"pattern": match_whole(_NAME.pattern)},
        },
        description="name -> layout, the oldest first",
        examples=[{"v1": {"title": "one weight per expert", "detect": {"present": "{k...}.w1"}}}],
    )
    params: Annotated[dict[Name, Param], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="values of which the `files` of layouts are made: read from the tensors that "
        "come out, from side files, and from params of the edge's rule files that have the same "
        "name",
        examples=[{"hidden_size": {"type": "int", "shape": {"key": "model.norm.weight"}}}],
    )


def load_layouts(path: Any, report: Report) -> Lineage | None:
    """The lineage that a `layouts.yaml` describes, without edges; None if problems were found."""
    document = yaml.read_file(path, report)
    if not document.whole:
        return None
    if isinstance(document.data, dict) and (problem := unmet(document.data.get("requires"))):
        add_problem(report, document, ("requires",), problem)
        return None
    file = validate_data(LayoutsFile, document, report)
    if file is None:
        return None
    problems = [
        *(p.below("params", name) for name, param in file.params.items() for p in _param(param)),
        *(
            problem
            for name, fields in file.layouts.items()
            for problem in file_patches.made_problems(
                fields.files, file.params, ("layouts", name, "files")
            )
        ),
    ]
    for problem in problems:
        add_problem(report, document, problem.at, problem)
    if problems:
        return None
    layouts = tuple(_layout(name, fields, file.params) for name, fields in file.layouts.items())
    return Lineage(file.lineage, file.title, file.ordered, layouts)


def _layout(name: str, fields: LayoutFields, params: Mapping[str, Param]) -> Layout:
    detect, used = _signs(fields.detect), file_patches.made_params(fields.files)
    return Layout(
        name,
        fields.title,
        detect,
        fields.status,
        fields.message,
        fields.note,
        fields.files,
        {name: param for name, param in params.items() if name in used},
    )


def _signs(signs: DetectFields | None) -> Detect | None:
    if signs is None:
        return None
    return Detect(
        signs.present,
        signs.absent,
        signs.dtype,
        signs.ndim,
        signs.config,
        signs.module_version,
        signs.extra_state,
        signs.shape,
        _signs(signs.unless),
        signs.configured,
    )
