"""Keys grouped by form, so that a pattern is matched once per form and not once per key.

A hundred thousand keys have some dozen forms: they differ in the integers that are whole segments.
Those become slots. A pattern is matched against the form, each slot an atom that an integer capture
takes or that stands inside the text of another capture; the values of the single keys are then
filled in column by column.

The result is the same as matching key by key. Where it could differ (a pattern with literal digits
may take part of a slot; an index expression may rule out one of two readings), `bind` says PER_KEY
and the caller does that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, repeat
from operator import itemgetter
from typing import Final, Literal

from .expr import DIGITS
from .keys import Pattern, TwoReadings
from .matching import LONGEST_INT, Integer, Taking, Value, advance, cuts, ways
from .matching import Literal as LiteralPart
from .printing import Collapsed, Form, merge

__all__ = [
    "PER_KEY",
    "SLOT",
    "Binding",
    "Collapsed",
    "Template",
    "bind",
    "collapse",
    "group",
    "matches",
    "matching",
]

# A private-use character; a key that holds it itself is a template of its own.
SLOT: Final = "\ue000"

# What decides whether a run of digits is a canonical integer: where it is, how long, and whether it
# begins with 0. Bytes, because their translation is ten times faster than that of text.
_SHAPE: Final = bytes.maketrans(b"123456789", b"1" * 9)


class _PerKey(Enum):
    PER_KEY = "per key"


PER_KEY: Final = _PerKey.PER_KEY

Row = tuple[Value, ...]


@dataclass(slots=True)
class Template:
    """One form of keys: `text` with SLOT for each whole-segment integer, the `keys` in order, and
    the `ints` of each key.

    literal: the one key holds the character SLOT itself, and its text has no slots.
    """

    text: str
    keys: list[str] = field(default_factory=list)
    ints: list[tuple[int, ...]] = field(default_factory=list)
    literal: bool = False


@dataclass(slots=True)
class _Shape:
    """What all keys with the same digits-blind text share: where their slots are, and their
    template if it is one only.
    """

    borders: tuple[int, ...]
    read: Callable[[str], tuple[int, ...]]
    template: Template | None


def group(keys: Iterable[str]) -> list[Template]:
    """The templates of the keys, in order of first appearance; linear.

    A slot is a segment that is an integer as `{n:int}` reads it: ASCII digits without leading
    zeros.
    """
    found: dict[str, Template] = {}
    literal: dict[str, Template] = {}
    shapes: dict[bytes, _Shape] = {}
    order: list[Template] = []
    for key in keys:
        blind = key.encode("utf-8", "surrogatepass").translate(_SHAPE)
        shape = shapes.get(blind)
        if shape is None:
            shape = shapes[blind] = _shape(key)
        template = shape.template
        if template is None:
            text = key if not shape.borders else _text(key, shape.borders)
            known = literal if SLOT in key else found
            template = known.get(text)
            if template is None:
                template = known[text] = Template(text, literal=SLOT in key)
                order.append(template)
            if not _stray_digits(text):
                shape.template = template
        template.keys.append(key)
        template.ints.append(shape.read(key))
    return order


def _shape(key: str) -> _Shape:
    borders: list[int] = []
    start = 0
    for segment in key.split(".") if SLOT not in key else ():
        end = start + len(segment)
        if is_integer(segment):
            borders += (start, end)
        start = end + 1
    slices = [slice(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True)]
    return _Shape(tuple(borders), _reader(slices), None)


def _reader(slices: Sequence[slice]) -> Callable[[str], tuple[int, ...]]:
    """A function that reads the integers at these places of a key; one and two are written out, it
    runs once per key.
    """
    if not slices:
        return lambda key: ()
    if len(slices) == 1:
        one = slices[0]
        return lambda key: (int(key[one]),)
    pick = itemgetter(*slices)
    if len(slices) == 2:

        def read(key: str) -> tuple[int, ...]:
            a, b = pick(key)
            return int(a), int(b)

        return read
    return lambda key: tuple(map(int, pick(key)))


def is_integer(segment: str) -> bool:
    """Whether `{n:int}` takes the whole segment: ASCII digits, no leading zero."""
    return (
        segment.isdigit()
        and segment.isascii()
        and (segment[0] != "0" or segment == "0")
        and len(segment) <= LONGEST_INT
    )


def _text(key: str, borders: tuple[int, ...]) -> str:
    out: list[str] = []
    done = 0
    for a, b in zip(borders[::2], borders[1::2], strict=True):
        out += (key[done:a], SLOT)
        done = b
    return "".join(out) + key[done:]


def _stray_digits(text: str) -> bool:
    """Whether digits are left in a template's text, so that keys of the same shape can have other
    templates.
    """
    return not DIGITS.isdisjoint(text)


# ---------------------------------------------------------------------- binding

_Column = Callable[[Sequence[tuple[int, ...]]], Iterable[Value | None]]


@dataclass(frozen=True, slots=True)
class Binding:
    """A pattern matched against a template: how each capture's value follows from a key's
    integers.
    """

    template: Template
    # one column for each capture, and further columns that must agree with the one at that index
    columns: tuple[_Column, ...]
    agreeing: tuple[tuple[int, _Column], ...]
    partial: bool

    def rows(self) -> list[Row | None]:
        """For each of the template's keys what `Pattern.match` returns for it, in order."""
        ints = self.template.ints
        if not self.columns:
            return [()] * len(ints)
        if not self.partial and not self.agreeing:
            return list(zip(*[column(ints) for column in self.columns], strict=False))
        columns = [list(islice(column(ints), len(ints))) for column in self.columns]
        matching = [all(value is not None for value in row) for row in zip(*columns, strict=True)]
        for at, column in self.agreeing:
            matching = [
                fits and a == b
                for fits, a, b in zip(matching, columns[at], column(ints), strict=False)
            ]
        return [
            row if fits else None
            for fits, row in zip(matching, zip(*columns, strict=True), strict=True)
        ]


