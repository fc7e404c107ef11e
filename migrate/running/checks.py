"""What is checked of the source before or while a run reads it: conditions on values that a plan
cannot know from headers, and the CRC-32s that archives record.

Conditions compare bytes as the run would write them, a stage at a time, and stop at the first
difference. A record that is copied, whole or in a few pieces that may go to several files, passes
through a buffer anyway, so the thread that fills the buffer computes the CRC-32 of its contents,
and the parts are combined in the order of the record. What is cut up finely or computed passes in
no such order: the records that it reads are checked once before anything is written.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..core.errors import Report, fail, listed, printable
from ..core.spec import BITS, Spec, coordinates
from ..core.view import is_whole
from ..elements.codes import encode
from ..planning.graph import ComputedTensor
from ..source.blobs import ChunkOf, ReplicaOf, Stored, chunk_at, chunks_of, key_of, room
from ..source.zip_archive import combine, compare_crc, crc32
from .evaluator import Evaluator
from .gather import LONG, WINDOW, Batch, Gather, Sealed, Segment
from .geometry import STAGE_MAX, ByteLayout, ByteLayouts
from .resources import MAX_MEMORY, run_together

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.index import Index, Source
    from ..source.target import OutputFile
    from ..source.zip_archive import ArchiveRecord

# what is read while planning to decide what becomes of a tensor
MOST_CONTENT = 64 << 20
# pieces that a tensor copies from one place, up to which their CRC-32s are combined: each takes
# some 200 bytes for the whole run
PIECES = 64


def require_checks(
    checks: Sequence[ValueCheck], source: Source, max_memory: int = MAX_MEMORY
) -> None:
    """Raises all checks that fail, each with its own code."""
    report = Report()
    for check in checks:
        met, detail = evaluate_check(check, source, max_memory)
        if not met:
            report.add(
                check.code,
                check.message,
                notes=(*[f"{check.rule}: {listed(list(check.keys))}"] * bool(check.rule), detail),
                help=check.help,
            )
    report.check()


def evaluate_check(
    check: ValueCheck, source: Source, max_memory: int = MAX_MEMORY
) -> tuple[bool, str]:
    """Whether the condition holds, and where it first does not ("" if it does)."""
    reader = _TensorReader(source, max_memory)
    if check.kind == "filled":
        for number, tensor in enumerate(check.tensors):
            unit = encode(tensor.spec.dtype, check.value or 0)
            at = reader.unlike(tensor, unit)
            if at is not None:
                return (
                    False,
                    (
                        f"{_name(tensor, number)} ({tensor.spec}) is not {check.value} at "
                        f"{_place(tensor.spec, at)}"
                    ),
                )
        return True, ""
    first = check.tensors[0]
    for number, tensor in enumerate(check.tensors[1:], 1):
        if tensor.spec != first.spec:
            return (
                False,
                f"{_name(first, 0)} is {first.spec}, {_name(tensor, number)} is {tensor.spec}",
            )
        at = reader.difference(first, tensor)
        if at is not None:
            return (
                False,
                (
                    f"{_name(first, 0)} and {_name(tensor, number)} ({tensor.spec}) differ first "
                    f"at {_place(tensor.spec, at)}"
                ),
            )
    return True, ""


def _name(tensor: Tensor, number: int) -> str:
    """The stored key the tensor is made of, or its number where it has several or is computed."""
    only = tensor.sources[0] if len(tensor.sources) == 1 else None
    if isinstance(only, ReplicaOf):
        return f"{printable(only.called)} of {printable(only.part)}"
    return printable(only) if isinstance(only, str) else f"tensor {number}"


def _place(spec: Spec, byte: int) -> list[int]:
    """The index of the element that the byte belongs to; of the first, where it holds several."""
    return list(coordinates(byte * 8 // BITS[spec.dtype], spec.shape))


def read_content(tensor: Tensor, source: Source, most: int = MOST_CONTENT) -> bytes:
    """The bytes of a tensor, at once if it is stored as it is; M950 for more than `most` bytes."""
    if tensor.spec.nbytes > most:
        fail(
            "M950",
            f"{_name(tensor, 0)} has {tensor.spec.nbytes:,} bytes; an extra state of at most "
            f"{most:,} is read",
        )
    key = tensor.sources[0] if len(tensor.sources) == 1 else None
    at = source.index.tensors.get(key) if isinstance(key, str) else None
    if (
        isinstance(at, Stored)
        and at.strides is None
        and (at.spec is tensor.spec or at.spec == tensor.spec)
        and is_whole(tensor.view)
    ):
        out = bytearray(at.spec.nbytes)
        source.blobs[at.blob].readinto(at.offset, memoryview(out))
        return bytes(out)
    return b"".join(bytes(part) for part in _TensorReader(source, MAX_MEMORY).stages(tensor))


def read_ranges(
    tensor: Tensor, source: Source, ranges: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, memoryview]]:
    """(start, bytes) of these ranges of a tensor's packed bytes, a stage at a time."""
    return _TensorReader(source, MAX_MEMORY).ranges(tensor, ranges)


