"""The `.metadata` of torch.distributed.checkpoint, written: what `read_metadata` reads.

Objects have the fields that they have in torch 2.6, which every later release reads too:
TensorProperties have five, and `_StorageInfo` names transforms only where there are some. The
stream is what Python's pickler would write, in protocol 4 as torch has it, so that the quick reader
of `dcp_stream` takes it. There is an object for every chunk, so the opcodes are written at once,
without nodes in between; what recurs (names, words, sizes) is written once and fetched from the
memo, and what is spelled alike is not spelled again. Of `storage_meta` nothing is written: it says
where and in which run of which process a checkpoint was saved.

A file whose entries get other names (`write_contents`) keeps all that it says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from ...core.errors import fail
from ..jsontext import collector_paused
from .dcp_metadata import BytesEntry, Metadata, TensorEntry
from .dcp_stream import MetadataContents, MetadataRest, SavedChunk, SavedPart, SavedPath
from .emit import integer
from .nodes import METADATA, WrongError

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
# the release of the format that torch has written since it names one
VERSION = "1.0.0"
# the pickler ends a list or a dict on the stack after so many
_BATCH = 1000
# a frame ends after so many parts, which are about the bytes after which the pickler ends it
_FRAME = 4096
# things that are written from memory when they come again; others are no regular writer's
_MOST_WRITTEN = 1 << 14
# a new object and the begin of its fields; their end
_NEW, _FIELDS, _BUILD = b")\x81\x94", b"}\x94(", b"ub"
_MEMOIZE = b"\x94"
_FLAGS = (b"\x89", b"\x88")


# the key of a chunk or another value, its offsets and its number, and where it lies
SavedPlace: TypeAlias = "tuple[str, tuple[int, ...] | None, int | None, SavedPart]"


class SavedProperties(NamedTuple):
    """What TensorProperties hold; `strided`: six fields, as since torch 2.15."""

    dtype: str
    requires_grad: bool
    # TORCH_CONTIGUOUS_FORMAT
    memory_format: int = 0
    pinned: bool = False
    strided: bool = False
    strides: tuple[int, ...] | None = None


def emit_metadata(metadata: Metadata) -> bytes:
    """The file that describes these entries. Keys stand in the order of `planner`, where they have
    a path, then in their own.

    M933 for more than `read_metadata` would read again.
    """
    return stream_of(lambda writer: writer.write_metadata(metadata))


def stream_of(write: Callable[[MetadataWriter], None]) -> bytes:
    """The file that `write` writes; M933 as of `emit_metadata`."""
    writer = MetadataWriter()
    try:
        with collector_paused():
            write(writer)
    except WrongError as error:
        fail("M933", f".metadata: {error.message}")
    stream = writer.stream()
    if len(stream) > METADATA.size:
        fail(
            "M933",
            f".metadata: {len(stream):,} bytes; at most {METADATA.size:,} can be read again",
            help="write fewer chunks",
        )
    return stream


class MetadataWriter:
    """The stream of one file, with what stands in the memo by value. `count` are its entries."""

    __slots__ = ("_framed", "_made", "_names", "_sizes", "_texts", "_written", "count", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = 0
        self._framed = bytearray(b"\x80\x04")
        # the opcodes that fetch each from the memo
        self._texts: dict[str, bytes] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._made: dict[tuple[str, str | int], bytes] = {}
        # what was written for some values, and how many entries that memoises
        self._written: dict[tuple[Any, ...], tuple[bytes, int]] = {}

    def stream(self) -> bytes:
        """All that was written, ended."""
        self.put(b".")
        self.end_frame()
        return bytes(self._framed)

    def put(self, opcodes: bytes, entries: int = 0) -> None:
        """Appends opcodes, which memoise so many values."""
        self.parts.append(opcodes)
        self.count += entries

    def memoise(self) -> bytes:
        """Memoises what is on top of the stack; the opcodes that fetch it."""
        self.parts.append(_MEMOIZE)
        entry = self.count
        self.count = entry + 1
        return bytes((0x68, entry)) if entry < 256 else struct.pack("<cI", b"j", entry)

    def repeat(self, what: tuple[Any, ...], write: Callable[..., None]) -> None:
        """Lets `write` write `what`, or what it wrote for the same before, if that defined nothing
        that is referred to.
        """
        found = self._written.get(what)
        if found is not None:
            self.parts.append(found[0])
            self.count += found[1]
            return
        begin, count, defined = len(self.parts), self.count, self._defined()
        write(*what)
        short = len(self.parts) - begin < _FRAME and len(self._written) < _MOST_WRITTEN
        if short and self._defined() == defined:
            self._written[what] = b"".join(self.parts[begin:]), self.count - count

    def _defined(self) -> int:
        return len(self._texts) + len(self._names) + len(self._sizes) + len(self._made)

    def end_frame(self) -> None:
        frame = b"".join(self.parts)
        self.parts.clear()
        self._framed += struct.pack("<cQ", b"\x95", len(frame)) + frame

    def word(self, text: str) -> None:
        found = self._texts.get(text)
        if found is not None:
            self.parts.append(found)
            return
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > METADATA.text:
            raise WrongError("M933", f"a key or a path of {len(data):,} bytes")
        head = struct.pack("BB", 0x8C, len(data)) if len(data) < 256 else b""
        self.parts.append((head or struct.pack("<cI", b"X", len(data))) + data)
        self._texts[text] = self.memoise()

    def name(self, module: str, name: str) -> None:
        found = self._names.get((module, name))
        if found is not None:
            self.parts.append(found)
            return
        self.word(module)
        self.word(name)
        self.parts.append(b"\x93")
        self._names[module, name] = self.memoise()

    def number(self, value: int) -> None:
        self.parts.append(integer(value))

    def size(self, size: tuple[int, ...]) -> None:
        found = self._sizes.get(size)
        if found is not None:
            self.parts.append(found)
            return
        self.name("torch", "Size")
        self.numbers(size)
        self.put(b"\x85" + _MEMOIZE + b"R", 1)
        self._sizes[size] = self.memoise()

    def numbers(self, several: tuple[int, ...]) -> None:
        """A tuple of numbers."""
        found = b"".join(map(integer, several))
        if not several:
            self.put(b")")
        elif len(several) < 4:
            self.put(found + bytes((0x84 + len(several),)) + _MEMOIZE, 1)
        else:
            self.put(b"(" + found + b"t" + _MEMOIZE, 1)

    def begin(self, module: str, name: str) -> None:
        """A new object and the begin of its fields; `_BUILD` ends them."""
        self.name(module, name)
        self.put(_NEW + _FIELDS, 2)

    def pairs(self, count: int) -> Iterable[int]:
        """The numbers of so many pairs of a dict, with the opcodes around what is put for each."""
        self.put(b"}" + _MEMOIZE, 1)
        for number in range(count):
            if count > 1 and not number % _BATCH:
                self.put(b"u(" if number else b"(")
            yield number
            if len(self.parts) > _FRAME:
                self.end_frame()
        if count:
            self.put(b"u" if count > 1 else b"s")
        if count > 1 and not count % _BATCH:
            # the pickler looks for more
            self.put(b"(u")

    def write_metadata(self, metadata: Metadata) -> None:
        """Everything, with nothing beside it."""
        keys = dict.fromkeys(metadata.planner or ())
        entries: dict[str, TensorEntry | BytesEntry] = {**metadata.tensors, **metadata.bytes}
        entries = {
            key: entries[key]
            for key in (*(k for k in keys if k in entries), *(k for k in entries if k not in keys))
        }
        self.begin(_MODULE, "Metadata")
        self.word("state_dict_metadata")
        for _, (key, entry) in zip(self.pairs(len(entries)), entries.items(), strict=True):
            self.word(key)
            if isinstance(entry, BytesEntry):
                self.name(_MODULE, "BytesStorageMetadata")
                self.put(_NEW, 1)
            else:
                properties = SavedProperties(entry.dtype, entry.requires_grad)
                self.write_tensor(properties, entry.shape, entry.chunks)
        self.write_paths(metadata.planner)
        count = sum(
            1 if isinstance(entry, BytesEntry) else len(entry.parts) for entry in entries.values()
        )
        self.write_storage(count, _places(entries))
        self.word("storage_meta")
        self.put(b"N")
        self.word("version")
        self.word(VERSION)
        self.put(_BUILD)

    def write_contents(
        self,
        contents: MetadataContents,
        rest: MetadataRest,
        keys: Mapping[str, str],
        planner: dict[str, tuple[str | int, ...]] | None,
    ) -> None:
        """What a file said, each entry under its key in `keys`, in their order, and nothing of the
        others.
        """
        self.begin(_MODULE, "Metadata")
        self.word("state_dict_metadata")
        for _, (old, key) in zip(self.pairs(len(keys)), keys.items(), strict=True):
            self.word(key)
            entry = contents.tensors.get(old)
            if entry is None:
                self.name(_MODULE, "BytesStorageMetadata")
                self.put(_NEW, 1)
            else:
                dtype, shape, requires_grad, strides, chunks = entry
                self.write_tensor(
                    SavedProperties(dtype, requires_grad, *rest.properties[old], strides),
                    shape,
                    chunks,
                )
        self.write_paths(planner)
        places = [
            (keys[old], offsets, hint, part)
            for ((old, offsets), part), hint in zip(
                contents.storage.items(), rest.hints, strict=True
            )
            if old in keys
        ]
        self.write_storage(len(places), places)
        self.word("storage_meta")
        self.write_meta(rest.meta)
        if rest.versioned:
            self.word("version")
            if contents.version is None:
                self.put(b"N")
            else:
                self.word(contents.version)
        self.put(_BUILD)

    def write_tensor(
        self,
        properties: SavedProperties,
        shape: tuple[int, ...],
        chunks: Sequence[SavedChunk],
    ) -> None:
        self.repeat((properties, shape), self.begin_tensor)
        self.repeat((tuple(chunks),), self.write_chunks)
        self.put(_BUILD)

    def begin_tensor(self, properties: SavedProperties, shape: tuple[int, ...]) -> None:
        self.begin(_MODULE, "TensorStorageMetadata")
        self.word("properties")
        self.write_properties(properties)
        self.word("size")
        self.size(shape)
        self.word("chunks")

    def write_chunks(self, chunks: Sequence[SavedChunk]) -> None:
        self.put(b"]" + _MEMOIZE, 1)
        count = len(chunks)
        for number, chunk in enumerate(chunks):
            if count > 1 and not number % _BATCH:
                self.put(b"e(" if number else b"(")
            self.begin(_MODULE, "ChunkStorageMetadata")
            self.word("offsets")
            self.size(chunk.offsets)
            self.word("sizes")
            self.size(chunk.sizes)
            self.put(_BUILD)
        if count:
            self.put(b"e" if count > 1 else b"a")

    def write_properties(self, properties: SavedProperties) -> None:
        """dtype, layout, requires_grad, memory format, whether memory was pinned and, where they
        are named, the strides: an object of its own for each tensor.
        """
        self.name(_MODULE, "TensorProperties")
        self.put(_NEW + b"(", 1)
        self.name("torch", properties.dtype)
        self.write_call("torch.serialization", "_get_layout", "torch.strided")
        self.put(_FLAGS[properties.requires_grad])
        self.write_call(_MODULE, "_MEM_FORMAT_ENCODING", properties.memory_format)
        last = _FLAGS[properties.pinned]
        if properties.strides is not None:
            self.put(last)
            self.numbers(properties.strides)
            last = b""
        elif properties.strided:
            last += b"N"
        self.put(last + b"t" + _MEMOIZE + b"b", 1)

    def write_call(self, module: str, name: str, argument: str | int) -> None:
        """What a call of one argument makes, once."""
        found = self._made.get((name, argument))
        if found is not None:
            self.parts.append(found)
            return
        self.name(module, name)
        if isinstance(argument, int):
            self.number(argument)
        else:
            self.word(argument)
        self.put(b"\x85" + _MEMOIZE + b"R", 1)
        self._made[name, argument] = self.memoise()

    def write_paths(self, planner: dict[str, tuple[str | int, ...]] | None) -> None:
        self.word("planner_data")
        if planner is None:
            self.put(b"N")
            return
        for _, (key, path) in zip(self.pairs(len(planner)), planner.items(), strict=True):
            self.word(key)
            self.path(path)

    def path(self, path: tuple[str | int, ...]) -> None:
        if len(path) > 3:
            self.put(b"(")
        for part in path:
            if isinstance(part, str):
                self.word(part)
            else:
                self.number(part)
        self.put((b"t" if len(path) > 3 else bytes((0x84 + len(path),))) + _MEMOIZE, 1)

    def write_storage(self, count: int, places: Iterable[SavedPlace]) -> None:
        self.word("storage_data")
        for _, place in zip(self.pairs(count), places, strict=True):
            self.write_place(*place)

    def write_meta(self, fields: Sequence[tuple[str, Any]] | None) -> None:
        """The value of storage_meta: None, or an object with several fields."""
        if fields is None:
            self.put(b"N")
            return
        self.begin(_MODULE, "StorageMeta")
        for name, value in fields:
            self.word(name)
            if value is None:
                self.put(b"N")
            elif isinstance(value, str):
                self.word(value)
            elif isinstance(value, SavedPath):
                self.name(value.module, "PosixPath")
                self.path(value.parts)
                self.put(b"R" + _MEMOIZE, 1)
            else:
                self.put(b"]" + _MEMOIZE, 1)
        self.put(_BUILD)

    def write_place(
        self, key: str, offsets: tuple[int, ...] | None, number: int | None, part: SavedPart
    ) -> None:
        self.repeat((), self.begin_place)
        self.word(key)
        self.repeat((number, offsets, part.file), self.write_hint)
        self.number(part.offset)
        self.word("length")
        self.number(part.length)
        if part.transforms:
            self.word("transform_descriptors")
            several = len(part.transforms) > 1
            self.put(b"]" + _MEMOIZE + b"(" * several, 1)
            for name in part.transforms:
                self.word(name)
            self.put(b"e" if several else b"a")
        self.put(_BUILD)

    def begin_place(self) -> None:
        self.begin(_MODULE, "MetadataIndex")
        self.word("fqn")

    def write_hint(self, number: int | None, offsets: tuple[int, ...] | None, file: str) -> None:
        """All between the key of a place and its offset in the file."""
        self.word("index")
        if number is None:
            self.put(b"N")
        else:
            self.number(number)
        # a value has no offset
        if offsets is not None:
            self.word("offset")
            self.size(offsets)
        self.put(_BUILD)
        self.begin(_STORAGE, "_StorageInfo")
        self.word("relative_path")
        self.word(file)
        self.word("offset")


def _places(entries: dict[str, TensorEntry | BytesEntry]) -> Iterator[SavedPlace]:
    """The key, the offsets, the number and the place of every chunk; neither offsets nor a number
    of other values.
    """
    for key, entry in entries.items():
        if isinstance(entry, BytesEntry):
            yield key, None, None, entry.part
            continue
        for number, (chunk, part) in enumerate(zip(entry.chunks, entry.parts, strict=True)):
            yield key, chunk.offsets, number, part
