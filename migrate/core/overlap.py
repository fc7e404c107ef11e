"""Whether two patterns have a key in common, decided on the patterns alone.

The counterpart of `keys.includes`: there "yes" is certain, here "no" is. Repeated captures and
index expressions are taken for free, so a "yes" comes with a key that a caller can try. Both
patterns are walked side by side, as automata over characters; a state is a place in a part of each.
`shared_key` then solves the index expressions along that key: each says that a number is factor *
capture + offset, and linear congruences decide whether all of them can hold.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import gcd

from .keys import Pattern, TwoReadings
from .matching import (
    Enum,
    Flat,
    Integer,
    Literal,
    Part,
    PathHead,
    PathTail,
    PathWhole,
    advance,
    cuts,
)
from .notation import DIGITS

# a dot, a digit, and a letter for all characters that are neither
_CLASSES = frozenset(".7x")
MOST_STATES = 20_000

# the part, and where in it: what is left of a text, or a mark
_State = tuple[int, str]
_Pair = tuple[frozenset[_State], frozenset[_State]]
# number = factor * other + offset
_Equation = tuple[Hashable, int, Hashable, int]


def common(one: Sequence[Part], other: Sequence[Part]) -> str | None:
    """A key that both patterns may match; None: there is certainly none. The empty text, which is
    no key, where looking took too long.
    """
    if _differ(one, other):
        return None
    first, second = tuple(one), tuple(other)
    start = (_start(first), _start(second))
    before: dict[_Pair, tuple[_Pair, str] | None] = {start: None}
    queue = deque([start])
    while queue and len(before) < MOST_STATES:
        here = queue.popleft()
        if here is not start and (len(first), "") in here[0] and (len(second), "") in here[1]:
            return _spelled(here, before)
        letters = _CLASSES | _letters(first, here[0]) | _letters(second, here[1])
        for c in sorted(letters, key=lambda c: (c == ".", c)):
            there = (_after(first, here[0], c), _after(second, here[1], c))
            if there[0] and there[1] and there not in before:
                before[there] = (here, c)
                queue.append(there)
    return "" if queue else None


def shared_key(one: Pattern, other: Pattern) -> str | None:
    """A key that both patterns match, or None where none was found. Neither reads params."""
    key = common(one.parts, other.parts)
    if not key or (takes(one, key) and takes(other, key)):
        return key or None
    runs = {(m.start(), m.end()): m[0] for m in re.finditer("[0-9]+", key)}
    equations: list[_Equation] = []
    for pattern in (one, other):
        free = [
            replace(part, factor=1, offset=0) if isinstance(part, Integer) else part
            for part in pattern.parts
        ]
        borders = next(cuts(free, advance(free, key), key), None)
        if borders is None:
            return None
        for part, (start, end) in zip(pattern.parts, pairwise(borders), strict=True):
            if isinstance(part, Integer) and isinstance(part.offset, int):
                equations.append(
                    ((start, end), part.factor, (pattern is one, part.name), part.offset)
                )
            elif isinstance(part, (Literal, Enum)):
                # text that a pattern spells out stays as it is
                fixed = [run for run in runs if run[0] < end and start < run[1]]
                equations += [(run, 0, None, int(runs[run])) for run in fixed]
    numbers = _solved(equations)
    if numbers is None:
        return None
    for (start, end), _ in sorted(runs.items(), reverse=True):
        key = key[:start] + str(numbers.get((start, end), key[start:end])) + key[end:]
    return key if takes(one, key) and takes(other, key) else None


def takes(pattern: Pattern, key: str) -> bool:
    """Whether the pattern matches the key, and in one way only."""
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return False


def _solved(equations: Sequence[_Equation]) -> dict[Hashable, int] | None:
    """Small numbers, none below 0, for which all equations hold; None: there are none.

    What is connected by equations is kept as p * s + q with one s that stands for 0, 1, 2 …; a
    congruence makes s coarser.
    """
    out: dict[Hashable, int] = {}
    left = list(equations)
    while left:
        found: dict[Hashable, tuple[int, int]] = {left[0][2]: (1, 0)}
        while reached := [e for e in left if e[0] in found or e[2] in found]:
            number, factor, of, offset = reached[0]
            left.remove(reached[0])
            if factor == 0:
                found.setdefault(of, (0, 0))
            if of in found:
                p, q = found[of]
                wanted = (factor * p, factor * q + offset)
                if (before := found.setdefault(number, wanted)) == wanted:
                    continue
                # p * s + q is the same on both sides for one s only, if at all
                slope, gap = before[0] - wanted[0], wanted[1] - before[1]
                if slope == 0 or gap % slope or gap // slope < 0:
                    return None
                found = {name: (0, p * (gap // slope) + q) for name, (p, q) in found.items()}
            else:
                p, q = found[number]
                shared = gcd(p, factor)
                step = factor // shared
                if (offset - q) % shared:
                    return None
                first = (offset - q) // shared * pow(p // shared, -1, step) % step
                found = {name: (p * step, p * first + q) for name, (p, q) in found.items()}
                p, q = found[number]
                found[of] = p // factor, (q - offset) // factor
        least = max(0, *(-(q // p) for p, q in found.values() if p), 0)
        values = {name: p * least + q for name, (p, q) in found.items()}
        if min(values.values()) < 0:
            return None
        out |= values
    return out


def apart(one: Pattern, other: Pattern) -> bool:
    """Whether there is certainly no key that both patterns match."""
    return (
        not (one.includes(other) or other.includes(one)) and common(one.parts, other.parts) is None
    )


def _differ(one: Sequence[Part], other: Sequence[Part]) -> bool:
    """Whether the texts that the patterns begin or end with differ: common, and needs no walk."""
    for at, agree in ((0, str.startswith), (-1, str.endswith)):
        a, b = one[at], other[at]
        if (
            isinstance(a, Literal)
            and isinstance(b, Literal)
            and not (agree(a.text, b.text) or agree(b.text, a.text))
        ):
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
    """The characters that some state waits for by name; of the others all digits are alike, and all
    that are neither digit nor dot.
    """
    return frozenset(
        left[0] for at, left in states if at < len(parts) and isinstance(parts[at], (Literal, Enum))
    )


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
    """A path is any text: `<` waits for its dot, `+` for its first character, `*` for more."""
    if left == "<":
        if c == ".":
            yield at, "+"
        return
    yield at, "*"
    if not isinstance(part, PathHead) or (c == "." and left == "*"):
        yield from _closure(parts, at + 1)
