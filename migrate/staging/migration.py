"""What becomes of a snapshot: a plan for it, and the runs that write it."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

import torch

from ..core.errors import MigrateError, fail, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..formats import is_foreign
from ..formats.torchstream import StateSource, open_stream
from ..live.load import live_request
from ..live.statedict import StateDict, migrate_state_dict
from ..planning.plan import Plan
from ..planning.request import OUTPUT_FORMATS, Request
from ..results import ApplyReport
from ..running.output_shapes import format_of_ending, shape_of
from ..running.prepare import plan_for
from ..running.resources import RunOptions, read_options
from .destination import find_destination
from .jobs import Job, Work, Writer
from .torchstream import StateStream

LABEL: Final = "the state"
REST: Final = ("carry", "leave")


class SnapshotMigration:
    """A snapshot and the plan for it. The snapshot's memory is held until this goes.

    Attributes:
        plan: The `Plan` for a folder of safetensors; where that format cannot hold the state, for a
            folder of torch.save's.
    """

    def __init__(
        self,
        state: Any,
        wait: Callable[[], None],
        writer: Writer,
        request: Request,
        arguments: Mapping[str, Any],
        rest: Literal["carry", "leave"],
    ) -> None:
        """`wait` returns when the bytes of `state` are there, `request` is of `arguments`."""
        archive = StateStream(state)
        self._writer, self._request, self._rest = writer, request, rest
        self._arguments, self._stream = arguments, archive.stream
        # rule files may have been named from here
        self._place = os.getcwd()
        self._source = _opened(archive, wait, request.at, rest)
        self._state, self._wait = state, wait
        # a plan refers to itself: the memory must not wait until a collector looks
        weakref.finalize(self, self._source.close).atexit = False
        self._shard = read_options().max_shard_size
        # what `plan` is for
        self._planned = request
        try:
            self.plan: Plan = plan_for(self._source, request, True, self._shard)
        except MigrateError as error:
            if {found.code for found in error.diagnostics} != {"M916"}:
                raise
            # a dtype that only files of torch.save hold, say
            self._planned = replace(request, output_format="torch")
            self.plan = plan_for(self._source, self._planned, True, self._shard)

    def __repr__(self) -> str:
        steps = ", ".join(f"{step.lineage}@{step.to}" for step in self.plan.report.path)
        return f"<migrate.SnapshotMigration, {f'to {steps}' if steps else 'as it is'}>"

    @guarded
    def state_dict(self, *, device: Any = None, max_memory: int | str = "1GB") -> StateDict:
        """The state in the other layout, as `migrate_state_dict` answers: a mapping that makes each
        value when it is accessed.

        Args:
            device: The device of the values. Default: None, so that they stay on the CPU.
            max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
                Default: 1 GB.

        Returns:
            A `StateDict` over the snapshot's tensors.

        Raises:
            MigrateError: What `migrate_state_dict` raises.
        """
        self._wait()
        given = self._arguments
        return migrate_state_dict(
            self._state, **given, rest=self._rest, device=device, max_memory=max_memory
        )

    def save(self, path: PathLike, **options: Any) -> ApplyReport:
        """Write the state, after what the stager's writer has before it, and wait for the end.

        Args:
            path: As in `save_async`.
            options: As in `save_async`.

        Returns:
            An `ApplyReport`.

        Raises:
            MigrateError: What `save_async` and `Job.result` raise.
        """
        job = self.save_async(path, **options)
        try:
            return job.result()
        except KeyboardInterrupt:
            job.cancel()
            raise

    @guarded
    def save_async(
        self,
        path: PathLike,
        *,
        output_format: str | None = None,
        max_shard_size: int | str | None = None,
        max_memory: int | str = "1GB",
        fsync: bool = True,
    ) -> Job:
        """Write the state behind the training.

        Args:
            path: The new checkpoint, which must not exist: one file if the name ends in
                .safetensors, .pt, .pth, .bin or .ckpt, else a folder. Folders around it are made.
                Also the URL of a store (`s3://BUCKET/NAME`, and what fsspec writes), but for the
                Hub; the store is asked whether anything is there before this returns.
            output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint) or
                "torch_dist" (Megatron's). Default: as the suffix of the name says, else
                "safetensors".
            max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
            max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
                Default: 1 GB.
            fsync: Wait until everything is on disk; without it a power cut may lose the output.
                Default: True.

        Returns:
            A `Job`. The memory of the snapshot is held until it ends.

        Raises:
            MigrateError: M904 if `path` exists or another job writes it, M911 beside what a run has
                left there, M967 to M969 of a store, M981 in a forked child, and what `plan` raises
                for an output of this form.
        """
        self._writer.check_process()
        options = read_options(
            max_shard_size=max_shard_size, threads=1, max_memory=max_memory, fsync=fsync
        )
        out, request = find_destination(path, self._source.path, self._writer.apart), self._request
        suffix = os.path.splitext(out.name)[1]
        wanted = format_of_ending(suffix) if output_format is None else _format(output_format)
        if wanted is not None:
            request = replace(request, output_format=wanted)
        folder, request = shape_of(out.name, self._source.format, request)
        planned = self.plan
        if not folder or request != self._planned or options.max_shard_size != self._shard:
            planned = plan_for(self._source, request, folder, options.max_shard_size)
        return self._writer.submit(
            Work(
                out,
                self._source.again(),
                request,
                planned,
                options,
                self._message(request, options, planned.digest),
            )
        )

    def _message(
        self, request: Request, options: RunOptions, digest: str
    ) -> Callable[[], Mapping[str, Any]]:
        stream, rest, place = self._stream, self._rest, self._place
        arguments = {
            **self._arguments,
            "output_format": request.output_format,
            "at": request.at,
        }
        return lambda: {
            "head": {
                "arguments": arguments,
                "label": LABEL,
                "rest": rest,
                "digest": digest,
                "folder": place,
                "options": {
                    "max_shard_size": options.max_shard_size,
                    "max_memory": options.max_memory,
                    "fsync": options.fsync,
                },
            },
            "stream": stream,
        }


def _format(name: str) -> str:
    if name not in OUTPUT_FORMATS and not is_foreign(name):
        fail(
            "M115",
            f"there is no output format {printable(name)}",
            help=f"one of {', '.join(OUTPUT_FORMATS)}",
        )
    return name


def source_of(state: Any, wait: Callable[[], None], at: str | None) -> StateSource:
    """A state on the CPU as the `.pt` that `torch.save` would make of it."""
    return _opened(StateStream(state), wait, at, "carry")


def _opened(
    archive: StateStream, wait: Callable[[], None], at: str | None, rest: str
) -> StateSource:
    storages = [buffer_of(storage) for storage in archive.storages]
    return open_stream(archive.stream, storages, LABEL, at, rest=rest == "carry", ready=wait)


def buffer_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage on the CPU, which the view keeps."""
    size = storage.nbytes()
    if not size or storage.device.type != "cpu":
        return memoryview(b"")
    made = (ctypes.c_ubyte * size).from_address(storage.data_ptr())
    made._kept = storage
    return memoryview(made).cast("B")


def prepare(
    state: Any,
    wait: Callable[[], None],
    writer: Writer,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
    rest: Literal["carry", "leave"] = "carry",
    as_it_is: bool = False,
) -> SnapshotMigration:
    """The plan for a snapshot; see `Snapshot.migrate`. `as_it_is`: no rules are meant, so that
    several dicts of tensors are taken together.
    """
    if rest not in REST:
        fail("M115", f"`rest` is {printable(repr(rest))}", help='"carry" or "leave"')
    files = (rules,) if isinstance(rules, (str, os.PathLike)) else tuple(rules)
    given: dict[str, Any] = {
        "to": (to,) if isinstance(to, str) else tuple(to),
        "from_": (from_,) if isinstance(from_, str) else tuple(from_),
        "rules": tuple(os.fspath(file) for file in files),
        "params": None if params is None else dict(params),
        "allow": (allow,) if isinstance(allow, str) else tuple(allow),
    }

    def planned(at: str | None) -> SnapshotMigration:
        request = live_request(**given, at=at)
        return SnapshotMigration(state, wait, writer, request, {**given, "at": at}, rest)

    try:
        return planned(at)
    except MigrateError as error:
        if not as_it_is or {found.code for found in error.diagnostics} != {"M945"}:
            raise
    return planned(".")
