"""Params: what a rule needs to know and the tensors' names do not show.

A value may come from several sources, and all that speak must agree: a checkpoint whose
configuration contradicts the command line is a wrong question, not one for a precedence table. Only
a default steps back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..core.errors import PatternError, Report, Span, did_you_mean, listed, option, printable
from ..core.keys import FOREIGN, Pattern, foreign, parse
from ..core.notation import parse_expression
from ..core.spec import ALIASES
from ..core.templates import group, matches
from ..source import yaml
from .arguments import MOST, PARAM, whole_number

if TYPE_CHECKING:
    from .files import LoadedFile
    from .param_model import Groups, Param

# what the caller says; `spell_source` spells it
GIVEN = "params"
STAMP = "the stamp"
CONFIG = "config.json"
# what begins the name of a source that is a tensor's dtype
DTYPE_OF = "the dtype of "


class RefusedError(ValueError):
    """A value is not one that its param can have; the message says why without its name."""


def declare(files: Iterable[LoadedFile]) -> dict[str, Param]:
    """The params of all files by name; a name that two files declare with different types is M114.

    The first declaration counts. It is optional only where all that declare it say so.
    """
    report = Report()
    out: dict[str, Param] = {}
    first: dict[str, LoadedFile] = {}
    for file in files:
        for name, param in file.model.params.items():
            other = out.setdefault(name, param)
            if other is param:
                first[name] = file
            elif (other.type, other.items) != (param.type, param.items):
                spans = (file.span("params", name), first[name].span("params", name))
                message = (
                    f"two files on this path declare `{name}` as {_type(other)} and as "
                    f"{_type(param)}"
                )
                report.add("M114", message, spans=spans, help="give one of them another name")
            elif other.optional and not param.optional:
                out[name] = other.model_copy(update={"optional": False})
    report.check()
    return out


def resolve(
    params: Mapping[str, Param],
    given: Mapping[str, Any],
    extra_sources: Sequence[tuple[str, Mapping[str, Any]]] = (),
    spans: Mapping[str, Span] | None = None,
    known: Collection[str] | None = None,
    *,
    lost: Mapping[str, str] | None = None,
    from_tensors: Mapping[str, list[str] | str] | None = None,
    chosen: bool = False,
) -> dict[str, Any]:
    """The value of each param that has one, typed by its declaration; unset ones are absent.

    `given` is what `--set` says, as text or typed; `extra_sources` are (name for messages, {param:
    value}), where None and absence both mean that the source does not speak. `spans` are the
    declarations, for messages. `known`: names that may be given although their values are asked for
    elsewhere. `lost`: why the configuration lacks a param. `from_tensors`: what tensors say
    where no source speaks or, as text, why they do not. `chosen`: a person is free to say otherwise
    than the sources of a param that is `free`. Raises all problems at once: M112 a name
    that is not a param, M114 a value it cannot have, M509 no value, M510 sources that differ.
    """
    report = Report()
    known = list(dict.fromkeys([*params, *(known or ())]))
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or (
                f"the params here are {listed(known)}" if known else "these rules have no params"
            )
            report.add(
                "M112",
                f"{spell_source(GIVEN)} {printable(name)}: there is no such param",
                help=hint,
            )
    out: dict[str, Any] = {}
    # those that have another value than the checkpoint is known to have
    moved = frozenset(
        name
        for name, param in params.items()
        if given.get(name) is not None and _moves(name, param, given, extra_sources)
    )
    if chosen and given:
        extra_sources = [(of, unless_chosen(said, given, params)) for of, said in extra_sources]
    for name, param in params.items():
        span = (spans or {}).get(name)
        at = (span,) if span else ()
        said: list[tuple[str, Any]] = []
        failed = False
        sources = [(GIVEN, given), *extra_sources]
        if name not in given and moved.intersection(_names(param, out)):
            # what was there belongs to another value of what it is made of
            sources, moved = [], moved | {name}
        for source, values in sources:
            if values.get(name) is None:
                continue
            try:
                said.append((source, convert(values[name], param, is_text=source == GIVEN)))
            except RefusedError as error:
                failed = True
                if param.dtype is not None and source.startswith(DTYPE_OF):
                    # the tensor is the problem, and not what somebody wrote
                    key, taken = source.removeprefix(DTYPE_OF), map(str, param.choices or ())
                    report.add(
                        "M303",
                        f"{key} is {values[name]}; param `{name}`, its dtype, is one of "
                        f"{listed([*taken])}",
                        spans=at,
                        help="look where the tensor comes from, or give it another dtype first, "
                        "with a `cast` in a rule file of your own",
                    )
                    continue
                report.add(
                    "M114",
                    f"param `{name}` from {spell_source(source)}: {error}",
                    spans=at,
                    help=_takes(param),
                )
        if len(said) > 1 and len({_comparable(value) for _, value in said}) > 1:
            notes = tuple(
                f"{spell_source(source)} says {_spell_value(value)}" for source, value in said
            )
            hint = (
                "correct the source that is wrong; a given value does not override the checkpoint"
            )
            if param.dtype is not None and not {GIVEN, STAMP} & {source for source, _ in said}:
                names = "|".join(dict.fromkeys(str(value) for _, value in said))
                hint = (
                    f"{option('params', f'{name}={names}')} says which one counts; on a "
                    "downgrade tensors that had another one return in it"
                )
            report.add(
                "M510", f"the sources of param `{name}` disagree", spans=at, notes=notes, help=hint
            )
        elif said:
            out[name] = said[0][1]
        elif failed:
            continue
        elif isinstance(found := (from_tensors or {}).get(name), list):
            out[name] = convert(found, param)
        elif param.follows and _names(param, out):
            try:
                out[name] = convert(following(param, out), param)
            except RefusedError as error:
                what = f"param `{name}`, which follows {listed(list(param.follows))}: {error}"
                report.add("M114", what, spans=at, help=_takes(param))
        elif param.has_default:
            out[name] = convert(param.default, param)
        elif not param.optional:
            report.add(
                "M509",
                f"param `{name}` has no value",
                spans=at,
                notes=(
                    *_about(param, (lost or {}).get(name)),
                    *((found,) if isinstance(found, str) else ()),
                ),
                help=_wanted(name, param),
            )
    report.check()
    return out


def chosen(again: Mapping[str, Any], params: Mapping[str, Param]) -> dict[str, Any]:
    """What a person was free to say of an edge that is walked again, by its entry in a stamp."""
    said = again["params"].items()
    return {name: value for name, value in said if name in params and params[name].free}


def unless_chosen(
    said: Mapping[str, Any], given: Mapping[str, Any], params: Mapping[str, Param]
) -> dict[str, Any]:
    """What a source says without what `--set` is free to say otherwise, and does."""
    return {
        name: value
        for name, value in said.items()
        if not (
            given.get(name) is not None
            and params[name].free
            and _moves(name, params[name], given, [("", {name: value})])
        )
    }


def following(param: Param, values: Mapping[str, Any]) -> Any:
    """What the param is made of `values`, those of the params above it; None where one is lacking.

    RefusedError where the arithmetic cannot be done.
    """
    for text in param.follows or ():
        if match := PARAM.fullmatch(text):
            if match[1] in values:
                return values[match[1]]
            continue
        expression = parse_expression(text)
        if all(name in values for name in expression.names):
            try:
                return expression.evaluate(values)
            except PatternError as error:
                raise RefusedError(error.message) from None
    return None


def _names(param: Param, values: Mapping[str, Any]) -> set[str]:
    """The params that it follows, where it follows any of these values."""
    for text in param.follows or ():
        names = set(parse_expression(text).names)
        if names <= values.keys():
            return names
    return set()


def _moves(
    name: str,
    param: Param,
    given: Mapping[str, Any],
    others: Sequence[tuple[str, Mapping[str, Any]]],
) -> bool:
    """Whether no source but `--set` says the value that it gives."""
    try:
        value = _comparable(convert(given[name], param, is_text=True))
        known = [values[name] for _, values in others if values.get(name) is not None]
        if not known and param.follows is None:
            # it says what was not known, and no other value of what was
            return False
        return all(_comparable(convert(one, param)) != value for one in known)
    except RefusedError:
        return False


def never(
    asked: Mapping[str, Any], params: Mapping[str, Param], what: str
) -> Iterator[tuple[str, str]]:
    """(name, why) of each `$param` that can never be what `what`, in words, asks of it."""
    for name, wanted in asked.items():
        param = params.get(name[1:]) if name.startswith("$") else None
        if param is None:
            continue
        if param.type == "list" or isinstance(wanted, Mapping):
            why = f"{what} asks whether a param is one of some values"
            yield name, f"{why}; `{printable(name)}` is a {param.type}"
            continue
        for value in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
            try:
                convert(value, param, is_text=True)
            except RefusedError as error:
                yield name, f"`{printable(name)}` is never that: {error}"


def spell_source(source: str) -> str:
    """A source of values as messages call it."""
    return option("params") if source == GIVEN else printable(source)


def place(reference: str) -> tuple[str, tuple[str, ...]]:
    """The side file and the names in it that `[file.json#]key.path` means."""
    file, mark, keys = reference.rpartition("#")
    return (file if mark else CONFIG), tuple(keys.split("."))


def expand(
    name: str,
    value: Any,
    param: Param,
    names: Callable[[], Iterable[str]],
    spans: tuple[Span, ...] = (),
    said: Iterable[Any] = (),
) -> Any:
    """The value with the items of a list that are patterns replaced by what they fit among `names`,
    in their order, each once.

    Where one of the values `said` by other sources is a list of the same names, it is in the order
    of that: patterns say none. Items without braces stay as they are. M114 for an item that is not
    a pattern, M213 for one that fits nothing.
    """
    if not has_patterns(value, param):
        return value
    report = Report()
    try:
        items = _items(value) if isinstance(value, str) else list(value)
    except RefusedError as error:
        report.add(
            "M114",
            f"param `{name}` from {spell_source(GIVEN)}: {error}",
            spans=spans,
            help=_takes(param),
        )
        report.check()
    there = list(dict.fromkeys(names()))
    out: dict[Any, None] = {}
    for item in items:
        if not isinstance(item, str) or not ("{" in item or "}" in item):
            out[item] = None
            continue
        try:
            pattern = parse(item)
            if pattern.params or pattern.has_flat:
                raise PatternError(
                    "M201", "a pattern here has no params and no flat captures", 0, len(item)
                )
        except PatternError as error:
            report.add(
                "M114",
                f"param `{name}`: {printable(item, 120)} is not a pattern: {error.message}",
                spans=spans,
                help=error.help,
            )
            continue
        fitting = [known for known in there if matches(pattern, known)]
        if not fitting:
            _report_idle(name, item, pattern, there, spans, report)
        out.update(dict.fromkeys(fitting))
    report.check()
    found = sorted(map(repr, out))
    return next(
        (
            list(other)
            for other in said
            if isinstance(other, list) and sorted(map(repr, other)) == found
        ),
        list(out),
    )


def why_no_names(groups: Groups) -> str:
    """Why tensors do not give names, where none that is read is numbered as `groups` says."""
    return f"no tensors that are read here fit {groups.key}, so they do not determine it"


def has_patterns(value: Any, param: Param) -> bool:
    """Whether the value is a list in which an item is meant as a pattern: one with braces."""
    if param.type != "list" or param.items == "int" or not isinstance(value, (str, list, tuple)):
        return False
    return any(
        "{" in item or "}" in item
        for item in ([value] if isinstance(value, str) else value)
        if isinstance(item, str)
    )


def _report_idle(
    name: str,
    item: str,
    pattern: Pattern,
    names: Sequence[str],
    spans: tuple[Span, ...],
    report: Report,
) -> None:
    near = max(
        ((pattern.failure(t.keys[0]), t.keys[0]) for t in group(names)),
        key=lambda found: found[0].progress,
        default=None,
    )
    notes: tuple[str, ...] = ()
    if near is not None and near[0].progress:
        failure, known = near
        notes = (
            (
                f"nearest name: {printable(known)}; it fails at {printable(failure.actual)!r}, "
                f"where the pattern takes {failure.expected}"
            ),
        )
    hint = (
        FOREIGN
        if foreign(pattern)
        else "a pattern stands for names of modules and of tensors, whole; `migrate inspect` "
        "shows them"
    )
    report.add(
        "M213",
        f"param `{name}`: no name of the checkpoint fits {printable(item, 120)}",
        spans=spans,
        notes=notes,
        help=hint,
    )


def spell_place(reference: str) -> str:
    """The place with its file, for messages."""
    file, keys = place(reference)
    return printable(f"{file}#{'.'.join(keys)}")


def refuse_others(
    files: Iterable[LoadedFile], values: Mapping[str, Any], declared: Mapping[str, Param]
) -> None:
    """M114 where another file of the edge declares a param so that it cannot have its value, or
    gives it another default.
    """
    report = Report()
    for file in files:
        for name, param in file.model.params.items():
            if name not in values:
                continue
            try:
                convert(values[name], param)
            except RefusedError as error:
                report.add("M114", f"param `{name}`: {error}", spans=(file.span("params", name),))
            known = declared[name]
            if param.has_default and known.has_default and param.default != known.default:
                one, other = (printable(str(p.default), 80) for p in (known, param))
                report.add(
                    "M114",
                    f"two files of one edge give `{name}` the defaults {one} and {other}",
                    spans=(file.span("params", name),),
                )
    report.check()


def convert(value: Any, param: Param, *, is_text: bool = False, choices: bool = True) -> Any:
    """`value` as the param's type; RefusedError if it is not one, out of bounds, or (with
    `choices`) not among them.

    With `is_text` a str is read as `--set` writes it: `3`, `true`, `a,b` or a flow list; the empty
    text is for a list the one empty name, which is the root module.
    """
    if is_text and isinstance(value, str):
        value = _from_text(value, param)
    if param.type == "list":
        if param.value and isinstance(value, str):
            # an argument that takes several words has one word alone as it is
            value = [value]
        if not isinstance(value, (list, tuple)):
            raise RefusedError(f"{_spell_value(value)} is not a list")
        # each line of a file is text
        words = [
            _word(item, param.items) if is_text and isinstance(item, str) else item
            for item in value
        ]
        typed: Any = [_scalar(item, param.items, param) for item in words]
    else:
        typed = _scalar(value, param.type, param)
    if choices and param.choices is not None:
        spell = (lambda item: str(float(item))) if param.type == "float" else str
        for item in typed if isinstance(typed, list) else [typed]:
            if spell(item) not in map(spell, param.choices):
                raise RefusedError(
                    f"{_spell_value(item)} is not one of "
                    f"{listed([str(choice) for choice in param.choices])}"
                )
    return typed


def _from_text(text: str, param: Param) -> Any:
    if param.type == "list":
        return _items(text)
    return _word(text, param.type)


def _items(text: str) -> list[str]:
    if not text.lstrip().startswith("["):
        # alternatives of a pattern may hold commas
        return [item.strip() for item in re.split(r",(?![^{}]*\})", text)]
    report = Report()
    document = yaml.read_yaml(text, spell_source(GIVEN), report)
    data = document.data
    if (
        report.diagnostics
        or not isinstance(data, list)
        or not all(isinstance(item, str) for item in data)
    ):
        raise RefusedError(f"{_spell_value(text)} is not a list")
    return [str(item) for item in data]


def _word(text: str, type: str | None) -> Any:
    number = whole_number(yaml.PlainScalar(text)) if type == "int" else yaml.integer(text)
    if type == "int" or (type is None and number is not None and str(number) == text):
        return text if number is None else number
    if type == "bool":
        truth = yaml.boolean(text)
        return text if truth is None else truth
    if type == "float":
        return yaml.core(yaml.PlainScalar(text))
    return text


def _scalar(value: Any, type: str | None, param: Param) -> Any:
    if type == "bool":
        if not isinstance(value, bool):
            raise RefusedError(f"{_spell_value(value)} is neither true nor false")
        return value
    if type == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RefusedError(f"{_spell_value(value)} is not a number")
        if not isfinite(value):
            raise RefusedError(f"{_spell_value(value)} is not finite")
        return float(value)
    if type == "str":
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise RefusedError(f"{_spell_value(value)} is not text")
        return str(value) if param.dtype is None else ALIASES.get(str(value), str(value))
    if type == "int" and isinstance(value, float):
        # 3.0 is an integer, as in rule files
        value = value if (number := whole_number(value)) is None else number
    if type == "int" or (isinstance(value, int) and not isinstance(value, bool)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedError(f"{_spell_value(value)} is not an integer")
        if abs(value) > MOST:
            raise RefusedError(f"an integer lies between -{MOST} and {MOST}")
        if param.minimum is not None and value < param.minimum:
            raise RefusedError(f"{value} is below the minimum {param.minimum}")
        if param.maximum is not None and value > param.maximum:
            raise RefusedError(f"{value} is above the maximum {param.maximum}")
        return value
    if not isinstance(value, (str, bool)):
        raise RefusedError(f"{_spell_value(value)} is neither text nor an integer")
    return value


def _comparable(value: Any) -> Any:
    return (type(value), tuple(map(_comparable, value)) if isinstance(value, list) else value)


def _spell_value(value: Any) -> str:
    return printable(
        repr(value)
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, default=str),
        80,
    )


def _takes(param: Param) -> str:
    """What a value of the param is, for a help."""
    bounds = [
        f"{word} {number}"
        for word, number in (("from", param.minimum), ("to", param.maximum))
        if number is not None
    ]
    said = [
        _type(param),
        *bounds,
        *([f"one of {listed([str(choice) for choice in param.choices])}"] if param.choices else []),
    ]
    return f"it takes {', '.join(said)}" + (f": {param.title}" if param.title else "")


def _type(param: Param) -> str:
    return f"{param.type} of {param.items}" if param.items else param.type


def _about(param: Param, lost: str | None) -> tuple[str, ...]:
    notes = []
    if lost is not None:
        notes.append(lost)
    elif param.places:
        there = listed([spell_place(reference) for reference in param.places])
        one = len(param.places) == 1
        notes.append(
            f"its {'place' if one else 'places'} in the configuration {'is' if one else 'are'} "
            f"{there}, and nothing is there"
        )
    if param.value_places:
        notes.append(
            f"among the values of the checkpoint it would be {listed([*param.value_places])}, and "
            "nothing is there"
        )
    if param.dtype:
        notes.append(
            f"it is the dtype of {listed(list(param.dtype.key))}, and no such tensor is there"
        )
    if param.shape:
        keys_of = listed(list(param.shape.key))
        if param.shape.count is None:
            notes.append(
                f"it is axis {param.shape.dim} of {keys_of}, and no such tensor has that axis"
            )
        else:
            notes.append(
                f"it is the number of {{{param.shape.count}}} in {keys_of}, and no such tensor is "
                "there"
            )
    return tuple(notes)


def _wanted(name: str, param: Param) -> str:
    """How a value is given, and what it means; never a value, because one that is taken over
    without a thought can destroy weights.
    """
    kind = (
        f"one of {listed([str(choice) for choice in param.choices])}"
        if param.choices
        else _KINDS[_type(param)]
    )
    meaning = f": {param.title}" if param.title else ""
    return f"{option('params', f'{name}=…')}, {kind}{meaning}"


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "list of int": "a list of integers",
    "list of str": "a list of names",
}
