"""Which files travel with a migration."""

import os

import pytest

from migrate.core.errors import CheckpointError
from migrate.source import paths
from migrate.source.local import LocalFolder
from migrate.source.paths import look_beside, read_history


@pytest.fixture
def folder(tmp_path):
    made = LocalFolder(str(tmp_path))
    yield made
    made.close()


def fill(tmp_path, *paths: str) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)


def test_small_files_travel_and_weights_caches_and_partial_output_stay(tmp_path, folder):
    carried = [
        "config.json",
        "tokenizer/vocab.txt",
        "a/b/c/deep.json",
        ".gitattributes",
        "modeling.py",
        "x.safetensors.md",
    ]
    left = [
        "pytorch_model.bin",
        "X.SAFETENSORS",
        "a/model.gguf",
        "rng.pth",
        "m.index.json",
        "a/.metadata",
        "w.npz",
        "t.onnx",
        "f.migrate-partial",
    ]
    fill(tmp_path, *carried, *left, "migrate.history.json", "model.safetensors")
    fill(
        tmp_path,
        ".git/HEAD",
        ".cache/x",
        "__pycache__/a.pyc",
        "OUT.migrate-partial/config.json",
        "a/b/c/d/deeper.json",
    )
    os.mkfifo(tmp_path / "pipe")
    beside = look_beside(folder, frozenset({"model.safetensors"}))
    assert [f.path for f in beside.side_files] == sorted(carried)
    folders = [".git/", ".cache/", "__pycache__/", "OUT.migrate-partial/", "a/b/c/d/"]
    assert set(beside.left_out) == {*left, *folders, "pipe"}
    assert {f.path: beside.read(f.path).decode() for f in beside.side_files} == {
        p: p for p in carried
    }
    with pytest.raises(KeyError):
        beside.read("rng.pth")


def test_a_large_file_stays_and_is_listed(tmp_path, folder):
    fill(tmp_path, "tokenizer.json")
    os.truncate(tmp_path / "tokenizer.json", paths.MAX_SIZE)
    assert look_beside(folder, frozenset()).side_files == (("tokenizer.json", paths.MAX_SIZE),)
    os.truncate(tmp_path / "tokenizer.json", paths.MAX_SIZE + 1)
    assert look_beside(folder, frozenset()).left_out == ("tokenizer.json",)


def test_links_are_named_together_and_folder_links_are_never_entered(tmp_path, folder):
    fill(tmp_path, "real/a.json")
    (tmp_path / "one.json").symlink_to("real/a.json")
    (tmp_path / "two.json").symlink_to("/etc/passwd")
    (tmp_path / "old.bin").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError) as caught:
        look_beside(folder, frozenset())
    assert [d.code for d in caught.value.diagnostics] == ["M907", "M907"]
    (tmp_path / "two.json").unlink()
    (tmp_path / "loop").symlink_to(".")
    allowed = LocalFolder(str(tmp_path), allow_links=True)
    (tmp_path / "gone.json").symlink_to("nowhere")
    beside = look_beside(allowed, frozenset())
    assert [f.path for f in beside.side_files] == ["one.json", "real/a.json"]
    assert beside.left_out == ("gone.json", "loop", "old.bin")
    allowed.close()


def test_a_folder_of_too_many_files_is_refused(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(paths, "MAX_ENTRIES", 3)
    fill(tmp_path, "a", "b", "c/d")
    with pytest.raises(CheckpointError, match="more than 3 files"):
        look_beside(folder, frozenset())


def test_a_stamp_is_read_and_a_huge_one_refused(tmp_path, folder):
    assert read_history(folder, ()) is None
    fill(tmp_path, "migrate.history.json")
    assert read_history(folder, ("migrate.history.json",)) == b"migrate.history.json"
    os.truncate(tmp_path / "migrate.history.json", paths.MAX_HISTORY + 1)
    with pytest.raises(CheckpointError) as caught:
        read_history(folder, ("migrate.history.json",))
    assert caught.value.diagnostics[0].code == "M914"
