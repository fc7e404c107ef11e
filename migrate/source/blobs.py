"""Where the bytes of tensors lie: blobs, the places of tensors in them, and what tells one state of
a file from another. How a file is read is the business of its home: `local`, or `stores`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ..core.errors import MigrateError, fail, printable
from ..core.spec import Spec

if TYPE_CHECKING:
    from ..core.view import View
    from .torn_tensors import TornPart

CHANGED_HELP = "let whatever writes to the checkpoint finish, then run again"


class Identity(NamedTuple):
    """What tells one state of a file from another; times in nanoseconds, size in bytes."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


class ObjectIdentity(Identity):
    """That of an object in a store, which has a `version` and neither device nor inode: the numbers
    are made from it, for what keeps numbers.
    """

    version = ""


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
    `part` is the name of its file, and `called` the key in it.
    """

    part: str
    stored: Stored
    called: str


def replica_of(key: str, number: int, part: str, stored: Stored, called: str = "") -> ReplicaOf:
    """The name of one of several. Its number is less than 0, as that of no chunk is."""
    found = ReplicaOf(key, -1 - number)
    found.part, found.stored, found.called = part, stored, called or key
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


class FileBlob(Blob, Protocol):
    """A file of a checkpoint, opened; `name` is its path there.

    What it is is known from opening on: a read answers from that state of the file or not at all.
    """

    @property
    def identity(self) -> Identity:
        """What tells the file, as opened, from any other."""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. The caller has compared `size` with the file's."""

    def change(self) -> str | None:
        """What differs from the moment of opening, or None."""

    def suspend(self) -> None:
        """Lets go of what is open until it is read again. Nothing may be reading it."""

    def reopen(self) -> None:
        """Opens a suspended file, to stay open. M901 if it cannot be opened, M905 if it is another
        one by now. Nothing may be reading it.
        """

    def close(self) -> None:
        """Lets go of it for good."""


def room(nbytes: int) -> memoryview:
    """Memory that files are read into.

    malloc puts a large block 16 bytes behind the beginning of a page. Processors of AMD whose
    `rep movsb` the kernel copies with take four times as long where the target lies 8 to 24 bytes
    behind the source modulo a page, as it would for tensors on pages. 32 bytes behind the page it
    does for none that lies at a multiple of 64, in reading and in writing.
    """
    return memoryview(bytearray(nbytes + 16))[16:]


def read_rows(rows: Iterable[Stored], blobs: Sequence[Blob]) -> bytes:
    """The bytes of these places, one after the other. M905 if they are not there."""
    out = bytearray(sum(at.spec.nbytes for at in rows))
    here = memoryview(out)
    for at in rows:
        if at.spec.nbytes:
            blobs[at.blob].readinto(at.offset, here[: at.spec.nbytes])
            here = here[at.spec.nbytes :]
    return bytes(out)


class Stretch(NamedTuple):
    """Bytes `start` to `stop` of blob number `blob`, which will be read: each byte once or, if it
    is read `again`, in strides and perhaps several times.
    """

    blob: int
    start: int
    stop: int
    again: bool = False


def foreseeing(
    blobs: Sequence[Blob], stretches: Iterable[Stretch], max_memory: int | None = None
) -> AbstractContextManager[None]:
    """Has a store fetch these stretches, in this order, as long as the context is open; a quarter
    of `max_memory` at a time, at most. Blobs of this machine are read as they are.
    """
    requests: Any = getattr(blobs[0], "requests", None) if blobs else None
    if requests is None:
        return nullcontext()
    if max_memory is not None:
        requests.limit(max_memory // 4)
    ahead: AbstractContextManager[None] = requests.ahead(blobs, stretches)
    return ahead


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
    if isinstance(then, ObjectIdentity) and isinstance(now, ObjectIdentity):
        if then.version != now.version:
            return f"its version was {printable(then.version)} and is {printable(now.version)}"
        return None if then.size == now.size else "its size is another"
    if (then.device, then.inode) != (now.device, now.inode):
        return "another file has its name"
    if then.size != now.size:
        return f"its size was {then.size} bytes and is {now.size}"
    if then != now:
        return "it was written to or its attributes were changed"
    return None


def describe_change(name: str, change: str) -> str:
    return f"{printable(name)}: changed while it was read: {change}"
