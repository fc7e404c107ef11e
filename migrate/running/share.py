"""Lets the file system share the bytes that a migration only moves: XFS, Btrfs and others can put
one extent into two files.

A clone needs whole blocks that lie alike in both files, so the header of the output is padded to
that end when it is planned (`origins_of`), and the blocks at the edges of a run are copied. All
clones are made before the first tile, in place of the allocation: a full disk still shows at once,
and what is shared is never asked for. Each tile is read from the source and hashed as ever; only
the write is left out. A source that changes meanwhile is found by `check_unchanged`, as for a copy.

No clone is needed for the right bytes. Whatever the system answers, what was not cloned is written;
if the disk is full or broken, that write says so.
"""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import ioctl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..planning.graph import ComputedTensor
from ..source.blobs import chunk_at, release
from .geometry import ByteLayouts

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.blobs import Blob
    from ..source.index import Source
    from ..source.target import OutputFile, Target

# what the name of a file begins with that is gone at once
SCRATCH = "scratch-"
# shorter runs are copied: each clone costs an extent in both files
LEAST = 1 << 20
# a clone writes the source's dirty pages out first; between two an interrupt is heard
AT_ONCE = 1 << 30
# linux/fs.h: _IOW(0x94, 13, struct file_clone_range), and that struct
_FICLONERANGE = 0x4020940D
_CLONE_RANGE = "=qQQQ"


class Extent(NamedTuple):
    """`nbytes` from `at` of an output file, which are at `origin` of the source's blob `blob`."""

    at: int
    nbytes: int
    blob: int
    origin: int


def shared_extents(
    file: OutputFile, outputs: Mapping[str, Tensor], source: Source, layouts: ByteLayouts
) -> list[Extent]:
    """What a file copies contiguously, in its order, across tensors where both sides go on."""
    stored, stretches = source.index.tensors, _stretches(layouts)
    found: list[Extent] = []
    for key, offset, nbytes, start in file.tensors:
        tensor = outputs[key]
        for leaf, origin, at, length in _within(stretches(tensor), start, start + nbytes):
            name = tensor.sources[leaf]
            if isinstance(name, ComputedTensor):
                continue
            place = chunk_at(stored, name)
            run = Extent(offset + at, length, place.blob, place.offset + origin)
            last = found[-1] if found else run
            if (last.at + last.nbytes, last.blob, last.origin + last.nbytes) == (
                run.at,
                run.blob,
                run.origin,
            ):
                found[-1] = last._replace(nbytes=last.nbytes + length)
            else:
                found.append(run)
    return found


def origins_of(
    outputs: Mapping[str, Tensor], source: Source
) -> Callable[[str], list[tuple[int, int]]]:
    """For an output key: (where its first byte would stand in the source's file, bytes) of each of
    its stretches.

    An output file that puts the key there modulo the size of a page can share these bytes, if they
    lie in a file. Whether they do does not count here: headers, and with them the digest, must not
    depend on what holds the bytes.
    """
    stored, stretches = source.index.tensors, _stretches(ByteLayouts())

    def of(key: str) -> list[tuple[int, int]]:
        tensor = outputs[key]
        found = []
        for leaf, origin, at, length in stretches(tensor):
            name = tensor.sources[leaf]
            if not isinstance(name, ComputedTensor):
                found.append((chunk_at(stored, name).offset + origin - at, length))
        return found

    return of


def _stretches(layouts: ByteLayouts) -> Callable[[Tensor], list[tuple[int, int, int, int]]]:
    """The stretches of a tensor's layout, listed once for all that share its view."""
    known: dict[tuple[int, str], list[tuple[int, int, int, int]]] = {}

    def of(tensor: Tensor) -> list[tuple[int, int, int, int]]:
        kind = (id(tensor.view), tensor.spec.dtype)
        found = known.get(kind)
        if found is None:
            found = known[kind] = list(
                layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes).stretches(LEAST)
            )
        return found

    return of


