"""Entries of a checkpoint that are not decoded, so that no output can hold them: what they are
called, and what they hold.

They are never unpickled. Two of them are compared by the canonical digest of their nodes
(`pickle.canonical`), and where these are too many to be looked at one by one, by the bytes of the
whole stream and of the storages that nothing else refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from .pickle.canonical import Canonical, TooManyError

if TYPE_CHECKING:
    from .blobs import Blob
    from .tree import RemovedEntry

_CHUNK = 1 << 20


class StreamPlace(NamedTuple):
    """Where in blob `number` the stream of a file stands (offset, size), and its storages by key.

    `hidden` are the keys of those that only what is not decoded refers to.
    """

    number: int
    stream: tuple[int, int]
    places: Mapping[str, Any]
    hidden: frozenset[str]


class Unread(NamedTuple):
    """An entry that is not decoded: `name` says what stands there, `node` are its key and value as
    inert nodes.
    """

    name: str
    node: Any
    written: StreamPlace


class Content(NamedTuple):
    """What an entry holds: `digest`, and whether it is that of all `bytes` of its stream, because
    it is too large.
    """

    name: str
    digest: bytes
    bytes: bool


def unread_entries(gone: Iterable[RemovedEntry], written: StreamPlace) -> dict[str, Unread]:
    """The entries that were left out of one file, by path, no path twice."""
    out: dict[str, Unread] = {}
    counts: dict[str, int] = {}
    for path, key, value in gone:
        name = path
        while name in out:
            counts[path] = counts.get(path, 1) + 1
            name = f"{path}#{counts[path]}"
        node = getattr(value, "node", value)
        out[name] = Unread(
            _called(value),
            node if type(key) is str or key is None else (getattr(key, "node", key), node),
            written,
        )
    return out


def _called(value: Any) -> str:
    name: str = getattr(value, "name", "") or getattr(value, "kind", "") or type(value).__name__
    return name


def entry_contents(unread: Mapping[str, Unread], blobs: Sequence[Blob]) -> dict[str, Content]:
    """What each entry of the checkpoint holds that is not decoded, by path; reads the storages that
    they refer to, each once.
    """
    files: dict[int, _File] = {}
    out = {}
    for path, one in unread.items():
        number = one.written.number
        if number not in files:
            files[number] = _File(blobs[number], one.written)
        out[path] = files[number].content(one)
    return out


class _File:
    def __init__(self, blob: Blob, written: StreamPlace) -> None:
        self._blob, self._written = blob, written
        self._canonical = Canonical(self._storage)
        self._storages: dict[str, bytes] = {}
        self._whole: bytes | None = None

    def content(self, one: Unread) -> Content:
        if self._whole is None:
            try:
                return Content(one.name, self._canonical.digest(one.node), False)
            except TooManyError:
                hidden = b"".join(
                    self._storage(key) or b""
                    for key in sorted(self._written.hidden, key=lambda k: (len(k), k))
                )
                self._whole = self._read(*self._written.stream) + hidden
        return Content(one.name, self._whole, True)

    def _storage(self, key: str) -> bytes | None:
        place = self._written.places.get(key)
        if place is None:
            return None
        if key not in self._storages:
            self._storages[key] = self._read(place.offset, place.size)
        return self._storages[key]

    def _read(self, offset: int, size: int) -> bytes:
        made = blake2b(size.to_bytes(8, "little"), digest_size=32)
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        for at in range(offset, offset + size, _CHUNK):
            part = buffer[: min(_CHUNK, offset + size - at)]
            self._blob.readinto(at, part)
            made.update(part)
        return made.digest()
