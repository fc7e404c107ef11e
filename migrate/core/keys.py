"""Patterns: how rules name the keys of a checkpoint, read them and write them.

A pattern is parsed once into parts (`matching`), each of which knows one way of taking text. A path
capture takes its neighbouring dot along, so that `{m...}.weight` matches `weight` too; which of the
two dots is decided here, once, and matching and expanding then agree by construction:
expand(match(key)) is the key.

The text is read by `notation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Final, NoReturn

from . import expr
from .expansion import NegativeIndex, compile_expander
from .expr import DIGITS
from .inclusion import includes
from .matching import (
    Enum,
    Flat,
    Integer,
    Literal,
    Part,
    PathHead,
    PathTail,
    PathWhole,
    Plain,
    Taking,
    Value,
    advance,
    cuts,
    ways,
)
from .notation import CaptureType, Piece, read

__all__ = [
    "CaptureType",
    "Failure",
    "NegativeIndex",
    "Pattern",
    "TwoReadings",
    "narrower",
    "narrower_any",
    "nearest",
    "parse",
]

# Cuts that are looked at where captures repeat: most of them disagree in value and are no readings.
MOST_CUTS: Final = 1000


class TwoReadings(ValueError):  # noqa: N818 - says what the key has
    """A key can be read in more than one way; `first` and `second` map captures to values."""

    def __init__(
        self, pattern: str, key: str, first: Mapping[str, Value], second: Mapping[str, Value]
    ) -> None:
        super().__init__(
            f"{key!r} has two readings under {pattern!r}: {dict(first)} and {dict(second)}"
        )
        self.pattern, self.key, self.first, self.second = pattern, key, dict(first), dict(second)


@dataclass(frozen=True, slots=True)
class Failure:
    """Where a key left a pattern: code-point `position` in the key, the segment `found` there, what
    was `expected` there.

    `progress` counts the characters of literal text that agreed, before that place and at the end
    of the key.
    """

    position: int
    found: str
    expected: str
    progress: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. Immutable; equal patterns match the same keys with the same captures.

    captures: names in order of first occurrence; the values of `match` stand in this order.
    types: the type of each capture. `params`: the params its index expressions read.
    has_flat: it holds a `{k:flat}` and can only be expanded.
    anchors: whole literal segments that every matching key contains, canonical integers left out (a
    template has none). touches_digits: a literal or an alternative has a piece between dots that is
    all digits, and could take part of what a template shows as a slot. ranked: it ends in `@` and
    an integer capture.
    """

    text: str = field(compare=False)
    parts: tuple[Part, ...]
    captures: tuple[str, ...]
    types: Mapping[str, CaptureType] = field(hash=False)
    params: tuple[str, ...] = field(compare=False)
    has_flat: bool = field(compare=False)
    anchors: frozenset[str] = field(compare=False, repr=False)
    touches_digits: bool = field(compare=False, repr=False)
    ranked: bool = field(compare=False, repr=False)
    # (index of the part, the part, index of its capture), and whether a capture occurs twice
    takes: tuple[tuple[int, Taking, int], ...] = field(compare=False, repr=False)
    repeats: bool = field(compare=False, repr=False)
    # the segments as written, and which of them each part begins in
    segments: tuple[str, ...] = field(compare=False, repr=False)
    places: tuple[int, ...] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.text

    def with_params(self, params: Mapping[str, int]) -> Pattern:
        """The same pattern with its index expressions resolved; `Unset` if a param has no value."""
        if not self.params:
            return self
        parts = tuple(
            replace(part, offset=part.offset.evaluate(params))
            if isinstance(part, Integer) and isinstance(part.offset, expr.Expr)
            else part
            for part in self.parts
        )
        return replace(self, parts=parts, takes=_takes(parts, self.captures), params=())

    def match(self, key: str) -> tuple[Value, ...] | None:
        """The values of `captures` (int for int captures, a path as dotted text), or None; linear
        in the key.

        Raises `TwoReadings` if the key has more than one reading, `Unset` if a param of an index is
        not resolved and ValueError on a pattern that can only be expanded.
        """
        if self.has_flat:
            raise ValueError(f"{self.text!r} holds a flat capture: it is expanded, never parsed")
        first, last = self.parts[0], self.parts[-1]
        if isinstance(first, Literal) and not key.startswith(first.text):
            return None
        if isinstance(last, Literal) and not key.endswith(last.text):
            return None
        tables = advance(self.parts, key)
        found = ways(self.parts, tables, key)
        if not found:
            return None
        cut = cuts(self.parts, tables, key)
        if not self.repeats:
            if found > 1:
                one, other = islice(cut, 2)
                self._raise_two(key, self._values(key, one), self._values(key, other))
            return self._values(key, next(cut))
        return self._match_repeating(key, list(islice(cut, MOST_CUTS + 1)))

    def _match_repeating(self, key: str, found: list[tuple[int, ...]]) -> tuple[Value, ...] | None:
        agreeing = [
            values for borders in found if (values := self._agreeing(key, borders)) is not None
        ]
        if len(agreeing) > 1:
            self._raise_two(key, *agreeing[:2])
        if len(found) > MOST_CUTS:
            # Too many to look at. To say "no match" or to take the one reading found would be a
            # guess.
            self._raise_two(key, self._values(key, found[0]), self._values(key, found[1]))
        return agreeing[0] if agreeing else None

    def _values(self, key: str, borders: tuple[int, ...]) -> tuple[Value, ...]:
        if not self.repeats:
            return tuple(
                [part.value(key[borders[i] : borders[i + 1]]) for i, part, _ in self.takes]
            )
        values: list[Value] = [""] * len(self.captures)
        for i, part, at in reversed(self.takes):
            values[at] = part.value(key[borders[i] : borders[i + 1]])
        return tuple(values)

    def _agreeing(self, key: str, borders: tuple[int, ...]) -> tuple[Value, ...] | None:
        values = self._values(key, borders)
        same = all(
            part.value(key[borders[i] : borders[i + 1]]) == values[at] for i, part, at in self.takes
        )
        return values if same else None

    def _raise_two(self, key: str, one: tuple[Value, ...], other: tuple[Value, ...]) -> NoReturn:
        readings = (dict(zip(self.captures, values, strict=True)) for values in (one, other))
        raise TwoReadings(self.text, key, *readings)

    def expand(self, values: Mapping[str, Value]) -> str:
        """The key that has these values; the inverse of `match`. KeyError if one is missing,
        `NegativeIndex` below zero.
        """
        return self.expander(self.captures)(tuple(values[name] for name in self.captures))

    def expander(self, names: Sequence[str]) -> Callable[[tuple[Value, ...]], str]:
        """A function from tuples of values, in the order of `names`, to keys; KeyError if a capture
        is not among them.
        """
        return compile_expander(self.text, self.parts, names)

    def includes(self, other: Pattern) -> bool:
        """Whether this pattern matches every key that `other` can match. True is certain, see
        `inclusion`.
        """
        return includes(self.parts, other.parts)

    def failure(self, key: str) -> Failure:
        """How far the key got before it left the pattern; for messages about keys that do not
        match.
        """
        tables = advance(self.parts, key)
        done = len(tables) - 1
        progress = sum(len(part.text) for part in self.parts[:done] if isinstance(part, Literal))
        state = tables[-1]
        if done == len(self.parts):
            position, expected = max(state), "the end of the key"
            if key[position : position + 1] not in ("", "."):
                expected = self.segments[-1]
            start = position + 1 if key.startswith(".", position) else position
            return Failure(position, _segment(key, start), expected, progress)
        part, last = self.parts[done], self.parts[-1]
        if isinstance(last, Literal) and last is not part:
            progress += _agreement(last.text[::-1], key[::-1])
        if not isinstance(part, Literal):
            position = min(state)
            return Failure(
                position, _segment(key, position), self.segments[self.places[done]], progress
            )
        agreed, position = max(
            (_agreement(part.text, key[p : p + len(part.text)]), p) for p in state
        )
        position += agreed
        place = self.places[done] + part.text.count(".", 0, agreed)
        segment = _segment(key, position)
        if position == len(key) and part.text.startswith(".", agreed):
            place, segment = place + 1, ""
        return Failure(position, segment, self.segments[place], progress + agreed)


