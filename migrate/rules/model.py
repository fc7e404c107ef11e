"""Rule files as the author wrote them: pydantic models with a place for everything, and how they
are loaded.

All problems of all files come out in one report, each with the line it stands on. What follows from
one file alone is checked here and in `checks`; whether the captures of a rule add up is the
business of `compiled`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, InstanceOf, ValidationError, WithJsonSchema

from ..core.diagnostics import Report, printable
from ..ops._op import Step
from ..source import yaml
from . import steps
from .captures import ROLE
from .conditions import When, Where
from .examples import ExpectedTensor as ExpectedTensor
from .examples import GivenTensor as GivenTensor
from .examples import RuleTest
from .fields import (
    CAPTURE,
    COUNT,
    LINE,
    PATTERN,
    TEXT,
    Bool,
    Capture,
    Identifier,
    Int,
    Line,
    Model,
    Name,
    Pattern,
    Problem,
    Scalars,
    Text,
    count,
    fits,
    found,
    kind_of,
    line,
    lone_pattern,
    mapping,
    one_of,
    pattern,
    refuse,
    scalars,
    sequence,
    text,
    wrong,
)
from .files import LoadedFile as LoadedFile
from .places import ListPlace, Places, SidePath
from .requires import Requires, unmet


def _roles(value: Any) -> dict[str | None, str]:
    if isinstance(value, str):
        return {None: pattern(value)}
    if isinstance(value, Mapping) and None in value:
        return dict(value)
    if not value or not isinstance(value, (list, tuple, Mapping)):
        wrong(
            "M106",
            "a pattern, a list of patterns or a mapping from role to pattern is asked for, here "
            f"stands {kind_of(value)}",
        )
    roles = value.items() if isinstance(value, Mapping) else enumerate(value)
    bad = [
        Problem(
            "M106",
            f"a pattern is asked for, here stands {kind_of(p)}",
            'quote a pattern: "{p...}.weight"',
            (r,),
        )
        for r, p in roles
        if not isinstance(p, str) or yaml.is_null(p)
    ]
    if bad:
        refuse(bad)
    read = steps.each(value, pattern)
    return {str(r): p for r, p in (read.items() if isinstance(value, Mapping) else enumerate(read))}


def _translations(value: Any) -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    bad = []
    for word, to in mapping(value).items():
        if isinstance(to, (str, int)) or to is None:
            out[str(word)] = None if yaml.is_null(to) else str(to) or None
        else:
            bad.append(
                Problem(
                    "M106",
                    f"text or null is asked for, here stands {kind_of(to)}",
                    None,
                    (str(word),),
                )
            )
    if bad:
        refuse(bad)
    return out


def _keys(value: Any) -> tuple[str, ...]:
    keys = steps.each(sequence([value] if isinstance(value, str) else value), lone_pattern)
    return tuple(keys) or wrong("M114", "an empty list names no key")


def _choices(value: Any) -> tuple[Any, ...]:
    return tuple(yaml.exact(item) for item in scalars(sequence(value))) or wrong(
        "M114", "an empty list leaves no value to choose"
    )


def _optional(value: Any) -> bool | tuple[str, ...] | dict[str, tuple[str, ...]]:
    if isinstance(value, bool):
        return value
    if isinstance(value, yaml.Plain) and (truth := yaml.boolean(value)) is not None:
        return truth
    if isinstance(value, Mapping):
        bad = [
            Problem(
                "M114",
                f"`{printable(name)}` is not the name of a capture",
                "write it without braces",
                (name,),
                key=True,
            )
            for name in value
            if not fits(CAPTURE, name)
        ]
        if bad:
            refuse(bad)
        return {str(name): words for name, words in steps.each(value, _alternatives).items()}
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(role, str) and not yaml.is_null(role) for role in value
    ):
        hint = "roles in a list, or a capture with those of its alternatives"
        wrong(
            "M106",
            f"true, false, a list or a mapping is asked for, here stands {kind_of(value)}",
            hint,
        )
    return tuple(str(role) for role in value)


def _alternatives(value: Any) -> tuple[str, ...]:
    found = tuple(steps.each(sequence([value] if isinstance(value, str) else value), text))
    return found or wrong("M114", "an empty list names no alternative")


def _edge(value: Any) -> tuple[str, str]:
    names = [line(item) for item in sequence(value)]
    if len(names) != 2:
        wrong("M106", f"an edge is `[from, to]`, here are {len(names)} layouts")
    return names[0], names[1]


def _map(value: Any) -> dict[str, dict[str, str | None]]:
    hint = "remove it, or list its values"
    bad = [
        Problem(
            "M114",
            f"`{printable(name)}` is not the name of a capture",
            "write it without braces",
            (name,),
            key=True,
        )
        for name in mapping(value)
        if not fits(CAPTURE, name)
    ]
    bad += [
        Problem("M114", f"the map of {{{printable(name)}}} is empty", hint, (name,), key=True)
        for name, words in value.items()
        if isinstance(words, Mapping) and not words
    ]
    if bad:
        refuse(bad)
    return {str(name): words for name, words in steps.each(value, _translations).items()}


_EDGE = {"type": "array", "items": LINE, "minItems": 2, "maxItems": 2}
_SEVERAL = [*TEXT["type"], "array", "object"]
_ROLES = {
    **PATTERN,
    "type": _SEVERAL,
    "items": PATTERN,
    "minItems": 1,
    "additionalProperties": PATTERN,
    "minProperties": 1,
}
_MAP = {
    "type": "object",
    "propertyNames": {"pattern": CAPTURE["pattern"]},
    "additionalProperties": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": {"type": [*TEXT["type"], "null"]},
    },
}
_KEYS = {**PATTERN, "type": [*TEXT["type"], "array"], "items": PATTERN, "minItems": 1}
_CHOICES = {"type": "array", "items": TEXT, "minItems": 1}
Patch = Annotated[
    dict[str, Any],
    BeforeValidator(lambda value: yaml.core(mapping(value))),
    WithJsonSchema({"type": "object"}),
]
Roles = Annotated[dict[Any, Any], BeforeValidator(_roles), WithJsonSchema(_ROLES)]
_OPTIONAL = {
    "type": ["boolean", "array", "object"],
    "items": TEXT,
    "propertyNames": {"pattern": CAPTURE["pattern"]},
    "additionalProperties": {"type": [*TEXT["type"], "array"], "items": TEXT, "minItems": 1},
}
Sequence = BeforeValidator(sequence)


class Shape(Model):
    """Where a param's value stands in a tensor's shape, or in how many keys there are of a kind."""

    key: Annotated[tuple[str, ...], BeforeValidator(_keys), WithJsonSchema(_KEYS)] = Field(
        description="the key, or several that must agree", examples=["model.embed_tokens.weight"]
    )
    dim: Int = Field(
        0,
        description="which number of the shape; negative ones count from the end",
        examples=[0, -1],
    )
    count: Capture | None = Field(
        None,
        description="instead of `dim`: the capture of `key` whose different values are counted",
        examples=["r"],
    )


class Dtype(Model):
    """The tensors whose dtype is a param's value."""

    key: Annotated[tuple[str, ...], BeforeValidator(_keys), WithJsonSchema(_KEYS)] = Field(
        description="the key, or several that must agree", examples=["{p...}.weight_scale_inv"]
    )


