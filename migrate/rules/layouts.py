"""`layouts.yaml` read as its author wrote it: the layouts of a lineage, the signs by which each is
recognised, what its side files are made of, and how its files are cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ..core.errors import PatternError, Report, did_you_mean, listed, printable
from ..core.keys import parse
from ..source import yaml
from . import file_patches
from .arguments import MOST, whole_number
from .fields import (
    COUNT,
    DTYPE,
    NAMED,
    PATTERN,
    TEXT,
    UNPRINTABLE,
    Bool,
    Line,
    Model,
    Name,
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
    plain_name,
    read_dtype,
    read_text,
    refuse,
    sequence,
    unmet,
    word,
    wrong,
)
from .files import VALUES
from .lineage import Detect, Layout, LayoutGrid, Lineage
from .loading import add_problem, param_problems, validate_data
from .param_model import Param
from .problem import Problem

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


# what a layout may be written as
FORMATS = ("safetensors", "torch", "dcp")
# tables of coordinates, each a module of `formats`; their axes; what is said of uneven stages
TABLES, AXES = ("megatron",), ("TP", "PP", "VPP", "EP")
STAGES = ("first", "last", "layout")


def _only(*words: str) -> Callable[[Any], Any]:
    """A mapping with no other names than these."""

    def check(value: Any) -> Any:
        names = mapping(value)
        bad = [
            Problem(
                "M114",
                f"`{printable(name)}` is not one of {listed(list(words))}",
                did_you_mean(str(name), list(words)),
                (name,),
                key=True,
            )
            for name in names
            if name not in words
        ]
        if bad:
            refuse(bad)
        return names

    return check


class GridFields(Model):
    """How checkpoints in the layout are cut for a grid of processes."""

    table: Annotated[str, BeforeValidator(one_of(*TABLES)), WithJsonSchema({"enum": [*TABLES]})] = (
        Field(description="whose names parts and keys have")
    )
    axes: Annotated[dict[str, Name], BeforeValidator(_only(*AXES))] = Field(
        json_schema_extra={"propertyNames": {"enum": [*AXES]}},
        description="axis of the table -> the param that says how many parts there are along it; "
        "where nothing says it, as many as were read, else one",
        examples=[{"TP": "tp", "PP": "pp"}],
    )
    stages: Annotated[dict[str, Name], BeforeValidator(_only(*STAGES))] = Field(
        default_factory=dict,
        json_schema_extra={"propertyNames": {"enum": [*STAGES]}},
        description="the params of uneven stages: layers of the `first` and of the `last` one, or "
        "the `layout` of all as text",
        examples=[{"first": "first_layers", "last": "last_layers"}],
    )


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
    values: Made = Field(
        default_factory=dict,
        description="the values beside the model, each of which is written where a checkpoint "
        "comes into the layout without it, as the objects of `files`; a dict `args` is a Namespace "
        "of argparse, `torch.bfloat16` the dtype, and tensors stand in a dict `model` behind them",
        examples=[{"args": {"num_layers": "$layers"}, "checkpoint_version": 3.0}],
    )
    format: Annotated[
        str, BeforeValidator(one_of(*FORMATS)), WithJsonSchema({"enum": [*FORMATS]})
    ] = Field(
        "",
        description="what a folder that comes into the layout is written as, where neither the "
        "caller nor the name of the output says it",
        examples=["safetensors"],
    )
    grid: GridFields | None = Field(
        None,
        description="how the files of the layout are cut for a grid of processes, in a format that "
        "has such parts",
        examples=[{"table": "megatron", "axes": {"TP": "tp", "PP": "pp"}}],
    )


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: tuple(each(sequence(value), plain_name))),
    WithJsonSchema({"type": "array", "items": NAMED}),
]


class LayoutsFile(Model):
    """One independent axis of change and its layouts, the oldest first."""

    lineage: Name = Field(
        description="the name of the axis; that of the folder", examples=["hf-mixtral"]
    )
    title: Line = Field(
        description="the axis of change, in one line",
        examples=["Experts of Mixtral in transformers"],
    )
    aliases: Names = Field(
        (),
        description="other names of the lineage, which a goal or a start may have",
        examples=[["hf-solar-open"]],
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
        description="values of which the `files` of layouts are made, and sizes of their grids: "
        "read from the tensors that come out, from side files, and from params of the edge's rule "
        "files that have the same name",
        examples=[{"hidden_size": {"type": "int", "shape": {"key": "model.norm.weight"}}}],
    )


def load_layouts(path: Any, report: Report) -> Lineage | None:
    """The lineage that a `layouts.yaml` describes, without edges; None if problems were found."""
    return read_layouts(yaml.read_file(path, report), report)


def read_layouts(document: yaml.Document, report: Report) -> Lineage | None:
    """`load_layouts` of what was read already."""
    if not document.whole:
        return None
    if isinstance(document.data, dict) and (problem := unmet(document.data.get("requires"))):
        add_problem(report, document, ("requires",), problem)
        return None
    file = validate_data(LayoutsFile, document, report)
    if file is None:
        return None
    problems = [
        *(
            p.below("params", name)
            for name, param in file.params.items()
            for p in param_problems(param)
        ),
        *(
            problem
            for name, fields in file.layouts.items()
            for problem in file_patches.made_problems(
                fields.files, file.params, ("layouts", name, "files")
            )
        ),
        *(
            problem
            for name, fields in file.layouts.items()
            for problem in file_patches.made_problems(
                fields.values, file.params, ("layouts", name, "values")
            )
        ),
        *(
            problem.below("layouts", name, "grid")
            for name, fields in file.layouts.items()
            if fields.grid is not None
            for problem in _grid_problems(fields.grid, file.params)
        ),
    ]
    for problem in problems:
        add_problem(report, document, problem.at, problem)
    if problems:
        return None
    layouts = tuple(_layout(name, fields, file.params) for name, fields in file.layouts.items())
    return Lineage(file.lineage, file.title, file.ordered, layouts, aliases=file.aliases)


def _grid_problems(grid: GridFields, params: Mapping[str, Param]) -> Iterator[Problem]:
    """M112 for params that are not declared, M114 for those that can be no such number or text."""
    for field, named in (("axes", grid.axes), ("stages", grid.stages)):
        for what, name in named.items():
            wanted = "str" if what == "layout" else "int"
            if name not in params:
                yield Problem(
                    "M112",
                    f"`{printable(name)}` is not a param of this file",
                    did_you_mean(name, list(params)) or "declare it under `params`",
                    (field, what),
                )
            elif params[name].type != wanted:
                yield Problem(
                    "M114",
                    f"`{printable(name)}` is of type {params[name].type}, and this is of {wanted}",
                    at=(field, what),
                )


def _layout(name: str, fields: LayoutFields, params: Mapping[str, Param]) -> Layout:
    files = {**fields.files, VALUES: fields.values} if fields.values else fields.files
    detect, used = _signs(fields.detect), file_patches.made_params(files)
    grid = None
    if fields.grid is not None:
        grid = LayoutGrid(fields.grid.table, fields.grid.axes, fields.grid.stages)
        used |= {*grid.params}
    return Layout(
        name,
        fields.title,
        detect,
        fields.status,
        fields.message,
        fields.note,
        files,
        {name: param for name, param in params.items() if name in used},
        fields.format,
        grid,
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
