"""Parts of a run: processes of any scheduler, each of which writes some files of one output, at any
time and on any machine that sees the same file system; and the one that publishes what they wrote.

    OUT.migrate-partial/
        journal.jsonl       made whole by the part that comes first. Parts hold a shared lock on it
                            while they run, what publishes or resumes the run a lock of its own
        journal-<n>.jsonl   of part n - 1
        parts/begun.json    by the part that comes first: how many there are, and the plan
        parts/<n>.json      of a part that is done: what it wrote, and what it measured
        again/<n>/          the files of part n, written a second time because the first takes long
        data/

    write_part: enter, examine own files and own checks, allocate, write, fsync; "<n>.json"
    publish_parts: all parts are done; what they say added up; publish

Files are dealt by bytes, as every part knows from the plan alone. A part that is started again goes
on after its own journal; one that is done has nothing left to do. What a part says that it did is
believed, because it is written after the fsync of its files: sizes and headers are looked at once
more when the output is published.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import command, fail, listed, option, plural, printable
from ..core.types import PathLike, RunPart
from ..planning.graph import ComputedTensor
from ..source.blobs import release
from .publish import (
    AGAIN,
    JOURNAL,
    NO_LOCKS,
    PARTS,
    Partial,
    append_line,
    parsed_line,
    partial_folder,
    rename_without_replacing,
    sync,
)
from .ranks import deal
from .resources import RunOptions, RunResult
from .share import LEAST, SCRATCH, Shared, scratch_file
from .tiles import TargetRun

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.blobs import Identity
    from ..source.index import Source
    from ..source.target import OutputFile, Target
    from .restored import RestoredParts

BEGUN = "begun.json"
# of begun.json, which holds a plan, and of what a part says
_MOST, _MOST_NAMED = 1 << 30, 5
_SAFE = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part did. `files` as in a `RunResult`, of the part; `already`: an earlier run of it
    had done everything. `missing` are the parts that are not done yet.
    """

    partial: str
    files: Mapping[str, Mapping[str, Any]]
    bytes_written: int
    already: bool
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of parts that have been begun: how many they are, and what they write."""

    of: int
    plan: Mapping[str, Any]
    copy_of: str | None


class _PartialOfPart(Partial):
    """The partial folder as one part sees it, which makes it if it is not there."""

    def __init__(
        self,
        out: Path,
        target: Target,
        digest: str,
        *,
        part: RunPart,
        files: Collection[str],
        begun: Begun,
        source: Mapping[str, Identity] | None,
        small: Sequence[str],
        second: bool,
    ) -> None:
        self.part, self._files, self._said, self._second = part, files, begun, second
        self._common = -1
        number = part.number + 1 + (part.of + 1) * second
        super().__init__(out, target, digest, resume=True, source=source, small=small, rank=number)

    def _join(self, head: Mapping[str, Any]) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with scratch_file(self.folder, f"-{self.part.number}-part") as made:
                self._owner = os.fstat(made).st_uid
        except PermissionError:
            self._refuse(self.folder, "belongs to another user")
        self._check(self.folder, os.lstat(self.folder))
        folders = [self.folder / PARTS, self.data]
        if self._second:
            self.data = self.folder / AGAIN / str(self.part.number)
            folders += [self.data.parent, self.data]
        for path in folders:
            path.mkdir(exist_ok=True)
            status = os.lstat(path)
            self._check(path, status)
            if not stat.S_ISDIR(status.st_mode):
                self._refuse(path, "is not a folder")
        try:
            self._hold(head)
            self._require_parts()
            self._lock()
            self.claims = self._read(head)
        except BaseException:
            self.close()
            raise

    def _hold(self, head: Mapping[str, Any]) -> None:
        """Takes part in the run that the folder was begun for. M911 while it is another process's
        alone, M918 if it is another run.
        """
        self._place(self.folder / JOURNAL, head)
        self._common = self._opened(self._with_one_name(self.folder / JOURNAL), 0)
        with _without_locks():
            try:
                fcntl.flock(self._common, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(
                    "M911",
                    f"a run that is not one of parts is using {printable(str(self.folder), 300)}",
                    help="wait until it has finished",
                )
        first = parsed_line(_first_line(self._common))
        if first != head:
            self._refuse_head(first, head)

    def _require_parts(self) -> None:
        """M918 unless the run has as many parts as this one belongs to."""
        place = self.folder / PARTS / BEGUN
        said = {"of": self._said.of, "plan": self._said.plan, "copy_of": self._said.copy_of}
        self._place(place, said)
        found = read_begun(self.folder)
        if found is None or found.of != self.part.of:
            what = "no readable number of" if found is None else plural(found.of, "part")
            fail(
                "M918",
                f"{printable(str(self.folder), 300)} was begun with {what}"
                f"{' parts' if found is None else ''}, and "
                + (f"this is part {self.part}" if self._files else f"this is of {self.part.of}"),
                help="remove that folder and start over"
                + ("" if found is None else f", or go on with {plural(found.of, 'part')}"),
            )

    def _place(self, path: Path, content: Mapping[str, Any]) -> None:
        """Makes a file with this one line, whole at once; one that is there stays."""
        if path.exists():
            return
        new = self.folder / f"{SCRATCH}{os.getpid()}-{self.part.number}-{os.uname().nodename}"
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
        try:
            append_line(descriptor, content)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            rename_without_replacing(new, path)
        new.unlink(missing_ok=True)

    def _with_one_name(self, path: Path) -> Path:
        """Takes away the second name of a file that `_place` makes where a rename may replace
        something: its maker may be between the two calls, or was killed there.
        """
        status = os.lstat(path)
        if status.st_nlink > 1:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if entry.name.startswith(SCRATCH) and entry.inode() == status.st_ino:
                        Path(entry.path).unlink(missing_ok=True)
        return path

    def _journals(self) -> list[str]:
        # those of other parts claim nothing of these files
        own = f"journal-{self._rank}.jsonl"
        return [own] if self._second else [JOURNAL, own]

    def discard(self) -> None:
        """Removes the files of this part alone."""
        for name in self._files:
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        if self._common >= 0:
            release(self._common)
            self._common = -1

    def say_done(self, said: Mapping[str, Any], *, fsync: bool) -> None:
        """Says that the part is done, durably if `fsync`."""
        place = self.folder / PARTS / said_by(self.part.number, self._second)
        new = place.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(json.dumps(said, separators=(",", ":")).encode())
        if fsync:
            sync(new)
        os.replace(new, place)
        if fsync:
            sync(place.parent)


@contextmanager
def _without_locks() -> Iterator[None]:
    """A file system that has no locks is done without."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


