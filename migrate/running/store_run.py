"""A run into a bucket: as one into a folder, but for what holds the bytes.

    OUT/...                            the output, of which nothing shows before all is there
    OUT.migrate-partial/journal.json   the plan's digest, the source's state, and the uploads

Each weight file is one multipart upload. What the threads of a run gather comes in the order of the
file, is collected to parts, and these are uploaded side by side; ranges that only move the store
copies itself (`part_plan`). When every part is there, which the store is asked, all weight files
but one appear, then the side files, and then one after the other what tells a reader that the set
is whole, last what tells it most.

A resumed run asks the store which parts it has. A part is there as a whole or not at all, and was
compared with its checksum on the way. The journal has the ETags that the store has answered with: a
part with another is made again, and so are those that a killed run had not taken down yet. Of a run
in parts, whose journal is not one process's, each has those of its own beside it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import log
from ..core.errors import (
    CheckpointError,
    Diagnostic,
    MigrateError,
    fail,
    option,
    printable,
)
from ..core.out_of_memory import lacking, ran_out
from ..core.types import PathLike
from ..source.blobs import read_bytes
from ..source.index import with_all_tensors
from ..source.paths import HISTORY, METADATA
from ..source.shards import INDEX
from ..source.stores.checksums import checksum_named
from ..source.stores.s3_uploads import (
    GONE,
    KEPT,
    PARTIAL,
    CopyRefusedError,
    ListedPart,
    S3Output,
)
from .copied_sums import compare_object, copied_parts
from .geometry import ByteLayouts
from .part_plan import UPLOADED, PartPlan, UploadPart, part_size, plan_parts
from .part_writer import PartWriter, Sender, Uploads, send_copies
from .pieces import deal_files
from .resources import RunOptions, RunResult
from .store_journal import (
    FORMAT_VERSION,
    begun_unnamed,
    parse_journal,
    refuse_left,
    require_same,
    text_of,
)
from .tiles import TargetRun

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..planning.plan import Plan
    from ..source.index import Source
    from ..source.stores.system_output import SystemOutput
    from ..source.target import OutputFile

# what is read back at a time
_STEP = 8 << 20


class StoreRun(TargetRun):
    """The steps of `TargetRun` into a bucket. `enter` begins the uploads or takes them over."""

    writer = PartWriter
    # whether no other process writes the same output
    _alone = True
    # which part this is of a run in parts
    _number: int | None = None

    def __init__(self, outputs: Mapping[str, Tensor], *arguments: Any, **named: Any) -> None:
        super().__init__(outputs, *arguments, **named)
        self.uploads: Uploads | None = None
        self._sender = Sender(self.options.max_memory, self.options.threads)
        # whether an earlier run computed some of it
        self._resumed = False
        self._uploaded = part_size(self.options.max_memory, self.options.threads)
        # that the store keeps of what is copied from, once they were asked for
        self._sums: dict[int, tuple[str, int]] | None = None
        # what the journal of a run in parts says beside, and how many there are
        self._more: Mapping[str, Any] = {}
        self._of: int | None = None
        # as the run was begun; None where it is not yet
        self._alike: bool | None = None

    def locate(self, out: PathLike, source: Source) -> Path:
        self.output: S3Output = out  # type: ignore[assignment]
        # only for what shows it
        return Path(self.output.key)

    def enter(self, rank: int | None = None) -> Any:
        if rank is not None:
            raise ValueError("several processes do not write into one bucket")
        there = self.output.read_journal()
        if there is not None:
            self._take_over(parse_journal(there[0], self.output))
        elif not self._begin():
            refuse_left(self.output)
        return self._begun()

    def _begun(self) -> Uploads:
        if self.uploads is None:
            raise ValueError("nothing was begun")
        parts = [part for found in self.uploads.plan.files.values() for part in found]
        self._sender.limit(max((p.size for p in parts if p.blob < 0), default=0) or UPLOADED)
        self.uploads.whole = not self._resumed and all(part.blob < 0 for part in parts)
        self.partial = self.uploads  # type: ignore[assignment]
        return self.uploads

    def _head(self) -> dict[str, Any]:
        """What the journal of any run of this plan over this state of the source says."""
        found = self.source.identities()
        stood = None if found is None else {name: list(one[1:]) for name, one in found.items()}
        return {
            "format_version": FORMAT_VERSION,
            "kind": "journal",
            "digest": self.digest,
            "single": self.output.single,
            "source": stood,
        }

    def _plan(self, copy: str) -> PartPlan:
        return plan_parts(
            self.target,
            self.outputs,
            self.source,
            self.layouts,
            self.output,
            copy=copy,
            parts=self.parts,
            recorded=bool(self.source.index.sums()),
            read_back=self.options.read_back,
            edges=self._edges(),
            uploaded=self._uploaded,
        )

    @property
    def whole(self) -> bool:
        """Whether no file is written in pieces: where parts have to be alike, as `--copy never` may
        mean of a store that we do not know, and where what is written is compared.
        """
        compared = self.parts is not None and bool(self.parts.written_specs)
        alike = self._alike
        if alike is None:
            alike = self.options.copy == "never" or self.output.equal_parts() is not None
        return compared or alike

    def deal(self, of: int) -> list[list[OutputFile]]:
        """What each of `of` parts uploads."""
        return deal_files(self.target, self.outputs, of, whole=self.whole, uploaded=True)

    def _edges(self) -> dict[str, list[int]]:
        """Where files are divided among parts of the run, and where the tail of an archive is."""
        edges: dict[str, set[int]] = {}
        for own in () if self._of is None else self.deal(self._of):
            for piece in own:
                if piece.of is not None:
                    edges.setdefault(piece.name, set()).update((piece.begin, piece.size))
        sizes = {file.name: file.size for file in self.target.files}
        return {name: sorted(found - {0, sizes[name]}) for name, found in edges.items()}

    def _begin(self) -> bool:
        """Begins all uploads, and tries whether the store copies; False if another run has begun
        meanwhile.
        """
        output, run, others = self.output, secrets.token_hex(16), list[str]()
        # each of these takes a store some time, and none needs another
        self._sender.send(partial(require_free, output))
        self._sender.send(lambda: others.extend(output.uploads()))
        plan = self._plan(self.options.copy)
        output.preferred = self._most_kept(plan)
        self._sender.wait()
        journal = {
            **self._head(),
            **self._more,
            "run": run,
            "parts": plan.digest,
            "copied": plan.copied > 0,
            "alike": self.whole,
            "uploaded": self._uploaded,
            "files": [file.name for file in self.target.files],
            # those that are not of this run
            "others": sorted(others),
            "uploads": {},
        }
        if not output.write_journal(text_of(journal), new=True):
            return False
        self.uploads = uploads = self._started(plan, journal)
        uploads.write_journal()
        refused = self._try_copy(uploads)
        # the part that was tried may be another one's
        more: dict[str, Any] = {"ready": True, "tags": uploads.tags_so_far()} if self._more else {}
        if refused is not None:
            plan = replace(self._plan("never"), why=f"the store refuses copies ({refused})")
            uploads.plan = plan
            more |= {"parts": plan.digest, "copied": False, "why": plan.why}
        if more:
            uploads.write_journal(**more)
        return True

    def _kept_sums(self, plan: PartPlan) -> dict[int, tuple[str, int]]:
        """The checksums that the store keeps of what is copied from, by number of the blob."""
        if self._sums is None:
            self._sums = found = dict[int, tuple[str, int]]()

            def ask(number: int) -> None:
                blob: Any = self.source.blobs[number]
                kept = self.output.kept_checksum(blob.copied_from[1:], blob.size)
                if kept is not None:
                    found[number] = kept

            self._sender.each([partial(ask, number) for number in plan.sources])
        return self._sums

    def _most_kept(self, plan: PartPlan) -> str | None:
        """The checksum that is kept of the most bytes of what is copied from."""
        if self.options.read_back or not plan.copied:
            return None
        found = Counter[str]()
        for number, (name, _) in self._kept_sums(plan).items():
            found[name] += self.source.blobs[number].size
        return max(found, key=found.__getitem__, default=None)

    def _started(
        self, plan: PartPlan, journal: Mapping[str, Any], names: list[str] | None = None
    ) -> Uploads:
        """Uploads for these files, or all."""
        output = self.output
        uploads = self._uploads_of(plan, journal)
        if self.uploads is None:
            self.uploads = uploads
        files = list(plan.files) if names is None else names

        def begin(name: str) -> None:
            uploads.ids[name] = output.begin(output.key_of(name), uploads.run)

        # the first one finds out which checksum is taken
        for name in files[:1]:
            begin(name)
        refused, output.refused = output.refused, []
        aborts = [partial(output.abort, key, upload) for key, upload in refused]
        self._sender.each([*(partial(begin, name) for name in files[1:]), *aborts])
        return uploads

    def _uploads_of(self, plan: PartPlan, journal: Mapping[str, Any]) -> Uploads:
        part = self._of if self._number is None else self._number
        return Uploads(self.output, plan, self._sender, journal, part)

    def _try_copy(self, uploads: Uploads) -> str | None:
        """Has the shortest part that is copied copied; the store's code if it refuses."""
        copies = [
            (part.size, name, number, part)
            for name, planned in uploads.plan.files.items()
            for number, part in enumerate(planned, 1)
            if part.blob >= 0
        ]
        if not copies:
            return None
        _, name, number, part = min(copies)
        try:
            uploads.copy(name, number, part, self.source)
        except CopyRefusedError as error:
            return printable(str(error), 60)
        uploads.present.setdefault(name, {})[number] = ListedPart(part.size, {})
        return None

    def _take_over(self, found: Mapping[str, Any], names: Collection[str] | None = None) -> None:
        """Goes on with what an earlier run of this plan has begun. M911, M918. `names`: it is at
        work, and this process does these files of it.
        """
        output = self.output
        if not self.options.resume:
            refuse_left(output)
        for key in output.objects(most=1000):
            there = output.head(key)
            if there is not None and there[1] != found["run"]:
                refuse_taken(output, [key])
        require_same(self._head(), found, output)
        self._resumed = True
        if isinstance(begun := found.get("begun"), dict) and type(begun.get("of")) is int:
            self._of = begun["of"]
        # with more memory or less it stays as it was begun
        self._uploaded = found.get("uploaded", UPLOADED)
        self._alike = found.get("alike", self.output.equal_parts() is not None)
        copy = self.options.copy
        if not found["copied"]:
            copy = "never"
        plan = self._plan(copy)
        if plan.digest != found["parts"]:
            fail(
                "M918",
                f"{printable(output.location, 240)}: what was uploaded so far was cut into other "
                "parts",
                help=f"run it with the same {option('copy')} and {option('read_back')} as before, "
                f"or `migrate clean "
                f"{printable(output.location, 240)}` and start over",
            )
        if not found["copied"]:
            plan = replace(plan, why=found.get("why") or self._plan(self.options.copy).why)
        for key, upload in begun_unnamed(found, output) if names is None else ():
            output.abort(key, upload)
        output.checksum = found.get("checksum")
        self.uploads = uploads = self._uploads_of(plan, found)
        uploads.ids = dict(found["uploads"])
        if self._of is not None:
            uploads.recall(self._of)
        gone = list[str]()

        def look(name: str) -> None:
            listed = uploads.list_parts(name) if name in uploads.ids else None
            there = output.head(output.key_of(name)) if listed is None else None
            if there is not None and there[1] == found["run"]:
                # completed before the run ended
                listed = {
                    number: ListedPart(part.size, {})
                    for number, part in enumerate(plan.files[name], 1)
                }
            elif there is not None:
                refuse_taken(output, [output.key_of(name)])
            if listed is None:
                gone.append(name)
            else:
                uploads.present[name] = listed if there is not None else uploads.stand(name, listed)

        self._sender.each([partial(look, n) for n in plan.files if names is None or n in names])
        if gone and names is not None:
            fail(
                "M913",
                f"{printable(gone[0])}: the store does not know the upload any more that was begun "
                "for it",
                help=f"`migrate clean {printable(output.location, 240)}` and start over",
            )
        if gone:
            # not before it is known which of them are there
            for name in gone:
                uploads.tags.pop(name, None)
            uploads.ids = {name: one for name, one in uploads.ids.items() if name not in gone}
            uploads.write_journal()
            uploads.ids |= self._started(plan, found, gone).ids
            uploads.write_journal()

    def allocate(self) -> None:
        """There is nothing to allocate."""

    def write(self, files: Any) -> None:
        if self.uploads is not None:
            send_copies(self.uploads, files, self.source)
        super().write(files)
        with log.phase("waiting for the store"):
            self._sender.wait()
        # the last parts may have been copied since
        self.source.check_unchanged()
        if self.uploads is not None:
            self.written = self.uploads.copied + self.uploads.passed
        self.lost |= self._resumed

    def publish(self) -> RunResult:
        uploads = self.uploads
        if uploads is None:
            raise ValueError("nothing was begun")
        output, target, run = self.output, self.target, uploads.run
        small = dict(self.side_files)
        small |= dict(() if self.parts is None else self.parts.finish(self.partial))  # type: ignore[arg-type]
        parts = self._complete_parts(uploads)
        steps = published_order(list(parts), list(small), list(target.small))
        compared = self._compare(uploads, parts, steps)

        def appear(name: str) -> None:
            key = output.key_of(name)
            if name not in parts:
                content = target.small.get(name, small.get(name))
                data = content if isinstance(content, bytes) else Path(str(content)).read_bytes()
                output.put(key, data, run)
            elif parts[name]:
                output.complete(key, uploads.ids[name], parts[name], run)

        with log.phase("publishing"):
            for names in side_by_side(steps, list(parts)[:-1], list(small)):
                # who interrupts a run waits for no thread, where none is needed
                if len(names) == 1:
                    appear(names[0])
                else:
                    self._sender.each([partial(appear, name) for name in names])
                for name in names:
                    if name in parts and self.options.read_back:
                        self._read_back(uploads, name, steps)
        left = None if uploads.forget() else f"s3://{output.bucket}/{output.journal}"
        report = None
        if self.ledger is not None:
            report = self.ledger.report(complete=not self.lost)
        described = uploads.plan.described(len(small) + len(target.small))
        stored = {**described, "checksum": output.checksum, "read_back": self.options.read_back}
        stored["compared"] = compared
        return RunResult(
            self.files,
            sum(t.spec.nbytes for t in self.outputs.values()),
            self.written,
            0,
            report,
            left,
            restored=None if self.parts is None else self.parts.outcome,
            stored=stored,
        )

    def _compare(
        self, uploads: Uploads, listed: Mapping[str, Mapping[int, ListedPart]], names: list[str]
    ) -> int:
        """How many bytes that were copied the checksums of the store were compared of. RunError
        M913 where a part differs, CheckpointError M942 where the source does; nothing of the files
        `names` stays then.
        """
        plan, kind = uploads.plan, checksum_named(self.output.checksum)
        if self.options.read_back or not plan.copied or kind is None:
            return 0
        done = 0
        copied = copied_parts(plan, listed, kind)
        kept = self._kept_sums(plan) if copied else {}
        for number, several in copied.items():
            blob, (name, whole) = self.source.blobs[number], kept.get(number, ("", 0))
            if name != kind.name:
                continue
            found = compare_object(kind, whole, blob, number, several)
            if found.part is not None:
                notes = self._withdraw(uploads, names)
                self._refuse_copied(found.part.file, found.part.part, notes)
            if found.blob is not None:
                self._withdraw(uploads, names)
                fail(
                    "M942",
                    f"{printable(blob.name)}: its bytes are not those that the store keeps the "
                    f"{name} of",
                    help="fetch it again, or take another copy of the checkpoint",
                )
            done += found.nbytes
        return done

    def _read_back(self, uploads: Uploads, name: str, names: list[str]) -> None:
        """RunError M913 unless what the store has copied is what the source has. Then, and where
        the source is another one by now, nothing of the output's files, `names`, stays.
        """
        try:
            part = self._differing(uploads, name)
        except CheckpointError:
            self._withdraw(uploads, names)
            raise
        if part is None:
            return
        self._refuse_copied(name, part, self._withdraw(uploads, names))

    def _refuse_copied(self, name: str, part: UploadPart, notes: tuple[str, ...]) -> NoReturn:
        """M913 for a part of this file."""
        fail(
            "M913",
            f"{printable(self.output.shown(self.output.key_of(name)), 240)}: bytes {part.start} to "
            f"{part.stop - 1} are not those of {printable(self.source.blobs[part.blob].name)}, "
            "which the store was to copy",
            notes=notes,
            help=f"run it again with {option('copy', 'never')}",
        )

    def _differing(self, uploads: Uploads, name: str) -> UploadPart | None:
        """The first part of a file that the store has copied wrongly."""
        key = self.output.key_of(name)
        for part in uploads.plan.files[name]:
            if part.blob < 0:
                continue
            blob, at = self.source.blobs[part.blob], part.origin
            for found in self.output.stretches(key, part.start, part.stop, _STEP):
                if read_bytes(blob, at, len(found)) != found:
                    return part
                at += len(found)
            if at != part.origin + part.size:
                return part
        return None

    def _withdraw(self, uploads: Uploads, names: list[str]) -> tuple[str, ...]:
        """Removes of these files all that this run has made, and says what became of them. What
        another process has finished meanwhile stays: the journal is gone by then.
        """
        output, self.uploads = self.output, None
        found = output.read_journal()
        if found is None or parse_journal(found[0], output)["run"] != uploads.run:
            return ("another process has finished this output meanwhile, and it stays",)
        keys = [output.key_of(name) for name in reversed(names)]
        left = [key for key in keys if not output.remove(key, uploads.run)]
        with suppress(MigrateError):
            uploads.abort()
        if left:
            return tuple(
                f"{printable(output.shown(key), 240)} could not be removed" for key in left
            )
        return ("what had appeared of the output was removed, and no upload is left",)

    def _complete_parts(self, uploads: Uploads) -> dict[str, dict[int, ListedPart]]:
        """What the store has of each file, which is all that was planned; nothing for files that
        have appeared before. RunError M913.
        """
        found: dict[str, dict[int, ListedPart]] = {}

        def look(name: str) -> None:
            planned, listed = uploads.plan.files[name], uploads.list_parts(name)
            if listed is None:
                there = self.output.head(self.output.key_of(name))
                if there is not None and there[1] == uploads.run:
                    found[name] = {}
                    return
            sizes = {number: part.size for number, part in enumerate(planned, 1)}
            here = listed or {}
            # two attempts at one part of a run may have made it, each with an ETag of its own
            known = uploads.tags.get(name, {}) if self._of is None else {}
            other = any(here[n].tag != tag for n, tag in known.items() if n in here)
            if other or {n: p.size for n, p in here.items()} != sizes:
                fail(
                    "M913",
                    f"{printable(name)}: the store does not have the parts that were sent to it",
                    help=f"run it again with {option('resume', True)}",
                )
            found[name] = listed or {}

        self._sender.each([partial(look, name) for name in uploads.plan.files])
        return {name: found[name] for name in uploads.plan.files}

    def fail(self, error: BaseException) -> NoReturn:
        uploads = self.uploads
        self._sender.close()
        if uploads is None:
            raise error
        if self._alone and self.source.identities() is None:
            self._end_of_memory(error, uploads)
        if not (isinstance(error, MigrateError) and GONE in error.diagnostics[0].notes):
            with suppress(MigrateError):
                uploads.note()
        # what a store refuses it may allow to a later run
        refused = isinstance(error, MigrateError) and error.diagnostics[0].code == "M968"
        if self._alone and isinstance(error, CheckpointError) and not refused:
            with suppress(MigrateError):
                uploads.abort()
        elif isinstance(error, MigrateError):
            raise self._kept(error) from error
        elif isinstance(error, Exception) and lacking(error):
            ran_out(error, f"write {printable(self.output.location, 300)}")
        raise error

    def _end_of_memory(self, error: BaseException, uploads: Uploads) -> NoReturn:
        """Removes all that this run has made: what lay in memory cannot be told from what another
        process holds, so no run goes on with it.
        """
        parts = () if self.parts is None else self.parts.names
        sides = [name for name, _ in self.side_files]
        weights = [file.name for file in self.target.files]
        notes: tuple[str, ...] = ()
        try:
            notes = self._withdraw(uploads, [*weights, *sides, *parts, *self.target.small])
        except MigrateError:
            where = printable(self.output.location, 240)
            notes = (f"`migrate clean {where}` removes what it has left there",)
        try:
            if isinstance(error, Exception) and lacking(error):
                ran_out(error, f"write {printable(self.output.location, 300)}")
            raise error
        except MigrateError as found:
            resume = option("resume", True)
            raise type(found)(
                [
                    replace(
                        one,
                        notes=(*(n for n in one.notes if n != KEPT), *notes),
                        help="run it again" if resume in (one.help or "") else one.help,
                    )
                    for one in found.diagnostics
                ]
            ) from error

    def _kept(self, error: MigrateError) -> MigrateError:
        """The error, with what can be done with what was uploaded."""
        return kept_uploads(error, self.output)

    def close(self) -> None:
        self._sender.close()
        if self._values is not None:
            self._values.forget()


