"""The steps of `via` as authors write them: a pydantic model for each op, made at its first use.

It is made from the dataclass in which the op declares its arguments, and takes `$param` and
arithmetic where the op asks for integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, create_model

from .. import codecs, ops
from ..core.errors import OpError, did_you_mean, listed, printable
from ..ops.base import OpCall
from ..source import yaml
from ..source.registry import BrokenEntryError
from .arguments import (
    NAME,
    Argument,
    arguments,
    is_reference,
    resolve,
    spell_value,
    unwrapped,
    used,
)
from .fields import (
    ARITHMETIC,
    CAPTURE,
    DTYPE,
    FINITE,
    REFERENCE,
    SCALARS,
    TEXT,
    Bool,
    Model,
    Problem,
    arithmetic,
    capture,
    dtype,
    each,
    fits,
    kind_of,
    mapping,
    match_whole,
    number,
    one_of,
    problems_of,
    read_text,
    refuse,
    unknown_dtype,
    wrong,
)


@cache
def model(op: str) -> type[Model]:
    """The pydantic model of what may be written below the op's name."""
    hints = get_type_hints(ops.get(op).Args, include_extras=True)
    made: dict[str, Any] = {}
    for argument in arguments(op):
        kind = _written(op, argument) if argument.form in _FORMS else _plain(hints[argument.field])
        default = ... if argument.default is MISSING else None
        made[argument.field] = (kind, Field(default, alias=argument.word, description=argument.doc))
    return create_model(f"{op}_arguments", __base__=Model, **made)


def step(value: Any) -> OpCall:
    """One entry of `via` as a Step: `args` are typed and keyed by the author's words."""
    if isinstance(value, OpCall):
        return value
    if isinstance(value, str) and str(value) in ops.names():
        value = {str(value): {}}
    if not isinstance(value, Mapping):
        wrong(
            "M106",
            f"a step is a mapping with one operation, not {kind_of(value)}",
            "write `- stack: {over: e}`",
        )
    names = [str(name) for name in value]
    unknown = [name for name in names if name not in ops.names()]
    if unknown:
        known = ops.names()
        hint = "the installed operations are " + listed(known, 60)
        refuse(
            Problem(
                "M102",
                f"unknown operation `{printable(n)}`",
                did_you_mean(n, known) or hint,
                (n,),
                key=True,
            )
            for n in unknown
        )
    if len(names) != 1:
        hint = (
            "indent the arguments below the operation's name"
            if not names
            else "give each operation an entry (`-`) of its own"
        )
        wrong("M106", f"a step has exactly one operation, not {len(names)}", hint)
    op, written = names[0], value[names[0]]
    if yaml.is_null(written):
        written = {}
    if not isinstance(written, Mapping):
        wrong("M106", f"the arguments of `{op}` are a mapping, not {kind_of(written)}", None, (op,))
    try:
        form = model(op)
    except BrokenEntryError as error:
        wrong(
            "M102",
            f"operation `{printable(op)}` cannot be loaded: {printable(str(error))}",
            "update or remove that package",
            (op,),
        )
    try:
        given = form.model_validate(dict(written))
    except ValidationError as error:
        refuse(p._replace(at=(op, *path)) for path, p in problems_of(error, form))
    args = {
        a.word: getattr(given, a.field) for a in arguments(op) if a.field in given.model_fields_set
    }
    if problems := list(_unknown_to_codec(op, args)):
        refuse(problems)
    return OpCall(op, args)


def _unknown_to_codec(op: str, args: Mapping[str, Any]) -> Iterator[Problem]:
    """What the codec refuses in one argument, whatever the others are and params make of them."""
    try:
        codec = codecs.get(args["codec"])
    except (KeyError, BrokenEntryError):
        # no argument of the op, or a name that `validate` reports
        return
    for a in arguments(op):
        said = args.get(a.word)
        if said is None or is_reference(said):
            continue
        if a.word == "block" and codec.sides not in (None, len(said)):
            yield Problem(
                "M308",
                f"{op}: `block` has {len(said)} items, {codec.name} has {codec.sides}",
                None,
                (op, "block"),
            )
        known = codec.numbers if a.form == "dtype" else codec.words.get(a.word, ())
        if known and (dtype(said) if a.form == "dtype" else said) not in known:
            there = sorted(known)
            hint = did_you_mean(said, there) or f"it is one of {listed(there)}"
            yield Problem(
                "M308",
                f"{codec.name}: there is no `{a.word}: {printable(said)}`",
                hint,
                (op, a.word),
            )


