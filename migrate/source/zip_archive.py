"""The zip archive of torch.save: found to hold exactly what it says, or refused.

Two readers that take one archive for different things are how scanners are fooled: of two equal
names one takes the first and one the last, one believes the directory and one the local headers. So
the directory and every local header must agree field by field, the records must cover the file
without a gap or an overlap, and nothing may be there that torch.save does not write. Python's
zipfile and torch are the oracles of the tests, not the readers. Everything is linear in the number
of records: bytes as torch writes them are compared whole, and only what differs is taken apart.

The shape of an archive, each record stored, its data aligned by an `FB` extra field:

    local header, name, [zip64], FB padding, data, [data descriptor]     for each record
    directory, zip64 end record and locator, end record

CRC-32 comes from ISA-L, which folds 128 bits at a time and is several times faster than the zlib of
most systems, which stands in where it cannot be loaded. A CRC is the remainder of the data, read as
a polynomial over GF(2), so the CRC of two parts in a row follows from the CRC and length of each:
tiles may be hashed by different threads, in any order, or by a run that was killed and resumed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple, NoReturn

from ..core.errors import fail, listed, printable
from . import blobs
from .blobs import Blob
from .jsontext import collector_paused
from .paths import HISTORY

_POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x^0, as everywhere in this file
_ONE = 0x80000000
_X8 = 0x00800000


@cache
def library() -> tuple[str, Callable[..., int]]:
    """Whose CRC-32 it is, and the function; loaded when the first is asked for."""
    try:
        from isal import isal_zlib
    except ImportError:
        return "zlib", zlib.crc32
    return "isal", isal_zlib.crc32


def crc32(data: Any, value: int = 0) -> int:
    """The CRC-32 of a buffer, going on from `value`."""
    return library()[1](data, value)


def _times(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """x^(8 * length): what appending so many bytes multiplies a remainder with."""
    out, power = _ONE, _X8
    while length:
        if length & 1:
            out = _times(power, out)
        power = _times(power, power)
        length >>= 1
    return out


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two parts in a row, from that of each and the `length` of the second in bytes.

    Without isal it takes microseconds for a length that was met before, some hundred for a new one.
    The formula is that of zlib's `crc32_combine`.
    """
    combining = _combining()
    if combining is not None:
        return combining(first, second, length)
    return _times(_shift(length), first) ^ second


@cache
def _combining() -> Callable[[int, int, int], int] | None:
    """The function of isal; None without isal, and where a release has none."""
    if library()[0] != "isal":
        return None
    from isal import isal_zlib

    return getattr(isal_zlib, "crc32_combine", None)


def zeros(length: int) -> int:
    """The CRC-32 of `length` zero bytes, without making them."""
    # before and after, a CRC is inverted; a part of zeros only shifts the remainder
    return _times(_shift(length), 0xFFFFFFFF) ^ 0xFFFFFFFF


MAX_DIRECTORY = 64 << 20  # bytes
MAX_RECORDS = 500_000
_CHUNK = 1 << 20  # bytes hashed at a time

LOCAL = Struct("<IHHHHHIIIHH")
ENTRY = Struct("<IHHHHHHIIIHHHHHII")
END64 = Struct("<IQHHIIQQQQ")
LOCATOR = Struct("<IIQI")
END = Struct("<IHHHHIIH")
LOCAL_SIGN, ENTRY_SIGN, END64_SIGN, LOCATOR_SIGN, END_SIGN = (
    0x04034B50,
    0x02014B50,
    0x06064B50,
    0x07064B50,
    0x06054B50,
)
DESCRIPTOR_SIGN = b"PK\x07\x08"
FULL = 0xFFFFFFFF  # the value of a 32-bit field whose number stands in the zip64 extra field
DESCRIBED, UTF8 = 0x0008, 0x0800  # flags: CRC and sizes follow the data; the name is UTF-8

