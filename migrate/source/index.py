"""What a checkpoint contains, known from its headers alone.

`Index` maps each key to where its bytes lie, in one place or in several chunks; `Source` is an
index with the descriptors to read them. Both are free of any format: a format makes them,
everything above only reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.errors import Report, listed
from ..core.spec import Spec, spec, total_bytes
from .blobs import (
    CHANGED_HELP,
    Blob,
    FileBlob,
    Identity,
    Stored,
    StoredTensor,
    describe_change,
    difference,
)

if TYPE_CHECKING:
    from .grids import PartGrid
    from .pickle.policy import Outside
    from .torn_tensors import TornTensor
    from .tree import CheckpointTree
    from .unread import Unread


class SideFile(NamedTuple):
    """A small file beside the tensors. `path` is relative to the checkpoint, `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of one checkpoint, without data.

    `tensors` are in the order of the checkpoint. `files` names the weight files by blob number,
    relative to the checkpoint. `side_files` are carried along by a migration, `left_out` are files
    that never are. `items` are the non-tensor values by path, `metadata` is the format's own map of
    strings. `tree` is the structure of a checkpoint that is more than a flat dict of tensors; it
    also has the tensors that rules do not see, under keys that no other tensor has. `outside` lists
    what the reader refused to read, `carried` what of it stands in the tree to be written again,
    `unread` the entries that were left out with it, by path, and
    `notes` what it noticed. `sums()` maps (blob, offset) to the length and the CRC-32 of the bytes
    there, if the format records it. `shared` are the bytes of small tensors that were compared
    while the checkpoint was opened, by key: they decided what it holds. `torn` are tensors whose
    shards make none without loss. `module_versions` are those
    of a state dict in memory, `lifted` the values that tensors stand for, by key. Where files stand
    for tensors, `inside` is the index of what is in them. `grid` is how it was cut, where it is of
    parts with coordinates.
    """

    tensors: Mapping[str, StoredTensor]
    files: tuple[str, ...]
    side_files: tuple[SideFile, ...] = ()
    left_out: tuple[str, ...] = ()
    items: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    tree: CheckpointTree | None = None
    outside: tuple[Outside, ...] = ()
    carried: tuple[Outside, ...] = ()
    unread: Mapping[str, Unread] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sums: Callable[[], Mapping[tuple[int, int], tuple[int, int]]] = dict
    shared: Mapping[str, bytes] = field(default_factory=dict)
    torn: tuple[TornTensor, ...] = ()
    module_versions: Mapping[str, int] | None = None
    inside: Index | None = None
    grid: PartGrid | None = None
    lifted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def versions(self) -> Mapping[str, int] | None:
        """Module -> its version, as the `_metadata` of a state dict has them; None without."""
        return self.module_versions if self.tree is None else self.tree.versions

    @property
    def passed_through(self) -> Mapping[str, StoredTensor]:
        """The tensors that rules do not see."""
        return self.tree.passed_through if self.tree is not None else {}

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


class Source(Protocol):
    """An opened checkpoint. Call sequence: `format.open(path)`, read `index`, read blobs,
    `check_unchanged`, `close`.

    `history` is the stamp as it stands in the checkpoint; None without one.
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

        None where the bytes are in memory, so that nothing can tell later whether they changed.
        """

    def check_unchanged(self) -> None:
        """CheckpointError M905 naming each file whose device, inode, size or mtime changed."""

    def close(self) -> None:
        """Closes all descriptors; may be called twice."""


def with_all_tensors(source: Source) -> Source:
    """The source with the tensors that rules do not see among the others, as a run reads them; it
    is closed with `source`.
    """
    index = source.index
    if not index.passed_through:
        return source
    found = copy(source)
    found.index = replace(index, tensors={**index.tensors, **index.passed_through}, tree=None)
    return found


def with_files(source: Source, files: Mapping[str, int]) -> Source:
    """The source with these of its data files, key -> number, as all of its tensors: their bytes,
    as a run that copies them reads them. It is closed with `source`.
    """
    found, blobs = copy(source), source.blobs
    tensors = {key: Stored(spec("uint8", (blobs[n].size,)), n, 0) for key, n in files.items()}
    found.index = replace(source.index, tensors=tensors, tree=None, inside=source.index)
    return found


class FileSource:
    """A Source over files: what every format on disk returns.

    `side` reads one side file; `watched` are the identities of side files, by path, and `locate`
    gives what they are now. `release` closes what else is open, `suspend` does so until it is
    needed. `confirm` is the answer to the
    method of this name, where tensors were taken to be stored as others are. `save_id` is that of
    the run of `dcp.save` that wrote a distributed checkpoint, None where nothing says it.
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
        watched: Mapping[str, Identity] | None = None,
        locate: Callable[[str], Identity | None] = lambda path: None,
        release: Callable[[], None] | None = None,
        suspend: Callable[[], None] | None = None,
        confirm: Callable[[Iterable[Stored]], bool] = lambda places: True,
        save_id: str | None = None,
    ) -> None:
        self.path = path
        self.save_id = save_id
        self.format = format
        self.index = index
        self.history = history
        self._files, self._confirm = tuple(blobs), confirm
        # side files that lie elsewhere -> their sha256
        self.reference: Mapping[str, str] = {}
        self.blobs: Sequence[Blob] = self._files
        self._side, self._watched, self._locate = side, watched or {}, locate
        self._release, self._suspend = release, suspend

    def side_file(self, path: str) -> bytes:
        """The bytes of one of `index.side_files`, else KeyError; M905 if it changed since."""
        if self._side is None:
            raise KeyError(path)
        return self._side(path)

    def identities(self) -> Mapping[str, Identity]:
        """What each file was when it was opened or listed, by its path in the checkpoint."""
        return {**{blob.name: blob.identity for blob in self._files}, **self._watched}

    def confirm(self, places: Iterable[Stored]) -> bool:
        """Whether what lies at these places is what it was taken for when it was not looked at."""
        return self._confirm(places)

    def check_unchanged(self) -> None:
        """M905 naming every file that is not what it was when it was opened."""
        report = Report()
        changes = [(blob.name, blob.change()) for blob in self._files]
        changes += [
            (path, difference(then, self._locate(path))) for path, then in self._watched.items()
        ]
        for name, change in changes:
            if change:
                report.add("M905", describe_change(name, change), help=CHANGED_HELP)
        report.check()

    def suspend(self) -> None:
        """Closes the files until they are read again. What was decompressed stays."""
        for blob in self._files:
            blob.suspend()
        if self._suspend is not None:
            self._suspend()

    def reopen(self, numbers: Iterable[int]) -> None:
        """Opens these of the blobs, so that each read need not. M901 for one that cannot be opened,
        M905 for one that is not what it was.
        """
        for number in sorted(set(numbers)):
            if number < len(self._files):
                self._files[number].reopen()

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
        return (
            f"<{self.format} {listed([self.path])}: {len(self.index.tensors)} tensors in "
            f"{len(self._files)} files>"
        )