def codec_forms(op: str) -> dict[str, Any]:
    """The schema of what the built-in codecs ask of the arguments of an op that has a codec."""
    made: dict[str, Any] = {}
    said = arguments(op)
    if not any(a.word == "codec" for a in said):
        return made
    for name in codecs.registry.builtin():
        codec = codecs.registry.get(name)
        then: dict[str, Any] = {}
        for a in said:
            known = _spelled(codec.numbers) if a.form == "dtype" else [*codec.words.get(a.word, ())]
            if known:
                then[a.word] = {"description": a.doc, **_choice(known)}
            elif a.word == "block" and codec.sides is not None:
                then[a.word] = {
                    "description": a.doc,
                    "minItems": codec.sides,
                    "maxItems": codec.sides,
                }
        when = {"properties": {"codec": {"const": codec.name}}, "required": ["codec"]}
        made = {"if": when, "then": {"properties": then}, **({"else": made} if made else {})}
    return made


def _spelled(dtypes: Iterable[str]) -> list[str]:
    """The dtypes under all their names."""
    wanted = set(dtypes)
    return [name for name in DTYPE["enum"] if dtype(name) in wanted]


def _choice(words: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "string",
        "if": {"pattern": r"^\$"},
        "then": REFERENCE,
        "else": {"enum": [*words]},
    }


def fixed_problem(op: str, args: Mapping[str, Any]) -> Problem | None:
    """What the op says against arguments without params; None also where only the run can tell."""
    if any(True for _ in used(op, args)) or any(
        a.form == "sizes" and isinstance(args.get(a.word), Mapping) for a in arguments(op)
    ):
        return None
    try:
        ops.get(op).validate(resolve(op, args, {}))
    except OpError as error:
        return Problem(error.code, error.message, error.help, (op,))
    return None


def _plain(hint: Any) -> Any:
    """The pydantic type of an argument outside the forms: a flag, a choice, or anything."""
    hint = unwrapped(hint)
    if hint is bool:
        return Bool
    if get_origin(hint) is Literal:
        return Annotated[hint, BeforeValidator(one_of(*get_args(hint)))]
    return Annotated[Any, BeforeValidator(yaml.core)]


def _integers(value: Any) -> Any:
    if is_reference(value):
        return str(value)
    if not isinstance(value, (list, tuple)):
        wrong("M106", f"a list of integers or `$param` is expected, not {kind_of(value)}")
    return each(value, arithmetic)


def _sizes(value: Any) -> Any:
    if is_reference(value):
        return str(value)
    if not isinstance(value, (list, tuple, Mapping)):
        wrong(
            "M106",
            f"a list of integers, or integers by capture value, is expected, not {kind_of(value)}",
        )
    return each(value, arithmetic)


def _axes(value: Any) -> Any:
    return each(mapping(value), arithmetic)


def _only(value: Any) -> Any:
    def values(item: Any) -> list[Any]:
        items = item if isinstance(item, (list, tuple)) else [item]
        if any(yaml.is_null(one) or isinstance(one, (list, tuple, Mapping)) for one in items):
            wrong("M106", f"a value or a list of values is expected, not {kind_of(item)}")
        if not items:
            wrong(
                "M114",
                "an empty list, which nothing matches",
                "list the values, or remove the condition",
            )
        return [yaml.exact(one) for one in items]

    bad = [name for name in mapping(value) if not fits(_NAMES, name)]
    if bad:
        what = "is not the name of a capture"
        refuse(
            Problem(
                "M114", f"`{printable(name)}` {what}", "write it without braces", (name,), key=True
            )
            for name in bad
        )
    return each(value, values)


