"""The stream of `.metadata` as Python's pickler spells it, read a chunk at a time.

The machine reads any stream, opcode by opcode, into nodes of two kilobytes for each chunk, and
there may be a million chunks. But what `pickle.dump` writes repeats itself: each tensor, each chunk
and each place is spelled by the same opcodes with other texts and numbers between them. Here each
is taken at once, by a pattern that has the memo's numbers of the names that stood before. What is
spelled in another way is left to the machine: for a stream there is one answer, or none.

What is taken is protocol 4 and 5 as CPython writes them: a value is memoised right behind its last
opcode, so that the number of a memo entry is how many were written before. Frames are taken away
first, for they end anywhere between two values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from .dcp_values import (
    MODULE,
    NUMBER,
    ONE_NUMBER,
    SIZE,
    UNKNOWN,
    Name,
    OtherSpellingError,
    ValueReader,
    frames_of,
)
from .decoding import ContradictionError

_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NUMBERS = (rb"(?:\)|N\x85\x94|NN\x86\x94|NNN\x87\x94|\((?:N){4,64}t\x94)").replace(b"N", NUMBER)
_REFERENCE = rb"(?:h.|j.{4})"
# one that holds the opcode MEMOIZE is read without a pattern
_TEXT = rb"(?:\x8c.[^\x94]*\x94|%b)" % _REFERENCE
_FLAG = rb"[\x88\x89]"
# a key and its path, which ends in one of these opcodes
_PATH = re.compile(rb"(T)(\(?)(T)(T)?(T)?(T)?([t\x85-\x87])\x94".replace(b"T", _TEXT), re.DOTALL)
_ENDS = (b"", b"\x85", b"\x86", b"\x87", b"t")
_PROPERTIES = _REFERENCE * 2 + _FLAG + _REFERENCE + _FLAG


class SavedChunk(NamedTuple):
    """A box of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedPart(NamedTuple):
    """Where an entry lies: `length` bytes from `offset` of `file`, through `transforms`."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class SavedCopy(NamedTuple):
    """What two ranks wrote: a chunk at `offsets` of `key`, or another value (None). It is read from
    `part`, and `other` has to hold the same.
    """

    key: str
    offsets: tuple[int, ...] | None
    part: SavedPart
    other: SavedPart


class MetadataContents(NamedTuple):
    """What a `.metadata` file says, before its parts are compared with each other.

    `tensors`: key -> (dtype, shape, requires_grad, strides, chunks); `others` are the keys of other
    values. `storage`: (key, offsets of the chunk, None for other values) -> where it lies.
    `planner` is None where there is none. `megatron`: Megatron wrote it; `reformed` are the tensors
    that it then saved in another shape than they have. `save_id` names the run of `dcp.save`.
    """

    tensors: dict[
        str, tuple[str, tuple[int, ...], bool, tuple[int, ...] | None, Sequence[SavedChunk]]
    ]
    others: list[str]
    storage: dict[tuple[str, tuple[int, ...] | None], SavedPart]
    planner: dict[str, tuple[str | int, ...]] | None
    version: str | None
    megatron: bool = False
    reformed: tuple[str, ...] = ()
    save_id: str | None = None


class MetadataRest(NamedTuple):
    """What a `.metadata` file says beside its contents, which nothing here has a use for.

    `properties` of each tensor: the number of its memory format, whether its memory was pinned, and
    whether strides stand there or None instead of them. `hints` are the numbers of chunks, in the
    order of `MetadataContents.storage`. `meta` are the fields of the StorageMeta with their values
    (None, a text, an empty list, the parts of a path), None without one. `versioned`: a version, or
    that there is none, is named.
    """

    properties: dict[str, tuple[int, bool, bool]]
    hints: list[int | None]
    meta: list[tuple[str, Any]] | None
    versioned: bool


class SavedPath(NamedTuple):
    """A folder as pathlib pickles it: the module of its class, and its parts."""

    module: str
    parts: tuple[str | int, ...]


def read_stream(data: bytes) -> MetadataContents | None:
    """What the stream says, None unless every byte of it is spelled as expected."""
    found = _read(data, None)
    return None if found is None else found[0]


def read_whole_stream(data: bytes) -> tuple[MetadataContents, MetadataRest] | None:
    """All that the stream says; None as of `read_stream`."""
    contents, rest = _read(data, MetadataRest({}, [], None, False)) or (None, None)
    return None if contents is None or rest is None else (contents, rest)


def _read(
    data: bytes, rest: MetadataRest | None
) -> tuple[MetadataContents, MetadataRest | None] | None:
    """What the stream says, and its `rest` if one is given to be filled."""
    reader = None
    try:
        reader = _Reader(frames_of(data), rest)
        return reader.read()
    except (OtherSpellingError, IndexError, ContradictionError, UnicodeDecodeError):
        return None
    finally:
        if reader is not None:
            reader.free()


class _Production:
    """One thing that repeats: opcodes, names and fields, and the values between them, each by the
    word for its kind.

    `pattern` has one group for each value, whose kind is in `kinds` and which its reader in
    `readers` reads; before each of them the memo entries in `before` are written, to which no
    stream refers. It is None until the names have been met. What the bytes of one without texts
    mean, and what they add to the memo, is `known`: what an entry of the memo holds never changes.
    """

    __slots__ = ("before", "kinds", "known", "parts", "pattern", "readers", "repeats")

    def __init__(self, *parts: bytes | Name | str) -> None:
        # texts that begin with a colon are values, other texts are the names of fields
        self.parts = parts
        self.pattern: re.Pattern[bytes] | None = None
        self.readers: list[Callable[[bytes], Any]] = []
        self.kinds: list[str] = []
        self.before: list[tuple[None, ...]] = [()]
        for part in parts:
            if isinstance(part, bytes):
                self.before[-1] += (None,) * part.count(b"\x94")
            elif isinstance(part, str) and part[0] == ":":
                self.kinds.append(part)
                self.before.append(())
        self.known: dict[bytes, tuple[list[Any], tuple[Any, ...]]] = {}
        self.repeats = not _UNLIKE.intersection(self.kinds)


# the values that differ from one chunk to the next
_UNLIKE = frozenset({":text", ":number"})
# what is kept of a production that repeats itself; more kinds of chunks are no regular writer's
_MOST_KNOWN = 1 << 14
# chunks that are read with their tensor, others are read one by one; lists of such chunks that are
# kept, each of some kilobytes
_MOST_CHUNKS, _MOST_LISTS = 64, 1 << 11
_MADE = b")\x81\x94}\x94("


def _productions() -> dict[str, _Production]:
    def of(name: str) -> tuple[Name, bytes]:
        return Name(MODULE, name), _MADE

    # a file has few names, so all between the key and the offset in the file repeats itself
    info = (b"ub", Name(_FILESYSTEM, "_StorageInfo"), _MADE, "relative_path", ":file")
    extent = ("offset", ":number", "length", ":number", b"ub")
    return {
        "tensor": _Production(
            *of("TensorStorageMetadata"),
            "properties", Name(MODULE, "TensorProperties"), b")\x81\x94(", ":properties",
            ":strides", b"t\x94b", "size", ":size", "chunks", b"]\x94",
        ),
        "other": _Production(Name(MODULE, "BytesStorageMetadata"), b")\x81\x94"),
        "chunk": _Production(
            *of("ChunkStorageMetadata"), "offsets", ":size", "sizes", ":size", b"ub"
        ),
        "place": _Production(*of("MetadataIndex"), "fqn", ":text", ":place", *extent),
        ":place": _Production("index", ":hint", "offset", ":size", *info),
        # that of a value beside tensors has no offset
        "value": _Production(*of("MetadataIndex"), "fqn", ":text", ":value", *extent),
        ":value": _Production("index", ":hint", *info),
    }  # fmt: skip


class _Reader(ValueReader):
    """One stream. `rest` is filled, if there is one."""

    def __init__(
        self, frames: Iterator[bytes | memoryview], rest: MetadataRest | None = None
    ) -> None:
        super().__init__(frames)
        self.rest = rest
        self.productions = _productions()
        self.known: dict[tuple[str, bytes], Any] = {}
        self.boxes: dict[SavedChunk, SavedChunk] = {}
        # tensors with all their chunks, and what the bytes of such chunks mean
        self.entries: re.Pattern[bytes] | None = None
        self.lists: dict[bytes, tuple[tuple[SavedChunk, ...], tuple[Any, ...]]] = {}
        self.values: dict[str, tuple[Callable[[], Any], Callable[[bytes], Any]]] = {
            ":text": (self.text, self._text),
            ":file": (self.text, self._text),
            ":size": (self.size, self._size),
            ":hint": (
                lambda: None if self.taken(b"N") else self.number(),
                lambda raw: None if raw == b"N" else self.number_of(raw),
            ),
            ":number": (self.number, self.number_of),
            ":place": (partial(self.learn, ":place"), partial(self._within, ":place")),
            ":value": (partial(self.learn, ":value"), partial(self._within, ":value")),
            ":strides": (self.strides, self._strides),
            ":properties": (self.properties, self._properties),
        }
        # values that write no memo entry and are equal for equal bytes
        self.patterns = {
            ":text": _TEXT, ":file": _TEXT, ":number": NUMBER, ":hint": b"(?:N|%b)" % NUMBER,
            ":strides": b"(?:N|%b|%b|)" % (_NUMBERS, _REFERENCE), ":properties": _PROPERTIES,
        }  # fmt: skip

    def free(self) -> None:
        """Lets go of its own methods: a cycle would keep the memo until the collector comes by."""
        self.values.clear()
        self.productions.clear()

    def read(self) -> tuple[MetadataContents, MetadataRest | None]:
        self.name(Name(MODULE, "Metadata"))
        self.opcodes(_MADE)
        tensors: dict[str, Any] = {}
        others: dict[str, None] = {}
        storage: dict[Any, Any] = {}
        self.field("state_dict_metadata")
        count = 0
        for _ in self.pairs():
            count += self.known_tensors(tensors) or self.entry(tensors, others)
        if len(tensors) + len(others) != count:
            raise OtherSpellingError
        self.field("planner_data")
        planner = None if self.taken(b"N") else self.planner()
        self.field("storage_data")
        count = 0
        for _ in self.pairs():
            count += self.known_places(storage) or self.place(storage)
        if len(storage) != count:
            raise OtherSpellingError
        self.field("storage_meta")
        meta = None if self.taken(b"N") else self.storage_meta()
        version = None
        # torch 2.6 does not name the version
        versioned = not self.taken(b"ub.")
        if versioned:
            self.field("version")
            version = None if self.taken(b"N") else self.text()
            self.opcodes(b"ub.")
        self.go_on()
        if self.at != len(self.data):
            raise OtherSpellingError
        said = dict(meta or ()).get("save_id")
        contents = MetadataContents(
            tensors,
            list(others),
            storage,
            planner,
            version,
            save_id=said if type(said) is str else None,
        )
        if self.rest is None:
            return contents, None
        return contents, self.rest._replace(meta=meta, versioned=versioned)

    def known_tensors(self, tensors: dict[str, Any]) -> int:
        """Takes the tensors that come next as far as they are spelled like those before; how many
        there are.
        """
        pattern, count = self.entries, 0
        if pattern is None:
            tensor, chunk = self.productions["tensor"], self.productions["chunk"]
            if tensor.pattern is None or chunk.pattern is None:
                return 0
            one = self.spelled(chunk, b"(?:")
            pattern = self.entries = re.compile(
                b"(%b)(%b)(\\((?:%b){2,%d}e|%ba)ub"
                % (_TEXT, self.spelled(tensor, b"(?:"), one, _MOST_CHUNKS, one),
                re.DOTALL,
            )
        while (match := pattern.match(self.data, self.at)) is not None:
            key, one, chunks = match.groups()
            self.add(tensors, self._text(key), self._within("tensor", one), self._chunks(chunks))
            self.at = match.end()
            count += 1
        return count

    def entry(self, tensors: dict[str, Any], others: dict[str, None]) -> int:
        """Takes one entry of state_dict_metadata."""
        key = self.text()
        found = self.take("tensor", "other")
        if not found:
            others[key] = None
            return 1
        chunks = []
        while self.taken(b"("):
            while not self.taken(b"e"):
                chunks.append(self.box(self.take("chunk")))
                self.go_on()
        if not chunks:
            chunks.append(self.box(self.take("chunk")))
            self.opcodes(b"a")
        self.opcodes(b"ub")
        self.add(tensors, key, found, tuple(chunks))
        return 1

    def add(
        self, tensors: dict[str, Any], key: str, found: list[Any], chunks: tuple[SavedChunk, ...]
    ) -> None:
        """Enters a tensor."""
        (dtype, requires_grad, memory_format, pinned), strides, shape = found
        if self.rest is not None:
            self.rest.properties[key] = (memory_format, pinned, strides is not None)
        if strides is UNKNOWN:
            strides = None
        if strides is not None and len(strides) != len(shape):
            raise OtherSpellingError
        tensors[key] = (dtype, shape, requires_grad, strides, chunks)

    def box(self, values: list[Any]) -> SavedChunk:
        """One chunk; equal ones are one object."""
        found = SavedChunk(*values)
        return self.boxes.setdefault(found, found)

    def known_places(self, storage: dict[Any, Any]) -> int:
        """Takes the places of chunks that come next as far as they are spelled like those before;
        how many there are.
        """
        production, memo, hints = self.productions["place"], self.memo, None
        if production.pattern is None:
            return 0
        match_at, data, at, count = production.pattern.match, self.data, self.at, 0
        before, known = production.before[0], self.productions[":place"].known
        if self.rest is not None:
            hints = self.rest.hints
        while (match := match_at(data, at)) is not None:
            fqn, place, begin, length = match.groups()
            memo += before
            key = self._text(fqn)
            if place in known:
                (hint, offset, file), more = known[place]
                memo += more
            else:
                hint, offset, file = self._within(":place", place)
            # all fields at once: the named tuple's own function takes three times as long
            storage[key, offset] = tuple.__new__(
                SavedPart, (file, self.number_of(begin), self.number_of(length), ())
            )
            if hints is not None:
                hints.append(hint)
            at = match.end()
            count += 1
        self.at = at
        return count

    def place(self, storage: dict[Any, Any]) -> int:
        """Takes one place of storage_data."""
        key, (hint, *offset, file), begin, length = self.take("place", "value")
        storage[key, offset[0] if offset else None] = SavedPart(file, begin, length, ())
        if self.rest is not None:
            self.rest.hints.append(hint)
        return 1

    def planner(self) -> dict[str, tuple[str | int, ...]]:
        """planner_data: the path of each key."""
        found: dict[str, tuple[str | int, ...]] = {}
        count = 0
        for _ in self.pairs():
            taken = self.known_paths(found)
            if not taken:
                key = self.text()
                found[key] = self.path()
            count += taken or 1
        if len(found) != count:
            raise OtherSpellingError
        return found

    def known_paths(self, paths: dict[str, tuple[str | int, ...]]) -> int:
        """Takes the paths that come next as far as they are one to four texts; how many there
        are.
        """
        count, text = 0, self._text
        while (match := _PATH.match(self.data, self.at)) is not None:
            key, many, *parts, end = match.groups()
            texts = [part for part in parts if part is not None]
            if bool(many) != (len(texts) > 3) or end != _ENDS[len(texts)]:
                break
            name = text(key)
            paths[name] = tuple([text(part) for part in texts])
            self.memo.append(None)
            self.at = match.end()
            count += 1
        return count

    def path(self) -> tuple[str | int, ...]:
        """The path of one key in planner_data."""
        parts: list[str | int] = []
        many = self.taken(b"(")
        while self.data[self.at] not in b"t\x85\x86\x87":
            parts.append(self.number() if self.data[self.at] in b"KMJ\x8a" else self.text())
        if not parts or many != (len(parts) > 3):
            raise OtherSpellingError
        self.opcodes(b"t\x94" if many else bytes((0x84 + len(parts), 0x94)))
        return tuple(parts)

    def storage_meta(self) -> list[tuple[str, Any]]:
        """The fields of storage_meta, which says nothing about the entries."""
        self.name(Name(MODULE, "StorageMeta"))
        self.opcodes(_MADE)
        fields: list[tuple[str, Any]] = []
        while not self.taken(b"u"):
            name = self.text()
            value: Any = None
            if self.taken(b"]\x94"):
                self.memo.append(None)
                value = []
            elif not self.taken(b"N"):
                value = self.text()
                if value in ("pathlib", "pathlib._local"):
                    # a folder, as pathlib makes it of its parts
                    self.field("PosixPath")
                    self.opcodes(b"\x93\x94")
                    value = SavedPath(value, self.path())
                    self.opcodes(b"R\x94")
            fields.append((name, value))
        self.opcodes(b"b")
        return fields

    def take(self, *names: str) -> list[Any]:
        """The values of what comes next, which is spelled by one of these productions."""
        memo, begin = self.memo, self.at
        for name in names:
            production = self.productions[name]
            if production.pattern is None:
                continue
            match = production.pattern.match(self.data, begin)
            if match is not None:
                self.at = match.end()
                return self.values_of(production, match)
        written = len(memo)
        for name in names:
            with suppress(OtherSpellingError):
                return self.learn(name)
            self.at = begin
            del memo[written:]
        raise OtherSpellingError

    def values_of(self, production: _Production, match: re.Match[bytes]) -> list[Any]:
        """The values in what the pattern of a production has found."""
        memo = self.memo
        if production.repeats:
            known = production.known.get(match[0])
            if known is not None:
                memo += known[1]
                return known[0]
        out, written = [], len(memo)
        for read, raw, before in zip(
            production.readers, match.groups(), production.before, strict=False
        ):
            memo += before
            out.append(read(raw))
        memo += production.before[-1]
        if production.repeats and len(production.known) < _MOST_KNOWN:
            production.known[match[0]] = out, tuple(memo[written:])
        return out

    def learn(self, name: str) -> list[Any]:
        """The values of what comes next, opcode by opcode; the pattern of all that follow."""
        production, out = self.productions[name], []
        for part in production.parts:
            if isinstance(part, bytes):
                self.opcodes(part)
            elif isinstance(part, Name):
                self.name(part)
            elif part[0] == ":":
                out.append(self.values[part][0]())
            else:
                self.field(part)
        if production.pattern is None:
            production.pattern = re.compile(self.spelled(production), re.DOTALL)
            production.readers = [self.values[kind][1] for kind in production.kinds]
        return out

    def spelled(self, production: _Production, group: bytes = b"(") -> bytes:
        """The pattern of a production whose names have been met; `group` begins each value."""
        patterns = dict(self.patterns)
        for kind in {":place", ":value"}.intersection(production.kinds):
            # what is in it, its own pattern finds
            patterns[kind] = self.spelled(self.productions[kind], b"(?:")
        if ":size" in production.kinds:
            size = re.escape(self.references[SIZE]) + _NUMBERS + rb"\x85\x94R\x94"
            patterns[":size"] = size + b"|" + _REFERENCE
        out = []
        for part in production.parts:
            if isinstance(part, bytes):
                out.append(re.escape(part))
            elif isinstance(part, str) and part[0] == ":":
                out.append(group + patterns[part] + b")")
            else:
                out.append(re.escape(self.references[part]))
        return b"".join(out)

    # from what a pattern has found

    def _within(self, kind: str, raw: bytes) -> list[Any]:
        """The values of a production that is a part of another one."""
        production = self.productions[kind]
        known = production.known.get(raw)
        if known is not None:
            self.memo += known[1]
            return known[0]
        match = None if production.pattern is None else production.pattern.fullmatch(raw)
        if match is None:
            raise OtherSpellingError
        return self.values_of(production, match)

    def _text(self, raw: bytes) -> str:
        if raw[0] == 0x8C:
            if len(raw) != raw[1] + 3:
                raise OtherSpellingError
            found = raw[2:-1].decode("utf-8", "surrogatepass")
            self.memo.append(found)
            return found
        known = self.memo[int.from_bytes(raw[1:], "little")]
        if type(known) is not str:
            raise OtherSpellingError
        return known

    def _chunks(self, raw: bytes) -> tuple[SavedChunk, ...]:
        """The chunks of a tensor, in the opcodes around them."""
        known = self.lists.get(raw)
        if known is not None:
            self.memo += known[1]
            return known[0]
        production, written = self.productions["chunk"], len(self.memo)
        chunks, at = [], int(raw[0] == 0x28)
        while at < len(raw) - 1:
            match = None if production.pattern is None else production.pattern.match(raw, at)
            if match is None:
                raise OtherSpellingError
            chunks.append(self.box(self.values_of(production, match)))
            at = match.end()
        found = tuple(chunks)
        if len(self.lists) < _MOST_LISTS:
            self.lists[raw] = found, tuple(self.memo[written:])
        return found

    def _row(self, raw: bytes) -> tuple[int, ...]:
        return tuple(self.number_of(one) for one in ONE_NUMBER.findall(raw))

    def _size(self, raw: bytes) -> tuple[int, ...]:
        if len(raw) == 2 or raw[0] == 0x6A:
            known = self.memo[int.from_bytes(raw[1:], "little")]
            if type(known) is not tuple:
                raise OtherSpellingError
            return known
        found = self.known.get(("size", raw))
        if found is None:
            found = self.known["size", raw] = self._row(raw[2:-4])
        # the tuple, unless it is empty, and the tuple around it
        self.memo += (None, None, found) if found else (None, found)
        return found

    def _strides(self, raw: bytes) -> tuple[int, ...] | None:
        if raw in (b"", b"N"):
            return UNKNOWN if raw else None
        if raw[0] in b"hj":
            return self._list(self.memo[int.from_bytes(raw[1:], "little")])
        found = self._row(raw)
        if found:
            self.memo.append([found])
        return found

    def _properties(self, raw: bytes) -> tuple[str, bool, int, bool]:
        found = self.known.get(("properties", raw))
        if found is None:
            again = _Reader(iter([raw]))
            again.memo = self.memo
            found = self.known["properties", raw] = again.properties()
            again.free()
            if again.at != len(raw):
                raise OtherSpellingError
        return found
