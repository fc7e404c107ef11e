"""Archives that are laid out alike: what comes out is what each of them says by itself."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from migrate.core.errors import CheckpointError
from migrate.source.local import LocalFolder
from migrate.source.zip_alike import ArchivesAlike
from migrate.source.zip_archive import read_archive


class Blob:
    """Bytes that are read as a file is."""

    def __init__(self, content: bytes) -> None:
        self.name, self.size, self.content = "it", len(content), content

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= self.size
        return self.content[offset : offset + size]

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.read(offset, buffer.nbytes)


def saved(rank: int, size: int = 4) -> bytes:
    """What torch.save writes of a part, with a stream whose length depends on the rank."""
    out = io.BytesIO()
    tensors = {name: torch.full((size,), rank + number + 0.5) for number, name in enumerate("abc")}
    torch.save({"name": "x" * rank, **tensors}, out)
    return out.getvalue()


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except CheckpointError as error:
        return str(error)


def both(alike: ArchivesAlike, content: bytes) -> tuple[Any, bool]:
    """What an archive says, which is what it says by itself, and whether a form was found in it."""
    blob: Any = Blob(content)
    known = alike._known(blob)
    found, alone = outcome(lambda: alike.read(blob, "it")), outcome(lambda: read_archive(blob))
    assert (found if type(found) is str else found.archive) == alone
    if type(found) is not str:
        records = {name: one for name, one in alone.records.items() if name.startswith("data/")}
        assert {f"data/{key}": one for key, one in found.places.items()} == records
        assert found.sizes == {name[5:]: one.size for name, one in records.items()}
    return alone, known is not None


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["in pieces", "at once"])
def test_streams_of_another_length_are_of_one_form(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("migrate.source.zip_alike._AT_ONCE", most)
    alike = ArchivesAlike()
    assert [both(alike, saved(rank))[1] for rank in (7, 7, 9, 1, 90, 500)] == [False, *[True] * 5]
    # one storage is larger, and what lies behind it has other places
    assert [both(alike, saved(7, size))[1] for size in (40, 40, 4)] == [False, True, True]


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["in pieces", "at once"])
def test_whatever_byte_is_another_one(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("migrate.source.zip_alike._AT_ONCE", most)
    alike, dice = ArchivesAlike(), random.Random(0)
    both(alike, saved(7))
    content = saved(11)
    assert both(alike, content)[1]
    for at in range(len(content)):
        for byte in (content[at] ^ 1, dice.randrange(256)):
            both(alike, content[:at] + bytes([byte]) + content[at + 1 :])
    for size in range(0, len(content), 17):
        both(alike, content[:size])
        both(alike, content[:size] + b"\0" + content[size:])


def test_checksums_of_a_descriptor_and_of_the_directory() -> None:
    alike = ArchivesAlike()
    both(alike, saved(7))
    content = saved(11)
    # where the archive says the checksum of its last tensor: behind it, and in the directory
    crc = read_archive(Blob(content)).records["data/2"].crc.to_bytes(4, "little")  # type: ignore[arg-type,union-attr]
    assert content.count(crc) == 2
    first, second = content.find(crc), content.rfind(crc)
    for places in ((first,), (second,), (first, second)):
        other = bytearray(content)
        for at in places:
            other[at] ^= 1
        both(alike, bytes(other))


def test_a_file_is_read_as_any_blob(tmp_path: Path) -> None:
    for rank in (3, 5):
        (tmp_path / f"{rank}.pt").write_bytes(saved(rank))
    alike, folder = ArchivesAlike(), LocalFolder(str(tmp_path))
    for rank in (3, 5):
        blob = folder.open(f"{rank}.pt")
        assert alike.read(blob, "it").archive == read_archive(blob)
        blob.close()
