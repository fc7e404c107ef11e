"""What is written through fsspec: whole files, in the order of their bytes, none of which shows
before all are there.

Objects of Google's and Azure's stores show when the file is closed. So each stays open until its
turn comes, under its own name and on the condition that there is none. Everywhere else a file is
written under another name beside the output, OUT.migrate-partial/<run>/, and moved.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any, Final, Literal, NamedTuple, NoReturn

from ...core.errors import fail, printable
from ..urls import split_url
from .systems import AZURE, GOOGLE, HTTP, LOCAL, asking, facts, open_system, status_of

PARTIAL: Final = ".migrate-partial"
# protocols of stores of objects, whose first name is a bucket: there are no folders to make
_CLOSED: Final = (*GOOGLE, *AZURE)
_BUCKETS: Final = (*_CLOSED, "oci", "oss", "tos")
_FLAT: Final = (*_BUCKETS, "memory")
_RUN: Final = re.compile("[0-9a-f]{32}")
# bytes that a file of a store holds before it sends them
_LONGEST_BLOCK, _SHORTEST_BLOCK = 8 << 20, 1 << 20
# blocks of an object in Azure, of 50,000
_MOST_BLOCKS: Final = 40_000


class SystemOutput:
    """Where an output goes: files below a path, or, where `single`, one file.

    `location` is how messages call it, without a slash at its end. All methods raise M968 where the
    store refuses and M969 where it fails.
    """

    kind: Literal["system"] = "system"

    def __init__(self, text: str) -> None:
        url = split_url(text)
        self.location = url.shown.rstrip("/")
        if url.scheme in (*HTTP, *LOCAL):
            fail(
                "M115",
                f"{printable(self.location, 240)}: nothing is written by this protocol",
                help="give a path of this machine, or the URL of a store",
            )
        system, path = open_system(url)
        self.system: Any = system
        self.root = path.rstrip("/")
        self.single = False
        self.scheme = url.scheme
        names = self.root.strip("/").split("/")
        if not names[0] or (url.scheme in _BUCKETS and len(names) < 2):
            fail(
                "M115",
                f"{printable(self.location, 240)}: names a whole store",
                help=f"give a folder in it: {url.scheme}://BUCKET/FOLDER",
            )

    @property
    def name(self) -> str:
        return self.root.rpartition("/")[2]

    @property
    def by_threads(self) -> bool:
        """Whether files may be written side by side."""
        return self.scheme in _FLAT or bool(getattr(self.system, "async_impl", False))

    @property
    def in_process(self) -> bool:
        """Whether no other process sees it."""
        return self.scheme == "memory"

    def path_of(self, name: str) -> str:
        """The path of a file of the output."""
        return self.root if self.single else f"{self.root}/{name}"

    def shown(self, path: str) -> str:
        """A path as messages call it."""
        return self.location + path[len(self.root) :]

    def objects(self, most: int = 2) -> list[str]:
        """The first paths of what is there: the name itself as a file or a folder, and what lies
        below.
        """
        found = [one["name"] for one in self._listed(self.root)][:most]
        if not found and self.scheme not in _FLAT:
            with asking(self.location, "list and write"):
                found = [self.root] * bool(self.system.exists(self.root))
        return found

    def left(self) -> dict[str, list[tuple[str, int, int]]]:
        """What runs have left beside the output: run -> path, bytes and time of each file. Others
        are below "".
        """
        found: dict[str, list[tuple[str, int, int]]] = {}
        place = f"{self.root}{PARTIAL}"
        for one in self._listed(place):
            name = one["name"].rstrip("/").rpartition("/")[2]
            run = name if one["type"] == "directory" and _RUN.fullmatch(name) else ""
            files = found.setdefault(run, [])
            inside = [one] if one["type"] != "directory" else self._below(f"{place}/{name}")
            for file in inside:
                size, _, modified = facts(file, self.shown(place))
                files.append((place + file["name"].partition(PARTIAL)[2], size, modified))
        return found

    def remove(self, run: str) -> bool:
        """Removes what a run has left; whether nothing of it is there any more."""
        place = f"{self.root}{PARTIAL}"
        with asking(self.shown(place), "write"), suppress(FileNotFoundError):
            self.system.rm(f"{place}/{run}", recursive=True)
        if self.scheme not in _FLAT:
            # others may be at work below it
            with suppress(Exception):
                self.system.rmdir(place)
        return not self._listed(f"{place}/{run}")

    def _listed(self, path: str) -> list[dict[str, Any]]:
        with asking(self.shown(path), "list and write"):
            self.system.invalidate_cache()
            try:
                found = self.system.ls(path, detail=True)
            except FileNotFoundError:
                return []
        # a console leaves an object for a folder that it shows
        here = path.strip("/") + "/"
        return [one for one in found if one["name"].lstrip("/") != here]

    def _below(self, path: str) -> list[dict[str, Any]]:
        with asking(self.shown(path), "list and write"):
            return list(self.system.find(path, detail=True).values())


class OpenedFile(NamedTuple):
    """A file while it is written, and the path where it is."""

    stream: Any
    path: str


class HeldFiles:
    """The files of one run, of which none shows before `appear`. `begin`, `write` and `end` may be
    called by several threads, for a file by one at a time.
    """

    def __init__(self, output: SystemOutput, files: Iterable[tuple[str, int]], memory: int) -> None:
        """`files` are names and sizes of those that are long, which may hold `memory` together."""
        self.output, self.run = output, secrets.token_hex(16)
        self._system = output.system
        self._opened: dict[str, OpenedFile] = {}
        self._appeared: list[str] = []
        self._sizes = dict(files)
        block = min(_LONGEST_BLOCK, memory // max(1, len(self._sizes)))
        # multiples of this one are what Google takes
        self._block = max(_SHORTEST_BLOCK, block & -_SHORTEST_BLOCK)
        self.closing = output.scheme in _CLOSED
        # a file that is there is refused by the store itself
        self._mode = "xb" if self.closing else "wb"
        self._begun = False

    @property
    def place(self) -> str:
        """Where files are that do not show."""
        output = self.output
        return output.root if self.closing else f"{output.root}{PARTIAL}/{self.run}"

    def begin(self, name: str) -> None:
        """Opens a file. M115 where the file system writes none."""
        output = self.output
        path = output.path_of(name) if self.closing else f"{self.place}/{name}"
        self._begun = True
        with _writing(output.shown(path), output.scheme):
            self._make_folder(path)
            self._opened[name] = OpenedFile(self._open(name, path), path)

    def _open(self, name: str, path: str) -> Any:
        named: dict[str, Any] = {}
        if self.closing:
            least = -(-self._sizes.get(name, 0) // _MOST_BLOCKS)
            named["block_size"] = max(self._block, -(-least // _SHORTEST_BLOCK) * _SHORTEST_BLOCK)
        try:
            return self._system.open(path, self._mode, **named)
        except (NotImplementedError, ValueError):
            if self._mode == "wb":
                raise
            self._mode = "wb"
            return self._system.open(path, self._mode, **named)

    def _make_folder(self, path: str) -> None:
        if self.output.scheme not in _FLAT:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Adds bytes to a file."""
        file = self._opened[name]
        with _writing(self.output.shown(file.path), self.output.scheme):
            # not all libraries below take a view
            file.stream.write(bytes(data))

    def end(self, name: str, size: int) -> None:
        """All of a file was written, which has so many bytes. M913."""
        if not self.closing:
            self._close(name, size)

    def add(self, name: str, content: bytes) -> None:
        """A small file."""
        self.begin(name)
        self.write(name, content)
        self._sizes[name] = len(content)
        self.end(name, len(content))

    def appear(self, name: str) -> None:
        """Lets a file show. M904 if there is one."""
        output, path = self.output, self.output.path_of(name)
        with _writing(output.shown(path), output.scheme):
            self._system.invalidate_cache()
            if self._mode != "xb" and self._system.exists(path):
                raise FileExistsError(path)
            if not self.closing:
                self._make_folder(path)
                self._appeared.append(path)
                self._move(f"{self.place}/{name}", path)
        if self.closing:
            self._close(name, self._sizes[name])

    def _close(self, name: str, size: int) -> None:
        file, output = self._opened.pop(name), self.output
        with _writing(output.shown(file.path), output.scheme):
            try:
                file.stream.close()
            except BaseException as error:
                # the garbage collector would complete it
                _abandon(file.stream)
                if not isinstance(error, FileExistsError):
                    # whether the store has taken it is not known
                    self._appeared += [file.path] * self.closing
                raise
            self._appeared += [file.path] * self.closing
            self._system.invalidate_cache()
            try:
                found = self._system.info(file.path)["size"]
            except FileNotFoundError:
                found = "none"
        if found != size:
            fail(
                "M913",
                f"{printable(output.shown(file.path), 240)}: {size} bytes were written, and the "
                f"store has {found}",
                help="run it again",
            )

    def _move(self, path: str, to: str) -> None:
        from fsspec import AbstractFileSystem

        system = self._system
        if hasattr(system, "mv_file"):
            system.mv_file(path, to)
        elif type(system).mv is not AbstractFileSystem.mv:
            system.mv(path, to)
        else:
            # `mv` takes names for patterns
            system.cp_file(path, to)
            system.rm_file(path)

    def discard(self) -> tuple[str, ...]:
        """Removes all that the run has written, shown or not; what could not be removed."""
        left = []
        for file in self._opened.values():
            _abandon(file.stream)
        self._opened.clear()
        for path in reversed(self._appeared):
            try:
                with asking(self.output.shown(path), "write"), suppress(FileNotFoundError):
                    self._system.rm_file(path)
            except Exception:  # noqa: BLE001 - named, and the others are removed
                left.append(self.output.shown(path))
        if self.output.scheme not in _FLAT:
            self._remove_folders()
        self._appeared.clear()
        return (*left, *self.forget())

    def _remove_folders(self) -> None:
        """Removes the folders that were made for files, where nothing is in them any more."""
        root, found = self.output.root, set[str]()
        for path in self._appeared:
            while len(path := path.rpartition("/")[0]) >= len(root):
                found.add(path)
        for path in sorted(found, key=len, reverse=True):
            with suppress(Exception):
                self._system.rmdir(path)

    def forget(self) -> tuple[str, ...]:
        """Removes the place of what does not show; its name if that could not be done."""
        if self.closing or not self._begun:
            return ()
        try:
            if self.output.remove(self.run):
                return ()
        except Exception:  # noqa: BLE001 - named
            pass
        return (self.output.shown(self.place),)