class PartRun(TargetRun):
    """The steps of a run, for one part of it."""

    def enter_part(
        self, part: RunPart, own: Sequence[OutputFile], begun: Begun, second: bool = False
    ) -> _PartialOfPart:
        """The partial folder, made if no other part was here before."""
        small = (*self.target.small, *(name for name, _ in self.side_files))
        partial = _PartialOfPart(
            self.path,
            self.target,
            self.digest,
            part=part,
            files=[file.name for file in own],
            begun=begun,
            source=self.source.identities(),
            small=(*small, *(() if self.parts is None else self.parts.names)),
            second=second,
        )
        self.partial = partial
        return partial

    def allocate_own(self, own: Sequence[OutputFile]) -> int:
        """Makes these files at their full size, and looks whether there is room for all; returns
        the bytes of these that take no space of their own.
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
        partial.allocate(self._shared, [file.name for file in own])
        if self._shared is None:
            return 0
        return sum(self._shared.nbytes(file.name) for file in own)

    def enter_to_publish(self) -> Partial:
        """The partial folder of parts that are done. M911 while one of them runs."""
        self.options = replace(self.options, resume=True)
        return self.enter(0)


def write_part(
    outputs: Mapping[str, Tensor],
    source: Source,
    target: Target,
    out: PathLike,
    *,
    digest: str,
    side_files: Sequence[tuple[str, bytes | PathLike]] = (),
    checks: Sequence[ValueCheck] = (),
    options: RunOptions,
    parts: RestoredParts | None = None,
    part: RunPart,
    begun: Begun,
    second: bool = False,
) -> PartResult:
    """Writes the files of one part, as `write_target` would, and publishes nothing; the `second`
    time beside those of the first, which may be at work on them.

    QuestionError M904, M911, M918, M926 as `write_target`; the partial folder is kept whatever
    happens, because other parts write in it.
    """
    if source.identities() is None:
        fail("M115", "parts cannot share a checkpoint that is in memory")
    own = files_of(target, part)
    run = PartRun(
        outputs,
        source,
        target,
        out,
        digest=digest,
        side_files=side_files,
        options=options,
        parts=parts,
    )
    try:
        partial = run.enter_part(part, own, begun, second)
        said = None if second else _said(partial.folder, part.number, digest)
        already = said is not None and all(_is_there(partial, file) for file in own)
        if not already:
            run.examine(own, checks[part.number :: part.of])
            shared = run.allocate_own(own)
            run.write(own)
            if options.fsync:
                partial.sync([file.name for file in own])
            said = {"digest": digest, "shared": shared, "account": run.account()}
            partial.say_done(said, fsync=options.fsync)
        return PartResult(
            str(partial.folder),
            {} if said is None else said["account"]["files"],
            run.written,
            already,
            tuple(missing_parts(partial.folder, part.of, digest)),
        )
    except BaseException as error:  # noqa: BLE001 - raised again
        run.fail(error)
    finally:
        run.close()


def publish_parts(
    outputs: Mapping[str, Tensor],
    source: Source,
    target: Target,
    out: PathLike,
    *,
    digest: str,
    side_files: Sequence[tuple[str, bytes | PathLike]] = (),
    checks: Sequence[ValueCheck] = (),
    options: RunOptions,
    parts: RestoredParts | None = None,
    of: int,
) -> RunResult:
    """Publishes what `of` parts wrote, and answers as `write_target` would have. QuestionError M911
    while a part runs, M984 if one is not done; the `checks` were theirs.
    """
    run = PartRun(
        outputs,
        source,
        target,
        out,
        digest=digest,
        side_files=side_files,
        options=options,
        parts=parts,
    )
    try:
        folder = run.enter_to_publish().folder
        require_done(folder, of, digest)
        run.examine(())
        shared = 0
        for number in range(of):
            said = _said(folder, number, digest)
            if said is not None:
                run.add(said["account"])
                shared += said["shared"]
        source.check_unchanged()
        found = run.publish()
        files = {file.name: found.files[file.name] for file in target.files}
        return replace(found, files=files, bytes_shared=shared)
    except BaseException as error:  # noqa: BLE001 - raised again
        run.fail(error)
    finally:
        run.close()


def files_of(target: Target, part: RunPart) -> list[OutputFile]:
    """The files that a part writes."""
    dealt = deal({file.name: file.size for file in target.files}, part.of)
    own = frozenset(dealt[part.number])
    return [file for file in target.files if file.name in own]


def said_by(number: int, second: bool = False) -> str:
    """The name of the file in which a part says what it did."""
    return f"{number}.second.json" if second else f"{number}.json"


def journal_of(part: RunPart, second: bool = False) -> str:
    """The name of a part's journal."""
    return f"journal-{part.number + 1 + (part.of + 1) * second}.jsonl"


