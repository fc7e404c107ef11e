"""Files held by descriptor."""

import os
import threading
import tracemalloc

import pytest

from migrate.core.errors import CheckpointError
from migrate.source.blobs import BytesBlob, FileBlob, FileSource, Identity, difference, read
from migrate.source.index import Index
from migrate.source.paths import Folder


@pytest.fixture
def blob(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(256)) * 100)
    folder = Folder(str(tmp_path))
    made = folder.open("f")
    yield made
    made.close()
    folder.close()


def test_short_reads_of_the_system_are_continued(blob, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    assert bytes(blob.read(3, 1000)) == (bytes(range(256)) * 100)[3:1003]


def test_any_shape_of_buffer_is_filled(blob):
    raw = bytearray(24)
    blob.readinto(1, memoryview(raw).cast("I", (2, 3)))
    assert raw == bytes(range(1, 25))
    blob.readinto(10**9, memoryview(b""))


def test_reading_behind_the_end_is_an_error_with_the_name(blob):
    with pytest.raises(CheckpointError, match="f: ends at 25600") as caught:
        blob.read(25_590, 20)
    assert caught.value.diagnostics[0].code == "M905"


def test_a_system_error_is_unreadable(blob, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        blob.read(0, 1)
    assert caught.value.diagnostics[0].code == "M901"


def test_many_threads_may_read_at_once(blob):
    wrong = []

    def read(at: int) -> None:
        wanted = bytes((at + i) % 256 for i in range(256))
        wrong.extend(at for _ in range(200) if blob.read(at, 256) != wanted)

    threads = [threading.Thread(target=read, args=(at,)) for at in (0, 77, 4096, 9999)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_each_field_of_an_identity_is_compared():
    then = Identity(1, 2, 3, 4, 5)
    assert difference(then, then) is None
    words = [difference(then, then._replace(**{name: 99})) for name in then._fields]
    assert all(words)
    assert difference(then, None) == "it is no longer there"


def test_a_closed_source_says_so(blob):
    source = FileSource("p", "x", Index({}, ("f",)), [blob])
    with source:
        assert source.blobs[0].fileno() == blob.fileno()
    source.close()
    assert isinstance(blob, FileBlob)
    with pytest.raises(ValueError, match="f is closed"):
        blob.read(0, 1)
    with pytest.raises(KeyError):
        source.side_file("x")


def test_bytes_are_held_once_while_they_are_read():
    size = 8 << 20
    peaks = []

    class Watched(BytesBlob):
        def readinto(self, offset, buffer):
            super().readinto(offset, buffer)
            peaks.append(tracemalloc.get_traced_memory()[1])

    content = bytes(range(256)) * (size >> 8)
    blob = Watched("x", content)
    tracemalloc.start()
    try:
        assert read(blob, 0, size) == content
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()
    assert size <= peaks[0] < 1.5 * size
    assert type(read(blob, 3, 4)) is bytes
    assert read(blob, 3, 4) == content[3:7]