class Groups(Model):
    """The values of a capture whose keys are numbered from 0 without a gap and alike: they give a
    list that no other source gives.
    """

    key: Annotated[str, BeforeValidator(lone_pattern), WithJsonSchema(PATTERN)] = Field(
        description="a pattern of keys that the rules read", examples=["{m...}.weight{i:int}"]
    )
    of: Capture = Field(description="the capture whose values the list holds", examples=["m"])
    over: Capture = Field(
        description="the int capture that numbers the keys of one value: 0, 1, …", examples=["i"]
    )
    ndim: Annotated[
        int | None,
        BeforeValidator(lambda value: value if value is None else count(value)),
        WithJsonSchema(COUNT),
    ] = Field(None, description="the number of axes that each of the tensors has", examples=[2])


class Param(Model):
    """A value that the rules need and the tensors' names do not tell."""

    type: Annotated[
        Literal["int", "bool", "str", "list"], BeforeValidator(one_of("int", "bool", "str", "list"))
    ] = Field(description="what kind of value it is")
    items: Annotated[Literal["int", "str"] | None, BeforeValidator(one_of("int", "str"))] = Field(
        None, description="of a list: what its items are"
    )
    title: Text | None = Field(
        None,
        description="what the value is, for the person who gives it",
        examples=["experts of each layer"],
    )
    minimum: Int | None = Field(
        None, description="the least value that it may have, or an item of it", examples=[1]
    )
    maximum: Int | None = Field(
        None, description="the greatest value that it may have, or an item of it", examples=[1024]
    )
    choices: Annotated[
        tuple[Any, ...] | None, BeforeValidator(_choices), WithJsonSchema(_CHOICES)
    ] = Field(None, description="the values it may have", examples=[["row", "column"]])
    config: Places | None = Field(
        None,
        description="[file.json#]key.path of a side file, config.json without a file; or several, "
        "and those that speak must agree",
        examples=["num_local_experts", ["num_attention_heads", "params.json#n_heads"]],
    )
    shape: Shape | None = Field(None, description="the place in a tensor's shape that says it")
    dtype: Dtype | None = Field(None, description="the tensors whose dtype it is")
    groups: Groups | None = Field(
        None,
        description="the numbered tensors that tell a list of names where no other source speaks",
    )
    default: Scalars = Field(None, description="used when no other source speaks", examples=[8])
    optional: Bool = Field(
        False,
        description="may be without a value; arguments that are exactly this param then count as "
        "not written",
    )

    @property
    def places(self) -> tuple[str, ...]:
        """Where the configuration says it."""
        return (self.config,) if isinstance(self.config, str) else self.config or ()

    @property
    def has_default(self) -> bool:
        return self.default is not None


