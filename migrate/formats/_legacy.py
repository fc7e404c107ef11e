"""The file that torch.save wrote before 1.6, and still does on request.

It is pickles in a row, then the storages in a row:

    magic number, protocol version, system, the object, the storages' keys    five pickles
    int64 count of elements, then their bytes    for each storage, in the order of the keys

Nothing says how long a pickle is, and a storage says how many elements it has but not of which
size: that stands with the first tensor that uses it. So the object's pickle is read from a window
that grows, and the storages are found by walking what was read. A window that is too small looks
like a stream that was cut short, so only that error asks for a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..core.errors import CheckpointError, fail, printable
from ..source.blobs import Blob, read_bytes
from ..source.pickle.decoding import MAGIC, PROTOCOL, STORAGES
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import (
    ABSENT,
    ARCHIVE,
    COMPOSITES,
    EXTRA_STATE,
    Call,
    Dict,
    Global,
    Set,
)
from ..source.pickle.tree import ITEMSIZE
from ..source.zip_archive import FETCH_HELP, ArchiveRecord

_MAGIC_BYTES = MAGIC.to_bytes(10, "little")
# bytes in front of the storages that are looked at: most state dicts need only the first
_WINDOWS = (1 << 20, 1 << 23)
_LARGEST = 1 << 26


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Legacy:
    """The object of a legacy file as inert nodes, and where the bytes of each storage lie."""

    value: Any
    records: dict[str, ArchiveRecord]


def is_legacy(head: bytes) -> bool:
    """Whether a file with this head (32 bytes are enough) begins with the pickled magic number."""
    return head[:1] == b"\x80" and _MAGIC_BYTES in head[2:32]


def read_legacy(
    blob: Blob, *, start: int = 0, size: int | None = None, label: str | None = None
) -> Legacy:
    """The legacy file in `size` bytes of `blob` from `start` on (by default all of it); offsets
    count from the blob's begin.

    `label` is what messages call it, by default the blob's name.

    Every storage is named by the object, has as many elements as the object says, and the last one
    ends the file: M940 else, M941 for what a big-endian machine wrote, M930 to M932 from the pickle
    machine. Storages have no CRC.
    """
    end = blob.size if size is None else start + size
    label = label or printable(blob.name)
    value, keys, at = _pickles(blob, start, end, label)
    described = _storages(value, label)
    records: dict[str, ArchiveRecord] = {}
    for key in keys:
        if key in records or key not in described:
            _bad(
                f"{label}: storage {printable(key)} is "
                f"{'there twice' if key in records else 'not used by any tensor'}"
            )
        count, itemsize = described[key]
        nbytes = count * itemsize
        found = (
            int.from_bytes(read_bytes(blob, at, 8), "little", signed=True)
            if at + 8 <= end
            else count
        )
        if found != count:
            _bad(
                f"{label}: storage {printable(key)} at {at} has {found} elements, its tensors say "
                f"{count}"
            )
        if at + 8 + nbytes > end:
            _bad(
                f"{label}: storage {printable(key)} at {at} is cut off: {nbytes} bytes, and the "
                f"file ends at {end}"
            )
        records[key] = ArchiveRecord(key, at + 8, nbytes, None)
        at += 8 + nbytes
    if missing := described.keys() - records.keys():
        _bad(f"{label}: storage {printable(min(missing))} is used and not in the file")
    if at != end:
        _bad(f"{label}: {end - at} unclaimed bytes follow the last storage, which ends at {at}")
    return Legacy(value, records)


def _bad(message: str) -> NoReturn:
    fail("M940", message, help=FETCH_HELP)


def _pickles(blob: Blob, start: int, end: int, label: str) -> tuple[Any, list[str], int]:
    """The object, the keys of the storages in the file's order, and where the first begins."""
    for window in _WINDOWS:
        if window >= end - start:
            break
        try:
            return _parse(blob, start, window, label)
        except CheckpointError as error:
            # M930 is also what a stream looks like that goes on behind the window
            if error.diagnostics[0].code != "M930":
                raise
    return _parse(blob, start, min(_LARGEST, end - start), label)


def _parse(blob: Blob, start: int, size: int, label: str) -> tuple[Any, list[str], int]:
    # a byte more than may be read, where there is one: then what ends too early is too long
    more = size == _LARGEST and start + size < blob.size
    data = read_bytes(blob, start, size + more)
    head = data[:4096]
    magic, at = read_pickle(head, EXTRA_STATE, name=f"{label}: magic number", whole=False)
    if type(magic) is not int or magic != MAGIC:
        fail(
            "M941", f"{label}: does not begin with the magic number of torch.save", help=FETCH_HELP
        )
    protocol, at = read_pickle(
        head, EXTRA_STATE, name=f"{label}: protocol version", start=at, whole=False
    )
    system, at = read_pickle(head, EXTRA_STATE, name=f"{label}: system", start=at, whole=False)
    if type(protocol) is not int or protocol != PROTOCOL or type(system) is not Dict:
        fail("M941", f"{label}: is of another protocol version than {PROTOCOL}", help=FETCH_HELP)
    if (order := system.get("little_endian")) is not True:
        if order is not False:
            _bad(f"{label}: does not say whether it is little-endian")
        fail(
            "M941",
            f"{label}: was written by a big-endian machine",
            help="save it again on a little-endian one",
        )
    limits = replace(ARCHIVE, size=size - at)
    value, at = read_pickle(data, limits, name=label, start=at, whole=False, persistent=True)
    keys, at = read_pickle(data, ARCHIVE, name=f"{label}: storage keys", start=at, whole=False)
    if type(keys) is not list or any(type(key) is not str for key in keys):
        _bad(f"{label}: the keys of its storages are not a list of text")
    return value, keys, start + at


def _storages(value: Any, label: str) -> dict[str, tuple[int, int]]:
    """The elements, and the bytes of one, of every storage that is used anywhere in `value`."""
    found: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    left: list[Any] = [value]
    while left:
        node = left.pop()
        kind = type(node)
        if kind not in COMPOSITES or id(node) in seen:
            continue
        seen.add(id(node))
        if kind is tuple or kind is list:
            left += node
        elif kind is Dict:
            for pair in node.pairs:
                left += pair
        elif kind is Set:
            left += node.items
        elif kind is Call:
            left += node.arguments
            left.append(None if node.state is ABSENT else node.state)
            left += node.items or ()
            for pair in node.pairs or ():
                left += pair
        else:
            _storage(node.id, found, label)
    return found


def _storage(identity: Any, found: dict[str, tuple[int, int]], label: str) -> None:
    """Enters one persistent id. Other ids than those of storages are for the decoders to refuse."""
    if type(identity) is not tuple or len(identity) < 5 or identity[0] != "storage":
        return
    _, cls, key, _, count = identity[:5]
    if type(cls) is not Global or (cls.module, cls.name) not in STORAGES:
        fail(
            "M941",
            f"{label}: a storage of a class that is not known: "
            f"{printable(str(cls)) if type(cls) is Global else 'no name'}",
        )
    dtype = STORAGES[cls.module, cls.name]
    if type(key) is not str or type(count) is not int or not 0 <= count < 1 << 63:
        _bad(f"{label}: a storage whose key or number of elements is of another type")
    described = (count, 1 if dtype is None else ITEMSIZE[dtype])
    if found.setdefault(key, described) != described:
        _bad(f"{label}: storage {printable(key)} is described twice, and differently")
