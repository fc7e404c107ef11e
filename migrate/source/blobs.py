"""Files that are opened once, read by descriptor, and watched for change.

Nothing is mapped: a mapped file that is cut short kills the process, a `pread` that comes back short is an error with
a name. Nothing is opened a second time by name either: between two opens another file can take the name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..core.diagnostics import Report, fail, listed, printable
from .index import Blob, Index

CHANGED_HELP = "let whatever writes to the checkpoint finish, then run again"


class Identity(NamedTuple):
    """What tells one state of a file from another; times in nanoseconds, size in bytes."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def identity(status: os.stat_result) -> Identity:
    """The identity in a stat result."""
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class FileBlob:
    """A regular file held by its descriptor. `locate` gives the identity of what has its name now, or None."""

    __slots__ = ("_descriptor", "_identity", "_locate", "name", "size")

    def __init__(self, name: str, descriptor: int, locate: Callable[[str], Identity | None]) -> None:
        self.name = name
        self._descriptor: int | None = descriptor
        self._identity = identity(os.fstat(descriptor))
        self._locate = locate
        self.size = self._identity.size

    def fileno(self) -> int | None:
        return self._descriptor

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 if the file ends before, M901 if the system cannot read. Thread-safe."""
        if self._descriptor is None:
            raise ValueError(f"{self.name} is closed")
        left = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        while left.nbytes:
            try:
                count = os.preadv(self._descriptor, [left], offset)
            except OSError as error:
                fail("M901", f"{printable(self.name)}: cannot read {left.nbytes} bytes at {offset}: {error.strerror}")
            if count == 0:
                fail("M905", f"{printable(self.name)}: ends at {offset}, but was {self.size} bytes when it was opened", help=CHANGED_HELP)
            offset += count
            left = left[count:]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. The caller has compared `size` with the file's."""
        return read(self, offset, size)

    def change(self) -> str | None:
        """What differs from the moment of opening, or None."""
        if self._descriptor is None:
            return None
        return difference(self._identity, identity(os.fstat(self._descriptor))) or difference(self._identity, self._locate(self.name))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class BytesBlob:
    """Bytes in memory as a blob: an archive that lies within another."""

    __slots__ = ("_content", "name", "size")

    def __init__(self, name: str, content: bytes | bytearray | memoryview) -> None:
        self.name, self.size = name, len(content)
        self._content = content

    def fileno(self) -> int | None:
        return None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 if there are not so many bytes."""
        end = offset + buffer.nbytes
        if not 0 <= offset <= end <= self.size:
            fail("M905", f"{printable(self.name)}: has {self.size} bytes, and {end} are needed")
        buffer[:] = memoryview(self._content)[offset:end]


def read(blob: Blob, offset: int, size: int) -> bytes:
    """`size` bytes of any blob from `offset`, held once. The caller has compared `size` with the blob's."""
    # a BytesIO hands out the bytes that it was filled through, where bytes() of a bytearray would be a second copy
    out = io.BytesIO(bytes(size))
    with out.getbuffer() as buffer:
        blob.readinto(offset, buffer)
    return out.getvalue()


def difference(then: Identity, now: Identity | None) -> str | None:
    """How `now` differs from `then`, in words; None if it does not."""
    if now is None:
        return "it is no longer there"
    if (then.device, then.inode) != (now.device, now.inode):
        return "another file has its name"
    if then.size != now.size:
        return f"its size was {then.size} bytes and is {now.size}"
    if then != now:
        return "it was written to or its attributes were changed"
    return None


class FileSource:
    """A Source over files: what every format on disk returns.

    `side` reads one side file, `watched` gives (name, what changed) of side files, `release` closes what else is open.
    """

    def __init__(
        self,
        path: str,
        format: str,
        index: Index,
        blobs: Sequence[FileBlob],
        *,
        history: bytes | None = None,
        side: Callable[[str], bytes] | None = None,
        watched: Callable[[], Iterable[tuple[str, str]]] = tuple,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.index = index
        self.history = history
        self._files = tuple(blobs)
        self.blobs: Sequence[Blob] = self._files
        self._side, self._watched, self._release = side, watched, release

    def side_file(self, path: str) -> bytes:
        """The bytes of one of `index.side_files`; KeyError for any other path, M905 if it changed since it was listed."""
        if self._side is None:
            raise KeyError(path)
        return self._side(path)

    def check_unchanged(self) -> None:
        """M905 naming every file that is not what it was when it was opened."""
        report = Report()
        changes = [(blob.name, change) for blob in self._files if (change := blob.change())]
        for name, change in (*changes, *self._watched()):
            report.add("M905", f"{printable(name)}: changed while it was read: {change}", help=CHANGED_HELP)
        report.check()

    def close(self) -> None:
        for blob in self._files:
            blob.close()
        if self._release is not None:
            self._release()

    def __enter__(self) -> FileSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.format} {listed([self.path])}: {len(self.index.tensors)} tensors in {len(self._files)} files>"
