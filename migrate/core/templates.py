"""Keys grouped by form, so that a pattern is matched once per form and not once per key.

A hundred thousand keys have some dozen forms: they differ in the integers that are whole segments. Those become slots.
A pattern is matched against the form, each slot an atom that an integer capture takes or that stands inside the text of
another capture; the values of the single keys are then filled in column by column.

The result is the same as matching key by key. Where it could differ (a pattern with literal digits may take part of a
slot; an index expression may rule out one of two readings), `bind` says PER_KEY and the caller does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from operator import itemgetter
from typing import Final, Literal

from .collapse import Collapsed
from .expr import DIGITS
from .keys import Pattern
from .matching import LONGEST_INT, Integer, PathHead, PathTail, Taking, Value, advance, cuts, ways

__all__ = ["PER_KEY", "SLOT", "Binding", "Collapsed", "Template", "bind", "collapse", "group"]

# A private-use character; a key that holds it itself is a template of its own.
SLOT: Final = "\ue000"

# What decides whether a run of digits is a canonical integer: where it is, how long, and whether it begins with 0.
# Bytes, because their translation is ten times faster than that of text.
_SHAPE: Final = bytes.maketrans(b"123456789", b"1" * 9)


class _PerKey(Enum):
    PER_KEY = "per key"


PER_KEY: Final = _PerKey.PER_KEY

Row = tuple[Value, ...]


@dataclass(slots=True)
class Template:
    """One form of keys: `text` with SLOT for each whole-segment integer, the `keys` in order, and the `ints` of each key.

    literal: the one key holds the character SLOT itself, and its text has no slots.
    """

    text: str
    keys: list[str] = field(default_factory=list)
    ints: list[tuple[int, ...]] = field(default_factory=list)
    literal: bool = False


@dataclass(slots=True)
class _Shape:
    """What all keys with the same digits-blind text share: where their slots are, and their template if it is one only."""

    borders: tuple[int, ...]
    read: Callable[[str], tuple[int, ...]]
    template: Template | None


def group(keys: Iterable[str]) -> list[Template]:
    """The templates of the keys, in order of first appearance; linear.

    A slot is a segment that is an integer as `{n:int}` reads it: ASCII digits without leading zeros.
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
    """A function that reads the integers at these places of a key; one and two are written out, it runs once per key."""
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
    return segment.isdigit() and segment.isascii() and (segment[0] != "0" or segment == "0") and len(segment) <= LONGEST_INT


def _text(key: str, borders: tuple[int, ...]) -> str:
    out, done = [], 0
    for a, b in zip(borders[::2], borders[1::2], strict=True):
        out += (key[done:a], SLOT)
        done = b
    return "".join(out) + key[done:]


def _stray_digits(text: str) -> bool:
    """Whether digits are left in a template's text, so that keys of the same shape can have other templates."""
    return not DIGITS.isdisjoint(text)
