"""What a file is by its first and last bytes.

A file with the wrong ending is common, and "not a zip file" is no help: what git-lfs leaves, a web
page that was saved in place of a download, a checkpoint that was packed once more. So each known
kind is refused by its name.
"""

from __future__ import annotations

import re
from typing import NoReturn

from ..core.errors import fail, printable
from ._legacy import is_legacy

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
    "gguf": ("a GGUF file", "give it the ending .gguf"),
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
HEAD = 512  # bytes from the begin that `file_kind` wants, as far as there are so many
TAIL = 22  # and from the end


def file_kind(head: bytes, size: int, tail: bytes) -> str:
    """`zip`, `legacy`, or the name of another kind for `refuse_kind`; `head` and `tail` are the
    file's first and last bytes.

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
