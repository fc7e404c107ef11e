"""From the values of captures to keys, the way back from `matching`.

A migration writes as many keys as it reads, so the common patterns compile to one `%` format. A
path that is empty drops its dot: the format for that case prints the value with precision zero.
Index expressions and flattened paths take the slower way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from .matching import Flat, Integer, Literal, Part, PathHead, PathTail, Value

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
