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

from ..planning.graph import ComputedTensor, computations

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.zip_archive import ArchiveRecord
    from .geometry import ByteLayouts


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
    for call in computations(tensors):
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
        if not isinstance(s, ComputedTensor)
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