class Rule(Model):
    """Which keys go in, what happens to the tensors, which keys come out."""

    name: Line = Field(
        description="unique in its file; plans and messages name it", examples=["gate-up"]
    )
    sources: Roles = Field(
        alias="from",
        description="which keys go in: a pattern, a list of patterns, or a mapping from role to "
        "pattern",
        examples=[
            "{p...}.experts.{e:int}.{w:w1|w3}.weight",
            {"weight": "{m...}.weight", "scale": "{m...}.weight_scale_inv"},
        ],
    )
    targets: Roles = Field(
        default_factory=dict,
        alias="to",
        description="which keys come out, written like `from`; left out where the rule ends in "
        "drop",
        examples=["{p}.experts.gate_up_proj"],
    )
    via: Annotated[
        tuple[Annotated[InstanceOf[Step], BeforeValidator(steps.step)], ...], Sequence
    ] = Field(
        (),
        description="what happens to the tensors: operations, top to bottom, each over all "
        "tensors of the rule",
        examples=[[{"stack": {"over": "e"}}, {"concat": {"over": "w", "dim": 1}}]],
    )
    map: Annotated[
        dict[str, dict[str, str | None]], BeforeValidator(_map), WithJsonSchema(_MAP)
    ] = Field(
        default_factory=dict,
        description="capture -> value in `from` -> value in `to`; null takes segments of a "
        "`{k...}` away",
        examples=[{"w": {"w1": "gate_proj", "w2": "down_proj"}}],
    )
    where: Where = Field(
        default_factory=dict,
        description="narrows the rule by captures and by $params",
        examples=[{"e": {"min": 0, "max": 7}, "w": ["w1", "w3"], "$tied": True}],
    )
    when: When = Field(
        default_factory=dict,
        description="narrows the rule by the tensor: dtype, ndim; or that for each role",
        examples=[
            {"dtype": ["bfloat16", "float16"], "ndim": 2},
            {"weight": {"dtype": "float8_e4m3fn"}},
        ],
    )
    optional: Annotated[
        bool | tuple[str, ...] | dict[str, tuple[str, ...]],
        BeforeValidator(_optional),
        WithJsonSchema(_OPTIONAL),
    ] = Field(
        False,
        description="true: may match nothing; a list: roles that may be missing; a mapping: "
        "capture -> alternatives that no key need have",
        examples=[True, ["bias"], {"leaf": ["bias"]}],
    )
    keep_source: Bool = Field(
        False, description="reads its keys and leaves them to the other rules"
    )
    if_exists: Annotated[Literal["error", "keep"], BeforeValidator(one_of("error", "keep"))] = (
        Field(
            "error",
            description="keep: targets that exist stay and the sources go, if they are equal to "
            "the bit",
        )
    )
    inverse: Annotated[Literal["skip"] | None, BeforeValidator(one_of("skip"))] = Field(
        None, description="skip: left out backwards"
    )

    @property
    def optional_roles(self) -> tuple[str, ...]:
        """The roles that may be missing."""
        if isinstance(self.optional, dict):
            return self.optional.get(ROLE, ())
        return self.optional if isinstance(self.optional, tuple) else ()


