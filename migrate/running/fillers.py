"""Processes that compute what the threads of a run write.

Threads of one interpreter hardly compute side by side: a codec is many short operations of numpy,
and between two of them a thread waits for the interpreter. So where a run computes, each of its
threads has a process beside it, forked when all is planned and checked:

    thread                              its process
        take a fill of a file
        its number, and a buffer's   ─▶ gather and compute into that buffer, which both share
        hash, write, journal         ◀─ done, and what it measured and hashed on the way

A process makes nothing that lasts: no file, no message. If one fails or dies, its thread computes
that fill, and all that follow, by itself, and so fails in the same place with the error of its own;
what only the process knew of errors (`Ledger`) is then not known.

Not for a run whose parts would be computed by several processes again (`divides`), nor where torch
computes or is loaded, whose threads do not survive a fork, or where anything else runs beside.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ..core import log
from ..planning.graph import ComputedTensor
from .evaluator import divides
from .gather import Gather, Window

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.target import OutputFile
    from .error_statistics import Ledger
    from .evaluator import Evaluator
    from .gather import Batch
    from .geometry import ByteLayouts
    from .restored import RestoredParts


# what torch's casts encode, unless one scale of a tensor is known before: few long calls, which
# threads make as quickly, and each process would import torch
_CAST = {"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}


class FillWork(NamedTuple):
    """What computing takes, and what is told of it: `ledger` and `parts` of this process are those
    that its parent wants to know about.
    """

    source: Source
    layouts: ByteLayouts
    values: Evaluator
    ledger: Ledger | None
    parts: RestoredParts | None
    budget: int


class Fillers:
    """One process for each thread of a run that writes `files`, and two buffers for each.

    Call sequence: `begin` forks; `fill` and `finished` in any thread; `end`.

    `outputs` are the tensors of the files, `fills` what one of them is of, in order.
    """

    def __init__(
        self,
        files: Sequence[OutputFile],
        outputs: Mapping[str, Tensor],
        fills: Callable[[OutputFile], Iterator[Batch]],
        work: FillWork,
    ) -> None:
        self._files, self._fills, self._work = files, fills, work
        self._numbers = {file.name: number for number, file in enumerate(files)}
        # ids are alike in a forked process
        self._tensors = {
            id(tensor): tensor
            for tensor in outputs.values()
            if any(isinstance(s, ComputedTensor) for s in tensor.sources)
        }
        # those of which no place is left to be written, in this order
        self._finished: list[int] = []
        # shared memory
        self.buffers: list[memoryview] = []
        self._children: list[_Child] = []
        self._lost = False

    @classmethod
    def begin(
        cls,
        count: int,
        nbytes: int,
        files: Sequence[OutputFile],
        outputs: Mapping[str, Tensor],
        fills: Callable[[OutputFile], Iterator[Batch]],
        work: FillWork,
    ) -> Fillers | None:
        """Forks `count` processes with two buffers of `nbytes` each; None where they would not
        help, or the system gives none.
        """
        if (
            "torch" in sys.modules
            or not hasattr(os, "fork")
            or threading.active_count() > 1
            or not divides(outputs.values(), work.layouts, work.values)
            or any(
                kind.op.kind == "part" and kind.spec.dtype in _CAST and not kind.surveyed
                for kind in work.values.kinds()
            )
        ):
            return None
        made = cls(files, outputs, fills, work)
        try:
            made.buffers = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(2 * count)]
            for _ in range(count):
                made._children.append(made._fork())
        except OSError:
            made.end()
            return None
        log.debug("%d processes compute", count)
        return made

    def _fork(self) -> _Child:
        asked, answered = os.pipe(), os.pipe()
        # a process of its own would copy what the collector touches
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # that other threads' locks stay taken: there are no others
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        finally:
            gc.unfreeze()
        if not pid:
            try:
                for child in self._children:
                    child.hang_up()
                os.close(asked[1])
                os.close(answered[0])
                with open(asked[0], "rb") as orders, open(answered[1], "wb", 0) as answers:
                    self._serve(orders, answers)
            finally:
                # nothing of the program that was forked runs here: neither handlers nor clean-up
                os._exit(0)
        os.close(asked[0])
        os.close(answered[1])
        return _Child(pid, open(asked[1], "wb", 0), open(answered[0], "rb"))

    def end(self) -> bool:
        """Ends the processes; whether one has died with what it had measured."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._children = []
        return self._lost

    def finished(self, tensor: Tensor) -> None:
        """No place of this tensor is left to be computed."""
        self._finished.append(id(tensor))

    def fill(self, number: int, file: OutputFile, turn: int, buffer: memoryview) -> bool:
        """Has the process of thread `number` fill a shared buffer; False if it did not."""
        child = self._children[number]
        if child.failed:
            return False
        news, child.heard = self._finished[child.heard :], len(self._finished)
        at = next((n for n, one in enumerate(self.buffers) if one is buffer), None)
        if at is None:
            return False
        found = child.ask([self._numbers[file.name], turn, at, news])
        if found is None:
            self._lost = True
            return False
        if self._work.ledger is not None:
            self._work.ledger.enter(found["boxes"])
        if self._work.parts is not None:
            self._work.parts.enter(found["pieces"])
        return bool(found["done"])

    def _serve(self, orders: BinaryIO, answers: BinaryIO) -> None:
        """The whole of a process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent()
        work, window = self._work, Window()
        measured = [] if work.ledger is None else [work.ledger.drain]
        hashed = [] if work.parts is None else [work.parts.drain]
        for drain in (*measured, *hashed):
            drain()
        fills: dict[int, Iterator[tuple[int, Batch]]] = {}
        gathers = [
            Gather(work.source, work.layouts, buffer, work.values.leaf, work.budget, window)
            for buffer in self.buffers
        ]
        for line in orders:
            number, turn, at, finished = json.loads(line)
            done = True
            try:
                for name in finished:
                    work.values.done(self._tensors[name])
                if number not in fills:
                    fills[number] = enumerate(self._fills(self._files[number]))
                gathers[at].take(next(fill for n, fill in fills[number] if n == turn))
            except Exception:  # noqa: BLE001 - the thread that asked finds it again
                done = False
            # a computed tensor that is finished is not kept for this
            gathers[at].release()
            found = {
                "done": done,
                "boxes": [one for drain in measured for one in drain()],
                "pieces": [one for drain in hashed for one in drain()],
            }
            answers.write(json.dumps(found).encode() + b"\n")


def _die_with_parent() -> None:
    """As the end of the orders does, but at once: until then the journal would stay locked."""
    with suppress(OSError, AttributeError):
        # linux/prctl.h: PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class _Child:
    """A process, as the thread that asks it sees it."""

    __slots__ = ("_answers", "_orders", "failed", "heard", "pid")

    def __init__(self, pid: int, orders: BinaryIO, answers: BinaryIO) -> None:
        self.pid, self._orders, self._answers = pid, orders, answers
        # how many tensors it knows to be finished
        self.heard = 0
        self.failed = False

    def ask(self, order: Sequence[Any]) -> dict[str, Any] | None:
        """Its answer; None if it is gone."""
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            found: dict[str, Any] = json.loads(self._answers.readline())
        except (OSError, ValueError):
            self.failed = True
            return None
        self.failed = not found["done"]
        return found

    def hang_up(self) -> None:
        """It ends after what it is doing."""
        for stream in (self._orders, self._answers):
            with suppress(OSError):
                stream.close()
