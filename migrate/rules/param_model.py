"""A param as rule files and `layouts.yaml` declare it: its kind, and where its value comes from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ..source import yaml
from .fields import (
    ARITHMETIC,
    COUNT,
    PATTERN,
    TEXT,
    Bool,
    Capture,
    Int,
    Model,
    Places,
    Scalars,
    Text,
    ValuePlaces,
    arithmetic,
    count,
    each,
    kind_of,
    lone_pattern,
    mapping,
    one_of,
    read_text,
    scalars,
    sequence,
    wrong,
)


def _keys(value: Any) -> tuple[str, ...]:
    keys = each(sequence([value] if isinstance(value, str) else value), lone_pattern)
    return tuple(keys) or wrong("M114", "an empty list names no key")


def _choices(value: Any) -> tuple[Any, ...]:
    return tuple(yaml.exact(item) for item in scalars(sequence(value))) or wrong(
        "M114", "an empty list leaves no value to choose"
    )


def _present(value: Any) -> dict[str, tuple[str, ...]]:
    found = {read_text(word): keys for word, keys in each(mapping(value), _keys).items()}
    return found or wrong("M114", "an empty mapping says nothing")


def _follows(value: Any) -> tuple[str, ...]:
    several = sequence([value] if isinstance(value, str) else value)
    for written in several:
        if not isinstance(written, str) or "$" not in written:
            wrong("M106", f"`$param` or arithmetic over params is expected, not {kind_of(written)}")
    return tuple(str(text) for text in each(several, arithmetic)) or wrong(
        "M114", "an empty list says nothing"
    )


_KEYS = {**PATTERN, "type": [*TEXT["type"], "array"], "items": PATTERN, "minItems": 1}
_CHOICES = {"type": "array", "items": TEXT, "minItems": 1}
_PRESENT = {"type": "object", "additionalProperties": _KEYS, "minProperties": 1}
_FORMULA = {"type": "string", **{k: ARITHMETIC[k] for k in ("pattern", "maxLength")}}
_FOLLOWS = {"type": ["string", "array"], "items": _FORMULA, "minItems": 1}


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
    sum: Capture | None = Field(
        None,
        description="the capture of `key` over whose values the sizes are added up",
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
        Literal["int", "float", "bool", "str", "list"],
        BeforeValidator(one_of("int", "float", "bool", "str", "list")),
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
        "and those that speak must agree; `*` stands for every name or item",
        examples=["num_local_experts", ["num_attention_heads", "params.json#n_heads"]],
    )
    value: ValuePlaces | None = Field(
        None,
        description="key.path of a value beside the tensors, from the root of the file on: keys of "
        "dicts, fields of an `argparse.Namespace`; or several, and those that speak must agree",
        examples=["args.num_attention_heads", ["args.num_experts", "args.moe_num_experts"]],
    )
    shape: Shape | None = Field(None, description="the place in a tensor's shape that says it")
    dtype: Dtype | None = Field(None, description="the tensors whose dtype it is")
    absent: Annotated[tuple[str, ...] | None, BeforeValidator(_keys), WithJsonSchema(_KEYS)] = (
        Field(
            None,
            description="of a bool: the key of a tensor, or several; it is true where there is "
            "none, false where there is one",
            examples=["output.weight"],
        )
    )
    present: Annotated[
        dict[str, tuple[str, ...]] | None, BeforeValidator(_present), WithJsonSchema(_PRESENT)
    ] = Field(
        None,
        description="of a text: value -> the key of a tensor, or several; it is the value of which "
        "there is a tensor",
        examples=[{"split": "{p...}.q_proj.weight", "fused": "{p...}.qkv_proj.weight"}],
    )
    groups: Groups | None = Field(
        None,
        description="the numbered tensors that tell a list of names where no other source speaks",
    )
    follows: Annotated[
        tuple[str, ...] | None, BeforeValidator(_follows), WithJsonSchema(_FOLLOWS)
    ] = Field(
        None,
        description="a param above, or arithmetic over several, that it is made of where no other "
        "source speaks, and where one of them is given another value; of a list the first whose "
        "params all have a value",
        examples=["$tp", ["$rows * $was", "$vocab + (0 - $vocab) % (128 * $tp)"]],
    )
    default: Scalars = Field(None, description="used when no other source speaks", examples=[8])
    free: Bool = Field(
        False,
        description="on a way back, and on an edge from a layout to itself, a person may give "
        "another value than the stamp or the checkpoint says",
    )
    modules: Bool = Field(
        False,
        description="of a list of text: these are modules, and select in `where` as the library "
        "reads them that wrote config.json, by `re:` or `*`",
    )
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
    def value_places(self) -> tuple[str, ...]:
        """Where the values of the checkpoint say it."""
        return (self.value,) if isinstance(self.value, str) else self.value or ()

    @property
    def has_default(self) -> bool:
        return self.default is not None
