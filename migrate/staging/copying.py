"""Where the storages of a state go, and the copies that bring them there.

Storages whose bytes overlap are one region, however many torch has made of them, and keep their
distances. A large region of which tensors touch less than half is copied by touched ranges. Small
regions share a block; each large one has its own, so that a tensor that is taken out of a snapshot
keeps no more than its storage.

States have many small storages that overlap no other. Those are placed and copied by arrays of
numbers, because an object for each would take longer than its bytes.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import numpy
import torch

from .memory import Want
from .streams import Arrival, Streams
from .tensors import LARGE, Storages

_ALIGNED: Final = 64
# blocks of shared memory hold several storages: a descriptor each would be too many
_SEGMENT: Final = 1 << 30


class Transfer(NamedTuple):
    """`size` bytes of a storage, from byte `low` on, go to byte `at` of a block."""

    storage: int
    low: int
    size: int
    block: int
    at: int


class Home(NamedTuple):
    """A storage in its block: first byte and length; `shift` maps old byte offsets to new ones."""

    block: int
    at: int
    size: int
    shift: Callable[[int], int] | None = None


class Slab(NamedTuple):
    """Storages that are copied whole into one block: from which address, where to, how much."""

    block: int
    sources: Any
    at: Any
    sizes: Any


class Arrangement:
    """Blocks that are needed, copies into them, and where each storage lies then."""

    __slots__ = ("copies", "places", "shifted", "slab", "wants")

    def __init__(self, storages: int) -> None:
        self.wants: list[Want] = []
        self.copies: list[Transfer] = []
        self.slab: Slab | None = None
        self.places: list[Home | None] = [None] * storages
        # whether some storage is kept in part
        self.shifted = False

    @property
    def nbytes(self) -> int:
        """The bytes that are copied."""
        small = 0 if self.slab is None else int(self.slab.sizes.sum())
        return small + sum(copy.size for copy in self.copies)


def arrange(storages: Storages, *, together: bool) -> Arrangement:
    """Places for all storages. `together`: large ones share blocks of up to 1 GiB too."""
    made = Arrangement(len(storages.storages))
    shared = _Shared(made, _SEGMENT if together else 1 << 62)
    places, copies = made.places, made.copies
    rest: Sequence[int] = range(len(storages.storages))
    if len(rest) > 1 and not storages.devices:
        rest = _place_small(made, shared, storages)
    for address, members in _regions(storages, rest):
        number, size = members[0][0], members[0][2]
        if len(members) == 1 and size <= LARGE:
            block, at = shared.take(size)
            places[number] = Home(block, at, size)
            copies.append(Transfer(number, 0, size, block, at))
            continue
        ranges = _kept(storages, members)
        kept = size if ranges is None else sum(end - low for low, end in ranges)
        if not kept:
            # tensors without elements, and nothing else
            places[number] = Home(-1, 0, 0)
            continue
        if len(members) > 1:
            kept = max(distance + extent for _, distance, extent in members)
        if together or kept < LARGE:
            block, at = shared.take(kept)
        else:
            made.wants.append(Want(kept, address))
            block, at = len(made.wants) - 1, 0
        if ranges is None:
            _place_all(made, members, block, at)
        else:
            _place_ranges(made, number, ranges, block, at)
    return made


class _Shared:
    """Room for small regions, one behind the other, in as few blocks as the largest size allows."""

    __slots__ = ("_at", "_block", "_made", "_most")

    def __init__(self, made: Arrangement, most: int) -> None:
        self._made, self._most = made, most
        self._block, self._at = -1, most

    @property
    def most(self) -> int:
        """The most bytes that `take` has room for at a time, in a block of their own."""
        return self._most

    def take(self, size: int) -> tuple[int, int]:
        """Number of a block, and first byte in it, for `size` bytes."""
        room = -(-size // _ALIGNED) * _ALIGNED
        wants = self._made.wants
        if self._at and self._at + room > self._most:
            wants.append(Want(0))
            self._block, self._at = len(wants) - 1, 0
        at = self._at
        self._at += room
        # what shares has no one source: its place in the state is the hint
        wants[self._block] = Want(self._at, -1 - self._block)
        return self._block, at


def _place_small(made: Arrangement, shared: _Shared, storages: Storages) -> list[int]:
    """Places what is small and overlaps nothing; the numbers of the rest."""
    addresses = numpy.array(storages.addresses, dtype=numpy.int64)
    sizes = numpy.array(storages.sizes, dtype=numpy.int64)
    order = numpy.argsort(addresses, kind="stable")
    order = order[sizes[order] > 0]
    starts, extents = addresses[order], sizes[order]
    ends = numpy.maximum.accumulate(starts + extents)
    alone = extents <= LARGE
    alone[1:] &= starts[1:] >= ends[:-1]
    alone[:-1] &= starts[1:] >= ends[:-1]
    numbers, extents = order[alone], extents[alone]
    rooms = -(-extents // _ALIGNED) * _ALIGNED
    total = int(rooms.sum())
    if not total or total > shared.most:
        return order.tolist()  # type: ignore[no-any-return]
    block, _ = shared.take(total)
    at = numpy.cumsum(rooms) - rooms
    made.slab = Slab(block, starts[alone], at, extents)
    # as Home(...) makes them, without entering Python for each
    homes = map(
        tuple.__new__,
        repeat(Home),
        zip(repeat(block), at.tolist(), extents.tolist(), repeat(None), strict=False),
    )
    deque(map(made.places.__setitem__, numbers.tolist(), homes), maxlen=0)
    return order[~alone].tolist()  # type: ignore[no-any-return]


def _place_all(made: Arrangement, members: list[_Member], block: int, at: int) -> None:
    # a member copies what the ones before it do not reach
    reached = 0
    for number, distance, size in members:
        made.places[number] = Home(block, at + distance, size)
        if distance + size > reached:
            low = max(0, reached - distance)
            made.copies.append(Transfer(number, low, size - low, block, at + distance + low))
            reached = distance + size


def _place_ranges(
    made: Arrangement, number: int, ranges: list[tuple[int, int]], block: int, at: int
) -> None:
    starts = [low for low, _ in ranges]
    moves, kept = [], 0
    for low, end in ranges:
        moves.append(kept - low)
        made.copies.append(Transfer(number, low, end - low, block, at + kept))
        kept += end - low

    def shift(byte: int) -> int:
        return byte + moves[max(0, bisect_right(starts, byte) - 1)]

    made.places[number] = Home(block, at, kept, shift)
    made.shifted = True


# number of a storage, its distance from the first byte of its region, and its bytes
_Member = tuple[int, int, int]


def _regions(storages: Storages, numbers: Sequence[int]) -> Iterator[tuple[int, list[_Member]]]:
    """(first address, members) of each run of storages that overlap, in the order of addresses."""
    by_device: dict[Any, list[tuple[int, int, int]]] = {}
    extents: list[tuple[int, int, int]] = []
    for number in numbers:
        size = storages.sizes[number]
        if size:
            extents.append((storages.addresses[number], -size, number))
    if storages.devices:
        for extent in extents:
            by_device.setdefault(storages.storages[extent[2]].device, []).append(extent)
    else:
        by_device[None] = extents
    for found in by_device.values():
        found.sort()
        start = end = -1
        members: list[_Member] = []
        for address, negative, number in found:
            if address < end:
                members.append((number, address - start, -negative))
                if address - negative > end:
                    end = address - negative
                continue
            if members:
                yield start, members
            start, end, members = address, address - negative, [(number, 0, -negative)]
        if members:
            yield start, members


def _kept(storages: Storages, members: list[_Member]) -> list[tuple[int, int]] | None:
    """The ranges of a large storage that are kept; None is all: tensors touch half or more."""
    number, _, size = members[0]
    if len(members) > 1:
        return None
    ranges = _joined(storages.touched[number], size)
    return ranges if 2 * sum(end - low for low, end in ranges) < size else None


def _joined(touched: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The union of ranges, each begun and ended where a cache line does."""
    joined: list[tuple[int, int]] = []
    for low, end in sorted(touched):
        if low == end:
            continue
        low, end = low // _ALIGNED * _ALIGNED, min(-(-end // _ALIGNED) * _ALIGNED, size)
        if joined and low <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((low, end))
    return joined or [(0, 0)]


