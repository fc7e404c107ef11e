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
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from .decoding import LARGEST, ContradictionError, dtype_of
from .nodes import METADATA, Global

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_NUMBERS = (rb"(?:\)|N\x85\x94|NN\x86\x94|NNN\x87\x94|\((?:N){4,64}t\x94)").replace(b"N", _NUMBER)
_REFERENCE = rb"(?:h.|j.{4})"
# one that holds the opcode MEMOIZE is read without a pattern
_TEXT = rb"(?:\x8c.[^\x94]*\x94|%b)" % _REFERENCE
_FLAG = rb"[\x88\x89]"
_PROPERTIES = _REFERENCE * 2 + _FLAG + _REFERENCE + _FLAG
# bytes that are there before a pair is read, and frames that are put together, of 64 KiB each
_LEAST, _FRAMES = 1 << 16, 16
_ONE_NUMBER = re.compile(_NUMBER, re.DOTALL)


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
    that it then saved in another shape than they have.
    """

    tensors: dict[str, tuple[str, tuple[int, ...], bool, tuple[int, ...] | None, list[SavedChunk]]]
    others: list[str]
    storage: dict[tuple[str, tuple[int, ...] | None], SavedPart]
    planner: dict[str, tuple[str | int, ...]] | None
    version: str | None
    megatron: bool = False
    reformed: tuple[str, ...] = ()


class _OtherError(Exception):
    """The stream is spelled in another way."""


def read_stream(data: bytes) -> MetadataContents | None:
    """What the stream says, None unless every byte of it is spelled as expected."""
    reader = None
    try:
        reader = _Reader(_frames(data))
        return reader.contents()
    except (_OtherError, IndexError, ContradictionError, UnicodeDecodeError):
        return None
    finally:
        if reader is not None:
            reader.free()


def _frames(data: bytes) -> Iterator[memoryview]:
    """The opcodes behind PROTO, a frame at a time."""
    if data[:2] not in (b"\x80\x04", b"\x80\x05"):
        raise _OtherError
    at, view = 2, memoryview(data)
    while at < len(data):
        size = int.from_bytes(data[at + 1 : at + 9], "little")
        if data[at] != 0x95 or at + 9 + size > len(data):
            raise _OtherError
        yield view[at + 9 : at + 9 + size]
        at += 9 + size


class _Name(NamedTuple):
    """A name in a module, which is defined once and referred to from then on."""

    module: str
    name: str


class _Production:
    """One thing that repeats: opcodes, names and fields, and the values between them, each by the
    word for its kind.

    `pattern` has one group for each value, whose kind is in `kinds` and which its reader in
    `readers` reads; before each of them the memo entries in `before` are written, to which no
    stream refers. It is None until the names have been met.
    """

    __slots__ = ("before", "kinds", "parts", "pattern", "readers")

    def __init__(self, *parts: bytes | _Name | str) -> None:
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


_MADE = b")\x81\x94}\x94("


def _productions() -> dict[str, _Production]:
    def of(name: str) -> tuple[_Name, bytes]:
        return _Name(_METADATA, name), _MADE

    info = (
        _Name(_FILESYSTEM, "_StorageInfo"), _MADE, "relative_path", ":text", "offset", ":number",
        "length", ":number", b"ub",
    )  # fmt: skip
    return {
        "tensor": _Production(
            *of("TensorStorageMetadata"),
            "properties", _Name(_METADATA, "TensorProperties"), b")\x81\x94(", ":properties",
            ":strides", b"t\x94b", "size", ":size", "chunks", b"]\x94",
        ),
        "other": _Production(_Name(_METADATA, "BytesStorageMetadata"), b")\x81\x94"),
        "chunk": _Production(
            *of("ChunkStorageMetadata"), "offsets", ":size", "sizes", ":size", b"ub"
        ),
        "place": _Production(
            *of("MetadataIndex"), "fqn", ":text", "index", ":hint", "offset", ":size", b"ub", *info
        ),
        # that of a value beside tensors has no offset
        "value": _Production(*of("MetadataIndex"), "fqn", ":text", "index", ":hint", b"ub", *info),
    }  # fmt: skip


# what stands in the memo for the layout and the memory formats
_LAYOUT, _FORMAT = object(), object()
_SIZE = _Name("torch", "Size")


class _Reader:
    """One stream: where it is read, and its memo. A torch.Size stands there as the tuple that it
    is, other numbers as a list of their tuple, and None for what no stream refers to.
    """

    def __init__(self, frames: Iterator[bytes | memoryview]) -> None:
        self.data, self.at = b"", 0
        self.frames, self.ended = frames, False
        self.go_on()
        self.memo: list[Any] = []
        # the opcodes that refer to a name or a field
        self.references: dict[_Name | str, bytes] = {}
        self.productions = _productions()
        self.known: dict[tuple[str, bytes], Any] = {}
        self.boxes: dict[SavedChunk, SavedChunk] = {}
        self.values: dict[str, tuple[Callable[[], Any], Callable[[bytes], Any]]] = {
            ":text": (self.text, self._text),
            ":size": (self.size, self._size),
            ":hint": (lambda: None if self.taken(b"N") else self.number(), lambda raw: None),
            ":number": (self.number, self._number),
            ":strides": (self.strides, self._strides),
            ":properties": (self.properties, self._properties),
        }
        # values that write no memo entry and are equal for equal bytes
        self.patterns = {
            ":text": _TEXT, ":number": _NUMBER, ":hint": b"(?:N|%b)" % _NUMBER,
            ":strides": b"(?:N|%b|%b|)" % (_NUMBERS, _REFERENCE), ":properties": _PROPERTIES,
        }  # fmt: skip

    def free(self) -> None:
        """Lets go of its own methods: a cycle would keep the memo until the collector comes by."""
        self.values.clear()
        self.productions.clear()

    def contents(self) -> MetadataContents:
        self.name(_Name(_METADATA, "Metadata"))
        self.opcodes(_MADE)
        tensors: dict[str, Any] = {}
        others: dict[str, None] = {}
        storage: dict[Any, Any] = {}
        self.field("state_dict_metadata")
        for count in self.pairs():
            key = self.text()
            self.entry(key, tensors, others)
            if len(tensors) + len(others) != count:
                raise _OtherError
        self.field("planner_data")
        planner = None if self.taken(b"N") else self.planner()
        self.field("storage_data")
        for count in self.pairs():
            key, _, *offset, file, begin, length = self.take("place", "value")
            storage[key, offset[0] if offset else None] = SavedPart(file, begin, length, ())
            if len(storage) != count:
                raise _OtherError
        self.field("storage_meta")
        if not self.taken(b"N"):
            self.storage_meta()
        version = None
        # torch 2.6 does not name the version
        if not self.taken(b"ub."):
            self.field("version")
            version = None if self.taken(b"N") else self.text()
            self.opcodes(b"ub.")
        self.go_on()
        if self.at != len(self.data):
            raise _OtherError
        return MetadataContents(tensors, list(others), storage, planner, version)

    def entry(self, key: str, tensors: dict[str, Any], others: dict[str, None]) -> None:
        """What stands for a key in state_dict_metadata."""
        found = self.take("tensor", "other")
        if not found:
            others[key] = None
            return
        (dtype, requires_grad), strides, shape = found
        if strides is not None and len(strides) != len(shape):
            raise _OtherError
        chunks = []
        while self.taken(b"("):
            while not self.taken(b"e"):
                chunks.append(self.box())
                self.go_on()
        if not chunks:
            chunks.append(self.box())
            self.opcodes(b"a")
        self.opcodes(b"ub")
        tensors[key] = (dtype, shape, requires_grad, strides, chunks)

    def box(self) -> SavedChunk:
        """One chunk; equal ones are one object."""
        found = SavedChunk(*self.take("chunk"))
        return self.boxes.setdefault(found, found)

    def planner(self) -> dict[str, tuple[str | int, ...]]:
        """planner_data: the path of each key."""
        found: dict[str, tuple[str | int, ...]] = {}
        for count in self.pairs():
            key = self.text()
            found[key] = self.path()
            if len(found) != count:
                raise _OtherError
        return found

    def path(self) -> tuple[str | int, ...]:
        """The path of one key in planner_data."""
        parts: list[str | int] = []
        many = self.taken(b"(")
        while self.data[self.at] not in b"t\x85\x86\x87":
            parts.append(self.number() if self.data[self.at] in b"KMJ\x8a" else self.text())
        if not parts or many != (len(parts) > 3):
            raise _OtherError
        self.opcodes(b"t\x94" if many else bytes((0x84 + len(parts), 0x94)))
        return tuple(parts)

    def storage_meta(self) -> None:
        """storage_meta, which says nothing about the entries."""
        self.name(_Name(_METADATA, "StorageMeta"))
        self.opcodes(_MADE)
        while not self.taken(b"u"):
            self.text()
            if self.taken(b"N"):
                continue
            if self.taken(b"]\x94"):
                self.memo.append(None)
                continue
            if self.text() in ("pathlib", "pathlib._local"):
                # a folder, as pathlib makes it of its parts
                self.field("PosixPath")
                self.opcodes(b"\x93\x94")
                self.path()
                self.opcodes(b"R\x94")
        self.opcodes(b"b")

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
                out = []
                for read, raw, before in zip(
                    production.readers, match.groups(), production.before, strict=False
                ):
                    memo += before
                    out.append(read(raw))
                memo += production.before[-1]
                return out
        written = len(memo)
        for name in names:
            with suppress(_OtherError):
                return self.learn(self.productions[name])
            self.at = begin
            del memo[written:]
        raise _OtherError

    def learn(self, production: _Production) -> list[Any]:
        """The values of what comes next, opcode by opcode; the pattern of all that follow."""
        out = []
        for part in production.parts:
            if isinstance(part, bytes):
                self.opcodes(part)
            elif isinstance(part, _Name):
                self.name(part)
            elif part[0] == ":":
                out.append(self.values[part][0]())
            else:
                self.field(part)
        if production.pattern is None:
            production.pattern = re.compile(self.spelled(production), re.DOTALL)
            production.readers = [self.values[kind][1] for kind in production.kinds]
        return out

    def spelled(self, production: _Production) -> bytes:
        """The pattern of a production whose names have been met."""
        patterns = dict(self.patterns)
        if ":size" in production.kinds:
            size = re.escape(self.references[_SIZE]) + _NUMBERS + rb"\x85\x94R\x94"
            patterns[":size"] = size + b"|" + _REFERENCE
        out = []
        for part in production.parts:
            if isinstance(part, bytes):
                out.append(re.escape(part))
            elif isinstance(part, str) and part[0] == ":":
                out.append(b"(" + patterns[part] + b")")
            else:
                out.append(re.escape(self.references[part]))
        return b"".join(out)

    # opcode by opcode

    def taken(self, opcodes: bytes) -> bool:
        """Whether these opcodes come next; they are passed then, and write nothing."""
        if self.data.startswith(opcodes, self.at):
            self.at += len(opcodes)
            return True
        return False

    def opcodes(self, opcodes: bytes) -> None:
        """Passes these opcodes, the memo entries of which nothing refers to."""
        if not self.taken(opcodes):
            raise _OtherError
        self.memo += (None,) * opcodes.count(b"\x94")

    def reference(self) -> Any:
        """What an entry of the memo holds."""
        data, at = self.data, self.at
        if data[at] == 0x68:
            self.at = at + 2
            return self.memo[data[at + 1]]
        if data[at] != 0x6A or at + 5 > len(data):
            raise _OtherError
        self.at = at + 5
        return self.memo[int.from_bytes(data[at + 1 : at + 5], "little")]

    def text(self) -> str:
        """The text that comes next, or is referred to."""
        data, at = self.data, self.at
        if data[at] == 0x8C:
            begin, end = at + 2, at + 2 + data[at + 1]
        elif data[at] == 0x58:
            begin = at + 5
            end = begin + int.from_bytes(data[at + 1 : begin], "little")
            if end - begin > METADATA.text:
                raise _OtherError
        else:
            found = self.reference()
            if type(found) is not str:
                raise _OtherError
            return found
        found = data[begin:end].decode("utf-8", "surrogatepass")
        if data[end] != 0x94:
            raise _OtherError
        self.memo.append(found)
        self.at = end + 1
        return found

    def field(self, name: str) -> None:
        """The name of a field."""
        begin = self.at
        if self.text() != name:
            raise _OtherError
        self._met(name, begin)

    def name(self, wanted: _Name) -> None:
        """This name."""
        begin = self.at
        found = self._global()
        if (found.module, found.name) != wanted:
            raise _OtherError
        self._met(wanted, begin)

    def _global(self) -> Global:
        begin = self.at
        if self.data[begin] in b"hj":
            found = self.reference()
            if type(found) is Global:
                return found
            self.at = begin
        module, name = self.text(), self.text()
        self.opcodes(b"\x93")
        if self.data[self.at] != 0x94:
            raise _OtherError
        self.at += 1
        found = Global(module, name)
        self.memo.append(found)
        return found

    def _met(self, what: _Name | str, begin: int) -> None:
        """Keeps how a name or a field is referred to: as it just was, or from now on."""
        if self.data[begin] in b"hj" and self.at - begin in (2, 5):
            self.references[what] = self.data[begin : self.at]
        else:
            number = len(self.memo) - 1
            self.references[what] = (
                bytes((0x68, number)) if number < 256 else b"j" + number.to_bytes(4, "little")
            )

    def number(self) -> int:
        match = _ONE_NUMBER.match(self.data, self.at)
        if match is None:
            raise _OtherError
        self.at = match.end()
        return self._number(match[0])

    def numbers(self) -> tuple[int, ...]:
        """A tuple of numbers."""
        if self.taken(b")"):
            return ()
        many, found = self.taken(b"("), []
        while self.data[self.at] in b"KMJ\x8a":
            found.append(self.number())
        if not found or many != (len(found) > 3) or len(found) > 64:
            raise _OtherError
        self.opcodes(b"t\x94" if many else bytes((0x84 + len(found), 0x94)))
        return tuple(found)

    def size(self) -> tuple[int, ...]:
        """A torch.Size."""
        begin = self.at
        if self.data[begin] in b"hj":
            found = self.reference()
            if type(found) is tuple:
                return found
            self.at = begin
        self.name(_SIZE)
        numbers = self.numbers()
        self.opcodes(b"\x85\x94R")
        if self.data[self.at] != 0x94:
            raise _OtherError
        self.at += 1
        self.memo.append(numbers)
        return numbers

    def strides(self) -> tuple[int, ...] | None:
        """The strides of a tensor; None before torch 2.15."""
        if self.taken(b"N") or self.data[self.at] == 0x74:
            return None
        if self.data[self.at] in b"hj":
            return self._list(self.reference())
        found = self.numbers()
        if found:
            self.memo[-1] = [found]
        return found

    def _list(self, known: Any) -> tuple[int, ...]:
        if type(known) is not list:
            raise _OtherError
        return known[0]  # type: ignore[no-any-return]

    def properties(self) -> tuple[str, bool]:
        """dtype and requires_grad; the layout is strided."""
        dtype = dtype_of(self._global())
        self._called(_Name("torch.serialization", "_get_layout"), _LAYOUT)
        requires_grad = self._flag()
        self._called(_Name(_METADATA, "_MEM_FORMAT_ENCODING"), _FORMAT)
        self._flag()
        return dtype, requires_grad

    def _called(self, name: _Name, stands: object) -> None:
        """The layout or a memory format, which is made once."""
        begin = self.at
        if self.data[begin] in b"hj":
            if self.reference() is stands:
                return
            self.at = begin
        self.name(name)
        if stands is _LAYOUT:
            self.field("torch.strided")
        elif self.number() > 2:
            raise _OtherError
        self.opcodes(b"\x85\x94R")
        if self.data[self.at] != 0x94:
            raise _OtherError
        self.at += 1
        self.memo.append(stands)

    def _flag(self) -> bool:
        found = self.data[self.at]
        if found not in (0x88, 0x89):
            raise _OtherError
        self.at += 1
        return found == 0x88

    def go_on(self) -> None:
        """Sees to it that the next pair or chunk is there, if it is not of an odd size."""
        if self.ended or len(self.data) - self.at > _LEAST:
            return
        held = [self.data[self.at :], *islice(self.frames, _FRAMES)]
        self.ended = len(held) <= _FRAMES
        self.data, self.at = b"".join(held), 0

    def pairs(self) -> Iterator[int]:
        """Goes through a dict of any number of pairs but one, which the caller takes: how many
        there are with the next one.
        """
        self.opcodes(b"}\x94")
        count = 0
        while self.taken(b"("):
            while not self.taken(b"u"):
                count += 1
                yield count
                self.go_on()

    # from what a pattern has found

    def _text(self, raw: bytes) -> str:
        if raw[0] == 0x8C:
            if len(raw) != raw[1] + 3:
                raise _OtherError
            found = raw[2:-1].decode("utf-8", "surrogatepass")
            self.memo.append(found)
            return found
        known = self.memo[int.from_bytes(raw[1:], "little")]
        if type(known) is not str:
            raise _OtherError
        return known

    def _number(self, raw: bytes) -> int:
        digits = raw[2:] if raw[0] == 0x8A else raw[1:]
        found = int.from_bytes(digits, "little", signed=raw[0] in b"J\x8a")
        if not 0 <= found <= LARGEST:
            raise _OtherError
        return found

    def _row(self, raw: bytes) -> tuple[int, ...]:
        return tuple(self._number(one) for one in _ONE_NUMBER.findall(raw))

    def _size(self, raw: bytes) -> tuple[int, ...]:
        if len(raw) == 2 or raw[0] == 0x6A:
            known = self.memo[int.from_bytes(raw[1:], "little")]
            if type(known) is not tuple:
                raise _OtherError
            return known
        found = self.known.get(("size", raw))
        if found is None:
            found = self.known["size", raw] = self._row(raw[2:-4])
        # the tuple, unless it is empty, and the tuple around it
        self.memo += (None, None, found) if found else (None, found)
        return found

    def _strides(self, raw: bytes) -> tuple[int, ...] | None:
        if raw in (b"", b"N"):
            return None
        if raw[0] in b"hj":
            return self._list(self.memo[int.from_bytes(raw[1:], "little")])
        found = self._row(raw)
        if found:
            self.memo.append([found])
        return found

    def _properties(self, raw: bytes) -> tuple[str, bool]:
        found = self.known.get(("properties", raw))
        if found is None:
            again = _Reader(iter([raw]))
            again.memo = self.memo
            found = self.known["properties", raw] = again.properties()
            again.free()
            if again.at != len(raw):
                raise _OtherError
        return found