_ENTRY_TAIL = Struct("<IIIHHHHHII")
# storages are numbered from 0, and up to torch 1.8 called after their address
_MEMBER = re.compile(
    rb"data/(?:0|[1-9][0-9]{0,19})|data\.pkl|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id|"
    + re.escape(HISTORY.encode())
)
# records that say something about the archive in a line: the longest is an identity of 40 digits
ORDER, LITTLE = "byteorder", b"little"
LINES = (ORDER, "version", ".format_version", ".storage_alignment", ".data/serialization_id")
_MAX_LINE = 64  # bytes
_METHODS = {
    1: "shrink",
    6: "implode",
    8: "deflate",
    9: "deflate64",
    12: "bzip2",
    14: "lzma",
    93: "zstd",
    95: "xz",
    98: "PPMd",
}
_EXTRAS = {
    0x7075: "a second name for the file (Unicode path)",
    0x5455: "times",
    0x7875: "Unix owners",
    0x9901: "encryption",
}
_AGAIN = "save it again with torch.save, from a file that you trust"
FETCH_HELP = "fetch the file again, or save it again with torch.save"


class ArchiveRecord(NamedTuple):
    """One record: `size` bytes at `offset` of the blob. `crc` is None if none was recorded."""

    name: str
    offset: int
    size: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class Archive:
    """The records of one archive by name, without the folder `root` that all of them lie in, in the
    order of the file.
    """

    root: str
    records: Mapping[str, ArchiveRecord]


# One entry of the directory: offset of the local header, name, the bytes that the local header
# repeats, those that the data descriptor repeats, size, CRC-32, flags. A plain tuple, because there
# are hundreds of thousands
_Entry = tuple[int, bytes, bytes, bytes, int, int, int]


def read_archive(
    blob: Blob, *, start: int = 0, size: int | None = None, label: str | None = None
) -> Archive:
    """The archive in `size` bytes of `blob` from `start` on (by default all of it); offsets count
    from the blob's begin.

    `label` is what messages call it, by default the blob's name.
    Reads the directory and the local headers, never a record. CheckpointError M940 where the
    archive contradicts itself or the layout of torch.save, M941 where it is a sound archive of
    something else, M914 above `MAX_DIRECTORY` or `MAX_RECORDS`.
    """
    with collector_paused():
        return ArchiveReader(
            blob, start, blob.size - start if size is None else size, label or printable(blob.name)
        ).read()


def read_record(blob: Blob, record: ArchiveRecord, limit: int, label: str | None = None) -> bytes:
    """The bytes of a small record, CRC compared; M914 above `limit` bytes, M942 as `check`."""
    label = label or printable(blob.name)
    if record.size > limit:
        fail("M914", f"{label}: {record.name} has {record.size} bytes, allowed are {limit}")
    out = blobs.read_bytes(blob, record.offset, record.size)
    compare_crc(label, record, crc32(out))
    return out


def check_record(blob: Blob, record: ArchiveRecord) -> None:
    """Compares the record's CRC-32: M942 if it differs. One without a CRC is not read."""
    if record.crc is None:
        return
    buffer = blobs.room(min(_CHUNK, record.size))
    found = 0
    for at in range(0, record.size, _CHUNK):
        part = buffer[: min(_CHUNK, record.size - at)]
        blob.readinto(record.offset + at, part)
        found = crc32(part, found)
    compare_crc(printable(blob.name), record, found)


def compare_crc(label: str, record: ArchiveRecord, found: int) -> None:
    """M942 unless `found`, the CRC-32 of the record, is the recorded one or none was."""
    if record.crc is not None and found != record.crc:
        fail(
            "M942",
            f"{label}: {record.name}: its {record.size} bytes at {record.offset} have the CRC-32 "
            f"{found:08x}, recorded is {record.crc:08x}",
            help="fetch the file again, or take another copy",
        )


