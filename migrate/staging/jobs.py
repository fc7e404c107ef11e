"""Writers: what is saved behind the training, one job after the other."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from ..core.errors import Diagnostic, MigrateError, RunError, fail, printable
from ..core.log import NAME
from ..formats.torchstream import StateSource
from ..planning.plan import Plan
from ..planning.request import Request
from ..results import ApplyReport
from ..running.job import write_checkpoint
from ..running.resources import RunOptions
from .destination import Destination


class StoppedError(Exception):
    """Ends a run from within."""


@dataclass(slots=True)
class Work:
    """What a job writes: the plan for `source`, into `out`. `message` is what another process needs
    to do the same.
    """

    out: Destination
    source: StateSource
    request: Request
    plan: Plan
    options: RunOptions
    message: Callable[[], Mapping[str, Any]]


class Writes(Protocol):
    """What does the work of a job. Raises `StoppedError` or what it likes once `stop` is set."""

    def __call__(
        self, work: Work, progress: Callable[[int, int], None], stop: threading.Event
    ) -> ApplyReport: ...


def write_here(
    work: Work, progress: Callable[[int, int], None], stop: threading.Event
) -> ApplyReport:
    """Writes in the thread that calls it."""

    def heard(done: int, total: int) -> None:
        progress(done, total)
        if stop.is_set():
            raise StoppedError

    report = write_checkpoint(
        lambda: work.source,
        work.out.given,
        work.request,
        replace(work.options, progress=heard),
        planned=work.plan,
    )
    return cast("ApplyReport", report)


class Job:
    """A save that goes on behind the training. All methods may be called by several threads."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._path = work.out.shown
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._progress = (0, 0)
        self._report: ApplyReport | None = None
        self._error: BaseException | None = None
        # somebody has been told of the error, or waits to be
        self._asked = 0

    @property
    def path(self) -> str:
        """What is written; a URL without its secrets."""
        return self._path

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes done so far and the bytes in total; zeros until the writing has begun."""
        return self._progress

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> ApplyReport:
        """What was published, once it is.

        Args:
            timeout: Seconds to wait at most. Default: None, no limit.

        Returns:
            An `ApplyReport`, as `apply` answers with.

        Raises:
            MigrateError: What failed, with the path; nothing has been published.
            CancelledError: It was cancelled; nothing has been published.
            TimeoutError: It has not ended by then.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast("ApplyReport", self._report)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise, None if it succeeded.

        Args:
            timeout: Seconds to wait at most. Default: None, no limit.

        Returns:
            The error, or None.

        Raises:
            TimeoutError: It has not ended by then.
            QuestionError: M981 in a forked child, where it never ends.
        """
        self._in_its_process()
        with self._lock:
            self._asked += 1
        if not self._ended.wait(timeout):
            with self._lock:
                self._asked -= 1
            raise TimeoutError(f"the save of {self.path} has not ended after {timeout} seconds")
        return self._error

    def cancel(self) -> bool:
        """Ends it before it publishes anything, waiting or running.

        Returns:
            Whether it had not ended; it may still do so in its own way in that moment.

        Raises:
            QuestionError: M981 in a forked child, which cannot end what its parent writes.
        """
        self._in_its_process()
        with self._lock:
            if self._ended.is_set():
                return False
            self._stop.set()
            self._asked += 1
        return True

    def __repr__(self) -> str:
        state = f"{self._progress[0]} of {self._progress[1]} bytes"
        if self.done():
            cancelled = isinstance(self._error, CancelledError)
            state = "done" if self._error is None else "cancelled" if cancelled else "failed"
        return f"<migrate.Job {self.path!r}, {state}>"

    def _in_its_process(self) -> None:
        if not self._ended.is_set():
            _check_process(self._process, f"the save of {printable(self.path, 300)} goes on in")

    def _told(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def _run(self, write: Writes) -> None:
        """Does the work, lets go of it, and remembers how it went."""
        work, report, error = cast("Work", self._work), None, None
        try:
            if self._stop.is_set():
                raise StoppedError
            report = write(work, self._told, self._stop)
        except BaseException as caught:  # noqa: BLE001 - `result` raises it
            error = self._ended_by(caught)
        # what was raised holds frames, and these the memory
        work.source.close()
        if error is not None:
            work.out.remove_leftover()
        self._work = None
        del work
        with self._lock:
            self._report, self._error = report, error
            if error is not None and not self._asked:
                logging.getLogger(NAME).error("%s", error)
            self._ended.set()

    def _ended_by(self, error: BaseException) -> BaseException:
        if self._stop.is_set() and not isinstance(error, MigrateError):
            return CancelledError(f"the save of {self.path} was cancelled")
        where = printable(self.path, 300)
        if isinstance(error, MigrateError):
            found = [_placed(d, where) for d in error.diagnostics]
            return type(error)(found)
        return RunError(
            [
                Diagnostic(
                    "M980",
                    f"the save of {where} failed: {type(error).__name__}: "
                    f"{printable(str(error), 300)}",
                    help="nothing was published; stage the state again, or save the snapshot again",
                )
            ]
        )


def _check_process(process: int, said: str) -> None:
    """M981 in a forked child, where the thread that writes is not."""
    if os.getpid() != process:
        fail(
            "M981",
            f"{said} the process {process}, of which this one was forked",
            help="save in the process that staged, or make a `Stager` and stage in this one",
        )


def _placed(found: Diagnostic, where: str) -> Diagnostic:
    """The diagnostic with the place that nothing was published at, and without the partial folder,
    which is gone.
    """
    notes = [note for note in found.notes if not note.startswith("what was written so far is kept")]
    help_ = found.help
    if len(notes) < len(found.notes):
        help_ = "fix the cause and save again"
    return replace(found, notes=(*notes, f"nothing was published at {where}"), help=help_)


class Writer:
    """The jobs of one stager, one after the other in a thread that lives while there are any.

    The interpreter waits for that thread at its exit.
    """

    def __init__(self, write: Writes = write_here, apart: bool = False) -> None:
        """`apart`: another process writes."""
        self._write, self.apart = write, apart
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._failed: list[Job] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def check_process(self) -> None:
        """QuestionError M981 in a forked child."""
        _check_process(self._process, "this snapshot is written by")

    def submit(self, work: Work) -> Job:
        """The job, behind those before it. M904 if one of these writes the same path."""
        job = Job(work)
        try:
            with self._lock:
                # the running one may have ended, and been asked, a moment before its thread goes on
                taken = any(one._path == job._path and not one.done() for one in self._pending())
                if not taken:
                    self._waiting.append(job)
                    if self._thread is None:
                        thread = threading.Thread(target=self._work, name="migrate-writer")
                        thread.start()
                        self._thread = thread
        except BaseException:
            # an interrupt, or no thread to be had: nobody will ever ask this job
            self._withdraw(job)
            raise
        if taken:
            work.source.close()
            fail(
                "M904", f"another job writes {printable(job.path, 300)}", help="choose another path"
            )
        return job

    def close(self, wait: bool = True) -> None:
        """Waits for all jobs, or ends them without waiting. Raises the first failure so far that
        nobody has asked for; others are in the log.
        """
        with self._lock:
            pending = self._pending()
        for job in pending:
            if wait:
                job._ended.wait()
            else:
                job.cancel()
        with self._lock:
            failed, self._failed = [*self._failed, *pending], []
        unheard = [job for job in dict.fromkeys(failed) if not job._asked]
        errors = [error for job in unheard if (error := job.exception()) is not None]
        if errors:
            raise errors[0]

    def _pending(self) -> list[Job]:
        return [*([] if self._running is None else [self._running]), *self._waiting]

    def _withdraw(self, job: Job) -> None:
        job.cancel()
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
                cast("Work", job._work).source.close()

    def _work(self) -> None:
        with self._lock:
            # one that `submit` was interrupted in starting, and that another has replaced
            if self._thread not in (None, threading.current_thread()):
                return
            self._thread = threading.current_thread()
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                job = self._running = self._waiting.popleft()
            job._run(self._write)
            with self._lock:
                self._running = None
                if job._error is not None:
                    self._failed.append(job)
            del job