def _within(
    stretches: Sequence[tuple[int, int, int, int]], start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    """What of the stretches lies in bytes `start` to `stop` of the tensor, counted from `start`."""
    for leaf, origin, at, length in stretches:
        low, high = max(at, start), min(at + length, stop)
        if low < high:
            yield leaf, origin + low - at, low - start, high - low


class Shared:
    """What the files of one target share with the source.

    Call sequence: `Shared(...)` probes once for each device of the source, `nbytes` for the space
    check, `clone` for each file; then `gaps` says what of a file has to be allocated and written.
    """

    def __init__(
        self,
        outputs: Mapping[str, Tensor],
        source: Source,
        target: Target,
        layouts: ByteLayouts,
        folder: Path,
    ) -> None:
        self._blobs = source.blobs
        self._devices = [
            -1 if blob.identity is None else blob.identity.device for blob in source.blobs
        ]
        self._block = os.statvfs(folder).f_bsize
        self._sharing: dict[int, bool] = {}
        for blob, device in zip(source.blobs, self._devices, strict=True):
            if (
                blob.identity is not None
                and device not in self._sharing
                and blob.size >= self._block
            ):
                self._sharing[device] = self._probe(blob, folder)
        self._clones: dict[str, list[Extent]] = {file.name: [] for file in target.files}
        for file in target.files if any(self._sharing.values()) else ():
            long = (
                run for run in shared_extents(file, outputs, source, layouts) if run.nbytes >= LEAST
            )
            self._clones[file.name] = sorted(whole for run in long for whole in self._blocks(run))

    def nbytes(self, name: str) -> int:
        """Bytes of the file that take no space of their own."""
        return sum(run.nbytes for run in self._clones[name])

    def clone(self, name: str, descriptor: int) -> None:
        """Clones the source's extents into a file of full size; asks a refusing device once."""
        made = []
        for run in self._clones[name]:
            device = self._devices[run.blob]
            if not self._sharing[device]:
                continue
            try:
                with self._blobs[run.blob].hold() as source:
                    for first in range(0, run.nbytes, AT_ONCE):
                        clone_extent(
                            source,
                            run.origin + first,
                            descriptor,
                            run.at + first,
                            min(AT_ONCE, run.nbytes - first),
                        )
                made.append(run)
            except OSError:
                self._sharing[device] = False
        self._clones[name] = made

    def gaps(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of `start` to `stop` of the file that are not cloned, in order."""
        clones = self._clones[name]
        for i in range(bisect_right(clones, start, key=_end), len(clones)):
            run = clones[i]
            if run.at >= stop:
                break
            if run.at > start:
                yield start, run.at
            start = _end(run)
        if start < stop:
            yield start, stop

    def _blocks(self, run: Extent) -> Iterator[Extent]:
        """The whole blocks of a run on a sharing device; none if they are aligned differently."""
        head = -run.at % self._block
        nbytes = (run.nbytes - head) // self._block * self._block
        if (
            nbytes > 0
            and (run.at - run.origin) % self._block == 0
            and self._sharing.get(self._devices[run.blob])
        ):
            yield Extent(run.at + head, nbytes, run.blob, run.origin + head)

    def _probe(self, blob: Blob, folder: Path) -> bool:
        """Whether a block of the source could be cloned, into a file that is gone at once."""
        try:
            with scratch_file(folder) as descriptor, blob.hold() as source:
                clone_extent(source, 0, descriptor, 0, self._block)
        except OSError:
            return False
        return True


@contextmanager
def scratch_file(folder: Path, mark: str = "") -> Iterator[int]:
    """A new file in the folder, without a name, within the context. OSError if impossible. `mark`
    tells it from those of processes of the same number on other machines.
    """
    place = folder / f"{SCRATCH}{os.getpid()}{mark}"
    # what a killed process left, or another user put there; the file itself is not touched
    with suppress(FileNotFoundError):
        os.unlink(place)
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(place)
        yield descriptor
    finally:
        release(descriptor)


def clone_extent(source: int | None, origin: int, target: int, at: int, nbytes: int) -> None:
    """Makes `nbytes` at `at` share extents of another file at `origin`; OSError if it cannot."""
    if source is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    ioctl(target, _FICLONERANGE, struct.pack(_CLONE_RANGE, source, origin, nbytes, at))


def _end(run: Extent) -> int:
    return run.at + run.nbytes
