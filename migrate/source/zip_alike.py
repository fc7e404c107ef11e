"""Archives that are laid out alike, as those of the parts of one checkpoint are: what their headers
and directories say alike is checked once.

An archive that was read is a form for the next ones. Streams of parts are not equally long, for
numbers in them are not, so all that lies behind the stream may lie elsewhere by some bytes. Another
archive that has, around the bytes of its records, the same bytes but for this distance, the length
of the stream and the checksums is laid out as the form is: its records have the same names and lie
in the same order, and nothing that was checked of the one is otherwise in the other. What may
differ is looked at in every archive: each place is that of the form and the distance, the padding
behind the stream is padding, and what a descriptor and the directory say of a record is the same.
Whatever does not fit is read as any archive is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import repeat
from struct import Struct
from typing import Any, NamedTuple

from .blobs import FileBlob
from .zip_archive import (
    DESCRIBED,
    DESCRIPTOR_SIGN,
    END,
    END64,
    ENTRY,
    FULL,
    LINES,
    LITTLE,
    LOCAL,
    LOCATOR,
    ORDER,
    Archive,
    ArchiveReader,
    ArchiveRecord,
    crc32,
)

# forms that are kept
_MOST_FORMS = 16
# an archive of so many bytes or less is read at once, as `ArchiveReader` reads nearly all of it
_AT_ONCE = 1 << 20
# what the stream is called, and what storages are before their keys
_STREAM, _DATA = "data.pkl", "data/"
# bytes of a data descriptor, what it says behind its sign, and bytes of the end records
_DESCRIPTOR = 16
_SUMS = Struct("<III")
_ENDS = END64.size + LOCATOR.size + END.size


class ReadArchive(NamedTuple):
    """An archive, its storages by key, and their sizes. `form` is one object for archives that are
    laid out alike, whose storages are as large and lie at one distance from each other; None for
    one that was read by itself.
    """

    archive: Archive
    places: Mapping[str, ArchiveRecord]
    sizes: Mapping[str, int]
    form: Any = None


def _storages_of(archive: Archive) -> tuple[dict[str, ArchiveRecord], dict[str, int]]:
    """The storages of an archive by key, and their sizes."""
    cut = len(_DATA)
    places = {n[cut:]: record for n, record in archive.records.items() if n.startswith(_DATA)}
    return places, {key: record.size for key, record in places.items()}


class ArchivesAlike:
    """Reads archives of one kind one after the other."""

    def __init__(self) -> None:
        self._forms: list[_ArchiveForm] = []

    def read(self, blob: FileBlob, label: str) -> ReadArchive:
        """The archive that the blob is; raises as `zip_archive.read_archive`."""
        # of a store, what is read is fetched ahead in larger pieces
        local = getattr(blob, "requests", None) is None
        found = self._known(blob) if local else None
        if found is None:
            reader = ArchiveReader(blob, 0, blob.size, label)
            archive = reader.read()
            form = _form_of(blob, reader, archive) if local else None
            if form is not None:
                self._forms = [form, *self._forms[: _MOST_FORMS - 1]]
            found = ReadArchive(archive, *_storages_of(archive), form)
        return found

    def _known(self, blob: FileBlob) -> ReadArchive | None:
        size = blob.size
        read = blob.read
        if self._forms and size <= _AT_ONCE:
            whole = blob.read(0, size)

            def read(offset: int, size: int) -> bytes:
                return whole[offset : offset + size]

        for form in self._forms:
            if (found := form.filled(read, size)) is not None:
                return found
        return None


class _ArchiveForm:
    """An archive that was read, of which the stream is the first record: the bytes around those of
    its records, open at what other archives may have otherwise.
    """

    def __init__(
        self, archive: Archive, size: int, headers: list[bytes], directory: int, ends: bytes
    ) -> None:
        self._root, self._size, self._directory = archive.root, size, directory
        records = list(archive.records.values())
        self._names, self._offsets, self._lengths, _ = zip(*records, strict=True)
        self._lines = [n for n, name in enumerate(self._names) if name in LINES]
        self._data = [n for n, name in enumerate(self._names) if name.startswith(_DATA)]
        self._keys = [self._names[number][len(_DATA) :] for number in self._data]
        self.sizes = _storages_of(archive)[1]
        # the headers in front of the stream and behind it, the second without its padding
        self._first, second = headers[0], headers[1]
        called = LOCAL.size + LOCAL.unpack_from(second)[9]
        self._second, self._name = second[:28], second[LOCAL.size : called]
        self._headers = [
            at - len(header) for at, header in zip(self._offsets, headers, strict=True)
        ]
        # between the other records: a descriptor and the next header
        stops = (*self._offsets[2:], directory)
        rows = zip(self._offsets[1:], self._lengths[1:], stops, strict=True)
        self._gaps = [(at + length, stop - at - length) for at, length, stop in rows]
        # sign and checksum, then what is up to the next descriptor
        after = [length - 8 for _, length in self._gaps]
        self._around = _opened([4, *(length + 4 for length in after[:-1]), after[-1]])
        signs = [DESCRIPTOR_SIGN] * len(after)
        sizes = [2 * length.to_bytes(4, "little") for length in self._lengths[1:]]
        texts = [
            a + b + c for a, b, c in zip(sizes, (*headers[2:], b""), (*signs[1:], b""), strict=True)
        ]
        self._texts = (signs[0], *texts)
        # the directory: of each entry a checksum and a place are open, of the stream's the length
        widths = [len(f"{archive.root}/{name}".encode()) for name in self._names]
        self._entry = ends[: ENTRY.size + widths[0]]
        begin = len(self._entry)
        stop = len(ends) - _ENDS
        lengths = [16]
        for width in widths[1:]:
            lengths += [22, width + 16]
        lengths[-1] -= 16
        self._listing, self._stop = _opened(lengths), stop
        self._listed = self._listing.unpack(ends[begin:stop])[::2]
        self._ends = ends[stop:]

    def filled(self, read: Callable[[int, int], bytes], size: int) -> ReadArchive | None:
        """The archive of this size whose bytes `read` gives; None unless it is laid out alike."""
        shift = size - self._size
        directory = self._directory + shift
        begin = self._offsets[1] + shift
        if directory >= FULL or begin <= len(self._first):
            return None
        ends = read(directory, size - directory)
        entry = ends[: len(self._entry)]
        if entry[:16] != self._entry[:16] or entry[28:] != self._entry[28:]:
            return None
        listed = self._listing.unpack(ends[len(entry) : self._stop])
        if listed[::2] != self._listed or ends[self._stop :] != self._ends_at(directory):
            return None
        crc, packed, length = _SUMS.unpack_from(entry, 16)
        second = len(self._first) + length + _DESCRIPTOR
        padding = begin - second - LOCAL.size - len(self._name) - 4
        if packed != length or not 0 <= padding <= 0xFFFF - 4:
            return None
        header = (
            self._second
            + (padding + 4).to_bytes(2, "little")
            + self._name
            + b"FB"
            + padding.to_bytes(2, "little")
        )
        between = read(second - _DESCRIPTOR, _DESCRIPTOR + len(header))
        if between != DESCRIPTOR_SIGN + entry[16:28] + header or read(0, len(self._first)) != (
            self._first
        ):
            return None
        if listed[3::4] != (second, *[at + shift for at in self._headers[2:]]):
            return None
        around = self._around.unpack(b"".join([read(at + shift, n) for at, n in self._gaps]))
        sums = (crc, *around[1::2])
        if around[::2] != self._texts or sums[1:] != listed[1::4] or 0 in sums:
            return None
        offsets = (len(self._first), *[at + shift for at in self._offsets[1:]])
        lengths = (length, *self._lengths[1:])
        for number in self._lines:
            line = read(offsets[number], lengths[number])
            other = self._names[number] == ORDER and line != LITTLE
            if other or crc32(line) != sums[number]:
                return None
        # as `core.types.records` makes them
        rows = zip(self._names, offsets, lengths, sums, strict=True)
        records = list(map(tuple.__new__, repeat(ArchiveRecord), rows))
        places = dict(zip(self._keys, [records[number] for number in self._data], strict=True))
        archive = Archive(self._root, dict(zip(self._names, records, strict=True)))
        return ReadArchive(archive, places, self.sizes, self)

    def _ends_at(self, directory: int) -> bytes:
        """The end records of an archive whose directory begins there."""
        ends, end = bytearray(self._ends), directory + self._stop
        ends[48:56] = directory.to_bytes(8, "little")
        ends[64:72] = end.to_bytes(8, "little")
        ends[92:96] = directory.to_bytes(4, "little")
        return bytes(ends)


def _opened(lengths: list[int]) -> Struct:
    """Texts of these lengths, with a number of four bytes between each two of them."""
    return Struct(f"<{'sI'.join(map(str, lengths))}s")


def _form_of(blob: FileBlob, reader: ArchiveReader, archive: Archive) -> _ArchiveForm | None:
    """The form that an archive is, which was read; None where it is laid out in another way than
    torch.save lays out the parts of a checkpoint.
    """
    records, directory = list(archive.records.values()), reader.directory
    if len(records) < 3 or records[0].name != _STREAM or directory >= FULL:
        return None
    headers = []
    for record, (at, name, _, _, size, crc, flags) in zip(records, reader.listed, strict=True):
        header = blob.read(at, record.offset - at)
        *_, said, packed, plain, width, extra = LOCAL.unpack_from(header)
        padding = header[LOCAL.size + width :]
        # with checksum and sizes in a descriptor alone, and with padding and no other field
        if (
            not (size and crc and flags & DESCRIBED)
            or (said, packed, plain, width) != (0, 0, 0, len(name))
            or padding[:4] != b"FB" + (extra - 4).to_bytes(2, "little")
        ):
            return None
        headers.append(header)
    ends = blob.read(directory, blob.size - directory)
    at = 0
    for place, name, *_ in reader.listed:
        fields = ENTRY.unpack_from(ends, at)
        if fields[10:12] != (len(name), 0) or fields[16] != place:
            return None
        at += ENTRY.size + len(name)
    if len(ends) != at + _ENDS:
        return None
    form = _ArchiveForm(archive, blob.size, headers, directory, ends)
    # what is of no form of its own would be of none of others
    return form if form.filled(blob.read, blob.size) is not None else None
