"""How ops and codecs declare the arguments that rules write: fields of a dataclass, each with its
description and its limits.

From these fields are made the model of what authors write, the JSON schema, the reference page and
an inverse (`rules/arguments.py`, `rules/steps.py`); no table repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import isfinite
from typing import Annotated, Any, NamedTuple, TypeAlias

from .errors import OpError


@dataclass(frozen=True, slots=True)
class Written:
    """Marks an annotation with the form in which an author writes the argument.

    An op or a codec only ever sees the resolved value, which is the annotated type.
    `typing.get_type_hints(Args, include_extras=True)` shows the mark to the code that makes the
    model, the JSON schema or a docs table.
    """

    form: str


# a number, `$param`, or integer arithmetic over params
Integer: TypeAlias = Annotated[int, Written("integer")]
Integers: TypeAlias = Annotated[tuple[int, ...], Written("integers")]
Number: TypeAlias = Annotated[float, Written("number")]
Text: TypeAlias = Annotated[str, Written("text")]
# true, false or `$param`
Flag: TypeAlias = Annotated[bool, Written("flag")]
# torch's name of a dtype, or one that is short for it
Dtype: TypeAlias = Annotated[str, Written("dtype")]
# the name of a capture, without braces
Capture: TypeAlias = Annotated[str, Written("capture")]
# a list, or a mapping from capture value to integer; resolved into a tuple in that order
Sizes: TypeAlias = Annotated[tuple[int, ...], Written("sizes")]
# mapping of axis name to integer
Axes: TypeAlias = Annotated[dict[str, int], Written("axes")]
# mapping of capture name to the values an op is limited to
Only: TypeAlias = Annotated[dict[str, list[Any]], Written("only")]
# the Args of the codec that the argument `codec` names; rules write its fields beside the op's own
CodecArgs: TypeAlias = Annotated[Any, Written("codec")]


class NumberFormat(NamedTuple):
    """A codec and what it is given, None where there is no codec of this name."""

    codec: str
    args: Any


# a mapping with the name of a codec and its arguments
Formatted: TypeAlias = Annotated[NumberFormat, Written("format")]


def arg(
    doc: str,
    *,
    alias: str | None = None,
    least: int | None = None,
    length: int | None = None,
    finite: bool = False,
    distinct: bool = False,
    once: int | None = None,
    words: Sequence[str] = (),
    values: Sequence[int] = (),
    form: str | None = None,
    encoding: bool = False,
    **default: Any,
) -> Any:
    """A dataclass field of Args with its one-line description; `default=` or `default_factory=`
    makes it optional.

    `alias` is what authors write where a field cannot have that name (`from`). What a rule file
    that is read says of the form of an argument, and its schema as well: `least` an integer or each
    of several can be, or the length of a text; `length` of a list, `finite` numbers, `distinct`
    items, the integer that stands in a list at most `once`, the `words` that a text can be, the
    `values` that an integer can be, the `form` it has (a regular expression). `validate` of the op
    or codec sees what params made of it. `encoding`: an argument of a codec that decoding has no
    use for and hands to its inverse.
    """
    said = {
        "doc": doc, "alias": alias, "least": least, "length": length, "finite": finite or None,
        "distinct": distinct or None, "once": once, "words": tuple(words) or None,
        "values": tuple(values) or None, "form": form, "encoding": encoding or None,
    }  # fmt: skip
    return field(
        metadata={name: value for name, value in said.items() if value is not None}, **default
    )


class _Limits(NamedTuple):
    """What `arg` says of one argument; `word` is what authors call it."""

    word: str
    least: int | None
    length: int | None
    finite: bool
    once: int | None
    words: tuple[str, ...]
    values: tuple[int, ...]


@cache
def _limits(declared: type) -> tuple[tuple[str, _Limits], ...]:
    """(field, limits) of the arguments of which something is said."""
    out = []
    for one in fields(declared):
        said = one.metadata
        found = _Limits(
            said.get("alias", one.name), said.get("least"), said.get("length"),
            said.get("finite", False), said.get("once"), said.get("words", ()),
            said.get("values", ()),
        )  # fmt: skip
        if any(limit is not None and limit is not False and limit != () for limit in found[1:]):
            out.append((one.name, found))
    return tuple(out)


def check_limits(args: Any, label: Callable[[], str]) -> None:
    """OpError M308 for the first argument outside of what its declaration says; the message begins
    with `label`.
    """
    for name, limits in _limits(args.__class__):
        value = getattr(args, name)
        if value is not None and (wrong := _wrong(limits, value)):
            shown = [*_members(value)] if isinstance(value, (tuple, list, dict)) else value
            raise OpError("M308", f"{label()}: `{limits.word}` is {shown}, {wrong}")


def _wrong(limits: _Limits, value: Any) -> str:
    """What the limits say against a value; empty where it is within them."""
    several = isinstance(value, (tuple, list, dict))
    members = _members(value) if several else (value,)
    if limits.length is not None and len(members) != limits.length:
        return f"it must have {limits.length} members"
    if limits.once is not None and members.count(limits.once) > 1:
        return f"{limits.once} may stand in it once"
    known = limits.words or limits.values
    if known and value not in known:
        return f"it must be one of {', '.join(map(str, known))}"
    if limits.finite and not all(isfinite(member) for member in members):
        return "it must be finite"
    if (least := limits.least) is not None:
        sizes = [len(member) if isinstance(member, str) else member for member in members]
        if sizes and min(sizes) < least:
            if isinstance(value, str):
                return f"it must have at least {least} characters"
            return f"{'its members' if several else 'it'} must be at least {least}"
    return ""


def _members(value: Any) -> tuple[Any, ...]:
    return tuple(value.values() if isinstance(value, dict) else value)
