"""Entries of a checkpoint that are not decoded, so that no output can hold them: what they are
called, and what they hold.

They are never unpickled. Two of them are compared by the canonical digest of their nodes, and where
these are too many to be looked at one by one, by the bytes of the whole stream and of the storages
that nothing else refers to.

The digest is equal for equal values of two files, however they were pickled. It is taken over the
inert nodes, which know no protocol, no frames and no memo numbers. Numbers, texts, bytes and tuples
of them count by what they are, for a pickler shares them as it pleases; containers and calls are
numbered as they are met, so that one object in two places is not two equal ones. A set counts by
its members, whose order depends on the process that wrote it. A storage counts by its class and the
bytes that lie in the file, not by its key or its device. Every node is looked at once, whatever
shares it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .blobs import room
from .pickle.decoding import ContradictionError, ForeignError, is_global
from .pickle.nodes import ABSENT, COMPOSITES, Call, Dict, Global, Persistent, Set
from .pickle.python_objects import encoded

if TYPE_CHECKING:
    from .blobs import Blob
    from .tree import RemovedEntry

# nodes of one file that are looked at
MOST_NODES: Final = 1_000_000


class TooManyError(Exception):
    """The values have more nodes than are looked at."""


class Canonical:
    """The digests of the values of one file. `content`: key -> digest of the storage, or None."""

    __slots__ = ("_content", "_known", "_left", "kept")

    def __init__(self, content: Callable[[str], bytes | None], most: int = MOST_NODES) -> None:
        self._content, self._left = content, most
        # of each composite node, its digest by value, and whether it holds no identities
        self._known: dict[int, tuple[bytes, bool]] = {}
        self.kept: list[Any] = []

    def digest(self, node: Any) -> bytes:
        """Of a node and of which objects in it are one. TooManyError once the nodes of the file are
        more than `most`.

        As deep as the machine lets a stream be.
        """
        value, _ = self._of(node)
        shared = blake2b(value, digest_size=32)
        numbers: dict[Any, int] = {}
        stack = [node]
        while stack:
            here = stack.pop()
            if type(here) not in COMPOSITES or self._of(here)[1]:
                continue
            identity = _key(here) if type(here) is Persistent else id(here)
            if identity in numbers:
                shared.update(struct.pack("<Q", numbers[identity]))
                continue
            numbers[identity] = len(numbers)
            shared.update(b"+")
            stack += reversed(self._parts(here))
        return shared.digest()

    def _parts(self, node: Any) -> list[Any]:
        """What a node holds, in an order that does not depend on who wrote it."""
        kind = type(node)
        if kind is tuple or kind is list:
            return list(node)
        if kind is Dict:
            return [part for pair in node.pairs for part in pair]
        if kind is Set:
            return sorted(node.items, key=lambda item: self._of(item)[0])
        if kind is Persistent:
            return [] if _key(node) is not None else [node.id]
        members = _members(node)
        if members is not None:
            return self._parts(members)
        held = [
            *node.arguments,
            *(node.items or ()),
            *(part for pair in node.pairs or () for part in pair),
        ]
        return held if node.state is ABSENT else [*held, node.state]

    def _of(self, node: Any) -> tuple[bytes, bool]:
        """The digest of a node by value, and whether it is all that there is to it."""
        kind = type(node)
        if kind not in COMPOSITES:
            return _leaf(node, kind), True
        found = self._known.get(id(node))
        if found is None:
            self._left -= 1
            if self._left < 0:
                raise TooManyError
            found = self._known[id(node)] = self._composite(node, kind)
        return found

    def _composite(self, node: Any, kind: type) -> tuple[bytes, bool]:
        if kind is Persistent:
            return self._storage(node), False
        if kind is Call:
            plain = _bytes(node)
            if plain is not None:
                return _leaf(plain, type(plain)), True
            members = _members(node)
            if members is not None:
                self.kept.append(members)
                self._known[id(node)] = self._of(members)
                return self._known[id(node)]
            head = ["call", node.how, node.function.module, node.function.name]
            head += [
                str(len(part)) for part in (node.arguments, node.items or (), node.pairs or ())
            ] + [str(node.state is ABSENT)]
            return self._hashed("\0".join(head).encode(), self._parts(node))[0], False
        if kind is Set:
            self._left -= len(node.items)
            name, parts = b"frozenset" if node.frozen else b"set", self._parts(node)
            return self._hashed(name, parts)[0], node.frozen and all(
                self._of(part)[1] for part in parts
            )
        made, atomic = self._hashed(kind.__name__.encode(), self._parts(node))
        return made, atomic and kind is tuple

    def _hashed(self, head: bytes, parts: list[Any]) -> tuple[bytes, bool]:
        self._left -= len(parts)
        if self._left < 0:
            raise TooManyError
        made = blake2b(head + b"\0" + struct.pack("<Q", len(parts)), digest_size=32)
        atomic = True
        for part in parts:
            digest, whole = self._of(part)
            made.update(digest)
            atomic = atomic and whole
        return made.digest(), atomic

    def _storage(self, node: Persistent) -> bytes:
        key = _key(node)
        held = None if key is None else self._content(key)
        if key is None or held is None:
            # what it names lies outside of the file: the name is all that can be compared
            return self._hashed(b"id", [node.id])[0]
        _, cls, _, _, numel, *view = node.id
        # before torch 1.6 there is a sixth field, None unless the storage is a view of another
        return self._hashed(
            b"storage" + held, [cls, numel, *(part for part in view if part is not None)]
        )[0]


def _key(node: Persistent) -> str | None:
    """The key of a storage that a persistent id names."""
    named = node.id
    if (
        type(named) is tuple
        and len(named) in (5, 6)
        and named[0] == "storage"
        and type(named[2]) is str
    ):
        return named[2]
    return None


def _bytes(call: Call) -> bytes | bytearray | None:
    """The bytes that a call spells, as protocol 2 does."""
    if not is_global(
        call.function, ("_codecs", "encode"), ("builtins", "bytes"), ("builtins", "bytearray")
    ):
        return None
    try:
        found = encoded(call)
    except (ContradictionError, ForeignError):
        return None
    return bytearray(found) if call.function.name == "bytearray" else found


def _members(call: Call) -> Set | None:
    """The set that a call spells, as protocol 2 does."""
    if (
        not is_global(call.function, ("builtins", "set"), ("builtins", "frozenset"))
        or len(call.arguments) > 1
    ):
        return None
    items = call.arguments[0] if call.arguments else []
    if type(items) not in (list, tuple) or call.state is not ABSENT or call.items or call.pairs:
        return None
    return Set(call.function.name == "frozenset", list(items))


def _leaf(value: Any, kind: type) -> bytes:
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
    elif kind is float:
        data = struct.pack(">d", value)
    elif kind is complex:
        data = struct.pack(">dd", value.real, value.imag)
    elif kind is Global:
        data = f"{value.module}\0{value.name}".encode()
    elif kind in (bytes, bytearray):
        data = value
    elif kind is int:
        data = b"%x" % value
    else:
        data = str(value).encode()
    return blake2b(kind.__name__.encode() + b"\0" + data, digest_size=32).digest()


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
    """An entry that is not decoded: its `name` in words, its key and value as inert nodes."""

    name: str
    node: Any
    written: StreamPlace


class Content(NamedTuple):
    """What an entry holds: `digest`, and whether that is of all `bytes` of a large stream."""

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
    """What each undecoded entry holds, by path; reads the storages they refer to, each once."""
    # one file may hold several streams, each with storages of its own
    streams: dict[int, _File] = {}
    out = {}
    for path, one in unread.items():
        stream = streams.get(id(one.written))
        if stream is None:
            blob = blobs[one.written.number]
            stream = streams[id(one.written)] = _File(blob, one.written)
        out[path] = stream.content(one)
    return out


class _File:
    def __init__(self, blob: Blob, written: StreamPlace) -> None:
        self._blob, self._written = blob, written
        self._canonical = Canonical(self._storage)
        if not written.stream[1]:
            # there are no other bytes to compare, and the text has a limit of its own
            self._canonical = Canonical(self._storage, MOST_NODES * MOST_NODES)
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
        buffer = room(min(_CHUNK, size))
        for at in range(offset, offset + size, _CHUNK):
            part = buffer[: min(_CHUNK, offset + size - at)]
            self._blob.readinto(at, part)
            made.update(part)
        return made.digest()
