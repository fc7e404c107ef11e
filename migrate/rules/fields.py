"""The field types of what people write: text that becomes typed only where a field asks for a type.

A document arrives with `Plain` for unquoted scalars. Each type here reads what its field asks for
and refuses the rest with a `Problem`: a code, a message and the path below the field. One field can
have several problems (the arguments of an operation), pydantic reports one error per field; so a
refusal carries a list, and `found` takes both apart again.

Beside each reader stands the JSON schema that says the same of what an editor's YAML 1.2 parser
makes of the text: free text may look like a number or a truth (`2.10`), a name may not, and `8.0`
and `0x10` are integers, because to an editor they are. `rules/schema.py` lists what a schema cannot
say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from sys import float_info
from types import UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core import expr
from ..core.diagnostics import did_you_mean, listed, printable
from ..core.errors import PatternError
from ..core.keys import parse
from ..core.notation import LONGEST_PATTERN
from ..core.spec import ALIASES, BITS
from ..source import yaml
from .scalars import MOST, NAME, numeric, seen, whole_number

_WORD = "[A-Za-z_][A-Za-z0-9_]*"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+-]*[A-Za-z0-9_+-])?"
_IDENTIFIER = re.compile(_PART)
# what a terminal would act on or hide: control and formatting characters
UNPRINTABLE = r"\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff"  # noqa: E501
_LINE = re.compile(f"[^{UNPRINTABLE}]*")


class Problem(NamedTuple):
    """A diagnostic without its place.

    `at` is the path below the value that was refused, `key` points at the key there instead of the
    value, and `part` narrows the place to code points (start, end) of the value's text.
    """

    code: str
    message: str
    help: str | None = None
    at: tuple[str | int, ...] = ()
    key: bool = False
    part: tuple[int, int] | None = None


class Model(BaseModel):
    """Base of all that people write: frozen, unknown fields refused, built when first used."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", defer_build=True, hide_input_in_errors=True
    )


def refuse(problems: Iterable[Problem]) -> NoReturn:
    """Raises the problems as the one error that pydantic lets a validator raise."""
    found = tuple(problems)
    raise PydanticCustomError(
        "problems", "{text}", {"text": "; ".join(p.message for p in found), "problems": found}
    )


def refused(error: PydanticCustomError) -> tuple[Problem, ...]:
    """The problems that `refuse` was called with."""
    return tuple((error.context or {})["problems"])


def wrong(
    code: str, message: str, help: str | None = None, at: tuple[str | int, ...] = ()
) -> NoReturn:
    refuse([Problem(code, message, help, at)])


def kind_of(value: Any) -> str:
    """What `value` is, in words for a message."""
    if yaml.is_null(value):
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, str):
        return (
            f"`{printable(value, 40)}`"
            if isinstance(value, yaml.Plain)
            else f"the text {printable(value, 40)!r}"
        )
    return f"`{value}`"


def whole(pattern: str) -> str:
    """`pattern` as a JSON schema must write it to match a whole text, in Python's and in
    JavaScript's reading.
    """
    return f"^(?:{pattern})$(?!\\n)"


def fits(schema: Mapping[str, Any], written: str) -> bool:
    """Whether text has the `pattern` and the `maxLength` of a schema; the pattern is compiled when
    it is first asked for.
    """
    return (
        len(written) <= schema.get("maxLength", len(written))
        and re.search(schema["pattern"], written) is not None
    )


def _bounded(number: int) -> int:
    if abs(number) > MOST:
        wrong("M114", f"an integer lies between -{MOST} and {MOST}")
    return number


def text(value: Any) -> str:
    if isinstance(value, str) and not (isinstance(value, yaml.Plain) and yaml.is_null(value)):
        return str(value)
    if isinstance(value, Mapping) and len(value) == 1:
        wrong(
            "M106",
            "text is asked for, here stands a mapping",
            "quote a pattern that starts with `{`",
        )
    wrong(
        "M106",
        f"text is asked for, here stands {kind_of(value)}",
        "quote it if it is meant as text" if isinstance(value, str) else None,
    )


