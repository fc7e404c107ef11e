"""What `when` asks of a tensor, as people write it: dtype, number of axes, and their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import did_you_mean, printable
from ..source import yaml
from .fields import (
    COUNT,
    DTYPE,
    count,
    dtype,
    each,
    kind_of,
    mapping,
    one_or_list,
    refuse,
    refused,
    sequence,
    unknown_dtype,
    wrong,
)
from .problem import Problem


def _read_when(value: Any) -> dict[str, Any]:
    """`{dtype: [...], ndim: [...], shape: [...]}`, or that for each role; always as lists."""
    value = mapping(value)
    bad: list[Problem] = []
    if value and all(isinstance(test, Mapping) for test in value.values()):
        out: dict[str, Any] = {role: _read_test(test, (role,), bad) for role, test in value.items()}
    else:
        out = _read_test(value, (), bad)
    if bad:
        refuse(bad)
    return out


def _read_test(
    test: Mapping[str, Any], at: tuple[str, ...], bad: list[Problem]
) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for name, written in test.items():
        items = list(written) if isinstance(written, (list, tuple)) else [written]
        if name in ("dtype", "ndim") and not items:
            bad.append(
                Problem(
                    "M114",
                    "an empty list, which nothing matches",
                    "list the values, or remove the condition",
                    (*at, name),
                )
            )
        if name == "dtype":
            out[name] = [dtype(str(item)) or str(item) for item in items]
            bad += [
                unknown_dtype(str(item), (*at, name))
                for item in items
                if not isinstance(item, str) or dtype(item) is None
            ]
        elif name == "ndim":
            try:
                out[name] = [count(item) for item in items]
            except PydanticCustomError:
                message = f"a number of axes or a list of them is expected, not {kind_of(written)}"
                bad.append(Problem("M106", message, None, (*at, name)))
        elif name == "shape":
            try:
                out[name] = each(sequence(written), _axis)
            except PydanticCustomError as error:
                bad += [p._replace(at=(*at, name, *p.at)) for p in refused(error)]
        else:
            hint = (
                did_you_mean(name, ["dtype", "ndim", "shape"])
                or "`when` tests the tensor: dtype, ndim, shape; `where` tests captures and params"
            )
            bad.append(
                Problem(
                    "M103",
                    f"there is no field `{printable(name)}` here",
                    hint,
                    (*at, name),
                    key=True,
                )
            )
    return out


def _axis(value: Any) -> Any:
    """A length, None for any, or `{min: length}`."""
    if yaml.is_null(value):
        return None
    if isinstance(value, Mapping):
        if set(value) != {"min"}:
            wrong("M114", "a length, null for any, or `{min: length}` is expected")
        return {"min": count(value["min"])}
    return count(value)


_TEST = {
    "type": "object",
    "properties": {
        "dtype": {
            "description": "a dtype or several, one of which the tensor has",
            **one_or_list(DTYPE),
        },
        "ndim": {
            "description": "a number of axes or several, one of which the tensor has",
            **one_or_list(COUNT),
        },
        "shape": {
            "description": "the length of each axis: a number, null for any, or the least one",
            "type": "array",
            "items": {
                **COUNT,
                "type": ["integer", "null", "object"],
                "properties": {"min": {"description": "the least length", **COUNT}},
                "required": ["min"],
                "additionalProperties": False,
            },
        },
    },
    "additionalProperties": False,
}
# one test, or one for each role; without `oneOf`, so that a mistake is reported at its place
_WHEN = {
    "type": "object",
    "if": {"minProperties": 1, "additionalProperties": {"type": "object"}},
    "then": {"additionalProperties": _TEST},
    "else": _TEST,
}

When = Annotated[dict[str, Any], BeforeValidator(_read_when), WithJsonSchema(_WHEN)]
