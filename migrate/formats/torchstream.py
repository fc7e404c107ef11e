"""A state in memory as the `.pt` that torch.save would make of it, without the file.

The stream is read by the decoder of files, so nesting, optimizers, values, ties and quantized
objects are what they are in a `.pt`; the bytes of the tensors stay where they lie.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Final

from ..core.errors import fail
from ..source.blobs import FilelessBlob
from ..source.index import Index
from ..source.jsontext import collector_paused
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import ARCHIVE
from ..source.pickle.policy import decode
from ..source.zip_archive import ArchiveRecord
from .memory import MemorySource
from .torchzip import Raw, index_of, read_file

# nothing on disk is in this format
FORMAT = None
# storages begin at multiples of it, as no element is larger
_ALIGN: Final = 64


class StoragesBlob(FilelessBlob):
    """The bytes of several storages, one behind the other with gaps.

    `storages` are writable or read-only flat buffers; `ready` returns when their bytes are there.
    """

    __slots__ = ("_starts", "name", "ready", "size", "storages")

    def __init__(
        self, name: str, storages: Sequence[memoryview], ready: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.storages, self.ready = name, storages, ready
        self._starts = [0, *accumulate(-(-one.nbytes // _ALIGN) * _ALIGN for one in storages)]
        self.size = self._starts[-1]

    @property
    def starts(self) -> Sequence[int]:
        """Where each storage begins, and the end."""
        return self._starts

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 beyond the storage that it lies in."""
        import numpy as np

        self.ready()
        number = bisect_right(self._starts, offset) - 1
        if not buffer.nbytes:
            return
        begin = offset - self._starts[number]
        end = begin + buffer.nbytes
        if number >= len(self.storages) or end > self.storages[number].nbytes:
            fail(
                "M905",
                f"{self.name}: no storage holds the bytes {offset} to {offset + buffer.nbytes}",
            )
        # numpy lets go of the interpreter while it copies, a memoryview does not
        np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(self.storages[number], np.uint8)[
            begin:end
        ]

    def again(self) -> StoragesBlob:
        """The same bytes, closed by itself."""
        return StoragesBlob(self.name, self.storages, self.ready)

    def close(self) -> None:
        """Lets go of the storages."""
        self.storages, self.ready = (), lambda: None


class StateSource(MemorySource):
    """A Source over a stream of torch.save and the storages that it names by number."""

    def __init__(self, index: Index, blob: StoragesBlob) -> None:
        super().__init__(index, (blob,))
        self._blob = blob

    @property
    def storages(self) -> Sequence[memoryview]:
        """The bytes of each storage, by its number in the stream."""
        return self._blob.storages

    def ready(self) -> None:
        """Returns when the bytes are there."""
        self._blob.ready()

    def again(self) -> StateSource:
        """The same, closed by itself."""
        return StateSource(self.index, self._blob.again())

    def close(self) -> None:
        self._blob.close()
        super().close()


def open_stream(
    stream: bytes,
    storages: Sequence[memoryview],
    label: str,
    at: str | None,
    *,
    rest: bool,
    ready: Callable[[], None] = lambda: None,
) -> StateSource:
    """The state as a Source; `rest` says whether what stands around the dict of rules comes along.

    M930 to M936, M940 to M945 as for a file.
    """
    blob = StoragesBlob(label, storages, ready)
    places: dict[str, Any] = {
        str(number): ArchiveRecord(f"data/{number}", blob.starts[number], one.nbytes, None)
        for number, one in enumerate(storages)
    }
    with collector_paused():
        nodes = read_pickle(stream, ARCHIVE, name=label, persistent=True)
        sizes = {key: record.size for key, record in places.items()}
        decoded = decode(nodes, label, sizes)
        raw = Raw(decoded.tree, places, decoded.outside, None, decoded.hidden, (0, 0), summed=False)
        held = read_file(None, 0, label, at, raw, rest=rest)
    return StateSource(index_of([label], [[held]], label), blob)
