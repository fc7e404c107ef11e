"""How large a pickle stream may be before it is refused: every budget in one place, by what the
stream is.

Genuine streams stay far below. The budgets are for the others: a stream of one-byte opcodes makes
objects of a hundred bytes each, and a tuple a million levels deep kills whoever hashes or prints
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from .keys import WrongError
from .nodes import ABSENT, Call, Dict, Global, Persistent, Set


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one stream; reaching past one is M932. `size`, `text`, `blob` and `integer` are in
    bytes, the others are counts.
    """

    size: int
    opcodes: int
    stack: int
    marks: int
    memo: int
    # containers and calls; besides this never more than 100,000 and one for each three bytes of the
    # stream
    nodes: int
    depth: int
    text: int
    blob: int
    # 128 bits without a sign, as numpy's generators have them
    integer: int = 17


MiB = 1 << 20

# the state of a Transformer Engine module
EXTRA_STATE = Limits(
    size=64 * MiB,
    opcodes=200_000,
    stack=10_000,
    marks=32,
    memo=50_000,
    nodes=100_000,
    depth=24,
    text=4096,
    blob=32 * MiB,
)
# data.pkl of a zip, the object pickle of a legacy file; protocol 2 writes bytes as text
ARCHIVE = Limits(
    size=176 * MiB,
    opcodes=20_000_000,
    stack=100_000,
    marks=64,
    memo=5_000_000,
    nodes=5_000_000,
    depth=64,
    text=64 * MiB,
    blob=64 * MiB,
)
# .metadata of torch.distributed.checkpoint: one call a chunk, 50 MB for 320,000 chunks
METADATA = Limits(
    size=512 * MiB,
    opcodes=200_000_000,
    stack=100_000,
    marks=64,
    memo=50_000_000,
    nodes=50_000_000,
    depth=64,
    text=MiB,
    blob=0,
)


_SCALARS: Final = frozenset({str, int, float, bool, bytes, bytearray, type(None), Global})
_GROUP = 1024


def measure(value: Any, limits: Limits, size: int | None = None) -> None:
    """M932 if the value is too deep, or if its parts, counted at each depth where they lie, are too
    many.

    A value that shares nothing has no more parts than its stream has bytes, which is `size` where
    there is a stream. Past that, what is shared is looked at once for each of its depths; genuine
    values share little, and at two or three depths.
    """
    deep = f"values nested more than {limits.depth} deep"
    most = limits.opcodes if size is None else min(limits.opcodes, 4 * size + _GROUP)
    left = min(most, 1_000_000 if size is None else size)
    groups = [([value], 1)]
    while groups and left >= 0:
        group, depth = groups.pop()
        if depth > limits.depth:
            if any(type(node) not in _SCALARS for node in group):
                raise WrongError("M932", deep)
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
    raise WrongError("M932", deep)


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