class ArchiveReader:
    """The steps of `read`: end records, directory, names, local headers; offsets from the begin.

    Once it has read, `directory` is where that begins, and `listed` its entries, in the order of
    the file.
    """

    def __init__(self, blob: Blob, start: int, size: int, label: str) -> None:
        self.blob, self.start, self.size, self.label = blob, start, size, label

    def read(self) -> Archive:
        self.listed = entries = self.entries(*self.end())
        root, members = self.names(entries)
        # headers of small records lie close: many at a read. Never much more than the file is read
        stride = 1 << 16 if self.directory // len(entries) < 1 << 14 else 512
        if self.size == self.blob.size and getattr(self.blob, "requests", None) is not None:
            with blobs.foreseeing((self.blob,), self.headers(entries, stride)):
                offsets = self.tile(entries, stride)
        else:
            offsets = self.tile(entries, stride)
        sums = [crc if crc or not size else None for _, _, _, _, size, crc, _ in entries]
        # as `core.types.records` makes them
        new, sizes = tuple.__new__, map(itemgetter(4), entries)
        rows = zip(members, offsets, sizes, sums, strict=True)
        found = {row[0]: new(ArchiveRecord, row) for row in rows}
        if "data.pkl" not in found:
            self.other(f"holds no data.pkl, but {listed(members, 5)}")
        said = {name: self.line(found[name]) for name in LINES if name in found}
        if (order := said.get(ORDER, LITTLE)) != LITTLE:
            if order != b"big":
                self.bad(
                    f"byteorder is `{printable(order.decode('latin-1'))}`, allowed are `little` "
                    "and `big`"
                )
            self.other(
                "was written by a big-endian machine", help="save it again on a little-endian one"
            )
        return Archive(root, found)

    def line(self, record: ArchiveRecord) -> bytes:
        """The bytes of a record that is a line about the archive, too small for anything else."""
        if record.size > _MAX_LINE:
            self.bad(
                f"{record.name} has {record.size} bytes, and torch.save writes no more than "
                f"{_MAX_LINE}",
                help=_AGAIN,
            )
        return read_record(self.blob, record, _MAX_LINE, self.label)

    def bad(self, what: str, help: str = FETCH_HELP) -> NoReturn:
        fail("M940", f"{self.label}: {what}", help=help)

    def other(self, what: str, help: str = _AGAIN) -> NoReturn:
        fail("M941", f"{self.label}: {what}", help=help)

    def part(self, offset: int, size: int) -> bytes:
        return blobs.read_bytes(self.blob, self.start + offset, size)

    def end(self) -> tuple[int, bytes]:
        """How many entries the directory has, and its bytes: the end records agree with each other
        and end the file.
        """
        tail = self.part(max(0, self.size - 98), min(98, self.size))
        at = self.size - END.size
        if len(tail) < END.size or tail[-END.size :][:4] != b"PK\x05\x06":
            self.explain_end()
        _, disk, start_disk, here, count, length, directory, comment = END.unpack(tail[-END.size :])
        if comment or disk or start_disk or here != count:
            self.bad("the end record has a comment or speaks of several disks")
        if tail[-42:-38] == b"PK\x06\x07" and len(tail) >= 42:
            _, disk, at, disks = LOCATOR.unpack(tail[-42:-22])
            if (
                disk
                or disks != 1
                or len(tail) < 98
                or at != self.size - 98
                or tail[:4] != b"PK\x06\x06"
            ):
                self.bad(
                    "the zip64 end record is not right before the end record: its locator points "
                    f"to {at} of {self.size} bytes"
                )
            _, own, _, _, disk, start_disk, here64, count64, length64, directory64 = END64.unpack(
                tail[:56]
            )
            said = (min(count64, 0xFFFF), min(length64, FULL), min(directory64, FULL))
            if (
                own != 44
                or disk
                or start_disk
                or here64 != count64
                or said != (count, length, directory)
            ):
                self.bad("the zip64 end record and the end record contradict each other")
            count, length, directory = count64, length64, directory64
        if directory + length != at:
            self.bad(
                f"the directory should end at {directory + length}, and the end record begins at "
                f"{at}"
            )
        if length > MAX_DIRECTORY or count > MAX_RECORDS:
            fail(
                "M914",
                f"{self.label}: a directory of {count} records and {length} bytes, allowed are "
                f"{MAX_RECORDS} and {MAX_DIRECTORY}",
                help="save the checkpoint in several files",
            )
        self.directory = directory
        return count, self.part(directory, length)

    def explain_end(self) -> NoReturn:
        window = min(self.size, 65_557)
        found = self.part(self.size - window, window).rfind(b"PK\x05\x06")
        if found < 0:
            self.bad(
                "no end record ends the archive: it was cut short", help="fetch the file again"
            )
        extra = window - found - END.size
        if extra < 0:
            self.bad("the end record is cut short", help="fetch the file again")
        self.bad(
            f"{extra} bytes follow the end record: a comment, or what was appended to the archive"
        )

    def entries(self, count: int, directory: bytes) -> list[_Entry]:
        """The entries, sorted by the place of their local headers."""
        out: list[_Entry] = []
        total, at = len(directory), 0
        known: dict[bytes, tuple[int, bytes]] = {}
        for _ in range(count):
            if at + 46 > total:
                self.bad(f"the directory ends in entry {len(out)}")
            head = directory[at : at + 16]
            if (checked := known.get(head)) is None:
                checked = known[head] = (self.head(head, len(out)), head[6:16])
            flags, common = checked
            crc, packed, size, names, extras, comment, disk, _, attributes, header = (
                _ENTRY_TAIL.unpack_from(directory, at + 16)
            )
            name = directory[at + 46 : at + 46 + names]
            entry_sizes = directory[at + 16 : at + 28]
            at += 46 + names
            if extras or comment or disk or attributes:
                if (
                    comment
                    or disk
                    or (attributes >> 16) & 0xF000 not in (0, 0x8000)
                    or attributes & 0x18
                ):
                    self.bad(
                        f"the entry of {_name(name)} has a comment, another disk, or is a link, a "
                        "folder or a device",
                        help=_AGAIN,
                    )
                wide = self.extras(directory[at : at + extras], name, "the directory")
                packed, size, header = self.widened(wide, packed, size, header, name)
                at += extras
            if packed != size or (crc and not size):
                self.bad(
                    f"{_name(name)}: {size} bytes with the CRC-32 {crc:08x} are stored as "
                    f"{packed} bytes"
                )
            out.append((header, name, common, entry_sizes, size, crc, flags))
        if at != total:
            self.bad(f"the directory of {count} entries is {at} bytes long and should be {total}")
        out.sort(key=itemgetter(0))
        return out

    def head(self, head: bytes, number: int) -> int:
        """The flags in the first 16 bytes of an entry."""
        if head[:4] != b"PK\x01\x02":
            self.bad(f"entry {number} of the directory does not begin as one")
        flags, method = head[8] | head[9] << 8, head[10] | head[11] << 8
        if flags & 1:
            self.other("is encrypted")
        if method:
            self.other(
                f"is compressed ({_METHODS.get(method, f'method {method}')}), and torch.save "
                "never compresses"
            )
        if flags & ~(DESCRIBED | UTF8):
            self.bad(f"entry {number} of the directory has flags {flags:#06x}, allowed are 0x0808")
        return flags

    def extras(self, data: bytes, name: bytes, where: str) -> bytes:
        """The content of the zip64 field, empty without one; only padding may be beside it."""
        wide, at, seen = b"", 0, set()
        while at < len(data):
            kind = int.from_bytes(data[at : at + 2], "little")
            end = at + 4 + int.from_bytes(data[at + 2 : at + 4], "little")
            if at + 4 > len(data) or end > len(data) or kind in seen:
                self.bad(f"{_name(name)}: its extra fields in {where} are cut short or there twice")
            if kind not in (0x0001, 0x4246):
                self.bad(
                    f"{_name(name)}: extra field {kind:#06x} in {where}: "
                    f"{_EXTRAS.get(kind, 'unknown')}",
                    help=_AGAIN,
                )
            if kind == 1:
                wide = data[at + 4 : end]
            seen.add(kind)
            at = end
        return wide

    def widened(
        self, wide: bytes, packed: int, size: int, header: int, name: bytes
    ) -> tuple[int, int, int]:
        """The fields of an entry; full ones come from its zip64 field, which holds nothing else."""
        numbers = [int.from_bytes(wide[i : i + 8], "little") for i in range(0, len(wide), 8)]
        if len(wide) != 8 * ((size == FULL) + (packed == FULL) + (header == FULL)):
            self.bad(f"{_name(name)}: a zip64 field of {len(wide)} bytes does not fit the entry")
        out = [numbers.pop(0) if field == FULL else field for field in (size, packed, header)]
        return out[1], out[0], out[2]

    def names(self, entries: list[_Entry]) -> tuple[str, list[str]]:
        """The folder that all records lie in, and their names without it: no two equal, none that
        torch.save does not write.
        """
        if not entries:
            self.other("is an empty zip archive")
        named = [entry[1] for entry in entries]
        first = named[0]
        root = first[: first.find(b"/") + 1]
        cut = len(root)
        matches = _MEMBER.fullmatch
        for name in named:
            if name[:cut] != root or matches(name, cut) is None:
                self.explain_name(name, root, named)
        members = [name[cut:].decode("ascii") for name in named]
        if len(set(members)) != len(members):
            seen: set[str] = set()
            twice = next(m for m in members if m in seen or seen.add(m))  # type: ignore[func-returns-value]
            self.bad(f"{twice} is there twice", help=_AGAIN)
        try:
            folder = root[:-1].decode(
                "utf-8" if all(entry[6] & UTF8 for entry in entries) else "ascii"
            )
        except UnicodeDecodeError:
            self.bad(f"{_name(first)}: the name is not text")
        if _unsafe(root[:-1]):
            self.bad(f"{_name(first)}: the name is not below a plain folder", help=_AGAIN)
        return folder, members

    def explain_name(self, name: bytes, root: bytes, named: list[bytes]) -> NoReturn:
        """Why a record with this name is refused."""
        if _unsafe(name):
            self.bad(
                f"{_name(name)}: a record's name may not be absolute, climb, end in a slash or "
                "hold odd characters",
                help=_AGAIN,
            )
        members = {other.partition(b"/")[2] for other in named}
        if b"constants.pkl" in members or any(m.startswith(b"code/") for m in members):
            self.other(
                "is a TorchScript archive, which holds code",
                help="load it with torch.jit.load and save its state_dict",
            )
        if b".data/extern_modules" in members or b".data/python_version" in members:
            self.other(
                "is a torch.package archive, which holds code",
                help="save the state_dict of its model with torch.save",
            )
        if b"archive_format" in members or b"archive_version" in members:
            self.other(
                "is a torch.export archive", help="save the state_dict of its model with torch.save"
            )
        if all(other.endswith(b".npy") for other in named):
            self.other("is an .npz archive of NumPy")
        if b"data.pkl" not in members and any(b"/" in other for other in named):
            self.other(f"is a zip archive with {_name(name)}, not one of torch.save")
        if name[: len(root)] != root or not root:
            self.bad(
                f"{_name(name)} does not lie in {_name(root)} as the first record does", help=_AGAIN
            )
        if _MEMBER.fullmatch(name.lower(), len(root)):
            self.bad(
                f"{_name(name)} differs from the name that it should have in upper and lower case",
                help=_AGAIN,
            )
        self.other(f"holds {_name(name)}, which torch.save does not write")

    def headers(self, entries: list[_Entry], stride: int) -> Iterator[blobs.Stretch]:
        """Where `tile` will read: what is behind each record and in front of the next."""
        for header, *_ in entries:
            # at most 24 bytes of a descriptor
            start, stop = max(0, header - 24), min(header + stride, self.directory)
            yield blobs.Stretch(0, self.start + start, self.start + stop)

    def tile(self, entries: list[_Entry], stride: int) -> list[int]:
        """Where each record's data begins; local headers agree, and records cover the file."""
        end = self.directory
        data = head = last = b""
        base = until = cursor = drawn = 0
        offsets = []
        start = self.start
        for header, name, common, sizes, size, crc, flags in entries:
            if header != cursor:
                how = (
                    "overlaps the record before"
                    if header < cursor
                    else f"{header - cursor} unclaimed bytes lie in front"
                )
                self.bad(
                    f"{_name(name)}: its local header is at {header} and the record before ends "
                    f"at {cursor}: {how}",
                    help=_AGAIN,
                )
            width = len(name)
            if cursor + 34 + width > until:
                base, data = cursor, self.part(cursor, min(max(stride, 34 + width), end - cursor))
                until = base + len(data)
            if last is not common or width != drawn:
                head, last, drawn = (
                    b"PK\x03\x04" + common + bytes(12) + width.to_bytes(2, "little"),
                    common,
                    width,
                )
            p = cursor - base
            q = p + 30 + width
            extra = int.from_bytes(data[p + 28 : p + 30], "little")
            offset = cursor + 30 + width + extra
            after = 0
            # as torch writes it: CRC and sizes in the descriptor, one extra field, which is padding
            if (
                data[p : p + 28] != head
                or data[p + 30 : q] != name
                or data[q : q + 2] != b"FB"
                or int.from_bytes(data[q + 2 : q + 4], "little") != extra - 4
                or not (flags & DESCRIBED or size == 0)
            ):
                sizes = self.local(cursor, name, common, size, crc, flags)
            cursor = offset + size
            if flags & DESCRIBED:
                after = 4 + len(sizes)
                if cursor + after > until and cursor + after <= end:
                    base, data = cursor, self.part(cursor, min(max(stride, after), end - cursor))
                    until = base + len(data)
                p = cursor - base
                if cursor + after > end or data[p : p + after] != DESCRIPTOR_SIGN + sizes:
                    self.bad(
                        f"{_name(name)}: no data descriptor that agrees with the directory "
                        f"follows its {size} bytes at {offset}"
                    )
            cursor += after
            if cursor > end:
                self.bad(f"{_name(name)}: ends at {cursor}, and the directory begins at {end}")
            offsets.append(start + offset)
        if cursor != end:
            self.bad(
                f"{end - cursor} unclaimed bytes lie between the last record and the directory",
                help=_AGAIN,
            )
        return offsets

    def local(self, at: int, name: bytes, common: bytes, size: int, crc: int, flags: int) -> bytes:
        """CRC and sizes as a data descriptor of this record has to state them; any local header
        that agrees with the directory.
        """
        room = self.directory - at
        if room < 30:
            self.bad(f"{_name(name)}: no room for a local header at {at}")
        head = self.part(at, 30)
        sign, _, _, _, _, _, crc_here, packed, plain, width, extra = LOCAL.unpack(head)
        if sign != LOCAL_SIGN:
            self.bad(f"{_name(name)}: no local header at {at}")
        if room < 30 + width + extra or self.part(at + 30, width) != name:
            self.bad(f"{_name(name)}: the local header at {at} has another name", help=_AGAIN)
        wide = self.extras(self.part(at + 30 + width, extra), name, "the local header")
        numbers = [int.from_bytes(wide[i : i + 8], "little") for i in range(0, len(wide), 8)]
        # torch puts the header's own offset there too, and knows only one of the two sizes by then
        allowed: list[list[int]] = [[], [at], [size, size], [size, size, at]]
        if flags & DESCRIBED or not size:
            allowed += [[size, 0], [size, 0, at], [0, 0]]
        stated = [(crc, size, size), (crc, FULL, FULL)] if wide else [(crc, size, size)]
        if flags & DESCRIBED:
            stated += [(0, 0, 0), (0, FULL, FULL)] if wide else [(0, 0, 0)]
        if (
            head[4:14] != common
            or len(wide) % 8
            or numbers not in allowed
            or (crc_here, packed, plain) not in stated
        ):
            self.bad(
                f"{_name(name)}: the local header at {at} and the directory contradict each other",
                help=_AGAIN,
            )
        return crc.to_bytes(4, "little") + size.to_bytes(8 if wide else 4, "little") * 2