def kept_uploads(error: MigrateError, output: S3Output) -> MigrateError:
    """The error of a run, with what can be done with what it has uploaded."""
    where, resume = printable(output.location, 240), option("resume", True)
    found = list[Diagnostic]()
    for one in error.diagnostics:
        if GONE in one.notes:
            # of what else was uploaded nothing is known
            found.append(one)
            continue
        again = one.help or ""
        if resume not in again:
            again = f"{again}; then " * bool(again) + (
                f"run it again with {resume}, or throw it away with `migrate clean {where}`"
            )
        note = f"what was uploaded so far is kept, and does not show: {where}{PARTIAL}"
        found.append(replace(one, notes=(*one.notes, note), help=again))
    return type(error)(found)


def describe_upload(
    made: Plan, source: Source, output: S3Output, options: RunOptions
) -> dict[str, Any]:
    """What a run would have the store copy, and what would pass through this machine."""
    parts = None
    if made.parts is not None or made.expected is not None:
        from .restored import parts_of_run

        if made.sealed is None:
            _, parts = parts_of_run(made, source)
    layouts = ByteLayouts()
    found = plan_parts(
        made.target,
        made.written,
        source if not source.index.passed_through else with_all_tensors(source),
        layouts,
        output,
        copy=options.copy,
        parts=parts,
        recorded=bool(source.index.sums()),
        read_back=options.read_back,
        uploaded=part_size(options.max_memory, options.threads),
    )
    small = len(made.target.small) + len(made.document["side_files"])
    return found.described(small + (made.parts is not None and made.target.folder))


