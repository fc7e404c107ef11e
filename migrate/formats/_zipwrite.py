"""The zip archive of torch.save, planned to the byte before anything is written.

The layout is the one of torch's own writer and not merely one that it can read: since
`.format_version` 1 a reader may work out where storages lie from their sizes alone, so padding,
data descriptors and zip64 fields have to be where torch would put them. It has a further use:
CRC-32 and sizes stand behind the data and in the directory, never in a local header. All that is
written before and between the records is known before the first byte is read, and what depends on
data follows it.

    plan(root, [(name, bytes), ...])         where everything lies, how large the file will be
    local_header(plan, slot)                 in front of the data, at slot.header
    descriptor(slot, crc)                    behind the data, at slot.offset + slot.size
    directory(plan, crcs)                    from plan.directory to the end of the file
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ._zip import (
    DESCRIBED,
    DESCRIPTOR_SIGN,
    END,
    END64,
    END64_SIGN,
    END_SIGN,
    ENTRY,
    ENTRY_SIGN,
    FULL,
    LOCAL,
    LOCAL_SIGN,
    LOCATOR,
    LOCATOR_SIGN,
    UTF8,
)

ALIGNMENT = 64  # torch's default for the data of a record, in bytes
# version that torch's writer (miniz) puts into the zip64 end record, made by and needed to read
_MADE_BY, _NEEDED = 0x031E, 45


class Slot(NamedTuple):
    """Where one record lies: its local header, its data. `end` is where the next local header
    begins.
    """

    name: str
    header: int
    offset: int
    size: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One archive: its records in order, where the directory begins, and the size of the whole
    file.
    """

    root: str
    slots: tuple[Slot, ...]
    directory: int
    size: int


def plan(root: str, records: Iterable[tuple[str, int]], alignment: int = ALIGNMENT) -> Plan:
    """Where each of the (name, bytes) records lies, its data at a multiple of `alignment`, as
    torch's writer would place them.

    `root` is the folder inside the archive that torch calls after the file. ValueError for names or
    an alignment that have no place in an archive; that torch finds `data/0`, `data/1`, … in a row
    is up to the caller.
    """
    if not 1 <= alignment <= 1 << 15:
        raise ValueError(f"alignment {alignment}")
    slots = []
    at = directory = 0
    for name, size in records:
        written = len(f"{root}/{name}".encode())
        if written > 0xFFFF or size < 0:
            raise ValueError(f"a record of {size} bytes with a name of {written}")
        offset = -(-(at + LOCAL.size + written + _wide(at, size) + 4) // alignment) * alignment
        end = offset + size + (0 if not size else 16 if max(at, size) < FULL else 24)
        slots.append(Slot(name, at, offset, size, end))
        directory += ENTRY.size + written + _wide(at, size)
        at = end
    return Plan(root, tuple(slots), at, at + directory + END64.size + LOCATOR.size + END.size)


def local_header(archive: Plan, slot: Slot) -> bytes:
    """The bytes from `slot.header` to `slot.offset`: they do not depend on the data."""
    name = f"{archive.root}/{slot.name}".encode()
    wide = _widened(slot, before=True)
    padding = slot.offset - slot.header - LOCAL.size - len(name) - len(wide) - 4
    head = LOCAL.pack(
        LOCAL_SIGN, 0, _flags(slot), 0, 0, 0, 0, 0, 0, len(name), len(wide) + 4 + padding
    )
    return b"".join((head, name, wide, b"FB", padding.to_bytes(2, "little"), b"Z" * padding))


def descriptor(slot: Slot, crc: int) -> bytes:
    """The bytes from the end of the data to `slot.end`, given the CRC-32 of the data; nothing for
    an empty record.
    """
    if not slot.size:
        return b""
    width = (slot.end - slot.offset - slot.size - 8) // 2
    return DESCRIPTOR_SIGN + crc.to_bytes(4, "little") + slot.size.to_bytes(width, "little") * 2


def directory(archive: Plan, crcs: Sequence[int]) -> bytes:
    """The bytes from `archive.directory` to `archive.size`, given the CRC-32 of each record in
    order; 0 for one not recorded.
    """
    out = bytearray()
    for slot, crc in zip(archive.slots, crcs, strict=True):
        name = f"{archive.root}/{slot.name}".encode()
        wide = _widened(slot, before=False)
        size, header = min(slot.size, FULL), min(slot.header, FULL)
        out += ENTRY.pack(
            ENTRY_SIGN,
            0,
            0,
            _flags(slot),
            0,
            0,
            0,
            crc,
            size,
            size,
            len(name),
            len(wide),
            0,
            0,
            0,
            0,
            header,
        )
        out += name
        out += wide
    count, length, begin = len(archive.slots), len(out), archive.directory
    out += END64.pack(
        END64_SIGN, END64.size - 12, _MADE_BY, _NEEDED, 0, 0, count, count, length, begin
    )
    out += LOCATOR.pack(LOCATOR_SIGN, 0, begin + length, 1)
    few = min(count, 0xFFFF)
    out += END.pack(END_SIGN, 0, 0, few, few, min(length, FULL), min(begin, FULL), 0)
    return bytes(out)


def _flags(slot: Slot) -> int:
    return UTF8 | DESCRIBED if slot.size else UTF8


def _wide(header: int, size: int) -> int:
    """Bytes of the zip64 field of a record, which is there when a number does not fit into 32
    bits.
    """
    numbers = 2 * (size >= FULL) + (header >= FULL)
    return 4 + 8 * numbers if numbers else 0


def _widened(slot: Slot, before: bool) -> bytes:
    """The zip64 field of a record, `before` its data or in the directory."""
    numbers = []
    if slot.size >= FULL:
        # in front of the data torch's writer does not know yet how many bytes it stores
        numbers = [slot.size, 0 if before else slot.size]
    if slot.header >= FULL:
        numbers.append(slot.header)
    if not numbers:
        return b""
    return (
        b"\x01\x00"
        + (8 * len(numbers)).to_bytes(2, "little")
        + b"".join(n.to_bytes(8, "little") for n in numbers)
    )
