"""The parts of output files on their way into a bucket: gathered in the order of the file, uploaded
side by side, or copied by the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import MigrateError, fail, option, printable
from ..source.blobs import CHANGED_HELP
from ..source.stores.s3_uploads import PARTIAL, CopyRefusedError, ListedPart, S3Output
from .ahead import reading_ahead
from .meeting_in_bucket import RANKS, BucketMeeting
from .part_plan import UPLOADED, PartPlan, UploadPart, held_parts, is_due
from .publish import parsed_line
from .store_journal import (
    begun_unnamed,
    made_words,
    own_words,
    tags_of,
    text_of,
    word_of_made,
)
from .tiles import FileWriter, Tile, WriteJob, Writers, tiles

if TYPE_CHECKING:
    from ..source.index import Source
    from ..source.target import OutputFile
    from .gather import Window

# requests that write, at a time
_FLIGHT = 16


class Sender:
    """Requests of a run side by side, of which no more hold data than memory allows."""

    def __init__(self, max_memory: int, threads: int) -> None:
        self._memory, self._threads = max_memory, threads
        # memory of parts that were sent
        self._free: list[bytearray] = []
        self.limit(UPLOADED)
        self._pool = ThreadPoolExecutor(_FLIGHT, "migrate-upload")
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._sent: list[Future[None]] = []

    def limit(self, nbytes: int) -> None:
        """Parts have up to so many bytes; each thread fills one beside those that are sent."""
        held = held_parts(self._memory, self._threads, nbytes)
        self._room = threading.BoundedSemaphore(max(1, min(_FLIGHT, held)))

    def send(self, work: Callable[[], None]) -> None:
        """Has a request made that holds no data."""
        self._check()
        self._sent.append(self._pool.submit(self._guard, work))

    def buffer(self, nbytes: int) -> bytearray:
        """Memory for a part, which goes to `send_data`; what is in it is left from another."""
        with self._lock:
            found = self._free.pop() if self._free else None
        if found is None:
            return bytearray(nbytes)
        # most parts have one size, and what is allocated stays
        del found[nbytes:]
        found += bytes(nbytes - len(found))
        return found

    def send_data(self, work: Callable[[bytearray], None], data: bytearray) -> None:
        """Has a request made that holds data, when there is room for it."""
        while not self._room.acquire(timeout=0.5):
            self._check()

        def freeing() -> None:
            try:
                work(data)
                with self._lock:
                    self._free.append(data)
            finally:
                self._room.release()

        self.send(freeing)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            if self._error is None:
                work()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            with self._lock:
                self._error = self._error or error

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until all that was sent is done; raises the first error."""
        for one in self._sent:
            one.result()
        self._sent.clear()
        self._check()

    def each(self, works: list[Callable[[], None]]) -> None:
        """Makes these requests and waits for them."""
        for work in works:
            self.send(work)
        self.wait()

    def close(self) -> None:
        """Makes none of the requests that have not begun, and waits for the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Uploads:
    """The uploads of one output: in a `StoreRun` what a partial folder is in a run into files.

    `part`: which one of a run in parts makes them; how many there are where one process goes on
    with what parts have begun, or publishes it.
    """

    # of parts that are there or copied nothing is gathered
    whole = True
    claims: Mapping[Any, Any] = {}

    def __init__(
        self,
        output: S3Output,
        plan: PartPlan,
        sender: Sender,
        journal: Mapping[str, Any],
        part: int | None = None,
    ) -> None:
        self.output, self.plan, self.sender, self.journal = output, plan, sender, journal
        self.run: str = journal["run"]
        self.folder = Path(f"{output.key}{PARTIAL}")
        self.ids: dict[str, str] = {}
        self.present: dict[str, dict[int, ListedPart]] = {}
        self.copied = self.passed = 0
        # the ETags of parts that were made, and how many of them the journal does not have
        self.tags = tags_of(journal.get("tags"))
        self._new, self._part = 0, part
        self._lock, self._noting = threading.Lock(), threading.Lock()

    def open(self, name: str) -> int:
        """No descriptor: a file is its upload."""
        return -1

    def planned(self, file: OutputFile) -> Iterator[tuple[int, UploadPart]]:
        """The parts of a file, or of a piece of one, with their numbers."""
        for number, part in enumerate(self.plan.files[file.name], 1):
            if file.of is None or (file.begin <= part.start and part.stop <= file.size):
                yield number, part

    def missing(self, file: OutputFile) -> Iterator[tuple[int, UploadPart]]:
        """Those that the store does not have."""
        there = self.present.get(file.name, {})
        for number, part in self.planned(file):
            found = there.get(number)
            if found is None or found.size != part.size:
                yield number, part

    def copy(self, name: str, number: int, part: UploadPart, source: Source) -> None:
        """Has a part copied. CheckpointError M905, CopyRefusedError."""
        blob: Any = source.blobs[part.blob]
        _, bucket, key, version = blob.copied_from
        try:
            tag = self.output.copy_part(
                self.output.key_of(name),
                self.ids[name],
                number,
                (bucket, key, version),
                part.origin,
                part.origin + part.size,
            )
        except FileNotFoundError:
            fail(
                "M905",
                f"s3://{printable(bucket)}/{printable(key, 240)}: "
                f"{blob.change() or 'the store no longer has this version'}",
                help=CHANGED_HELP,
            )
        with self._lock:
            self.copied += part.size
        self._made(name, number, tag)

    def put(self, name: str, number: int, data: bytes | bytearray) -> None:
        """Uploads a part."""
        tag = self.output.put_part(self.output.key_of(name), self.ids[name], number, data)
        with self._lock:
            self.passed += len(data)
        self._made(name, number, tag)

    def _made(self, name: str, number: int, tag: str) -> None:
        with self._lock:
            self.tags.setdefault(name, {})[number] = tag
            self._new += 1
            due = is_due(self._new, sum(map(len, self.tags.values())))
            if due:
                self._new = 0
        if due:
            self.note()

    def note(self) -> None:
        """Takes down which parts were made, if the journal is still there: of a run in parts, whose
        journal others write too, beside it.
        """
        with self._noting:
            if self.output.head(self.output.journal) is None:
                return
            if self._part is None:
                self.write_journal()
            else:
                word = word_of_made(self.run, self._part)
                self.output.words().say(word, text_of(self.tags_so_far()))

    def recall(self, of: int) -> None:
        """Reads what was taken down by this one of `of` parts, or by all where this process is
        none of them.
        """
        words = self.output.words()
        if self._part is not None and self._part < of:
            names = [word_of_made(self.run, number) for number in (self._part, of)]
        else:
            # how many parts there are is what a journal says
            names = made_words(words.names(), self.run)
        for name in names:
            for file, found in tags_of(parsed_line(words.said(name))).items():
                self.tags.setdefault(file, {}).update(found)

    def stand(self, name: str, listed: Mapping[int, ListedPart]) -> dict[int, ListedPart]:
        """Those of the parts that the store has which are known to be of this run."""
        known = self.tags.get(name, {})
        return {number: part for number, part in listed.items() if known.get(number) == part.tag}

    def tags_so_far(self) -> dict[str, dict[int, str]]:
        """The ETags of parts that were made, by file and number."""
        with self._lock:
            return {name: dict(found) for name, found in self.tags.items()}

    def list_parts(self, name: str) -> dict[int, ListedPart] | None:
        return self.output.parts(self.output.key_of(name), self.ids[name])

    def write_journal(self, **more: Any) -> None:
        """Writes down which uploads there are, and `more`."""
        output, known = self.output, set(self.journal.get("doubled", ()))
        known |= {name for name in self.ids if output.key_of(name) in output.asked_again}
        doubled = {"doubled": sorted(known)} if known else {}
        named: dict[str, Any] = {"uploads": self.ids, "checksum": output.checksum}
        if self._part is None:
            named["tags"] = self.tags_so_far()
        self.journal = {**self.journal, **named, **doubled, **more}
        output.write_journal(text_of(self.journal), new=False)

    def abort(self) -> None:
        """Throws away all uploads, and the journal."""
        for name, upload in self.ids.items():
            self.output.abort(self.output.key_of(name), upload)
        self.forget()

    def forget(self) -> bool:
        """Removes the journal, what parts have left beside it, and uploads that were begun twice;
        whether that could be done.
        """
        with suppress(MigrateError):
            for key, upload in begun_unnamed(self.journal, self.output):
                self.output.abort(key, upload)
        words: list[str] = []
        if "begun" in self.journal:
            words = own_words(self.output.words().names(), self.run)
            with suppress(MigrateError):
                BucketMeeting(self.output.words(RANKS)).clear()
        return self.output.remove_journal(words)


class PartWriter(FileWriter):
    """The parts of one file that are not copied, which are uploaded as they fill."""

    def __init__(self, run: Writers, file: OutputFile, window: Window) -> None:
        super().__init__(run, file, window)
        uploads: Any = run.partial
        self._uploads: Uploads = uploads
        self._wanted = [(number, part) for number, part in uploads.missing(file) if part.blob < 0]
        self._at, self._open, self._skipped = 0, bytearray(), list[Tile]()

    def ahead(self) -> AbstractContextManager[None]:
        outputs, source, layouts, max_memory = self._run.reading
        spans = [(part.start, part.stop) for _, part in self._wanted]
        if self._in_order():
            spans = [(self.file.begin, self.file.size)]
        parts = []
        for start, stop in _merged(spans):
            for p in self.file.tensors:
                low, high = max(p.offset, start), min(p.offset + p.nbytes, stop)
                if low < high:
                    shift = p.start - p.offset
                    parts.append((outputs[p.key], low + shift, high + shift))
        return reading_ahead(parts, source, layouts, max_memory)

    def jobs(self) -> Iterator[WriteJob]:
        wanted, at, turn, in_order = self._wanted, 0, 0, self._in_order()
        self.hashed = in_order or len(wanted) == len(self._uploads.plan.files[self.file.name])
        for tile in tiles(self.file, self._run.outputs, self._run.layouts, self._run.values):
            needed = []
            for fill in tile.fills:
                while at < len(wanted) and wanted[at][1].stop <= fill.offset:
                    at += 1
                end = fill.offset + fill.length
                if in_order or (at < len(wanted) and wanted[at][1].start < end):
                    needed.append(fill)
            if not needed:
                self._skipped.append(tile)
            for fill in needed:
                yield WriteJob(turn, tile, fill, fill is needed[-1])
                turn += 1

    def put(self, job: WriteJob, data: memoryview) -> None:
        first, end = job.fill.offset, job.fill.offset + len(data)
        while self._at < len(self._wanted):
            number, part = self._wanted[self._at]
            low, high = max(part.start, first), min(part.stop, end)
            if low >= high:
                break
            if not self._open:
                self._open = self._uploads.sender.buffer(part.size)
            self._open[low - part.start : high - part.start] = data[low - first : high - first]
            if high < part.stop:
                break
            filled, self._open = self._open, bytearray()
            self._at += 1
            uploads, name = self._uploads, self.file.name
            uploads.sender.send_data(partial(uploads.put, name, number), filled)
        if job.last:
            self._run.finished(job.tile, job.tile.length)

    def finish(self) -> None:
        super().finish()
        if not self._run.stop.is_set():
            for number, part in self._wanted[self._at :]:
                # a file without bytes
                if not part.size:
                    self._uploads.put(self.file.name, number, b"")
            for tile in self._skipped:
                self._run.finished(tile, 0)
        self._skipped.clear()

    def _in_order(self) -> bool:
        """Whether all of the file is gathered: something in it depends on what is before."""
        parts = self._run.parts
        return self.sums is not None or bool(parts is not None and parts.written_specs)


def send_copies(uploads: Uploads, files: Iterable[OutputFile], source: Source) -> None:
    """Has all missing parts of these files copied that the store copies."""
    for file in files:
        for number, part in uploads.missing(file):
            if part.blob >= 0:
                uploads.sender.send(partial(_copied, uploads, file.name, number, part, source))


def _copied(uploads: Uploads, name: str, number: int, part: UploadPart, source: Source) -> None:
    try:
        uploads.copy(name, number, part, source)
    except CopyRefusedError as error:
        _refuse_copy(uploads.output, source.blobs[part.blob].name, str(error))


def _refuse_copy(output: S3Output, name: str, code: str) -> NoReturn:
    fail(
        "M968",
        f"{printable(output.location, 240)}: the store does not copy from {printable(name)} "
        f"({printable(code, 60)}), and the run was begun with copies",
        help=f"`migrate clean {printable(output.location, 240)}`, then run it again with "
        f"{option('copy', 'never')}",
    )


def _merged(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Spans in order, with those that meet as one."""
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    yield from found
