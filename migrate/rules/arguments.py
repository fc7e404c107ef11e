"""The scalars of a rule file and the arguments of an op, from what is written to what the op gets.

A scalar is a `$param`, a number, a truth or text, as an editor's YAML 1.2 parser reads it. Runs by
rules that ship ask for these too, and need no model of what people write.

An op declares its arguments once, as a stdlib dataclass (`core/declaration.py`), and so does a
codec, whose arguments authors write beside those of the op that names it. From it come `resolve`,
which fills the params in, and, where a file is read as its author wrote it, the pydantic model of
`steps`. Ops that no file uses cost nothing.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from math import inf
from sys import float_info
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from .. import codecs, ops
from ..core.declaration import NumberFormat, Written
from ..core.errors import OpError, PatternError, did_you_mean, listed, option, printable
from ..core.notation import Unset, parse_expression
from ..source import yaml

PARAM = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
# what patches of side files take beside params: lists that the plan makes of its own outputs
PLAIN_MODULES, ENCODED_MODULES = MODULE_LISTS = ("plain_modules", "encoded_modules")
# and null as a value, because a merge patch removes what is null in it
NULL = "null"
PATCH_WORDS = (*MODULE_LISTS, NULL)
# what the second of the lists may be narrowed by, beside arguments of the codec
CODEC = "codec"
# what an object for each set of values of arguments is called, what is merged into that of the set
# with most modules, and the list of these arguments
EACH, MOST_OF, BY = "each", "most", "by"
# what the roles of a rule are called where a capture can stand
ROLE = "role"
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_RADIX = re.compile(r"0o[0-7]+|0x[0-9A-Fa-f]+")
# integers of at most this size are one number to every reader of JSON
MOST = 2**53 - 1


def is_choice(patch: Any) -> bool:
    """Whether a value of a patch is `{$encoded_modules: {codec: …}}`: those of the list that are
    stored like this.
    """
    return isinstance(patch, Mapping) and len(patch) == 1 and f"${ENCODED_MODULES}" in patch


def is_each(patch: Any) -> bool:
    """Whether a value of a patch is `{$encoded_modules: {codec: …, by: […]}, each: {…}}`: an object
    with one such object for each set of values that the arguments in `by` have; `most` may stand
    beside.
    """
    wanted = {f"${ENCODED_MODULES}", EACH}
    return isinstance(patch, Mapping) and wanted <= patch.keys() <= {*wanted, MOST_OF}


def is_condition(name: Any) -> bool:
    """Whether a name of a patch is `$param`: the object is written where the param is what stands
    there.
    """
    return isinstance(name, str) and PARAM.fullmatch(name) is not None


def seen(value: Any) -> Any:
    """What an editor's YAML 1.2 parser makes of the value."""
    return (
        int(value, 0)
        if isinstance(value, yaml.PlainScalar) and _RADIX.fullmatch(value)
        else yaml.core(value)
    )


def numeric(value: Any) -> Any:
    """`seen`, where an integer that no double comes near is infinite, as `1e400` is."""
    typed = seen(value)
    return (
        (inf if typed > 0 else -inf)
        if isinstance(typed, int) and abs(typed) > float_info.max
        else typed
    )


