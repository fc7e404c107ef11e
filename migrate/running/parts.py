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
    publish_parts: all parts are done; what they say added up; seals of archives; publish

Files, and pieces of long ones (`pieces`), are dealt by bytes, as every part knows from the plan
alone. In a bucket the same is done by `store_parts`. A part that is started again goes
on after its own journal; one that is done has nothing left to do. What a part says that it did is
believed, because it is written after the fsync of its files: sizes and headers are looked at once
more when the output is published.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ..core.errors import command, fail, listed, option, plural, printable
from ..core.types import RunPart
from ..planning.graph import ComputedTensor
from ..source.blobs import release
from .pieces import deal_files, write_seals
from .publish import (
    AGAIN,
    HASH,
    JOURNAL,
    NO_LOCKS,
    PARTS,
    SUFFIX,
    Partial,
    append_line,
    parsed_line,
    partial_folder,
    refuse_left,
    rename_without_replacing,
    sync,
)
from .resources import RunResult
from .share import LEAST, SCRATCH, Shared, scratch_file
from .tiles import TargetRun

if TYPE_CHECKING:
    from ..planning.graph import Tensor, ValueCheck
    from ..source.blobs import Identity
    from ..source.index import Source
    from ..source.target import OutputFile, Target

BEGUN = "begun.json"
# of begun.json, which holds a plan, and of what a part says
_MOST, _MOST_NAMED = 1 << 30, 5
_SAFE = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)


@dataclass(frozen=True, slots=True)
class PartResult:
    """What one part did. `files` as in a `RunResult`, of the part; `already`: an earlier run of it
    had done everything. `missing` are the parts that are not done yet. `pieces` has the bytes of
    those files of which others write the rest, `dealt` what each part writes.
    """

    partial: str
    files: Mapping[str, Mapping[str, Any]]
    bytes_written: int
    already: bool
    missing: tuple[int, ...]
    pieces: Mapping[str, tuple[int, int]]
    dealt: Sequence[Sequence[OutputFile]]


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of parts that have been begun: how many they are, and what they write."""

    of: int
    plan: Mapping[str, Any]
    copy_of: str | None


class LeftBehind(Protocol):
    """What parts have left beside an output, for each other and for the one that publishes."""

    # how messages call it
    shown: str

    def exists(self) -> bool:
        """Whether there is anything."""

    def appeared(self) -> bool:
        """Whether there is nothing, but the output is."""

    def begun(self) -> Begun | None:
        """How the run was begun; None if this is not said."""

    def done(self, of: int, digest: str) -> set[int]:
        """The parts that say that they are done."""

    def said(self, number: int, digest: str) -> dict[str, Any] | None:
        """What a part says that is done."""

    def state(self, part: RunPart, second: bool = False) -> str:
        """What a part does that is not done, in words."""

    def written(self, part: RunPart, second: bool = False) -> int | None:
        """How far a part has written its file; None if that is not known."""


class LeftInFolder:
    """What parts have left in the partial folder of an output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def exists(self) -> bool:
        return self.folder.exists()

    def appeared(self) -> bool:
        out = self.folder.with_name(self.folder.name.removesuffix(SUFFIX))
        return os.path.lexists(out) and not self.folder.exists()

    def begun(self) -> Begun | None:
        return read_begun(self.folder)

    def done(self, of: int, digest: str) -> set[int]:
        return {number for number in range(of) if self.said(number, digest) is not None}

    def said(self, number: int, digest: str) -> dict[str, Any] | None:
        found = _read(self.folder / PARTS / said_by(number))
        if found.get("digest") != digest or type(found.get("shared")) is not int:
            return None
        return found if isinstance(found.get("account"), dict) else None

    def state(self, part: RunPart, second: bool = False) -> str:
        """As its journal says, on which it holds a lock while it is at work."""
        journal = self.folder / journal_of(part, second)
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

    def written(self, part: RunPart, second: bool = False) -> int | None:
        try:
            with (self.folder / journal_of(part, second)).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = file.read().split(b"\n")
        except OSError:
            return None
        found = parsed_line(lines[-2]) if len(lines) > 1 else {}
        at, length = found.get("offset"), found.get("length")
        if type(at) is not int or type(length) is not int:
            return 0
        # of a piece, what its name says comes before it
        begin = str(found.get("file", "")).rpartition("@")[2]
        return at + length - (int(begin) if begin.isdecimal() else 0)


