"""The field types of what people write: text that becomes typed only where a field asks for a type.

A document arrives with `PlainScalar` for unquoted scalars. Each type here reads what its field asks
for and refuses the rest with a `Problem`: a code, a message and the path below the field. One field
can have several problems (the arguments of an operation), pydantic reports one error per field; so
a refusal carries a list, and `problems_of` takes both apart again.

Beside each reader stands the JSON schema that says the same of what an editor's YAML 1.2 parser
makes of the text: free text may look like a number or a truth (`2.10`), a name may not, and `8.0`
and `0x10` are integers, because to an editor they are. `schema` lists what it cannot say.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from sys import float_info
from types import UnionType
from typing import Annotated, Any, NamedTuple, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from ..core.errors import PatternError, did_you_mean, listed, printable
from ..core.keys import parse
from ..core.notation import LONGEST, LONGEST_PATTERN, parse_expression
from ..core.spec import ALIASES, BITS
from ..core.types import __version__
from ..source import yaml
from ..source.paths import CACHES, HISTORY, ITEMS, MAX_DEPTH, METADATA, PARTIAL, WEIGHT_SUFFIXES
from .arguments import MOST, NAME, numeric, seen, whole_number
from .problem import Problem

_WORD = "[A-Za-z_][A-Za-z0-9_]*"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.+-]*[A-Za-z0-9_+-])?"
_IDENTIFIER = re.compile(_PART)
# what a terminal would act on or hide: control and formatting characters
UNPRINTABLE = r"\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202f\u2060-\u206f\ufeff\ufff9-\uffff"  # noqa: E501
_LINE = re.compile(f"[^{UNPRINTABLE}]*")


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
            if isinstance(value, yaml.PlainScalar)
            else f"the text {printable(value, 40)!r}"
        )
    return f"`{value}`"


def match_whole(pattern: str) -> str:
    """`pattern` as a JSON schema writes it to match a whole text, for Python and JavaScript."""
    return f"^(?:{pattern})$(?!\\n)"


def fits(schema: Mapping[str, Any], written: str) -> bool:
    """Whether text has the `pattern`, compiled at first use, and the `maxLength` of a schema."""
    return (
        len(written) <= schema.get("maxLength", len(written))
        and re.search(schema["pattern"], written) is not None
    )


def _bounded(number: int) -> int:
    if abs(number) > MOST:
        wrong("M114", f"an integer lies between -{MOST} and {MOST}")
    return number


def read_text(value: Any) -> str:
    if isinstance(value, str) and not (isinstance(value, yaml.PlainScalar) and yaml.is_null(value)):
        return str(value)
    if isinstance(value, Mapping) and len(value) == 1:
        wrong(
            "M106",
            "text is expected, not a mapping",
            "quote a pattern that starts with `{`",
        )
    wrong(
        "M106",
        f"text is expected, not {kind_of(value)}",
        "quote it if it is meant as text" if isinstance(value, str) else None,
    )


def line(value: Any) -> str:
    """Text that plans and messages print as it is."""
    word = read_text(value)
    if not _LINE.fullmatch(word):
        wrong("M114", f"`{printable(word)}` is not one line of printable characters")
    return word


def lone_pattern(value: Any) -> str:
    """A pattern whose captures no other pattern declares."""
    written = read_text(value)
    try:
        parse(written)
    except PatternError as error:
        refuse([Problem(error.code, error.message, error.help, part=(error.start, error.end))])
    return written


def pattern(value: Any) -> str:
    """Text in the form of a pattern; whether its captures hold together depends on its rule."""
    written = read_text(value)
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
        and not isinstance(value, yaml.PlainScalar)
        and yaml.integer(value) is not None
    )
    wrong(
        "M106",
        f"an integer is expected, not {kind_of(value)}",
        "leave the quotes out" if quoted else None,
    )


def count(value: Any) -> int:
    if (number := integer(value)) < 0:
        wrong("M114", f"a number of 0 or more is expected, not {kind_of(value)}")
    return number


def arithmetic(value: Any) -> int | str:
    """An integer, or the text of arithmetic over params that `core.notation` can read."""
    if (number := whole_number(value)) is not None:
        return _bounded(number)
    if not isinstance(value, str) or yaml.is_null(value):
        wrong("M106", f"an integer, `$param` or arithmetic is expected, not {kind_of(value)}")
    try:
        parse_expression(value)
    except PatternError as error:
        refuse([Problem(error.code, error.message, error.help, part=(error.start, error.end))])
    return str(value)


def boolean(value: Any) -> bool:
    if isinstance(value, yaml.PlainScalar) and (truth := yaml.boolean(value)) is not None:
        return truth
    if isinstance(value, bool):
        return value
    wrong("M106", f"true or false is expected, not {kind_of(value)}")


def number(value: Any) -> int | float:
    typed = numeric(value)
    if isinstance(typed, (int, float)) and not isinstance(typed, bool):
        return typed
    wrong("M106", f"a number is expected, not {kind_of(value)}")


def sequence(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return value
    wrong(
        "M106",
        f"a list is expected, not {kind_of(value)}",
        "write `[…]`" if isinstance(value, str) else None,
    )


def mapping(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value
    wrong("M106", f"a mapping is expected, not {kind_of(value)}")


def scalars(value: Any) -> Any:
    """A value that is no list and no mapping, or a list of such."""
    several = isinstance(value, (list, tuple))
    for number, item in enumerate(value if several else [value]):
        if isinstance(item, (list, tuple, Mapping)) or (yaml.is_null(item) and item is not None):
            wrong(
                "M106",
                f"a value or a list of values is expected, not {kind_of(item)}",
                None,
                (number,) if several else (),
            )
    return value


def one_of(*choices: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        word = read_text(value)
        if word not in choices:
            wrong(
                "M114",
                f"`{printable(word)}` is not one of {listed(list(choices))}",
                did_you_mean(word, list(choices)),
            )
        return word

    return check


def word(value: Any) -> str:
    """Text that YAML reads as text: what one reader takes for a number would be two names."""
    if (
        isinstance(value, yaml.PlainScalar)
        and not yaml.is_null(value)
        and not isinstance(seen(value), str)
    ):
        wrong(
            "M106",
            f"a name is expected, not {kind_of(value)}",
            "quote it if it is meant as a name",
        )
    return read_text(value)


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


def read_dtype(value: Any) -> str:
    """The dtype that a text names."""
    name = read_text(value)
    known = dtype(name)
    if known is None:
        refuse([unknown_dtype(name)])
    return known


TEXT = {"type": ["string", "number", "boolean"]}
LINE = {**TEXT, "pattern": match_whole(f"[^{UNPRINTABLE}]*")}
REASON = {**TEXT, "pattern": match_whole(f"[^{UNPRINTABLE}]*[^{UNPRINTABLE} ][^{UNPRINTABLE}]*")}
NAMED = {"type": "string", "pattern": match_whole(_PART)}
CAPTURE = {"type": "string", "pattern": match_whole(_WORD)}


def _arithmetic(name: str) -> str:
    """All of the notation of arithmetic over what `name` matches but the balance of parentheses."""
    operand = rf"(?:[-(] *)*(?:[0-9]+|{name})(?: *\))*"
    return rf" *{operand}(?: *(?:[-+*%]|//) *{operand})* *"


# an index speaks of a capture, and is more than its name
_INDEX = (
    rf"(?=(?:[^A-Za-z_$}}]|\${_WORD})*[A-Za-z_])(?![( ]*{_WORD}[) "
    rf"]*\}}){_arithmetic(rf'[$]?{_WORD}')}"
)
# the notation of patterns, but for types of captures, linear indices and what is side by side
PATTERN = {
    **TEXT,
    "pattern": match_whole(
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
    "pattern": match_whole(_arithmetic(rf"\${_WORD}")),
    "maxLength": LONGEST,
}
# a NaN is neither less nor greater than any number, and so the only one that lies between 1 and 0
FINITE = {
    "minimum": -float_info.max,
    "maximum": float_info.max,
    "if": {"type": "number", "minimum": 1, "maximum": 0},
    "then": False,
}
REFERENCE = {"pattern": match_whole(rf"\${_WORD}")}
# one value, or a list of them
SCALARS = {"type": [*TEXT["type"], "array"], "items": TEXT}


def one_or_list(item: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an item or a list of items; no `oneOf`, so a mistake is shown at its place."""
    return {
        "if": {"type": "array"},
        "then": {"items": dict(item), "minItems": 1},
        "else": dict(item),
    }


