"""File systems of fsspec that tests write to: the one in memory, one whose files show when they are
closed, as in a store of objects, and one of folders, which moves files by renaming them.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, ClassVar

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class Closing(AbstractFileSystem):
    """Objects that show when they are closed, with listings that are kept until they are told to be
    invalid. Reads that name a generation get that one alone.
    """

    protocol = "gs"
    cachable = False
    async_impl = True
    objects: ClassVar[dict[str, bytes]] = {}
    # the generation that each read named
    asked: ClassVar[list[str | None]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("gs://").strip("/")

    def _entry(self, path: str) -> dict[str, Any]:
        data = self.objects[path]
        etag = f"{hash(data):x}"
        found = {"name": path, "type": "file", "size": len(data), "etag": etag}
        return {**found, "generation": self._generation(path)}

    def _generation(self, path: str) -> str:
        return str(zlib.crc32(self.objects[path]))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **named: Any
    ) -> Any:
        path = self._strip_protocol(path)
        generation = named.pop("generation", None)
        self.asked.append(generation)
        if path not in self.objects or generation not in (None, self._generation(path)):
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            found = {}
            for one in self.objects:
                if one == path:
                    found[one] = self._entry(one)
                elif one.startswith(path + "/"):
                    name = path + "/" + one[len(path) + 1 :].partition("/")[0]
                    folder = {"name": name, "type": "directory", "size": 0}
                    found[name] = self._entry(one) if name == one else folder
            self.dircache[path] = list(found.values())
        if not self.dircache[path]:
            raise FileNotFoundError(path)
        return [one if detail else one["name"] for one in self.dircache[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def rm_file(self, path: str) -> None:
        # as asynchronous ones do, where a folder is given
        self.objects.pop(self._strip_protocol(path), None)

    def _open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        return ClosingFile(self, path, mode, **named)


class ClosingFile(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.sent: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent.append(self.buffer.getvalue())
        if final:
            if "x" in self.mode and self.path in self.fs.objects:
                raise FileExistsError(self.path)
            Closing.objects[self.path] = b"".join(self.sent)
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.objects[self.path][start:end]


class Folders(LocalFileSystem):
    """A folder of this machine by a protocol of its own: folders://PATH."""

    protocol = "folders"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + str(path).removeprefix("folders://").strip("/")


class Reading(AbstractFileSystem):
    """Nothing is written to it."""

    protocol = "reading"

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise NotImplementedError
        raise FileNotFoundError(path)


def held(system: AbstractFileSystem, root: str) -> dict[str, bytes]:
    """Path below the root -> bytes, of all that shows."""
    system.invalidate_cache()
    try:
        found = system.find(root)
    except FileNotFoundError:
        return {}
    full = system._strip_protocol(root)
    return {path[len(full) :].lstrip("/"): bytes(system.cat_file(path)) for path in found}


def tree(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
