"""How deep a value is, found without recursion."""

from __future__ import annotations

from itertools import chain
from typing import Any, Final

from .keys import WrongError
from .limits import Limits
from .nodes import ABSENT, Call, Dict, Global, Persistent, Set

_SCALARS: Final = frozenset({str, int, float, bool, bytes, bytearray, type(None), Global})


def measure(value: Any, limits: Limits) -> None:
    """M932 if the value is too deep, or if its parts, counted at each depth where they lie, are too many.

    Goes down depth by depth: what is shared is looked at once for each of its depths, of which there are few.
    """
    level = [value]
    looked = 0
    for _ in range(limits.depth):
        following: list[Any] = []
        for node in level:
            kind = type(node)
            if kind is tuple or kind is list:
                following += node
            elif kind is Dict:
                following += chain.from_iterable(node.pairs)
            elif kind is Call:
                following += node.arguments
                if node.state is not ABSENT:
                    following.append(node.state)
                if node.items is not None:
                    following += node.items
                if node.pairs is not None:
                    following += chain.from_iterable(node.pairs)
            elif kind is Set:
                following += node.items
            elif kind is Persistent:
                following.append(node.id)
        looked += len(following)
        if looked > limits.opcodes:
            raise WrongError("M932", f"more than {limits.opcodes:,} values, those that are shared counted at each depth")
        parts = [part for part in following if type(part) not in _SCALARS]
        level = list(dict(zip(map(id, parts), parts, strict=True)).values())
        if not level:
            return
    raise WrongError("M932", f"values nested more than {limits.depth} deep")
