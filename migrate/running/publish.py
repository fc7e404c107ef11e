"""A target appears whole or not at all: the partial folder, its journal, and the rename that
replaces nothing.

    OUT.migrate-partial/        mode 0700, beside the target: the rename stays on one file system
        journal.jsonl           what the run reads, and the tiles that are written, with checksums
        journal-<rank>.jsonl    of a further process, where several write
        ranks/                  what these say to each other (`ranks`)
        parts/, again/          what parts of a run leave to the one that publishes (`parts`)
        data/                   what becomes OUT: the folder itself, or the one file in it

The journal follows the bytes and is not trusted: a resumed run reads and hashes what is claimed
again. So neither a kill nor a power cut can make it lie, and it needs no fsync of its own. What the
bytes were made of no hash of them can tell, so the journal begins with the identity of every source
file: a run goes on only over files that are the same.

A folder of that name may have been made by another user, to have a run write through a hard link
or wait at a pipe. All that is in it is looked at before any of it is opened to be written, and
again as it is opened.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import fail, option, printable, refusal
from ..core.out_of_memory import lacking, ran_out
from ..source.blobs import Identity, difference, release
from ..source.local import kind_of
from ..source.places import overlap
from ..source.target import Target
from .share import SCRATCH, Shared, scratch_file

if TYPE_CHECKING:
    from ..planning.graph import Tensor
    from ..source.target import OutputFile

SUFFIX = ".migrate-partial"
JOURNAL, RANKS, PARTS, AGAIN = "journal.jsonl", "ranks", "parts", "again"
HASH = "xxh3_128"
FORMAT_VERSION = 3
# bytes of a file that a line of the journal speaks of, but for its last line
TILE = 4 << 20
# longer writes are given pages of 2 MiB, and these a hypervisor takes from a machine as soon as
# they are free: to get them back takes longer than to copy
_AT_ONCE = 1 << 20
_CLAIM = {"file": str, "tile": int, "offset": int, "length": int, HASH: str}
_ENCODER = json.JSONEncoder(separators=(",", ":"))

_FULL = (errno.ENOSPC, errno.EDQUOT)
_MANY = (errno.EMFILE, errno.ENFILE)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_AT_FDCWD, _NOREPLACE = -100, 1
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}

# how often a tile may be claimed: once in each life of a run that lost it
_LIVES = 16
_MOST_NAMED = 5
# what stands in a partial folder, and what it is; beside them what a killed run tried out
_ENTRIES = {JOURNAL: stat.S_ISREG, **dict.fromkeys(("data", RANKS, PARTS, AGAIN), stat.S_ISDIR)}
_JOURNAL_OF_A_RANK = re.compile(r"journal-[1-9]\d{0,6}\.jsonl", re.ASCII)
_SAFE = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

# file name and tile number -> (offset, length, checksum of the file up to the tile's end)
Claims = dict[tuple[str, int], tuple[int, int, str]]


def partial_folder(out: Path) -> Path:
    """The partial folder of this output."""
    return out.parent / (out.name + SUFFIX)


def check_place(out: Path, source: str) -> None:
    """QuestionError M904 if `out` exists or touches the source; M115 without a folder for it."""
    if os.path.lexists(out):
        fail(
            "M904",
            f"{_safe(out)} already exists",
            help="choose another path, or move it away; an existing target is never replaced",
        )
    if overlap(str(out), source):
        fail(
            "M904",
            f"{_safe(out)} and the source {_safe(source)} overlap",
            help="choose a place outside the source",
        )
    here = Path(os.path.realpath(out))
    if not here.parent.is_dir():
        what = "is not a folder" if os.path.lexists(here.parent) else "does not exist"
        fail(
            "M115",
            f"{_safe(out)} cannot be made: {_safe(here.parent)} {what}",
            help="create that folder first, or choose another place",
        )


def refuse_left(folder: Path) -> NoReturn:
    """QuestionError M911 for a partial folder that is there."""
    fail(
        "M911",
        f"{_safe(folder)} was left by an earlier run",
        help=f"run it again with {option('resume', True)} to finish it, or remove that folder",
    )


def check_places(outputs: Mapping[str, Tensor], target: Target) -> None:
    """ValueError unless the files hold each tensor that they hold a part of whole, its bytes in
    their order: once, or as often as several files want a copy.
    """
    left: dict[str, int] = {}
    for placed in (placed for file in target.files for placed in file.tensors):
        nbytes = outputs[placed.key].spec.nbytes
        missing = left.get(placed.key) or nbytes
        if nbytes - missing != placed.start:
            raise ValueError(
                f"{placed.key!r} is placed from byte {placed.start} on, not from {nbytes - missing}"
            )
        left[placed.key] = missing - placed.nbytes
    for key, missing in left.items():
        if missing:
            nbytes = outputs[key].spec.nbytes
            raise ValueError(f"{key!r} has {nbytes} bytes, its places have {nbytes - missing}")


def write_failed(error: OSError, partial: Path, doing: str) -> NoReturn:
    """RunError M909 (disk full), M922 (no memory) or M913 (all else), with how to go on."""
    if lacking(error):
        ran_out(error, doing.removeprefix("cannot "), partial=partial)
    code = "M909" if error.errno in _FULL else "M913"
    many = "raise the limit of open files (`ulimit -n`)" if error.errno in _MANY else None
    again = (
        f"{many or 'fix the cause'} and run it again with {option('resume', True)}, or "
        "remove that folder"
    )
    fail(
        code,
        f"{doing}: {error.strerror or error}",
        notes=(f"what was written so far is kept in {_safe(partial)}",) if partial.exists() else (),
        help=again if partial.exists() else many or "choose another place",
    )


class Partial:
    """The partial folder of one target.

    Call sequence: `Partial(...)` (makes or takes over the folder), `allocate`, `open` and `claim`
    while writing, `add` for small files, `check`, `publish`. `discard` removes everything, `close`
    keeps it for a later resume. `begun`: a tile has been written, by this run or the one that it
    resumes. `source` are the identities of the source's files, by name; without them nothing that
    an earlier run wrote is taken over, because nothing tells what it was made of.
    `small` are the names of the files that will be added.

    `rank` is the number of this process where several write: 0 makes the folder, the others enter
    it, each has a journal of its own, and all read all of them. The folder is then kept whatever
    happens (`kept`), because one process does not know what the others are doing. `farewell` is
    called when the output is in its place, before the folder is removed.
    """

    # all of each file is written by this run, or read again
    whole = True

    def __init__(
        self,
        out: Path,
        target: Target,
        digest: str,
        *,
        resume: bool,
        source: Mapping[str, Identity] | None = None,
        small: Iterable[str] = (),
        rank: int | None = None,
    ) -> None:
        self.kept, self._rank = rank is not None, rank
        self.farewell: Callable[[], None] | None = None
        self.out, self.target, self.digest = out, target, digest
        self.folder = partial_folder(out)
        self.data = self.folder / "data"
        self.claims: Claims = {}
        self.begun = False
        self._names = {Path(name) for name in (*(f.name for f in target.files), *small)}
        self._journal = -1
        self._owner: int | None = None
        # a published run could not remove its folder
        self.left = False
        stood = (
            None if source is None else {name: list(found[1:]) for name, found in source.items()}
        )
        head = {
            "format_version": FORMAT_VERSION,
            "kind": "journal",
            "digest": digest,
            "hash": HASH,
            "source": stood,
        }
        try:
            if rank:
                self._join(head)
            else:
                self._begin(head, resume)
        except OSError as error:
            self.close()
            write_failed(error, self.folder, f"cannot make {_safe(self.folder)}, or go on in it")

    def _begin(self, head: Mapping[str, Any], resume: bool) -> None:
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            if not resume:
                refuse_left(self.folder)
            if not self.folder.is_dir() or self.folder.is_symlink():
                fail("M911", f"{_safe(self.folder)} is not a partial folder", help="move it away")
            self._take_over(head)
        else:
            self._lock()
            append_line(self._journal, head)
        self.data.mkdir(exist_ok=True)

    def _join(self, head: Mapping[str, Any]) -> None:
        """Enters the folder that rank 0 has made or taken over; M926 if it is a foreign one."""
        with scratch_file(self.folder, f"-{self._rank}") as made:
            self._owner = os.fstat(made).st_uid
        self._check(self.folder, os.lstat(self.folder))
        self._lock()
        try:
            self.claims = self._read(head)
        except BaseException:
            self.close()
            raise

    def _take_over(self, head: Mapping[str, Any]) -> None:
        """Goes on after an earlier run of the plan and files; M926 for a foreign folder."""
        try:
            # not the user of this process: file systems may call him otherwise
            with scratch_file(self.folder) as made:
                self._owner = os.fstat(made).st_uid
        except PermissionError:
            self._refuse(
                self.folder,
                f"belongs to user {os.lstat(self.folder).st_uid}, and this run may not write in it",
            )
        self._require_entries()
        self._lock()
        try:
            if (self.folder / RANKS).exists():
                from .ranks import require_quiet

                require_quiet(self.folder / RANKS)
            self._require_own()
            self.claims = self._read(head)
        except BaseException:
            self.close()
            raise
        self.begun = bool(self.claims)

    def _require_entries(self) -> None:
        """M926 unless the folder is empty, as one that a run has just made, or holds a journal and
        what else a run makes.
        """
        with os.scandir(self.folder) as entries:
            there = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        for name, status in there.items():
            path = self.folder / name
            self._check(path, status)
            wanted = _ENTRIES.get(name)
            if _JOURNAL_OF_A_RANK.fullmatch(name):
                wanted = stat.S_ISREG
            if wanted is None and not name.startswith(SCRATCH):
                self._refuse(path, "is not something that a run makes")
            if wanted is not None and not wanted(status.st_mode):
                self._refuse(path, f"is {kind_of(status.st_mode)}")
        if there and JOURNAL not in there:
            self._refuse(self.folder, "has no journal")

    def _require_own(self) -> None:
        """M926 unless the folder holds only files and folders of this run, each with one name."""
        self._check(self.folder, os.lstat(self.folder))
        pending = [self.folder]
        while pending:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    self._check(Path(entry.path), entry.stat(follow_symlinks=False))
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(Path(entry.path))

    def _check(self, path: Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            self._refuse(path, f"is {kind_of(status.st_mode)}")
        if self._owner is not None and status.st_uid != self._owner:
            self._refuse(
                path,
                f"belongs to user {status.st_uid}, and what is made here belongs to user "
                f"{self._owner}",
            )
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            self._refuse(
                path,
                f"has {status.st_nlink} names (hard links): writing it would change another file",
            )

    def _refuse(self, path: Path, why: str) -> NoReturn:
        where = (
            ""
            if path == self.folder
            else f"{printable(str(path.relative_to(self.folder)), 200)} in "
        )
        fail(
            "M926",
            f"{where}{_safe(self.folder)} {why}",
            notes=(
                "no run of migrate leaves that behind: it was made or changed by something else",
            ),
            help="find out where it comes from, remove that folder and start over",
        )

    def _opened(self, path: Path, flags: int, mode: int = 0o666) -> int:
        """A descriptor of a file of our own."""
        descriptor = os.open(path, os.O_RDWR | flags | _SAFE, mode)
        try:
            self._check(path, os.fstat(descriptor))
        except BaseException:
            release(descriptor)
            raise
        return descriptor

    def _lock(self) -> None:
        try:
            name = f"journal-{self._rank}.jsonl" if self._rank else JOURNAL
            self._journal = self._opened(self.folder / name, os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            fail(
                "M911",
                f"another run is using {_safe(self.folder)}",
                help="wait until it has finished",
            )
        except OSError as error:
            # several processes do without: they listen to each other
            if not self.kept or self._journal < 0 or error.errno not in NO_LOCKS:
                raise

    def _longest(self, head: Mapping[str, Any]) -> int:
        """The most bytes that runs of this plan leave in a journal."""
        nbytes = len(_line(head))
        for file in self.target.files:
            tiles = file.size // TILE + 1
            # which piece of it, where it is in pieces
            longest = f"{file.name}@{file.size}"
            nbytes += _LIVES * tiles * len(_claim(longest, tiles, file.size, file.size, "0" * 32))
        return nbytes

    def _read(self, head: Mapping[str, Any]) -> Claims:
        size, most = os.fstat(self._journal).st_size, self._longest(head)
        lines = os.pread(self._journal, min(size, most), 0).split(b"\n")
        first = parsed_line(lines[0])
        # one of another plan may well be larger, and is refused with what is known of it
        another = first.get("kind") == "journal" and {**first, "source": None} != {
            **head,
            "source": None,
        }
        if size > most and not another:
            self._refuse(
                self.folder / JOURNAL,
                f"has {size:,} bytes, and all runs of this plan together write at most {most:,}",
            )
        if lines[:-1] and first == head:
            if lines[-1]:
                os.write(self._journal, b"\n")
            return self._claimed(head, most)
        if size and (lines[:-1] and first) and not self._rank:
            self.close()
            self._refuse_head(first, head)
        # killed before the first line was whole: nothing is claimed
        os.ftruncate(self._journal, 0)
        append_line(self._journal, head)
        return self._claimed(head, most) if self._rank else {}

    def _refuse_head(self, first: Mapping[str, Any], head: Mapping[str, Any]) -> NoReturn:
        """M918 for a folder whose journal begins otherwise than one of this plan and source."""
        version = first.get("format_version")
        if version != FORMAT_VERSION:
            fail(
                "M918",
                f"{_safe(self.folder)} was begun by another version of migrate: its journal "
                f"has format version {printable(str(version))}, this one's is {FORMAT_VERSION}",
                help="remove that folder and start over, or resume with the version it was "
                "begun with",
            )
        if first.get("kind") != "journal" or {**first, "source": head["source"]} == head:
            self._refuse_source(first.get("source"), head["source"])
        fail(
            "M918",
            f"{_safe(self.folder)} belongs to another plan",
            notes=(
                f"digest there {printable(str(first.get('digest')))}",
                f"digest of this plan {self.digest}",
            ),
            help="remove that folder, or resume with the plan it was begun with",
        )

    def _journals(self) -> list[str]:
        """The journals whose claims count here."""
        with os.scandir(self.folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name == JOURNAL or _JOURNAL_OF_A_RANK.fullmatch(entry.name)
            )

    def _claimed(self, head: Mapping[str, Any], most: int) -> Claims:
        """What all journals of this plan and source claim; nothing over a source in memory."""
        claims: Claims = {}
        for name in self._journals() if head["source"] is not None else ():
            descriptor = self._opened(self.folder / name, 0)
            try:
                raw = _reread(descriptor, min(os.fstat(descriptor).st_size, most))
            finally:
                release(descriptor)
            lines = raw.split(b"\n")
            # a torn or foreign line claims nothing
            for line in lines[1:-1] if parsed_line(lines[0]) == head else ():
                found = parsed_line(line)
                if {word: type(value) for word, value in found.items()} == _CLAIM:
                    claims[found["file"], found["tile"]] = (
                        found["offset"],
                        found["length"],
                        found[HASH],
                    )
        return claims

    def _refuse_source(self, was: Any, now: Mapping[str, list[int]] | None) -> NoReturn:
        """M918 naming the files that are not what they were when the folder was begun."""
        then, stands = (found if isinstance(found, dict) else {} for found in (was, now))
        changed = [
            f"{printable(name)}: {_difference(then.get(name), stands.get(name))}"
            for name in {**stands, **then}
            if then.get(name) != stands.get(name)
        ]
        fail(
            "M918",
            f"{_safe(self.folder)} was begun over another state of the source"
            + "".join(f": {one}" for one in changed[:1]),
            notes=(
                *changed[1:_MOST_NAMED],
                *(f"and {n:,} more files" for n in (len(changed) - _MOST_NAMED,) if n > 0),
            ),
            help="remove that folder and start over: what it holds was made of the files as they "
            "were",
        )

    def require(self, side_bytes: int, shared: Shared | None = None) -> None:
        """RunError M909 unless the file system has room for all that is still to be written. Looks,
        and writes nothing.

        What is shared needs no room. It counts once: a file that was left by an earlier run holds
        it already.
        """
        there = os.statvfs(self.folder)
        need = sum(len(b) for b in self.target.small.values()) + side_bytes
        for file in self.target.files:
            path = self._path(file.name)
            have = path.stat().st_blocks * 512 if path.exists() else 0
            need += max(
                0, file.size - max(have, shared.nbytes(file.name) if shared is not None else 0)
            )
        free = there.f_bavail * there.f_frsize
        if need > free:
            if not self.claims:
                self.discard()
            fail(
                "M909",
                f"{_safe(self.out)} needs {need} bytes, and {free} are free beside it",
                help="free space, or choose another place",
            )

    def allocate(self, shared: Shared | None = None, names: Iterable[str] | None = None) -> None:
        """Makes each weight file, or those of these `names`, at its full size, so that a full disk
        shows before the first byte.

        What can be shared is cloned now and only the rest allocated: blocks under a clone would be
        thrown away again, and a clone that is refused here is space that is asked for here.
        """
        own = None if names is None else frozenset(names)
        try:
            for file in (f for f in self.target.files if own is None or f.name in own):
                path = self._path(file.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = self._opened(path, os.O_CREAT)
                try:
                    os.ftruncate(descriptor, file.size)
                    if shared is not None:
                        shared.clone(file.name, descriptor)
                    for start, stop in (
                        ((0, file.size),)
                        if shared is None
                        else shared.gaps(file.name, 0, file.size)
                    ):
                        _allocate(descriptor, start, stop - start)
                finally:
                    os.close(descriptor)
        except OSError as error:
            # a refused allocation keeps the blocks it got
            if not self.claims:
                self.discard()
            # only what opens or makes something has its name
            what = f"cannot allocate the files of {_safe(self.out)}"
            if error.filename is not None:
                what = f"cannot open {_safe(os.fsdecode(error.filename))}"
            write_failed(error, self.folder, what)

    def _path(self, name: str) -> Path:
        path = self.data / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"{name!r} does not stay in the target")
        return path

    def open(self, name: str) -> int:
        """A descriptor for reading and writing a weight file. The caller closes it."""
        return self._opened(self._path(name), 0)

    def sync(self, names: Iterable[str]) -> None:
        """fsync of these files. What one machine wrote another one cannot sync."""
        for name in names:
            sync(self._path(name))

    def claimed(self, file: OutputFile) -> int:
        """How far earlier runs claim to have written a file, from its beginning on."""
        tile, end = 0, file.begin
        while (claim := self.claims.get((file.label, tile))) is not None and claim[0] == end:
            tile, end = tile + 1, end + claim[1]
        return end

    def claim(self, file: str, tile: int, offset: int, length: int, checksum: str) -> None:
        """Journals the file's checksum up to the end of a tile, in one append: lines do not mix."""
        self.begun = True
        os.write(self._journal, _claim(file, tile, offset, length, checksum))

    def add(self, name: str, content: bytes | str | Path) -> None:
        """Writes a small file, from bytes or copied from a path."""
        path = self._path(name)
        self._names.add(Path(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        # not through a link that lies there
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            import shutil

            shutil.copyfile(content, path)

    def check(self) -> None:
        """RunError M913 unless each weight file has its size and its header, read back, and nothing
        lies beside what was written.

        What lies there is not this run's: it is named, and neither published nor removed.
        """
        for file in self.target.files:
            descriptor = self.open(file.name)
            try:
                size, header = os.fstat(descriptor).st_size, _reread(descriptor, len(file.header))
            finally:
                release(descriptor)
            if size != file.size or header != file.header:
                fail(
                    "M913",
                    f"{printable(file.name)} was not written as planned",
                    help=f"run it again with {option('resume', True)}",
                )
        if strays := self._strays():
            more = f" and {len(strays) - 1:,} more" if len(strays) > 1 else ""
            fail(
                "M913",
                f"this run did not write {printable(strays[0])}{more} in {_safe(self.data)}",
                help=f"move it away and run it again with {option('resume', True)}",
            )

    def _strays(self) -> list[str]:
        """What is among the data but neither a file of the target nor its folder; all links."""
        known = self._names | {folder for name in self._names for folder in name.parents}
        found = []
        for root, folders, files in os.walk(self.data):
            paths = [Path(root, name) for name in (*folders, *files)]
            found += [
                str(p.relative_to(self.data))
                for p in paths
                if p.relative_to(self.data) not in known or p.is_symlink()
            ]
        return sorted(found)

    def publish(self, *, fsync: bool = True) -> None:
        """Renames the target into place, durably if `fsync`. QuestionError M904 if it exists."""
        made = self.data if self.target.folder else self._path(self.target.files[0].name)
        if fsync:
            for root, _, files in os.walk(self.data, topdown=False):
                for name in files:
                    sync(Path(root) / name)
                sync(Path(root))
        try:
            rename_without_replacing(made, self.out)
        except FileExistsError:
            fail(
                "M904",
                f"{_safe(self.out)} appeared during this run",
                notes=(f"the finished output is kept in {_safe(made)}",),
                help=f"move it away and run it again with {option('resume', True)}",
            )
        try:
            if fsync:
                sync(self.out.parent)
        except OSError as error:
            fail(
                "M970",
                f"{_safe(self.out)} was published and is complete, but may not survive a power "
                f"cut: the folder it lies in could not be synced ({refusal(error)})",
                help="check the disk, then run `sync`, and `migrate verify` on the output",
            )
        finally:
            if self.farewell is not None:
                self.farewell()
            self.kept = False
            self.discard()
            self.left = os.path.lexists(self.folder)

    def discard(self) -> None:
        """Removes the partial folder and all that is in it, as far as that can be done; keeps one
        that was taken over and holds somebody else's files.
        """
        if self._owner is not None and self._strays():
            self.close()
            return
        gone = False
        if self.kept:
            import shutil

            # the space that a refused allocation took; others may look into the folder
            shutil.rmtree(self.data, ignore_errors=True)
            self.data.mkdir(exist_ok=True)
            return
        with suppress(OSError):
            (self.folder / JOURNAL).unlink()
            # what was published has left it
            if self.data.exists():
                self.data.rmdir()
            self.folder.rmdir()
            gone = True
        if not gone:
            import shutil  # costs more than all of the above

            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Lets go of the journal and keeps the folder; may be called twice."""
        if self._journal >= 0:
            # its lines are there or not: a resumed run hashes what they claim
            release(self._journal)
            self._journal = -1


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_without_replacing(old: Path, new: Path) -> None:
    """Moves `old` to `new` atomically; FileExistsError if `new` exists. Where the system has no
    such call, a file is linked and a folder renamed after a look (which leaves an instant in which
    an empty folder could be replaced)."""
    try:
        _rename_no_replace(old, new)
        return
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    if old.is_dir():
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)
        return
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        os.rename(old, new)
    else:
        os.unlink(old)


def _rename_no_replace(old: Path, new: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    here, names = ctypes.c_int(_AT_FDCWD), [ctypes.c_char_p(os.fsencode(p)) for p in (old, new)]
    arguments: Sequence[Any] = (here, names[0], here, names[1], ctypes.c_uint(_NOREPLACE))
    number = _RENAMEAT2.get(platform.machine())
    if hasattr(libc, "renameat2"):
        result = libc.renameat2(*arguments)
    elif number is not None and platform.system() == "Linux":
        result = libc.syscall(ctypes.c_long(number), *arguments)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(old), None, str(new))


def _allocate(descriptor: int, start: int, size: int) -> None:
    """Allocates a range of the file; not where only glibc would, by a write to each block."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return
    while libc.fallocate(
        ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_longlong(start), ctypes.c_longlong(size)
    ):
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _UNSUPPORTED:
            return
        raise OSError(code, os.strerror(code))


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`."""
    while data:
        n = os.pwrite(descriptor, data[:_AT_ONCE], offset)
        data, offset = data[n:], offset + n


def read_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Fills `data` from `offset`, as far as the file goes."""
    while data:
        n = os.preadv(descriptor, [data], offset)
        if not n:
            break
        data, offset = data[n:], offset + n


def _reread(descriptor: int, length: int) -> bytes:
    out = b""
    while len(out) < length and (part := os.pread(descriptor, length - len(out), len(out))):
        out += part
    return out


def _line(record: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(record).encode() + b"\n"


def _claim(file: str, tile: int, offset: int, length: int, checksum: str) -> bytes:
    return _line({"file": file, "tile": tile, "offset": offset, "length": length, HASH: checksum})


def append_line(journal: int, record: Mapping[str, Any]) -> None:
    """Writes a line that one system call may be too short for."""
    line = memoryview(_line(record))
    while line:
        line = line[os.write(journal, line) :]


def _difference(then: Any, now: list[int] | None) -> str:
    """How two entries of a head's `source` differ, in words."""
    numbers = isinstance(then, list) and [type(n) for n in then] == [int] * 4
    if now is None or not numbers:
        return "it is no longer there" if now is None else "it was not there"
    return difference(Identity(0, *then), Identity(0, *now)) or "it is the same"


def parsed_line(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _safe(path: Path | str) -> str:
    return printable(str(path), 300)
