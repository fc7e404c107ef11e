"""The parts of our readers put together without a command: container, machine, decoders. What a run
refuses, these refuse.

They read from bytes as well, so that thousands of mutants need no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migrate import formats
from migrate.core.errors import raise_all
from migrate.formats import _ggufheader, _signatures
from migrate.formats._header import read_header
from migrate.formats._legacy import read_legacy
from migrate.source import zip_archive
from migrate.source.local import LocalFolder
from migrate.source.pickle import dcp_metadata, machine, policy
from migrate.source.pickle.nodes import ARCHIVE, EXTRA_STATE


@dataclass(frozen=True)
class Bytes:
    """A blob in memory."""

    data: bytes
    name: str = "bytes"

    @property
    def size(self) -> int:
        return len(self.data)

    def fileno(self) -> int | None:
        return None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + buffer.nbytes]

    def read(self, offset: int, size: int) -> bytearray:
        return bytearray(self.data[offset : offset + size])


def read_torch(blob: Any) -> Any:
    """The tree of a .pt file, every CRC compared; raises what a run would raise."""
    head, tail = (
        bytes(blob.read(at, size))
        for at, size in ((0, min(512, blob.size)), (max(0, blob.size - 22), min(22, blob.size)))
    )
    found = _signatures.file_kind(head, blob.size, tail)
    if found == "zip":
        return read_zip(blob, 0, blob.size)
    if found != "legacy":
        _signatures.refuse_kind(blob.name, found)
    legacy = read_legacy(blob)
    return known(
        legacy.value, blob.name, {key: record.size for key, record in legacy.records.items()}
    )


def read_zip(blob: Any, start: int, size: int) -> Any:
    archive = zip_archive.read_archive(blob, start=start, size=size)
    pickle = zip_archive.read_record(blob, archive.records["data.pkl"], ARCHIVE.size)
    for record in archive.records.values():
        zip_archive.check_record(blob, record)
    records = {
        name.removeprefix("data/"): r.size
        for name, r in archive.records.items()
        if name.startswith("data/")
    }
    return known(
        machine.read_pickle(pickle, ARCHIVE, name=blob.name, persistent=True), blob.name, records
    )


def known(nodes: Any, name: str, records: dict[str, int]) -> Any:
    decoded = policy.decode(nodes, name, records)
    if decoded.outside:
        raise_all([policy.refusal(decoded.outside, name)])
    return decoded.tree


def read_metadata(blob: Any) -> Any:
    return dcp_metadata.read_metadata(bytes(blob.read(0, blob.size)), blob.name)


def read_safetensors(blob: Any) -> Any:
    return read_header(blob, 0, blob.name)


def read_gguf(blob: Any) -> Any:
    return _ggufheader.read_header(blob, 0, blob.name)


def read_extra_state(blob: Any) -> Any:
    return machine.read_pickle(bytes(blob.read(0, blob.size)), EXTRA_STATE, name=blob.name)


FROM_BYTES = {
    "pt": read_torch,
    "legacy": read_torch,
    "metadata": read_metadata,
    "safetensors": read_safetensors,
    "gguf": read_gguf,
    "extra state": read_extra_state,
}


def read_path(path: Path) -> Any:
    """A .pt file, a folder with .metadata and all its items, or what the formats open."""
    # what lies beside the chunks of Megatron's folders is read by their format
    if path.is_dir() and (path / ".metadata").exists() and not (path / "metadata.json").exists():
        return read_folder(LocalFolder(str(path)))
    if path.suffix in (".pt", ".bin"):
        folder = LocalFolder(str(path.parent))
        blob = folder.open(path.name)
        try:
            return read_torch(blob)
        finally:
            blob.close()
            folder.close()
    with formats.open(path) as source:
        if source.index.outside:
            raise_all([policy.refusal(source.index.outside, source.path)])
    return None


def read_folder(folder: LocalFolder) -> Any:
    blobs = {name: folder.open(name) for name in folder.names()}
    try:
        meta = blobs.pop(".metadata")
        sizes = {name: blob.size for name, blob in blobs.items()}
        found = dcp_metadata.read_metadata(
            bytes(meta.read(0, meta.size)), folder.label(".metadata"), sizes
        )
        meta.close()
        for part in [p for entry in found.tensors.values() for p in entry.parts] + [
            entry.part for entry in found.bytes.values()
        ]:
            read_zip(blobs[part.file], part.offset, part.length)
        return found
    finally:
        for blob in blobs.values():
            blob.close()
        folder.close()
