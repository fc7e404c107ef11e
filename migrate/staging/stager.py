"""The stager: copies of a training state at one moment, in memory that is used again."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from traceback import clear_frames
from types import TracebackType
from typing import Any, Final

from ..core.errors import MigrateError
from ..source.jsontext import collector_paused
from . import copying
from .dcp import DcpStager
from .jobs import Writer, Writes, write_here
from .memory import BlockPool, has_gpu
from .paths import DEEPEST
from .refusing import refusal, too_deep
from .snapshot import Image, Snapshot
from .streams import Streams
from .tensors import NotCopiedError, Recipe, describe, moved
from .walk import Walk, outside_of_modes


class Stager:
    """Takes snapshots. One is made once and used for every step; several threads may use it.

    Args:
        pin_memory: Snapshots lie in pages that GPUs copy into without a detour. A warning says so
            where there is no GPU.
        share_memory: Snapshots can be sent to another process, which sees the same memory.
        max_memory: The most bytes that all snapshots and what is kept for the next may take: a
            number or text such as `"4GiB"`. No limit by default.
        process: Saves are written by a child process, which sees the memory of the snapshot
            (`share_memory` is implied), so that they do not take the interpreter from the training.
    """

    def __init__(
        self,
        pin_memory: bool = False,
        share_memory: bool = False,
        max_memory: int | str | None = None,
        process: bool = False,
    ) -> None:
        from ..running.resources import bytes_of

        self._limit = None if max_memory is None else bytes_of(max_memory)
        share_memory = share_memory or process
        self._shared, self._pinned = share_memory, pin_memory and has_gpu()
        if share_memory:
            from .sharing import install

            install()
        self._write: Writes = write_here
        self._apart = process
        if process:
            from .process import write_apart

            self._write = write_apart
        self._lock = threading.Lock()
        self._open()

    def _own(self) -> BlockPool:
        """The memory of this process: in a forked child the blocks are its parent's."""
        if os.getpid() != self._process:
            with self._lock:
                if os.getpid() != self._process:
                    # what a GPU knows does not survive a fork
                    self._pinned = False
                    self._open()
        return self._pool

    def _open(self) -> None:
        self._process = os.getpid()
        self._pool = BlockPool(shared=self._shared, pinned=self._pinned, limit=self._limit)
        self._streams = Streams()
        self._writer = Writer(self._write, apart=self._apart)

    @property
    def nbytes(self) -> int:
        """The bytes that snapshots and free blocks take."""
        return self._own().nbytes

    def stage(self, state: Any, non_blocking: bool = False) -> Snapshot:
        """A snapshot of `state`, which is not changed: structure, identities and bits.

        What is on the CPU has been copied when this returns. With `non_blocking` copies from other
        devices may still be on the way (`Snapshot.guard`).

        Raises:
            QuestionError: M975 naming the path of each object that cannot be copied, and why.
            RunError: M919 if the memory does not suffice, saying who holds it. Nothing is held by
                the failed stage either way.
        """
        pool = self._own()
        # a collection in the middle looks at everything that is being made, and finds nothing
        with collector_paused(), outside_of_modes():
            return self._stage(state, pool, non_blocking, self._refusal)

    def _refusal(self, state: Any, error: Exception) -> Exception:
        def trial(own: list[Any]) -> None:
            self._stage(own, BlockPool(limit=self._limit), False, lambda _, error: error)

        return refusal(state, error, trial)

    def _stage(
        self,
        state: Any,
        pool: BlockPool,
        non_blocking: bool,
        refused: Callable[[Any, Exception], Exception],
    ) -> Snapshot:
        """A snapshot in memory of `pool`. `refused` makes what is raised of what went wrong."""
        try:
            walk, stream = _walked(state)
        except MigrateError:
            raise
        except Exception as error:  # noqa: BLE001 - methods of the state's objects may raise anything
            raise refused(state, error) from None
        storages = walk.storages
        recipes: list[Recipe] = []
        for x in walk.tensors:
            try:
                recipes.append(describe(x, storages))
            except NotCopiedError as error:
                raise refused(state, error) from None
        plan = copying.arrange(storages, together=self._shared)
        if plan.shifted:
            shifts = [None if place is None else place.shift for place in plan.places]
            recipes = [moved(recipe, shifts) for recipe in recipes]
        views, addresses = pool.borrow(plan.wants)
        try:
            copied = copying.run(plan, storages, views, addresses, self._streams)
            if any(recipe[0] == "quantized" for recipe in recipes):
                # torch reads the scales of channels when it makes such a tensor
                copied.wait()
            image = Image(
                stream, recipes, walk.references, storages.users, plan.places, storages.devices
            )
            try:
                snapshot = Snapshot(image, views, plan.nbytes, copied)
            except Exception as error:  # noqa: BLE001 - as above
                raise refused(state, error) from None
        except BaseException as error:
            # an error that is kept, as notebooks do, keeps its frames: not the memory as well
            for one in (error, error.__context__):
                if one is not None:
                    clear_frames(one.__traceback__)
            views.clear()
            raise
        snapshot._writer = self._writer
        if not non_blocking:
            snapshot.wait()
        return snapshot

    def for_dcp(self, non_blocking: bool = False) -> DcpStager:
        """An `async_stager` for `torch.distributed.checkpoint.async_save`, over this stager.

        With `non_blocking` copies from devices go on behind the training, and `async_save` answers
        with `staging_completion` and `upload_completion`; otherwise with one Future.
        """
        return DcpStager(self.stage, self.trim, non_blocking)

    def trim(self) -> None:
        """Gives the memory that no snapshot uses back to the system."""
        self._own().trim()

    def close(self, wait: bool = True) -> None:
        """Waits for all jobs, and gives the memory back that no snapshot uses, the rest when its
        snapshots go. The stager can be used again.

        Args:
            wait: False ends jobs before they publish anything, and does not wait for that.
                Default: True.

        Raises:
            MigrateError: What made a job fail, if nobody has asked that job.
        """
        # first, for in a forked child nobody runs the jobs of its parent
        pool = self._own()
        try:
            self._writer.close(wait)
        finally:
            pool.trim()

    def __enter__(self) -> Stager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # what failed is in the log; it shall not hide the error that ends the block
        with nullcontext() if error is None else suppress(MigrateError):
            self.close()


# several threads must not take the interpreter's limit for one that was raised
_RECURSION: Final = threading.Lock()


def _walked(state: Any) -> tuple[Walk, bytes]:
    """The tables of a walk and its stream, however deep the caller's own stack is."""
    walk = Walk()
    try:
        return walk, walk.run(state)
    except RecursionError:
        if too_deep(state):
            raise
    with _RECURSION:
        limit = sys.getrecursionlimit()
        # a level takes several calls
        sys.setrecursionlimit(limit + 8 * DEEPEST)
        try:
            walk = Walk()
            return walk, walk.run(state)
        finally:
            sys.setrecursionlimit(limit)