class RuleFile(Model):
    """One edge of a lineage, or a part of one."""

    id: Identifier = Field(
        description="stable identity; in plans, stamps and hashes",
        examples=["hf-mixtral/v5/fuse-experts"],
    )
    title: Text = Field(
        description="what the file does, in one line",
        examples=["Fuse the experts of a layer into two stacked weights"],
    )
    why: Text | None = Field(
        None,
        description="why the layout changed",
        examples=["transformers 5 keeps one parameter per projection instead of one per expert"],
    )
    lineage: Name = Field(
        description="the axis of change that the file belongs to", examples=["hf-mixtral"]
    )
    edge: Annotated[tuple[str, str], BeforeValidator(_edge), WithJsonSchema(_EDGE)] = Field(
        description="[from, to]: layouts of the lineage", examples=[["v4", "v5"]]
    )
    requires: Requires | None = Field(
        None,
        description="releases of migrate that may read the file; checked first",
        examples=[">=0.1"],
    )
    params: Annotated[dict[Name, Param], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="values that the rules need and the tensors' names do not tell; a rule says "
        "`$name`",
        examples=[
            {
                "num_experts": {
                    "type": "int",
                    "minimum": 1,
                    "config": "num_local_experts",
                    "optional": True,
                }
            }
        ],
    )
    keep: Annotated[tuple[Pattern, ...], Sequence] = Field(
        (),
        description="patterns of keys that stay as they are; what neither a rule nor one of these "
        "names is an error",
        examples=[["{p...}.self_attn.{k...}", "lm_head.weight"]],
    )
    files: Annotated[dict[SidePath, Patch], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="side file -> JSON merge patch, with `$param` where a value is one",
        examples=[{"config.json": {"quantization_config": None, "hidden_size": "$hidden"}}],
    )
    names: Annotated[tuple[ListPlace, ...], Sequence] = Field(
        (),
        description="[file.json#path]: lists of names in side files, renamed as keys are",
        examples=[["config.json#quantization_config.modules_to_not_convert"]],
    )
    rules: Annotated[tuple[Rule, ...], Sequence] = Field(
        (), description="what happens to the other keys; their order means nothing"
    )
    tests: Annotated[tuple[RuleTest, ...], Sequence] = Field(
        (), description="examples that must come out as written; `migrate test` runs them"
    )


def load_files(paths: Iterable[Path | str]) -> list[LoadedFile]:
    """The rule files at `paths`, in that order; raises all problems of all of them at once (M1xx,
    M508), exit status 2.
    """
    report = Report()
    loaded = read_files(paths, report)
    report.check()
    return loaded


def read_files(paths: Iterable[Path | str], report: Report) -> list[LoadedFile]:
    """Those of the rule files that can be read; the problems of all go into the report."""
    loaded = [
        file for path in paths if (file := _load(Path(path), yaml.read_file(path, report), report))
    ]
    _unique(loaded, report)
    return loaded


def load_text(text: str, name: str) -> LoadedFile:
    """The rule file in `text`, which messages call `name`."""
    report = Report()
    loaded = _load(Path(name), yaml.read(text, name, report), report)
    report.check()
    if loaded is None:
        raise ValueError(f"{name}: nothing was read and nothing was reported")
    return loaded


def validate(model: type[Model], document: yaml.Document, report: Report) -> Any:
    """`model` of the document's data, or None after its problems were added to the report with
    their places.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for path, problem in found(error, model):
            add(report, document, path, problem)
        return None


def add(
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


def _load(path: Path, document: yaml.Document, report: Report) -> LoadedFile | None:
    from .checks import check

    if not document.whole:
        return None
    if not isinstance(document.data, dict):
        add(
            report,
            document,
            (),
            Problem("M106", f"a rule file is a mapping, here stands {kind_of(document.data)}"),
        )
        return None
    if problem := unmet(document.data.get("requires")):
        add(report, document, ("requires",), problem)
        return None
    model = validate(RuleFile, document, report)
    if model is None:
        return None
    loaded = LoadedFile(path, model, document)
    check(loaded, report)
    return loaded


def _unique(loaded: list[LoadedFile], report: Report) -> None:
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