def _abandon(stream: Any) -> None:
    """Lets go of a file that is not wanted. To close it would complete it, and so would the garbage
    collector if it were not closed.
    """
    from fsspec.spec import AbstractBufferedFile

    with suppress(Exception):
        stream.discard()
    with suppress(Exception):
        if isinstance(stream, AbstractBufferedFile):
            stream.closed = True
        else:
            stream.close()


def newest(times: Iterable[int]) -> datetime | None:
    """The latest of times in nanoseconds, 0 of which is none."""
    last = max(times, default=0)
    return datetime.fromtimestamp(last / 10**9, timezone.utc) if last else None


@contextmanager
def _writing(shown: str, scheme: str) -> Iterator[None]:
    name = printable(shown, 240)
    try:
        with asking(shown, "write"):
            try:
                yield
            except FileExistsError:
                refuse_appeared(shown)
            except NotImplementedError:
                fail(
                    "M115",
                    f"{name}: fsspec only reads by {printable(scheme)}://",
                    help="write to a folder of this machine, and copy that with the store's own "
                    "tool",
                )
            except Exception as error:
                if status_of(error) == 404:
                    raise FileNotFoundError from error
                raise
    except FileNotFoundError:
        fail(
            "M917",
            f"{name}: there is no such bucket or folder, or it is not shown to you",
            help="make it first",
        )


def refuse_appeared(shown: str) -> NoReturn:
    """M904 for a file that appeared where the run was about to make one."""
    fail(
        "M904",
        f"{printable(shown, 300)} appeared during this run",
        help="move it away and run it again, or choose another place",
    )
