"""What the author of a rule file wrote, as pydantic models, and the hash of what it means.

Problems of the text are found field by field, each with the place where it stands; what follows
from a whole file is checked in `loading`, whether the captures of a rule add up in `compiled`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, InstanceOf, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import did_you_mean, printable
from ..ops.base import OpCall
from ..source import yaml
from . import steps
from .arguments import ROLE, all_arguments
from .examples import ExpectedTensor as ExpectedTensor
from .examples import GivenTensor as GivenTensor
from .examples import RuleTest
from .fields import (
    ARITHMETIC,
    CAPTURE,
    LINE,
    PATTERN,
    REASON,
    SCALARS,
    TEXT,
    Bool,
    Identifier,
    Line,
    ListPlace,
    Model,
    Name,
    Pattern,
    Requires,
    SidePath,
    Text,
    arithmetic,
    each,
    fits,
    kind_of,
    line,
    mapping,
    match_whole,
    one_of,
    pattern,
    read_text,
    refuse,
    refused,
    sequence,
    wrong,
)
from .param_model import Param
from .problem import Problem
from .tensor_conditions import When


def _roles(value: Any) -> dict[str | None, str]:
    if isinstance(value, str):
        return {None: pattern(value)}
    if isinstance(value, Mapping) and None in value:
        return dict(value)
    if not value or not isinstance(value, (list, tuple, Mapping)):
        wrong(
            "M106",
            "a pattern, a list of patterns or a mapping from role to pattern is expected, "
            f"not {kind_of(value)}",
        )
    roles = value.items() if isinstance(value, Mapping) else enumerate(value)
    bad = [
        Problem(
            "M106",
            f"a pattern is expected, not {kind_of(p)}",
            'quote a pattern: "{p...}.weight"',
            (r,),
        )
        for r, p in roles
        if not isinstance(p, str) or yaml.is_null(p)
    ]
    if bad:
        refuse(bad)
    read = each(value, pattern)
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
                    f"text or null is expected, not {kind_of(to)}",
                    None,
                    (str(word),),
                )
            )
    if bad:
        refuse(bad)
    return out


def _not_captures(names: Iterable[Any]) -> list[Problem]:
    return [
        Problem(
            "M114",
            f"`{printable(name)}` is not the name of a capture",
            "write it without braces",
            (name,),
            key=True,
        )
        for name in names
        if not fits(CAPTURE, name)
    ]


def _optimizer(value: Any) -> str:
    if isinstance(value, Mapping) and [*value] == ["missing"]:
        return one_of("zeros")(value["missing"])
    if isinstance(value, Mapping):
        wrong("M106", "`drop` or `missing: zeros` is expected")
    return one_of("drop")(value)


def _reason(value: Any) -> str:
    said = line(value)
    return said if said.strip(" ") else wrong("M114", "an empty text is no reason")


def _inverse(value: Any) -> str | dict[str, str]:
    if not isinstance(value, Mapping):
        return one_of("skip", "keep")(value)
    if [*value] != ["refuse"]:
        wrong(
            "M106",
            "`skip`, `keep` or `{refuse: why}` is expected",
            "quote the reason" if "refuse" in value else None,
        )
    read: dict[str, str] = each(value, _reason)
    return read


def _optional(value: Any) -> bool | tuple[str | bool, ...] | dict[str, tuple[str, ...]]:
    if isinstance(value, bool):
        return value
    if isinstance(value, yaml.PlainScalar) and (truth := yaml.boolean(value)) is not None:
        return truth
    if isinstance(value, Mapping):
        if bad := _not_captures(value):
            refuse(bad)
        return {str(name): words for name, words in each(value, _alternatives).items()}
    if not isinstance(value, (list, tuple)) or not all(
        role is True or (isinstance(role, str) and not yaml.is_null(role)) for role in value
    ):
        hint = "roles in a list, or a capture with those of its alternatives"
        wrong(
            "M106",
            f"true, false, a list or a mapping is expected, not {kind_of(value)}",
            hint,
        )
    return tuple(_is_true(role) or str(role) for role in value)


def _is_true(word: Any) -> bool:
    """Whether an item of a list is `true`, and not a role of that name in quotes."""
    return word is True or (isinstance(word, yaml.PlainScalar) and yaml.boolean(word) is True)


def _alternatives(value: Any) -> tuple[str, ...]:
    found = tuple(each(sequence([value] if isinstance(value, str) else value), read_text))
    return found or wrong("M114", "an empty list names no alternative")


def _edge(value: Any) -> tuple[str, str]:
    names = [line(item) for item in sequence(value)]
    if len(names) != 2:
        wrong("M106", f"an edge is `[from, to]`, not {len(names)} layouts")
    return names[0], names[1]


def _map(value: Any) -> dict[str, dict[str, str | None]]:
    hint = "remove it, or list its values"
    bad = _not_captures(mapping(value))
    bad += [
        Problem("M114", f"the map of {{{printable(name)}}} is empty", hint, (name,), key=True)
        for name, words in value.items()
        if isinstance(words, Mapping) and not words
    ]
    if bad:
        refuse(bad)
    return {str(name): words for name, words in each(value, _translations).items()}


def _patch(value: Any) -> Any:
    """One merge patch, several that are done in order, or None: the file goes."""
    if yaml.is_null(value):
        return None
    if not isinstance(value, (list, tuple)):
        return yaml.core(mapping(value))
    found = tuple(each(value, lambda item: yaml.core(mapping(item))))
    return found or wrong("M114", "an empty list changes nothing", "write a patch, or remove it")


def _values(value: Any) -> Any:
    """A patch of values, which never go as a whole."""
    if yaml.is_null(value):
        wrong("M106", "an object is expected, or a list of such")
    return _patch(value)


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
_PATCH = {"type": ["object", "array", "null"], "items": {"type": "object"}, "minItems": 1}
Patch = Annotated[Any, BeforeValidator(_patch), WithJsonSchema(_PATCH)]
_VALUES = {"type": ["object", "array"], "items": {"type": "object"}, "minItems": 1}
ValuesPatch = Annotated[Any, BeforeValidator(_values), WithJsonSchema(_VALUES)]
Roles = Annotated[dict[Any, Any], BeforeValidator(_roles), WithJsonSchema(_ROLES)]
_OPTIMIZER = {
    "type": ["string", "object"],
    "enum": ["drop", {"missing": "zeros"}],
}
_INVERSE = {
    "type": ["string", "object"],
    "if": {"type": "object"},
    "then": {
        "properties": {
            "refuse": {
                "description": "why nothing leads back; ends the message of a downgrade",
                "examples": ["the library reads it by metadata that no rule writes"],
                **REASON,
            }
        },
        "required": ["refuse"],
        "additionalProperties": False,
    },
    "else": {"enum": ["skip", "keep"]},
}
_OPTIONAL = {
    "type": ["boolean", "array", "object"],
    "items": TEXT,
    "propertyNames": {"pattern": CAPTURE["pattern"]},
    "additionalProperties": {"type": [*TEXT["type"], "array"], "items": TEXT, "minItems": 1},
}
Sequence = BeforeValidator(sequence)


# what `where` asks of captures and params, and `when` of the tensor
_LIMITS: dict[str, dict[str, Any]] = {
    "min": {"description": "the least value of an int capture", **ARITHMETIC},
    "max": {"description": "the greatest value of an int capture", **ARITHMETIC, "minimum": 0},
    "multiple_of": {
        "description": "the values that are multiples of this",
        **ARITHMETIC,
        "minimum": 1,
    },
    "remainder": {
        "description": "with `multiple_of`: what is left over instead of 0",
        **ARITHMETIC,
        "minimum": 0,
    },
}
_BUT = {
    "description": "the values, or a list of modules, that are left out",
    "examples": ["$ignored", ["lm_head"]],
    **SCALARS,
    "minItems": 1,
}
_CONDITION = {"pattern": match_whole(r"\$?[A-Za-z_][A-Za-z0-9_]*")}


def _read_where(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    bad: list[Problem] = []
    for name, condition in mapping(value).items():
        if not fits(_CONDITION, name):
            hint = "the name of a capture, or `$param`"
            bad.append(
                Problem(
                    "M114",
                    f"`{printable(name)}` is nothing that `where` can ask for",
                    hint,
                    (name,),
                    key=True,
                )
            )
        elif name.startswith("$"):
            out[name] = _read_values(condition, (name,), bad, yaml.exact)
        elif isinstance(condition, Mapping):
            out[name] = _read_limits(condition, name, bad)
        else:
            out[name] = _read_values(condition, (name,), bad, _capture_value)
    if bad:
        refuse(bad)
    return out


def _read_values(condition: Any, at: tuple[str, ...], bad: list[Problem], read: Any) -> Any:
    items = condition if isinstance(condition, (list, tuple)) else [condition]
    if not items:
        bad.append(
            Problem(
                "M114",
                "an empty list, which nothing matches",
                "list the values, or remove the condition",
                at,
            )
        )
    for item in items:
        if yaml.is_null(item) or isinstance(item, (list, tuple, Mapping)):
            bad.append(
                Problem(
                    "M106",
                    f"a value or a list of values is expected, not {kind_of(item)}",
                    None,
                    at,
                )
            )
            return None
    return (
        [read(item) for item in items] if isinstance(condition, (list, tuple)) else read(condition)
    )


def _capture_value(item: Any) -> Any:
    typed = yaml.exact(item)
    return typed if isinstance(typed, int) and not isinstance(typed, bool) else str(item)


def _read_limits(condition: Mapping[str, Any], name: str, bad: list[Problem]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for limit, number in condition.items():
        if limit == "not":
            out[limit] = _read_values(number, (name, limit), bad, _capture_value)
            continue
        if limit not in _LIMITS:
            hint = (
                did_you_mean(limit, [*_LIMITS, "not"])
                or "the fields here are min, max, multiple_of, remainder, not"
            )
            bad.append(
                Problem(
                    "M103",
                    f"there is no field `{printable(limit)}` here",
                    hint,
                    (name, limit),
                    key=True,
                )
            )
            continue
        try:
            out[limit] = asked = arithmetic(number)
        except PydanticCustomError as error:
            bad += [p._replace(at=(name, limit)) for p in refused(error)]
            continue
        if isinstance(asked, int) and asked < (least := _LIMITS[limit]["minimum"]):
            bad.append(
                Problem(
                    "M114",
                    f"`{limit}` is {asked}, it must be at least {least}",
                    None,
                    (name, limit),
                )
            )
    if "remainder" in condition and "multiple_of" not in condition:
        bad.append(Problem("M101", "`remainder` needs `multiple_of`", None, (name,)))
    return out


_WHERE = {
    "type": "object",
    "propertyNames": _CONDITION,
    "patternProperties": {r"^\$": {**SCALARS, "minItems": 1}},
    "additionalProperties": {
        "type": [*TEXT["type"], "array", "object"],
        "items": TEXT,
        "minItems": 1,
        "properties": {**_LIMITS, "not": _BUT},
        "dependentRequired": {"remainder": ["multiple_of"]},
        "additionalProperties": False,
    },
}
Where = Annotated[dict[str, Any], BeforeValidator(_read_where), WithJsonSchema(_WHERE)]


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
        tuple[Annotated[InstanceOf[OpCall], BeforeValidator(steps.step)], ...], Sequence
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
        description="narrows the rule by the tensor: dtype, ndim, shape; or that for each role",
        examples=[
            {"dtype": ["bfloat16", "float16"], "ndim": 2},
            {"weight": {"dtype": "float8_e4m3fn"}},
        ],
    )
    optional: Annotated[
        bool | tuple[str | Literal[True], ...] | dict[str, tuple[str, ...]],
        BeforeValidator(_optional),
        WithJsonSchema(_OPTIONAL),
    ] = Field(
        False,
        description="true: may match nothing; a list: roles that may be missing, and true if the "
        "rule may match nothing; a mapping: capture -> alternatives that no key need have",
        examples=[True, ["bias"], [True, "zero"], {"leaf": ["bias"]}],
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
    inverse: Annotated[Any, BeforeValidator(_inverse), WithJsonSchema(_INVERSE)] = Field(
        None,
        description="skip: left out backwards; keep: that too, and what the rule drops goes with "
        "the output and is put back; `refuse` and why: nothing leads back, though each op has an "
        "inverse",
        examples=[
            "skip",
            "keep",
            {"refuse": "the library reads it by metadata that no rule writes"},
        ],
    )
    optimizer: Annotated[
        Literal["drop", "zeros"] | None, BeforeValidator(_optimizer), WithJsonSchema(_OPTIMIZER)
    ] = Field(
        None,
        description="what becomes of optimizer state of the rule's parameters, which otherwise "
        "follows them. drop: it is left out; `missing: zeros`: where some parameters of a group "
        "have state, it is 0 for the others",
        examples=["drop", {"missing": "zeros"}],
    )

    guessed: Bool = Field(
        False,
        description="names alone decided the rule: a made file says so until values were compared",
    )

    @property
    def skipped_back(self) -> bool:
        """Whether it is left out backwards."""
        return self.inverse in ("skip", "keep")

    @property
    def optional_roles(self) -> tuple[str, ...]:
        """The roles that may be missing."""
        if isinstance(self.optional, dict):
            return self.optional.get(ROLE, ())
        roles = self.optional if isinstance(self.optional, tuple) else ()
        return tuple(role for role in roles if role is not True)

    @property
    def may_be_idle(self) -> bool:
        """Whether the rule may match nothing."""
        return self.optional is True or (isinstance(self.optional, tuple) and True in self.optional)


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
    supersedes: Identifier | None = Field(
        None,
        description="the id of a rule file of the same edge that never worked: this one is used in "
        "its place, but to undo what it did",
        examples=["hf-mixtral/v5/fuse-expert"],
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
    guessed: Annotated[tuple[Pattern, ...], Sequence] = Field(
        (),
        description="those patterns of `keep` that names alone decided: a made file says so until "
        "values were compared",
        examples=[["lm_head.weight"]],
    )
    files: Annotated[dict[SidePath, Patch], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="side file -> JSON merge patch, with `$param`, `$plain_modules` or "
        "`$encoded_modules` where a value is one, and `$null` where it is null; an object with a "
        "name `$param` is written where the param is what stands there; several patches, done in "
        "order; or null: the file goes",
        examples=[{"config.json": {"quantization_config": None, "hidden_size": "$hidden"}}],
    )
    files_back: Annotated[dict[SidePath, Patch], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="the same for the way back, where no stamp says what stood in the file",
        examples=[{"config.json": {"quantization_config": {"quant_method": "fp8"}}}],
    )
    files_restored: Annotated[dict[SidePath, Patch], BeforeValidator(mapping)] = Field(
        default_factory=dict,
        description="side file -> JSON merge patch for the way back where a stamp restored the "
        "file: what is written otherwise than it was. Of a place that is not there nothing is "
        "made; `*` is every name of an object",
        examples=[{"config.json": {"quantization_config": {"bnb_4bit_use_double_quant": False}}}],
    )
    values: ValuesPatch = Field(
        default_factory=dict,
        description="JSON merge patch of the values beside the model in a .pt file, such as the "
        "fields of `args`, as those under `files`; `torch.bfloat16` is the dtype",
        examples=[{"args": {"rotary_base": 500000, "params_dtype": "torch.bfloat16"}}],
    )
    values_back: ValuesPatch = Field(
        default_factory=dict,
        description="the same for the way back, where no stamp says what the values were",
        examples=[{"args": {"rotary_base": 10000}}],
    )
    names: Annotated[tuple[ListPlace, ...], Sequence] = Field(
        (),
        description="[file.json#path]: lists of names in side files, or objects, renamed as keys "
        "are; `*` stands for every name or item",
        examples=[["config.json#quantization_config.modules_to_not_convert"]],
    )
    rules: Annotated[tuple[Rule, ...], Sequence] = Field(
        (), description="what happens to the other keys; their order means nothing"
    )
    tests: Annotated[tuple[RuleTest, ...], Sequence] = Field(
        (), description="examples that must come out as written; `migrate test` runs them"
    )


# The hash is over the parsed rules, not the bytes: a comment, a formatter, a moved file or a better
# title must not make every checkpoint look as if it had been migrated by something else. What is
# left out is prose and tests; what is written as its default counts as not written. So
# is `files_back`: with a stamp it does nothing, so it can be added to rules that were applied.
_PROSE = {"title", "why", "tests", "requires", "guessed"}
# what a rule file does where there is no stamp
_WITHOUT_STAMP = {"files_back", "values_back"}


def semantic_hash(file: RuleFile) -> str:
    """`m1:` and the sha256 of the file's meaning; equal for files that do the same under one id."""
    text = json.dumps(
        meaning(file), ensure_ascii=True, sort_keys=True, separators=(",", ":"), allow_nan=True
    )
    return f"m1:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def meaning(value: Any) -> Any:
    """`value` as JSON data without prose and without what stands at its default.

    The order of rules and of `keep` means nothing and is taken out; that of roles and of a `map`
    (it can be the order of a capture's values) means something, so both become lists of pairs.
    """
    if isinstance(value, RuleFile):
        out = _fields(value)
        out["rules"] = [meaning(rule) for rule in sorted(value.rules, key=lambda rule: rule.name)]
        out["keep"] = sorted(set(value.keep))
        return out
    if isinstance(value, Rule):
        out = _fields(value)
        out["from"], out["to"] = _pairs(value.sources), _pairs(value.targets)
        out["map"] = {name: _pairs(words) for name, words in value.map.items()}
        if isinstance(value.inverse, Mapping):
            out["inverse"] = "refuse"
        return out
    if isinstance(value, BaseModel):
        return _fields(value)
    if isinstance(value, OpCall):
        defaults = {a.word: a.default for a in all_arguments(value.op, value.args)}
        return [
            value.op,
            {
                w: meaning(item)
                for w, item in value.args.items()
                if w != "why" and item != defaults.get(w, MISSING)
            },
        ]
    if isinstance(value, Mapping):
        return {str(key): meaning(item) for key, item in value.items()}
    return [meaning(item) for item in value] if isinstance(value, (list, tuple)) else value


def _fields(value: BaseModel) -> dict[str, Any]:
    written = {
        (field.alias or name): (getattr(value, name), field)
        for name, field in type(value).model_fields.items()
    }
    return {
        word: meaning(item)
        for word, (item, field) in written.items()
        if word not in _PROSE | _WITHOUT_STAMP
        and item != field.get_default(call_default_factory=True)
    }


def _pairs(mapping: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, value] for key, value in mapping.items()]
