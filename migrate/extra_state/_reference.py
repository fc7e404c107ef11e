"""States that differ in nothing but numbers: of thousands, one is decoded and the others are
compared with it.

In a state of delayed scaling the numbers of each storage lie in one run of bytes that no opcode
reads, and a storage's key, an address, stands in two places of its own stream. All other bytes
decide what the state is. So a payload that has these bytes, digits where the keys stand and the
same digits in both places, would be decoded to the same record with other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from ._storages import StoredState

T = TypeVar("T")
# a key that is shorter is no address, and may stand anywhere
_SHORTEST_KEY = 6
# what is longer is decoded faster than it is compared
MOST_TWINS, LONGEST = 64, 64 << 10


class _StreamShape(NamedTuple):
    """`fixed` are (start, end, bytes) that must be equal, `keys` the (start, start, length) of the
    two places of each key.

    `numbers` are (start, end) of what each storage holds, in the order of the storages.
    """

    fixed: tuple[tuple[int, int, bytes], ...]
    keys: tuple[tuple[int, int, int], ...]
    numbers: tuple[tuple[int, int], ...]

    def fits(self, payload: bytes) -> bool:
        # thousands are compared, with a dozen runs each
        for a, b, held in self.fixed:
            if payload[a:b] != held:
                return False
        for a, b, n in self.keys:
            key = payload[a : a + n]
            if payload[b : b + n] != key or not key.isdigit():
                return False
        return True


class Reference(Generic[T]):
    """What is known of payloads, by all of their bytes but numbers and keys."""

    __slots__ = ("_count", "_shapes")

    def __init__(self) -> None:
        self._shapes: dict[int, list[tuple[_StreamShape, T]]] = {}
        self._count = 0

    def find_known(self, payload: bytes) -> tuple[T, Sequence[tuple[int, int]]] | None:
        """What was added for a payload that differs in numbers and keys alone, and where the
        numbers of each storage lie.
        """
        return next(
            (
                (known, shape.numbers)
                for shape, known in self._shapes.get(len(payload), ())
                if shape.fits(payload)
            ),
            None,
        )

    def add(self, payload: bytes, storages: Sequence[StoredState], known: T) -> None:
        """Remembers `known` for the payload, whose storages are all of `storages`; nothing where
        one of them cannot be placed for sure.
        """
        if self._count >= MOST_TWINS or len(payload) > LONGEST or not storages:
            return
        shape = _shape(payload, storages)
        if shape is not None:
            self._shapes.setdefault(len(payload), []).append((shape, known))
            self._count += 1


def _shape(payload: bytes, storages: Sequence[StoredState]) -> _StreamShape | None:
    holes: list[tuple[int, int]] = []
    keys: list[tuple[int, int, int]] = []
    runs: list[tuple[int, int]] = []
    for held in storages:
        at = payload.find(held.stream)
        # a stream that stands in two places could be compared in the wrong one
        if at < 0 or payload.rfind(held.stream) != at:
            return None
        end = at + len(held.stream)
        numbers = end - len(held.data)
        runs.append((numbers, end))
        key = held.node.id[2].encode()
        first = payload.find(key, at, numbers)
        second = payload.find(key, first + 1, numbers)
        if (
            len(key) >= _SHORTEST_KEY
            and key.isdigit()
            and 0 <= first < second
            and payload.find(key, second + 1, numbers) < 0
        ):
            keys.append((first, second, len(key)))
            holes += [(first, first + len(key)), (second, second + len(key))]
    fixed, start = [], 0
    for a, b in [*sorted((*holes, *runs)), (len(payload), len(payload))]:
        if a < start:
            return None
        fixed.append((start, a, payload[start:a]))
        start = b
    return _StreamShape(tuple(fixed), tuple(keys), tuple(runs))