def narrower(one: Pattern, other: Pattern) -> bool:
    """Whether all keys that `one` can match are matched by `other`, and not the other way round."""
    return narrower_any([one], [other])


def narrower_any(some: Sequence[Pattern], others: Sequence[Pattern]) -> bool:
    """`narrower` for the patterns of two rules: each of the one rule lies in one of the other, and
    not the other way round.
    """

    def inside(inner: Iterable[Pattern], outer: Sequence[Pattern]) -> bool:
        return all(any(o.includes(i) for o in outer) for i in inner)

    return inside(some, others) and not inside(others, some)


# what those who write patterns of other notations need to know
FOREIGN = (
    "patterns are neither globs nor regular expressions: `{n:int}` takes a number, `{name}` "
    "a segment, `{k...}` the rest"
)
_FOREIGN = frozenset("*\\([^$")


def foreign(pattern: Pattern) -> str:
    """The characters of globs and regular expressions that the pattern takes as letters, sorted;
    mostly none.
    """
    texts = [
        t
        for part in pattern.parts
        for t in (
            (part.text,)
            if isinstance(part, Literal)
            else part.values
            if isinstance(part, Enum)
            else ()
        )
    ]
    return foreign_text(*texts)


def foreign_text(*texts: str) -> str:
    """Those characters in any text."""
    return "".join(sorted(_FOREIGN.intersection("".join(texts))))


def nearest(patterns: Iterable[Pattern], key: str) -> tuple[Pattern, Failure] | None:
    """The pattern that came nearest to matching the key, and where it failed; None if none has any
    text in common with it.
    """
    best: tuple[Pattern, Failure] | None = None
    for pattern in patterns:
        if pattern.has_flat or pattern.params:
            continue
        failure = pattern.failure(key)
        if failure.progress > (best[1].progress if best else 0):
            best = pattern, failure
    return best


def _agreement(one: str, other: str) -> int:
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n


