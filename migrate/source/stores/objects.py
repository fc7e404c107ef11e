"""Checkpoints in a store of objects: a folder that is a listing, and blobs that are read by ranges.

A checkpoint is opened by a listing, which has names, sizes and versions, and by the beginnings of
its files, which are fetched side by side. From then on every read is of the version that the
listing had: the store refuses another, or what it answers is compared. What a folder is on this
machine is a prefix here, and the rules about names are the same; a key that no path could have is
refused.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from hashlib import sha256
from operator import attrgetter
from typing import NamedTuple, NoReturn, Protocol

from ...core import log
from ...core.errors import fail, option, printable
from ..blobs import CHANGED_HELP, Identity, ObjectIdentity, describe_change, difference, read_bytes
from ..paths import LARGEST_POINTER, MAX_ENTRIES, Listed, pointer_stands_for, stays_behind
from ..urls import Url
from .requests import FLIGHT, PIECE, FetchedPiece, Requests

# what is fetched of the beginning of a file, or of its end, before anything is known of it
HEAD = 512 << 10
# a longer header is not fetched ahead of its turn
LONGEST_HEAD = PIECE
# bytes of beginnings and ends that are kept: those of small files are read several times
KEPT = 32 << 20
# answers that a range may come in, where each is cut short
ANSWERS = 5


class RemoteObject(NamedTuple):
    """An object of a store. `path` is relative to the location; `version` is what the store calls
    this state of it, `modified` the time in nanoseconds. `archived` is how it is kept if it has to
    be restored before it can be read.
    """

    path: str
    size: int
    version: str
    modified: int = 0
    archived: str = ""

    @property
    def identity(self) -> ObjectIdentity:
        # plans and journals compare numbers
        number = int.from_bytes(sha256(self.version.encode()).digest()[:7], "big")
        found = ObjectIdentity(-1, number, self.size, self.modified, 0)
        found.version = self.version
        return found


class Store(Protocol):
    """A location in a store, as the library for that store speaks to it.

    `location` is how messages, plans and stamps call it: without secrets, with a slash at its end.
    `fixed`: nothing there can change. All methods raise M968 where the store refuses, M969 where it
    fails; they may be called by several threads.
    """

    location: str
    fixed: bool

    def listing(self) -> Iterator[RemoteObject]:
        """All objects below the location. M917 if there is no such store."""

    def find(self, path: str) -> RemoteObject | None:
        """The object at a path as it is now; None without."""

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        """Fills the buffer with bytes of this version from `start` on, and answers how many came.
        FileNotFoundError if the object is another one by now.
        """


class Located(NamedTuple):
    """What a URL names: a location, and the file in it; None where it is a folder. `copy` is a
    folder of this machine that holds all of it.
    """

    store: Store
    file: RemoteObject | None = None
    copy: str | None = None


class StoreBlob:
    """An object of a checkpoint, read by ranges."""

    __slots__ = ("_folder", "_pieces", "_starts", "identity", "name", "requests", "size")

    def __init__(self, folder: StoreFolder, name: str, item: RemoteObject) -> None:
        self.name, self.size, self.identity = name, item.size, item.identity
        self._folder, self.requests = folder, folder.requests
        self._pieces: list[FetchedPiece] = []
        self._starts: list[int] = []

    def fileno(self) -> None:
        return None

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def copied_from(self) -> tuple[str, str, str, str] | None:
        """Endpoint, bucket, key and version, where the store is one that copies ranges."""
        of = getattr(self._folder.store, "copied_from", None)
        return None if of is None else (*of(self._folder.full(self.name)), self.identity.version)

    def expect_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        with self._folder.lock:
            for piece in pieces:
                at = bisect_right(self._starts, piece.start)
                self._starts.insert(at, piece.start)
                self._pieces.insert(at, piece)

    def forget_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        gone = set(map(id, pieces))
        with self._folder.lock:
            self._pieces = [piece for piece in self._pieces if id(piece) not in gone]
            self._starts = [piece.start for piece in self._pieces]

    def fetch(self, start: int, size: int) -> bytearray:
        """Bytes by one request, or by as many as it takes where answers are cut short."""
        data = bytearray(size)
        self.load(start, memoryview(data))
        return data

    def load(self, start: int, buffer: memoryview) -> None:
        """`fetch` into memory that is there."""
        self._folder.fill(self.name, self.identity, start, buffer)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`. M905 if the object ends before or is another one, M968 and M969 if the
        store does not answer. Thread-safe.
        """
        left = buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
        if offset + left.nbytes > self.size:
            fail(
                "M905",
                f"{printable(self.name)}: has {self.size} bytes, and {offset + left.nbytes} are "
                "needed",
            )
        while left.nbytes:
            # a piece is let go of when all of it was taken from it
            done = (
                self._from_pieces(offset, left)
                or self._from_heads(offset, left)
                or self._direct(offset, left)
            )
            offset += done
            left = left[done:]

    def _from_heads(self, offset: int, left: memoryview) -> int:
        for start, data in self._folder.kept(self.name):
            if start <= offset < start + len(held := data.result()):
                part = memoryview(held)[offset - start : offset - start + left.nbytes]
                left[: len(part)] = part
                return len(part)
        return 0

    def _from_pieces(self, offset: int, left: memoryview) -> int:
        with self._folder.lock:
            at = bisect_right(self._starts, offset)
            # those of several outputs overlap, though not by much
            near = self._pieces[max(0, at - 4) : at]
        piece = next((one for one in near if offset < one.stop), None)
        if piece is None:
            return 0
        at = offset - piece.start
        with self.requests.reading(piece) as held:
            part = held[at : at + left.nbytes]
            left[: len(part)] = part
        self.requests.taken(piece, len(part))
        return len(part)

    def _direct(self, offset: int, left: memoryview) -> int:
        """Asks for what was not expected: several pieces side by side, where it is much."""
        with self._folder.lock:
            at = bisect_left(self._starts, offset)
            until = self._starts[at] if at < len(self._starts) else self.size
        left = left[: until - offset]
        if left.nbytes < HEAD and (start := self._worth_keeping(offset, left.nbytes)) is not None:
            size = min(HEAD, self.size - start)
            data = self.requests.submit(self.fetch, start, size)
            self._folder.keep(self.name, start, data)
            part = memoryview(data.result())[offset - start : offset - start + left.nbytes]
            left[: len(part)] = part
            return len(part)
        if left.nbytes <= PIECE:
            self._folder.fill(self.name, self.identity, offset, left)
        else:
            self.requests.each(
                lambda at: self._folder.fill(
                    self.name, self.identity, offset + at, left[at : at + PIECE]
                ),
                range(0, left.nbytes, PIECE),
            )
        return left.nbytes

    def _worth_keeping(self, offset: int, size: int) -> int | None:
        """Where the stretch begins that is fetched in place of a short read; None for none.

        A reader of the first bytes of a file, or of the last, reads more of them.
        """
        if offset == 0:
            return 0
        return max(0, self.size - HEAD) if offset + size == self.size and size < HEAD // 8 else None

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`. The caller has compared `size` with the file's."""
        return read_bytes(self, offset, size)

    def change(self) -> str | None:
        """What differs from the moment of opening, or None."""
        return difference(self.identity, self._folder.current(self.name))

    def suspend(self) -> None:
        return None

    reopen = close = suspend


class StoreFolder:
    """A prefix of a store as a folder: `root` of the location, "" or with a slash at its end."""

    allow_links = False

    def __init__(self, store: Store, root: str = "", *, above: StoreFolder | None = None) -> None:
        self.store, self._root = store, root
        self.path = store.location + root
        self.requests: Requests = Requests() if above is None else above.requests
        self.lock: threading.RLock = threading.RLock() if above is None else above.lock
        self._found: dict[str, RemoteObject] = {} if above is None else above._found
        self._tree: dict[str, dict[str, RemoteObject | None]] | None = (
            None if above is None else above._tree
        )
        # of what was listed again, what has not been asked for yet
        self._now: dict[str, RemoteObject] | None = None
        self._asked: set[str] = set()
        # (start, bytes) of beginnings and ends, by path, those that were fetched last at the end
        self._kept: OrderedDict[str, list[tuple[int, Future[bytearray]]]] = OrderedDict()
        self._kept_bytes = 0
        self._expected: dict[str, list[tuple[int, Future[bytearray]]]] = {}
        self._to_come: deque[tuple[str, Callable[[bytes], int] | None, bool]] = deque()

    @property
    def called(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    def full(self, path: str) -> str:
        """The path of a file from the location of the store on."""
        return self._root + path

    def label(self, name: str) -> str:
        return printable(self.path + name, 240)

    def known(self, item: RemoteObject) -> None:
        """Enters an object that was looked up by its name."""
        self._found[item.path] = item

    def _listed(self) -> dict[str, dict[str, RemoteObject | None]]:
        """Folder, with a slash at its end -> name -> the object, or None for a folder."""
        with self.lock:
            if self._tree is None:
                every = self._every()
                self._tree = _tree_of(every.values(), self.store.location)
                for path, found in every.items():
                    self._found.setdefault(path, found)
            return self._tree

    def _every(self) -> dict[str, RemoteObject]:
        """All objects below the location. M907 for a key that no path could have, M914."""
        found: dict[str, RemoteObject] = {}
        for one in self.store.listing():
            if len(found) >= MAX_ENTRIES:
                fail(
                    "M914",
                    f"{printable(self.store.location, 240)}: holds more than {MAX_ENTRIES} objects",
                    help="give the location of one checkpoint, with fewer objects below it",
                )
            if one.path == "" or (one.path.endswith("/") and not one.size):
                # what a console leaves for a folder that it shows
                continue
            check_key(self.store.location, one.path)
            found[one.path] = one
        log.debug("%s lists %d objects", printable(self.store.location, 240), len(found))
        return found

    def names(self, below: str = "") -> list[str]:
        return sorted(self._inside(below))

    def listing(self, below: str = "") -> list[Listed]:
        # the caller of a listing looks into small files, which may be pointers
        where = below.rstrip("/") + "/" if below else ""
        self.expect(
            [
                where + name
                for name, found in self._inside(below).items()
                if found is not None and found.size < LARGEST_POINTER and not stays_behind(name)
            ]
        )
        return [
            Listed(name, "folder", _NO_IDENTITY)
            if found is None
            else Listed(name, "file", found.identity)
            for name, found in sorted(self._inside(below).items())
        ]

    def is_folder(self, name: str) -> bool:
        return f"{self._root}{name}/" in self._listed()

    def _inside(self, below: str) -> Mapping[str, RemoteObject | None]:
        where = self._root + (below.rstrip("/") + "/" if below else "")
        found = self._listed().get(where)
        if found is None and where:
            fail("M907", f"{self.label(below)}: is not a folder of the checkpoint")
        return found or {}

    def below(self, name: str) -> StoreFolder:
        self._inside(name)
        return StoreFolder(self.store, f"{self._root}{name}/", above=self)

    def expect(
        self,
        names: Iterable[str],
        needed: Callable[[bytes], int] | None = None,
        ends: bool = False,
    ) -> None:
        """The beginnings of these files, or their ends, are about to be read: so many are fetched
        side by side. `needed` says of a beginning how long what is wanted of it is.
        """
        names = list(names)
        self.requests.each(self._look_again, [name for name in names if self._is_archived(name)])
        with self.lock:
            self._to_come += [(name, needed, ends) for name in names]
            self._fetch_expected()

    def _fetch_expected(self) -> None:
        while self._to_come and len(self._expected) < FLIGHT:
            name, needed, ends = self._to_come.popleft()
            found = self._object(name)
            if found is None or not found.size or found.archived:
                continue
            if name in self._expected or name in self._kept:
                continue
            blob = StoreBlob(self, name, found)
            start = max(0, found.size - HEAD) if ends else 0
            data = self.requests.submit(_fetched, blob, start, needed)
            self._expected[name] = [(start, data)]
            if ends and start:
                # the name of the format, and of an archive the first record, stand at the beginning
                size = min(HEAD, start)
                self._expected[name].append((0, self.requests.submit(blob.fetch, 0, size)))

    def _is_archived(self, path: str) -> bool:
        found = self._object(path)
        return found is not None and bool(found.archived)

    def _look_again(self, path: str) -> None:
        """Enters that an archived object was restored, which a listing does not say."""
        full = self._root + path
        now = self.store.find(full)
        if now is not None and not now.archived:
            with self.lock:
                self._found[full] = self._found[full]._replace(archived="")

    def _object(self, path: str) -> RemoteObject | None:
        full = self._root + path
        found = self._found.get(full)
        if found is None and self._tree is None:
            self._listed()
            found = self._found.get(full)
        return found

    def open(self, path: str) -> StoreBlob:
        parts = path.split("/")
        if any(part in ("", ".", "..") or "\0" in part for part in parts):
            fail("M907", f"{self.label(path)}: not a path inside the checkpoint")
        if self._is_archived(path):
            self._look_again(path)
        found = self._object(path)
        if found is None:
            fail("M901", f"{self.label(path)}: cannot be opened: there is no such object")
        if found.archived:
            fail(
                "M968",
                f"{self.label(path)}: is archived ({printable(found.archived)}), and an archived "
                "object cannot be read",
                help="restore it first, wait until that is done, then run again",
            )
        blob = StoreBlob(self, path, found)
        with self.lock:
            for start, data in self._expected.pop(path, ()):
                self.keep(path, start, data)
            self._fetch_expected()
        if 0 < blob.size < LARGEST_POINTER:
            stands_for = pointer_stands_for(blob.read(0, blob.size))
            if stands_for is not None:
                fail(
                    "M966",
                    f"{self.label(path)}: a pointer of Git LFS, and not the {stands_for:,} bytes "
                    "that it stands for",
                    help="upload the file itself: `git lfs pull` fetches it into a clone",
                )
        log.trace("opened %s, %d bytes", self.label(path), blob.size)
        return blob

    def keep(self, path: str, start: int, data: Future[bytearray]) -> None:
        """Keeps a beginning or an end until too much is kept."""
        with self.lock:
            self._kept.setdefault(path, []).append((start, data))
            self._kept.move_to_end(path)
            self._kept_bytes += HEAD
            while self._kept_bytes > KEPT and len(self._kept) > 1:
                _, gone = self._kept.popitem(last=False)
                self._kept_bytes -= HEAD * len(gone)

    def kept(self, path: str) -> Sequence[tuple[int, Future[bytearray]]]:
        """What is kept of a file."""
        return self._kept.get(path, ())

    def fill(self, name: str, then: ObjectIdentity, start: int, buffer: memoryview) -> None:
        """Fills the buffer from an object as it was listed. M905, M968, M969."""
        found = RemoteObject(self._root + name, then.size, then.version, then.modified)
        done = 0
        for _ in range(ANSWERS):
            try:
                came = self.store.fill(found, start + done, buffer[done:])
            except FileNotFoundError:
                lost = "the store no longer has this version"
                self._refuse(name, self._change(name, then) or lost)
            done += came
            if done == buffer.nbytes:
                return
            if not came:
                break
        # a store that reads under no condition answers from what is there now
        if change := self._change(name, then):
            self._refuse(name, change)
        fail(
            "M969",
            f"{self.label(name)}: the answer for bytes {start} to {start + buffer.nbytes - 1} was "
            f"cut short after {done}",
            help=f"run it again, a run that has begun with {option('resume', True)}",
        )

    def _change(self, name: str, then: ObjectIdentity) -> str | None:
        now = self.store.find(self._root + name)
        return difference(then, None if now is None else now.identity)

    def _refuse(self, name: str, change: str) -> NoReturn:
        fail("M905", describe_change(self.path + name, change), help=CHANGED_HELP)

    def locate(self, path: str) -> Identity | None:
        found = self._object(path)
        return None if found is None else found.identity

    def current(self, path: str) -> Identity | None:
        """What the path names now. One listing answers for each name once."""
        full = self._root + path
        if self.store.fixed:
            found = self._found.get(full)
        elif self._tree is None:
            found = self.store.find(full)
        else:
            with self.lock:
                if self._now is None or path in self._asked:
                    self._now, self._asked = self._every(), set()
                self._asked.add(path)
                found = self._now.get(full)
        return None if found is None else found.identity

    def suspend(self) -> None:
        with self.lock:
            self._kept.clear()
            self._kept_bytes = 0

    def close(self) -> None:
        self.suspend()
        self.requests.close()


_NO_IDENTITY = Identity(-1, 0, 0, 0, 0)


def _fetched(blob: StoreBlob, start: int, needed: Callable[[bytes], int] | None) -> bytearray:
    """The first bytes of a file from `start` on, and the rest of what is needed of them."""
    data = blob.fetch(start, min(HEAD, blob.size - start))
    if needed is not None:
        whole = min(needed(bytes(data[:64])), blob.size)
        if len(data) < whole <= LONGEST_HEAD:
            data += blob.fetch(len(data), whole - len(data))
    return data


def check_key(location: str, key: str) -> None:
    """M907 for a key that could lead anywhere as a path, or that no file has."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(
        not char.isprintable() for char in key
    ):
        fail(
            "M907",
            f"{printable(location, 240)}: holds an object with the key {printable(key)}, which "
            "names no path inside the checkpoint",
            help="give the location of the checkpoint alone, or rename the object",
        )


def check_url(url: Url) -> None:
    """M907 for a URL that names a key which no file has. Web servers may have empty names."""
    path = url.shown.partition("://")[2].partition("/")[2].partition("::")[0].removesuffix("/")
    parts = path.split("/") if path else []
    wrong = (".", "..") if url.scheme in ("http", "https") else ("", ".", "..")
    if any(part in wrong for part in parts) or not url.shown.isprintable():
        fail(
            "M907",
            f"{printable(url.shown, 240)}: names no path inside a store",
            help="give it without `..`, `//` and control characters",
        )


