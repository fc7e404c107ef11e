"""What a run may use: memory, threads, and the device that computes.

On a GPU, boxes of the inputs are copied to the device on one stream, computed on a second, and
copied back on a third, through pinned staging buffers. Two sets of buffers take turns, so that one
box is read and copied while the one before it is computed. With "cpu" as device the same class runs
without pinning and streams: that is how its control flow is tested where there is no GPU.
"""

from __future__ import annotations

import _thread
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ..core.errors import fail, option, printable

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..ops.base import ValueOp

NAMES = ("cpu", "cuda", "cuda:all")
# whether a store copies what only moves
COPYING = ("auto", "never")

# computes from input arrays into an output array, all on one device
Run: TypeAlias = "Callable[[list[Any], Any], None]"


@dataclass(frozen=True, slots=True)
class Device:
    """What computes. `every`: also ops whose bits differ between CPU and GPU run on the GPU."""

    name: str = "cpu"
    every: bool = False

    def takes(self, op: ValueOp, dtype: np.dtype[Any]) -> bool:
        """Whether `op` runs on this GPU. Elements of 16 bytes have no integers in torch."""
        return op.on_device and (self.every or op.same_bits) and dtype.itemsize <= 8

    def lane(self) -> Lane | None:
        """A thread's way to the device; None for the CPU, which computes on arrays in place."""
        return Lane(self.name) if self.name != "cpu" else None


CPU = Device()


def parse_device(name: str, local_rank: int | None = None) -> Device:
    """The device of this name. QuestionError M115 if there is none, M407 if torch finds no GPU.

    Of several processes on a machine each gets the GPU of its `local_rank`, from the first again
    where there are more processes than GPUs.
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
    if local_rank is not None:
        return Device(f"cuda:{local_rank % torch.cuda.device_count()}", name == "cuda:all")
    return Device("cuda", name == "cuda:all")


def resolve_device(device: Any) -> tuple[Any, Device]:
    """The torch device that tensors shall be on, and what computes for it; (None, CPU) for None.

    `device` is a name as torch's, or a torch.device. QuestionError M115 for anything else, M407 if
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
    """One thread's streams and two sets of buffers. Call order: `submit` per box, `drain`."""

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
        """Begins to compute `place` from `arrays`, which may be reused at once, until `drain`."""
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
    """One box's buffers, on host and device, by number of the input, with -1 for the output."""

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


# below it not even the buffers of one thread fit
LEAST_MEMORY = 1 << 20
SHARD = "5GB"
MOST_THREADS = 64
MAX_MEMORY = 10**9
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run goes about its work. But for the size of shards, which is part of the plan, nothing
    of it changes what is written.

    `threads` that read, compute and write; `max_memory` in bytes for tensors that are computed or
    transposed; `max_shard_size` in bytes, of the largest output file; `fsync`: wait until the disk
    has everything; `resume`: continue what an earlier run left behind; `device`: what computes;
    `progress`: called with the bytes that are done and the bytes in all; `copy`: whether a store
    copies what only moves, "auto" or "never"; `read_back`: what it copied is read and compared.
    """

    threads: int = 2
    max_memory: int = MAX_MEMORY
    max_shard_size: int = 5 * 10**9
    fsync: bool = True
    resume: bool = False
    device: Device = CPU
    progress: Callable[[int, int], None] | None = None
    copy: str = "auto"
    read_back: bool = False


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run wrote. `files`: weight file -> {"size": bytes, "xxh3_128": hex digest of the whole
    file}.

    `bytes_read` are the bytes of all output tensors, `bytes_written` what this run wrote: less,
    when it resumed. `bytes_shared` of all output bytes take no space of their own: the file system
    shares them with the source. `report` has the errors of what was computed
    (`Ledger.report`), None if nothing was; after a resume, only of what this run computed.
    `left`: the partial folder, if it could not be removed after all was published. `idle`: how many
    of several processes had no file to write. `restored`: which tensors came back bit for bit, as
    far as that was asked. `stored`: how it came into a store.
    """

    files: Mapping[str, Mapping[str, Any]]
    bytes_read: int
    bytes_written: int
    bytes_shared: int = 0
    report: Mapping[str, Any] | None = None
    left: str | None = None
    idle: int = 0
    restored: Mapping[str, Any] | None = None
    stored: Mapping[str, Any] | None = None


