"""Which files, and which pieces of files, each of several processes writes.

A file that is much longer than an even share is cut into pieces, of which each process writes one
into the same file, or into the same upload. A piece is an output file that begins later or ends
earlier; where it is cut depends on the plan and on how many take part alone. What follows a tensor
in an archive depends on checksums of pieces that others write: such places stay blank, and are
written when all pieces are there (`write_seals`).

What was uploaded cannot be changed. There an archive is cut between tensors alone, where what
follows depends on the tensors of its own piece, and the last piece ends in front of the directory
of all, which is uploaded when all pieces are there (`tail_of`, `sealed_tail`).

Where something is computed, nothing is cut within a tensor: what lies across the cut would be
computed by both, and its error measured twice.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..planning.graph import ComputedTensor
from ..source.target import OutputFile, Placed
from ..source.zip_archive import combine
from .geometry import ByteLayouts
from .publish import TILE, write_at

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.target import Target

# bytes of a piece, at least
LEAST_PIECE = 2 * TILE
# pieces of a file, at most: an upload has 10,000 parts
_MOST = 1000
# a file is cut if it is this many times as long as an even share: nothing hashes the whole of one
# that is cut
LONG = 1.5


def deal_files(
    target: Target,
    outputs: Mapping[str, Tensor],
    of: int,
    *,
    whole: bool = False,
    uploaded: bool = False,
) -> list[list[OutputFile]]:
    """What each of `of` processes writes, so that their bytes are about equal; files alone if they
    are to stay `whole`. `uploaded`: nothing can be changed once it is written.
    """
    layouts, even = ByteLayouts(), sum(file.size for file in target.files) / of
    pieces: list[OutputFile] = []
    for file in target.files:
        if whole or of == 1 or file.size < LONG * even:
            pieces.append(file)
        else:
            count = min(of, _MOST, -(-file.size // max(1, int(even))))
            if uploaded and file.seal is not None:
                pieces += cut_archive(file, count)
            else:
                pieces += cut_file(file, outputs, count, layouts)
    loads, dealt = [0] * of, [list[OutputFile]() for _ in range(of)]
    for one in sorted(pieces, key=lambda piece: -piece.nbytes):
        free: Iterable[int] = range(of)
        if one.of is not None:
            # of each file a process has one piece: two would be no better than a longer one
            free = (n for n in free if all(one.name != other.name for other in dealt[n]))
        least = min(free, key=loads.__getitem__)
        loads[least] += one.nbytes
        dealt[least].append(one)
    order = {file.name: number for number, file in enumerate(target.files)}
    return [sorted(own, key=lambda piece: order[piece.name]) for own in dealt]


def cut_file(
    file: OutputFile, outputs: Mapping[str, Tensor], count: int, layouts: ByteLayouts
) -> list[OutputFile]:
    """The file in at most `count` pieces of about equal length."""
    edges = [0]
    for number in range(1, count):
        at = _edge_near(file, file.size * number // count, outputs, layouts)
        if at - edges[-1] >= LEAST_PIECE and file.size - at >= LEAST_PIECE:
            edges.append(at)
    if len(edges) == 1:
        return [file]
    return [_piece(file, start, stop) for start, stop in pairwise([*edges, file.size])]


def cut_archive(file: OutputFile, count: int) -> list[OutputFile]:
    """A file with a seal in at most `count` pieces, cut where nothing that follows needs the
    tensors before, but for its tail, which no piece has.
    """
    tail, begins, edges = tail_of(file), _independent(file), [0]
    for number in range(1, count):
        wanted = tail * number // count
        behind = bisect_right(begins, wanted)
        near = begins[max(0, behind - 1) : behind + 1]
        at = min(near, key=lambda edge: abs(edge - wanted), default=0)
        if at - edges[-1] >= LEAST_PIECE and tail - at >= LEAST_PIECE:
            edges.append(at)
    if len(edges) == 1:
        return [file]
    return [_piece(file, start, stop, uploaded=True) for start, stop in pairwise([*edges, tail])]


def tail_of(file: OutputFile) -> int:
    """Where the last tensor of a file ends."""
    return file.tensors[-1].offset + file.tensors[-1].nbytes


def _independent(file: OutputFile) -> list[int]:
    """Where the tensors begin from which on no seal but the last needs tensors before them."""
    needs = getattr(file.seal, "needs", None)
    if needs is None:
        return []
    found, least = list[int](), len(file.tensors)
    for number in range(len(file.tensors) - 1, 0, -1):
        if least >= number:
            found.append(file.tensors[number].offset)
        least = min(least, needs(number))
    return found[::-1]


def _edge_near(
    file: OutputFile, wanted: int, outputs: Mapping[str, Tensor], layouts: ByteLayouts
) -> int:
    """Where the file can be cut: where a tensor begins, or between two steps of one that moves."""
    behind = bisect_right(file.tensors, wanted, key=lambda placed: placed.offset)
    following = file.tensors[behind].offset if behind < len(file.tensors) else file.size
    if not behind:
        return following
    placed = file.tensors[behind - 1]
    edges, tensor = [placed.offset, following], outputs[placed.key]
    if not any(isinstance(source, ComputedTensor) for source in tensor.sources):
        step = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes).step
        at = (placed.start + wanted - placed.offset) // step * step - placed.start
        edges += [placed.offset + at] if 0 < at < placed.nbytes else []
    return min(edges, key=lambda edge: abs(edge - wanted))


def _piece(file: OutputFile, start: int, stop: int, uploaded: bool = False) -> OutputFile:
    """Bytes `start` to `stop` of a file."""
    tensors, seal = [], file.seal
    if seal is not None and uploaded:
        first = bisect_left(file.tensors, start, key=lambda placed: placed.offset)
        seal = _Within(seal, first)
    elif seal is not None:
        seal = _Blank(max(map(len, _places(file))))
    for key, offset, nbytes, begin in file.tensors:
        low, high = max(offset, start), min(offset + nbytes, stop)
        if low < high or (not nbytes and start <= offset < stop):
            tensors.append(Placed(key, low, high - low, begin + low - offset))
    return replace(
        file,
        header=b"" if start else file.header,
        tensors=tuple(tensors),
        size=stop,
        begin=start,
        of=file.size,
        seal=seal,
    )


class _Blank:
    """What stands for a moment where a file is sealed later."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __call__(self, crcs: Sequence[int]) -> bytes:
        return bytes(self._nbytes)


