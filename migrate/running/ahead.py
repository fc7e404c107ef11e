"""What is read for tensors, in the order in which it is needed, so that a store can fetch it before
it is asked for. Of a source on this machine nothing is worked out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..planning.graph import ComputedTensor, Tensor, stored_sources
from ..source.blobs import Stretch, chunk_at, chunks_of, foreseeing

if TYPE_CHECKING:
    from ..source.index import Source
    from ..source.target import OutputFile
    from .geometry import ByteLayouts
    from .publish import Partial

# of bytes that are spread wider than so many times their number, no stretch is fetched as a whole
_SPREAD = 2


def reading_ahead(
    parts: Iterable[tuple[Tensor, int, int]],
    source: Source,
    layouts: ByteLayouts,
    max_memory: int,
) -> AbstractContextManager[None]:
    """Fetches what the bytes `start` to `stop` of these tensors are read from, in their order, as
    long as the context is open.
    """
    return foreseeing(source.blobs, _stretches(parts, source, layouts), max_memory)


def reading_file(
    file: OutputFile,
    partial: Partial,
    outputs: Mapping[str, Tensor],
    source: Source,
    layouts: ByteLayouts,
    max_memory: int,
) -> AbstractContextManager[None]:
    """`reading_ahead` for what an output file holds, but for what an earlier run says to have
    written.
    """
    after = partial.claimed(file) if partial.claims else 0
    parts = (
        (outputs[p.key], p.start + max(0, min(after - p.offset, p.nbytes)), p.start + p.nbytes)
        for p in file.tensors
    )
    return reading_ahead(parts, source, layouts, max_memory)


def reading_keys(
    keys: Iterable[str], source: Source, max_memory: int | None = None
) -> AbstractContextManager[None]:
    """Fetches these stored tensors whole, in their order, as long as the context is open."""
    stored = source.index.tensors
    stretches = (
        Stretch(at.blob, at.offset, at.offset + at.spec.nbytes)
        for key in keys
        if key in stored
        for at in chunks_of(stored[key])
    )
    return foreseeing(source.blobs, stretches, max_memory)


def _stretches(
    parts: Iterable[tuple[Tensor, int, int]], source: Source, layouts: ByteLayouts
) -> Iterator[Stretch]:
    stored = source.index.tensors
    for tensor, start, stop in parts:
        if start >= stop:
            continue
        layout = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        if layout.loose or any(isinstance(one, ComputedTensor) for one in tensor.sources):
            for name in stored_sources(tensor):
                at = chunk_at(stored, name)
                yield Stretch(at.blob, at.offset, at.offset + at.spec.nbytes, True)
            continue
        for move in layout.cut(start, stop):
            source_of = tensor.sources[move.leaf] if move.pattern is None else None
            if source_of is None or isinstance(source_of, ComputedTensor):
                continue
            if move.hi - move.lo <= _SPREAD * move.nbytes:
                at = chunk_at(stored, source_of)
                again = bool(move.loops)
                yield Stretch(at.blob, at.offset + move.lo, at.offset + move.hi, again)