# torch's threads do not survive a fork: a copy that waits for them would wait for ever
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_after_fork)


def run(
    plan: Arrangement,
    storages: Storages,
    views: Sequence[memoryview],
    addresses: Sequence[int],
    streams: Streams,
) -> Arrival:
    """Copies the bytes; says when those from devices are there, the others are on return.

    Those of large or foreign storages go through torch, which has threads and devices.
    """
    memmove = ctypes.memmove
    if plan.slab is not None:
        block, froms, ats, sizes = plan.slab
        into = (ats + addresses[block]).tolist()
        deque(map(memmove, into, froms.tolist(), sizes.tolist()), maxlen=0)
    sources, starts, elsewhere = storages.storages, storages.addresses, storages.devices
    foreign: dict[torch.device, list[Transfer]] = {}
    for copy in plan.copies:
        number, low, size, block, at = copy
        if number in elsewhere:
            foreign.setdefault(elsewhere[number], []).append(copy)
        elif size <= LARGE or _forked:
            memmove(addresses[block] + at, starts[number] + low, size)
        else:
            _into(views, copy).copy_(_bytes(sources[number], low, size))
    try:
        for device, several in foreign.items():
            with streams.behind(device):
                for copy in several:
                    source = _bytes(sources[copy.storage], copy.low, copy.size)
                    _into(views, copy).copy_(source, non_blocking=True)
                    streams.keep(source, device)
    except BaseException:
        streams.mark(foreign, views).wait()
        raise
    return streams.mark(foreign, views)


def _bytes(storage: torch.UntypedStorage, low: int, size: int) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, low, (size,), (1,))


def _into(views: Sequence[memoryview], copy: Transfer) -> torch.Tensor:
    return torch.frombuffer(views[copy.block], dtype=torch.uint8, count=copy.size, offset=copy.at)