Text = Annotated[str, BeforeValidator(read_text), WithJsonSchema(TEXT)]
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
    WithJsonSchema({"type": "string", "pattern": match_whole(f"{_PART}(?:/{_PART})*")}),
]
Name = Annotated[str, BeforeValidator(plain_name), WithJsonSchema(NAMED)]


def each(items: Any, read: Callable[[Any], Any]) -> Any:
    """`items` (a list or a mapping), each value read; all wrong ones are refused together."""
    pairs = items.items() if isinstance(items, Mapping) else enumerate(items)
    out: dict[Any, Any] = {}
    problems: list[Problem] = []
    for key, item in pairs:
        try:
            out[key] = read(item)
        except PydanticCustomError as error:
            problems += [p.below(key) for p in refused(error)]
    if problems:
        refuse(problems)
    return out if isinstance(items, Mapping) else list(out.values())


# Side files, and places in them. What may be named is one pattern, so that the schema refuses what
# the loader refuses. It leaves out what migrate writes itself and what a migration never carries: a
# rule that patched such a file would begin it anew in each output.


def _any_case(words: Iterable[str]) -> str:
    """What matches each text that `str.lower` makes one of the words."""
    others = {"k": "\\u212a"}
    alike = {c: f"[{c}{c.upper()}{others.get(c, '')}]" for c in "abcdefghijklmnopqrstuvwxyz"}
    return "|".join("".join(alike.get(c) or _literal(c) for c in word) for word in words)


