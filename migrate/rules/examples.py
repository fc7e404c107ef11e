"""The `tests:` of a rule file: their models, and what can be said of them before anything is run.

A key may stand for several: `model.layers.{i=0..1}.w` is two tensors. Real keys hold no braces, so
nothing has to be escaped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from sys import float_info
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ..core.errors import codes, did_you_mean, listed, printable
from . import fields
from .arguments import numeric
from .fields import (
    COUNT,
    DTYPE,
    FINITE,
    Bool,
    Model,
    Scalars,
    SidePath,
    Text,
    Value,
    integer,
    kind_of,
    mapping,
    match_whole,
    one_of,
    read_dtype,
    read_text,
    refuse,
    sequence,
    wrong,
)
from .problem import Problem

_RANGE = re.compile(r"\{([A-Za-z_]\w*)=([0-9]{1,18})\.\.([0-9]{1,18})\}")
MOST_KEYS = 10_000
_Path = tuple[Any, ...]


# deeper than any tensor of a test; the schema has to write the depth out
MOST_AXES = 8
_INDEXES = match_whole("-?[0-9]{1,9}(?:, ?-?[0-9]{1,9})*")
_CODE = match_whole("M[1-9][0-9][0-9]")


def _shape(value: Any) -> tuple[int, ...]:
    sizes = [integer(item) for item in sequence(value)]
    if any(size < 0 for size in sizes):
        wrong("M114", "a shape has no negative size")
    return tuple(sizes)


def _tolerance(value: Any) -> int | float:
    # false of a NaN as well
    if not 0 <= (tolerance := fields.number(value)) <= float_info.max:
        wrong("M114", f"a tolerance is a finite number of 0 or more, not {kind_of(value)}")
    return tolerance


def _number(value: Any) -> Any:
    typed = numeric(value)
    if not isinstance(typed, (int, float)):
        wrong("M106", f"a number is expected, not {kind_of(value)}")
    return typed


def _fill(value: Any) -> Any:
    if isinstance(value, str) and value == "iota":
        return "iota"
    typed = numeric(value)
    if not isinstance(typed, (int, float)):
        wrong("M106", f"a number or `iota` is expected, not {kind_of(value)}")
    return typed


def _nested(value: Any, depth: int = MOST_AXES) -> Any:
    if not isinstance(value, (list, tuple)):
        return _number(value)
    if not depth:
        wrong("M114", f"the lists are nested more than {MOST_AXES} deep")
    return [_nested(item, depth - 1) for item in value]


def _slices(value: Any) -> dict[str, Any]:
    out = {}
    for written, values in mapping(value).items():
        if not re.search(_INDEXES, written):
            hint = 'numbers with commas between them: `"0, 1": [1, 2, 3]`'
            refuse(
                [
                    Problem(
                        "M114",
                        f"`{printable(written)}` is not a list of indexes",
                        hint,
                        (written,),
                        key=True,
                    )
                ]
            )
        out[str(written)] = _nested(values)
    return out


def _code(value: Any) -> str:
    word = read_text(value)
    if not re.search(_CODE, word):
        wrong(
            "M114",
            f"`{printable(word)}` is not the code of a diagnostic",
            "such as M207; `migrate explain` lists them",
        )
    if word not in codes():
        wrong("M114", f"there is no diagnostic {word}", "`migrate explain` lists them")
    return word


def _lists(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": ["number", "boolean"]}
    return {"type": ["number", "boolean", "array"], "items": _lists(depth - 1)}


_TOLERANCE = {"type": "number", **FINITE, "minimum": 0}
_FILL = {"type": ["number", "boolean", "string"], "pattern": match_whole("iota")}
_SLICES = {
    "type": "object",
    "propertyNames": {"pattern": _INDEXES},
    "additionalProperties": _lists(MOST_AXES),
}

Dtype = Annotated[str, BeforeValidator(read_dtype), WithJsonSchema(DTYPE)]
Sizes = Annotated[tuple[Annotated[int, WithJsonSchema(COUNT)], ...], BeforeValidator(_shape)]
Tolerance = Annotated[Any, BeforeValidator(_tolerance), WithJsonSchema(_TOLERANCE)]
Fill = Annotated[Any, BeforeValidator(_fill), WithJsonSchema(_FILL)]
Lists = Annotated[Any, BeforeValidator(_nested), WithJsonSchema(_lists(MOST_AXES))]
_Allowance = Annotated[
    Literal["lossy", "drop", "opaque", "delayed-scaling"],
    BeforeValidator(one_of("lossy", "drop", "opaque", "delayed-scaling")),
]
_BY_KEY = BeforeValidator(mapping)


class GivenTensor(Model):
    """A tensor that a test starts from."""

    shape: Sizes | None = Field(
        None, description="may be left out beside `values`", examples=[[2, 3]]
    )
    dtype: Dtype = Field("float32", description="a dtype by torch's name")
    fill: Fill = Field(
        None, description="a number, or `iota`: 0, 1, 2, … in row-major order; 0 if nothing is said"
    )
    values: Lists = Field(None, description="nested lists, instead of fill")


class ExpectedTensor(Model):
    """What a test says of an output. Only what is written is compared."""

    shape: Sizes | None = Field(None, description="its shape", examples=[[2, 4, 3]])
    dtype: Dtype | None = Field(None, description="its dtype, by torch's name")
    fill: Fill = Field(None, description="a number, or `iota`")
    values: Lists = Field(None, description="nested lists: all elements")
    slices: Annotated[dict[str, Any], BeforeValidator(_slices), WithJsonSchema(_SLICES)] = Field(
        default_factory=dict,
        description="indexes of the leading axes -> nested lists, or one number for all elements "
        "there",
    )
    same_as: Text | None = Field(None, description="the key of a given tensor with the same bytes")
    rtol: Tolerance = Field(
        None,
        description="relative tolerance, for ops whose result is not fixed to the last bit; else "
        "every bit counts",
    )


class RuleTest(Model):
    """An example that must come out as written: given tensors, expected tensors or the error that
    refuses them.
    """

    name: Text = Field(
        description="what the test shows; unique in its file", examples=["two experts, w1 above w3"]
    )
    params: Annotated[dict[Text, Scalars], _BY_KEY] = Field(
        default_factory=dict, description="as --set gives them"
    )
    backwards: Bool = Field(
        False, description="the downgrade: `given` is in the layout that the edge leads to"
    )
    allow: Annotated[tuple[_Allowance, ...] | None, BeforeValidator(sequence)] = Field(
        None,
        description="as --allow; without it a test allows what the ops of its rules say they lose",
    )
    given: Annotated[dict[Text, GivenTensor], _BY_KEY] = Field(
        description="key -> tensor; `a.{i=0..2}.b` are three keys"
    )
    side: Annotated[dict[SidePath, Value], _BY_KEY] = Field(
        default_factory=dict,
        description="side files beside them: text as it is, anything else as JSON",
    )
    expect: Annotated[dict[Text, ExpectedTensor] | None, _BY_KEY] = Field(
        None, description="every key that the rules make; keys that are kept may be left out"
    )
    expect_side: Annotated[dict[SidePath, Value], _BY_KEY] = Field(
        default_factory=dict,
        description="side files that come out; null: there is none of this name",
    )
    error: Annotated[
        str | None,
        BeforeValidator(_code),
        WithJsonSchema({"type": "string", "pattern": _CODE, "enum": codes()}),
    ] = Field(None, description="the code of the diagnostic that refuses what is given")
    contains: Text | None = Field(None, description="text that the diagnostic must contain")


def expand(key: str) -> list[tuple[str, dict[str, int]]]:
    """The keys that `key` stands for, each with the values of its ranges; ValueError for an empty
    or a vast range.
    """
    out: list[tuple[str, dict[str, int]]] = [(key, {})]
    for name, first, last in _RANGE.findall(key):
        low, high = int(first), int(last)
        if high < low or len(out) * (high - low + 1) > MOST_KEYS:
            raise ValueError(
                f"{{{name}={first}..{last}}} "
                + ("is empty" if high < low else f"makes more than {MOST_KEYS} keys")
            )
        written = f"{{{name}={first}..{last}}}"
        out = [
            (text.replace(written, str(n)), {**values, name: n})
            for text, values in out
            for n in range(low, high + 1)
        ]
    return out


def fill_in(text: str, values: Mapping[str, int]) -> str:
    """`text` with each `{name}` that is among `values` replaced."""
    for name, number in values.items():
        text = text.replace(f"{{{name}}}", str(number))
    return text


def shape_of(values: Any) -> tuple[int, ...]:
    """The shape of nested lists; ValueError naming the place where they are uneven."""
    if not isinstance(values, (list, tuple)):
        return ()
    shapes = [shape_of(item) for item in values]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ValueError(
                f"item {number} has the shape {list(shape)}, item 0 has {list(shapes[0])}"
            )
    return (len(values), *(shapes[0] if shapes else ()))


def flat(values: Any) -> Iterator[Any]:
    """The numbers of nested lists, row-major."""
    if isinstance(values, (list, tuple)):
        for item in values:
            yield from flat(item)
    else:
        yield values


def indexes(written: str) -> tuple[int, ...]:
    """`"0, 1"` as (0, 1)."""
    return tuple(int(part) for part in written.split(","))


def problems(tests: Sequence[RuleTest], params: Collection[str]) -> Iterator[Problem]:
    """What is wrong with the tests of a file that declares these params."""
    for number, test in enumerate(tests):
        yield from (problem.below("tests", number) for problem in _problems(test))
        for name in test.params:
            if name not in params:
                hint = (
                    did_you_mean(name, list(params))
                    or f"the params of the file: {listed(list(params))}"
                )
                yield Problem(
                    "M112",
                    f"there is no param `{printable(name)}`",
                    hint,
                    key=True,
                    at=("tests", number, "params", name),
                )


def _problems(test: RuleTest) -> Iterator[Problem]:
    if test.error is not None and (test.expect is not None or test.expect_side):
        yield Problem(
            "M114",
            "a test expects tensors or an error, not both",
            "remove one of them",
            key=True,
            at=("error",),
        )
    if test.error is None and test.expect is None and not test.expect_side:
        yield Problem(
            "M101",
            f"test `{printable(test.name)}` expects nothing",
            "write `expect`, or `error: CODE`",
        )
    if test.contains is not None and test.error is None:
        yield Problem("M101", "`contains` needs `error`", key=True, at=("contains",))
    given: dict[str, str] = {}
    for key, tensor in test.given.items():
        yield from _keys(("given", key), key, given)
        yield from (problem.below("given", key) for problem in _given(tensor))
    expected: dict[str, str] = {}
    for key, wanted in (test.expect or {}).items():
        yield from _keys(("expect", key), key, expected)
        yield from (problem.below("expect", key) for problem in _expected(key, wanted, given))


def _keys(path: _Path, written: str, seen: dict[str, str]) -> Iterator[Problem]:
    try:
        keys = expand(written)
    except ValueError as error:
        yield Problem(
            "M114", str(error), "a range is `{i=0..3}`, both ends counted", key=True, at=path
        )
        return
    for key, _ in keys:
        if seen.setdefault(key, written) != written:
            yield Problem(
                "M113",
                f"`{printable(key)}` is also in `{printable(seen[key])}`",
                "write each key once",
                key=True,
                at=path,
            )
            return


def _given(tensor: GivenTensor) -> Iterator[Problem]:
    if tensor.values is None:
        if tensor.shape is None:
            yield Problem("M101", "`shape` is missing", "or give `values`, whose lists say it")
        return
    if tensor.fill is not None:
        yield Problem(
            "M114",
            "a tensor has `fill` or `values`, not both",
            "remove one of them",
            key=True,
            at=("fill",),
        )
    yield from _values(("values",), tensor.values, tensor.shape)


def _expected(key: str, wanted: ExpectedTensor, given: Mapping[str, str]) -> Iterator[Problem]:
    said = [name for name in ("fill", "values", "same_as") if getattr(wanted, name) is not None]
    if len(said) > 1:
        yield Problem(
            "M114",
            f"`{said[0]}` and `{said[1]}` both say what the tensor holds",
            "remove one of them",
            key=True,
            at=(said[1],),
        )
    if wanted.values is not None:
        yield from _values(("values",), wanted.values, wanted.shape)
    for written, values in wanted.slices.items():
        at = indexes(written)
        if wanted.shape is not None and len(at) > len(wanted.shape):
            yield Problem(
                "M114",
                f"{len(at)} indexes into {len(wanted.shape)} axes",
                key=True,
                at=("slices", written),
            )
        elif wanted.shape is not None and any(
            not -size <= n < size for n, size in zip(at, wanted.shape, strict=False)
        ):
            yield Problem(
                "M114",
                f"`{written}` is outside of {list(wanted.shape)}",
                key=True,
                at=("slices", written),
            )
        elif isinstance(values, list):
            yield from _values(
                ("slices", written),
                values,
                None if wanted.shape is None else wanted.shape[len(at) :],
            )
    for _, values in _expanded(key) if wanted.same_as is not None else ():
        if (name := fill_in(wanted.same_as or "", values)) not in given:
            hint = did_you_mean(name, list(given)) or f"given are {listed(list(given), 8)}"
            yield Problem(
                "M114", f"no given tensor is called `{printable(name)}`", hint, at=("same_as",)
            )
            return


def _expanded(key: str) -> list[tuple[str, dict[str, int]]]:
    try:
        return expand(key)
    except ValueError:
        return []


def _values(path: _Path, values: Any, shape: tuple[int, ...] | None) -> Iterator[Problem]:
    try:
        found = shape_of(values)
    except ValueError as error:
        yield Problem("M114", f"the lists are uneven: {error}", at=path)
        return
    if shape is not None and found != shape and not (prod(found) == prod(shape) == 0):
        yield Problem(
            "M114", f"the lists have the shape {list(found)}, `shape` says {list(shape)}", at=path
        )
