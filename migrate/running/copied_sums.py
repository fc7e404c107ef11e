"""Checksums of what a store copied, compared with those of the source.

A store that knows checksums tells one of each part of an upload, and keeps one of each object.
Parts that were copied from an object, and what lies between them there, are all of that object:
what is between is read, and the checksums of all stretches in a row have to make that of the
object. Where more than an eighth of an object would have to be read, or checksums are missing or of
another kind, it is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..source.blobs import read_bytes
from ..source.stores.checksums import Checksum, decoded
from ..source.stores.s3_uploads import ListedPart
from .part_plan import PartPlan, UploadPart

if TYPE_CHECKING:
    from ..source.blobs import Blob

# of an object at most one in so many bytes is read for this, so many at a time
_READ, _STEP = 8, 8 << 20


class CopiedPart(NamedTuple):
    """A part of a file of the output that the store copied, with the checksum that it tells."""

    origin: int
    size: int
    value: int
    file: str
    part: UploadPart


class Compared(NamedTuple):
    """How many copied bytes were compared; what of them differs, if anything: a part, or an object
    of the source whose bytes are not those of its own checksum.
    """

    nbytes: int
    part: CopiedPart | None = None
    blob: int | None = None


def copied_parts(
    plan: PartPlan, listed: Mapping[str, Mapping[int, ListedPart]], kind: Checksum
) -> dict[int, list[CopiedPart]]:
    """What was copied of each object of the source, in its order there, as far as the store tells
    checksums.
    """
    found: dict[int, list[CopiedPart]] = {}
    for name, parts in plan.files.items():
        for number, part in enumerate(parts, 1):
            there = listed[name].get(number) if part.blob >= 0 else None
            value = there and decoded(kind.name, there.named.get(f"Checksum{kind.name}"))
            if isinstance(value, int):
                one = CopiedPart(part.origin, part.size, value, name, part)
                found.setdefault(part.blob, []).append(one)
    return {blob: sorted(several) for blob, several in found.items()}


def compare_object(
    kind: Checksum, whole: int, blob: Blob, number: int, copied: list[CopiedPart]
) -> Compared:
    """Compares what was copied of one object with the checksum of the `whole` of it."""
    chain, again = list[CopiedPart](), list[tuple[CopiedPart, CopiedPart]]()
    for one in copied:
        if chain and one[:2] == chain[-1][:2]:
            again.append((chain[-1], one))
        elif not chain or one.origin >= chain[-1].origin + chain[-1].size:
            chain.append(one)
    if blob.size - sum(one.size for one in chain) > blob.size // _READ:
        return Compared(0)
    parts, at = list[tuple[int, int]](), 0
    for one in chain:
        parts += [(_read(kind, blob, at, one.origin), one.origin - at), (one.value, one.size)]
        at = one.origin + one.size
    parts.append((_read(kind, blob, at, blob.size), blob.size - at))
    right = kind.joined(parts) == whole and all(one.value == two.value for one, two in again)
    nbytes = sum(one.size for one in chain) + sum(two.size for _, two in again)
    if right:
        return Compared(nbytes)
    for one in sorted([*chain, *(two for _, two in again)]):
        if _read(kind, blob, one.origin, one.origin + one.size) != one.value:
            return Compared(nbytes, part=one)
    return Compared(nbytes, blob=number)


def _read(kind: Checksum, blob: Blob, start: int, stop: int) -> int:
    """The checksum of a stretch of the source."""
    found = 0
    for data in _stretches(blob, start, stop):
        found = kind.of(data, found)
    return found


def _stretches(blob: Any, start: int, stop: int) -> Iterator[bytes]:
    for at in range(start, stop, _STEP):
        yield read_bytes(blob, at, min(_STEP, stop - at))
