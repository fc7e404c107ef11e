"""A state dict migrated in memory: each output is gathered into a new tensor, and tied tensors come out tied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..formats import memory
from ..running.buffers import fill
from ..running.device import CPU, Device
from ..running.ties import tied
from ..running.values import MAX_MEMORY

if TYPE_CHECKING:
    from ..formats.memory import MemorySource
    from ..planning.graph import Graph


def materialise(graph: Graph, source: MemorySource, max_memory: int = MAX_MEMORY, device: Device = CPU) -> dict[str, Any]:
    """The outputs as new CPU tensors, row-major; values that are not tensors are carried over under their keys."""
    first = tied(graph.outputs, source.index.tensors)
    own = {key: tensor for key, tensor in graph.outputs.items() if first[key] == key}
    tensors, buffers = memory.allocate({key: t.spec for key, t in own.items()})
    fill(own, source, buffers, checks=graph.checks, max_memory=max_memory, device=device)
    made = {key: tensors[first[key]] for key in graph.outputs}
    return {**made, **{key: value for key, value in source.index.items.items() if key not in made}}
