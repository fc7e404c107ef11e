"""The `.metadata` of torch.distributed.checkpoint, written: what `read_metadata` reads.

Objects have the fields that they have in torch 2.6, which every later release reads too:
TensorProperties have five, and `_StorageInfo` names transforms only where there are some. The
stream is what Python's pickler would write, in protocol 4 as torch has it, so that the quick reader
of `dcp_stream` takes it. There is an object for every chunk, so the opcodes are written at once,
without nodes in between; what recurs (names, words, sizes) is written once and fetched from the
memo. Of `storage_meta` nothing is written: it says where and in which run of which process a
checkpoint was saved.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from ...core.errors import fail
from ..jsontext import collector_paused
from .dcp_metadata import BytesEntry, Metadata, SavedPart, TensorEntry
from .emit import integer
from .nodes import METADATA, WrongError

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
# the release of the format that torch has written since it names one
VERSION = "1.0.0"
# the pickler ends a list or a dict on the stack after so many, and a frame after so many bytes
_BATCH, _FRAME = 1000, 64 << 10
# a new object and the begin of its fields; their end
_NEW, _FIELDS, _BUILD = b")\x81\x94", b"}\x94(", b"ub"
_MEMOIZE = b"\x94"


def emit_metadata(metadata: Metadata) -> bytes:
    """The file that describes these entries. Keys stand in the order of `planner`, where they have
    a path, then in their own.

    M933 for more than `read_metadata` would read again.
    """
    writer = _MetadataWriter()
    try:
        with collector_paused():
            writer.write_metadata(metadata)
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


class _MetadataWriter:
    """The stream of one file, with what stands in the memo by value. `count` are its entries."""

    __slots__ = ("_framed", "_names", "_properties", "_sizes", "_texts", "count", "filled", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.count = self.filled = 0
        self._framed = bytearray(b"\x80\x04")
        # the opcodes that fetch each from the memo
        self._texts: dict[str, bytes] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._sizes: dict[tuple[int, ...], bytes] = {}
        self._properties: dict[str, bytes] = {}

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
        numbers = b"".join(map(integer, size))
        if not size:
            self.put(b")")
        elif len(size) < 4:
            self.put(numbers + bytes((0x84 + len(size),)) + _MEMOIZE, 1)
        else:
            self.put(b"(" + numbers + b"t" + _MEMOIZE, 1)
        self.put(b"\x85" + _MEMOIZE + b"R", 1)
        self._sizes[size] = self.memoise()

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
            if len(self.parts) > _FRAME >> 3:
                self.end_frame()
        if count:
            self.put(b"u" if count > 1 else b"s")
        if count > 1 and not count % _BATCH:
            # the pickler looks for more
            self.put(b"(u")

    def write_metadata(self, metadata: Metadata) -> None:
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
                self.write_tensor(entry)
        self.word("planner_data")
        if metadata.planner is None:
            self.put(b"N")
        else:
            self.write_paths(metadata.planner)
        self.word("storage_data")
        self.write_storage(entries)
        self.word("storage_meta")
        self.put(b"N")
        self.word("version")
        self.word(VERSION)
        self.put(_BUILD)

    def write_tensor(self, entry: TensorEntry) -> None:
        self.begin(_MODULE, "TensorStorageMetadata")
        self.word("properties")
        self.write_properties(entry.dtype, entry.requires_grad)
        self.word("size")
        self.size(entry.shape)
        self.word("chunks")
        self.put(b"]" + _MEMOIZE, 1)
        count = len(entry.chunks)
        for number, chunk in enumerate(entry.chunks):
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
        self.put(_BUILD)

    def write_properties(self, dtype: str, requires_grad: bool) -> None:
        """dtype, layout, requires_grad, memory format and whether memory was pinned: an object of
        its own for each tensor.
        """
        self.name(_MODULE, "TensorProperties")
        self.put(_NEW + b"(", 1)
        self.name("torch", dtype)
        self.made("torch.serialization", "_get_layout", "torch.strided")
        self.put(b"\x88" if requires_grad else b"\x89")
        self.made(_MODULE, "_MEM_FORMAT_ENCODING", None)
        self.put(b"\x89t" + _MEMOIZE + b"b", 1)

    def made(self, module: str, name: str, argument: str | None) -> None:
        """What a call of one argument makes, once; the number 0 without an argument."""
        found = self._properties.get(name)
        if found is not None:
            self.parts.append(found)
            return
        self.name(module, name)
        if argument is None:
            # the value of TORCH_CONTIGUOUS_FORMAT
            self.number(0)
        else:
            self.word(argument)
        self.put(b"\x85" + _MEMOIZE + b"R", 1)
        self._properties[name] = self.memoise()

    def write_paths(self, planner: dict[str, tuple[str | int, ...]]) -> None:
        for _, (key, path) in zip(self.pairs(len(planner)), planner.items(), strict=True):
            self.word(key)
            if len(path) > 3:
                self.put(b"(")
            for part in path:
                if isinstance(part, str):
                    self.word(part)
                else:
                    self.number(part)
            self.put((b"t" if len(path) > 3 else bytes((0x84 + len(path),))) + _MEMOIZE, 1)

    def write_storage(self, entries: dict[str, TensorEntry | BytesEntry]) -> None:
        count = sum(
            1 if isinstance(entry, BytesEntry) else len(entry.parts) for entry in entries.values()
        )
        for _, place in zip(self.pairs(count), _places(entries), strict=True):
            self.write_place(*place)

    def write_place(
        self, key: str, offsets: tuple[int, ...] | None, number: int, part: SavedPart
    ) -> None:
        self.begin(_MODULE, "MetadataIndex")
        self.word("fqn")
        self.word(key)
        self.word("index")
        if offsets is None:
            # a value has no offset
            self.put(b"N")
        else:
            self.number(number)
            self.word("offset")
            self.size(offsets)
        self.put(_BUILD)
        self.begin(_STORAGE, "_StorageInfo")
        self.word("relative_path")
        self.word(part.file)
        self.word("offset")
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


def _places(
    entries: dict[str, TensorEntry | BytesEntry],
) -> Iterator[tuple[str, tuple[int, ...] | None, int, SavedPart]]:
    """The key, the offsets, the number and the place of every chunk; no offsets of other values."""
    for key, entry in entries.items():
        if isinstance(entry, BytesEntry):
            yield key, None, 0, entry.part
            continue
        for number, (chunk, part) in enumerate(zip(entry.chunks, entry.parts, strict=True)):
            yield key, chunk.offsets, number, part