def published_order(weights: list[str], sides: list[str], small: list[str]) -> list[str]:
    """In which order files appear: all weight files but one, side files, the stamp, the last weight
    file, and the index.

    Numbered shards are a checkpoint without an index too, and are refused while one is missing. So
    the last one appears when all is there that could be missed.
    """
    stamps = [name for name in small if PurePosixPath(name).name == HISTORY]
    others = [name for name in small if name not in stamps]
    others.sort(key=lambda name: (name.count("/") == 0, name.endswith((INDEX, METADATA))))
    return [*weights[:-1], *sides, *stamps, *weights[-1:], *others]


def side_by_side(order: Iterable[str], *alike: Collection[str]) -> list[list[str]]:
    """Names in their order: those that are `alike` and follow one another at once, any other by
    itself.
    """
    group_of = {name: number for number, names in enumerate(alike) for name in names}
    return [[*names] for _, names in groupby(order, lambda name: group_of.get(name, name))]


def check_store_place(output: S3Output | SystemOutput, source: str, resume: bool) -> None:
    """M904 if the output goes into the source, or where anything is, unless a run goes on."""
    if f"{output.location}/".startswith(source.rstrip("/") + "/"):
        fail(
            "M904",
            f"{printable(output.location, 300)} and the source {printable(source, 300)} overlap",
            help="choose a place outside the source",
        )
    if not resume:
        require_free(output)


def require_free(output: S3Output | SystemOutput) -> None:
    """M904 if anything is where the output goes."""
    if found := output.objects():
        refuse_taken(output, found)


def refuse_taken(output: S3Output | SystemOutput, keys: list[str]) -> NoReturn:
    """M904 for a place that holds objects."""
    fail(
        "M904",
        f"{printable(output.location, 300)} already exists",
        notes=(f"there is {printable(output.shown(keys[0]), 300)}",),
        help="choose another prefix, or move away what is there; an existing target is never "
        "replaced",
    )