def _segment(key: str, position: int) -> str:
    end = key.find(".", position)
    return key[key.rfind(".", 0, position) + 1 : end if end >= 0 else len(key)]


def parse(text: str, types: Mapping[str, CaptureType] = MappingProxyType({})) -> Pattern:
    """The pattern that `text` writes.

    `types` gives the types of captures that the text itself does not declare: those of an earlier
    role, for a target those of the source, for a `map` the values it lists. PatternError M201 or
    M111, with offsets into `text`.
    """
    pieces, known = read(text, types)
    parts, origins = _parts(pieces, text)
    segments, pure, places = _segments(pieces, text)
    captures = tuple(dict.fromkeys(p.name for p in pieces if p.name))
    takes = _takes(parts, captures)
    offsets = [
        part.offset
        for part in parts
        if isinstance(part, Integer) and isinstance(part.offset, expr.Expr)
    ]
    fixed = [
        t for p in pieces for t in ((p.text,) if not p.name else p.type.values if p.type else ())
    ]
    return Pattern(
        text=text,
        parts=parts,
        captures=captures,
        types=MappingProxyType({name: known[name] for name in captures}),
        params=tuple(dict.fromkeys(name for offset in offsets for name in offset.names)),
        has_flat=any(isinstance(part, Flat) for part in parts),
        anchors=frozenset(
            s for s in pure if s and not (DIGITS.issuperset(s) and (s[0] != "0" or s == "0"))
        ),
        touches_digits=any(
            piece and DIGITS.issuperset(piece) for t in fixed for piece in t.split(".")
        ),
        ranked=len(parts) > 1
        and isinstance(parts[-1], Integer)
        and isinstance(parts[-2], Literal)
        and parts[-2].text.endswith("@"),
        takes=takes,
        repeats=len(takes) > len(captures),
        segments=segments,
        places=tuple(places[i] for i in origins),
    )


def _takes(parts: Sequence[Part], captures: Sequence[str]) -> tuple[tuple[int, Taking, int], ...]:
    order = {name: at for at, name in enumerate(captures)}
    return tuple(
        (i, part, order[part.name]) for i, part in enumerate(parts) if not isinstance(part, Literal)
    )


def _parts(pieces: list[Piece], text: str) -> tuple[tuple[Part, ...], list[int]]:
    """The parts, and for each the index of the piece it comes from. A path takes one neighbouring
    dot along.
    """
    literals = [piece.text for piece in pieces]
    made: list[Part | None] = []
    for i, piece in enumerate(pieces):
        after = literals[i + 1] if i + 1 < len(pieces) else ""
        after_is_text = i + 1 < len(pieces) and not pieces[i + 1].name
        kind = piece.type.kind if piece.type else ""
        if kind == "path":
            before_at = after_is_text and after[0] == "@"
            if after_is_text and not before_at:
                made.append(PathHead(piece.name))
                literals[i + 1] = after[1:]
            elif i:
                made.append(PathTail(piece.name, before_at))
                literals[i - 1] = literals[i - 1][:-1]
            else:
                made.append(PathWhole(piece.name, before_at))
        elif kind == "int":
            made.append(
                Integer(piece.name, text[piece.start : piece.end], piece.factor, piece.offset)
            )
        elif kind == "enum":
            made.append(Enum(piece.name, piece.type.values if piece.type else ()))
        elif kind == "flat":
            made.append(Flat(piece.name))
        elif piece.name:
            made.append(Plain(piece.name, False))
        else:
            made.append(None)
    found = [
        (part or Literal(literals[i]), i) for i, part in enumerate(made) if part or literals[i]
    ]
    parts = [part for part, _ in found]
    for i, part in enumerate(parts):
        following = parts[i + 1] if i + 1 < len(parts) else None
        if isinstance(part, Plain):
            dotted = isinstance(following, Literal) and following.text[0] == "."
            tail = isinstance(following, PathTail) and not following.before_at
            parts[i] = Plain(part.name, following is None or dotted or tail)
    return tuple(parts), [i for _, i in found]


def _segments(pieces: list[Piece], text: str) -> tuple[tuple[str, ...], list[str], list[int]]:
    """The segments as written, those that are literal text, and for each piece the segment that its
    part begins in.
    """
    segments, literal, places = [""], [True], []
    for i, piece in enumerate(pieces):
        swallowed = (
            not piece.name
            and i
            and pieces[i - 1].type == CaptureType("path")
            and piece.text[0] == "."
        )
        places.append(len(segments) - 1 + bool(swallowed))
        if piece.name:
            if (
                i + 1 < len(pieces)
                and pieces[i + 1].text[0] == "@"
                and not pieces[i + 1].name
                and len(literal) > 1
            ):
                # an empty path leaves the `@` to the segment before it
                literal[-2] = literal[-2] and piece.type != CaptureType("path")
            segments[-1] += text[piece.start : piece.end]
            literal[-1] = False
            continue
        head, *rest = piece.text.split(".")
        segments[-1] += head
        segments += rest
        literal += [True] * len(rest)
    return tuple(segments), [s for s, pure in zip(segments, literal, strict=True) if pure], places
