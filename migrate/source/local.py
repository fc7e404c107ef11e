"""Checkpoints on this machine: folders held by descriptor, so that nothing in a checkpoint can lead
the reader outside of it, and files that are read by descriptor and watched for change.

Every file is opened relative to a directory descriptor, without following a link, and must be a
regular file. The one link that needs no permission is the one huggingface_hub makes,
`snapshots/<rev>/…/name -> ../…/blobs/<hash>`; its text is taken apart and walked by descriptor, so
the system never resolves what an attacker wrote. `allow_links` (the operator's `--allow links`)
lets the system follow other links to regular files; folders that are links never count.

Nothing is mapped: a mapped file that is cut short kills the process, a `pread` that comes back
short is an error with a name. The first files of a checkpoint are opened once and stay open. A
checkpoint of more files than a process may have open is read all the same: the others are opened
when they are read, and each opening compares what has the name now with what had it first, because
between two opens another file can take the name.

A clone without `git lfs` has pointers in place of weights: text files of the form of the Git LFS
specification (docs/spec.md there), of less than 1024 bytes, `version` in the first line, then `oid`
and `size`, in the order of their names. They are refused with the command that fetches what is
meant.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Final, NoReturn

from ..core import log
from ..core.errors import fail, listed, option, printable
from .blobs import (
    CHANGED_HELP,
    Identity,
    describe_change,
    difference,
    identity,
    read_bytes,
    release,
)
from .paths import LARGEST_POINTER, MAX_ENTRIES, Kind, Listed, plain_name, pointer_stands_for

# open files of a checkpoint, and how many more at a time, in a process of 1,024 or more
KEPT, LENT = 256, 64
# what every pointer begins with
POINTER_HEAD: Final = b"version https://"


def pointer_size(descriptor: int) -> int | None:
    """The size in bytes of the file that an open file is a pointer to, None if it is none."""
    head = os.pread(descriptor, LARGEST_POINTER, 0)
    return pointer_stands_for(head) if head.startswith(POINTER_HEAD) else None


def is_pointer(name: str, folder: int) -> bool:
    """Whether a regular file in the folder, which is given by its descriptor, is a pointer."""
    try:
        descriptor = os.open(
            name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder
        )
    except OSError:
        return False
    try:
        return (
            os.fstat(descriptor).st_size < LARGEST_POINTER and pointer_size(descriptor) is not None
        )
    except OSError:
        return False
    finally:
        release(descriptor)


FOLLOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
READ = FOLLOW | os.O_NOFOLLOW
ENTER = READ | os.O_DIRECTORY
_MAX_CLIMB = 8
_KINDS: Final[dict[int, Kind]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
}


def _link_help() -> str:
    return f"pass {option('allow', 'links')} if you trust where it leads"


class LocalFolder:
    """A directory by its descriptor. Paths are relative to it, with `/` between the parts."""

    __slots__ = ("_absolute", "_descriptor", "_shelf", "_was", "allow_links", "path")

    def __init__(self, path: str, allow_links: bool = False) -> None:
        self.path, self.allow_links = path, allow_links
        self._absolute = os.path.abspath(path)
        # device and inode of a suspended one
        self._was: tuple[int, int] | None = None
        self._shelf = DescriptorPool(lambda path: self._regular(path)[0])
        # the operator named this path: links up to here are his own
        try:
            self._descriptor: int | None = os.open(path, FOLLOW | os.O_DIRECTORY)
        except OSError as error:
            fail("M901", f"{printable(path)}: cannot be opened: {error.strerror}")

    def label(self, name: str) -> str:
        """The name as messages show it: with the folder's path before it."""
        return printable(name if name and self.path == "." else os.path.join(self.path, name), 240)

    @property
    def called(self) -> str:
        """The name of the folder itself."""
        return os.path.basename(self._absolute)

    def is_folder(self, name: str) -> bool:
        """Whether an entry is a folder, or a link to one, which `names` refuses."""
        return os.path.isdir(os.path.join(self.path, name))

    def below(self, name: str) -> LocalFolder:
        """The folder `name` in this one, opened; to be closed by itself. M907 if it is a link."""
        try:
            with self.entered([name]):
                pass
        except OSError as error:
            fail("M901", f"{self.label(name)}: cannot be opened: {error.strerror}")
        return LocalFolder(os.path.join(self.path, name), self.allow_links)

    def names(self, below: str = "") -> list[str]:
        """The sorted names of all entries, here or in the folder `below`."""
        try:
            with self.entered(below.split("/") if below else []) as inside:
                found = sorted(os.listdir(inside))
        except OSError as error:
            fail("M901", f"{self.label(below)}: cannot be listed: {error.strerror}")
        if len(found) > MAX_ENTRIES:
            fail(
                "M914", f"{self.label(below)}: holds {len(found)} entries, more than {MAX_ENTRIES}"
            )
        return found

    def listing(self, below: str = "") -> list[Listed]:
        """What lies here or in the folder `below`, by name. No link is followed."""
        try:
            with (
                self.entered(below.split("/") if below else []) as inside,
                os.scandir(inside) as entries,
            ):
                found = sorted(
                    ((e.name, e.stat(follow_symlinks=False)) for e in entries), key=itemgetter(0)
                )
        except OSError as error:
            fail("M901", f"{self.label(below)}: cannot be listed: {error.strerror}")
        return [
            Listed(name, _KINDS.get(stat.S_IFMT(status.st_mode), "other"), identity(status))
            for name, status in found
        ]

    def open(self, path: str) -> LocalBlob:
        """The regular file at `path`, opened. M907 for a link that is not allowed or anything but a
        regular file, else M901.

        Of many files, only the first stay open; the others are opened again when they are read.
        """
        try:
            descriptor, status = self._regular(path)
        except OSError as error:
            many = (
                "raise the limit of open files (`ulimit -n`)"
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else None
            )
            fail("M901", f"{self.label(path)}: cannot be opened: {error.strerror}", help=many)
        if (
            status.st_size < LARGEST_POINTER
            and os.pread(descriptor, len(POINTER_HEAD), 0) == POINTER_HEAD
            and (stands_for := pointer_size(descriptor)) is not None
        ):
            release(descriptor)
            self._refuse_pointer(path, stands_for)
        log.trace("opened %s, %d bytes", self.label(path), status.st_size)
        return LocalBlob(path, descriptor, self.locate, self._shelf)

    def _regular(self, path: str) -> tuple[int, os.stat_result]:
        """A descriptor of the regular file at `path`, and what it says of it. OSError if it cannot
        be opened, M907 as `open`.
        """
        parts = path.split("/")
        if any(p in ("", ".", "..") or "\0" in p for p in parts):
            fail("M907", f"{self.label(path)}: not a path inside the checkpoint")
        with self.entered(parts[:-1]) as inside:
            descriptor = self._open(inside, parts[-1], path)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            release(descriptor)
            fail("M907", f"{self.label(path)}: not a regular file")
        return descriptor, status

    def _refuse_pointer(self, path: str, stands_for: int) -> NoReturn:
        below, _, name = path.rpartition("/")
        with self.entered(below.split("/") if below else []) as inside:
            others = [
                other
                for other in sorted(os.listdir(inside))
                if other != name and is_pointer(other, inside)
            ]
        more = (
            (f"so {'is' if len(others) == 1 else 'are'} {listed(others, 4)} beside it",)
            if others
            else ()
        )
        fail(
            "M966",
            f"{self.label(path)}: a pointer of Git LFS, and not the {stands_for:,} bytes that it "
            "stands for",
            notes=more,
            help=f"fetch what it points at:  git -C {shlex.quote(printable(self.path, 400))} lfs "
            "pull",
        )

    def _open(self, inside: int, name: str, path: str) -> int:
        kind = os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            if not self.allow_links:
                return self._open_cached(inside, name, path)
            try:
                kind = os.stat(name, dir_fd=inside).st_mode
            except OSError as error:
                fail("M907", f"{self.label(path)}: a link that leads nowhere ({error.strerror})")
            if stat.S_ISREG(kind):
                return os.open(name, FOLLOW, dir_fd=inside)
        # looked at before it is opened: opening a device or a pipe is an act of its own
        if not stat.S_ISREG(kind):
            fail("M907", f"{self.label(path)}: not a regular file but {kind_of(kind)}")
        try:
            return os.open(name, READ, dir_fd=inside)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                fail(
                    "M907",
                    f"{self.label(path)}: became a link while it was opened",
                    help=_link_help(),
                )
            raise

    def _open_cached(self, inside: int, name: str, path: str) -> int:
        """Follows `../…/blobs/<hash>` out of `snapshots/<rev>/…` as huggingface_hub lays it out,
        refuses any other link.
        """
        target = os.readlink(name, dir_fd=inside)
        *climb, beside, blob = target.split("/") if target.count("/") >= 3 else ["", ""]
        refusal = (
            f"{self.label(path)}: a link to {printable(target)}, which may lead outside the "
            "checkpoint"
        )
        if (
            beside != "blobs"
            or set(climb) != {".."}
            or len(climb) > _MAX_CLIMB
            or not plain_name(blob)
        ):
            fail("M907", refusal, help=_link_help())
        opened = [os.dup(inside)]
        try:
            for level in range(1, len(climb) + 1):
                opened.append(os.open("..", ENTER, dir_fd=opened[-1]))
                if _is_called("snapshots", opened[-2], opened[-1]) != (level == len(climb)):
                    fail("M907", refusal, help=_link_help())
            try:
                opened.append(os.open("blobs", ENTER, dir_fd=opened[-1]))
                kind = os.stat(blob, dir_fd=opened[-1], follow_symlinks=False).st_mode
                if stat.S_ISREG(kind):
                    return os.open(blob, READ, dir_fd=opened[-1])
            except OSError as error:
                fail(
                    "M907",
                    f"{self.label(path)}: its blob {printable(target)} cannot be opened: "
                    f"{error.strerror}",
                )
            fail(
                "M907",
                f"{self.label(path)}: its blob {printable(target)} is not a regular file but "
                f"{kind_of(kind)}",
            )
        finally:
            for descriptor in opened:
                release(descriptor)

    @contextmanager
    def entered(self, parts: list[str]) -> Iterator[int]:
        """The descriptor of the folder `parts` below this one. A link there is always refused."""
        here = self._again() if self._descriptor is None else os.dup(self._descriptor)
        try:
            for part in parts:
                try:
                    below = os.open(part, ENTER, dir_fd=here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
                        _refuse_folder(self.label("/".join(parts)), part, here)
                    raise
                release(here)
                here = below
            yield here
        finally:
            release(here)

    def locate(self, path: str) -> Identity | None:
        """The identity of the file that `path` names now, None if there is none."""
        *parents, name = path.split("/")
        try:
            with self.entered(parents) as inside:
                return identity(os.stat(name, dir_fd=inside))
        except OSError:
            return None

    # nothing is kept of a listing
    current = locate

    def expect(
        self,
        names: Sequence[str],
        needed: Callable[[bytes], int] | None = None,
        *,
        ends: bool = False,
    ) -> None:
        return None

    def suspend(self) -> None:
        """Closes the descriptor. Whatever is asked for from now on opens the folder by its path, as
        long as that takes; M905 if another one is there by then.
        """
        if self._descriptor is not None:
            status = os.fstat(self._descriptor)
            self._was = status.st_dev, status.st_ino
            release(self._descriptor)
            self._descriptor = None

    def _again(self) -> int:
        """A descriptor of the suspended folder, which is the caller's. OSError if it is gone."""
        if self._was is None:
            raise ValueError(f"{self.path} is closed")
        here = os.open(self._absolute, FOLLOW | os.O_DIRECTORY)
        status = os.fstat(here)
        if (status.st_dev, status.st_ino) != self._was:
            release(here)
            change = describe_change(self.path, "another folder has its name")
            fail("M905", change, help=CHANGED_HELP)
        return here

    def close(self) -> None:
        if self._descriptor is not None:
            release(self._descriptor)
        self._descriptor = self._was = None


def _is_called(name: str, child: int, parent: int) -> bool:
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(child))


