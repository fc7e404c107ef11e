"""Patterns: how rules name the keys of a checkpoint, read them and write them.

A pattern is parsed once into parts (`matching`), each of which knows one way of taking text. A path
capture takes its neighbouring dot along, so that `{m...}.weight` matches `weight` too; which of the
two dots is decided here, once, and matching and expanding then agree by construction:
expand(match(key)) is the key.

The text is read by `notation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice, product
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import Final, NoReturn

from .matching import (
    Enum,
    Flat,
    Integer,
    Literal,
    Part,
    PathHead,
    PathTail,
    PathWhole,
    PlainText,
    Taking,
    Value,
    advance,
    cuts,
    ways,
)
from .notation import DIGITS, CaptureType, Expr, PatternPiece, read_pieces

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
_MOST_KEPT: Final = 1 << 10


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
    """Where a key left a pattern: code-point `position` in the key, the segment `actual` there,
    what was `expected` there.

    `progress` counts the characters of literal text that agreed, before that place and at the end.
    """

    position: int
    actual: str
    expected: str
    progress: int


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern. Immutable; equal patterns match the same keys with the same captures.

    captures: names in order of first occurrence; the values of `match` stand in this order. types:
    the type of each capture. `params`: the params its index expressions read. has_flat: it holds a
    `{k:flat}` and can only be expanded. anchors: whole literal segments that every matching key
    contains, canonical integers left out (a template has none). touches_digits: a literal or an
    alternative has a piece between dots that is all digits, and could take part of what a template
    shows as a slot. ranked: it ends in `@` and an integer capture.
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
            if isinstance(part, Integer) and isinstance(part.offset, Expr)
            else part
            for part in self.parts
        )
        return replace(self, parts=parts, takes=_takes(parts, self.captures), params=())

    def match(self, key: str) -> tuple[Value, ...] | None:
        """The values of `captures` (an int capture's as int, a path as text), or None; linear.

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

    def _match_repeating(
        self, key: str, cuts_found: list[tuple[int, ...]]
    ) -> tuple[Value, ...] | None:
        agreeing = [
            values for borders in cuts_found if (values := self._agreeing(key, borders)) is not None
        ]
        if len(agreeing) > 1:
            self._raise_two(key, *agreeing[:2])
        if len(cuts_found) > MOST_CUTS:
            # Too many to look at. "No match" or the one reading found would be a guess.
            self._raise_two(key, self._values(key, cuts_found[0]), self._values(key, cuts_found[1]))
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
        """Whether this pattern matches every key that `other` can match. True is certain."""
        return includes(self.parts, other.parts)

    def failure(self, key: str) -> Failure:
        """How far the key got before it left the pattern; for messages about unmatched keys."""
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
    """The characters of globs and regular expressions that the pattern takes as letters, sorted."""
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
    return _parsed(text, tuple(types.items()))


# a lineage's few texts are asked about for each rule, param, test and layout
@lru_cache(_MOST_KEPT, typed=True)
def _parsed(text: str, types: tuple[tuple[str, CaptureType], ...]) -> Pattern:
    pieces, known = read_pieces(text, dict(types))
    parts, origins = _parts(pieces, text)
    segments, pure, places = _segments(pieces, text)
    captures = tuple(dict.fromkeys(p.name for p in pieces if p.name))
    takes = _takes(parts, captures)
    offsets = [
        part.offset for part in parts if isinstance(part, Integer) and isinstance(part.offset, Expr)
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


def _parts(pieces: list[PatternPiece], text: str) -> tuple[tuple[Part, ...], list[int]]:
    """The parts, and for each the index of its piece. A path takes one neighbouring dot along."""
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
            made.append(PlainText(piece.name, False))
        else:
            made.append(None)
    found = [
        (part or Literal(literals[i]), i) for i, part in enumerate(made) if part or literals[i]
    ]
    parts = [part for part, _ in found]
    for i, part in enumerate(parts):
        following = parts[i + 1] if i + 1 < len(parts) else None
        if isinstance(part, PlainText):
            dotted = isinstance(following, Literal) and following.text[0] == "."
            tail = isinstance(following, PathTail) and not following.before_at
            parts[i] = PlainText(part.name, following is None or dotted or tail)
    return tuple(parts), [i for _, i in found]


def _segments(
    pieces: list[PatternPiece], text: str
) -> tuple[tuple[str, ...], list[str], list[int]]:
    """The segments as written, those that are literal, and for each piece where its part begins."""
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


# --------------------------------------------------------------------------- from values to keys
#
# A migration writes as many keys as it reads, so the common patterns compile to one `%` format. A
# path that is empty drops its dot: the format for that case prints the value with precision zero.
# Index expressions and flattened paths take the slower way.

Expander = Callable[[tuple[Value, ...]], str]


class NegativeIndex(ValueError):  # noqa: N818 - says what the value is
    """An integer that would stand in a key is below zero."""

    def __init__(self, pattern: str, name: str, value: int) -> None:
        super().__init__(f"capture {name} gives the index {value} in {pattern!r}")
        self.pattern, self.name, self.value = pattern, name, value


def compile_expander(text: str, parts: Sequence[Part], names: Sequence[str]) -> Expander:
    """A function from tuples of values, in the order of `names`, to keys; KeyError for a capture
    that is not among them.
    """
    at = {name: i for i, name in enumerate(names)}
    taken = [(at[part.name], part) for part in parts if not isinstance(part, Literal)]
    if not taken:
        key = "".join(part.text for part in parts if isinstance(part, Literal))
        return lambda values: key
    paths = [i for i, part in taken if isinstance(part, (PathHead, PathTail))]
    simple = all(
        not isinstance(part, Flat) and not (isinstance(part, Integer) and not part.direct)
        for _, part in taken
    )
    if not simple or len(paths) > 1:
        return _slow(text, parts, at)
    order = [i for i, _ in taken]
    pick: Callable[[tuple[Value, ...]], object] = itemgetter(*order)
    if order == list(range(len(names))):
        pick = tuple
    integers = [(i, part.name) for i, part in taken if isinstance(part, Integer)]
    full, short = _format(parts, present=True), _format(parts, present=False)
    path = paths[0] if paths else None

    def expand(values: tuple[Value, ...]) -> str:
        for i, name in integers:
            value = values[i]
            if value < 0:  # type: ignore[operator]
                raise NegativeIndex(text, name, int(value))
        return (full if path is None or values[path] else short) % pick(values)

    return expand


def _format(parts: Sequence[Part], present: bool) -> str:
    out = []
    for part in parts:
        if isinstance(part, Literal):
            out.append(part.text.replace("%", "%%"))
        elif isinstance(part, PathHead):
            out.append("%s." if present else "%.0s")
        elif isinstance(part, PathTail):
            out.append(".%s" if present else "%.0s")
        else:
            out.append("%s")
    return "".join(out)


def _slow(text: str, parts: Sequence[Part], at: dict[str, int]) -> Expander:
    def expand(values: tuple[Value, ...]) -> str:
        out = []
        for part in parts:
            if isinstance(part, Literal):
                out.append(part.text)
                continue
            value = values[at[part.name]]
            if isinstance(part, Integer):
                written = part.write(int(value))
                if written < 0 or int(value) < 0:
                    raise NegativeIndex(text, part.name, written)
                out.append(str(written))
            elif isinstance(part, Flat):
                out.append(str(value).replace(".", ""))
            elif isinstance(part, PathHead):
                out.append(f"{value}." if value else "")
            elif isinstance(part, PathTail):
                out.append(f".{value}" if value else "")
            else:
                out.append(str(value))
        return "".join(out)

    return expand


# ----------------------------------------------------------------------- which pattern is narrower
#
# Rules do not depend on their order: where several match a key, the narrower one takes it. That
# must not depend on the keys at hand either, so the narrower pattern is turned into symbolic keys,
# in which each capture is an atom that stands for every text it can take, and the wider pattern is
# matched against those. Alternatives are written out, and a path capture is tried present and
# absent. An atom is taken whole by a capture that takes all its texts.
#
# The answer "yes" is certain. "No" may be wrong for odd patterns (many repeated captures, thousands
# of alternatives that do not fit one capture); the user then sees two rules that match one key,
# never a silent choice.

MOST_VARIANTS: Final = 256
MOST_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Atom:
    """All texts of one capture. `part` is how the narrower pattern reads it."""

    name: str
    part: PlainText | Enum | Integer | PathWhole

    @property
    def inside_segment(self) -> bool:
        if isinstance(self.part, Enum):
            return not any("." in value for value in self.part.values)
        return not isinstance(self.part, PathWhole)


_Token = str | _Atom  # one character, or an atom
_Key = tuple[_Token, ...]


def includes(wider: Sequence[Part], narrower: Sequence[Part]) -> bool:
    """Whether `wider` matches each key that the parts `narrower` match; True is certain."""
    if tuple(wider) == tuple(narrower):
        return True
    keys = _symbolic_keys(narrower)
    if keys is None:
        return False
    names = [part.name for part in wider if not isinstance(part, Literal)]
    if len(set(names)) == len(names):
        return all(_reaches_end(wider, key) for key in keys)
    return all(_agrees(wider, key) for key in keys)


def _symbolic_keys(parts: Sequence[Part]) -> Iterator[_Key] | None:
    choices: dict[str, Sequence[str | _Atom | None]] = {}
    for part in parts:
        if isinstance(part, Enum):
            choices[part.name] = part.values
        elif isinstance(part, (PathHead, PathTail, PathWhole)):
            choices[part.name] = (None, _Atom(part.name, PathWhole(part.name, False)))
    enums = {part.name: part for part in parts if isinstance(part, Enum)}
    for name in sorted(enums, key=lambda n: -len(enums[n].values)):
        if prod(len(c) for c in choices.values()) <= MOST_VARIANTS:
            break
        choices[name] = (_Atom(name, enums[name]),)
    if prod(len(c) for c in choices.values()) > MOST_VARIANTS:
        return None
    return (
        _tokens(parts, dict(zip(choices, chosen, strict=True)))
        for chosen in product(*choices.values())
    )


def _tokens(parts: Sequence[Part], chosen: Mapping[str, str | _Atom | None]) -> _Key:
    out: list[_Token] = []
    for part in parts:
        if isinstance(part, Literal):
            out += part.text
        elif isinstance(part, Integer):
            out.append(_Atom(part.name, part))
        elif isinstance(part, (PlainText, Flat)):
            # a flattened path is some text without dots
            out.append(_Atom(part.name, PlainText(part.name, False)))
        else:
            choice = chosen[part.name]
            if isinstance(choice, str):
                out += choice
            elif choice is not None:
                out += (
                    ["."] * isinstance(part, PathTail)
                    + [choice]
                    + ["."] * isinstance(part, PathHead)
                )
    return tuple(out)


def _reaches_end(parts: Sequence[Part], key: _Key) -> bool:
    reached = {0}
    for part in parts:
        reached = {end for p in reached for end in _ends(part, key, p)}
    return len(key) in reached


def _agrees(parts: Sequence[Part], key: _Key) -> bool:
    """`_reaches_end` for parts in which captures repeat: their values are the same in every key."""
    budget = MOST_STEPS
    pending: list[tuple[int, int, dict[str, object]]] = [(0, 0, {})]
    while pending:
        i, p, values = pending.pop()
        if i == len(parts):
            if p == len(key):
                return True
            continue
        part = parts[i]
        for end in _ends(part, key, p):
            budget -= 1
            if budget < 0:
                return False
            if isinstance(part, Literal):
                pending.append((i + 1, end, values))
                continue
            value = _value(part, key[p:end])
            if values.get(part.name, value) == value:
                pending.append((i + 1, end, {**values, part.name: value}))
    return False


def _value(part: Part, taken: _Key) -> object:
    if isinstance(part, PathHead):
        return taken[:-1]
    if isinstance(part, PathTail):
        return taken[1:]
    if isinstance(part, Integer):
        token = taken[0]
        if isinstance(token, _Atom) and isinstance(token.part, Integer):
            if (token.part.factor, token.part.offset) == (part.factor, part.offset):
                return token.name, 1, 0
            # `_accepts` has seen to it that both divide
            a, b = _numbers(token.part) or (0, 0)
            c, d = _numbers(part) or (1, 0)
            return token.name, a // c, (b - d) // c
        return part.value("".join(t for t in taken if isinstance(t, str)))
    return taken


def _ends(part: Part, key: _Key, p: int) -> Iterator[int]:
    n = len(key)
    if isinstance(part, (Literal, Enum)):
        for text in part.values if isinstance(part, Enum) else (part.text,):
            if key[p : p + len(text)] == tuple(text):
                yield p + len(text)
        if isinstance(part, Enum) and p < n:
            token = key[p]
            if (
                isinstance(token, _Atom)
                and isinstance(token.part, Enum)
                and set(token.part.values) <= set(part.values)
            ):
                yield p + 1
    elif isinstance(part, Integer):
        yield from _integer_ends(part, key, p)
    elif isinstance(part, PlainText):
        while p < n:
            token = key[p]
            if token == "." or (isinstance(token, _Atom) and not token.inside_segment):
                return
            p += 1
            yield p
    elif isinstance(part, PathHead):
        yield p
        for q in range(p + 1, n):
            if key[q] == ".":
                yield q + 1
    elif isinstance(part, (PathTail, PathWhole)):
        begins = isinstance(part, PathWhole) or (p < n and key[p] == ".")
        first = p + 1 if isinstance(part, PathWhole) else p + 2
        for end in range(p, n + 1):
            if (end == n if not part.before_at else end < n and key[end] == "@") and (
                end == p or (begins and end >= first)
            ):
                yield end


def _integer_ends(part: Integer, key: _Key, p: int) -> Iterator[int]:
    if p == len(key):
        return
    token = key[p]
    if isinstance(token, _Atom):
        if isinstance(token.part, Integer) and _accepts(part, token.part):
            yield p + 1
        return
    end = p
    while end < len(key) and key[end] in DIGITS:
        end += 1
    # a neighbour that can be a digit would make it another integer
    around = [*key[max(p - 1, 0) : p], *key[end : end + 1]]
    if end > p and all(isinstance(t, str) and t not in DIGITS for t in around):
        text = "".join(t for t in key[p:end] if isinstance(t, str))
        if end in part.step(text.rjust(end), {p: 1}, ""):
            yield end


def _accepts(part: Integer, written: Integer) -> bool:
    """Whether `part` can read every integer that `written` can."""
    if part.direct or (part.factor, part.offset) == (written.factor, written.offset):
        return True
    mine, theirs = _numbers(part), _numbers(written)
    if mine is None or theirs is None:
        return False
    (a, b), (c, d) = mine, theirs
    return c % a == 0 and (d - b) % a == 0 and (d >= b or b <= 0)


def _numbers(part: Integer) -> tuple[int, int] | None:
    return None if isinstance(part.offset, Expr) else (part.factor, part.offset)
