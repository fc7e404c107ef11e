"""Outputs written into the tensors of a module, by a few threads, with an account of what is
written if it stops.

A large tensor is written in ranges, so that threads end together. What needs a whole tensor beside
the target, because the target's own class or strides decide how it is copied, is written one at a
time: the peak is one tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.diagnostics import Diagnostic, plural, printable
from ..core.errors import MigrateError, raise_all
from ..core.view import TooManyPieces
from ..running.gather import WINDOW
from ..running.threads import run_together
from .outputs import is_plain, torch_dtype
from .stager import Stager, direct
from .targets import Targets, alike, is_distributed, local

if TYPE_CHECKING:
    import torch

    from ..planning.graph import Tensor
    from .module import Slot
    from .outputs import Outputs

# what a thread takes of a tensor at once
RANGE = 16 << 20


class Job(NamedTuple):
    """The output `key`, and where it goes."""

    key: str
    tensor: Tensor
    slot: Slot


class _Work:
    """A job that has begun: `tensor` is what is written to `target`, which may be the part of it
    that lies here.
    """

    __slots__ = ("how", "job", "left", "target", "tensor")

    def __init__(self, job: Job, tensor: Tensor, target: torch.Tensor, how: str) -> None:
        self.job, self.tensor, self.target, self.how = job, tensor, target, how
        self.left = 1


class Filling:
    """One run. `progress` is told bytes, done and in all."""

    def __init__(
        self,
        outputs: Outputs,
        targets: Targets,
        max_memory: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._outputs, self._targets, self._progress = outputs, targets, progress
        self._window = min(WINDOW, max_memory // 4)
        self._lock, self._whole, self._stop = threading.Lock(), threading.Lock(), threading.Event()
        self._begun: list[_Work] = []
        self._failures: list[BaseException] = []
        self._done = self._total = 0

    def run(self, jobs: Sequence[Job], threads: int, finish: Callable[[], None]) -> int:
        """Writes all jobs, then calls `finish`; the bytes that were written here. M965 with the
        cause if anything stops it.
        """
        source, layouts, values = self._outputs.engine
        self._total = sum(job.tensor.spec.nbytes for job in jobs)
        stagers = [Stager(source, layouts, values, self._window // threads) for _ in range(threads)]
        tasks = self._tasks(jobs, stagers[0])
        try:
            run_together(lambda number: self._work(tasks, stagers[number]), threads, self._stop.set)
            if not self._failures:
                finish()
        except BaseException as error:  # noqa: BLE001 - whatever stops it, what is written has to be told
            self._failures.append(error)
        if self._failures:
            self._fail(self._failures[0])
        return sum(work.tensor.spec.nbytes for work in self._begun)

    def _work(self, tasks: Iterator[tuple[_Work, int, int]], stager: Stager) -> None:
        import torch

        try:
            with torch.no_grad():
                while not self._stop.is_set():
                    with self._lock:
                        task = next(tasks, None)
                    if task is None:
                        break
                    self._write(*task, stager)
                    with self._lock:
                        self._end(*task)
                stager.drain()
        except BaseException as error:  # noqa: BLE001 - whatever stops it, what is written has to be told
            self._failures.append(error)
            self._stop.set()

    def _tasks(self, jobs: Sequence[Job], stager: Stager) -> Iterator[tuple[_Work, int, int]]:
        for job in jobs:
            work = self._open(job)
            self._begun.append(work)
            nbytes = work.tensor.spec.nbytes
            # what other processes hold of it is none of this one's work
            self._done += job.tensor.spec.nbytes - nbytes
            step = stager.step(work.tensor) if work.how == "bytes" else 0
            size = max(1, RANGE // step) * step if step else max(1, nbytes)
            starts = range(0, max(1, nbytes), size)
            work.left = len(starts)
            for start in starts:
                yield work, start, min(start + size, nbytes)

    def _open(self, job: Job) -> _Work:
        """How the output gets into its target: "move" from tensors in memory, "bytes" gathered,
        "object" copied by the target's rules.
        """
        self._targets.materialise(job.slot, job.tensor.spec.shape)
        tensor, target = job.tensor, self._targets.open(job.slot)
        if alike(self._outputs.untouched(job.key), target):
            return _Work(job, tensor, target, "object")
        if is_distributed(target):
            try:
                found = local(target, tensor)
            except TooManyPieces:
                found = None
            if found is None:
                return _Work(job, tensor, target, "object")
            target, tensor = found
        if not is_plain(target) or not target.is_contiguous():
            return _Work(job, tensor, target, "object")
        if self._outputs.moves(job.key):
            return _Work(job, tensor, target, "move")
        known = direct(tensor, target) or (
            torch_dtype(tensor.spec) is not None and tensor.spec.dtype != "bool"
        )
        return _Work(job, tensor, target, "bytes" if known else "object")

    def _write(self, work: _Work, start: int, stop: int, stager: Stager) -> None:
        key, tensor, target = work.job.key, work.tensor, work.target
        if not tensor.spec.numel:
            return
        if work.how == "move":
            self._outputs.move(key, target, tensor)
        elif work.how == "bytes":
            stager.write(tensor, target, start, stop)
        else:
            with self._whole:
                held = self._outputs.untouched(key)
                _copy(target, self._outputs.make(key) if held is None else held)

    def _end(self, work: _Work, start: int, stop: int) -> None:
        work.left -= 1
        if not work.left and work.how == "bytes":
            import torch

            # what was saved for a backward pass is another one now
            torch.autograd.graph.increment_version(work.job.slot.tensor)
            self._outputs.engine[2].done(work.tensor)
        self._done += stop - start
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _fail(self, error: BaseException) -> None:
        """Raises M965, with the diagnostics of the cause if it has some; an interrupt stays one."""
        changed = [work for work in self._begun if self._targets.changes(work.job.slot)]
        done = [printable(work.job.slot.plain, 300) for work in changed if not work.left]
        partly = [printable(work.job.slot.plain, 300) for work in changed if work.left]
        why = (
            printable(f"{type(error).__name__}: {error}", 300)
            if not isinstance(error, MigrateError)
            else "see there"
        )
        message = "loading stopped, and nothing in the module was changed"
        if changed:
            are = "is" if len(done) == 1 else "are"
            message = (
                f"loading stopped: {plural(len(done), 'tensor')} of the module {are} "
                f"written, {len(partly)} in part"
            )
        notes = [f"the cause: {why}"] * (why != "see there")
        notes += [
            f"{what}: {', '.join(names)}"
            for what, names in (("written", done), ("written in part", partly))
            if names
        ]
        said = Diagnostic("M965", message, notes=tuple(notes), help="mend the cause and load again")
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(said.render()) from error
        if not isinstance(error, (Exception, MigrateError)):
            raise error
        causes = error.diagnostics if isinstance(error, MigrateError) else ()
        try:
            raise_all([*causes, said])
        except MigrateError as both:
            raise both from error


def _copy(target: Any, value: Any) -> None:
    """What `copy_` does, for a distributed target with a tensor that every process has."""
    if is_distributed(target) and not is_distributed(value):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(
            value.to(target.device), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(value)