def kind_of(mode: int) -> str:
    """What a file of this mode is called."""
    for test, word in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return word
    return "a device"


def _room() -> tuple[int, int]:
    """How many files of a checkpoint stay open, and how many more may be, of all files allowed."""
    try:
        import resource
    except ImportError:
        return KEPT, LENT
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return KEPT, LENT
    return min(KEPT, limit // 4), min(LENT, max(4, limit // 16))


class DescriptorPool:
    """Keeps the first files of a checkpoint open, and lends out the others: those that were read
    last stay open, up to a number.

    `reopen` opens a file by its name. Thread-safe. A file that is being read is never closed, so
    that there may be as many more open as there are threads.
    """

    def __init__(self, reopen: Callable[[str], int]) -> None:
        self._reopen = reopen
        self._places, self._room = _room()
        self._lock = threading.Lock()
        # the one that was read last at the end, each with its descriptor and how many read it now
        self._lent: dict[LocalBlob, tuple[int, int]] = {}

    def keep(self) -> bool:
        """Whether there is a place for one more file that stays open; takes it."""
        with self._lock:
            if not self._places:
                return False
            self._places -= 1
            return True

    def put(self, blob: LocalBlob, descriptor: int) -> None:
        """Takes over a file that was just opened."""
        with self._lock:
            self._close_idle(self._room - 1)
            self._lent[blob] = (descriptor, 0)

    def take(self, blob: LocalBlob) -> int:
        """A descriptor of the file, until `give`. OSError if it cannot be opened, M905 if it is no
        longer the same file.
        """
        with self._lock:
            found = self._lent.pop(blob, None)
            if found is None:
                self._close_idle(self._room - 1)
                found = (self.opened(blob), 0)
            self._lent[blob] = (found[0], found[1] + 1)
            return found[0]

    def give(self, blob: LocalBlob) -> None:
        with self._lock:
            if blob in self._lent:
                descriptor, readers = self._lent[blob]
                self._lent[blob] = (descriptor, readers - 1)
                self._close_idle(self._room)

    def close(self, blob: LocalBlob) -> None:
        """Closes the file, if it is open."""
        with self._lock:
            if (found := self._lent.pop(blob, None)) is not None:
                release(found[0])

    def free(self) -> None:
        """Gives back the place of a file that stayed open."""
        with self._lock:
            self._places += 1

    def _close_idle(self, most: int) -> None:
        """Closes what was read longest ago, until `most` are open or all of them are being read."""
        if len(self._lent) > most:
            idle = [blob for blob, (_, readers) in self._lent.items() if not readers]
            for blob in idle[: len(self._lent) - most]:
                release(self._lent.pop(blob)[0])

    def opened(self, blob: LocalBlob) -> int:
        """A descriptor of the file, which is the caller's. Raises as `take`."""
        try:
            descriptor = self._reopen(blob.name)
        except FileNotFoundError:
            fail("M905", describe_change(blob.name, "it is no longer there"), help=CHANGED_HELP)
        if change := difference(blob.identity, identity(os.fstat(descriptor))):
            release(descriptor)
            fail("M905", describe_change(blob.name, change), help=CHANGED_HELP)
        return descriptor


class LocalBlob:
    """A regular file, held by its descriptor or, if a `shelf` is full, opened when it is read.

    `locate` gives the identity of what has its name now, or None.
    """

    __slots__ = ("_descriptor", "_locate", "_shelf", "identity", "name", "size")

    def __init__(
        self,
        name: str,
        descriptor: int,
        locate: Callable[[str], Identity | None],
        shelf: DescriptorPool | None = None,
    ) -> None:
        self.name = name
        self.identity = identity(os.fstat(descriptor))
        self.size = self.identity.size
        self._locate, self._shelf = locate, shelf
        self._descriptor: int | None = descriptor
        if shelf is not None and not shelf.keep():
            self._descriptor = None
            shelf.put(self, descriptor)

    def fileno(self) -> int | None:
        return self._descriptor

    @contextmanager
    def hold(self) -> Iterator[int]:
        """The file's descriptor. OSError if it cannot be opened again, M905 if the file changed."""
        if self._descriptor is not None:
            yield self._descriptor
            return
        if self._shelf is None:
            raise ValueError(f"{self.name} is closed")
        descriptor = self._shelf.take(self)
        try:
            yield descriptor
        finally:
            self._shelf.give(self)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`. M905 if the file ends before, M901 if it cannot be read. Thread-safe."""
        left = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        try:
            if self._descriptor is not None:
                self._fill(self._descriptor, offset, left)
            else:
                with self.hold() as descriptor:
                    self._fill(descriptor, offset, left)
        except OSError as error:
            fail(
                "M901",
                f"{printable(self.name)}: cannot read {left.nbytes} bytes at {offset}: "
                f"{error.strerror}",
            )

    def _fill(self, descriptor: int, offset: int, left: memoryview) -> None:
        while left.nbytes:
            count = os.preadv(descriptor, [left], offset)
            if count == 0:
                fail(
                    "M905",
                    f"{printable(self.name)}: ends at {offset}, but was {self.size} bytes when it "
                    "was opened",
                    help=CHANGED_HELP,
                )
            offset += count
            left = left[count:]

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. The caller has compared `size` with the file's."""
        # of archives with many records most reads are small, and all that surrounds them counts
        if self._descriptor is not None:
            try:
                found = os.pread(self._descriptor, size, offset)
            except OSError:
                found = b""
            if len(found) == size:
                return found
        # in parts, or refused
        return read_bytes(self, offset, size)

    def change(self) -> str | None:
        """What differs from the moment of opening, or None."""
        if self._descriptor is None and self._shelf is None:
            return None
        held = (
            None
            if self._descriptor is None
            else difference(self.identity, identity(os.fstat(self._descriptor)))
        )
        return held or difference(self.identity, self._locate(self.name))

    def suspend(self) -> None:
        """Closes the file until it is read again. Nothing may be reading it."""
        if self._shelf is None:
            return
        if self._descriptor is None:
            self._shelf.close(self)
        else:
            release(self._descriptor)
            self._descriptor = None
            self._shelf.free()

    def reopen(self) -> None:
        """Opens a suspended file, to stay open, if there is a place for it. M901 if it cannot be
        opened, M905 if it is no longer the same file. Nothing may be reading it.
        """
        if self._descriptor is not None or self._shelf is None or not self._shelf.keep():
            return
        self._shelf.close(self)
        try:
            self._descriptor = self._shelf.opened(self)
        except OSError as error:
            self._shelf.free()
            fail("M901", f"{printable(self.name)}: cannot be opened again: {error.strerror}")
        except BaseException:
            self._shelf.free()
            raise

    def close(self) -> None:
        descriptor, shelf = self._descriptor, self._shelf
        self._descriptor = self._shelf = None
        if descriptor is not None:
            release(descriptor)
        if shelf is not None:
            shelf.close(self) if descriptor is None else shelf.free()


def _refuse_folder(label: str, name: str, inside: int) -> NoReturn:
    """M907 for what stands where a folder of the checkpoint should."""
    try:
        target = printable(os.readlink(name, dir_fd=inside))
    except OSError:
        fail("M907", f"{label}: {printable(name)} is not a folder of the checkpoint")
    fail(
        "M907",
        f"{label}: a link to {target}, and links to folders are not followed",
        help="pass the folder that it leads to, or put that folder in its place",
    )