def _number(value: Any) -> Any:
    return str(value) if is_reference(value) else number(value)


def _dtype(value: Any) -> str:
    name = read_text(value)
    if not is_reference(name) and dtype(name) is None:
        refuse([unknown_dtype(name)._replace(code="M308")])
    return name


def _written(op: str, argument: Argument) -> Any:
    """The type of an argument of one of the forms, within its limits."""
    read, schema = _FORMS[argument.form]
    least, length = argument.least, argument.length
    if argument.finite:
        schema = {**schema, **FINITE}
    elif least is not None:
        schema = {**schema, **({"minimum": least} if argument.form == "integer" else {})}
        schema |= {
            name: {**schema[name], "minimum": least}
            for name in ("items", "additionalProperties")
            if name in schema
        }
    if length is not None:
        schema = {**schema, "minItems": length, "maxItems": length}
    if argument.distinct:
        schema = {**schema, "uniqueItems": True}
    if argument.once is not None:
        schema = {
            **schema,
            "contains": {"const": argument.once},
            "minContains": 0,
            "maxContains": 1,
        }
    if argument.words:
        schema = _choice(argument.words)
    elif argument.shape is not None:
        schema = {"type": "string", "pattern": match_whole(rf"\${NAME.pattern}|{argument.shape}")}
    elif least is not None and argument.form == "text":
        schema = {**schema, "minLength": least}

    def limited(value: Any) -> Any:
        made = read(value)
        several: Any = (
            made.items()
            if isinstance(made, Mapping)
            else enumerate(made)
            if isinstance(made, list)
            else [(None, made)]
        )
        for at, item in several:
            why = (
                "it must be finite"
                if argument.finite and isinstance(item, float) and not isfinite(item)
                else ""
            )
            if least is not None and isinstance(item, int) and item < least:
                why = f"it must be at least {least}"
            if why:
                wrong(
                    "M308",
                    f"{op}: `{argument.word}` is {item}, {why}",
                    None,
                    () if at is None else (at,),
                )
        if length is not None and isinstance(made, list) and len(made) != length:
            wrong("M308", f"{op}: `{argument.word}` has {len(made)} items, it must have {length}")
        label = f"{op}: `{argument.word}` is {spell_value(made)}"
        if argument.distinct and isinstance(made, list) and len(set(made)) < len(made):
            wrong("M308", f"{label}, each item must occur there once")
        if argument.once is not None and isinstance(made, list) and made.count(argument.once) > 1:
            wrong("M308", f"{label}, only one item may be {argument.once}")
        if isinstance(made, str) and argument.form == "text" and not is_reference(made):
            if argument.words and made not in argument.words:
                wrong(
                    "M308",
                    f"{label}, it is one of {listed([*argument.words])}",
                    did_you_mean(made, [*argument.words]),
                )
            if argument.shape is not None and re.fullmatch(argument.shape, made) is None:
                wrong("M308", f"{label}, there must be one `->`")
            if least is not None and len(made) < least:
                wrong("M308", f"{op}: `{argument.word}` is empty")
        return made

    return Annotated[Any, BeforeValidator(limited), WithJsonSchema(schema)]


_NAMES = {"pattern": CAPTURE["pattern"]}

# form -> how it is read, and the schema that says the same
_FORMS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "integer": (arithmetic, ARITHMETIC),
    "integers": (_integers, {"type": ["array", "string"], "items": ARITHMETIC, **REFERENCE}),
    "sizes": (
        _sizes,
        {
            "type": ["array", "object", "string"],
            "items": ARITHMETIC,
            "additionalProperties": ARITHMETIC,
            **REFERENCE,
        },
    ),
    "axes": (_axes, {"type": "object", "additionalProperties": ARITHMETIC}),
    "only": (
        _only,
        {
            "type": "object",
            "propertyNames": _NAMES,
            "additionalProperties": {**SCALARS, "minItems": 1},
        },
    ),
    "number": (_number, {"type": ["number", "string"], **REFERENCE}),
    "capture": (capture, CAPTURE),
    "dtype": (_dtype, _choice(DTYPE["enum"])),
    "text": (read_text, TEXT),
}