class _Within:
    """The seal of a file, for a piece that begins with its tensor of number `first`."""

    def __init__(self, seal: Callable[[Sequence[int]], bytes], first: int) -> None:
        self._seal, self._before = seal, [0] * first

    def __call__(self, crcs: Sequence[int]) -> bytes:
        return self._seal([*self._before, *crcs])


def _places(file: OutputFile) -> list[range]:
    """What follows each tensor of a file up to the next one."""
    stops = [*(placed.offset for placed in file.tensors[1:]), file.size]
    return [
        range(placed.offset + placed.nbytes, stop)
        for placed, stop in zip(file.tensors, stops, strict=True)
    ]


def write_seals(
    file: OutputFile, pieces: Sequence[tuple[OutputFile, Sequence[int]]], descriptor: int
) -> None:
    """Seals a file whose pieces are there, in order, each with the CRC-32s of what it has of each
    tensor.
    """
    if file.seal is None:
        return
    begins, found = {placed.offset for placed in file.tensors}, list[int]()
    for piece, crcs in pieces:
        for placed, crc in zip(piece.tensors, crcs, strict=True):
            if placed.offset in begins:
                found.append(crc)
            else:
                found[-1] = combine(found[-1], crc, placed.nbytes)
    done = list[int]()
    for place, crc in zip(_places(file), found, strict=True):
        done.append(crc)
        if place:
            write_at(descriptor, memoryview(file.seal(done)), place.start)
    os.fsync(descriptor)


def sealed_tail(
    file: OutputFile, pieces: Sequence[tuple[OutputFile, Sequence[int]]]
) -> tuple[int, bytes]:
    """Where the tail of a file begins whose uploaded `pieces` have these CRC-32s of their tensors,
    and its bytes.
    """
    if file.seal is None:
        raise ValueError(f"{file.name} has no seal")
    # tensors without bytes behind the last piece have that of nothing
    found = {
        placed.offset: crc
        for piece, crcs in pieces
        for placed, crc in zip(piece.tensors, crcs, strict=True)
    }
    return tail_of(file), file.seal([found.get(placed.offset, 0) for placed in file.tensors])
