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
is loaded, whose threads do not survive a fork.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, BinaryIO

from ..core import log
from ..planning.graph import ComputedTensor
from .cutting import tiles
from .evaluator import divides
from .gather import Batch, Gather, Sealed, Window

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.target import OutputFile
    from .error_statistics import Ledger
    from .evaluator import Evaluator
    from .geometry import ByteLayouts
    from .restored import RestoredParts

# output bytes for which a fork is worth its time
LEAST = 32 << 20


def fill_buffer(gather: Gather, fill: Batch) -> None:
    """Puts the bytes of a fill into the buffer of `gather`, but for what is sealed later."""
    for content, start, stop, at, last in fill.parts:
        if isinstance(content, bytes):
            gather.buffer[at : at + stop - start] = content[start:stop]
        elif not isinstance(content, Sealed):
            gather.fill(content, start, stop, at)
            if last:
                gather.release()


class Fillers:
    """One process for each thread of a run that writes `files`, two buffers for each.

    Call sequence: `begin` forks, `fill` in any thread, `end`.
    """

    def __init__(
        self,
        files: Sequence[OutputFile],
        outputs: Mapping[str, Tensor],
        source: Source,
        layouts: ByteLayouts,
        values: Evaluator,
        ledger: Ledger | None,
        parts: RestoredParts | None,
        budget: int,
    ) -> None:
        self._files, self._outputs, self._source = files, outputs, source
        self._layouts, self._values = layouts, values
        self._ledger, self._parts, self._budget = ledger, parts, budget
        self._numbers = {file.name: number for number, file in enumerate(files)}
        # computed tensors that are written and not read again, in this order
        self._tensors: dict[int, Tensor] = {}
        self._finished: list[int] = []
        self._buffers: list[memoryview] = []
        self._free: list[memoryview] = []
        self._children: list[_Child] = []
        # what processes measured and did not say
        self.lost = False

    @classmethod
    def begin(cls, count: int, nbytes: int, *work: Any) -> Fillers | None:
        """Forks `count` processes with two buffers of `nbytes` each; None where they would not
        help, or the system gives none.
        """
        made = cls(*work)
        if not made._worth(count):
            return None
        try:
            made._buffers = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(2 * count)]
            made._free = [*made._buffers]
            for _ in range(count):
                made._children.append(made._fork())
        except OSError:
            made.end()
            return None
        log.debug("%d processes compute", count)
        return made

    def _worth(self, count: int) -> bool:
        placed = {p.key: p.nbytes for file in self._files for p in file.tensors}
        tensors = [self._outputs[key] for key in placed]
        self._tensors = {
            id(t): t for t in tensors if any(isinstance(s, ComputedTensor) for s in t.sources)
        }
        computed = sum(placed[key] for key in placed if id(self._outputs[key]) in self._tensors)
        return (
            count > 1
            and computed >= LEAST
            and "torch" not in sys.modules
            and hasattr(os, "fork")
            and threading.active_count() == 1
            and divides(tensors, self._layouts, self._values)
        )

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

    def end(self) -> None:
        """Ends the processes."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._children = []

    def take_buffer(self) -> memoryview:
        """A buffer that processes share; MemoryError where all are taken."""
        try:
            return self._free.pop()
        except IndexError:
            raise MemoryError from None

    def give_buffer(self, buffer: memoryview) -> None:
        """Takes a buffer back."""
        self._free.append(buffer)

    def finished(self, tensor: Tensor) -> None:
        """No place of this tensor is left to be computed."""
        self._finished.append(id(tensor))

    def fill(self, number: int, file: OutputFile, turn: int, buffer: memoryview) -> bool:
        """Has the process of thread `number` fill a shared buffer; False if it did not."""
        child = self._children[number]
        if child.failed:
            return False
        news, child.heard = self._finished[child.heard :], len(self._finished)
        at = next(n for n, one in enumerate(self._buffers) if one is buffer)
        found = child.ask([self._numbers[file.name], turn, at, news])
        if found is None:
            self.lost = True
            return False
        if self._ledger is not None:
            self._ledger.enter(found["boxes"])
        if self._parts is not None:
            self._parts.enter(found["pieces"])
        return bool(found["done"])

    def _serve(self, orders: BinaryIO, answers: BinaryIO) -> None:
        """The whole of a process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _die_with_parent()
        for known in (self._ledger, self._parts):
            if known is not None:
                known.drain()
        fills: dict[int, Iterator[tuple[int, Batch]]] = {}
        gathers: dict[int, Gather] = {}
        window = Window()
        for line in orders:
            number, turn, at, finished = json.loads(line)
            done = True
            try:
                for name in finished:
                    self._values.done(self._tensors[name])
                if number not in fills:
                    fills[number] = self._fills(self._files[number])
                fill = next(fill for n, fill in fills[number] if n == turn)
                if at not in gathers:
                    common = self._values.leaf, self._budget, window
                    gathers[at] = Gather(self._source, self._layouts, self._buffers[at], *common)
                fill_buffer(gathers[at], fill)
                gathers[at].release()
            except Exception:  # noqa: BLE001 - the thread that asked finds it again
                done = False
            found = {
                "done": done,
                "boxes": [] if self._ledger is None else self._ledger.drain(),
                "pieces": [] if self._parts is None else self._parts.drain(),
            }
            answers.write(json.dumps(found).encode() + b"\n")

    def _fills(self, file: OutputFile) -> Iterator[tuple[int, Batch]]:
        turn = 0
        for tile in tiles(file, self._outputs, self._layouts, self._values):
            for fill in tile.fills:
                yield turn, fill
                turn += 1


def _die_with_parent() -> None:
    """As the end of the orders does, but at once: until then the journal would stay locked."""
    with suppress(OSError, AttributeError, ImportError):
        import ctypes

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