def tensors_equal(a: Tensor, b: Tensor, source: Source, max_memory: int = MAX_MEMORY) -> bool:
    """Whether both tensors hold the same bytes, dtype and shape."""
    return a.spec == b.spec and _TensorReader(source, max_memory).difference(a, b) is None


class _TensorReader:
    def __init__(self, source: Source, max_memory: int) -> None:
        self._source, self._layouts = source, ByteLayouts()
        self._values = Evaluator(source, self._layouts, (), max_memory)
        self._budget = min(WINDOW, max_memory // 8)

    def _stages(self, tensor: Tensor, step: int) -> Iterator[memoryview]:
        for _, stage in self.ranges(tensor, [(0, tensor.spec.nbytes)], step):
            yield stage

    def ranges(
        self, tensor: Tensor, ranges: Iterable[tuple[int, int]], step: int | None = None
    ) -> Iterator[tuple[int, memoryview]]:
        step = step or self._step(tensor)
        stage = room(min(tensor.spec.nbytes, step))
        gather = Gather(self._source, self._layouts, stage, self._values.leaf, self._budget)
        for first, last in ranges:
            for start in range(first, last, step):
                stop = min(last, start + step)
                gather.fill(tensor, start, stop, 0)
                yield start, stage[: stop - start]

    def stages(self, tensor: Tensor) -> Iterator[memoryview]:
        return self._stages(tensor, self._step(tensor))

    def difference(self, a: Tensor, b: Tensor) -> int | None:
        """The first byte in which two tensors of one spec differ."""
        step, at = self._step(a), 0
        for here, there in zip(self._stages(a, step), self._stages(b, step), strict=True):
            if bytes(here) != bytes(there):
                return at + _first(here, there)
            at += step
        return None

    def unlike(self, tensor: Tensor, unit: bytes) -> int | None:
        """The first byte that is not that of the repeated `unit`."""
        step, at = self._step(tensor), 0
        like = unit * (min(step, tensor.spec.nbytes) // len(unit) + 2)
        for here in self._stages(tensor, step):
            expected = memoryview(like)[at % len(unit) :][: len(here)]
            if bytes(here) != bytes(expected):
                return at + _first(here, expected)
            at += step
        return None

    def _step(self, tensor: Tensor) -> int:
        return min(
            STAGE_MAX, self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes).step
        )


def _first(a: memoryview, b: memoryview) -> int:
    """The first place in which two buffers of one length differ, by halving."""
    low, high = 0, len(a)
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] != b[low:middle]:
            high = middle
        else:
            low = middle
    return low


