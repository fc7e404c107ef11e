"""How deep a value is, found without recursion.

What shares nothing is walked in small groups, so that the processor still has at hand what it
looked at; a pass over a hundred thousand tensors for each depth takes three times as long. What
shares so much that this would not end is gone through depth by depth.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from .keys import WrongError
from .limits import Limits
from .nodes import ABSENT, Call, Dict, Global, Persistent, Set

_SCALARS: Final = frozenset({str, int, float, bool, bytes, bytearray, type(None), Global})
_GROUP = 1024


def measure(value: Any, limits: Limits, size: int | None = None) -> None:
    """M932 if the value is too deep, or if its parts, counted at each depth where they lie, are too
    many.

    A value that shares nothing has no more parts than its stream has bytes, which is `size` where
    there is a stream. Past that, what is shared is looked at once for each of its depths; genuine
    values share little, and at two or three depths.
    """
    deep = WrongError("M932", f"values nested more than {limits.depth} deep")
    most = limits.opcodes if size is None else min(limits.opcodes, 4 * size + _GROUP)
    left = min(most, 1_000_000 if size is None else size)
    groups = [([value], 1)]
    while groups and left >= 0:
        group, depth = groups.pop()
        if depth > limits.depth:
            if any(type(node) not in _SCALARS for node in group):
                raise deep
            continue
        held = _held(group, left)
        left -= len(held)
        groups += [(held[i : i + _GROUP], depth + 1) for i in range(0, len(held), _GROUP)]
    if left >= 0:
        return
    level, looked = [value], 0
    for _ in range(limits.depth):
        held = _held(level, most)
        looked += len(held)
        if looked > most:
            raise WrongError(
                "M932", f"more than {most:,} values, those that are shared counted at each depth"
            )
        level = list({id(part): part for part in held if type(part) not in _SCALARS}.values())
        if not level:
            return
    raise deep


def _held(nodes: list[Any], most: int) -> list[Any]:
    """What the nodes hold; stops soon after `most`."""
    held: list[Any] = []
    for node in nodes:
        kind = type(node)
        if kind in _SCALARS:
            continue
        if kind is tuple or kind is list:
            held += node
        elif kind is Call:
            held += node.arguments
            if node.state is not ABSENT:
                held.append(node.state)
            if node.items is not None:
                held += node.items
            if node.pairs is not None:
                held += chain.from_iterable(node.pairs)
        elif kind is Persistent:
            held.append(node.id)
        elif kind is Dict:
            held += chain.from_iterable(node.pairs)
        elif kind is Set:
            held += node.items
        if len(held) > most:
            break
    return held