def computed_twice(outputs: Mapping[str, Tensor], target: Target, of: int) -> int:
    """How many values several parts compute, because each has a file that needs them."""
    dealt = deal({file.name: file.size for file in target.files}, of)
    part_of = {name: number for number, names in enumerate(dealt) for name in names}
    by: dict[int, set[int]] = {}
    for file in target.files:
        for placed in file.tensors:
            for value in outputs[placed.key].sources:
                if isinstance(value, ComputedTensor):
                    by.setdefault(id(value.computation), set()).add(part_of[file.name])
    return sum(len(parts) > 1 for parts in by.values())


def begun_at(out: Path) -> Begun:
    """What `out` is to become by parts. QuestionError M983 if no part has been begun."""
    folder = partial_folder(out)
    shown = printable(str(out), 300)
    if os.path.lexists(out) and not folder.exists():
        fail(
            "M983",
            f"{shown} is there already, and there are no parts to publish",
            help=f"`{command('verify')}` compares it with its source",
        )
    begun = read_begun(folder)
    if begun is None:
        has = "was not begun by parts" if folder.exists() else "does not exist"
        fail(
            "M983",
            f"there are no parts of {shown} to publish: {printable(str(folder), 300)} {has}",
            help=f"{option('part', 'I/N')} writes them; a run that was not one of parts goes on "
            f"with {option('resume', True)}",
        )
    return begun


def read_begun(folder: Path) -> Begun | None:
    """How a run of parts was begun; None if this is not said."""
    found = _read(folder / PARTS / BEGUN)
    of, plan, copy = (found.get(name) for name in ("of", "plan", "copy_of"))
    if type(of) is not int or of < 1 or not isinstance(plan, dict):
        return None
    return Begun(of, plan, copy if isinstance(copy, str) else None)


def require_done(folder: Path, of: int, digest: str) -> None:
    """QuestionError M984 naming the parts that are not done."""
    missing = missing_parts(folder, of, digest)
    if not missing:
        return
    notes = [
        f"part {number}/{of} {state_of(folder / journal_of(RunPart(number, of)))}"
        for number in missing[:_MOST_NAMED]
    ]
    names = listed([f"{number}/{of}" for number in missing], 20)
    fail(
        "M984",
        f"{plural(len(missing), 'part')} of {of} {'is' if len(missing) == 1 else 'are'} not done: "
        f"{names}",
        notes=tuple(notes),
        help=f"run the same command with {option('part', f'{missing[0]}/{of}')}"
        f"{' and so on' if len(missing) > 1 else ''}; a part goes on where it ended",
    )


def missing_parts(folder: Path, of: int, digest: str) -> list[int]:
    """The parts that have not said that they are done."""
    return [number for number in range(of) if _said(folder, number, digest) is None]


def _said(folder: Path, number: int, digest: str) -> dict[str, Any] | None:
    found = _read(folder / PARTS / said_by(number))
    if found.get("digest") != digest or type(found.get("shared")) is not int:
        return None
    return found if isinstance(found.get("account"), dict) else None


def state_of(journal: Path) -> str:
    """What a part does whose journal this is, in words."""
    try:
        descriptor = os.open(journal, os.O_RDWR | os.O_NONBLOCK | _SAFE)
    except OSError:
        return "was not begun"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "is at work"
    except OSError:
        return "was begun"
    finally:
        release(descriptor)
    return "ended early"


def _is_there(partial: Partial, file: OutputFile) -> bool:
    try:
        return (partial.data / file.name).stat().st_size == file.size
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    """What a file says; nothing if it is not there, or not as it is written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _SAFE)
    except OSError:
        return {}
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return {}
        return parsed_line(file.read(_MOST))


def _first_line(descriptor: int) -> bytes:
    line = b""
    while b"\n" not in line and (more := os.pread(descriptor, 1 << 20, len(line))):
        line += more
    return line.partition(b"\n")[0]
