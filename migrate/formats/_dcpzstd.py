"""Archives that torch wrote through a stream extension: zstandard, which is all that torch has
(torch/distributed/checkpoint/_extension.py).

A compressed archive can only be read from its begin to its end, and tensors are read in any order,
so all of them are decompressed once, into a file without a name that goes with the process. Python
can decompress them from 3.14 on, and before with the package zstandard. What other extensions do is
code of the program that saved: it is run where a caller hands over a registry with their classes,
and only then.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, TypeAlias

from ..core.errors import fail
from ..source.blobs import Blob, read_bytes

# what torch calls it in `transform_descriptors`; another first number would be another form
_PREFIX = "stream.zstd/"
_KNOWN = "1"
_READ = 1 << 20


class SpilledBlob:
    """What was decompressed, in a file without a name, which is made when there is something."""

    __slots__ = ("_file", "name", "size")
    identity = None

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self._file: IO[bytes] | None = None

    def fileno(self) -> int | None:
        return None if self._file is None else self._file.fileno()

    def hold(self) -> AbstractContextManager[int | None]:
        return nullcontext(self.fileno())

    def append(self, data: bytes) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
        view = memoryview(data)
        while view.nbytes:
            view = view[self._file.write(view) :]
        self.size += len(data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 if there are not so many bytes."""
        left = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        while left.nbytes:
            descriptor = self.fileno()
            count = 0 if descriptor is None else os.preadv(descriptor, [left], offset)
            if not count:
                fail("M905", f"{self.name}: ends at {offset}")
            offset, left = offset + count, left[count:]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`."""
        return read_bytes(self, offset, size)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Stretch(io.RawIOBase):
    """A stretch of a blob as a stream."""

    def __init__(self, blob: Blob, offset: int, length: int) -> None:
        super().__init__()
        self._blob, self._at, self._end = blob, offset, offset + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer) as whole:
            view = whole[: self._end - self._at]
            if view.nbytes:
                self._blob.readinto(self._at, view)
            self._at += view.nbytes
            return view.nbytes


# makes the stream of an archive of the one that is stored
Undo: TypeAlias = Callable[[io.BufferedReader], Any]


def decompressor() -> Undo | None:
    """What makes the decompressed stream of a compressed one; None where nothing can."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        pass
    else:
        return lambda raw: zstd.ZstdFile(raw)
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    return lambda raw: zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)


def is_known(transforms: tuple[str, ...]) -> bool:
    """Whether it is one compression by zstandard, in the form that is known."""
    return (
        len(transforms) == 1
        and transforms[0].startswith(_PREFIX)
        and transforms[0].removeprefix(_PREFIX).partition(".")[0] == _KNOWN
    )


def undone_by(registry: Any, transforms: tuple[str, ...]) -> Undo | None:
    """What undoes transforms by the classes of a registry of torch's, None without all of them; as
    torch's own reader asks it.
    """
    if registry is None:
        return None
    try:
        found = registry.from_descriptor_list(transforms)
    except ValueError:
        return None

    def undo(raw: Any) -> Any:
        for one in found:
            if hasattr(one, "transform_from"):
                raw = one.transform_from(raw)
        return raw

    return undo


def unpack(
    blob: Blob,
    offset: int,
    length: int,
    out: SpilledBlob,
    opened: Undo | None,
    most: int,
    label: str,
) -> tuple[int, int]:
    """Where the archive begins in `out` that is decompressed by what is `opened`, and its bytes.

    M938 where nothing can decompress it, or it is no such stream; M914 for more than `most` bytes.
    """
    if opened is None:
        fail(
            "M938",
            f"{label}: is compressed by zstandard, and nothing here can decompress it",
            help="pip install zstandard, or run with Python 3.14 or later",
        )
    start = out.size
    try:
        with opened(io.BufferedReader(_Stretch(blob, offset, length), _READ)) as stream:
            while data := stream.read(_READ):
                out.append(data)
                if out.size - start > most:
                    fail(
                        "M914",
                        f"{label}: decompressed it has more than {most:,} bytes, which is more "
                        "than .metadata says",
                        help="do not trust where this file comes from",
                    )
    except OSError:
        raise
    except Exception as error:
        # the packages have classes of their own for it
        if type(error).__name__ not in ("ZstdError", "EOFError"):
            raise
        fail("M938", f"{label}: cannot be decompressed: {error}")
    return start, out.size - start
