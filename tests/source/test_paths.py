"""Links, pipes, odd names, and files that change under the reader: nothing leads out of a
checkpoint.
"""

import os
import socket
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from migrate import formats
from migrate.core.errors import CheckpointError, MigrateError
from migrate.source.local import LocalFolder
from migrate.source.paths import plain_name, same_when_folded
from migrate.source.places import find_place


def refused(path, code: str, **options) -> str:
    with pytest.raises(MigrateError) as caught:
        formats.open(path, **options)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    return str(caught.value)


def model(path: Path, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"x": torch.full((1000,), float(value))}, path)
    return path


def value(source) -> float:
    stored = source.index.tensors["x"]
    buffer = bytearray(stored.spec.nbytes)
    source.blobs[stored.blob].readinto(stored.offset, memoryview(buffer))
    values = set(torch.frombuffer(buffer, dtype=torch.float32).tolist())
    assert len(values) == 1
    return values.pop()


@pytest.fixture
def snapshot(tmp_path) -> Path:
    """A model as huggingface_hub keeps it in its cache."""
    repo = tmp_path / "hub" / "models--a--b"
    folder = repo / "snapshots" / "0123abcd"
    (folder / "sub").mkdir(parents=True)
    model(repo / "blobs" / "f00d")
    (repo / "blobs" / "c0ffee").write_text("{}")
    (folder / "model.safetensors").symlink_to("../../blobs/f00d")
    (folder / "config.json").symlink_to("../../blobs/c0ffee")
    (folder / "sub" / "more.json").symlink_to("../../../blobs/c0ffee")
    return folder


# names


@pytest.mark.parametrize(
    "name",
    ["a.safetensors", "model-00001-of-00002.safetensors", "ü.safetensors", "..a.safetensors"],
)
def test_a_plain_name_is_one(name):
    assert plain_name(name, ".safetensors")


HOSTILE_NAMES = [
    "", ".", "..", ".safetensors", "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors",
    "a\\b.safetensors", "..\\x.safetensors",
    "~/x.safetensors", "~x.safetensors", "https://h/x.safetensors", "C:x.safetensors",
    "x.safetensors\0", "x\0.safetensors", "x.bin",
    "x.safetensors\n", "x\n.safetensors", "x.safetensors/", "/proc/self/mem", "x.SAFETENSORS",
    "x．safetensors", "x.safetensors ",
    "\ud800.safetensors", "\u202ex.safetensors", "x" * 300 + ".safetensors",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_an_index_may_name_plain_files_only(tmp_path, name):
    import json

    assert not plain_name(name, ".safetensors")
    model(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "a.safetensors", "y": name}})
    )
    # half a surrogate is refused as text before it is a name
    refused(tmp_path, "M906" if "\ud800" in name else "M907")


def test_names_that_differ_in_case_only_are_found():
    assert same_when_folded(["a", "B", "b", "c", "A"]) == [["A", "a"], ["B", "b"]]


# links


def test_a_hub_snapshot_opens_without_asking(snapshot):
    for path in (snapshot, snapshot / "model.safetensors"):
        with formats.open(path) as source:
            assert value(source) == 1
            source.check_unchanged()
    with formats.open(snapshot) as source:
        assert source.index.side_files == (("config.json", 2), ("sub/more.json", 2))
        assert source.side_file("sub/more.json") == b"{}"


def test_a_sharded_snapshot_opens_through_the_link_of_its_index(snapshot):
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00001.safetensors")
    content = '{"weight_map": {"x": "model-00001-of-00001.safetensors"}}'
    (snapshot.parent.parent / "blobs" / "1de0").write_text(content)
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/1de0")
    for path in (snapshot, snapshot / "model.safetensors.index.json"):
        with formats.open(path) as source:
            assert value(source) == 1


EVIL_TARGETS = [
    "../../../secret", "../../blobs/../../../secret", "/etc/passwd", "../../blobs/",
    "../../blobs/..", "../blobs/f00d", "blobs/f00d",
    "f00d",    "../../../blobs/f00d", "../../../../hub/models--a--b/blobs/f00d", "../../blobs/link",
    "../../blobs/pipe", "../../blobs/folder",
    "../../blobs//f00d", ".././../blobs/f00d", "../../blobs/gone", "../" * 20 + "blobs/f00d",
    "../../snapshots/x",
]  # fmt: skip


@pytest.mark.parametrize("target", EVIL_TARGETS)
def test_any_other_link_of_a_snapshot_is_refused(snapshot, tmp_path, target):
    model(tmp_path / "secret")
    blobs = snapshot.parent.parent / "blobs"
    (blobs / "link").symlink_to("f00d")
    (blobs / "folder").mkdir()
    os.mkfifo(blobs / "pipe")
    (tmp_path / "hub" / "blobs").mkdir()
    model(tmp_path / "hub" / "blobs" / "f00d")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    refused(snapshot, "M907")
    (snapshot / "model.safetensors").unlink()
    model(snapshot / "model.safetensors")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(target)
    assert "config.json" in refused(snapshot, "M907")


def test_blobs_that_are_not_beside_snapshots_are_refused(tmp_path):
    model(tmp_path / "blobs" / "f00d")
    folder = tmp_path / "other" / "rev"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("../../blobs/f00d")
    refused(folder, "M907")


def test_a_blobs_folder_that_is_a_link_is_refused(snapshot, tmp_path):
    repo = snapshot.parent.parent
    (repo / "blobs").rename(tmp_path / "elsewhere")
    (repo / "blobs").symlink_to(tmp_path / "elsewhere")
    refused(snapshot, "M907")