class _PartialOfPart(Partial):
    """The partial folder as one part sees it, which makes it if it is not there."""

    def __init__(
        self,
        out: Path,
        target: Target,
        digest: str,
        *,
        part: RunPart,
        own: Sequence[OutputFile],
        begun: Begun,
        source: Mapping[str, Identity] | None,
        small: Sequence[str],
        second: bool,
    ) -> None:
        self.part, self._own, self._said, self._second = part, own, begun, second
        # files of which others write pieces
        self._divided = {file.name for file in own if file.of is not None}
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
                + (f"this is part {self.part}" if self._own else f"this is of {self.part.of}"),
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

    def _path(self, name: str) -> Path:
        # a piece that is written twice is so in one place: both write the same
        return (self.folder / "data" if name in self._divided else self.data) / super()._path(
            name
        ).relative_to(self.data)

    def discard(self) -> None:
        """Removes the files of this part alone."""
        for file in self._own:
            if file.of is None:
                self._path(file.name).unlink(missing_ok=True)

    def allocate(self, shared: Shared | None = None, names: Iterable[str] | None = None) -> None:
        """As for one process. What other parts say of a file is forgotten that is not there."""
        for name in self._divided:
            if not self._path(name).exists():
                for number in range(self.part.of):
                    place = self.folder / PARTS / said_by(number)
                    if name in _read(place).get("spans", {}):
                        place.unlink(missing_ok=True)
        super().allocate(shared, names)

    def has_all(self) -> bool:
        """Whether the files of this part are there."""
        sizes = {file.name: file.of or file.size for file in self._own}
        try:
            return all(self._path(n).stat().st_size == nbytes for n, nbytes in sizes.items())
        except OSError:
            return False

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

    def deal(self, of: int) -> list[list[OutputFile]]:
        """What each of `of` parts writes."""
        return deal_files(self.target, self.outputs, of)

    def enter_part(
        self, part: RunPart, own: Sequence[OutputFile], begun: Begun, second: bool = False
    ) -> LeftBehind:
        """The partial folder, made if no other part was here before."""
        small = (*self.target.small, *(name for name, _ in self.side_files))
        self.partial = _PartialOfPart(
            self.path,
            self.target,
            self.digest,
            part=part,
            own=own,
            begun=begun,
            source=self.source.identities(),
            small=(*small, *(() if self.parts is None else self.parts.names)),
            second=second,
        )
        return LeftInFolder(self.partial.folder)

    def _of_part(self) -> _PartialOfPart:
        if not isinstance(self.partial, _PartialOfPart):
            raise TypeError("no part was entered")
        return self.partial

    def has_all(self) -> bool:
        """Whether the files of this part are there."""
        return self._of_part().has_all()

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
        shared = self._shared
        if shared is None:
            return 0
        gaps = (gap for f in own for gap in shared.gaps(f.name, f.begin, f.size))
        return sum(file.nbytes for file in own) - sum(stop - start for start, stop in gaps)

    def say_done(self, own: Sequence[OutputFile], shared: int) -> dict[str, Any]:
        """Says that the part is done, durably if that is asked for."""
        partial = self._of_part()
        if self.options.fsync:
            partial.sync([file.name for file in own])
        said = what_is_said(self, own, shared)
        partial.say_done(said, fsync=self.options.fsync)
        return said

    @property
    def shown(self) -> str:
        """Where the output goes."""
        return str(self.path)

    def left(self) -> LeftBehind:
        """What parts have left already."""
        return LeftInFolder(partial_folder(self.path))

    def refuse_left(self) -> NoReturn:
        """M911 for what is left."""
        refuse_left(partial_folder(self.path))

    def discard_all(self) -> None:
        """Removes what all parts have left."""
        partial = self._entered()
        partial.kept = False
        Partial.discard(partial)

    def enter_to_publish(self) -> LeftBehind:
        """The partial folder of parts that are done. M911 while one of them runs."""
        self.options = replace(self.options, resume=True)
        return LeftInFolder(self.enter(0).folder)

    def seal(self, said: Mapping[str, Sequence[tuple[OutputFile, Mapping[str, Any]]]]) -> None:
        """Seals the archives that were written in pieces, by what is `said` of these."""
        for file in self.target.files:
            if file.seal is None or file.name not in said:
                continue
            pieces = [
                (piece, one["account"]["files"][file.name]["crcs"])
                for piece, one in said[file.name]
            ]
            descriptor = self._entered().open(file.name)
            try:
                write_seals(file, pieces, descriptor)
            finally:
                os.close(descriptor)


def what_is_said(run: TargetRun, own: Sequence[OutputFile], shared: int) -> dict[str, Any]:
    """What a part says that is done."""
    return {
        "digest": run.digest,
        "shared": shared,
        "spans": spans_of(own),
        "account": run.account(),
    }


def spans_of(own: Sequence[OutputFile]) -> dict[str, list[int]]:
    """Which bytes of which files these are."""
    return {file.name: [file.begin, file.size] for file in own}


def part_run(
    outputs: Mapping[str, Tensor],
    source: Source,
    *where: Any,
    kind: Any = PartRun,
    **named: Any,
) -> Any:
    """The steps of a run in parts, of that `kind`; what is `named` as for a run."""
    if source.identities() is None:
        fail("M115", "parts cannot share a checkpoint that is in memory")
    return kind(outputs, source, *where, **named)


