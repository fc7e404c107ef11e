"""What a checkpoint contains, known from its headers alone.

`Index` maps each key to where its bytes lie; `Source` is an index with the descriptors to read
them. Both are free of any format: a format makes them, everything above only reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.spec import Spec, total_bytes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .blobs import Identity
    from .outline import Outline
    from .pickle.policy import Outside
    from .unread import Unread


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


class SideFile(NamedTuple):
    """A small file beside the tensors. `path` is relative to the checkpoint, `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of one checkpoint, without data.

    `tensors` are in the checkpoint's own order. `files` names the weight files by blob number,
    relative to the checkpoint. `side_files` travel with a migration, `left_out` are files that
    never do and are only listed. `items` are the non-tensor values by path, `metadata` the format's
    own string map. `outline` is how all of it hangs together where it is more than a flat dict of
    tensors: it also has tensors that rules do not see, `carried` ones, under keys that no tensor
    has. `outside` is what the reader refused to read and left out, and `unread` the entries that
    went with it, by path; `notes` are what it noticed. `sums()` has the CRC-32 of the bytes that
    begin at (blob, offset), as (their number, CRC), where the format records one. `module_versions`
    are those of a state dict in memory.
    """

    tensors: Mapping[str, Stored]
    files: tuple[str, ...]
    side_files: tuple[SideFile, ...] = ()
    left_out: tuple[str, ...] = ()
    items: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    outline: Outline | None = None
    outside: tuple[Outside, ...] = ()
    unread: Mapping[str, Unread] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sums: Callable[[], Mapping[tuple[int, int], tuple[int, int]]] = dict
    module_versions: Mapping[str, int] | None = None

    @property
    def versions(self) -> Mapping[str, int] | None:
        """Module -> its version, as the `_metadata` of a state dict has them; None where there is
        none.
        """
        return self.module_versions if self.outline is None else self.outline.versions

    @property
    def carried(self) -> Mapping[str, Stored]:
        """The tensors that rules do not see."""
        return self.outline.carried if self.outline is not None else {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return total_bytes(map(itemgetter(0), self.tensors.values()))

    def hash(self) -> str:
        """`m1:` and the sha256 over the sorted (key, dtype, shape) of all tensors: what the
        checkpoint holds, not how it is stored.
        """
        return specs_hash({k: t.spec for k, t in self.tensors.items()})


def specs_hash(specs: Mapping[str, Spec]) -> str:
    """`m1:` and the sha256 over sorted (key, dtype, shape); the hash of an `Index` that holds
    exactly these.
    """
    # by identity, because hashing a spec for each key takes longer than all the rest
    written = {
        number: f"\t{s.dtype}\t{s.shape}\n"
        for number, s in {id(s): s for s in specs.values()}.items()
    }
    lines = [f"{len(key)}:{key}{written[id(specs[key])]}" for key in sorted(specs)]
    # surrogatepass: a key may hold any code point that JSON can escape
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass"))
    return f"m1:{digest.hexdigest()}"


class Blob(Protocol):
    """Bytes that tensors lie in: a file, or memory. Never mapped."""

    name: str
    size: int

    @property
    def identity(self) -> Identity | None:
        """What tells the file, as it was when it was opened, from any other; None where the bytes
        are in memory.
        """

    def fileno(self) -> int | None:
        """A descriptor that stays open as long as the blob; None where the bytes are in memory or
        the file is opened when it is read.
        """

    def hold(self) -> AbstractContextManager[int | None]:
        """The file's descriptor, open for as long as the context; None where the bytes are in
        memory.

        Entering it is an OSError if the file cannot be opened again, and M905 if it is not what it
        was.
        """

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; CheckpointError M905 if the bytes are not there (the file
        was cut short). Thread-safe.
        """


class Source(Protocol):
    """An opened checkpoint. Call sequence: `format.open(path)`, read `index`, read blobs,
    `check_unchanged`, `close`.

    `history` is the stamp as it stands in the checkpoint, unparsed; None without one.
    """

    path: str
    format: str
    index: Index
    blobs: Sequence[Blob]
    history: bytes | None

    def side_file(self, path: str) -> bytes:
        """The bytes of one of `index.side_files`."""

    def identities(self) -> Mapping[str, Identity] | None:
        """What each file was when it was opened, by its path in the checkpoint: all that
        `check_unchanged` watches.

        None where nothing can tell later whether the bytes are still the same: they are in memory.
        """

    def check_unchanged(self) -> None:
        """CheckpointError M905 naming each file whose device, inode, size or mtime is not what it
        was when it was opened.
        """

    def close(self) -> None:
        """Closes all descriptors; may be called twice."""
