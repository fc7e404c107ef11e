"""Processes that compute what the threads of a run write.

Threads of one interpreter hardly compute side by side: a codec is many short operations of numpy,
and between two of them a thread waits for the interpreter. So where a run computes, each of its
threads has a process beside it, forked when all is planned and checked:

    thread                              its process
        take a fill of a file
        its number, and a buffer's   ─▶ gather and compute into that buffer, which both share
        hash, write, journal         ◀─ done, and what it measured and hashed on the way

What has to be known of a tensor before its first box (`surveys`) is asked for first, and told to
the other processes. One that would have to wait for another makes that of a later tensor meanwhile.

A process makes nothing that lasts: no file, no message. If one fails or dies, its thread computes
that fill, and all that follow, by itself, and so fails in the same place with the error of its own;
what only the process knew of errors (`Ledger`) is then not known.

Not for a run whose parts would be computed by several processes again (`divides`), nor where torch
computes or is loaded, whose threads do not survive a fork, or where anything else runs beside; and
on Linux alone.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# surveys that are made ahead, at most
_AHEAD = 4


class FillWork(NamedTuple):
    """What a process computes with. It sends what it enters in its copies of `ledger` and `parts`
    to those of its parent.
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
        self._tensors: dict[int, Tensor] = {}
        # one output of each surveyed call, and the numbers of those that a tensor reads
        self._surveyed: list[ComputedTensor] = []
        self._needed: dict[int, list[int]] = {}
        self._enter(outputs.values())
        self._surveys = _Surveys(len(self._surveyed))
        # tensors of which no place is left to be written, in this order
        self._finished: list[int] = []
        # shared memory
        self.buffers: list[memoryview] = []
        self._children: list[_Child] = []
        self._lost = False

    def _enter(self, outputs: Iterable[Tensor]) -> None:
        calls: dict[int, int] = {}
        for tensor in outputs:
            for value in tensor.sources:
                if not isinstance(value, ComputedTensor):
                    continue
                self._tensors[id(tensor)] = tensor
                if self._work.values.kind(value).surveyed:
                    number = calls.setdefault(id(value.computation), len(self._surveyed))
                    if number == len(self._surveyed):
                        self._surveyed.append(value)
                    self._needed.setdefault(id(tensor), []).append(number)

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
            # elsewhere libraries of the system may not outlive a fork
            or sys.platform != "linux"
            or threading.active_count() > 1
            or not divides(outputs.values(), work.layouts, work.values)
        ):
            return None
        made = cls(files, outputs, fills, work)
        try:
            work.values.share_memos(
                s for t in outputs.values() for s in t.sources if isinstance(s, ComputedTensor)
            )
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
        frozen = gc.get_freeze_count()
        gc.freeze()
        try:
            with warnings.catch_warnings():
                # that other threads' locks stay taken: there are no others
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
        except OSError:
            for descriptor in (*asked, *answered):
                os.close(descriptor)
            raise
        finally:
            if not frozen:
                gc.unfreeze()
        if not pid:
            try:
                for child in self._children:
                    child.hang_up()
                os.close(asked[1])
                os.close(answered[0])
                with open(asked[0], "rb") as orders, open(answered[1], "wb") as answers:
                    self._serve(orders, answers)
            finally:
                # nothing of the program that was forked runs here: neither handlers nor clean-up
                os._exit(0)
        os.close(asked[0])
        os.close(answered[1])
        return _Child(pid, asked[1], answered[0])

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

    def fill(
        self, number: int, file: OutputFile, turn: int, fill: Batch, buffer: memoryview
    ) -> bool:
        """Has the process of thread `number` put `fill`, the file's number `turn`, into a shared
        buffer; False if it did not.
        """
        child = self._children[number]
        at = next((n for n, one in enumerate(self.buffers) if one is buffer), None)
        # bytes that are copied the thread reads as quickly itself
        computed = any(id(part.content) in self._tensors for part in fill.parts)
        if child.failed or at is None or not computed:
            return False
        for part in fill.parts:
            for survey in self._needed.get(id(part.content), ()):
                self._surveys.make(survey, child, self._ask)
        # others go on adding to it
        count = len(self._finished)
        news, child.heard = self._finished[child.heard : count], count
        known = self._surveys.news(child)
        found = self._ask(child, [self._numbers[file.name], turn, at, news, known])
        return found is not None and bool(found["done"])

    def _ask(self, child: _Child, order: Sequence[Any]) -> dict[str, Any] | None:
        """The answer of a process, and what it has measured and hashed for it, which it tells once;
        None if it is gone.
        """
        found = child.ask(order)
        if found is None:
            self._lost = True
            return None
        if self._work.ledger is not None:
            self._work.ledger.enter(found["boxes"])
        if self._work.parts is not None:
            self._work.parts.enter(found["pieces"])
        return found

    def _serve(self, orders: BinaryIO, answers: BinaryIO) -> None:
        """The whole of a process."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
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

        def fill(number: int, turn: int, at: int, finished: list[int], known: list[Any]) -> None:
            for survey, found in known:
                call = self._surveyed[survey].computation
                work.values.surveys().enter(call, _array_of(found))
            for name in finished:
                work.values.done(self._tensors[name])
            if number not in fills:
                fills[number] = enumerate(self._fills(self._files[number]))
            try:
                gathers[at].take(next(fill for n, fill in fills[number] if n == turn))
            finally:
                # a computed tensor that is finished is not kept for this
                gathers[at].release()

        for line in orders:
            order, found = json.loads(line), dict[str, Any]()
            try:
                if len(order) == 1:
                    found["survey"] = _said_of(work.values.survey(self._surveyed[order[0]]))
                else:
                    fill(*order)
                found["done"] = True
            except Exception:  # noqa: BLE001 - the thread that asked finds it again
                found["done"] = False
            found["boxes"] = [one for drain in measured for one in drain()]
            found["pieces"] = [one for drain in hashed for one in drain()]
            answers.write(json.dumps(found).encode() + b"\n")
            answers.flush()


class _Surveys:
    """Which surveys of a run are made, and by which process."""

    def __init__(self, count: int) -> None:
        self._count, self._changed = count, threading.Condition()
        self._making: set[int] = set()
        # those that are made, and what can be told of them; else each process makes its own
        self._made: set[int] = set()
        self._told: list[tuple[int, Any]] = []

    def make(
        self, number: int, child: _Child, ask: Callable[[_Child, list[int]], dict[str, Any] | None]
    ) -> None:
        """Returns when survey `number` is made; `ask` asks a process for one."""
        while True:
            with self._changed:
                if number in self._made:
                    return
                ahead = range(number, min(number + 1 + _AHEAD, self._count))
                mine = next(
                    (n for n in ahead if n not in self._made and n not in self._making), None
                )
                if mine is None:
                    self._changed.wait(0.5)
                    continue
                self._making.add(mine)
            found = None
            try:
                found = ask(child, [mine])
            finally:
                with self._changed:
                    self._making.discard(mine)
                    self._made.add(mine)
                    child.made.add(mine)
                    if found and found.get("survey"):
                        self._told.append((mine, found["survey"]))
                    self._changed.notify_all()

    def news(self, child: _Child) -> list[tuple[int, Any]]:
        """What was found that the process does not know."""
        with self._changed:
            new = self._told[child.learned :]
            child.learned += len(new)
        return [(number, found) for number, found in new if number not in child.made]


def _said_of(found: Any) -> list[Any] | None:
    """An array of numbers, as `_array_of` takes it; None for anything else."""
    import numpy as np

    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        return None
    return [found.dtype.str, found.shape, found.tobytes().hex()]


def _array_of(said: list[Any]) -> Any:
    import numpy as np

    dtype, shape, data = said
    return np.frombuffer(bytes.fromhex(data), dtype).reshape(shape)


def die_with_parent() -> None:
    """Has this process killed once the thread that started it ends, where the system can: before it
    would find out by a pipe, it would go on writing and keep its journal locked.
    """
    with suppress(OSError, AttributeError):
        # linux/prctl.h: PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class _Child:
    """A process, as the thread that asks it sees it."""

    __slots__ = ("_answers", "_orders", "failed", "heard", "learned", "made", "pid")

    def __init__(self, pid: int, orders: int, answers: int) -> None:
        self.pid = pid
        # buffered, because a pipe that is full takes a part of a line when a signal comes
        self._orders = open(orders, "wb")  # noqa: SIM115 - `hang_up` closes both
        self._answers = open(answers, "rb")  # noqa: SIM115
        # how many finished tensors and surveys it was told of, and which surveys it made
        self.heard = self.learned = 0
        self.made: set[int] = set()
        self.failed = False

    def ask(self, order: Sequence[Any]) -> dict[str, Any] | None:
        """Its answer; None if it is gone."""
        try:
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()
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