def read_options(
    *,
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    local_rank: int | None = None,
    copy: str = "auto",
    read_back: bool = False,
) -> RunOptions:
    """The options that a person gives, sizes as numbers or as text such as `5GB`.

    QuestionError M115 for anything but a size, a number of threads or a device, M407 if torch finds
    no GPU.
    """
    shard = bytes_of(SHARD if max_shard_size is None else max_shard_size)
    memory = memory_of(max_memory)
    check_threads(threads)
    where = CPU if device == "cpu" else parse_device(device, local_rank)
    if copy not in COPYING:
        fail(
            "M115", f"{option('copy', printable(repr(copy)))}", help=f"one of {', '.join(COPYING)}"
        )
    return RunOptions(threads, memory, shard, fsync, resume, where, progress, copy, read_back)


def parse_size(size: int | str) -> int:
    """`size` in bytes: an int, or a number with B, kB, MB, GB, TB (powers of 1000) or KiB, MiB,
    GiB, TiB (of 1024).

    ValueError if it is neither (a float, say) or less than one byte. The SI meaning of GB is
    huggingface_hub's.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", size.lower(), re.ASCII)
        if not match or match[2] not in _UNITS or len(match[1]) > 18:
            raise ValueError(f"{size!r} is not a size: write 5GB or 500MB")
        number = match[1]
        # exact: 1.1GB through a float would be 1100000000.0000002
        whole, _, part = number.partition(".")
        scale: int = 10 ** len(part)
        count = int(whole + part) * _UNITS[match[2]] // scale
    elif isinstance(size, int) and not isinstance(size, bool):
        count = size
    else:
        raise ValueError(f"{size!r} is not a size: write 5GB, 500MB, or bytes as an int")
    if count < 1:
        raise ValueError(f"{size!r} is not a size: at least one byte is needed")
    return count


_parse_text = lru_cache(maxsize=16)(parse_size)


def bytes_of(given: int | str) -> int:
    """Bytes, from a number or from text such as `5GB`; QuestionError M115 for anything else."""
    try:
        return _parse_text(given) if isinstance(given, str) else parse_size(given)
    except ValueError as error:
        fail("M115", str(error))


def memory_of(given: int | str) -> int:
    """Bytes of memory for a run; QuestionError M115 below `LEAST_MEMORY`."""
    found = bytes_of(given)
    if found < LEAST_MEMORY:
        fail(
            "M115",
            f"max_memory of {found} bytes is too little for any run",
            help=f"give at least {LEAST_MEMORY} bytes",
        )
    return found


def check_threads(given: Any) -> None:
    """QuestionError M115 for anything but a number of threads."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_THREADS:
        fail(
            "M115",
            f"`threads` must be a number from 1 to {MOST_THREADS}, not {printable(repr(given))}",
        )


class _Together:
    """What the threads of one `run_together` share; `work` is there as long as it may be called."""

    __slots__ = ("running", "state", "work")

    def __init__(self, work: Callable[[int], None]) -> None:
        self.work: Callable[[int], None] | None = work
        self.state, self.running = threading.Condition(), 0


def _help(shared: _Together, number: int) -> None:
    """The whole of a helping thread.

    It outlives `run_together` by some instructions and must then hold nothing that matters: where
    it frees the last reference to a tensor while the interpreter ends, C++ ends the process
    ("terminate called without an active exception").
    """
    with shared.state:
        if shared.work is None:
            return
        shared.running += 1
    try:
        shared.work(number)
    finally:
        with shared.state:
            shared.running -= 1
            shared.state.notify_all()


def run_together(work: Callable[[int], None], threads: int, stop: Callable[[], None]) -> None:
    """Calls `work(0)` here and `work(1)` to `work(threads - 1)` in threads of their own; returns
    when all that began have ended, and none of them refers to `work` any more.

    Threads that cannot be started are left out, so `work` must not count on them; what it raises
    outside of the caller's thread is its own to carry. `stop` is called when something interrupts
    the caller, and has to make the others end.
    """
    shared = _Together(work)
    interrupted: BaseException | None = None
    try:
        for number in range(1, threads):
            try:
                # not `threading.Thread`, whose `start` waits for ever for a thread that finds no
                # memory for its first step
                _thread.start_new_thread(_help, (shared, number))
            except (RuntimeError, MemoryError):
                break
        work(0)
    except BaseException as error:  # noqa: BLE001 - raised again below, when the others have ended
        interrupted = error
        stop()
    while True:
        try:
            with shared.state:
                while shared.running:
                    shared.state.wait(0.5)
                shared.work = None
            break
        except BaseException as error:  # noqa: BLE001 - as above
            interrupted = interrupted or error
            stop()
    if interrupted is not None:
        raise interrupted