def line(value: Any) -> str:
    """Text that plans and messages print as it is."""
    word = text(value)
    if not _LINE.fullmatch(word):
        wrong("M114", f"`{printable(word)}` is not one line of printable characters")
    return word


def lone_pattern(value: Any) -> str:
    """A pattern whose captures no other pattern declares."""
    written = text(value)
    try:
        parse(written)
    except PatternError as error:
        refuse([Problem(error.code, error.message, error.help, part=(error.start, error.end))])
    return written


def pattern(value: Any) -> str:
    """Text that has the form of a pattern; whether its captures hold together only those can say
    who know its rule.
    """
    written = text(value)
    return written if fits(PATTERN, written) else lone_pattern(written)


def capture(value: Any) -> str:
    name = word(value)
    if not NAME.fullmatch(name):
        wrong(
            "M114", f"`{printable(name)}` is not the name of a capture", "write it without braces"
        )
    return name


def integer(value: Any) -> int:
    if (number := whole_number(value)) is not None:
        return _bounded(number)
    quoted = (
        isinstance(value, str)
        and not isinstance(value, yaml.Plain)
        and yaml.integer(value) is not None
    )
    wrong(
        "M106",
        f"an integer is asked for, here stands {kind_of(value)}",
        "leave the quotes out" if quoted else None,
    )


def count(value: Any) -> int:
    if (number := integer(value)) < 0:
        wrong("M114", f"a number of 0 or more is asked for, here stands {kind_of(value)}")
    return number


def arithmetic(value: Any) -> int | str:
    """An integer, or the text of arithmetic over params that `core.expr` can read."""
    if (number := whole_number(value)) is not None:
        return _bounded(number)
    if not isinstance(value, str) or yaml.is_null(value):
        wrong(
            "M106", f"an integer, `$param` or arithmetic is asked for, here stands {kind_of(value)}"
        )
    try:
        expr.parse(value)
    except PatternError as error:
        refuse([Problem(error.code, error.message, error.help, part=(error.start, error.end))])
    return str(value)


def boolean(value: Any) -> bool:
    if isinstance(value, yaml.Plain) and (truth := yaml.boolean(value)) is not None:
        return truth
    if isinstance(value, bool):
        return value
    wrong("M106", f"true or false is asked for, here stands {kind_of(value)}")


def number(value: Any) -> int | float:
    typed = numeric(value)
    if isinstance(typed, (int, float)) and not isinstance(typed, bool):
        return typed
    wrong("M106", f"a number is asked for, here stands {kind_of(value)}")


