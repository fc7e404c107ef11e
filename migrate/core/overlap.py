"""Whether two patterns have a key in common, decided on the patterns alone.

The counterpart of `inclusion`: there "yes" is certain, here "no" is. Repeated captures and index expressions are taken
for free, so a "yes" comes with a key that a caller can try. Both patterns are walked side by side, as automata over characters;
a state is a place in a part of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from .expr import DIGITS
from .keys import Pattern
from .matching import Enum, Flat, Integer, Literal, Part, PathHead, PathTail, PathWhole

# a dot, a digit, and a letter for all characters that are neither
_CLASSES = frozenset(".7x")
MOST_STATES = 20_000

# the part, and where in it: what is left of a text, or a mark
_State = tuple[int, str]
_Pair = tuple[frozenset[_State], frozenset[_State]]


def common(one: Sequence[Part], other: Sequence[Part]) -> str | None:
    """A key that both patterns may match; None: there is certainly none. The empty text where looking took too long."""
    if _differ(one, other):
        return None
    first, second = tuple(one), tuple(other)
    start = (_start(first), _start(second))
    before: dict[_Pair, tuple[_Pair, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(before) < MOST_STATES:
        here = queue.popleft()
        if (len(first), "") in here[0] and (len(second), "") in here[1]:
            return _spelled(here, before)
        for c in sorted(_CLASSES | _letters(first, here[0]) | _letters(second, here[1])):
            there = (_after(first, here[0], c), _after(second, here[1], c))
            if there[0] and there[1] and there not in before:
                before[there] = (here, c)
                queue.append(there)
    return "" if queue else None


def apart(one: Pattern, other: Pattern) -> bool:
    """Whether there is certainly no key that both patterns match."""
    return not (one.includes(other) or other.includes(one)) and common(one.parts, other.parts) is None


def _differ(one: Sequence[Part], other: Sequence[Part]) -> bool:
    """Whether the texts that the patterns begin or end with differ: the common case, without a walk."""
    for at, agree in ((0, str.startswith), (-1, str.endswith)):
        a, b = one[at], other[at]
        if isinstance(a, Literal) and isinstance(b, Literal) and not (agree(a.text, b.text) or agree(b.text, a.text)):
            return True
    return False


def _spelled(state: _Pair, before: Mapping[_Pair, tuple[_Pair, str] | None]) -> str:
    out = []
    while (step := before[state]) is not None:
        state = step[0]
        out.append(step[1])
    return "".join(reversed(out))


@lru_cache(maxsize=65536)
def _letters(parts: tuple[Part, ...], states: frozenset[_State]) -> frozenset[str]:
    """The characters that some state waits for by name; of the others all digits are alike, and all that are neither digit nor dot."""
    return frozenset(left[0] for at, left in states if at < len(parts) and isinstance(parts[at], (Literal, Enum)))


@lru_cache(maxsize=4096)
def _start(parts: tuple[Part, ...]) -> frozenset[_State]:
    return frozenset(_closure(parts, 0))


def _closure(parts: tuple[Part, ...], at: int) -> Iterator[_State]:
    """The states in which part `at` begins; a path may also be nothing."""
    if at == len(parts):
        yield at, ""
        return
    part = parts[at]
    if isinstance(part, Literal):
        yield at, part.text
    elif isinstance(part, Enum):
        yield from ((at, value) for value in part.values)
    elif isinstance(part, (PathHead, PathTail, PathWhole)):
        yield at, "<" if isinstance(part, PathTail) else "+"
        yield from _closure(parts, at + 1)
    else:
        yield at, "+"


@lru_cache(maxsize=65536)
def _after(parts: tuple[Part, ...], states: frozenset[_State], c: str) -> frozenset[_State]:
    out: set[_State] = set()
    for at, left in states:
        if at == len(parts):
            continue
        part = parts[at]
        if isinstance(part, (Literal, Enum)):
            if left[0] == c:
                out.update([(at, left[1:])] if len(left) > 1 else _closure(parts, at + 1))
        elif isinstance(part, Integer):
            if c in DIGITS:
                out.add((at, "*"))
                out.update(_closure(parts, at + 1))
        elif isinstance(part, (PathHead, PathTail, PathWhole)):
            out.update(_path(parts, at, part, left, c))
        elif c != "." or isinstance(part, Flat):
            out.add((at, "*"))
            out.update(_closure(parts, at + 1))
    return frozenset(out)


def _path(parts: tuple[Part, ...], at: int, part: Part, left: str, c: str) -> Iterator[_State]:
    """A path is any text: `<` waits for the dot before it, `+` for its first character, `*` for more."""
    if left == "<":
        if c == ".":
            yield at, "+"
        return
    yield at, "*"
    if not isinstance(part, PathHead) or (c == "." and left == "*"):
        yield from _closure(parts, at + 1)
