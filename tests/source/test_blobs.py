"""Files held by descriptor."""

import contextlib
import errno
import os
import re
import resource
import threading
import tracemalloc
from pathlib import Path

import pytest

from migrate.core.errors import CheckpointError
from migrate.source import local
from migrate.source.blobs import BytesBlob, Identity, difference, read_bytes
from migrate.source.index import FileSource, Index
from migrate.source.local import LocalBlob, LocalFolder


@pytest.fixture
def blob(tmp_path):
    (tmp_path / "f").write_bytes(bytes(range(256)) * 100)
    folder = LocalFolder(str(tmp_path))
    made = folder.open("f")
    yield made
    made.close()
    folder.close()


def test_short_reads_of_the_system_are_continued(blob, monkeypatch):
    real, whole = os.preadv, os.pread
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset)
    )
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: whole(fd, min(size, 7), offset))
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

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, broken)
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
    assert isinstance(blob, LocalBlob)
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
        assert read_bytes(blob, 0, size) == content
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()
    assert size <= peaks[0] < 1.5 * size
    assert type(read_bytes(blob, 3, 4)) is bytes
    assert read_bytes(blob, 3, 4) == content[3:7]


@pytest.fixture
def many(tmp_path, monkeypatch):
    """Twenty files in a folder of which two stay open and at most three more are."""
    monkeypatch.setattr(local, "KEPT", 2)
    monkeypatch.setattr(local, "LENT", 3)
    for n in range(20):
        (tmp_path / f"f{n}").write_bytes(bytes([n]) * 1000)
    before = len(os.listdir("/proc/self/fd"))
    folder = LocalFolder(str(tmp_path))
    opened = [folder.open(f"f{n}") for n in range(20)]
    yield opened
    for blob in opened:
        blob.close()
        blob.close()
    folder.close()
    assert len(os.listdir("/proc/self/fd")) == before


def open_files():
    return sorted(
        name for n in os.listdir("/proc/self/fd") if re.fullmatch(r"f\d+", name := held(n))
    )


def held(number):
    try:
        return os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        return ""


def test_of_many_files_a_few_are_open(many):
    assert open_files() == ["f0", "f1", "f17", "f18", "f19"]
    assert [blob.fileno() is not None for blob in many] == [True] * 2 + [False] * 18
    for n, blob in enumerate(many):
        assert blob.read(990, 10) == bytes([n]) * 10
        assert len(open_files()) == 5
    assert many[5].read(0, 1) == b"\5"
    # what was read last stays
    assert open_files() == ["f0", "f1", "f18", "f19", "f5"]
    assert all(blob.change() is None for blob in many)


def test_what_is_read_stays_open_however_many_there_are(many):
    with contextlib.ExitStack() as stack:
        descriptors = [stack.enter_context(blob.hold()) for blob in many]
        assert len(set(descriptors)) == len(open_files()) == 20
        assert [os.pread(d, 1, 0)[0] for d in descriptors] == list(range(20))
    many[3].read(0, 1)
    assert len(open_files()) == 5


def test_a_place_is_free_again_when_its_file_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "KEPT", 1)
    (tmp_path / "f").write_bytes(b"x")
    folder = LocalFolder(str(tmp_path))
    for _ in range(3):
        opened = folder.open("f")
        assert opened.fileno() is not None
        opened.close()
    folder.close()


def test_suspended_files_are_closed_until_they_are_read(many, tmp_path):
    for _ in range(2):
        for blob in many:
            blob.suspend()
        assert open_files() == []
        assert many[0].read(0, 1) == b"\0"
        assert open_files() == ["f0"]
        for n in (0, 7, 7, 9):
            many[n].reopen()
        # of which two have a place
        assert open_files() == ["f0", "f7"]
        assert [blob.fileno() is not None for blob in many[:10]] == [n in (0, 7) for n in range(10)]
        assert [many[n].read(0, 1)[0] for n in (7, 9, 0)] == [7, 9, 0]
    many[7].suspend()
    (tmp_path / "f7").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="M905"):
        many[7].reopen()
    (tmp_path / "f7").unlink()
    with pytest.raises(CheckpointError, match="M905"):
        many[7].reopen()
    # the place is still free
    many[8].reopen()
    assert many[8].fileno() is not None


def rewritten(path):
    before = os.stat(path)
    path.write_bytes(bytes(1000))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path):
    before = os.stat(path)
    path.with_name("other").write_bytes(bytes(1000))
    os.utime(path.with_name("other"), ns=(before.st_atime_ns, before.st_mtime_ns))
    path.with_name("other").rename(path)


@pytest.mark.parametrize(
    "change", [rewritten, replaced, Path.unlink, lambda path: os.truncate(path, 999)]
)
def test_a_file_that_changed_is_refused_when_it_is_opened_again(many, tmp_path, change):
    change(tmp_path / "f7")
    with pytest.raises(CheckpointError, match=r"f7: changed while it was read") as caught:
        many[7].read(0, 1)
    assert caught.value.diagnostics[0].code == "M905"
    assert many[7].change()
    assert many[8].read(0, 1) == b"\10"
    assert len(open_files()) == 5


def test_a_file_that_became_a_link_is_refused(many, tmp_path):
    (tmp_path / "f7").rename(tmp_path / "moved")
    (tmp_path / "f7").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError) as caught:
        many[7].read(0, 1)
    assert caught.value.diagnostics[0].code == "M907"


def test_a_file_that_cannot_be_opened_again_says_why(many, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(CheckpointError, match=r"f7: .*Too many open files") as caught:
            many[7].read(0, 1)
    assert caught.value.diagnostics[0].code == "M901"


def test_many_threads_may_read_many_files_at_once(many):
    wrong, most = [], []

    def read(first: int) -> None:
        for i in range(300):
            n = (first * 7 + i * 3) % 20
            if many[n].read(i, 8) != bytes([n]) * 8:
                wrong.append(n)
            most.append(len(open_files()) if i % 50 == 0 else 0)

    threads = [threading.Thread(target=read, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # two that stay, three that are lent out, and one for each thread
    assert max(most) <= 2 + 3 + 6
    assert len(open_files()) == 5


@pytest.mark.parametrize(
    ("limit", "room"),
    [
        (1024, (256, 64)),
        (20_000, (256, 64)),
        (256, (64, 16)),
        (48, (12, 4)),
        (resource.RLIM_INFINITY, (256, 64)),
    ],
)
def test_the_number_of_open_files_follows_the_limit_of_the_process(monkeypatch, limit, room):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert local._room() == room
