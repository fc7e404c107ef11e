"""The steps of `via` as authors write them: a pydantic model for each op, made at its first use.

It is made from the dataclass in which the op declares its arguments, and takes `$param` and
arithmetic where the op asks for integers. So is that of a codec, whose arguments stand beside those
of the op that names it; where its name is a `$param`, they are read when that has a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema, create_model
from pydantic.json_schema import GenerateJsonSchema

from .. import codecs, ops
from ..core.errors import OpError, did_you_mean, listed, printable
from ..ops.base import OpCall
from ..source import yaml
from ..source.registry import BrokenEntryError
from .arguments import (
    NAME,
    Argument,
    all_arguments,
    arguments,
    codec_arguments,
    is_reference,
    resolve,
    spell_value,
    takes_codec,
    unknown_argument,
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
    arithmetic,
    boolean,
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
from .problem import Problem


@cache
def model(op: str) -> type[Model]:
    """The pydantic model of what may be written below the op's name, its codec's part apart."""
    return _model(op, ops.get(op).Args, arguments(op))


def codec_model(op: str, codec: str) -> type[Model]:
    """The pydantic model of what a codec takes beside the arguments of `op`."""
    return _codec_model(codecs.get(codec).name, op)


@cache
def _codec_model(codec: str, op: str) -> type[Model]:
    known = codec_arguments(None, codec) or ()
    return _model(codec, codecs.get(codec).Args, [_for(op, a) for a in known])


def _for(op: str, argument: Argument) -> Argument:
    """The argument as `op` describes it."""
    if op == "dequantize" and argument.encoding:
        return argument._replace(doc=f"for the inverse: {argument.doc}")
    return argument


def _model(name: str, declared: type, known: Iterable[Argument]) -> type[Model]:
    hints = get_type_hints(declared, include_extras=True)
    made: dict[str, Any] = {}
    for argument in known:
        kind = (
            _written(name, argument) if argument.form in _FORMS else _plain(hints[argument.field])
        )
        default = ... if argument.default is MISSING else None
        made[argument.field] = (kind, Field(default, alias=argument.word, description=argument.doc))
    return create_model(f"{name}_arguments", __base__=Model, **made)


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
    taken = codec_arguments(op, written.get("codec"))
    words = {a.word for a in arguments(op)}
    closed = "codec" not in written or not takes_codec(op)
    own = {w: v for w, v in written.items() if closed or w in words}
    rest = {w: v for w, v in written.items() if w not in own}
    problems: list[Problem] = []
    args = _read(op, form, own, arguments(op), problems)
    if taken is None:
        # a `$param`, or a name that `validate` reports: what it takes is not known yet
        args |= {str(word): yaml.core(value) for word, value in rest.items()}
    else:
        codec = str(written["codec"])
        for word in [word for word in rest if not any(a.word == word for a in taken)]:
            message, hint = unknown_argument(codec, word, [*arguments(op), *taken])
            problems.append(Problem("M103", message, hint, (op, word), key=True))
            del rest[word]
        args |= _read(op, codec_model(op, codec), rest, taken, problems)
        problems += _unknown_to_codec(op, args)
    if problems:
        refuse(problems)
    return OpCall(op, args)


def _read(
    op: str,
    form: type[Model],
    written: Mapping[str, Any],
    known: Iterable[Argument],
    problems: list[Problem],
) -> dict[str, Any]:
    """word -> typed value of what `form` takes; what it refuses goes into `problems`."""
    try:
        given = form.model_validate(dict(written))
    except ValidationError as error:
        problems += [p._replace(at=(op, *path)) for path, p in problems_of(error, form)]
        return {}
    return {a.word: getattr(given, a.field) for a in known if a.field in given.model_fields_set}


def _unknown_to_codec(op: str, args: Mapping[str, Any]) -> Iterator[Problem]:
    """A dtype of the numbers that the codec does not have."""
    if "codec" not in args:
        return
    codec = codecs.get(args["codec"])
    for a in arguments(op):
        said = args.get(a.word)
        if a.form != "dtype" or said is None or is_reference(said) or not codec.numbers:
            continue
        if dtype(said) not in codec.numbers:
            there = sorted(codec.numbers)
            hint = did_you_mean(said, there) or f"it is one of {listed(there)}"
            message = f"{codec.name}: there is no `{a.word}: {printable(said)}`"
            yield Problem("M308", message, hint, (op, a.word))


def codec_forms(op: str, generator: type[GenerateJsonSchema]) -> dict[str, Any]:
    """The schema of what the built-in codecs take, of an op that takes theirs.

    Where another codec or a `$param` is named, any argument may stand; for a `$param`, those of the
    built-in codecs are described. An op that makes parts takes no codec that only decodes.
    """
    return _forms(op, generator, arguments(op)) if takes_codec(op) else {}


def number_format(generator: type[GenerateJsonSchema]) -> dict[str, Any]:
    """The schema of a mapping with a codec and what it takes."""
    about = "the number format, e.g. fp8-block"
    codec = {**TEXT, "minLength": 1, "description": about}
    return {
        "description": "A number format: a codec and what it takes",
        "type": "object",
        "properties": {"codec": codec},
        "required": ["codec"],
        **_forms("", generator, [Argument("codec", "codec", "text", about, MISSING)]),
    }


def _forms(
    op: str, generator: type[GenerateJsonSchema], beside: Sequence[Argument]
) -> dict[str, Any]:
    """The schema of what the built-in codecs take, with the arguments that stand beside theirs."""
    known: dict[str, Any] = {}
    closed: list[tuple[str, dict[str, Any]]] = []
    refused = []
    for name in codecs.registry.builtin():
        codec = codecs.registry.get(name)
        if op and ops.get(op).kind == "part" and not codec.encodes:
            refused.append(codec.name)
            continue
        form = codec_model(op, codec.name).model_json_schema(
            by_alias=True, schema_generator=generator
        )
        properties: dict[str, Any] = {a.word: {"description": a.doc} for a in beside}
        for a in beside if codec.numbers else ():
            if a.form == "dtype":
                properties[a.word] |= _choice(_spelled(codec.numbers))
        for a in codec_arguments(None, codec.name) or ():
            if a.default is not MISSING and a.default not in (None, (), {}):
                form["properties"][a.word]["default"] = a.default
            known.setdefault(a.word, {"description": _for(op, a).doc})
        properties |= form.get("properties", {})
        needed = {"required": form["required"]} if "required" in form else {}
        closed.append(
            (codec.name, {"properties": properties, "additionalProperties": False, **needed})
        )
    made: dict[str, Any] = {
        "if": _names({"description": "a param", "pattern": r"^\$"}),
        "then": {"properties": known},
    }
    if refused:
        # no text is nothing
        never = {"description": "a codec that encodes", "const": None}
        made["else"] = {
            "if": _names({"description": "a codec that is only decoded", "enum": refused}),
            "then": {"properties": {"codec": never}},
        }
    for name, then in reversed(closed):
        made = {"if": _names({"const": name}), "then": then, "else": made}
    return made


def _names(codec: Mapping[str, Any]) -> dict[str, Any]:
    return {"properties": {"codec": codec}, "required": ["codec"]}


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
        a.form == "sizes" and isinstance(args.get(a.word), Mapping) for a in all_arguments(op, args)
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


def _flag(value: Any) -> Any:
    return str(value) if is_reference(value) else boolean(value)


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
    elif argument.values:
        schema = {**schema, "if": {"type": "integer"}, "then": {"enum": [*argument.values]}}
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
            if argument.values and isinstance(item, int) and item not in argument.values:
                why = f"it is one of {listed([str(value) for value in argument.values])}"
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


def _format(value: Any) -> Any:
    """A mapping with the name of a codec and what it takes; of a `$param`, as it is."""
    said = mapping(value)
    if "codec" not in said:
        wrong("M101", "`codec` is missing", "name the number format: `{codec: fp8-block}`")
    codec = read_text(said["codec"])
    rest = {str(word): item for word, item in said.items() if word != "codec"}
    taken = codec_arguments(None, codec)
    if taken is None:
        return {"codec": codec, **{word: yaml.core(item) for word, item in rest.items()}}
    problems: list[Problem] = []
    for word in [word for word in rest if not any(a.word == word for a in taken)]:
        message, hint = unknown_argument(codec, word, taken)
        problems.append(Problem("M103", message, hint, (word,), key=True))
        del rest[word]
    made = {"codec": codec, **_read("", codec_model("", codec), rest, taken, problems)}
    if problems:
        refuse(p._replace(at=p.at[1:]) if p.at[:1] == ("",) else p for p in problems)
    return made


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
    "flag": (_flag, {"type": ["boolean", "string"], **REFERENCE}),
    "capture": (capture, CAPTURE),
    "dtype": (_dtype, _choice(DTYPE["enum"])),
    "text": (read_text, TEXT),
    # the schema refers to that of all formats instead
    "format": (_format, {"type": "object"}),
}