def _literal(text: str) -> str:
    return text.replace(".", r"\.")


_PLACE_END = "(?=#|$)"
_SIDE_NAME = rf"[^/\\#{UNPRINTABLE}]{{1,255}}"
_SIDE_FOLDER = (
    rf"(?!\.)(?!(?:{_any_case(CACHES)})/)(?![^/#]*(?:{_any_case([PARTIAL])})/){_SIDE_NAME}/"
)
_OWN_FILES = "|".join(map(_literal, (HISTORY, ITEMS, METADATA)))
_SIDE_FILE = (
    rf"(?!\.\.?{_PLACE_END})(?!(?:{_OWN_FILES}){_PLACE_END})"
    rf"(?![^/#]*(?:{_any_case(WEIGHT_SUFFIXES)}){_PLACE_END}){_SIDE_NAME}"
)
_SIDE_PATH = rf"(?:{_SIDE_FOLDER}){{0,{MAX_DEPTH}}}{_SIDE_FILE}"
_PLACE_KEYS = rf"[^.#{UNPRINTABLE}]+(?:\.[^.#{UNPRINTABLE}]+)*"
# a path that is one, whatever it names
_ANY_PATH = {
    "pattern": match_whole(rf"(?!\.\.?(?:/|$)){_SIDE_NAME}(?:/(?!\.\.?(?:/|$)){_SIDE_NAME})*")
}

PATH = {"type": "string", "pattern": match_whole(_SIDE_PATH)}
# a place in config.json needs no file
PLACE = {"type": "string", "pattern": match_whole(rf"(?:{_SIDE_PATH}#)?{_PLACE_KEYS}")}
PLACES = {**PLACE, "type": ["string", "array"], "items": PLACE, "minItems": 1}
LIST = {"type": "string", "pattern": match_whole(rf"{_SIDE_PATH}#{_PLACE_KEYS}")}
# a place among the values of the checkpoint
VALUE = {"type": "string", "pattern": match_whole(_PLACE_KEYS)}
VALUES = {**VALUE, "type": ["string", "array"], "items": VALUE, "minItems": 1}


def _read_path(value: Any) -> str:
    name = word(value)
    if not fits(PATH, name):
        if fits(_ANY_PATH, name):
            wrong(
                "M114",
                f"`{printable(name)}` is not a side file: migrate writes such files itself, or "
                "leaves them behind",
            )
        wrong(
            "M114",
            f"`{printable(name)}` is not a path below the checkpoint",
            "name a side file, such as config.json",
        )
    return name


