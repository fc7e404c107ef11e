"""Moves the bytes of outputs into live tensors: straight into their memory, or through two buffers
that take turns.

Where a plain tensor lies on the CPU and has the output's dtype, its own memory is what bytes are
gathered into. Everything else goes chunk by chunk through a buffer: to a GPU, where the buffer is
pinned and one is read while the other one travels, and into another dtype. On the CPU the same
class runs without pinning and events: that is how its control flow is tested where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.spec import BITS
from ..formats.memory import writable
from ..running.evaluator import reading_step
from ..running.gather import Gather, Window
from .module import spec_of
from .outputs import torch_dtype

if TYPE_CHECKING:
    import torch

    from ..planning.graph import Tensor
    from ..running.evaluator import Evaluator
    from ..running.geometry import ByteLayouts
    from ..source.index import Source

# bytes that travel to a GPU at once; on the CPU a fill stays in the cache
AT_ONCE = 16 << 20


def direct(tensor: Tensor, target: torch.Tensor) -> bool:
    """Whether a plain, contiguous target can be gathered into: it is on the CPU, and holds what the
    output is.
    """
    return target.device.type == "cpu" and spec_of(target) == tensor.spec


class Stager:
    """One thread's buffers. Call sequence: `write` for ranges of outputs, `drain` before anybody
    reads what was written.
    """

    def __init__(
        self, source: Source, layouts: ByteLayouts, values: Evaluator, window: int
    ) -> None:
        """`window`: bytes of a source that may be held at a time for a transpose."""
        self._source, self._layouts, self._values, self._window = source, layouts, values, window
        self._stages = (_Stage(), _Stage())
        self._shown = Window()
        self._next = 0

    def step(self, tensor: Tensor) -> int:
        """The bytes that a range of the tensor should be a multiple of; 0 if it must be written
        whole.
        """
        layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        whole = (
            layout.windowed
            or layout.loose
            or not all(isinstance(source, str) for source in tensor.sources)
        )
        return 0 if whole else reading_step(tensor, self._layouts, self._values)

    def write(self, tensor: Tensor, target: torch.Tensor, start: int, stop: int) -> None:
        """Fills the part of a plain, contiguous target that bytes `start` to `stop` of the output
        make, cast as `copy_` casts.
        """
        step = reading_step(tensor, self._layouts, self._values)
        flat = target.detach().view(-1)
        if direct(tensor, target):
            gather = self._gather(writable(flat))
            if self._long(tensor):
                step = max(1, stop - start)
            for first in range(start, stop, step):
                gather.fill(tensor, first, min(first + step, stop), first)
            return
        dtype, size = torch_dtype(tensor.spec), BITS[tensor.spec.dtype] // 8
        chunk = step if target.device.type == "cpu" else max(1, AT_ONCE // step) * step
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            stage = self._turn(last - first, target.device)
            for at in range(first, last, step):
                stage.gather.fill(tensor, at, min(at + step, last), at - first)
            stage.send(last - first, dtype, flat[first // size : last // size])
        for stage in self._stages:
            if stage.gather is not None:
                stage.gather.release()

    def drain(self) -> None:
        """Waits for all that was sent."""
        for stage in self._stages:
            stage.wait()

    def _long(self, tensor: Tensor) -> bool:
        """Whether the output is read in stretches, straight to where they belong: then nothing is
        gained by small steps.
        """
        layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        stored = not layout.loose and all(isinstance(source, str) for source in tensor.sources)
        return stored and not any(move.loops for move in layout.moves)

    def _turn(self, nbytes: int, device: torch.device) -> Any:
        stage = self._stages[self._next]
        self._next = 1 - self._next
        stage.wait()
        memory = stage.room(nbytes, device)
        if memory is not None:
            stage.gather = self._gather(memory)
        return stage

    def _gather(self, memory: memoryview) -> Gather:
        return Gather(
            self._source, self._layouts, memory, self._values.leaf, self._window, self._shown
        )


class _Stage:
    """A buffer on the host, what gathers into it, and its copy on the device where elements are
    cast there.
    """

    __slots__ = ("_there", "gather", "host", "sent")

    def __init__(self) -> None:
        self.host: Any = None
        self.gather: Any = None
        self.sent: Any = None
        self._there: Any = None

    def room(self, nbytes: int, device: torch.device) -> memoryview | None:
        """New memory if the buffer does not hold so many bytes for this device; None if it does."""
        import torch

        pinned = device.type == "cuda"
        if (
            self.host is not None
            and len(self.host) >= nbytes
            and (self.host.is_pinned() or not pinned)
        ):
            return None
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return memoryview(self.host.numpy())

    def send(self, nbytes: int, dtype: Any, place: torch.Tensor) -> None:
        """Copies what was gathered into its place, and returns before it is there if that is on a
        GPU.
        """
        import torch

        host, device = self.host[:nbytes], place.device
        if device.type == "cpu" or place.dtype == dtype:
            place.copy_(host.view(dtype), non_blocking=True)
        else:
            # elements are cast on the device: on the host a cast would need a third buffer
            if self._there is None or self._there.device != device or len(self._there) < nbytes:
                self._there = torch.empty(len(self.host), dtype=torch.uint8, device=device)
            self._there[:nbytes].copy_(host, non_blocking=True)
            place.copy_(self._there[:nbytes].view(dtype))
        if device.type == "cuda":
            self.sent = torch.cuda.Event()
            self.sent.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Returns when the buffer may be filled again."""
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None
