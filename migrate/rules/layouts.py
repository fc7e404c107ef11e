"""`layouts.yaml`: the layouts of one lineage, in their order."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ..core.diagnostics import Report
from ..core.errors import PatternError
from ..core.keys import parse
from ..source import yaml
from .arguments import each
from .fields import (
    Bool,
    Line,
    Model,
    Name,
    Problem,
    Text,
    arithmetic,
    dtype,
    kind_of,
    mapping,
    one_of,
    refuse,
    sequence,
    text,
    unknown_dtype,
    wrong,
)
from .lineage import Detect, Layout, Lineage

STATUSES = ("current", "supported", "deprecated")


def _pattern(value: Any) -> str:
    written = text(value)
    try:
        parse(written)
    except PatternError as error:
        refuse([Problem(error.code, error.message, error.help, part=(error.start, error.end))])
    return written


def _patterns(value: Any) -> tuple[str, ...]:
    return tuple(each(sequence([value] if isinstance(value, str) else value), _pattern))


def _by_pattern(value: Any, read: Any) -> dict[str, tuple[Any, ...]]:
    bad = []
    for pattern in mapping(value):
        try:
            parse(pattern)
        except PatternError as error:
            bad.append(Problem(error.code, error.message, error.help, (pattern,), key=True))
    if bad:
        refuse(bad)
    return {pattern: tuple(each(_listed(item), read)) for pattern, item in each(value, lambda item: item).items()}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _dtype(value: Any) -> str:
    name = text(value)
    known = dtype(name)
    if known is None:
        refuse([unknown_dtype(name)])
    return known


def _count(value: Any) -> int:
    number = arithmetic(value)
    if not isinstance(number, int) or number < 0:
        wrong("M106", f"a number is asked for, here stands {kind_of(value)}")
    return number


def _dtypes(value: Any) -> dict[str, tuple[str, ...]]:
    return _by_pattern(value, _dtype)


def _counts(value: Any) -> dict[str, tuple[int, ...]]:
    return _by_pattern(value, _count)


def _config(value: Any) -> dict[str, tuple[Any, ...]]:
    return {str(dotted): tuple(_listed(yaml.core(item))) for dotted, item in mapping(value).items()}


_PATTERNS = {"type": ["string", "array"], "items": {"type": "string"}}
_WORDS = {"type": "object", "additionalProperties": _PATTERNS}
_NUMBERS = {"type": "object", "additionalProperties": {"type": ["integer", "array"], "items": {"type": "integer"}}}
Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns), WithJsonSchema(_PATTERNS)]
Counts = Annotated[dict[str, tuple[int, ...]], BeforeValidator(_counts), WithJsonSchema(_NUMBERS)]


class DetectFields(Model):
    """The signs by which a checkpoint shows that it is in the layout; all must hold."""

    present: Patterns = Field((), description="patterns of which each fits some key")
    absent: Patterns = Field((), description="patterns of which none fits any key")
    dtype: Annotated[dict[str, tuple[str, ...]], BeforeValidator(_dtypes), WithJsonSchema(_WORDS)] = Field(
        default_factory=dict, description="pattern -> dtypes, one of which some fitting key has"
    )
    ndim: Counts = Field(default_factory=dict, description="pattern -> number of axes that some fitting key has")
    config: Annotated[dict[str, tuple[Any, ...]], BeforeValidator(_config), WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, description="key.path in config.json -> value, or a list of possible ones"
    )
    module_version: Counts = Field(default_factory=dict, description="pattern of module names -> version in the file's _metadata")


class LayoutFields(Model):
    """One layout of a lineage."""

    title: Line
    detect: DetectFields | None = None
    status: Annotated[Literal["current", "supported", "deprecated"], BeforeValidator(one_of(*STATUSES))] = "supported"
    message: Text = Field("", description="of a deprecated layout: what to use instead, printed once by each plan")
    note: Text = Field("", description="what detection cannot tell")


class LayoutsFile(Model):
    """One independent axis of change and its layouts, the oldest first."""

    lineage: Name
    title: Line
    ordered: Bool = Field(True, description="true: releases, one after the other; false: spellings, any way goes")
    requires: Text | None = Field(None, description="of migrate; checked first")
    layouts: Annotated[dict[Line, LayoutFields], BeforeValidator(mapping)]


def load_layouts(path: Any, report: Report) -> Lineage | None:
    """The lineage that a `layouts.yaml` describes, without edges; None after its problems were added to the report."""
    from .model import add, validate
    from .requires import unmet

    document = yaml.read_file(path, report)
    if not document.whole:
        return None
    if isinstance(document.data, dict) and (problem := unmet(document.data.get("requires"))):
        add(report, document, ("requires",), problem)
        return None
    file = validate(LayoutsFile, document, report)
    if file is None:
        return None
    before = len(report.diagnostics)
    if not file.layouts:
        add(report, document, ("layouts",), Problem("M114", "a lineage has at least one layout"))
    for name in file.layouts:
        if not name or "@" in name or name[0] in "+-" or name == "latest":
            problem = Problem("M114", f"`{name}` cannot name a layout", "no `@`, no leading `+` or `-`, not `latest`", key=True)
            add(report, document, ("layouts", name), problem)
    if len(report.diagnostics) > before:
        return None
    layouts = tuple(_layout(name, fields) for name, fields in file.layouts.items())
    return Lineage(file.lineage, file.title, file.ordered, layouts)


def _layout(name: str, fields: LayoutFields) -> Layout:
    signs = fields.detect
    detect = None if signs is None else Detect(signs.present, signs.absent, signs.dtype, signs.ndim, signs.config, signs.module_version)
    return Layout(name, fields.title, detect, fields.status, fields.message, fields.note)
