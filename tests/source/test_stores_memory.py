"""How bytes get to and from a store: into memory that is there, and copied as seldom as can be."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_servers import S3
from stored_checkpoint import rule
from written_stores import large

import migrate
from migrate.running import part_writer
from migrate.running.part_writer import PartWriter, Sender
from migrate.source.blobs import Stretch, foreseeing
from migrate.source.stores import objects, requests, s3_uploads
from migrate.source.stores.objects import RemoteObject, StoreFolder
from migrate.source.stores.s3_uploads import PartStream, S3Output

MIB = 1 << 20


def test_a_range_is_read_into_its_buffer(s3: S3, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    content = np.random.default_rng(0).bytes(6 * MIB)
    (tmp_path / "old/file.bin").write_bytes(content)
    blob = StoreFolder(objects_of(s3.put(tmp_path / "old", tmp_path.name))).open("file.bin")
    buffer = bytearray(4 * MIB)
    blob.readinto(MIB, memoryview(buffer)[:MIB])
    tracemalloc.start()
    try:
        blob.readinto(MIB, memoryview(buffer))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer == content[MIB : 5 * MIB]
    # urllib3's own readinto reads into as much memory first
    assert most < 2 * MIB


def objects_of(url: str) -> Any:
    from migrate.source.stores.s3 import locate
    from migrate.source.urls import split_url

    return locate(split_url(f"{url}/")).store


@pytest.mark.parametrize("checksum", ["CRC64NVME", "CRC32C", "MD5"])
def test_a_part_is_summed_signed_and_sent_as_it_lies_there(
    s3: S3, tmp_path: Path, checksum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_uploads, "_checksums", lambda preferred: (checksum,))
    output, key = S3Output(f"s3://bucket/{tmp_path.name}"), f"{tmp_path.name}/file.bin"
    upload = output.begin(key, "run")
    data = bytearray(np.random.default_rng(0).bytes(16 * MIB))
    # makes connections and clients
    output.put_part(key, upload, 1, data[:MIB])
    tracemalloc.start()
    try:
        output.put_part(key, upload, 1, data)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 * MIB
    output.complete(key, upload, output.parts(key, upload) or {}, "run")
    assert s3.client.get_object(Bucket="bucket", Key=key)["Body"].read() == data
    # nobody looks at it any more, so that it can be another part's
    del data[MIB:]


def test_a_part_is_a_stream_of_its_bytes() -> None:
    data = bytes(range(256)) * (1 << 13)
    with PartStream(data) as stream:
        assert (len(stream), stream.tell(), stream.seekable()) == (len(data), 0, True)
        # more than is asked for, as long as there is any
        found = list(iter(lambda: stream.read(16), b""))
        assert [len(one) for one in found] == [MIB, MIB]
        assert b"".join(found) == data
        assert stream.read(16) == b""
        assert stream.seek(-3, io.SEEK_END) == len(data) - 3
        assert bytes(stream.read()) == data[-3:]
        stream.seek(1)
        buffer = bytearray(300)
        assert stream.readinto(buffer) == 300
        assert buffer == data[1:301]
        stream.seek(len(data) - 2)
        assert stream.readinto(buffer) == 2
        assert buffer[:2] == data[-2:]
        assert stream.seek(5, io.SEEK_CUR) > len(data)
        assert stream.read(1) == b""


def test_memory_of_a_part_that_was_sent_is_the_next_ones() -> None:
    sender = Sender(1 << 30, 1)
    try:
        first = sender.buffer(1000)
        first[:] = b"a" * 1000
        sent = list[bytes]()
        sender.send_data(lambda data: sent.append(bytes(data)), first)
        sender.wait()
        assert sent == [b"a" * 1000]
        for size in (900, 1000):
            again = sender.buffer(size)
            assert again is first
            assert len(again) == size
            assert sender.buffer(size) is not first
            sender.send_data(lambda data: None, again)
            sender.wait()
            sender._free[:] = [first]

        def fail(data: bytearray) -> None:
            raise OSError("lost")

        # something may look at it still
        sender.send_data(fail, sender.buffer(1000))
        with pytest.raises(OSError, match="lost"):
            sender.wait()
        assert not sender._free
    finally:
        sender.close()


class Long:
    """A store of one object whose byte at n is n / 4096."""

    location, fixed = "long://", False
    size = 64 * 4096

    def listing(self) -> Iterator[RemoteObject]:
        yield RemoteObject("f", self.size, "v")

    def find(self, path: str) -> RemoteObject:
        return RemoteObject("f", self.size, "v")

    def fill(self, item: RemoteObject, start: int, buffer: memoryview) -> int:
        for at in range(0, len(buffer), 4096):
            buffer[at : at + 4096] = bytes([(start + at) // 4096]) * len(buffer[at : at + 4096])
        return len(buffer)


def test_memory_of_a_piece_that_was_read_is_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def counted(*arguments: int) -> bytearray:
        made.append(arguments[1])
        return bytearray(arguments[1])

    for module in (requests, objects):
        monkeypatch.setattr(module, "PIECE", 4096)
    monkeypatch.setattr(objects, "HEAD", 1)
    monkeypatch.setattr(requests, "SPARE", 2 * 4096)
    monkeypatch.setattr(requests, "mmap", counted)
    folder = StoreFolder(Long())
    blob = folder.open("f")
    stretches = [Stretch(0, at, at + 4096) for at in range(0, Long.size, 4096)]
    with foreseeing([blob], stretches, 4 * 3 * 4096):
        for one in stretches:
            assert blob.read(one.start, 4096) == bytes([one.start // 4096]) * 4096
    folder.close()
    assert len(made) <= 3 + 2
    assert set(made) == {4096}


def test_all_copies_are_asked_for_before_any_file_is_gathered(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = s3.put(large(tmp_path / "old"), f"{tmp_path.name}/old")
    done = list[str]()
    copied, begin = part_writer._copied, PartWriter.__init__

    def begun(self: PartWriter, *arguments: Any) -> None:
        uploads: Any = arguments[0].partial
        uploads.sender.wait()
        done.append("begun")
        begin(self, *arguments)

    def asked(*arguments: Any) -> None:
        done.append("copied")
        copied(*arguments)

    monkeypatch.setattr(part_writer, "_copied", asked)
    monkeypatch.setattr(PartWriter, "__init__", begun)
    migrate.apply(
        source,
        f"s3://bucket/{tmp_path.name}/new",
        rules=[rule(tmp_path)],
        max_shard_size=16 * MIB,
        threads=1,
    )
    assert done[-2:] == ["begun"] * 2
    assert set(done[:-2]) == {"copied"}