def sequence(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return value
    wrong(
        "M106",
        f"a list is asked for, here stands {kind_of(value)}",
        "write `[…]`" if isinstance(value, str) else None,
    )


def mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    wrong("M106", f"a mapping is asked for, here stands {kind_of(value)}")


def scalars(value: Any) -> Any:
    """A value that is no list and no mapping, or a list of such."""
    several = isinstance(value, (list, tuple))
    for number, item in enumerate(value if several else [value]):
        if isinstance(item, (list, tuple, Mapping)) or (yaml.is_null(item) and item is not None):
            wrong(
                "M106",
                f"a value or a list of values is asked for, here stands {kind_of(item)}",
                None,
                (number,) if several else (),
            )
    return value


def one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        word = text(value)
        if word not in choices:
            wrong(
                "M114",
                f"`{printable(word)}` is none of {listed(list(choices))}",
                did_you_mean(word, list(choices)),
            )
        return word

    return check


def word(value: Any) -> str:
    """Text that YAML itself reads as text: a name that one reader takes for a number would be two
    names.
    """
    if (
        isinstance(value, yaml.Plain)
        and not yaml.is_null(value)
        and not isinstance(seen(value), str)
    ):
        wrong(
            "M106",
            f"a name is asked for, here stands {kind_of(value)}",
            "quote it if it is meant as a name",
        )
    return text(value)


def identifier(value: Any) -> str:
    name = word(value)
    if not all(_IDENTIFIER.fullmatch(part) for part in name.split("/")):
        wrong(
            "M114",
            f"`{printable(name)}` is not a name",
            "letters, digits and `_ . + -`, in parts joined by `/`",
        )
    return name


def plain_name(value: Any) -> str:
    name = word(value)
    if not _IDENTIFIER.fullmatch(name):
        wrong(
            "M114",
            f"`{printable(name)}` is not a name",
            "letters, digits and `_ . + -`; it starts and ends with a letter or digit",
        )
    return name


def dtype(name: str) -> str | None:
    """torch's name of the dtype that `name` spells, or None."""
    name = ALIASES.get(name, name)
    return name if name in BITS else None


def unknown_dtype(name: str, at: tuple[str | int, ...] = ()) -> Problem:
    return Problem(
        "M114", f"there is no dtype `{printable(name)}`", did_you_mean(name, [*BITS, *ALIASES]), at
    )


TEXT = {"type": ["string", "number", "boolean"]}
LINE = {**TEXT, "pattern": whole(f"[^{UNPRINTABLE}]*")}
NAMED = {"type": "string", "pattern": whole(_PART)}
CAPTURE = {"type": "string", "pattern": whole(_WORD)}


def _arithmetic(name: str) -> str:
    """All of the notation of arithmetic over what `name` matches but the balance of parentheses."""
    operand = rf"(?:[-(] *)*(?:[0-9]+|{name})(?: *\))*"
    return rf" *{operand}(?: *(?:[-+*%]|//) *{operand})* *"


# an index speaks of a capture, and is more than its name
_INDEX = (
    rf"(?=(?:[^A-Za-z_$}}]|\${_WORD})*[A-Za-z_])(?![( ]*{_WORD}[) "
    rf"]*\}}){_arithmetic(rf'[$]?{_WORD}')}"
)
# what the notation of patterns asks for, but for the types of captures, linear indices and what
# stands side by side
PATTERN = {
    **TEXT,
    "pattern": whole(
        rf"(?:[^{{}}]|\{{\{{|\}}\}}|\{{(?:{_WORD}(?:\.\.\.)?|{_WORD}:[^{{}}|]+(?:\|[^{{}}|]+)*|{_INDEX})\}})+"
    ),
    "maxLength": LONGEST_PATTERN,
}
INTEGER = {"type": "integer", "minimum": -MOST, "maximum": MOST}
COUNT = {**INTEGER, "minimum": 0}
DTYPE = {"type": "string", "enum": [*BITS, *ALIASES]}
ARITHMETIC = {
    **INTEGER,
    "type": ["integer", "string"],
    "pattern": whole(_arithmetic(rf"\${_WORD}")),
    "maxLength": expr.LONGEST,
}
# a NaN is neither less nor greater than any number, and so the only one that lies between 1 and 0
FINITE = {
    "minimum": -float_info.max,
    "maximum": float_info.max,
    "if": {"type": "number", "minimum": 1, "maximum": 0},
    "then": False,
}
REFERENCE = {"pattern": whole(rf"\${_WORD}")}
# one value, or a list of them
SCALARS = {"type": [*TEXT["type"], "array"], "items": TEXT}


def one_or_list(item: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an item or a list of items; without `oneOf`, so that a mistake is reported at
    its place.
    """
    return {
        "if": {"type": "array"},
        "then": {"items": dict(item), "minItems": 1},
        "else": dict(item),
    }


Text = Annotated[str, BeforeValidator(text), WithJsonSchema(TEXT)]
Line = Annotated[str, BeforeValidator(line), WithJsonSchema(LINE)]
Pattern = Annotated[str, BeforeValidator(pattern), WithJsonSchema(PATTERN)]
Capture = Annotated[str, BeforeValidator(capture), WithJsonSchema(CAPTURE)]
Int = Annotated[int, BeforeValidator(integer), WithJsonSchema(INTEGER)]
Bool = Annotated[bool, BeforeValidator(boolean)]
Number = Annotated[Any, BeforeValidator(number), WithJsonSchema({"type": "number"})]
Value = Annotated[Any, BeforeValidator(yaml.core)]
Scalars = Annotated[
    Any, BeforeValidator(lambda value: yaml.core(scalars(value))), WithJsonSchema(SCALARS)
]
Identifier = Annotated[
    str,
    BeforeValidator(identifier),
    WithJsonSchema({"type": "string", "pattern": whole(f"{_PART}(?:/{_PART})*")}),
]
Name = Annotated[str, BeforeValidator(plain_name), WithJsonSchema(NAMED)]


_MISSING = {
    "from": "a rule reads keys that are there; one that adds a tensor beside each has "
    "`keep_source: true` and `fill`"
}


class Found(NamedTuple):
    """One problem of a validated value: where it is, and what."""

    path: tuple[str | int, ...]
    problem: Problem


def found(error: ValidationError, model: type[BaseModel]) -> list[Found]:
    """All that `error` reports, as problems with their paths from the root of the value that
    `model` validated.
    """
    out: list[Found] = []
    items = error.errors(include_url=False, include_input=False)
    # where a field is unknown, the missing one is likely to be there, misspelt
    misspelt = {tuple(item["loc"])[:-1] for item in items if item["type"] == "extra_forbidden"}
    for item in items:
        loc, kind, context = tuple(item["loc"]), item["type"], item.get("ctx", {})
        if kind == "problems":
            # pydantic's word for the key of a mapping itself
            keyed = loc[-1:] == ("[key]",)
            loc = loc[:-1] if keyed else loc
            out += [
                Found((*loc, *p.at), p._replace(key=True) if keyed else p)
                for p in context["problems"]
            ]
        elif kind == "missing":
            hint = None if loc[:-1] in misspelt else _MISSING.get(str(loc[-1]))
            out.append(Found(loc[:-1], Problem("M101", f"`{loc[-1]}` is missing", hint)))
        elif kind == "extra_forbidden":
            word, known = str(loc[-1]), fields(model, loc[:-1])
            near = get_close_matches(word, known, n=1, cutoff=0.6)
            hint = (
                f"did you mean `{near[0]}`?" if near else f"the fields here are {listed(known, 30)}"
            )
            out.append(
                Found(
                    loc,
                    Problem("M103", f"there is no field `{printable(word)}` here", hint, key=True),
                )
            )
        elif kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
            out.append(Found(loc, Problem("M106", "a mapping is asked for")))
        elif kind in ("list_type", "tuple_type"):
            out.append(Found(loc, Problem("M106", "a list is asked for")))
        elif kind == "too_short" or kind == "too_long":
            out.append(Found(loc, Problem("M114", str(item["msg"]).lower())))
        else:
            message = str(item["msg"])
            out.append(Found(loc, Problem("M114", message[:1].lower() + message[1:])))
    return out


def fields(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """The field names, as authors write them, of the model that stands at `loc` below `model`."""
    at: Any = model
    for step in loc:
        if _is_model(at):
            names = {
                (field.alias or name): field.annotation for name, field in at.model_fields.items()
            }
            at = names.get(str(step))
        else:
            at = (
                get_args(at)[-1]
                if get_origin(at) is dict
                else get_args(at)[0]
                if get_args(at)
                else None
            )
        at = _bare(at)
    return [field.alias or name for name, field in at.model_fields.items()] if _is_model(at) else []


def _is_model(annotation: Any) -> bool:
    # in Python 3.10 `tuple[Rule, ...]` is an instance of type, and issubclass refuses it
    return (
        get_origin(annotation) is None
        and isinstance(annotation, type)
        and issubclass(annotation, BaseModel)
    )


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return next((_bare(a) for a in get_args(annotation) if a is not type(None)), None)
    return annotation
