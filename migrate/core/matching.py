"""The elements of a compiled pattern, and the search for the ways to cut a key along them.

A key must have exactly one reading, and a hostile key must not buy more than linear time. So there
is no backtracking and no regular expression: each element makes one pass over the positions that
the elements before it can reach, and counts for each position it reaches itself how many ways lead
there. Two is as good as many, so counts stop at two.

The walk backwards over the same tables yields the ways themselves. Every position in a table was
reached from the start, so each step back leads to a way and none is wasted.

`slot` is a character that stands for a whole canonical integer (see `templates`); it is "" when a
real key is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from .notation import DIGITS, Expr

State = Mapping[int, int]  # position -> ways to reach it, 1 or 2 (two or more)
Value = int | str

# Python refuses to convert integers of some thousands of digits; a longer run is text here.
LONGEST_INT: Final = 1000


class Element(Protocol):
    """One part of a compiled pattern; `source` is how the author wrote it."""

    @property
    def source(self) -> str: ...

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        """The positions after this element, given those before it; linear in the key."""

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        """The positions of `state` from which this element reaches `end`, known to be reachable."""


class Capture(Element, Protocol):
    @property
    def name(self) -> str: ...

    def value(self, text: str) -> Value:
        """The value of a capture that was cut out as `text`."""


@dataclass(frozen=True, slots=True)
class Literal:
    """Text that stands there as it is."""

    text: str

    @property
    def source(self) -> str:
        return self.text.replace("{", "{{").replace("}", "}}")

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        text, n = self.text, len(self.text)
        return {p + n: ways for p, ways in state.items() if key.startswith(text, p)}

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        yield end - len(self.text)


@dataclass(frozen=True, slots=True)
class PlainText:
    """One or more characters but dots. `whole_tail`: it may end at the end of a segment only."""

    name: str
    whole_tail: bool

    @property
    def source(self) -> str:
        return f"{{{self.name}}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        out: dict[int, int] = {}
        stop = -1
        for p in sorted(state) if len(state) > 1 else state:
            if p <= stop:
                continue
            stop = key.find(".", p)
            if stop < 0:
                stop = len(key)
            run = 0
            for q in range(p, stop):
                if q in state:
                    run = min(2, run + state[q])
                if not self.whole_tail:
                    out[q + 1] = run
            if run and self.whole_tail:
                out[stop] = run
        return out

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        for p in range(key.rfind(".", 0, end) + 1, end):
            if p in state:
                yield p

    def value(self, text: str) -> Value:
        return text


@dataclass(frozen=True, slots=True)
class Enum:
    """One of several texts, in their order."""

    name: str
    values: tuple[str, ...]

    @property
    def source(self) -> str:
        return f"{{{self.name}:{'|'.join(self.values)}}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        out: dict[int, int] = {}
        for p, ways in state.items():
            for value in self.values:
                if key.startswith(value, p):
                    end = p + len(value)
                    out[end] = min(2, out.get(end, 0) + ways)
        return out

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        for value in self.values:
            p = end - len(value)
            if p in state and key.startswith(value, p):
                yield p

    def value(self, text: str) -> Value:
        return text


@dataclass(frozen=True, slots=True)
class Integer:
    """A decimal integer, all its digits; the key has factor * value + offset, and value >= 0."""

    name: str
    source: str
    factor: int = 1
    offset: int | Expr = 0

    @property
    def direct(self) -> bool:
        """Whether the key holds the value itself."""
        return self.factor == 1 and self.offset == 0

    def write(self, value: int) -> int:
        """The integer that stands in the key for `value`; `Unset` while the offset holds params."""
        return self.factor * value + (
            self.offset if isinstance(self.offset, int) else self.offset.evaluate({})
        )

    def solve(self, written: int) -> int | None:
        """The value written as `written`, or None; `Unset` while the offset holds params."""
        value, rest = divmod(written - self.write(0), self.factor)
        return None if rest or value < 0 else value

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        out: dict[int, int] = {}
        n = len(key)
        for p, ways in state.items():
            if p == n:
                continue
            c = key[p]
            if c == slot:
                out[p + 1] = ways
            elif c in DIGITS and (p == 0 or key[p - 1] not in DIGITS):
                end = p + 1
                while end < n and key[end] in DIGITS:
                    end += 1
                if (
                    (c != "0" or end == p + 1)
                    and end - p <= LONGEST_INT
                    and (self.direct or self.solve(int(key[p:end])) is not None)
                ):
                    out[end] = ways
        return out

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        p = end - 1
        if key[p] != slot:
            while p and key[p - 1] in DIGITS:
                p -= 1
        yield p

    def value(self, text: str) -> Value:
        written = int(text)
        if self.direct:
            return written
        solved = self.solve(written)
        return written if solved is None else solved


@dataclass(frozen=True, slots=True)
class PathHead:
    """`{name...}.`: nothing, or any text and a dot. Stands at the beginning of a segment."""

    name: str

    @property
    def source(self) -> str:
        return f"{{{self.name}...}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        out = dict(state)
        waiting = sorted(state)
        i = ways = 0
        dot = key.find(".", waiting[0] + 1)
        while dot >= 0:
            while i < len(waiting) and waiting[i] < dot:
                ways = min(2, ways + state[waiting[i]])
                i += 1
            out[dot + 1] = min(2, out.get(dot + 1, 0) + ways)
            dot = key.find(".", dot + 1)
        return out

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        if end in state:
            yield end
        if end >= 2 and key[end - 1] == ".":
            for p in state:
                if p <= end - 2:
                    yield p

    def value(self, text: str) -> Value:
        return text[:-1]


@dataclass(frozen=True, slots=True)
class PathTail:
    """`.{name...}`: nothing, or a dot and any text, up to the key's end or, `before_at`, an `@`."""

    name: str
    before_at: bool

    @property
    def source(self) -> str:
        return f"{{{self.name}...}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        out: dict[int, int] = {}
        waiting = [p for p in sorted(state) if key.startswith(".", p)]
        i = ways = 0
        for end in _ends(key, self.before_at):
            while i < len(waiting) and waiting[i] + 2 <= end:
                ways = min(2, ways + state[waiting[i]])
                i += 1
            if total := min(2, ways + state.get(end, 0)):
                out[end] = total
        return out

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        if end in state:
            yield end
        for p in state:
            if p + 2 <= end and key[p] == ".":
                yield p

    def value(self, text: str) -> Value:
        return text[1:]