def _unsafe(name: bytes) -> bool:
    """Whether a name could lead out of a folder, or is no text."""
    parts = name.split(b"/")
    if (
        b".." in parts
        or b"." in parts
        or b"" in parts
        or b"\\" in name
        or b":" in name[:2]
        or any(c < 32 or c == 127 for c in name)
    ):
        return True
    try:
        return not name.decode("utf-8")
    except UnicodeDecodeError:
        return True


def _name(name: bytes) -> str:
    return printable(name.decode("utf-8", "backslashreplace"))


ALIGNMENT = 64  # torch's default for the data of a record, in bytes
# version that torch's writer (miniz) puts into the zip64 end record, made by and needed to read
_MADE_BY, _NEEDED = 0x031E, 45


class RecordSlot(NamedTuple):
    """Where one record lies: local header and data. `end` is the next local header's begin."""

    name: str
    header: int
    offset: int
    size: int
    end: int


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """One archive: its records in order, the begin of the directory, the size of the file."""

    root: str
    slots: tuple[RecordSlot, ...]
    directory: int
    size: int


def lay_out(
    root: str, records: Iterable[tuple[str, int]], alignment: int = ALIGNMENT
) -> ArchiveLayout:
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
        slots.append(RecordSlot(name, at, offset, size, end))
        directory += ENTRY.size + written + _wide(at, size)
        at = end
    return ArchiveLayout(
        root, tuple(slots), at, at + directory + END64.size + LOCATOR.size + END.size
    )


