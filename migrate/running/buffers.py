"""Outputs made in memory: each one's packed bytes, in a buffer of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .checks import require_checks
from .error_statistics import Ledger
from .evaluator import Evaluator, reading_step
from .gather import WINDOW, Gather
from .geometry import ByteLayouts
from .resources import CPU, MAX_MEMORY, Device

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.index import Source


def fill_buffers(
    outputs: Mapping[str, Tensor],
    source: Source,
    buffers: Mapping[str, memoryview],
    *,
    checks: Sequence[ValueCheck] = (),
    max_memory: int = MAX_MEMORY,
    device: Device = CPU,
    ledger: Ledger | None = None,
) -> None:
    """Fills `buffers[key]` with the packed bytes of each output; checks come first and raise before
    anything is written.

    `ledger` gets the errors of what is computed.
    """
    layouts = ByteLayouts()
    values = Evaluator(source, layouts, outputs.values(), max_memory, ledger=ledger, device=device)
    values.require(outputs.values())
    require_checks(checks, source, max_memory)
    for key, tensor in outputs.items():
        fill_buffer(tensor, source, layouts, values, buffers[key], max_memory)
    source.check_unchanged()


def fill_buffer(
    tensor: Tensor,
    source: Source,
    layouts: ByteLayouts,
    values: Evaluator,
    buffer: memoryview,
    max_memory: int = MAX_MEMORY,
) -> None:
    """Fills the buffer with one output's packed bytes, and frees what was computed for it."""
    nbytes = tensor.spec.nbytes
    step = reading_step(tensor, layouts, values)
    gather = Gather(source, layouts, buffer, values.leaf, min(WINDOW, max_memory // 4))
    for start in range(0, nbytes, step):
        gather.fill(tensor, start, min(start + step, nbytes), start)
    gather.release()
    values.done(tensor)