def whole_number(value: Any) -> int | None:
    """The integer that an unquoted or a typed value is, or None; `8.0` is one, as in JSON."""
    if isinstance(value, str) and not isinstance(value, yaml.PlainScalar):
        return None
    number = seen(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number if isinstance(number, int) and not isinstance(number, bool) else None


class Argument(NamedTuple):
    """One argument: its field in the dataclass of the op or codec, the author's word for it, its
    written form. `encoding`: of a codec, and decoding only hands it to its inverse.
    """

    field: str
    word: str
    form: str
    doc: str
    default: Any
    least: int | None = None
    length: int | None = None
    finite: bool = False
    distinct: bool = False
    once: int | None = None
    words: tuple[str, ...] = ()
    values: tuple[int, ...] = ()
    encoding: bool = False
    shape: str | None = None


# the form of the field that holds what the codec declares
_OF_CODEC = "codec"
# and that of a mapping with a codec and what it declares
FORMAT = "format"
# forms in which a `$param` is all of the value
_WHOLE = ("text", "dtype", "capture", "only", "flag")
_SAID = ("least", "length", "finite", "distinct", "once", "words", "values", "encoding")


@cache
def _declared(args: type) -> tuple[Argument, ...]:
    hints = get_type_hints(args, include_extras=True)
    out = []
    for field in fields(args):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        said = field.metadata
        made = Argument(
            field.name,
            said.get("alias", field.name),
            _form(hints[field.name]),
            said.get("doc", ""),
            default,
            **{name: said[name] for name in _SAID if name in said},
        )
        out.append(made._replace(shape=said.get("form")))
    return tuple(out)


@cache
def arguments(op: str) -> tuple[Argument, ...]:
    """The arguments of `op` as its dataclass declares them; `default` is MISSING where required."""
    return tuple(a for a in _declared(ops.get(op).Args) if a.form != _OF_CODEC)


@cache
def takes_codec(op: str) -> bool:
    """Whether the arguments of the codec that it names stand beside the op's own."""
    return any(a.form == _OF_CODEC for a in _declared(ops.get(op).Args))


def codec_arguments(op: str | None, codec: Any) -> tuple[Argument, ...] | None:
    """What the codec called `codec` adds to the arguments of `op`, or takes itself (None); None
    where that is not known: the op takes no codec, there is none of this name, or it does not load.
    """
    if op is not None and not takes_codec(op):
        return None
    try:
        return _declared(codecs.get(codec).Args)
    except (LookupError, AttributeError):
        return None


def all_arguments(op: str, written: Mapping[str, Any]) -> tuple[Argument, ...]:
    """The arguments of a step as it is written, those of its codec behind the op's own."""
    return *arguments(op), *(codec_arguments(op, written.get("codec")) or ())


def unknown_argument(codec: str, word: str, known: Sequence[Argument]) -> tuple[str, str]:
    """Message and help for an argument that neither the op nor its codec has."""
    words = [a.word for a in known]
    hint = did_you_mean(word, words) or f"its arguments are {listed(words, 30)}"
    return f"{codec}: there is no argument `{printable(word)}`", hint


def used(op: str, args: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(path below the op's name, name) of each `$param` in the arguments."""
    forms = {a.word: a.form for a in all_arguments(op, args)}
    for argument, value in args.items():
        yield from (
            (path, name)
            for path, name in _params(value, (argument,), forms.get(argument) in _WHOLE)
        )


def resolve(
    op: str, args: Mapping[str, Any], params: Mapping[str, Any], values: Sequence[Any] | None = None
) -> Any:
    """The op's Args with every integer evaluated.

    An argument that is exactly an unset `$param` counts as not written. Sizes that are written by
    capture value come out in the order of `values`. Raises OpError (M103, M114, M509).
    """
    made = _resolved_all(op, arguments(op), args, params, values)
    if takes_codec(op) and (known := codec_arguments(op, made.get("codec"))) is not None:
        codec = made["codec"]
        own = {a.word for a in arguments(op)}
        for word in args:
            if word not in own and not any(a.word == word for a in known):
                message, hint = unknown_argument(codec, word, known)
                raise OpError("M103", message, help=hint)
        made["codec_args"] = codecs.get(codec).Args(
            **_resolved_all(codec, known, args, params, values)
        )
    return ops.get(op).Args(**made)


def as_written(op: str, args: Any) -> dict[str, Any]:
    """The arguments as an author would write them, without those that stand at their default."""
    out = _written(arguments(op), args)
    known = codec_arguments(op, getattr(args, "codec", None))
    return out | _written(known, args.codec_args) if known and args.codec_args is not None else out


def _written(declared: Sequence[Argument], args: Any) -> dict[str, Any]:
    return {
        a.word: _spelled(getattr(args, a.field))
        for a in declared
        if a.default is MISSING or getattr(args, a.field) not in (None, a.default)
    }


def _spelled(value: Any) -> Any:
    if not isinstance(value, NumberFormat):
        return value
    known = codec_arguments(None, value.codec) if value.args is not None else None
    return {"codec": value.codec, **(_written(known, value.args) if known else {})}


def _resolved_all(
    name: str,
    declared: Sequence[Argument],
    args: Mapping[str, Any],
    params: Mapping[str, Any],
    values: Sequence[Any] | None,
) -> dict[str, Any]:
    """field -> value of the arguments of the op or codec called `name` that have one."""
    made: dict[str, Any] = {}
    for argument in declared:
        label = f"{name}: `{argument.word}`"
        written = args.get(argument.word)
        value = (
            None if written is None else _resolved(argument.form, written, params, values, label)
        )
        if value is not None:
            made[argument.field] = value
        elif argument.default is MISSING:
            why = f" ({written} has no value)" if isinstance(written, str) else ""
            raise OpError("M509", f"{label} is needed{why}", help=_how_to_set(written))
    return made


def integer(written: Any, params: Mapping[str, Any], label: str = "") -> int | None:
    """The integer of a number, `$param` or arithmetic; None for exactly an unset `$param`.

    Raises OpError (M114, M509), its message led by `label`.
    """
    lead = f"{label}: " if label else ""
    if isinstance(written, int) and not isinstance(written, bool):
        return written
    value = _reference(written, params)
    if value is None:
        return None
    if value is not _NO_REFERENCE:
        if (number := whole_number(value)) is None:
            raise _misfit(f"{lead}{written}", value, "an integer", "int")
        return number
    try:
        return parse_expression(written).evaluate(params)
    except Unset as error:
        raise OpError(
            "M509",
            f"{lead}{written} needs ${error.name}, which has no value",
            help=_how_to_set(f"${error.name}"),
        ) from None
    except PatternError as error:
        raise OpError(error.code, f"{lead}{error.message}", help=error.help) from None


_NO_REFERENCE = object()


def _reference(written: Any, params: Mapping[str, Any]) -> Any:
    match = PARAM.fullmatch(written) if isinstance(written, str) else None
    return params.get(match[1]) if match else _NO_REFERENCE


def _resolved(
    form: str, written: Any, params: Mapping[str, Any], values: Sequence[Any] | None, label: str
) -> Any:
    if form == "integer":
        return integer(written, params, label)
    value = _reference(written, params)
    if value is None:
        return None
    value = written if value is _NO_REFERENCE else value
    if form == FORMAT:
        return _resolved_format(value, params, values, label)
    if form in ("integers", "sizes"):
        if isinstance(value, Mapping):
            value = _ordered(value, values, label)
        if not isinstance(value, (list, tuple)):
            raise _misfit(label, value, "a list", "list")
        return tuple(_needed(item, params, label) for item in value)
    if form == "axes":
        sizes = {name: integer(item, params, f"{label} of {name}") for name, item in value.items()}
        return {name: size for name, size in sizes.items() if size is not None}
    if form == "number" and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise _misfit(label, value, "a number", "int")
    if form == "flag" and not isinstance(value, bool):
        raise _misfit(label, value, "true or false", "bool")
    if form in ("text", "dtype", "capture") and not isinstance(value, str):
        raise _misfit(label, value, "text", "str")
    return value


def _resolved_format(
    value: Any, params: Mapping[str, Any], values: Sequence[Any] | None, label: str
) -> NumberFormat:
    """A codec with its arguments. OpError M103 for one that it does not have."""
    if not isinstance(value, Mapping):
        raise _misfit(label, value, "a codec with its arguments", "str")
    codec = _resolved("text", value.get("codec"), params, values, f"{label}: `codec`")
    known = codec_arguments(None, codec)
    if codec is None:
        raise OpError("M509", f"{label}: `codec` is needed", help=_how_to_set(value.get("codec")))
    if known is None:
        return NumberFormat(codec, None)
    for word in value:
        if word != "codec" and not any(a.word == word for a in known):
            message, hint = unknown_argument(codec, word, known)
            raise OpError("M103", f"{label}: {message}", help=hint)
    own = _resolved_all(codec, known, value, params, values)
    return NumberFormat(codec, codecs.get(codec).Args(**own))


def _misfit(label: str, value: Any, wanted: str, type: str) -> OpError:
    what = f"{label} is {spell_value(value)}, {wanted} is expected"
    return OpError("M114", what, help=f"write {wanted} there, or a param with `type: {type}`")


def _needed(written: Any, params: Mapping[str, Any], label: str) -> int:
    value = integer(written, params, label)
    if value is None:
        raise OpError(
            "M509", f"{label} needs {written}, which has no value", help=_how_to_set(written)
        )
    return value


def _ordered(sizes: Mapping[str, Any], values: Sequence[Any] | None, label: str) -> list[Any]:
    if values is None:
        raise OpError(
            "M114",
            f"{label} is written by value, but the capture does not list its values",
            help="write a list of sizes",
        )
    names = [str(v) for v in values]
    lacking, extra = [n for n in names if n not in sizes], [n for n in sizes if n not in names]
    if lacking or extra:
        said = [f"lacks {listed(lacking)}"] if lacking else []
        said += [f"has {listed(extra)}, which the capture does not"] if extra else []
        raise OpError(
            "M114", f"{label} {' and '.join(said)}", help=f"the values are {listed(names)}"
        )
    return [sizes[n] for n in names]


def unset(
    args: Mapping[str, Any], params: Mapping[str, Any], titles: Callable[[str], str]
) -> dict[str, str]:
    """Arguments that are a param without a value, and so not written, with what its title says and
    how to give it.
    """
    said = {
        word: PARAM.fullmatch(written) for word, written in args.items() if isinstance(written, str)
    }
    return {
        w: f"`{w}` is {m[0]}{titles(m[1])}, which has no value: {option('params', f'{m[1]}=…')}"
        for w, m in said.items()
        if m and params.get(m[1]) is None
    }


def _how_to_set(written: Any) -> str | None:
    match = PARAM.search(written) if isinstance(written, str) else None
    return option("params", f"{match[1]}=…") if match else None


def _params(
    value: Any, path: tuple[str | int, ...], whole: bool
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(value, str):
        if match := PARAM.fullmatch(value):
            yield path, match[1]
        elif not whole:
            yield from ((path, name) for name in PARAM.findall(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _params(item, (*path, key), whole)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _params(item, (*path, number), whole)


def unwrapped(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(h for h in get_args(hint) if h is not type(None))
    return hint


def _form(hint: Any) -> str:
    hint = unwrapped(hint)
    marks = (
        [mark for mark in get_args(hint)[1:] if isinstance(mark, Written)]
        if get_origin(hint) is Annotated
        else []
    )
    if marks:
        return marks[0].form
    return {int: "integer", str: "text", float: "number"}.get(hint, "value")


def spell_value(value: Any) -> str:
    """A value as rule files write it."""
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 60)


def is_reference(value: Any) -> bool:
    return isinstance(value, str) and PARAM.fullmatch(value) is not None