def write_part(
    *where: Any,
    checks: Sequence[ValueCheck] = (),
    part: RunPart,
    begun: Begun,
    second: bool = False,
    **named: Any,
) -> PartResult:
    """Writes the files of one part, as `write_target` would, and publishes nothing; the `second`
    time beside those of the first, which may be at work on them.

    QuestionError M904, M911, M918, M926 as `write_target`; what is there is kept whatever
    happens, because other parts write in it.
    """
    run = part_run(*where, **named)
    dealt = run.deal(part.of)
    own = dealt[part.number]
    with run.ending():
        left = run.enter_part(part, own, begun, second)
        said = None if second else left.said(part.number, run.digest)
        already = said is not None and said.get("spans") == spans_of(own) and run.has_all()
        if said is None or not already:
            run.examine(own, checks[part.number :: part.of])
            shared = run.allocate_own(own)
            run.write(own)
            said = run.say_done(own, shared)
        return PartResult(
            left.shown,
            {name: _plain(one) for name, one in said["account"]["files"].items()},
            run.written,
            already,
            tuple(missing_parts(left, part.of, run.digest)),
            {file.name: (file.begin, file.size) for file in own if file.of is not None},
            dealt,
        )


def publish_parts(
    *where: Any, checks: Sequence[ValueCheck] = (), of: int, **named: Any
) -> RunResult:
    """Publishes what `of` parts wrote, and answers as `write_target` would have. QuestionError M911
    while a part runs, M984 if one is not done; the `checks` were theirs.
    """
    run = part_run(*where, **named)
    with run.ending():
        left = run.enter_to_publish()
        require_done(left, of, run.digest)
        run.examine(())
        shared, pieces = 0, dict[str, list[Any]]()
        dealt = run.deal(of)
        for number, own in enumerate(dealt):
            said = left.said(number, run.digest)
            if said is None or said.get("spans") != spans_of(own):
                refuse_missing(left, [number], of)
            for file in (file for file in own if file.of is not None):
                pieces.setdefault(file.name, []).append((file, said))
            run.add(said["account"])
            shared += said["shared"]
        for several in pieces.values():
            several.sort(key=lambda one: one[0].begin)
        run.source.check_unchanged()
        run.seal(pieces)
        # no process has read the whole of these
        run.files |= {
            file.name: {"size": file.size, HASH: None}
            for file in run.target.files
            if file.name in pieces
        }
        found: RunResult = run.publish()
        files = {file.name: found.files[file.name] for file in run.target.files}
    return replace(found, files=files, bytes_shared=shared)


def _plain(file: Mapping[str, Any]) -> dict[str, Any]:
    return {"size": file["size"], HASH: file[HASH]}


def said_by(number: int, second: bool = False) -> str:
    """The name of the file in which a part says what it did."""
    return f"{number}.second.json" if second else f"{number}.json"


def journal_of(part: RunPart, second: bool = False) -> str:
    """The name of a part's journal."""
    return f"journal-{part.number + 1 + (part.of + 1) * second}.jsonl"


def computed_twice(outputs: Mapping[str, Tensor], dealt: Sequence[Sequence[OutputFile]]) -> int:
    """How many values several parts compute, because each has a file that needs them."""
    by: dict[int, set[int]] = {}
    for number, own in enumerate(dealt):
        for placed in (placed for file in own for placed in file.tensors):
            for value in outputs[placed.key].sources:
                if isinstance(value, ComputedTensor):
                    by.setdefault(id(value.computation), set()).add(number)
    return sum(len(parts) > 1 for parts in by.values())


def begun_at(left: LeftBehind, shown: str) -> Begun:
    """What the output that is `shown` so is to become by parts. QuestionError M983 if no part has
    been begun.
    """
    if left.appeared():
        fail(
            "M983",
            f"{printable(shown, 300)} is there already, and there are no parts to publish",
            help=f"`{command('verify')}` compares it with its source",
        )
    begun = left.begun()
    if begun is None:
        has = "was not begun by parts" if left.exists() else "does not exist"
        fail(
            "M983",
            f"there are no parts of {printable(shown, 300)} to publish: "
            f"{printable(left.shown, 300)} {has}",
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


def require_done(left: LeftBehind, of: int, digest: str) -> None:
    """QuestionError M984 naming the parts that are not done."""
    if missing := missing_parts(left, of, digest):
        refuse_missing(left, missing, of)


def refuse_missing(left: LeftBehind, missing: Sequence[int], of: int) -> NoReturn:
    """QuestionError M984 naming these parts."""
    notes = [
        f"part {number}/{of} {left.state(RunPart(number, of))}" for number in missing[:_MOST_NAMED]
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


def missing_parts(left: LeftBehind, of: int, digest: str) -> list[int]:
    """The parts that have not said that they are done."""
    done = left.done(of, digest)
    return [number for number in range(of) if number not in done]


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
