"""What a file is by its first and last bytes, and the file that torch.save wrote before 1.6.

A file with the wrong ending is common, and "not a zip file" is no help: what git-lfs leaves, a web
page that was saved in place of a download, a checkpoint that was packed once more. So each known
kind is refused by its name.

torch.save wrote pickles in a row, then the storages in a row, and still does on request:

    magic number, protocol version, system, the object, the storages' keys    five pickles
    int64 count of elements, then their bytes    for each storage, in the order of the keys

Nothing says how long a pickle is, and a storage says how many elements it has but not of which
size: that stands with the first tensor that uses it. So the object's pickle is read from a window
that grows, and the storages are found by walking what was read. A window that is too small looks
like a stream that was cut short, so only that error asks for a larger one.
"""

from __future__ import annotations

import re
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
from ..source.zip_archive import ArchiveRecord

_UNPACK = "unpack it first"
_SAVE = "load it where it was made, and save the state_dict with torch.save"
_OTHER = {
    "tar": ("a tar archive: what torch.save wrote in 2016, or a packed folder",
    "unpack it if it is a packed folder; save it again if it is a file of 2016"),
    "gzip": ("compressed with gzip", _UNPACK),
    "bzip2": ("compressed with bzip2", _UNPACK),
    "xz": ("compressed with xz", _UNPACK),
    "zstd": ("compressed with zstd", _UNPACK),
    "7z": ("a 7z archive", _UNPACK),
    "rar": ("a RAR archive", _UNPACK),
    "pickle": ("a bare pickle, not a file of torch.save", _SAVE),
    "hdf5": ("an HDF5 file", "convert it with the program that wrote it"),
    "numpy": ("an .npy file of NumPy", "save its array with torch.save or safetensors"),
    "gguf": ("a GGUF file", "convert it with the tools of llama.cpp"),
    "safetensors": ("a safetensors file", "give it the ending .safetensors"),
    "git-lfs": ("the pointer that git-lfs leaves in place of a file",
    "fetch the file itself with `git lfs pull`"),
    "html": ("a web page", "the download failed: fetch the file again"),
    "empty": ("empty", "fetch the file again"),
    "unknown": ("not a file of torch.save", "check that the path is the one you meant"),
}  # fmt: skip
_HEADS = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!", "rar"),
    (b"\x89HDF\r\n\x1a\n", "hdf5"),
    (b"\x93NUMPY", "numpy"),
    (b"GGUF", "gguf"),
    (b"version https://git-lfs", "git-lfs"),
)
# protocols 0 and 1 have no sign of their own: this is how a dict, a list or a call begins
_OLD_PICKLE = re.compile(rb"\(?[ci][A-Za-z_][\w.]*\n|\([dl]|[}\]][(q.]")
# how a zip archive begins, and one without a record
ZIP = (b"PK\x03\x04", b"PK\x05\x06")
HEAD = 512  # bytes from the begin that `kind` wants, as far as there are so many
TAIL = 22  # and from the end


def file_kind(head: bytes, size: int, tail: bytes) -> str:
    """`zip`, `legacy`, or the name of another kind for `refuse`; `head` and `tail` are the file's
    first and last bytes.

    `zip` is also what only ends like one: the reader of archives says what is in front.
    """
    if not size:
        return "empty"
    if head.startswith(ZIP) or tail[-TAIL:][:4] == b"PK\x05\x06":
        return "zip"
    if is_legacy(head):
        return "legacy"
    for begin, name in _HEADS:
        if head.startswith(begin):
            return name
    if head[257:262] == b"ustar" or (size >= 512 and size % 512 == 0 and _tar_sum(head[:512])):
        return "tar"
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= min(size - 8, 100_000_000):
        return "safetensors"
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return "pickle"
    if tail[-1:] == b"." and _OLD_PICKLE.match(head):
        return "pickle"
    return "html" if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")) else "unknown"


def refuse_kind(file: str, found: str) -> NoReturn:
    """M941 saying what the file is, for a kind that is neither `zip` nor `legacy`."""
    what, way_out = _OTHER[found]
    fail("M941", f"{printable(file)}: is {what}", help=way_out)


def _tar_sum(block: bytes) -> bool:
    """Whether the first block has the checksum of a tar header, as old tars without a sign do."""
    try:
        said = int(block[148:156].split(b"\x00")[0].strip() or b"-1", 8)
    except ValueError:
        return False
    return said == sum(block) - sum(block[148:156]) + 8 * 32


_MAGIC_BYTES = MAGIC.to_bytes(10, "little")
# bytes in front of the storages that are looked at: most state dicts need only the first
_WINDOWS = (1 << 20, 1 << 23)
_LARGEST = 1 << 26
_HELP = "fetch the file again, or save it again with torch.save"


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
    fail("M940", message, help=_HELP)


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
        fail("M941", f"{label}: does not begin with the magic number of torch.save", help=_HELP)
    protocol, at = read_pickle(
        head, EXTRA_STATE, name=f"{label}: protocol version", start=at, whole=False
    )
    system, at = read_pickle(head, EXTRA_STATE, name=f"{label}: system", start=at, whole=False)
    if type(protocol) is not int or protocol != PROTOCOL or type(system) is not Dict:
        fail("M941", f"{label}: is of another protocol version than {PROTOCOL}", help=_HELP)
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
