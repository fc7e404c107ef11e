"""What a format is: the contract of `FORMAT` in a module here, or behind an entry point of the
group `migrate.formats`.

Its nouns lie where every floor can reach them, and are named here for authors of formats: a
`Place` is opened as a `Source` with an `Index` of `Stored` tensors in `Blob`s, or of
`ChunkedTensor`s where one lies in several places; an output is a `Target` of `OutputFile`s with
tensors `Placed` in them, and of what a `TargetTree` holds beside.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..source.blobs import Blob, ChunkedTensor, Stored
from ..source.index import FileSource, Index, SideFile, Source
from ..source.paths import Folder, Place
from ..source.target import OutputFile, Placed, Target, TargetTree

if TYPE_CHECKING:
    from ..source.shards import Naming

__all__ = [
    "Blob", "ChunkedTensor", "FileSource", "Folder", "Format", "Index", "OutputFile", "Place",
    "Placed", "SideFile", "Source", "Stored", "Target", "TargetTree",
]  # fmt: skip


# what `sniff` answers where no other format needs to be asked
SURE = 2


class Format(Protocol):
    """What a module's `FORMAT` offers. `name` is what `--output-format` and messages call it.

    It may have `suffixes` as well, a tuple of what its files end in: where a file is called so,
    this format is asked before the others.
    """

    name: str

    def sniff(self, place: Place) -> int:
        """How sure it is that the place holds it, by names and head: 0 not, 1 perhaps, 2 sure."""

    def open(self, place: Place) -> Source:
        """The opened checkpoint; it closes the place with itself. On an error the caller does."""

    def describe(
        self,
        specs: Mapping[str, Any],
        *,
        folder: bool,
        max_shard_size: int,
        metadata: Mapping[str, str],
        stamp: str | None,
        origins: Callable[[str], Iterable[tuple[int, int]]] | None = None,
        ranks: Naming | None = None,
        tree: TargetTree | None = None,
        last: Container[str] = (),
    ) -> Target:
        """The whole output for these specs, every header and offset; M916 if it cannot hold them.

        `origins(key)` are (offset, bytes) pairs: so many bytes of the tensor can share the source's
        blocks if it starts at that offset, but for whole pages. A format that cannot choose where
        its tensors lie passes it over. Keys of ranks (`key@1`) make a file for each rank; `ranks`
        is how they are called, and asks for such a name for a single one too. `last` are keys to be
        written after all others of their file, where the format leaves a choice: they fall out of
        computing others. `tree` is what the output holds beside: whether it can, or loses nothing
        by dropping it, is up to the format, which notes what it has no place for. The format `dcp`
        takes `chunks` as well: for how many ranks tensors are cut; the format `parts` takes `grid`,
        a `WrittenGrid`: the parts that are written.
        """
