"""Whether all keys that one pattern can match are matched by another, decided on the patterns
alone.

Rules do not depend on their order: where several match a key, the narrower one takes it. That must
not depend on the keys at hand either, so the narrower pattern is turned into symbolic keys, in
which each capture is an atom that stands for every text it can take, and the wider pattern is
matched against those. Alternatives are written out, and a path capture is tried present and absent.
An atom is taken whole by a capture that takes all its texts.

The answer "yes" is certain. "No" may be wrong for odd patterns (many repeated captures, thousands
of alternatives that do not fit one capture); the user then sees two rules that match one key, never
a silent choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

from .expr import DIGITS, Expr
from .matching import Enum, Flat, Integer, Literal, Part, PathHead, PathTail, PathWhole, Plain

MOST_VARIANTS: Final = 256
MOST_STEPS: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Atom:
    """All texts of one capture. `part` is how the narrower pattern reads it."""

    name: str
    part: Plain | Enum | Integer | PathWhole

    @property
    def inside_segment(self) -> bool:
        if isinstance(self.part, Enum):
            return not any("." in value for value in self.part.values)
        return not isinstance(self.part, PathWhole)


_Token = str | _Atom  # one character, or an atom
_Key = tuple[_Token, ...]


def includes(wider: Sequence[Part], narrower: Sequence[Part]) -> bool:
    """Whether each key that the parts `narrower` match is matched by the parts `wider`; True is
    certain.
    """
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
        elif isinstance(part, (Plain, Flat)):
            # a flattened path is some text without dots
            out.append(_Atom(part.name, Plain(part.name, False)))
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
    """Like `_reaches_end`, for parts in which captures repeat: their values must be the same in
    every key.
    """
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
    elif isinstance(part, Plain):
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
