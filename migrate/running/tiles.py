"""Writes a planned checkpoint: output files cut into tiles, each gathered, hashed, written and
journalled.

    write_target(outputs, source, target, out, ...)   the sum of the steps of a TargetRun:
        check_place, examine                          nothing is written yet
        enter: Partial(...); allocate                 a full disk shows here; what can be shared
                                                      is cloned
        write: for each file, in a thread of its own
            as far as the journal is right: read again
            for each tile after it: gather -> hash -> pwrite -> journal line
        source.check_unchanged                        a changed source removes everything
        publish: side files, Partial.check, Partial.publish

A tile is some MiB of one file: what the journal counts in, and what a kill can cost. A tile is made
of fills, that is of what goes through the buffer at once. The cut depends on the plan alone, so a
resumed run finds the same tiles. Each tile is journalled with the checksum of the file up to its
end, because that is computed anyway; a resumed run goes on from the first tile that is not there.

A thread has a file of its own, because file systems let no two write the same file. One that finds
none left helps with another's: they gather side by side, and one writes what they filled, in turn.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

from ..core import log
from ..core.errors import MigrateError, RunError, printable, with_partial_folder
from ..core.out_of_memory import lacking, ran_out
from ..core.spec import BITS
from ..core.types import PathLike
from ..planning.graph import ComputedTensor, stored_sources
from ..source.blobs import room
from .ahead import reading_file
from .checks import FileChecksums, Recorded, check_records, recorded_checksums, require_checks
from .error_statistics import Ledger
from .evaluator import Evaluator, longest_step, reading_step
from .gather import WINDOW, Batch, Gather, Sealed, Segment, Window
from .geometry import STAGE, ByteLayouts
from .publish import HASH, TILE, Partial, check_place, check_places, read_at, write_at, write_failed
from .resources import RunOptions, RunResult, run_together
from .share import LEAST, Shared

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.index import Source
    from ..source.target import OutputFile, Target
    from .fillers import Fillers
    from .restored import RestoredParts

_T = TypeVar("_T")
_DEFAULT = RunOptions()
# bytes that are computed from which on processes are worth their time
MANY = 32 << 20


class Tile(NamedTuple):
    """What the journal counts in."""

    number: int
    offset: int
    length: int
    fills: list[Batch]


def tiles(
    file: OutputFile,
    outputs: Mapping[str, Tensor],
    layouts: ByteLayouts,
    values: Evaluator | None = None,
) -> Iterator[Tile]:
    """The tiles of a file, in order, without gaps. ValueError if target and outputs do not fit."""
    number, fills = 0, []
    first = offset = file.begin
    for fill in _fills(file, outputs, layouts, values):
        fills.append(fill)
        offset = fill.offset + fill.length
        if offset - first >= TILE:
            yield Tile(number, first, offset - first, fills)
            number, first, fills = number + 1, offset, []
    if fills:
        yield Tile(number, first, offset - first, fills)
    if offset != file.size:
        raise ValueError(f"{file.name}: tensors end at {offset}, the file at {file.size}")


def _fills(
    file: OutputFile, outputs: Mapping[str, Tensor], layouts: ByteLayouts, values: Evaluator | None
) -> Iterator[Batch]:
    offset, used = file.begin, 0
    parts: list[Segment] = []
    for content, start, nbytes, begin in _contents(file, outputs):
        if start != offset + used:
            raise ValueError(f"{file.name}: a hole between {offset + used} and {start}")
        if isinstance(content, (bytes, Sealed)):
            step = STAGE
        elif values is None:
            step = layouts.of(content.view, content.spec.dtype, content.spec.nbytes).step
        else:
            step = reading_step(content, layouts, values)
        if used and used + nbytes > STAGE:
            yield Batch(offset, used, parts)
            offset, parts, used = offset + used, [], 0
        end = begin + nbytes
        for first in range(begin, end, step):
            last = min(first + step, end)
            parts.append(Segment(content, first, last, used, last == end))
            used += last - first
            if used >= min(step, STAGE):
                yield Batch(offset, used, parts)
                offset, parts, used = offset + used, [], 0
    if used:
        yield Batch(offset, used, parts)


def _contents(
    file: OutputFile, outputs: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor | bytes | Sealed, int, int, int]]:
    """(content, offset in the file, bytes, the first of its bytes) of all that the file is of."""
    if not file.begin:
        yield file.header, 0, len(file.header), 0
    stops = [placed.offset for placed in file.tensors[1:]] + [file.size]
    for number, (placed, stop) in enumerate(zip(file.tensors, stops, strict=False)):
        tensor = outputs[placed.key]
        yield tensor, placed.offset, placed.nbytes, placed.start
        end = placed.offset + placed.nbytes
        if file.seal is not None and end < stop:
            yield Sealed(number + 1), end, stop - end, 0


class _Stopped(Exception):  # noqa: N818 - leaves a thread after another one failed
    pass


class WriteJob(NamedTuple):
    """A fill to be gathered and committed in its turn; `last`: of its tile."""

    turn: int
    tile: Tile
    fill: Batch
    last: bool


class _Filled(NamedTuple):
    """A job whose bytes are in the buffer of `gather`; `crcs` are those of its parts."""

    job: WriteJob
    gather: Gather
    crcs: Sequence[int]


class FileWriter:
    """The fills of one file: handed out in order to any thread, hashed, written and journalled in
    the same order.

    A file has one writer at a time, and its checksums need its bytes in order; gathering needs
    neither. So a thread whose turn has not come leaves what it filled to the one that writes, and
    goes on with a spare buffer.
    """

    def __init__(self, run: Writers, file: OutputFile, window: Window) -> None:
        import xxhash

        self.window = window
        # of all that is written so far, if all of it passes here
        self.whole, self.hashed = xxhash.xxh3_128(), True
        self._run, self.file = run, file
        self.label = file.name if file.of is None else file.label
        self.descriptor = run.partial.open(file.name)
        self._taking, self._turn = threading.Lock(), threading.Condition()
        # what the archive that is written needs, and what the source records of what is copied
        self.sums: FileChecksums | None = None
        if file.seal is not None or run.recorded:
            self.sums = FileChecksums(file, run.recorded)
        # the fill that is written next, counted from the beginning of the file
        self._next, self._writing = 0, False
        self._filled: dict[int, _Filled] = {}
        # buffers beyond one a thread
        self.spare: list[Gather] = []
        # threads that help, and whether no other may begin to
        self._helping, self._closed = 0, False
        self._jobs = self.jobs()

    def ahead(self) -> AbstractContextManager[None]:
        """Fetches what the file is made of, as long as the context is open."""
        return reading_file(self.file, self._run.partial, *self._run.reading)

    def jobs(self) -> Iterator[WriteJob]:
        turn, there = 0, True
        self._next = 0
        for tile in tiles(self.file, self._run.outputs, self._run.layouts, self._run.values):
            # nothing is handed out, so nothing is hashed elsewhere, before the first that is not
            # there
            there = there and bool(self._run.partial.claims) and self._stands(tile)
            if there:
                turn += len(tile.fills)
                self._next = turn
                continue
            for i, fill in enumerate(tile.fills):
                yield WriteJob(turn, tile, fill, i + 1 == len(tile.fills))
                turn += 1

    def _stands(self, tile: Tile) -> bool:
        """Whether an earlier run wrote this tile as it is, and all before it; enters it then."""
        claim = self._run.partial.claims.get((self.label, tile.number))
        if claim is None or claim[:2] != (tile.offset, tile.length):
            return False
        self._run.go_on()
        whole, found = self.whole.copy(), []
        buffer = room(max(fill.length for fill in tile.fills))
        for fill in tile.fills:
            data = buffer[: fill.length]
            read_at(self.descriptor, data, fill.offset)
            whole.update(data)
            found.append([] if self.sums is None else self.sums.of(fill, data))
        if whole.hexdigest() != claim[2]:
            return False
        self.whole = whole
        if self.sums is not None:
            for fill, crcs in zip(tile.fills, found, strict=True):
                self.sums.take(fill, crcs, buffer)
        self._run.finished(tile, 0)
        return True

    def take(self) -> WriteJob | None:
        with self._taking:
            job = next(self._jobs, None)
        if job is None:
            self._closed = True
        return job

    def join(self) -> bool:
        """Begins to help, if there is anything left to take; `leave` has to follow."""
        with self._turn:
            self._helping += not self._closed
            return not self._closed

    def leave(self) -> None:
        with self._turn:
            self._helping -= 1
            self._turn.notify_all()

    def finish(self) -> None:
        """Waits for those who help."""
        with self._turn:
            self._closed = True
            while self._helping:
                self._turn.wait(0.5)
            self._run.free += [gather.buffer for gather in self.spare]
            self.spare.clear()

    def commit(self, filled: _Filled) -> Gather:
        """Has what is filled written in its turn, by this thread or the one that writes; returns
        what to fill next.
        """
        with self._turn:
            self._filled[filled.job.turn] = filled
            while self._writing or self._next not in self._filled:
                if self.spare:
                    return self.spare.pop()
                self._turn.wait(0.5)
                self._run.go_on()
            self._writing = True
            filled = self._filled.pop(self._next)
        while True:
            # sealed and hashed, and what of it is not shared is written
            job, data = filled.job, filled.gather.buffer[: filled.job.fill.length]
            if self.sums is not None:
                self.sums.take(job.fill, filled.crcs, data)
            self.whole.update(data)
            if self._run.parts is not None:
                self._run.parts.write(job.fill, data)
            self.put(job, data)
            with self._turn:
                self._next += 1
                following = self._filled.pop(self._next, None)
                if following is None:
                    self._writing = False
                    self._turn.notify_all()
                    return filled.gather
                # what it has read is not kept for a tensor that comes later
                filled.gather.release()
                self.spare.append(filled.gather)
                self._turn.notify_all()
            filled = following

    def put(self, job: WriteJob, data: memoryview) -> None:
        """Writes what of a fill is not shared, and journals its tile with the last one."""
        (tile, first), shared = (job.tile, job.fill.offset), self._run.shared
        if shared is None:
            write_at(self.descriptor, data, first)
        else:
            for start, stop in shared.gaps(self.file.name, first, first + len(data)):
                write_at(self.descriptor, data[start - first : stop - first], start)
        if job.last:
            whole = self.whole.hexdigest()
            self._run.partial.claim(self.label, tile.number, tile.offset, tile.length, whole)
            self._run.finished(tile, tile.length)


class Writers:
    """The threads that write some files of a run, and what they share."""

    def __init__(
        self,
        run: TargetRun,
        files: Sequence[OutputFile],
        partial: Partial,
        values: Evaluator | None,
        shared: Shared | None,
        recorded: Recorded,
    ) -> None:
        self.outputs, self.source, self.layouts = run.outputs, run.source, run.layouts
        self.targets, self.partial, self.shared = files, partial, shared
        self.values, self.recorded, self.parts = values, recorded, run.parts
        self.progress = run.options.progress
        self.ledger, self.lost, self.writer = run.ledger, False, run.writer
        self.fillers: Fillers | None = None
        self.reading = run.outputs, run.source, run.layouts, run.options.max_memory
        self.budget = min(WINDOW, run.options.max_memory // (4 * run.options.threads))
        tensors = [run.outputs[placed.key] for file in files for placed in file.tensors]
        if values is None:
            of = run.layouts.of
            longest = max(
                (of(t.view, t.spec.dtype, t.spec.nbytes).step for t in tensors), default=1
            )
        else:
            longest = longest_step(tensors, run.layouts, values)
        # buffers that processes share, and no thread uses; the longest fill
        self.free: list[memoryview] = []
        self.ahead = STAGE + max(STAGE, longest)
        # places of each computed tensor that are not written yet, by its identity
        self.places = Counter(map(id, tensors if values is not None else ()))
        self.total = sum(file.size - file.begin for file in files)
        self.done = self.read = self.written = 0
        self.files: dict[str, dict[str, Any]] = {}
        self.error: BaseException | None = None
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.waiting: queue.SimpleQueue[OutputFile] = queue.SimpleQueue()
        self.lines: list[FileWriter] = []
        self.begun = threading.Condition()

    def go(self, threads: int) -> None:
        """Writes all files; raises the first error after all threads have ended."""
        for file in sorted(self.targets, key=attrgetter("size"), reverse=True):
            self.waiting.put(file)
        if self.values is not None and threads > 1 and self.total >= MANY and self.partial.whole:
            places = [(p, self.outputs[p.key]) for file in self.targets for p in file.tensors]
            of = [
                p.nbytes for p, t in places if any(isinstance(s, ComputedTensor) for s in t.sources)
            ]
            if sum(of) >= MANY:
                self.fillers = self._divided(threads, self.values)
        try:
            run_together(lambda number: self._guard(self._work, number), threads, self.stop.set)
        finally:
            if self.fillers is not None:
                self.lost = self.fillers.end()
        if self.error is not None:
            raise self.error

    def _divided(self, count: int, values: Evaluator) -> Fillers | None:
        """Processes that compute for the threads, where these would do nothing twice."""
        from .fillers import Fillers, FillWork

        def fills(file: OutputFile) -> Iterator[Batch]:
            for tile in tiles(file, self.outputs, self.layouts, values):
                yield from tile.fills

        work = FillWork(self.source, self.layouts, values, self.ledger, self.parts, self.budget)
        tensors = {p.key: self.outputs[p.key] for file in self.targets for p in file.tensors}
        made = Fillers.begin(count, self.ahead, self.targets, tensors, fills, work)
        self.free = [] if made is None else [*made.buffers]
        return made

    def _guard(self, work: Callable[..., _T], *arguments: Any) -> _T | None:
        try:
            return work(*arguments)
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            with self.lock:
                self.error = self.error or error
            self.stop.set()
        return None

    def _work(self, number: int) -> None:
        """Writes files until none is left, then helps with those that others write."""
        try:
            stage = self.free.pop() if self.free else room(self.ahead)
            window = Window()
        except MemoryError:
            if number:
                return  # the others do it
            raise
        near = not self.source.blobs or getattr(self.source.blobs[0], "requests", None) is None
        while True:
            try:
                file = self.waiting.get_nowait()
            except queue.Empty:
                break
            line = self.writer(self, file, window)
            try:
                with self.begun:
                    self.lines.append(line)
                    self.begun.notify_all()
                with nullcontext() if near else line.ahead():
                    try:
                        stage = self._guard(self._serve, number, line, stage) or stage
                    finally:
                        line.finish()
                self.go_on()
                with self.lock:
                    whole = line.hashed and file.of is None
                    found = line.whole.hexdigest() if whole else None
                    self.files[file.name] = {"size": file.size - file.begin, HASH: found}
                    if file.of is not None and file.seal is not None and line.sums is not None:
                        self.files[file.name]["crcs"] = line.sums.crcs()
            finally:
                if line.descriptor >= 0:
                    os.close(line.descriptor)
        with self.begun:
            while len(self.lines) < len(self.targets):
                self.begun.wait(0.5)
                self.go_on()
        while (other := next((line for line in self.lines if line.join()), None)) is not None:
            try:
                spare = None
                with suppress(MemoryError):
                    spare = self.free.pop() if self.free else room(self.ahead)
                stage = self._serve(number, other, stage, spare)
            finally:
                other.leave()

    def _serve(
        self, number: int, line: FileWriter, stage: memoryview, spare: memoryview | None = None
    ) -> memoryview:
        """Fills and commits until nothing is left to take; returns a buffer that nothing reads."""
        compute = None if self.values is None else self.values.leaf
        common = compute, self.budget, line.window
        gather = Gather(self.source, self.layouts, stage, *common)
        if spare is not None:
            line.spare.append(Gather(self.source, self.layouts, spare, *common))
        while (job := line.take()) is not None:
            self.go_on()
            stage, fillers = gather.buffer, self.fillers
            if fillers is None or not fillers.fill(number, line.file, job.turn, job.fill, stage):
                gather.take(job.fill)
            crcs = [] if line.sums is None else line.sums.of(job.fill, stage)
            gather = line.commit(_Filled(job, gather, crcs))
        return gather.buffer

    def finished(self, tile: Tile, written: int) -> None:
        for fill in () if self.values is None else tile.fills:
            for part in fill.parts:
                if (
                    self.values is not None
                    and part.last
                    and not isinstance(part.content, (bytes, Sealed))
                    and any(isinstance(s, ComputedTensor) for s in part.content.sources)
                    and self._last_place(part.content)
                ):
                    self.values.done(part.content)
                    if self.fillers is not None:
                        self.fillers.finished(part.content)
        with self.lock:
            self.done += tile.length
            self.written += written
            if self.progress is not None:
                self.progress(self.done, self.total)

    def _last_place(self, tensor: Tensor) -> bool:
        """Counts a place of the tensor that is written; whether it was the last."""
        with self.lock:
            self.places[id(tensor)] -= 1
            return not self.places[id(tensor)]

    def go_on(self) -> None:
        if self.stop.is_set():
            raise _Stopped


class TargetRun:
    """A run into files as its steps, which a scheduler of several processes takes one by one.

    Call sequence: `examine` the files that this process writes, `enter` the partial folder,
    `allocate`, `write` those files, `publish`, within `ending` or with `fail` and `close`.
    `write_target` is their sum. Of several processes one allocates and publishes for all.

    Raises QuestionError M904 and ValueError for a place or a plan that cannot be written.
    """

    # what writes one file
    writer = FileWriter

    def __init__(
        self,
        outputs: Mapping[str, Tensor],
        source: Source,
        target: Target,
        out: PathLike,
        *,
        digest: str,
        side_files: Sequence[tuple[str, bytes | PathLike]] = (),
        options: RunOptions = _DEFAULT,
        parts: RestoredParts | None = None,
    ) -> None:
        self.path = self.locate(out, source)
        if options.threads < 1:
            raise ValueError(f"{options.threads} threads write nothing")
        if side_files and not target.folder:
            raise ValueError("a target that is one file has no side files")
        check_places(outputs, target)
        self.outputs, self.source, self.target = outputs, source, target
        self.digest, self.side_files, self.options = digest, side_files, options
        self.parts = parts
        self.layouts = ByteLayouts()
        self.ledger: Ledger | None = None
        self.partial: Partial | None = None
        self._values: Evaluator | None = None
        self._recorded: Recorded = {}
        self._shared: Shared | None = None
        # of the files that this process wrote, and the bytes it wrote for them
        self.files: dict[str, dict[str, Any]] = {}
        self.written = 0
        # whether errors of computed tensors were measured by a process that has died
        self.lost = False

    def locate(self, out: PathLike, source: Source) -> Path:
        """Where `out` is, which is free. QuestionError M904."""
        path = Path(os.path.abspath(out))
        check_place(path, source.path)
        return path

    def examine(self, files: Sequence[OutputFile], checks: Sequence[ValueCheck] = ()) -> None:
        """Makes ready what computes these files and compares their checksums. RunError M919;
        CheckpointError of `checks` that fail, and M942. Writes nothing.
        """
        outputs = self.outputs
        if files is not self.target.files:
            outputs = {p.key: outputs[p.key] for file in files for p in file.tensors}
        if self.parts is not None:
            self.parts.watch(outputs)
        if any(
            BITS[t.spec.dtype] < 8 or any(isinstance(s, ComputedTensor) for s in t.sources)
            for t in self.outputs.values()
        ):
            self.ledger = Ledger(self.outputs)
            self._values = Evaluator(
                self.source,
                self.layouts,
                # each place in a file reads its tensor once
                [outputs[placed.key] for file in files for placed in file.tensors],
                self.options.max_memory,
                threads=self.options.threads,
                device=self.options.device,
                ledger=self.ledger,
                watch=None if self.parts is None else self.parts.read,
            )
            self._values.require(outputs.values())
        if checks:
            require_checks(checks, self.source, self.options.max_memory)
        if self.source.index.sums():
            self._recorded = recorded_checksums(outputs, files, self.source, self.layouts)
            read = {at for tensor in outputs.values() for at in stored_sources(tensor)}
            check_records(read, self.source, self._recorded, self.options.threads)

    def enter(self, rank: int | None = None) -> Partial:
        """The partial folder, made, or taken over with all that earlier runs claim to have written.
        QuestionError M911, M918, M926. `rank`: of this process, where several write.
        """
        self.partial = Partial(
            self.path,
            self.target,
            self.digest,
            resume=self.options.resume,
            source=self.source.identities(),
            small=(
                *self.target.small,
                *(name for name, _ in self.side_files),
                *(() if self.parts is None else self.parts.names),
            ),
            rank=rank,
        )
        return self.partial

    def allocate(self) -> None:
        """Makes all files at their full size, as far as possible out of what the source holds.
        RunError M909 where there is no room.
        """
        partial = self._entered()
        if any(file.size >= LEAST for file in self.target.files):
            self._shared = Shared(
                self.outputs, self.source, self.target, self.layouts, partial.folder
            )
        partial.require(
            sum(len(c) if isinstance(c, bytes) else os.stat(c).st_size for _, c in self.side_files)
            + (0 if self.parts is None else self.parts.nbytes),
            self._shared,
        )
        partial.allocate(self._shared)

    def write(self, files: Sequence[OutputFile]) -> None:
        """Writes these files, which were examined, and looks whether the source is the same still.
        CheckpointError M905, M942; RunError M909, M913, M922.
        """
        work = Writers(self, files, self._entered(), self._values, self._shared, self._recorded)
        with log.phase(f"writing {work.total} bytes"):
            work.go(self.options.threads)
        self.source.check_unchanged()
        self.files |= work.files
        self.written += work.written
        self.lost |= work.lost

    def share(self, files: Sequence[OutputFile]) -> None:
        """Takes what these files can share with the source, in a process that did not allocate."""
        partial = self._entered()
        if any(file.size >= LEAST for file in files):
            part = replace(self.target, files=tuple(files))
            self._shared = Shared(self.outputs, self.source, part, self.layouts, partial.folder)
            for file in files:
                descriptor = partial.open(file.name)
                try:
                    self._shared.clone(file.name, descriptor)
                finally:
                    os.close(descriptor)

    def account(self) -> dict[str, Any]:
        """What this process wrote, as `add` takes it in another one."""
        tallies = None if self.ledger is None else self.ledger.tallies()
        found = {"files": self.files, "written": self.written, "tallies": tallies}
        found["lost"] = self.lost
        return found if self.parts is None else {**found, "parts": self.parts.account()}

    def add(self, account: Mapping[str, Any]) -> None:
        """Enters what another process wrote."""
        self.files |= account["files"]
        self.written += account["written"]
        self.lost |= account["lost"]
        if self.ledger is not None and account["tallies"] is not None:
            self.ledger.add(account["tallies"])
        if self.parts is not None:
            self.parts.add(account["parts"])

    def publish(self) -> RunResult:
        """Adds the small files, checks all that is written, and lets the target appear. RunError
        M913, QuestionError M904.
        """
        partial = self._entered()
        for name, content in (*self.target.small.items(), *self.side_files):
            partial.add(name, content if isinstance(content, bytes) else Path(content))
        for name, content in () if self.parts is None else self.parts.finish(partial):
            partial.add(name, content)
        partial.check()
        with log.phase("publishing"):
            partial.publish(fsync=self.options.fsync)
        shared, report = self._shared, None
        if self.ledger is not None:
            report = self.ledger.report(
                complete=not self.lost
                and self.written == sum(file.size for file in self.target.files)
            )
        return RunResult(
            self.files,
            sum(t.spec.nbytes for t in self.outputs.values()),
            self.written,
            0 if shared is None else sum(shared.nbytes(file.name) for file in self.target.files),
            report,
            str(partial.folder) if partial.left else None,
            restored=None if self.parts is None else self.parts.outcome,
        )

    def fail(self, error: BaseException) -> NoReturn:
        """Raises what the error of a step means, and keeps the partial folder where a later run can
        go on with it.
        """
        partial, doing = self.partial, f"write {printable(str(self.path), 300)}"
        if partial is None:
            raise error
        if isinstance(error, OSError):
            write_failed(error, partial.folder, f"cannot {doing}")
        if isinstance(error, RunError):
            # what reads and computes knows nothing of the folder
            raise RunError(
                [with_partial_folder(d, partial.folder) for d in error.diagnostics]
            ) from error
        if isinstance(error, MigrateError):
            if not partial.kept and not _appeared(error):
                partial.discard()
        elif isinstance(error, Exception):
            # a folder with nothing in it is only in the way
            if not partial.kept and not partial.begun:
                partial.discard()
            if lacking(error):
                ran_out(error, doing, partial=partial.folder)
        raise error

    def close(self) -> None:
        """Lets go of the journal and of what was computed."""
        if self.partial is not None:
            self.partial.close()
        if self._values is not None:
            self._values.forget()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within it are the steps: an error goes through `fail`, and then all is let go of."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again
            self.fail(error)
        finally:
            self.close()

    def _entered(self) -> Partial:
        if self.partial is None:
            raise ValueError("the partial folder was not entered")
        return self.partial


class Undoing(Protocol):
    """What writes a folder beside the output (`undo`), in the order of these steps."""

    def prepare(self) -> None:
        """Writes all of it, under the name of a partial one."""

    def appear(self) -> None:
        """Publishes it."""

    def end(self, error: BaseException | None) -> None:
        """Lets go of it; after an error keeps what a later run can go on with."""


def write_target(
    outputs: Mapping[str, Tensor],
    source: Source,
    target: Target,
    out: Any,
    *,
    checks: Sequence[ValueCheck] = (),
    undo: Undoing | None = None,
    kind: type[TargetRun] = TargetRun,
    **named: Any,
) -> RunResult:
    """Writes `outputs` to `out` as `target` says, and publishes it whole or not at all; what is
    `named` goes to the run of that `kind`.

    `digest` identifies the plan: a partial folder is resumed only by the same. `side_files` are
    (name, bytes or a path to copy). A resumed run takes over what an earlier one wrote of the same
    files; of what lies in memory it writes all again. Progress is reported after each tile, by one
    thread at a time. Memory stays under the limit but for interpreter and libraries. `undo` writes
    what the way back does not bring back: it is complete before `out` appears.

    Evaluator, statistics of errors, checksums and shared extents are made where there is something
    for them: a tensor that is computed or has elements below a byte, an archive that records or
    needs checksums, a file as long as the shortest extent that is shared.

    Raises QuestionError M904, M911, M918, M926; CheckpointError M905 and those of failed `checks`;
    RunError M909, M913, M919, M922. The partial folder is kept after a RunError or an interrupt,
    and removed after a CheckpointError, or anything unforeseen before the first tile was written.
    ValueError if `threads` is less than one.
    """
    run = kind(outputs, source, target, out, **named)
    # as `ending`, which would be called by every run
    try:
        run.examine(target.files, checks)
        run.enter()
        run.allocate()
        if undo is not None:
            undo.prepare()
        run.write(target.files)
        if undo is not None:
            undo.appear()
        return run.publish()
    except BaseException as error:  # noqa: BLE001 - raised again
        if undo is not None:
            undo.end(error)
        run.fail(error)
    finally:
        if undo is not None:
            undo.end(None)
        run.close()


def _appeared(error: MigrateError) -> bool:
    # the output is finished and stays resumable when only its name was taken meanwhile
    return any(d.code == "M904" for d in error.diagnostics)
