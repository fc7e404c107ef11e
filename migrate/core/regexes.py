"""Regular expressions that a checkpoint holds, matched in time linear in the text.

Configurations select modules by expressions of Python's `re`, which backtracks: a pattern of thirty
characters can keep it busy for years. Here an expression becomes a set of states that are followed
side by side, and sets that were seen are remembered, so most characters cost one look into a dict.
What needs more than that (groups that are referred to, looking back, looking ahead other than at
the very start) is refused by name.

K. Thompson, "Regular expression search algorithm", CACM 11 (1968).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

LONGEST = 4096
_MOST_STATES = 200_000
_MOST_SETS = 4096
_MOST_CHARACTERS = 4096
_DEEPEST = 50
_WORDS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda c: c.isalnum() or c == "_",
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
# what a state does: read a character, go on at two places, ask for a border, end
_READ, _FORK, _START, _END, _DONE = range(5)
_State = tuple[int, Any, int]


class RegexError(ValueError):
    """Not an expression, or one that is not read here; the message says why."""


class _StateSet:
    """States that are followed side by side: whether one of them ends, whether one asks for the end
    of the text, and where each character leads that was read in them.
    """

    __slots__ = ("asks", "ends", "following", "states")

    def __init__(self, states: frozenset[int], ends: bool, asks: bool) -> None:
        self.states, self.ends, self.asks = states, ends, asks
        self.following: dict[str, _StateSet] = {}


class Regexes:
    """Expressions as `re.match` reads them: from the start of the text, not up to its end."""

    __slots__ = ("_ahead", "_begins", "_known", "_states")

    def __init__(self, texts: Iterable[str]) -> None:
        """RegexError, which names the text, for an invalid expression, or one that needs more than
        one pass over what it is matched with.
        """
        self._states: list[_State] = [(_DONE, None, 0)]
        self._begins: list[int] = []
        # those that look ahead before anything is read: (whether it must match, expression), rest
        self._ahead: list[tuple[list[tuple[bool, Regexes]], int]] = []
        self._known: dict[frozenset[int], _StateSet] = {}
        for text in texts:
            try:
                ahead, begin = self._compiled(text)
            except RegexError as error:
                raise RegexError(f"`{text[:200]}`: {error}") from None
            if ahead:
                self._ahead.append((ahead, begin))
            else:
                self._begins.append(begin)

    def _compiled(self, text: str) -> tuple[list[tuple[bool, Regexes]], int]:
        if len(text) > LONGEST:
            raise RegexError(f"it has {len(text)} characters, at most {LONGEST} are read")
        parser = _Parser(text)
        ahead: list[tuple[bool, Regexes]] = []
        while (found := parser.leading()) is not None:
            ahead.append((found[0], Regexes([found[1]])))
        node = parser.alternation(0)
        if parser.at < len(text):
            raise RegexError(f"`)` without `(` at {parser.at}")
        if ahead and node[0] == "either":
            raise RegexError("a look ahead in one of several alternatives")
        return ahead, self._build(node, 0)

    def match(self, text: str) -> bool:
        """Whether `re.match` finds one of them."""
        return next(self.ends(text), None) is not None

    def ends(self, text: str) -> Iterator[int]:
        """The places in the text at which a match that begins at its start can end, in order."""
        begins = self._begins
        if self._ahead:
            begins = begins + [
                begin
                for ahead, begin in self._ahead
                if all(other.match(text) is must for must, other in ahead)
            ]
        now = self._set(self._closed(begins, start=True))
        last = len(text)
        # `$` holds before a line feed at the end, too
        border = last - text.endswith("\n")
        for at, char in enumerate(text):
            if at == border and now.asks:
                now = self._set(self._closed(now.states, start=at == 0, end=True))
            if now.ends:
                yield at
            following = now.following.get(char)
            now = self._after(now, char) if following is None else following
            if not now.states:
                return
        if now.asks:
            now = self._set(self._closed(now.states, start=not text, end=True))
        if now.ends:
            yield last

    def _set(self, states: frozenset[int]) -> _StateSet:
        found = self._known.get(states)
        if found is None:
            if len(self._known) > _MOST_SETS:
                for other in self._known.values():
                    other.following.clear()
                self._known.clear()
            kinds = {self._states[number][0] for number in states}
            found = self._known[states] = _StateSet(states, _DONE in kinds, _END in kinds)
        return found

    def _after(self, now: _StateSet, char: str) -> _StateSet:
        states = (self._states[number] for number in now.states)
        found = self._set(
            self._closed(
                [following for kind, test, following in states if kind == _READ and test(char)]
            )
        )
        if len(now.following) > _MOST_CHARACTERS:
            now.following.clear()
        now.following[char] = found
        return found

    def _closed(self, begin: Any, *, start: bool = False, end: bool = False) -> frozenset[int]:
        """The states reached from these without a character. A border that is asked for is passed
        where it is one; the end stays among them, because only the next character tells.
        """
        found: set[int] = set()
        waiting = list(begin)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            kind, other, following = self._states[number]
            if kind == _FORK:
                waiting += [other, following]
            elif (kind == _START and start) or (kind == _END and end):
                waiting.append(following)
        return frozenset(n for n in found if self._states[n][0] in (_READ, _END, _DONE))

    def _add(self, kind: int, what: Any, following: int) -> int:
        if len(self._states) >= _MOST_STATES:
            raise RegexError("its repetitions make it too large")
        self._states.append((kind, what, following))
        return len(self._states) - 1

    def _build(self, node: Any, following: int) -> int:
        """The state at which the node begins; it goes on at `following`."""
        kind, *parts = node
        if kind == "read":
            return self._add(_READ, parts[0], following)
        if kind == "border":
            return self._add(parts[0], None, following)
        if kind == "sequence":
            for part in reversed(parts[0]):
                following = self._build(part, following)
            return following
        if kind == "either":
            begins = [self._build(part, following) for part in parts[0]]
            begin = begins[-1]
            for other in reversed(begins[:-1]):
                begin = self._add(_FORK, other, begin)
            return begin
        part, least, most = parts
        if most is None:
            loop = self._add(_FORK, None, following)
            self._states[loop] = (_FORK, self._build(part, loop), following)
            begin = loop
        else:
            begin = following
            for _ in range(most - least):
                begin = self._add(_FORK, self._build(part, begin), following)
        for _ in range(least):
            begin = self._build(part, begin)
        return begin


class _Parser:
    """The expression as nested tuples: read, border, sequence, either, repeat."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def leading(self) -> tuple[bool, str] | None:
        """(whether it must match, expression) of a look ahead where nothing was read yet."""
        start = self.at
        if self.text.startswith("^", self.at):
            self.at += 1
        if not self.text.startswith(("(?!", "(?="), self.at):
            self.at = start
            return None
        must = self.text[self.at + 2] == "="
        self.at += 3
        begin = self.at
        self.alternation(1)
        if not self._take(")"):
            raise RegexError(f"`(` without `)` at {begin - 3}")
        return must, self.text[begin : self.at - 1]

    def alternation(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise RegexError(f"groups nested more than {_DEEPEST} deep")
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else ("either", branches)

    def _take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _sequence(self, depth: int) -> Any:
        parts: list[Any] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            node = self._atom(depth)
            limits = self._limits()
            if limits is not None:
                if node[0] == "border":
                    raise RegexError(f"nothing to repeat at {self.at}")
                node = ("repeat", node, *limits)
                self._take("?")
                if self._take("+"):
                    raise RegexError(f"a possessive repetition at {self.at - 1}")
                if self.at < len(self.text) and (
                    self.text[self.at] in "*?" or self._bounds() is not None
                ):
                    raise RegexError(f"a repetition of a repetition at {self.at}")
            parts.append(node)
        return ("sequence", parts)

    def _limits(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        found = self._bounds()
        if found is None:
            return None
        least, most, self.at = found
        if most is not None and most < least:
            raise RegexError(f"a repetition from {least} to {most}")
        if max(least, most or 0) > _MOST_STATES:
            raise RegexError("its repetitions make it too large")
        return least, most

    def _bounds(self) -> tuple[int, int | None, int] | None:
        """(least, most, place behind) of `{m,n}`; other braces are characters."""
        end = self.text.find("}", self.at)
        if not self.text.startswith("{", self.at) or end < 0:
            return None
        least, comma, most = self.text[self.at + 1 : end].partition(",")
        numbers = [n for n in (least, most) if n]
        if not (numbers or comma) or any(
            len(n) > 9 or not (n.isascii() and n.isdecimal()) for n in numbers
        ):
            return None
        low = int(least or 0)
        return low, (int(most) if most else None) if comma else low, end + 1

    def _atom(self, depth: int) -> Any:
        begin, char = self.at, self.text[self.at]
        if char in "*+?" or self._bounds() is not None:
            raise RegexError(f"nothing to repeat at {begin}")
        self.at += 1
        if char == "(":
            if self._take("?P<"):
                name, _, _ = self.text[self.at :].partition(">")
                if not name.isidentifier():
                    raise RegexError(f"a group without a name at {begin}")
                self.at += len(name) + 1
            elif self.text.startswith("?", self.at) and not self._take("?:"):
                raise RegexError(f"`{self.text[begin : begin + 4]}` at {begin}")
            node = self.alternation(depth + 1)
            if not self._take(")"):
                raise RegexError(f"`(` without `)` at {begin}")
            return node
        if char == ".":
            return ("read", lambda c: c != "\n")
        if char in "^$":
            return ("border", _START if char == "^" else _END)
        if char == "[":
            return ("read", self._set(begin))
        if char == "\\":
            if self._take("A"):
                return ("border", _START)
            found = self._escape(begin)
            return ("read", found if callable(found) else found.__eq__)
        return ("read", char.__eq__)

    def _escape(self, begin: int) -> Callable[[str], bool] | str:
        """What the character behind a backslash stands for: a kind of characters, or one."""
        if self.at >= len(self.text):
            raise RegexError("a backslash at its end")
        char = self.text[self.at]
        self.at += 1
        if char.lower() in _WORDS:
            test = _WORDS[char.lower()]
            return test if char.islower() else lambda c: not test(c)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isascii() and char.isalnum():
            raise RegexError(f"`\\{char}` at {begin}")
        return char

    def _set(self, begin: int) -> Callable[[str], bool]:
        but = self._take("^")
        tests: list[Callable[[str], bool]] = []
        singles: set[str] = set()
        ranges: list[tuple[str, str]] = []
        first = True
        while first or not self._take("]"):
            first = False
            low = self._member(begin)
            if callable(low):
                tests.append(low)
            elif self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._member(begin)
                if callable(high) or high < low:
                    raise RegexError(f"a set with a range that is none at {begin}")
                ranges.append((low, high))
            else:
                singles.add(low)

        def within(c: str) -> bool:
            found = (
                c in singles
                or any(low <= c <= high for low, high in ranges)
                or any(test(c) for test in tests)
            )
            return found is not but

        return within

    def _member(self, begin: int) -> Callable[[str], bool] | str:
        if self.at >= len(self.text):
            raise RegexError(f"`[` without `]` at {begin}")
        char = self.text[self.at]
        self.at += 1
        return self._escape(self.at - 1) if char == "\\" else char
