"""Outputs whose chunks were each encoded for itself: `--chunks` with `requantize` cut them inside
of blocks. They make no whole tensor that could be compared, so each chunk is made again from the
numbers of the whole, as the run made it, and compared with what lies there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..core import view as views
from ..core.errors import printable
from ..core.spec import Spec
from ..planning.graph import Tensor
from ..planning.requantized import box_of, cut_from, numbers_of, why_not, why_unread
from ..source.blobs import ChunkedTensor, ChunkOf
from ..source.pickle.tree import PARAMETER
from ..source.quantized_layouts import layout_of
from .eager import evaluated
from .padding import FilledUp, without_padding

if TYPE_CHECKING:
    from ..planning.request import Request
    from ..source.index import Source
    from ..source.torn_tensors import TornShard, TornTensor


@dataclass(slots=True)
class TornOutputs:
    """What was compared: the `keys` of all components, those that differ, and those that differ in
    padding only.
    """

    keys: set[str] = field(default_factory=set)
    differences: list[dict[str, str]] = field(default_factory=list)
    padding: list[str] = field(default_factory=list)


def compare_torn(
    outputs: Mapping[str, Tensor], opened: Source, made: Source, request: Request
) -> TornOutputs:
    """Compares the torn tensors of `made` with what `outputs`, over `opened`, give when they are
    cut at the same places. What no run of `migrate` cuts so is left alone, and refused when it is
    read.
    """
    found, seen = TornOutputs(), set[int]()
    for key, at in made.index.tensors.items():
        if not isinstance(at, ChunkedTensor) or at.torn is None or id(at.torn.tensor) in seen:
            continue
        seen.add(id(at.torn.tensor))
        _compare(at.torn.tensor, at.torn.siblings(key), outputs, opened, made, request, found)
    return found


def _compare(
    torn: TornTensor,
    keys: Mapping[str, str],
    outputs: Mapping[str, Tensor],
    opened: Source,
    made: Source,
    request: Request,
    found: TornOutputs,
) -> None:
    encoding, numbering = torn.encoding, request.params.get(PARAMETER)
    if numbering is not None:
        encoding = encoding.read_as(numbering)
    if any(key not in outputs for key in keys.values()):
        return
    parts = {name: outputs[key] for name, key in keys.items()}
    specs = {name: part.spec for name, part in parts.items()}
    dtypes = {name: spec.dtype for name, spec in specs.items()}
    if why_unread(encoding, dtypes) or any(
        shard.encoding is None
        or shard.chunks.keys() != keys.keys()
        or why_not(box_of(encoding, shard.sizes), dtypes)
        for shard in torn.shards
    ):
        return
    every = tuple(keys.values())
    whole = numbers_of(encoding, parts, every)
    calls: dict[int, Any] = {}
    # what decodes the whole is needed for each shard
    evaluated(opened, whole, calls)
    differ: dict[str, str] = {}
    padding: set[str] = set()
    for shard in torn.shards:
        due = cut_from(whole, encoding, specs, (shard.starts, shard.sizes), every)
        own = dict(calls)
        for name, one in due.items():
            there = _chunk(made, keys[name], shard.chunks[name])
            what = _difference(one, there, opened, made, own, _filled(torn, shard, name))
            if what == "":
                padding.add(keys[name])
            elif what is not None:
                differ.setdefault(keys[name], f"the chunk at {list(shard.starts)} {what}")
    found.keys.update(every)
    found.differences += [{"key": key, "what": what} for key, what in differ.items()]
    found.padding += [key for key in every if key in padding and key not in differ]


def _chunk(source: Source, key: str, number: int) -> Tensor:
    """A chunk as a tensor by itself."""
    at = source.index.tensors[key]
    if not isinstance(at, ChunkedTensor):
        raise TypeError(printable(key))
    chunk = at.chunks[number]
    view = views.stored(0, chunk.spec.shape, chunk.strides)
    return Tensor(chunk.spec, view, (ChunkOf(key, number),))


def _difference(
    due: Tensor,
    there: Tensor,
    opened: Source,
    made: Source,
    calls: dict[int, Any],
    filled: FilledUp | None,
) -> str | None:
    """How a chunk differs, empty if only in padding; None if it does not."""
    if due.spec != there.spec:
        return f"is {there.spec}, planned was {due.spec}"
    a, b = evaluated(opened, due, calls), evaluated(made, there, {})
    count = _unlike(a, b)
    if not count:
        return None
    if filled is not None and not _unlike(without_padding(a, filled), without_padding(b, filled)):
        return ""
    return f"has {count} of {a.size} elements that differ"


def _unlike(a: Any, b: Any) -> int:
    """How many elements differ in their bytes."""
    import numpy as np

    x, y = (np.ascontiguousarray(one).view("u1").reshape(one.size, -1) for one in (a, b))
    return int(np.count_nonzero((x != y).any(axis=1)))


def _filled(torn: TornTensor, shard: TornShard, name: str) -> FilledUp | None:
    """How a component of a shard is filled up; None if it is not."""
    encoding = replace(torn.encoding, shape=shard.sizes)
    layout = layout_of(encoding)
    grid = layout.grids.get(name) if layout is not None else None
    if grid is None or grid.tile == (1, 1):
        return None
    return FilledUp(grid.borders(Spec("uint8", ())), shard.sizes, 0)