@dataclass(frozen=True, slots=True)
class PathWhole:
    """`{name...}` at the start, no dot behind: any text, to the end or (`before_at`) to an `@`."""

    name: str
    before_at: bool

    @property
    def source(self) -> str:
        return f"{{{self.name}...}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        return dict.fromkeys(_ends(key, self.before_at), state[0])

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        yield 0

    def value(self, text: str) -> Value:
        return text


@dataclass(frozen=True, slots=True)
class Flat:
    """The path of another role without its dots: expanded, never parsed, so it takes no text."""

    name: str

    @property
    def source(self) -> str:
        return f"{{{self.name}:flat}}"

    def step(self, key: str, state: State, slot: str) -> dict[int, int]:
        return {}

    def starts(self, key: str, state: State, end: int, slot: str) -> Iterator[int]:
        yield from ()

    def value(self, text: str) -> Value:
        return text


def _ends(key: str, before_at: bool) -> Iterator[int]:
    if not before_at:
        yield len(key)
        return
    at = key.find("@")
    while at >= 0:
        yield at
        at = key.find("@", at + 1)


Part = Literal | PlainText | Enum | Integer | PathHead | PathTail | PathWhole | Flat
Taking = PlainText | Enum | Integer | PathHead | PathTail | PathWhole | Flat


def advance(parts: Sequence[Part], key: str, slot: str = "") -> list[dict[int, int]]:
    """The positions reached before the first part, after it, …; shorter where none is reached."""
    state = {0: 1}
    tables = [state]
    for part in parts:
        state = part.step(key, state, slot)
        if not state:
            break
        tables.append(state)
    return tables


def ways(parts: Sequence[Part], tables: Sequence[State], key: str) -> int:
    """How many ways there are to cut the whole key along the parts: 0, 1, or 2 for two or more."""
    return tables[-1].get(len(key), 0) if len(tables) == len(parts) + 1 else 0


def cuts(
    parts: Sequence[Part], tables: Sequence[State], key: str, slot: str = ""
) -> Iterator[tuple[int, ...]]:
    """The ways to cut the key, one by one: the borders of its parts, from 0 to its length."""
    if not ways(parts, tables, key):
        return
    borders = [len(key)]
    pending: list[Iterator[int]] = []
    while True:
        i = len(parts) - len(borders)
        if i < 0:
            yield tuple(reversed(borders))
        else:
            pending.append(parts[i].starts(key, tables[i], borders[-1], slot))
        if i < 0:
            borders.pop()
        while pending:
            p = next(pending[-1], None)
            if p is not None:
                borders.append(p)
                break
            pending.pop()
            borders.pop()
        if not pending:
            return
