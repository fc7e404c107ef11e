"""The `.metadata` of torch.distributed.checkpoint, written: what `read_metadata` reads.

Objects are spelled as torch 2.6 spells them, which every later release reads too: TensorProperties
have five fields, and `_StorageInfo` names transforms only where there are some. There is an object
for every chunk, so the opcodes are written at once, without nodes in between; what recurs (names,
words, sizes) is written once and fetched from the memo. Of `storage_meta` nothing is written: it
says where and in which run of which process a checkpoint was saved.
"""

from __future__ import annotations

from ...core.errors import fail
from ..jsontext import collector_paused
from .dcp_metadata import BytesEntry, Metadata, SavedPart, TensorEntry
from .emit import StreamWriter
from .nodes import METADATA, WrongError

_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
# the release of the format that torch has written since it names one
VERSION = "1.0.0"
_BATCH = 1000
# opcodes that are joined at once
_PARTS = 10_000
# NEWOBJ without arguments, and the begin of the dict of fields
_NEW, _FIELDS, _BUILD = b")\x81", b"}(", b"ub"


def emit_metadata(metadata: Metadata) -> bytes:
    """The file that describes these entries, in protocol 2. Keys stand in the order of `planner`,
    where they have a path, then in their own.

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


class _MetadataWriter(StreamWriter):
    """The stream of one file: texts and sizes by value, each in the memo once."""

    __slots__ = ("_properties", "_sizes", "_texts", "_written")

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray(b"\x80\x02")
        self._texts: dict[str, int] = {}
        self._sizes: dict[tuple[int, ...], int] = {}
        self._properties: dict[tuple[str, bool], int] = {}

    def stream(self) -> bytes:
        """All that was written, ended."""
        self.flush()
        return bytes(self._written + b".")

    def flush(self) -> None:
        """Joins the opcodes so far: each by itself takes ten times its bytes."""
        self._written += b"".join(self.parts)
        self.parts.clear()

    def fetch(self, entry: int) -> None:
        self.parts.append(
            bytes((0x68, entry)) if entry < 256 else b"j" + entry.to_bytes(4, "little")
        )

    def write_word(self, text: str) -> None:
        entry = self._texts.get(text)
        if entry is not None:
            self.fetch(entry)
            return
        if len(text) > METADATA.text // 4:
            raise WrongError("M933", f"a key or a path of {len(text):,} characters")
        self.write_text(text)
        self._texts[text] = self.entries
        self.put()

    def write_size(self, size: tuple[int, ...]) -> None:
        entry = self._sizes.get(size)
        if entry is not None:
            self.fetch(entry)
            return
        self.write_global("torch", "Size")
        self.write_tuple(size)
        self.parts.append(b"\x85R")
        self._sizes[size] = self.entries
        self.put()

    def begin(self, module: str, name: str) -> None:
        """A new object and the begin of its fields; `_BUILD` ends them."""
        self.write_global(module, name)
        self.parts.append(_NEW + _FIELDS)

    def write_metadata(self, metadata: Metadata) -> None:
        keys = dict.fromkeys(metadata.planner or ())
        entries: dict[str, TensorEntry | BytesEntry] = {**metadata.tensors, **metadata.bytes}
        entries = {
            key: entries[key]
            for key in (*(k for k in keys if k in entries), *(k for k in entries if k not in keys))
        }
        self.begin(_MODULE, "Metadata")
        self.write_word("state_dict_metadata")
        self.write_entries(entries)
        self.write_word("planner_data")
        if metadata.planner is None:
            self.parts.append(b"N")
        else:
            self.write_paths(metadata.planner)
        self.write_word("storage_data")
        self.write_storage(entries)
        self.write_word("storage_meta")
        self.parts.append(b"N")
        self.write_word("version")
        self.write_word(VERSION)
        self.parts.append(_BUILD)

    def write_entries(self, entries: dict[str, TensorEntry | BytesEntry]) -> None:
        self.parts.append(b"}(")
        for number, (key, entry) in enumerate(entries.items()):
            self.next_batch(number)
            self.write_word(key)
            if isinstance(entry, BytesEntry):
                self.write_global(_MODULE, "BytesStorageMetadata")
                self.parts.append(_NEW)
            else:
                self.write_tensor(entry)
        self.parts.append(b"u")

    def next_batch(self, number: int, end: bytes = b"u") -> None:
        """Ends what is on the stack every now and then: it may not grow with the checkpoint."""
        if number and not number % _BATCH:
            self.parts.append(end + b"(")
        if len(self.parts) > _PARTS:
            self.flush()

    def write_tensor(self, entry: TensorEntry) -> None:
        self.begin(_MODULE, "TensorStorageMetadata")
        self.write_word("properties")
        self.write_properties(entry.dtype, entry.requires_grad)
        self.write_word("size")
        self.write_size(entry.shape)
        self.write_word("chunks")
        self.parts.append(b"](")
        for number, chunk in enumerate(entry.chunks):
            self.next_batch(number, b"e")
            self.begin(_MODULE, "ChunkStorageMetadata")
            self.write_word("offsets")
            self.write_size(chunk.offsets)
            self.write_word("sizes")
            self.write_size(chunk.sizes)
            self.parts.append(_BUILD)
        self.parts.append(b"e" + _BUILD)

    def write_properties(self, dtype: str, requires_grad: bool) -> None:
        """dtype, layout, requires_grad, memory format and whether memory was pinned."""
        entry = self._properties.get((dtype, requires_grad))
        if entry is not None:
            self.fetch(entry)
            return
        self.write_global(_MODULE, "TensorProperties")
        self.parts.append(_NEW + b"(")
        self.write_global("torch", dtype)
        self.write_global("torch.serialization", "_get_layout")
        self.write_word("torch.strided")
        self.parts.append(b"\x85R")
        self.write(requires_grad)
        self.write_global(_MODULE, "_MEM_FORMAT_ENCODING")
        # the value of TORCH_CONTIGUOUS_FORMAT
        self.parts.append(b"K\x00\x85R")
        self.write(False)
        self.parts.append(b"tb")
        self._properties[dtype, requires_grad] = self.entries
        self.put()

    def write_paths(self, planner: dict[str, tuple[str | int, ...]]) -> None:
        self.parts.append(b"}(")
        for number, (key, path) in enumerate(planner.items()):
            self.next_batch(number)
            self.write_word(key)
            self.parts.append(b"(")
            for part in path:
                if isinstance(part, str):
                    self.write_word(part)
                else:
                    self.write(part)
            self.parts.append(b"t")
        self.parts.append(b"u")

    def write_storage(self, entries: dict[str, TensorEntry | BytesEntry]) -> None:
        self.parts.append(b"}(")
        number = 0
        for key, entry in entries.items():
            if isinstance(entry, BytesEntry):
                self.next_batch(number)
                self.write_place(key, None, 0, entry.part)
                number += 1
                continue
            for nth, (chunk, part) in enumerate(zip(entry.chunks, entry.parts, strict=True)):
                self.next_batch(number)
                self.write_place(key, chunk.offsets, nth, part)
                number += 1
        self.parts.append(b"u")

    def write_place(
        self, key: str, offsets: tuple[int, ...] | None, number: int, part: SavedPart
    ) -> None:
        self.begin(_MODULE, "MetadataIndex")
        self.write_word("fqn")
        self.write_word(key)
        self.write_word("offset")
        if offsets is None:
            self.parts.append(b"N")
        else:
            self.write_size(offsets)
        self.write_word("index")
        self.write(None if offsets is None else number)
        self.parts.append(_BUILD)
        self.begin(_STORAGE, "_StorageInfo")
        self.write_word("relative_path")
        self.write_word(part.file)
        self.write_word("offset")
        self.write(part.offset)
        self.write_word("length")
        self.write(part.length)
        if part.transforms:
            self.write_word("transform_descriptors")
            self.parts.append(b"](")
            for name in part.transforms:
                self.write_word(name)
            self.parts.append(b"e")
        self.parts.append(_BUILD)
