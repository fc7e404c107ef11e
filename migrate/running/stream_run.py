"""A run into a store that fsspec writes: as one into a folder, but for what holds the bytes.

Each weight file is written from its first byte to its last, and none shows before all are there
(`HeldFiles`). What ended early cannot be gone on with, so nothing of it stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import log
from ..core.errors import Diagnostic, MigrateError, fail, option, printable
from ..core.out_of_memory import lacking, ran_out
from ..core.types import PathLike
from ..source.stores.system_output import PARTIAL, HeldFiles, SystemOutput, refuse_appeared
from .gather import Window
from .resources import RunOptions, RunResult
from .store_run import published_order
from .tiles import FileWriter, TargetRun, WriteJob, Writers

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..source.index import Source
    from ..source.target import OutputFile

WHY = "what fsspec writes passes through this machine"


class StreamedFiles:
    """The files of one output: in a `StreamRun` what a partial folder is in a run into files."""

    # all of each file is gathered here
    whole = True
    claims: Mapping[Any, Any] = {}

    def __init__(self, files: HeldFiles) -> None:
        self.files = files
        self.folder = Path(files.place)

    def open(self, name: str) -> int:
        """No descriptor: the file is begun in the store."""
        self.files.begin(name)
        return -1


class StreamWriter(FileWriter):
    """One file, written as it fills."""

    def __init__(self, run: Writers, file: OutputFile, window: Window) -> None:
        super().__init__(run, file, window)
        streams: Any = run.partial
        self._held: HeldFiles = streams.files

    def put(self, job: WriteJob, data: memoryview) -> None:
        self._held.write(self.file.name, data)
        if job.last:
            self._run.finished(job.tile, job.tile.length)

    def finish(self) -> None:
        super().finish()
        if not self._run.stop.is_set():
            self._held.end(self.file.name, self.file.size)


class StreamRun(TargetRun):
    """The steps of `TargetRun` into a store that fsspec writes."""

    writer = StreamWriter

    def __init__(self, outputs: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(outputs, *arguments, **named)
        self._streams: StreamedFiles | None = None
        if not self.output.by_threads:
            self.options = replace(self.options, threads=1)

    def locate(self, out: PathLike, source: Source) -> Path:
        self.output: SystemOutput = out  # type: ignore[assignment]
        # only for what shows it
        return Path(self.output.root)

    def enter(self, rank: int | None = None) -> Any:
        files = [(file.name, file.size) for file in self.target.files]
        require_nothing_left(self.output)
        held = HeldFiles(self.output, files, self.options.max_memory // 4)
        self._streams = StreamedFiles(held)
        self.partial = self._streams  # type: ignore[assignment]
        return self._streams

    def allocate(self) -> None:
        """There is nothing to allocate."""

    def publish(self) -> RunResult:
        streams, target = self._streams, self.target
        if streams is None:
            raise ValueError("nothing was begun")
        held, small = streams.files, dict(self.side_files)
        small |= dict(() if self.parts is None else self.parts.finish(streams))  # type: ignore[arg-type]
        with log.phase("publishing"):
            for name, content in {**small, **target.small}.items():
                held.add(
                    name,
                    content if isinstance(content, bytes) else Path(str(content)).read_bytes(),
                )
            if found := self.output.objects():
                refuse_appeared(self.output.shown(found[0]))
            weights = [file.name for file in target.files]
            for name in published_order(weights, list(small), list(target.small)):
                held.appear(name)
        report = None if self.ledger is None else self.ledger.report(complete=True)
        left = held.forget()
        return RunResult(
            self.files,
            sum(t.spec.nbytes for t in self.outputs.values()),
            self.written,
            0,
            report,
            left[0] if left else None,
            restored=None if self.parts is None else self.parts.outcome,
            stored=_described(sum(file.size for file in target.files)),
        )

    def fail(self, error: BaseException) -> NoReturn:
        if self._streams is None:
            raise error
        left = self._streams.files.discard()
        try:
            if isinstance(error, Exception) and lacking(error):
                ran_out(error, f"write {printable(self.output.location, 240)}")
            raise error
        except MigrateError as found:
            raise type(found)([self._said(d, left) for d in found.diagnostics]) from error

    def _said(self, found: Diagnostic, left: tuple[str, ...]) -> Diagnostic:
        """The diagnostic, with what the run has left in the store."""
        where = printable(self.output.location, 240)
        notes = [f"{printable(one, 240)} could not be removed" for one in left]
        return replace(
            found, notes=(*found.notes, *(notes or [f"nothing of this run is left at {where}"]))
        )

    def close(self) -> None:
        if self._values is not None:
            self._values.forget()


def _described(nbytes: int) -> dict[str, Any]:
    """As plans and answers say it: fsspec's file systems do not tell their requests."""
    return {"copied": 0, "passed": nbytes, "parts": None, "requests": None, "why": WHY}


def describe_stream(made: Plan) -> dict[str, Any]:
    """What of a run passes through this machine."""
    return _described(sum(file.size for file in made.target.files))


def require_alone(output: SystemOutput, options: RunOptions, shared: bool) -> None:
    """M115 for what such a store cannot do: go on with a run, or take one from several
    processes.
    """
    where = printable(output.location, 240)
    if options.resume:
        fail(
            "M115",
            f"{option('resume', True)}: a run into {where} cannot be resumed, because fsspec "
            "writes whole files; it leaves nothing behind",
            help="leave it out; or write to a folder of this machine, or to S3",
        )
    if shared:
        fail(
            "M115",
            f"one process writes to {where}: fsspec writes whole files",
            help="write to a folder that all processes share, or to S3",
        )


def require_nothing_left(output: SystemOutput) -> None:
    """M911 where a run was killed, or writes now."""
    if output.left():
        where = printable(output.location, 240)
        fail(
            "M911",
            f"{where}{PARTIAL} was left by a run that was killed, or another one is writing there "
            "now",
            help=f"throw it away with `migrate clean {where}`",
        )
