"""A run into memory: each output gathered straight into the buffer that will be its tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import checks as value_checks
from .device import CPU, Device
from .error_statistics import Ledger
from .evaluator import Evaluator, reading_step
from .gather import WINDOW, Gather
from .geometry import ByteLayouts
from .options import MAX_MEMORY

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

    `ledger` is told the errors of what is computed.
    """
    layouts = ByteLayouts()
    values = Evaluator(source, layouts, outputs.values(), max_memory, ledger=ledger, device=device)
    values.require(outputs.values())
    value_checks.require_checks(checks, source, max_memory)
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
    """Fills the buffer with the packed bytes of one output, and lets go of what was computed for
    it.
    """
    nbytes = tensor.spec.nbytes
    step = reading_step(tensor, layouts, values)
    gather = Gather(source, layouts, buffer, values.leaf, min(WINDOW, max_memory // 4))
    for start in range(0, nbytes, step):
        gather.fill(tensor, start, min(start + step, nbytes), start)
    gather.release()
    values.done(tensor)