def test_a_link_is_followed_when_the_operator_allows_it_and_only_then(tmp_path):
    model(tmp_path / "real" / "m.safetensors", 3)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "model.safetensors").symlink_to(tmp_path / "real" / "m.safetensors")
    for path in (tmp_path / "ckpt", tmp_path / "ckpt" / "model.safetensors"):
        assert 'allow={"links"}' in refused(path, "M907")
        with formats.open(path, allow_links=True) as source:
            assert value(source) == 3
    (tmp_path / "latest").symlink_to("real")
    with formats.open(tmp_path / "latest") as source:
        assert value(source) == 3


def test_loops_dangling_links_pipes_sockets_devices_and_folders_are_refused_at_once(tmp_path):
    folder = tmp_path / "ckpt"
    folder.mkdir()
    weight = folder / "model.safetensors"
    weight.symlink_to("model.safetensors")
    refused(folder, "M907", allow_links=True)
    refused(weight, "M907")
    weight.unlink()
    weight.symlink_to("gone")
    refused(folder, "M907", allow_links=True)
    refused(weight, "M907", allow_links=True)
    weight.unlink()
    weight.symlink_to("/dev/zero")
    refused(folder, "M907", allow_links=True)
    refused(weight, "M907", allow_links=True)
    weight.unlink()
    os.mkfifo(weight)
    refused(folder, "M907")
    refused(weight, "M907")
    weight.unlink()
    weight.mkdir()
    refused(folder, "M907")
    weight.rmdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(folder)
        try:
            server.bind("model.safetensors")
        finally:
            os.chdir(here)
        refused(folder, "M907")


def test_no_folder_on_the_way_to_a_file_may_be_a_link(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "f").write_text("x")
    (tmp_path / "l").symlink_to("a")
    for allow in (False, True):
        folder = LocalFolder(str(tmp_path), allow)
        blob = folder.open("a/b/f")
        assert bytes(blob.read(0, 1)) == b"x"
        blob.close()
        for path in ("l/b/f", "../x", "a/../a/b/f", "/etc/passwd", "a//b", "", "a/./b/f", "a\0"):
            with pytest.raises(CheckpointError) as caught:
                folder.open(path)
            assert caught.value.diagnostics[0].code == "M907"
        folder.close()
        folder.close()


# change


def test_a_file_cut_short_after_opening_is_an_error_and_not_a_crash(tmp_path):
    path = model(tmp_path / "model.safetensors")
    with formats.open(tmp_path) as source:
        os.truncate(path, 300)
        with pytest.raises(CheckpointError) as caught:
            value(source)
        assert caught.value.diagnostics[0].code == "M905"
        with pytest.raises(CheckpointError, match=r"its size was \d+ bytes and is 300"):
            source.check_unchanged()


def test_a_file_replaced_after_opening_gives_the_old_bytes_and_is_named(tmp_path):
    path = model(tmp_path / "model.safetensors", 1)
    model(tmp_path / "new" / "m", 2)
    with formats.open(path) as source:
        (tmp_path / "new" / "m").rename(path)
        assert value(source) == 1
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: changed while it was read"
        ) as caught:
            source.check_unchanged()
        assert caught.value.diagnostics[0].code == "M905"


def test_a_file_written_in_place_or_removed_is_named(tmp_path):
    path = model(tmp_path / "model.safetensors", 1)
    with formats.open(path) as source:
        source.check_unchanged()
        with path.open("r+b") as out:
            out.write(path.read_bytes()[:8])
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError):
            source.check_unchanged()
    with formats.open(path) as source:
        path.unlink()
        with pytest.raises(CheckpointError, match="changed"):
            source.check_unchanged()


def test_a_side_file_that_changed_is_not_read(tmp_path):
    model(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with formats.open(tmp_path) as source:
        source.check_unchanged()
        (tmp_path / "config.json").write_text("[0]")
        with pytest.raises(CheckpointError) as caught:
            source.side_file("config.json")
        assert caught.value.diagnostics[0].code == "M905"
        with pytest.raises(CheckpointError, match=r"config\.json: changed"):
            source.check_unchanged()


def test_a_thread_that_swaps_the_file_never_produces_a_mix(tmp_path):
    path = tmp_path / "model.safetensors"
    model(path, 0)
    stop = threading.Event()

    def swap():
        number = 1
        while not stop.is_set():
            model(tmp_path / "next", number).rename(path)
            number += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(200):
            with formats.open(path) as source:
                value(source)
    finally:
        stop.set()
        thread.join()


# descriptors


def test_no_descriptor_stays_open_after_success_or_failure(tmp_path, snapshot):
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    (tmp_path / "broken.safetensors").write_bytes(b"\x02" + bytes(7) + b"{]")
    before = held()
    for _ in range(3):
        formats.open(snapshot).close()
        source = formats.open(snapshot / "model.safetensors")
        source.close()
        source.close()
        refused(tmp_path / "broken.safetensors", "M906")
        refused(tmp_path / "nothing", "M917")
        place = find_place(tmp_path)
        place.close()
    assert held() == before


def test_a_file_that_may_not_be_read_says_so(tmp_path):
    path = model(tmp_path / "model.safetensors")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("the superuser may read everything")
    assert "Permission denied" in refused(path, "M901")


def test_a_suspended_folder_is_opened_again_where_it_was(tmp_path, monkeypatch):
    model(tmp_path / "a" / "model.safetensors")
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    folder = LocalFolder("a")
    folder.suspend()
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.chdir(tmp_path / "b")
    assert folder.names() == ["model.safetensors"]
    folder.open("model.safetensors").close()
    assert folder.locate("model.safetensors") is not None
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "a").rename(tmp_path / "c")
    assert folder.locate("model.safetensors") is None
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"M905.*another folder has its name"):
        folder.names()
    assert len(os.listdir("/proc/self/fd")) == before
    folder.close()
    with pytest.raises(ValueError, match="closed"):
        folder.names()
