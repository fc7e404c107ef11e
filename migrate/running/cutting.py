"""How an output file is cut: into tiles, which the journal counts in, and these into fills.

A tile is some MiB of one file: what a kill can cost. A tile is made of fills, that is of what goes
through the buffer at once. The cut depends on the plan alone, so a resumed run finds the same, and
so does another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .evaluator import Evaluator, reading_step
from .gather import Batch, Sealed, Segment
from .geometry import STAGE, ByteLayouts
from .publish import TILE

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.target import OutputFile, Target


class Tile(NamedTuple):
    """What the journal counts in."""

    number: int
    offset: int
    length: int
    fills: list[Batch]


def tiles(
    file: OutputFile,
    outputs: Mapping[str, Tensor],
    layouts: ByteLayouts,
    values: Evaluator | None = None,
) -> Iterator[Tile]:
    """The tiles of a file, in order, without gaps. ValueError if target and outputs do not fit."""
    number, first, fills = 0, 0, []
    offset = 0
    for fill in _fills(file, outputs, layouts, values):
        fills.append(fill)
        offset = fill.offset + fill.length
        if offset - first >= TILE:
            yield Tile(number, first, offset - first, fills)
            number, first, fills = number + 1, offset, []
    if fills:
        yield Tile(number, first, offset - first, fills)
    if offset != file.size:
        raise ValueError(f"{file.name}: tensors end at {offset}, the file at {file.size}")


def _fills(
    file: OutputFile, outputs: Mapping[str, Tensor], layouts: ByteLayouts, values: Evaluator | None
) -> Iterator[Batch]:
    offset = used = 0
    parts: list[Segment] = []
    for content, start, nbytes, begin in _contents(file, outputs):
        if start != offset + used:
            raise ValueError(f"{file.name}: a hole between {offset + used} and {start}")
        step = (
            STAGE
            if isinstance(content, (bytes, Sealed))
            else reading_step(content, layouts, values)
        )
        if used and used + nbytes > STAGE:
            yield Batch(offset, used, parts)
            offset, parts, used = offset + used, [], 0
        end = begin + nbytes
        for first in range(begin, end, step):
            last = min(first + step, end)
            parts.append(Segment(content, first, last, used, last == end))
            used += last - first
            if used >= min(step, STAGE):
                yield Batch(offset, used, parts)
                offset, parts, used = offset + used, [], 0
    if used:
        yield Batch(offset, used, parts)


def _contents(
    file: OutputFile, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor | bytes | Sealed, int, int, int]]:
    """(content, offset in the file, bytes, the first of its bytes) of all that the file is of."""
    yield file.header, 0, len(file.header), 0
    stops = [placed.offset for placed in file.tensors[1:]] + [file.size]
    for number, (placed, stop) in enumerate(zip(file.tensors, stops, strict=False)):
        tensor = outputs[placed.key]
        yield tensor, placed.offset, placed.nbytes, placed.start
        end = placed.offset + placed.nbytes
        if file.seal is not None and end < stop:
            yield Sealed(number + 1), end, stop - end, 0


def check_places(outputs: Mapping[str, Tensor], target: Target) -> None:
    """ValueError unless the files hold each tensor that they hold a part of whole, its bytes in
    their order: once, or as often as several files want a copy.
    """
    left: dict[str, int] = {}
    for placed in (placed for file in target.files for placed in file.tensors):
        nbytes = outputs[placed.key].spec.nbytes
        missing = left.get(placed.key) or nbytes
        if nbytes - missing != placed.start:
            raise ValueError(
                f"{placed.key!r} is placed from byte {placed.start} on, not from {nbytes - missing}"
            )
        left[placed.key] = missing - placed.nbytes
    for key, missing in left.items():
        if missing:
            nbytes = outputs[key].spec.nbytes
            raise ValueError(f"{key!r} has {nbytes} bytes, its places have {nbytes - missing}")