def local_header(archive: ArchiveLayout, slot: RecordSlot) -> bytes:
    """The bytes from `slot.header` to `slot.offset`: they do not depend on the data."""
    name = f"{archive.root}/{slot.name}".encode()
    wide = _widened(slot, before=True)
    padding = slot.offset - slot.header - LOCAL.size - len(name) - len(wide) - 4
    head = LOCAL.pack(
        LOCAL_SIGN, 0, _flags(slot), 0, 0, 0, 0, 0, 0, len(name), len(wide) + 4 + padding
    )
    return b"".join((head, name, wide, b"FB", padding.to_bytes(2, "little"), b"Z" * padding))


def data_descriptor(slot: RecordSlot, crc: int) -> bytes:
    """The bytes from the end of the data to `slot.end`, given its CRC-32; none for no data."""
    if not slot.size:
        return b""
    width = (slot.end - slot.offset - slot.size - 8) // 2
    return DESCRIPTOR_SIGN + crc.to_bytes(4, "little") + slot.size.to_bytes(width, "little") * 2


def central_directory(archive: ArchiveLayout, crcs: Sequence[int]) -> bytes:
    """The bytes from `archive.directory` on, given the CRC-32 of each record, 0 if unknown."""
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


def _flags(slot: RecordSlot) -> int:
    return UTF8 | DESCRIBED if slot.size else UTF8


def _wide(header: int, size: int) -> int:
    """Bytes of a record's zip64 field, there when a number does not fit into 32 bits."""
    numbers = 2 * (size >= FULL) + (header >= FULL)
    return 4 + 8 * numbers if numbers else 0


def _widened(slot: RecordSlot, before: bool) -> bytes:
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
