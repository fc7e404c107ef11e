"""CRC-32s on their way through a run: those that an archive records are compared, those that one
needs are made.

A tensor that is copied whole passes through a buffer anyway, so the thread that fills the buffer
reckons the CRC of what it put there, and the parts are put together in the order of the file.
Whatever is cut up or computed passes in no such order: the records it reads are checked once before
anything is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..planning.graph import Value, calls
from ..source.crc import combine, crc32

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.target import OutputFile
    from ..source.zip_archive import ArchiveRecord
    from .geometry import ByteLayouts
    from .tiles import Batch


class Sealed(NamedTuple):
    """A stretch of an output file that is made from the CRC-32s of its first `tensors` tensors."""

    tensors: int


class RecordedChecksum(NamedTuple):
    """What the source records of a tensor that is copied whole."""

    file: str
    record: ArchiveRecord


def recorded_checksums(
    outputs: Iterable[Tensor], source: Source, layouts: ByteLayouts
) -> dict[int, RecordedChecksum]:
    """The recorded checksum of each output that is all of a record, by the identity of the
    tensor.
    """
    sums, stored, out = source.index.sums(), source.index.tensors, dict[int, RecordedChecksum]()
    if not sums:
        return out
    from ..source.zip_archive import ArchiveRecord

    for tensor in outputs:
        key = tensor.sources[0] if len(tensor.sources) == 1 else None
        if not isinstance(key, str):
            continue
        place = stored[key]
        told = sums.get((place.blob, place.offset))
        if told is None or told[0] != tensor.spec.nbytes:
            continue
        if layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes).whole == (0, 0):
            out[id(tensor)] = RecordedChecksum(
                source.blobs[place.blob].name,
                ArchiveRecord(_name(place.storage), place.offset, *told),
            )
    return out


def check_records(
    outputs: Iterable[Tensor], source: Source, known: Mapping[int, RecordedChecksum]
) -> None:
    """CheckpointError M942 for a record that differs from its checksum, among those that the
    outputs read and `known` has not.
    """
    sums = source.index.sums()
    if not sums:
        return
    from ..source.zip_archive import ArchiveRecord, check_record

    tensors = list(outputs)
    for call in calls(tensors):
        tensors += call.inputs
    covered = {(told.file, told.record.offset) for told in known.values()}
    starts: dict[int, list[int]] = {}
    for blob, offset in sorted(sums):
        starts.setdefault(blob, []).append(offset)
    keys = {
        s
        for tensor in tensors
        if id(tensor) not in known
        for s in tensor.sources
        if not isinstance(s, Value)
    }
    for blob, offset in sorted(
        {place for key in keys if (place := _start(source, key, sums, starts)) is not None}
    ):
        name = source.blobs[blob].name
        if (name, offset) not in covered:
            check_record(
                source.blobs[blob],
                ArchiveRecord(f"the record at {offset}", offset, *sums[blob, offset]),
            )


def check_all_records(source: Source) -> None:
    """CheckpointError M942 for the first record of a checkpoint that differs from its checksum;
    reads all of them.
    """
    sums = source.index.sums()
    if not sums:
        return
    from ..source.zip_archive import ArchiveRecord, check_record

    for (blob, offset), told in sorted(sums.items()):
        check_record(source.blobs[blob], ArchiveRecord(f"the record at {offset}", offset, *told))


def _start(
    source: Source,
    key: str,
    sums: Mapping[tuple[int, int], tuple[int, int]],
    starts: Mapping[int, Sequence[int]],
) -> tuple[int, int] | None:
    """The (blob, offset) of the record that a tensor lies in; None where none is recorded."""
    place = source.index.tensors[key]
    known = starts.get(place.blob, ())
    at = bisect_right(known, place.offset) - 1
    if at < 0 or not place.spec.nbytes:
        return None
    size, _ = sums[place.blob, known[at]]
    return (place.blob, known[at]) if place.offset < known[at] + size else None


def _name(storage: object) -> str:
    return str(storage[1]) if isinstance(storage, tuple) and len(storage) == 2 else "a record"


class FileChecksums:
    """The CRC-32s of one output file. `of` may be called by any thread, `take` in the order of the
    file.
    """

    __slots__ = ("_done", "_expected", "_file", "_running", "_sealed")

    def __init__(self, file: OutputFile, told: Mapping[int, RecordedChecksum]) -> None:
        self._file, self._expected = file, told
        self._done: list[int] = []
        self._running = 0
        self._sealed = (0, b"")

    def of(self, fill: Batch, data: memoryview) -> list[int]:
        """The CRC-32 of each part of a tensor in the buffer that is wanted; 0 for all other
        parts.
        """
        sealing = self._file.seal is not None
        if not sealing and not self._expected:
            return []
        return [
            crc32(data[part.at : part.at + part.stop - part.start])
            if not isinstance(part.content, (bytes, Sealed))
            and (sealing or id(part.content) in self._expected)
            else 0
            for part in fill.parts
        ]

    def take(self, fill: Batch, crcs: Sequence[int], data: memoryview) -> None:
        """Enters what `of` found, and fills in what is sealed. CheckpointError M942 where the
        source records something else.
        """
        for part, crc in zip(fill.parts, crcs, strict=False):
            content = part.content
            if isinstance(content, bytes):
                continue
            length = part.stop - part.start
            if isinstance(content, Sealed):
                data[part.at : part.at + length] = self._seal(content.tensors)[
                    part.start : part.stop
                ]
                continue
            self._running = crc if part.start == 0 else combine(self._running, crc, length)
            if part.last:
                told = self._expected.get(id(content))
                if told is not None:
                    from ..source.zip_archive import compare_crc

                    compare_crc(told.file, told.record, self._running)
                self._done.append(self._running)

    def _seal(self, count: int) -> bytes:
        if self._sealed[0] != count and self._file.seal is not None:
            # a tensor without bytes has passed unseen
            self._done += [0] * (count - len(self._done))
            self._sealed = (count, self._file.seal(self._done))
        return self._sealed[1]