class RecordedStretch(NamedTuple):
    """Bytes `start` to `stop` of an output that are those of a record of the source from `origin`
    on: all of them, or a piece.
    """

    start: int
    stop: int
    file: str
    record: ArchiveRecord
    origin: int = 0
    # those of the same record, of a piece
    pieces: RecordPieces | None = None

    def compare(self, crc: int) -> None:
        """Takes the CRC-32 of the stretch; M942 if the record is known by it, and differs."""
        whole = crc if self.pieces is None else self.pieces.joined(self, crc)
        if whole is not None:
            compare_crc(self.file, self.record, whole)


class RecordPieces:
    """The CRC-32s of the pieces of one record, in any order; any thread may call `joined`."""

    __slots__ = ("_found", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # CRC-32 and length of each piece, by where it begins
        self._found: dict[int, tuple[int, int]] = {}

    def joined(self, one: RecordedStretch, crc: int) -> int | None:
        """The CRC-32 of the record, given that of one more piece; None while others are missing."""
        with self._lock:
            self._found[one.origin] = crc, one.stop - one.start
            pieces = sorted(self._found.items())
        if sum(length for _, (_, length) in pieces) < one.record.size:
            return None
        whole = 0
        for _, (found, length) in pieces:
            whole = _extended(whole, found, length)
        return whole


Recorded: TypeAlias = "Mapping[int, Sequence[RecordedStretch]]"


def recorded_checksums(
    outputs: Mapping[str, Tensor], files: Iterable[OutputFile], source: Source, layouts: ByteLayouts
) -> Recorded:
    """The stretches of each output that are copied from records, in order, by identity of the
    tensor: from whole ones, and from those whose pieces are all in these files. Left out are
    records without bytes, and stretches that an end of a place in an output file divides.
    """
    sums, out = source.index.sums(), dict[int, list[RecordedStretch]]()
    if not sums:
        return out
    from ..source.zip_archive import ArchiveRecord

    stored, starts = source.index.tensors, _starts(sums)
    owners = {} if source.index.inside is None else _owners(source.index.inside, sums, starts)
    places: dict[str, set[tuple[int, int]]] = {}
    for placed in (placed for file in files for placed in file.tensors):
        places.setdefault(placed.key, set()).add((placed.start, placed.start + placed.nbytes))
    # of each record: its pieces, with the tensor that copies each
    pieces: dict[tuple[int, int], list[tuple[int, RecordedStretch]]] = {}
    compared: set[tuple[int, int]] = set()
    for key, held in places.items():
        tensor, found, cuts = outputs[key], list[RecordedStretch](), sorted({*chain(*held)})
        layout = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        for name, first, begin, run in _copies(tensor, layout):
            place = chunk_at(stored, name)
            first += place.offset
            known = starts.get(place.blob, ())
            # one as a rule; all of a file where it is copied as it is
            for at in known[
                max(0, bisect_right(known, first) - 1) : bisect_left(known, first + run)
            ]:
                size, crc = sums[place.blob, at]
                low, high = max(at, first), min(at + size, first + run)
                start, stop = begin + low - first, begin + high - first
                if low >= high or bisect_right(cuts, start) != bisect_left(cuts, stop):
                    continue
                called = _record_name(place, owners.get((place.blob, at)) or name)
                record = ArchiveRecord(called, at, size, crc)
                file = source.blobs[place.blob].name
                one = RecordedStretch(start, stop, file, record, low - at)
                if high - low == size:
                    found.append(one)
                    compared.add((place.blob, at))
                elif any(a <= start and stop <= b for a, b in held):
                    several = pieces.setdefault((place.blob, at), [])
                    if len(several) < 4 * PIECES:
                        several.append((id(tensor), one))
        if found:
            out[id(tensor)] = found
    for spot, several in pieces.items():
        for owner, one in () if spot in compared else _complete(several):
            out.setdefault(owner, []).append(one)
    for found in out.values():
        found.sort(key=itemgetter(0))
    return out


def _copies(tensor: Tensor, layout: ByteLayout) -> Iterator[tuple[str | ChunkOf, int, int, int]]:
    """(source, first byte there, first byte of the tensor, bytes) of contiguous copies, but for
    those of many or short runs.
    """
    for move in () if layout.loose else layout.moves:
        name = tensor.sources[move.leaf] if move.pattern is None else None
        if name is None or isinstance(name, ComputedTensor):
            continue
        if not move.loops or (move.run >= LONG and move.nbytes <= PIECES * move.run):
            for a, b in move.runs():
                yield name, move.lo + a, b, move.run


def _complete(
    several: Sequence[tuple[int, RecordedStretch]],
) -> Iterator[tuple[int, RecordedStretch]]:
    """Of pieces of one record, with their tensors: those that follow each other from its begin to
    its end, as often as they are copied; none where there are gaps.
    """
    longest: dict[int, int] = {}
    for _, one in several:
        longest[one.origin] = max(longest.get(one.origin, 0), one.stop - one.start)
    at, record, chosen, pieces = 0, several[0][1].record, set[int](), RecordPieces()
    while at < record.size and at in longest and len(chosen) < PIECES:
        chosen.add(at)
        at += longest[at]
    for owner, one in several if at == record.size else ():
        if one.origin in chosen and one.stop - one.start == longest[one.origin]:
            yield owner, one._replace(record=record, pieces=pieces)


def check_records(
    read: Iterable[str | ChunkOf], source: Source, recorded: Recorded, threads: int = 1
) -> None:
    """CheckpointError M942 if a record that is read, and that is not among `recorded`, differs: the
    first of several.
    """
    sums = source.index.sums()
    if not sums:
        return
    from ..source.zip_archive import ArchiveRecord, check_record

    covered = {(one.file, one.record.offset) for found in recorded.values() for one in found}
    starts = _starts(sums)
    places = (_start(chunk_at(source.index.tensors, at), sums, starts) for at in set(read))
    due = [
        (blob, offset)
        for blob, offset in sorted({place for place in places if place is not None})
        if (source.blobs[blob].name, offset) not in covered
    ]
    waiting, lock, stop = iter(enumerate(due)), threading.Lock(), threading.Event()
    failed: dict[int, BaseException] = {}

    def work(_: int) -> None:
        while not stop.is_set():
            with lock:
                number, (blob, offset) = next(waiting, (-1, (0, 0)))
            if number < 0:
                return
            record = ArchiveRecord(f"the record at {offset}", offset, *sums[blob, offset])
            try:
                check_record(source.blobs[blob], record)
            except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
                failed[number] = error
                stop.set()

    run_together(work, min(threads, len(due)), stop.set)
    if failed:
        raise failed[min(failed)]


def check_all_records(source: Source, part: slice = slice(None)) -> None:
    """CheckpointError M942 for the first record that differs from its checksum; reads them all, or
    `part` of them.
    """
    sums = source.index.sums()
    if not sums:
        return
    from ..source.zip_archive import ArchiveRecord, check_record

    for (blob, offset), told in sorted(sums.items())[part]:
        check_record(source.blobs[blob], ArchiveRecord(f"the record at {offset}", offset, *told))


def _starts(sums: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """The offsets of the records of each blob, in order."""
    starts: dict[int, list[int]] = {}
    for blob, offset in sorted(sums):
        starts.setdefault(blob, []).append(offset)
    return starts


def _start(
    place: Stored,
    sums: Mapping[tuple[int, int], tuple[int, int]],
    starts: Mapping[int, Sequence[int]],
) -> tuple[int, int] | None:
    """The (blob, offset) of the record that a tensor lies in; None where none is recorded."""
    known = starts.get(place.blob, ())
    at = bisect_right(known, place.offset) - 1
    if at < 0 or not place.spec.nbytes:
        return None
    size, _ = sums[place.blob, known[at]]
    return (place.blob, known[at]) if place.offset < known[at] + size else None


def _owners(
    index: Index,
    sums: Mapping[tuple[int, int], tuple[int, int]],
    starts: Mapping[int, Sequence[int]],
) -> dict[tuple[int, int], str]:
    """(blob, offset) of each record that a tensor lies in -> the tensor's key."""
    found: dict[tuple[int, int], str] = {}
    for key, stored in (*index.tensors.items(), *index.passed_through.items()):
        for chunk in chunks_of(stored):
            place: tuple[int, int] | None = (chunk.blob, chunk.offset)
            if place not in sums:
                place = _start(chunk, sums, starts)
            if place is not None:
                found[place] = key
    return found


def _record_name(place: Stored, source: str | ChunkOf) -> str:
    """What a message calls the record that a source lies in."""
    if isinstance(place.storage, tuple) and len(place.storage) == 2:
        return str(place.storage[1])
    return f"the data of {printable(key_of(source))}"


class FileChecksums:
    """CRC-32s of an output file. Any thread may call `of`; `take` goes in the file's order."""

    __slots__ = ("_copied", "_done", "_file", "_recorded", "_running", "_sealed")

    def __init__(self, file: OutputFile, recorded: Recorded) -> None:
        self._file, self._recorded = file, recorded
        self._done: list[int] = []
        # of the place, and of the record that is being copied
        self._running = self._copied = 0
        self._sealed = (0, b"")

    def of(self, fill: Batch, data: memoryview) -> list[int]:
        """The CRC-32 of each section of the tensors in the buffer; 0 where none is wanted."""
        sealing = self._file.seal is not None
        if not sealing and not self._recorded:
            return []
        return [
            crc32(data[part.at + a - part.start : part.at + b - part.start])
            if sealing or record is not None
            else 0
            for part in fill.parts
            for a, b, record in self._sections(part)
        ]

    def take(self, fill: Batch, crcs: Sequence[int], data: memoryview) -> None:
        """Enters what `of` found and fills in seals; CheckpointError M942 if the source differs."""
        found = iter(crcs)
        for part in fill.parts:
            content = part.content
            if isinstance(content, Sealed):
                data[part.at : part.at + part.stop - part.start] = self._seal(content.tensors)[
                    part.start : part.stop
                ]
                continue
            for a, b, record in self._sections(part) if crcs else ():
                crc = next(found)
                if self._file.seal is not None:
                    self._running = _extended(self._running, crc, b - a)
                if record is not None:
                    self._copied = _extended(self._copied, crc, b - a)
                    if b == record.stop:
                        record.compare(self._copied)
                        self._copied = 0
            if part.last and not isinstance(content, bytes):
                self._done.append(self._running)
                self._running = 0

    def crcs(self) -> list[int]:
        """Those of all tensors, which have passed."""
        return self._done + [0] * (len(self._file.tensors) - len(self._done))

    def _sections(self, part: Segment) -> Iterator[tuple[int, int, RecordedStretch | None]]:
        """A part of a tensor, cut where records of the source begin and end."""
        if isinstance(part.content, (bytes, Sealed)):
            return
        stretches = self._recorded.get(id(part.content), ())
        at = part.start
        for number in range(bisect_right(stretches, at, key=_stop), len(stretches)):
            one = stretches[number]
            if one.start >= part.stop:
                break
            if at < one.start:
                yield at, one.start, None
            at, end = max(at, one.start), min(part.stop, one.stop)
            yield at, end, one
            at = end
        if at < part.stop:
            yield at, part.stop, None

    def _seal(self, count: int) -> bytes:
        if self._sealed[0] != count and self._file.seal is not None:
            # a tensor without bytes has passed unseen
            self._done += [0] * (count - len(self._done))
            self._sealed = (count, self._file.seal(self._done))
        return self._sealed[1]


def _stop(stretch: RecordedStretch) -> int:
    return stretch.stop


def _extended(before: int, crc: int, length: int) -> int:
    """The CRC-32 of what came `before`, if anything, and of `length` bytes more."""
    return combine(before, crc, length) if before else crc