def bind(pattern: Pattern, template: Template) -> Binding | Literal[_PerKey.PER_KEY] | None:
    """How `pattern` reads the keys of `template`; None if it matches none of them, PER_KEY if that
    shows key by key only.

    Raises what `Pattern.match` raises for one of the keys.
    """
    if pattern.has_flat:
        pattern.match("")
    text = template.text
    slots = 0 if template.literal else text.count(SLOT)
    if not slots:
        values = pattern.match(text)
        return (
            None if values is None else Binding(template, tuple(map(_constant, values)), (), False)
        )
    if not pattern.anchors.issubset(text.split(".")):
        return None
    if pattern.touches_digits or SLOT in pattern.text:
        return PER_KEY
    first, last = pattern.parts[0], pattern.parts[-1]
    if isinstance(first, LiteralPart) and not text.startswith(first.text):
        return None
    if isinstance(last, LiteralPart) and not text.endswith(last.text):
        return None
    tables = advance(pattern.parts, text, SLOT)
    found = ways(pattern.parts, tables, text)
    if not found:
        return None
    solving = any(isinstance(part, Integer) and not part.direct for part in pattern.parts)
    if found > 1:
        if not pattern.repeats and not solving:
            pattern.match(template.keys[0])
        return PER_KEY
    borders = next(cuts(pattern.parts, tables, text, SLOT))
    columns: dict[int, _Column] = {}
    agreeing = []
    for i, part, at in pattern.takes:
        column = _column(part, text[borders[i] : borders[i + 1]], text.count(SLOT, 0, borders[i]))
        if at in columns:
            agreeing.append((at, column))
        else:
            columns[at] = column
    return Binding(
        template, tuple(columns[at] for at in range(len(columns))), tuple(agreeing), solving
    )


def matching(pattern: Pattern, template: Template) -> Sequence[bool]:
    """For each key whether the pattern matches it, under whatever reading: nothing is made of the
    values.
    """
    try:
        binding = bind(pattern, template)
    except TwoReadings:
        binding = PER_KEY
    if binding is PER_KEY:
        return [matches(pattern, key) for key in template.keys]
    if binding is None or not (binding.partial or binding.agreeing):
        return [binding is not None] * len(template.keys)
    return [row is not None for row in binding.rows()]


def matches(pattern: Pattern, key: str) -> bool:
    """Whether the pattern matches the key, under whatever reading."""
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return True


def _column(part: Taking, text: str, slot: int) -> _Column:
    """The values of a capture that takes `text` of the template, whose slots are numbered from
    `slot`.
    """
    if SLOT not in text:
        return _constant(part.value(text))
    if isinstance(part, Integer):
        pick = itemgetter(slot)
        if part.direct:
            return lambda ints: map(pick, ints)
        solve = part.solve
        return lambda ints: map(solve, map(pick, ints))
    # The first or last character that `value` cuts off is a dot, never a slot.
    head, *tails = str(part.value(text)).split(SLOT)
    if len(tails) == 1:
        pick, tail = itemgetter(slot), tails[0]

        def one_slot(ints: Sequence[tuple[int, ...]]) -> Iterable[Value | None]:
            numbers = list(map(pick, ints))
            texts = {n: f"{head}{n}{tail}" for n in set(numbers)}
            return map(texts.__getitem__, numbers)

        return one_slot
    form = "%s".join(piece.replace("%", "%%") for piece in (head, *tails))
    some = slice(slot, slot + len(tails))
    return lambda ints: [form % row[some] for row in ints]


def _constant(value: Value) -> _Column:
    return lambda ints: repeat(value, len(ints))


# ---------------------------------------------------------------------- collapsing


def collapse(keys: Sequence[str], tag: Callable[[str], Hashable] | None = None) -> list[Collapsed]:
    """The keys for printing, those of one form on one line, in order of first appearance (see
    `printing`).

    Keys are put together only where `tag` gives equal values for them.
    """
    forms: dict[tuple[int, Hashable], Form] = {}
    for number, template in enumerate(group(keys)):
        segments = tuple(template.text.split("."))
        slots = (
            ()
            if template.literal
            else tuple(i for i, segment in enumerate(segments) if segment == SLOT)
        )
        if tag is None:
            forms[number, None] = Form(segments, slots, None, template.keys, template.ints)
            continue
        for key, ints in zip(template.keys, template.ints, strict=True):
            value = tag(key)
            form = forms.get((number, value))
            if form is None:
                form = forms[number, value] = Form(segments, slots, value, [], [])
            form.keys.append(key)
            form.ints.append(ints)
    return merge(forms.values())
