"""Snapshots for `torch.distributed.checkpoint.async_save`: an AsyncStager by its shape.

torch asks a stager for four names, and neither for a class nor for a registration. So nothing of
torch's is subclassed or imported here, and one class serves every release. torch never tells a
stager that an upload is over: the memory of what `stage` answers with is free again when torch, the
writer and the caller have let go of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .snapshot import Snapshot
    from .streams import Arrival


class DcpStager:
    """What `Stager.for_dcp` answers with, for `dcp.async_save(state, async_stager=…)`.

    It may be used for any number of saves, by several threads, and saves may overlap.
    """

    def __init__(
        self, stage: Callable[..., Snapshot], trim: Callable[[], None], non_blocking: bool
    ) -> None:
        self._stage, self._trim = stage, trim
        self._non_blocking = non_blocking
        self._arrival: Arrival | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: a dict that `stage` answers with is complete."""
        return False

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Any:
        """A copy of `state_dict` on the CPU: the dict, or with `non_blocking` a Future of it.

        The Future is there when all copies from devices are; what was on the CPU has been copied
        before this returns. `async_save` then answers with an object that has `staging_completion`
        and `upload_completion`.

        Raises:
            QuestionError, RunError: as `Stager.stage`, in the caller's thread: torch would take a
                Future that has failed before it looks at it for a success.
        """
        snapshot = self._stage(state_dict, non_blocking=self._non_blocking)
        if not self._non_blocking:
            return snapshot.state
        self._arrival = snapshot._copied
        future: Future[Any] = Future()
        if snapshot.done():
            future.set_result(snapshot.state)
        else:
            threading.Thread(
                target=_fulfil, args=(future, snapshot), name="migrate-staging"
            ).start()
        return future

    def writer(self, storage_writer: Any) -> Any:
        """`storage_writer`, which stages by this from now on, for `dcp.async_save` of torch 2.8.

        That release has no `async_stager` and asks the writer instead, for a dict.
        """
        storage_writer.stage = self.stage
        storage_writer.synchronize_staging = self.synchronize_staging
        return storage_writer

    def __reduce__(self) -> Any:
        # a writer goes to the process that saves, where nothing is staged
        return DcpStager, (_elsewhere, _elsewhere, self._non_blocking)

    def guard(self) -> None:
        """`Snapshot.guard` of the last `stage`: belongs before `optimizer.step()`."""
        if self._arrival is not None:
            self._arrival.guard()

    def synchronize_staging(self) -> None:
        """Returns when the copies of the last `stage` are there."""
        if self._arrival is not None:
            self._arrival.wait()

    def close(self) -> None:
        """Waits for the last copies and gives memory that nothing uses back to the system.

        The `Stager` stays open, for it may have other work; both can be used again.
        """
        self.synchronize_staging()
        self._arrival = None
        self._trim()


def _elsewhere(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the stager of this `for_dcp` is in another process")


def _fulfil(future: Future[Any], snapshot: Snapshot) -> None:
    try:
        future.set_result(snapshot.state)
    except Exception as error:  # noqa: BLE001 - whoever waits for the Future is told
        future.set_exception(error)