def _place_reader(schema: dict[str, Any], what: str, form: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        reference = word(value)
        if not fits(schema, reference):
            wrong("M114", f"`{printable(reference)}` {what}", form)
        return reference

    return read


def _places_reader(read: Callable[[Any], str], form: str) -> Callable[[Any], str | tuple[str, ...]]:
    """Reads one place, or several; a list of one is that one."""

    def read_all(value: Any) -> str | tuple[str, ...]:
        if not isinstance(value, (list, tuple)):
            if isinstance(value, Mapping):
                wrong(
                    "M106", f"a place or a list of places is expected, not {kind_of(value)}", form
                )
            return read(value)
        found = tuple(each(value, read)) or wrong("M114", "an empty list names no place")
        return found[0] if len(found) == 1 else found

    return read_all


_PLACE_FORM, _VALUE_FORM = "[file.json#]key.path", "args.num_layers"
_read_places = _places_reader(
    _place_reader(PLACE, "is not a place in a side file", _PLACE_FORM), _PLACE_FORM
)
_read_values = _places_reader(
    _place_reader(VALUE, "is not a place among the values of a checkpoint", _VALUE_FORM),
    _VALUE_FORM,
)


SidePath = Annotated[str, BeforeValidator(_read_path), WithJsonSchema(PATH)]
Places = Annotated[str | tuple[str, ...], BeforeValidator(_read_places), WithJsonSchema(PLACES)]
ValuePlaces = Annotated[
    str | tuple[str, ...], BeforeValidator(_read_values), WithJsonSchema(VALUES)
]
ListPlace = Annotated[
    str,
    BeforeValidator(
        _place_reader(LIST, "does not name a list in a side file", "file.json#key.path")
    ),
    WithJsonSchema(LIST),
]


# `requires`: comparisons of dotted numbers; pre-releases and wildcards are not worth a dependency
_COMPARED = r"\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,9}(?:\.[0-9]{1,9}){0,5})\s*"
_COMPARISON = re.compile(_COMPARED)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    "<": operator.lt,
}  # fmt: skip

Requires = Annotated[
    str,
    BeforeValidator(read_text),
    WithJsonSchema({"type": "string", "pattern": match_whole(f"{_COMPARED}(?:,{_COMPARED})*")}),
]


def unmet(requires: Any, version: str = __version__) -> Problem | None:
    """Why `version` cannot read a file with this `requires` (M107, or M114 if unclear), or None."""
    if not isinstance(requires, str) or yaml.is_null(requires):
        return None
    for part in requires.split(","):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            return Problem(
                "M114",
                f"`{part.strip()}` is not a comparison of versions",
                'write `requires: ">=0.1"`',
            )
        if not _OPERATORS[match[1]](_version_numbers(version), _version_numbers(match[2])):
            return Problem(
                "M107",
                f"the file requires migrate {part.strip()}, this is {version}",
                "install a release of migrate that fits",
            )
    return None


def _version_numbers(version: str) -> tuple[int, ...]:
    numbers = [int(n) for n in version.split(".")]
    return tuple(numbers + [0] * (6 - len(numbers)))


_MISSING = {
    "from": "a rule reads keys that are there; one that adds a tensor beside each has "
    "`keep_source: true` and `fill`"
}


class FieldProblem(NamedTuple):
    """One problem of a validated value: where it is, and what."""

    path: tuple[str | int, ...]
    problem: Problem


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[FieldProblem]:
    """All that `error` reports, as problems with paths from the root of what `model` validated."""
    out: list[FieldProblem] = []
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
                FieldProblem((*loc, *p.at), p._replace(key=True) if keyed else p)
                for p in context["problems"]
            ]
        elif kind == "missing":
            hint = None if loc[:-1] in misspelt else _MISSING.get(str(loc[-1]))
            out.append(FieldProblem(loc[:-1], Problem("M101", f"`{loc[-1]}` is missing", hint)))
        elif kind == "extra_forbidden":
            word, known = str(loc[-1]), _field_names(model, loc[:-1])
            near = get_close_matches(word, known, n=1, cutoff=0.6)
            hint = (
                f"did you mean `{near[0]}`?" if near else f"the fields here are {listed(known, 30)}"
            )
            out.append(
                FieldProblem(
                    loc,
                    Problem("M103", f"there is no field `{printable(word)}` here", hint, key=True),
                )
            )
        elif kind in ("model_type", "model_attributes_type", "dict_type", "dataclass_type"):
            out.append(FieldProblem(loc, Problem("M106", "a mapping is expected")))
        elif kind in ("list_type", "tuple_type"):
            out.append(FieldProblem(loc, Problem("M106", "a list is expected")))
        elif kind == "too_short" or kind == "too_long":
            out.append(FieldProblem(loc, Problem("M114", str(item["msg"]).lower())))
        else:
            message = str(item["msg"])
            out.append(FieldProblem(loc, Problem("M114", message[:1].lower() + message[1:])))
    return out


def _field_names(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
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