def _tree_of(
    every: Iterable[RemoteObject], location: str
) -> dict[str, dict[str, RemoteObject | None]]:
    tree: dict[str, dict[str, RemoteObject | None]] = {"": {}}
    for one in sorted(every, key=attrgetter("path")):
        folder, at = "", 0
        while (cut := one.path.find("/", at)) >= 0:
            name = one.path[at:cut]
            there = tree[folder].setdefault(name, None)
            if there is not None:
                if there.size:
                    fail(
                        "M915",
                        f"{printable(location + there.path, 240)}: is an object, and a prefix of "
                        "others",
                        help="rename one of them",
                    )
                tree[folder][name] = None
            folder, at = one.path[: cut + 1], cut + 1
            tree.setdefault(folder, {})
        tree[folder][one.path[at:]] = one
    return tree


def refuse_without(library: str, extra: str, shown: str) -> NoReturn:
    """M967: the library that reads such a URL is not installed."""
    fail(
        "M967",
        f"{printable(shown, 240)}: is read through {library}, which is not installed",
        help=f"pip install 'ckpt-migrate[{extra}]'",
    )


def refuse_range(name: str) -> NoReturn:
    """M969 for a store that does not answer with the bytes that it is asked for."""
    fail(
        "M969",
        f"{printable(name, 240)}: was asked for a range of bytes, and the server answers with "
        "others",
        help="a server without ranges cannot be read from: download the checkpoint",
    )
