"""The conditions of a rule: `where` asks captures and params, `when` asks the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.diagnostics import did_you_mean, printable
from ..source import yaml
from .fields import (
    ARITHMETIC,
    COUNT,
    DTYPE,
    SCALARS,
    TEXT,
    Problem,
    arithmetic,
    count,
    dtype,
    fits,
    kind_of,
    mapping,
    one_or_list,
    refuse,
    refused,
    unknown_dtype,
    whole,
)

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
_CONDITION = {"pattern": whole(r"\$?[A-Za-z_][A-Za-z0-9_]*")}


def _where(value: Any) -> dict[str, Any]:
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
            out[name] = _values(condition, name, bad, yaml.exact)
        elif isinstance(condition, Mapping):
            out[name] = _limits(condition, name, bad)
        else:
            out[name] = _values(condition, name, bad, _capture_value)
    if bad:
        refuse(bad)
    return out


def _values(condition: Any, name: str, bad: list[Problem], read: Any) -> Any:
    items = condition if isinstance(condition, (list, tuple)) else [condition]
    if not items:
        bad.append(
            Problem(
                "M114",
                "an empty list, of which nothing is one",
                "list the values, or remove the condition",
                (name,),
            )
        )
    for item in items:
        if yaml.is_null(item) or isinstance(item, (list, tuple, Mapping)):
            bad.append(
                Problem(
                    "M106",
                    f"a value or a list of values is asked for, here stands {kind_of(item)}",
                    None,
                    (name,),
                )
            )
            return None
    return (
        [read(item) for item in items] if isinstance(condition, (list, tuple)) else read(condition)
    )


def _capture_value(item: Any) -> Any:
    typed = yaml.exact(item)
    return typed if isinstance(typed, int) and not isinstance(typed, bool) else str(item)


def _limits(condition: Mapping[str, Any], name: str, bad: list[Problem]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for limit, number in condition.items():
        if limit not in _LIMITS:
            hint = (
                did_you_mean(limit, list(_LIMITS))
                or "the fields here are min, max, multiple_of, remainder"
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


def _when(value: Any) -> dict[str, Any]:
    """`{dtype: [...], ndim: [...]}`, or that for each role; both always as lists."""
    value = mapping(value)
    bad: list[Problem] = []
    if value and all(isinstance(test, Mapping) for test in value.values()):
        out: dict[str, Any] = {role: _test(test, (role,), bad) for role, test in value.items()}
    else:
        out = _test(value, (), bad)
    if bad:
        refuse(bad)
    return out


def _test(test: Mapping[str, Any], at: tuple[str, ...], bad: list[Problem]) -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for name, written in test.items():
        items = list(written) if isinstance(written, (list, tuple)) else [written]
        if name in ("dtype", "ndim") and not items:
            bad.append(
                Problem(
                    "M114",
                    "an empty list, of which nothing is one",
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
                message = (
                    "a number of axes or a list of them is asked for, here stands "
                    f"{kind_of(written)}"
                )
                bad.append(Problem("M106", message, None, (*at, name)))
        else:
            hint = (
                did_you_mean(name, ["dtype", "ndim"])
                or "`when` tests the tensor: dtype, ndim; `where` tests captures and params"
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
    },
    "additionalProperties": False,
}
_WHERE = {
    "type": "object",
    "propertyNames": _CONDITION,
    "patternProperties": {r"^\$": {**SCALARS, "minItems": 1}},
    "additionalProperties": {
        "type": [*TEXT["type"], "array", "object"],
        "items": TEXT,
        "minItems": 1,
        "properties": _LIMITS,
        "dependentRequired": {"remainder": ["multiple_of"]},
        "additionalProperties": False,
    },
}
# one test, or one for each role; without `oneOf`, so that a mistake is reported at its place
_WHEN = {
    "type": "object",
    "if": {"minProperties": 1, "additionalProperties": {"type": "object"}},
    "then": {"additionalProperties": _TEST},
    "else": _TEST,
}

Where = Annotated[dict[str, Any], BeforeValidator(_where), WithJsonSchema(_WHERE)]
When = Annotated[dict[str, Any], BeforeValidator(_when), WithJsonSchema(_WHEN)]
