"""Files that are read by descriptor and watched for change.

Nothing is mapped: a mapped file that is cut short kills the process, a `pread` that comes back
short is an error with a name. The first files of a checkpoint are opened once and stay open. A
checkpoint of more files than a process may have open is read all the same: the others are opened
when they are read, and each opening compares what has the name now with what had it first, because
between two opens another file can take the name.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ..core.errors import MigrateError, fail, printable
from ..core.spec import Spec

if TYPE_CHECKING:
    from ..core.view import View
    from .torn_tensors import TornPart

CHANGED_HELP = "let whatever writes to the checkpoint finish, then run again"
# open files of a checkpoint, and how many more at a time, in a process of 1,024 or more
KEPT, LENT = 256, 64


class Identity(NamedTuple):
    """What tells one state of a file from another; times in nanoseconds, size in bytes."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def identity(status: os.stat_result) -> Identity:
    """The identity in a stat result."""
    return Identity(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


class Stored(NamedTuple):
    """One stored tensor: the bytes of its first element are at `offset` of blob number `blob`.

    `strides` are in elements; None means row-major and contiguous. `storage` is equal for tensors
    that share memory and None where the format cannot share.
    """

    spec: Spec
    blob: int
    offset: int
    strides: tuple[int, ...] | None = None
    storage: Any = None


class ChunkedTensor(NamedTuple):
    """One stored tensor that lies in several places.

    `chunks[n]` is a box of the tensor, stored by itself: it begins at index `starts[n]` and has the
    shape of its own spec. The boxes share no element and cover the tensor; none is empty.

    Where the chunks are no boxes of it (padded each for itself, swizzled), `view` says how they
    make up the tensor, leaf n being chunk n, and `starts` is empty.

    Where they make up none, `torn` says why, and `view` is over one leaf more, the whole, which
    cannot be read.
    """

    spec: Spec
    chunks: tuple[Stored, ...]
    starts: tuple[tuple[int, ...], ...]
    view: View | None = None
    torn: TornPart | None = None


class ChunkOf(NamedTuple):
    """Names chunk `number` of the tensor `key`, as a key names a tensor that lies in one place."""

    key: str
    number: int


class ReplicaOf(ChunkOf):
    """Names what part `number` of a grid has under a key that several parts have, `stored` there;
    `part` is the name of its file.
    """

    part: str
    stored: Stored


def replica_of(key: str, number: int, part: str, stored: Stored) -> ReplicaOf:
    """The name of one of several. Its number is less than 0, as that of no chunk is."""
    found = ReplicaOf(key, -1 - number)
    found.part, found.stored = part, stored
    return found


StoredTensor: TypeAlias = "Stored | ChunkedTensor"


def chunks_of(stored: StoredTensor) -> tuple[Stored, ...]:
    """Where the bytes of a tensor lie: it is its own chunk if it lies in one place."""
    return stored.chunks if isinstance(stored, ChunkedTensor) else (stored,)


def chunk_at(tensors: Mapping[str, StoredTensor], source: str | ChunkOf) -> Stored:
    """The place that a key or a chunk names; KeyError for a key of several chunks. M946 for the
    whole of a torn tensor.
    """
    if isinstance(source, ChunkOf):
        if isinstance(source, ReplicaOf):
            return source.stored
        stored = tensors[source.key]
        chunks = chunks_of(stored)
        if source.number == len(chunks) and isinstance(stored, ChunkedTensor) and stored.torn:
            stored.torn.refuse()
        return chunks[source.number]
    stored = tensors[source]
    if isinstance(stored, ChunkedTensor):
        raise KeyError(f"{source} lies in {len(stored.chunks)} places")
    return stored


def rows_of(stored: StoredTensor) -> tuple[Stored, ...] | None:
    """The places whose bytes, one after the other, are those of the tensor in row-major order; None
    where it is stored in another way.
    """
    if isinstance(stored, Stored):
        return (stored,) if stored.strides is None else None
    inner = stored.spec.shape[1:]
    if stored.view is not None or any(
        c.strides is not None or c.spec.shape[1:] != inner for c in stored.chunks
    ):
        return None
    order = sorted(zip(stored.starts, stored.chunks, strict=True), key=lambda one: one[0])
    return tuple([chunk for _, chunk in order])


def chunk_names(key: str, stored: StoredTensor) -> tuple[str | ChunkOf, ...]:
    """What names the places of a tensor: its key, if it lies in one."""
    if isinstance(stored, ChunkedTensor):
        count = len(stored.chunks) + (stored.torn is not None)
        return tuple([ChunkOf(key, number) for number in range(count)])
    return (key,)


def key_of(source: str | ChunkOf) -> str:
    """The key of the tensor that a key or a chunk belongs to."""
    return source.key if isinstance(source, ChunkOf) else source


class Blob(Protocol):
    """Bytes that tensors lie in: a file, or memory. Never mapped."""

    name: str
    size: int

    @property
    def identity(self) -> Identity | None:
        """What tells the file, as opened, from any other; None where the bytes are in memory."""

    def fileno(self) -> int | None:
        """A descriptor that stays open as long as the blob; None where the bytes are in memory or
        the file is opened when it is read.
        """

    def hold(self) -> AbstractContextManager[int | None]:
        """The file's descriptor, open as long as the context; None where the bytes are in memory.

        OSError if the file cannot be opened again, M905 if it is not what it was.
        """

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; CheckpointError M905 if the bytes are not there (the file
        was cut short). Thread-safe.
        """


def _room() -> tuple[int, int]:
    """How many files of a checkpoint stay open, and how many more may be, of all files allowed."""
    try:
        import resource
    except ImportError:
        return KEPT, LENT
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT, LENT
    return min(KEPT, limit // 4), min(LENT, max(4, limit // 16))


def read_rows(rows: Iterable[Stored], blobs: Sequence[Blob]) -> bytes:
    """The bytes of these places, one after the other. M905 if they are not there."""
    out = bytearray(sum(at.spec.nbytes for at in rows))
    here = memoryview(out)
    for at in rows:
        if at.spec.nbytes:
            blobs[at.blob].readinto(at.offset, here[: at.spec.nbytes])
            here = here[at.spec.nbytes :]
    return bytes(out)


class DescriptorPool:
    """Keeps the first files of a checkpoint open, and lends out the others: those that were read
    last stay open, up to a number.

    `reopen` opens a file by its name. Thread-safe. A file that is being read is never closed, so
    that there may be as many more open as there are threads.
    """

    def __init__(self, reopen: Callable[[str], int]) -> None:
        self._reopen = reopen
        self._places, self._room = _room()
        self._lock = threading.Lock()
        # the one that was read last at the end, each with its descriptor and how many read it now
        self._lent: dict[FileBlob, tuple[int, int]] = {}

    def keep(self) -> bool:
        """Whether there is a place for one more file that stays open; takes it."""
        with self._lock:
            if not self._places:
                return False
            self._places -= 1
            return True

    def put(self, blob: FileBlob, descriptor: int) -> None:
        """Takes over a file that was just opened."""
        with self._lock:
            self._close_idle(self._room - 1)
            self._lent[blob] = (descriptor, 0)

    def take(self, blob: FileBlob) -> int:
        """A descriptor of the file, until `give`. OSError if it cannot be opened, M905 if it is no
        longer the same file.
        """
        with self._lock:
            found = self._lent.pop(blob, None)
            if found is None:
                self._close_idle(self._room - 1)
                found = (self.opened(blob), 0)
            self._lent[blob] = (found[0], found[1] + 1)
            return found[0]

    def give(self, blob: FileBlob) -> None:
        with self._lock:
            if blob in self._lent:
                descriptor, readers = self._lent[blob]
                self._lent[blob] = (descriptor, readers - 1)
                self._close_idle(self._room)

    def close(self, blob: FileBlob) -> None:
        """Closes the file, if it is open."""
        with self._lock:
            if (found := self._lent.pop(blob, None)) is not None:
                release(found[0])

    def free(self) -> None:
        """Gives back the place of a file that stayed open."""
        with self._lock:
            self._places += 1

    def _close_idle(self, most: int) -> None:
        """Closes what was read longest ago, until `most` are open or all of them are being read."""
        if len(self._lent) > most:
            idle = [blob for blob, (_, readers) in self._lent.items() if not readers]
            for blob in idle[: len(self._lent) - most]:
                release(self._lent.pop(blob)[0])

    def opened(self, blob: FileBlob) -> int:
        """A descriptor of the file, which is the caller's. Raises as `take`."""
        try:
            descriptor = self._reopen(blob.name)
        except FileNotFoundError:
            fail("M905", describe_change(blob.name, "it is no longer there"), help=CHANGED_HELP)
        if change := difference(blob.identity, identity(os.fstat(descriptor))):
            release(descriptor)
            fail("M905", describe_change(blob.name, change), help=CHANGED_HELP)
        return descriptor


class FileBlob:
    """A regular file, held by its descriptor or, if a `shelf` is full, opened when it is read.

    `locate` gives the identity of what has its name now, or None.
    """

    __slots__ = ("_descriptor", "_locate", "_shelf", "identity", "name", "size")

    def __init__(
        self,
        name: str,
        descriptor: int,
        locate: Callable[[str], Identity | None],
        shelf: DescriptorPool | None = None,
    ) -> None:
        self.name = name
        self.identity = identity(os.fstat(descriptor))
        self.size = self.identity.size
        self._locate, self._shelf = locate, shelf
        self._descriptor: int | None = descriptor
        if shelf is not None and not shelf.keep():
            self._descriptor = None
            shelf.put(self, descriptor)

    def fileno(self) -> int | None:
        return self._descriptor

    @contextmanager
    def hold(self) -> Iterator[int]:
        """The file's descriptor. OSError if it cannot be opened again, M905 if the file changed."""
        if self._descriptor is not None:
            yield self._descriptor
            return
        if self._shelf is None:
            raise ValueError(f"{self.name} is closed")
        descriptor = self._shelf.take(self)
        try:
            yield descriptor
        finally:
            self._shelf.give(self)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`. M905 if the file ends before, M901 if it cannot be read. Thread-safe."""
        left = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        try:
            if self._descriptor is not None:
                self._fill(self._descriptor, offset, left)
            else:
                with self.hold() as descriptor:
                    self._fill(descriptor, offset, left)
        except OSError as error:
            fail(
                "M901",
                f"{printable(self.name)}: cannot read {left.nbytes} bytes at {offset}: "
                f"{error.strerror}",
            )

    def _fill(self, descriptor: int, offset: int, left: memoryview) -> None:
        while left.nbytes:
            count = os.preadv(descriptor, [left], offset)
            if count == 0:
                fail(
                    "M905",
                    f"{printable(self.name)}: ends at {offset}, but was {self.size} bytes when it "
                    "was opened",
                    help=CHANGED_HELP,
                )
            offset += count
            left = left[count:]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. The caller has compared `size` with the file's."""
        # of archives with many records most reads are small, and all that surrounds them counts
        if self._descriptor is not None:
            try:
                found = os.pread(self._descriptor, size, offset)
            except OSError:
                found = b""
            if len(found) == size:
                return found
        # in parts, or refused
        return read_bytes(self, offset, size)

    def change(self) -> str | None:
        """What differs from the moment of opening, or None."""
        if self._descriptor is None and self._shelf is None:
            return None
        held = (
            None
            if self._descriptor is None
            else difference(self.identity, identity(os.fstat(self._descriptor)))
        )
        return held or difference(self.identity, self._locate(self.name))

    def suspend(self) -> None:
        """Closes the file until it is read again. Nothing may be reading it."""
        if self._shelf is None:
            return
        if self._descriptor is None:
            self._shelf.close(self)
        else:
            release(self._descriptor)
            self._descriptor = None
            self._shelf.free()

    def reopen(self) -> None:
        """Opens a suspended file, to stay open, if there is a place for it. M901 if it cannot be
        opened, M905 if it is no longer the same file. Nothing may be reading it.
        """
        if self._descriptor is not None or self._shelf is None or not self._shelf.keep():
            return
        self._shelf.close(self)
        try:
            self._descriptor = self._shelf.opened(self)
        except OSError as error:
            self._shelf.free()
            fail("M901", f"{printable(self.name)}: cannot be opened again: {error.strerror}")
        except BaseException:
            self._shelf.free()
            raise

    def close(self) -> None:
        descriptor, shelf = self._descriptor, self._shelf
        self._descriptor = self._shelf = None
        if descriptor is not None:
            release(descriptor)
        if shelf is not None:
            shelf.close(self) if descriptor is None else shelf.free()


def release(descriptor: int) -> None:
    """Closes what was only read from: its bytes are here, so that a refusal changes nothing."""
    with suppress(OSError):
        os.close(descriptor)


class FilelessBlob:
    """What blobs that lie in memory have in common: no file."""

    __slots__ = ()
    identity = None

    def fileno(self) -> int | None:
        return None

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()


class BytesBlob(FilelessBlob):
    """Bytes in memory as a blob: an archive that lies within another."""

    __slots__ = ("_content", "name", "size")

    def __init__(self, name: str, content: bytes | bytearray | memoryview) -> None:
        self.name, self.size = name, len(content)
        self._content = content

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 if there are not so many bytes."""
        end = offset + buffer.nbytes
        if not 0 <= offset <= end <= self.size:
            fail("M905", f"{printable(self.name)}: has {self.size} bytes, and {end} are needed")
        buffer[:] = memoryview(self._content)[offset:end]


def read_bytes(blob: Blob, offset: int, size: int) -> bytes:
    """`size` bytes of any blob from `offset`, held once. The caller has compared the size."""
    if sys.version_info >= (3, 15):
        made = bytearray(size)
        with memoryview(made) as view:
            blob.readinto(offset, view)
        return made.take_bytes()
    # a BytesIO hands out what it was filled through; bytes() of a bytearray would copy
    out = io.BytesIO(bytes(size))
    with out.getbuffer() as buffer:
        try:
            blob.readinto(offset, buffer)
        except (MigrateError, OSError) as error:
            # its frames hold parts of the buffer; Python 3.14 complains of a BytesIO freed first
            raise error.with_traceback(None) from error.__cause__
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


def describe_change(name: str, change: str) -> str:
    return f"{printable(name)}: changed while it was read: {change}"
