"""A state dict migrated in memory: each output is gathered into a new tensor, and tied tensors come out tied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..formats import memory
from ..planning.question import Question
from ..running.buffers import fill
from ..running.device import CPU, Device
from ..running.errors import Ledger
from ..running.ties import tied
from ..running.values import MAX_MEMORY
from .migration import prepare

if TYPE_CHECKING:
    from ..formats.memory import MemorySource
    from ..planning.graph import Graph
    from ..planning.values import Values


def migrated(
    tensors: Mapping[str, Any],
    question: Question,
    max_memory: int = MAX_MEMORY,
    device: Device = CPU,
    inform: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """The state dict as the question wants it; `inform` is told what a run into files would have in its answer, as far as it applies."""
    source = memory.open(tensors)
    try:
        found = prepare(source, question)
        ledger = Ledger(found.composition.graph.outputs) if inform is not None else None
        made = materialise(found.composition.graph, source, max_memory, device, ledger, found.composition.values)
    finally:
        source.close()
    if inform is not None:
        inform({**found.said(), "report": None if ledger is None else ledger.report(complete=True)})
    return made


def materialise(
    graph: Graph, source: MemorySource, max_memory: int = MAX_MEMORY, device: Device = CPU, ledger: Ledger | None = None,
    values: Values | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The outputs as new CPU tensors, row-major, and the values that are no tensors under what they are called now.

    `ledger` is told the errors of what is computed.
    """
    first = tied(graph.outputs, source.index.tensors)
    own = {key: tensor for key, tensor in graph.outputs.items() if first[key] == key}
    tensors, buffers = memory.allocate({key: t.spec for key, t in own.items()})
    fill(own, source, buffers, checks=graph.checks, max_memory=max_memory, device=device, ledger=ledger)
    made = {key: tensors[first[key]] for key in graph.outputs}
    items = source.index.items
    names = values.names if values is not None else {key: key for key in items}
    return {**made, **{name: items[was] for name, was in names.items() if name not in made}}
