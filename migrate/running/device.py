"""Where ops compute: here, or on a GPU through pinned staging buffers.

Boxes of the inputs are copied to the device on one stream, computed on a second, and copied back on
a third. Two sets of buffers take turns, so that one box is read and copied while the one before it
is computed. With "cpu" as device the same class runs without pinning and streams: that is how its
control flow is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.errors import fail, option, printable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..ops.base import ValueOp

NAMES = ("cpu", "cuda", "cuda:all")

# computes from input arrays into an output array, all on one device
Run: TypeAlias = "Callable[[list[Any], Any], None]"


@dataclass(frozen=True, slots=True)
class Device:
    """What computes. `every`: also ops whose bits differ between CPU and GPU run on the GPU."""

    name: str = "cpu"
    every: bool = False

    def takes(self, op: ValueOp, dtype: np.dtype[Any]) -> bool:
        """Whether `op` runs on this device if it is not the CPU. Elements of 16 bytes have no
        integers in torch.
        """
        return (self.every or op.same_bits) and dtype.itemsize <= 8

    def lane(self) -> Lane | None:
        """A thread's way to the device; None for the CPU, where arrays are computed on where they
        are.
        """
        return Lane(self.name) if self.name != "cpu" else None


CPU = Device()


def parse_device(name: str) -> Device:
    """The device that a person means. QuestionError M115 for a name that is none, M407 if torch
    finds no GPU.
    """
    if name not in NAMES:
        fail(
            "M115", f"there is no device {printable(repr(name))}", help=f"one of {', '.join(NAMES)}"
        )
    if name == "cpu":
        return CPU
    import torch

    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no GPU"
        )
        fail(
            "M407",
            f"{option('device', name)}: {why}",
            help=f"leave {option('device')} out: the CPU gives the same bytes",
        )
    return Device("cuda", name == "cuda:all")


def resolve_device(device: Any) -> tuple[Any, Device]:
    """The torch device that tensors shall be on, and what computes for it; (None, CPU) for None.

    `device` is a name as torch's, or a torch.device. QuestionError M115 for what is none, M407 if
    torch finds no GPU.
    """
    if device is None:
        return None, CPU
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        fail(
            "M115",
            f"there is no device {printable(repr(device))}: {printable(str(error), 80)}",
            help="a name as torch.device takes it",
        )
    if found.type != "cuda":
        return found, CPU
    parse_device("cuda")
    return found, Device(str(found))


class Lane:
    """One thread's streams and its two sets of buffers. Call sequence: `submit` for each box,
    `drain` before results are used.
    """

    __slots__ = ("_device", "_down", "_next", "_pinned", "_sets", "_up", "_work")

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._sets = [_Set(), _Set()]
        self._next = 0
        self._up, self._work, self._down = (
            torch.cuda.Stream(self._device) if self._pinned else None for _ in range(3)
        )

    def submit(
        self, arrays: list[np.ndarray[Any, Any]], run: Run, place: np.ndarray[Any, Any]
    ) -> None:
        """Begins to compute `place` from `arrays`, which may be reused at once; `place` is filled
        when `drain` returns.
        """
        import torch

        use = self._sets[self._next]
        self._next = 1 - self._next
        self._finish(use)
        given, copied = [], _event(self._pinned)
        with self._on(self._up):
            for i, array in enumerate(arrays):
                host = use.host(i, array.nbytes, self._pinned)
                host.copy_(torch.from_numpy(array.reshape(-1).view("u1")))
                there = use.there(i, array.nbytes, self._device)
                there.copy_(host, non_blocking=True)
                given.append(_shaped(there, array))
            _record(copied, self._up)
        out = use.there(-1, place.nbytes, self._device)
        computed = _event(self._pinned)
        with self._on(self._work):
            _wait(copied, self._work)
            run(given, _shaped(out, place))
            _record(computed, self._work)
        back, use.done = use.host(-1, place.nbytes, self._pinned), _event(self._pinned)
        with self._on(self._down):
            _wait(computed, self._down)
            back.copy_(out, non_blocking=True)
            _record(use.done, self._down)
        use.pending = place, back

    def drain(self) -> None:
        """Waits for all that was submitted."""
        for use in self._sets:
            self._finish(use)

    def _finish(self, use: _Set) -> None:
        if use.pending is None:
            return
        place, back = use.pending
        use.pending = None
        if use.done is not None:
            use.done.synchronize()
        place[...] = back.numpy().view(place.dtype).reshape(place.shape)

    def _on(self, stream: Any) -> Any:
        import torch

        return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Set:
    """Buffers that one box uses: by number of the input, -1 for the output, on the host and on the
    device.
    """

    __slots__ = ("_device", "_host", "done", "pending")

    def __init__(self) -> None:
        self._host: dict[int, torch.Tensor] = {}
        self._device: dict[int, torch.Tensor] = {}
        self.done: Any = None
        self.pending: tuple[np.ndarray[Any, Any], torch.Tensor] | None = None

    def host(self, number: int, nbytes: int, pinned: bool) -> torch.Tensor:
        import torch

        kept = self._host.get(number)
        if kept is None or len(kept) < nbytes:
            kept = self._host[number] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return kept[:nbytes]

    def there(self, number: int, nbytes: int, device: torch.device) -> torch.Tensor:
        import torch

        kept = self._device.get(number)
        if kept is None or len(kept) < nbytes:
            kept = self._device[number] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes]


def _shaped(there: torch.Tensor, like: np.ndarray[Any, Any]) -> torch.Tensor:
    """Bytes as the integers that `like` holds, in its shape."""
    import torch

    return there.view(getattr(torch, like.dtype.name)).view(like.shape)


def _event(pinned: bool) -> Any:
    import torch

    return torch.cuda.Event() if pinned else None


def _record(event: Any, stream: Any) -> None:
    if event is not None:
        event.record(stream)


def _wait(event: Any, stream: Any) -> None:
    if event is not None:
        stream.wait_event(event)
