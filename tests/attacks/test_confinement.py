"""Which links a command follows: those of the Hugging Face cache always, any other with
`--allow links`, none out of an index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from archives import archive, data_pkl, genuine_pickle, safetensors
from commandline import contents, done, run

RULES = (
    "id: demo/v2/x\ntitle: a change\nlineage: demo\nedge: [v1, v2]\nrules:\n  - {name: r, "
    "from: x, to: y}\n"
)
GOOD = safetensors({"x": b"abcd"})


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


def commands(path: Path, made: Path, rules: Path) -> list[list[object]]:
    """Every command that reads the checkpoint, in the order of a user's day."""
    return [
        ["inspect", path],
        ["plan", path, "--rules", rules],
        ["apply", path, "-o", made, "--rules", rules, "-q"],
        ["verify", made, "--source", path, "--rules", rules, "-q"],
        ["diff", path, path, "-q"],
    ]


def snapshot(root: Path, blob: bytes = GOOD) -> Path:
    """A model as huggingface_hub keeps it."""
    folder = root / "models--a--b" / "snapshots" / "0123abcd"
    blobs = root / "models--a--b" / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "f00d").write_bytes(blob)
    (blobs / "c0ffee").write_text("{}")
    (folder / "model.safetensors").symlink_to("../../blobs/f00d")
    (folder / "config.json").symlink_to("../../blobs/c0ffee")
    return folder


def test_a_cache_snapshot_goes_through_every_command_without_a_flag(
    tmp_path: Path, rules: Path
) -> None:
    path = snapshot(tmp_path)
    for command in commands(path, tmp_path / "made", rules):
        done(*command)
    assert contents(tmp_path / "made") == {"y": ("U8", (4,), b"abcd")}
    assert (tmp_path / "made" / "config.json").read_text() == "{}"
    assert not [p for p in (tmp_path / "made").iterdir() if p.is_symlink()]


def test_a_snapshot_of_torch_shards_goes_through_every_command_without_a_flag(
    tmp_path: Path, rules: Path
) -> None:
    path = snapshot(tmp_path)
    (path / "model.safetensors").unlink()
    (path.parents[1] / "blobs" / "f00d").write_bytes(archive(data_pkl(genuine_pickle())))
    (path.parents[1] / "blobs" / "1dea").write_text(
        json.dumps({"weight_map": {"w": "pytorch_model-00001-of-00001.bin"}})
    )
    (path / "pytorch_model-00001-of-00001.bin").symlink_to("../../blobs/f00d")
    (path / "pytorch_model.bin.index.json").symlink_to("../../blobs/1dea")
    rules.write_text(RULES.replace("from: x", "from: w"))
    for command in commands(path, tmp_path / "made.safetensors", rules):
        done(*command)
    assert contents(tmp_path / "made.safetensors") == {"y": ("F32", (4,), bytes(16))}


def piped(folder: Path) -> Path:
    os.mkfifo(folder / "consolidated.01.pth")
    return folder


def linked_rank(folder: Path) -> Path:
    (folder / "consolidated.01.pth").symlink_to("/etc/hostname")
    return folder


def linked_folder(folder: Path) -> Path:
    (folder / "consolidated.00.pth").unlink()
    (folder / "mp_rank_00").mkdir()
    (folder / "mp_rank_00" / "model_optim_rng.pt").write_bytes(archive(data_pkl(genuine_pickle())))
    (folder / "mp_rank_01").symlink_to("/etc")
    return folder


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "m.pt")
    return folder / "m.pt"


@pytest.mark.parametrize(
    "build", [piped, linked_rank, linked_folder, pipe, lambda folder: Path("/dev/zero")]
)
def test_a_rank_or_a_file_that_is_no_file_is_refused_without_waiting(
    build: Callable[[Path], Path], tmp_path: Path, rules: Path
) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "consolidated.00.pth").write_bytes(archive(data_pkl(genuine_pickle())))
    path = build(folder)
    for command in (
        ["inspect", path],
        ["plan", path, "--rules", rules],
        ["apply", path, "-o", tmp_path / "made", "--rules", rules],
    ):
        refused = run(*command, "--format", "json")
        assert (refused.exit, refused.codes) == (3, ["M907"])
    assert not (tmp_path / "made").exists()


def linked(folder: Path) -> Path:
    """Weights that are a link out of the folder."""
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "m.safetensors").write_bytes(GOOD)
    path = folder / "ckpt"
    path.mkdir()
    (path / "model.safetensors").symlink_to(folder / "elsewhere" / "m.safetensors")
    return path


def beside(folder: Path) -> Path:
    """A side file that is one."""
    path = folder / "ckpt"
    path.mkdir()
    (path / "model.safetensors").write_bytes(GOOD)
    (folder / "secret").write_text("{}")
    (path / "config.json").symlink_to("../secret")
    return path


def almost_cached(folder: Path) -> Path:
    """Laid out like the cache, but the link leads into the blobs of another model."""
    path = snapshot(folder)
    snapshot(folder / "other")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("../../../other/models--a--b/blobs/f00d")
    return path


@pytest.mark.parametrize("build", [linked, beside, almost_cached])
def test_any_other_link_needs_permission_in_every_command(
    tmp_path: Path, rules: Path, build: Callable[[Path], Path]
) -> None:
    path = build(tmp_path)
    made = tmp_path / "made"
    for command in commands(path, made, rules):
        if command[0] == "verify":
            continue
        result = run(*command)
        assert (result.exit, "M907" in result.err, "--allow links" in result.err) == (
            3,
            True,
            True,
        ), result
    assert not made.exists()
    for command in commands(path, made, rules):
        done(*command, "--allow", "links")
    assert contents(made) == {"y": ("U8", (4,), b"abcd")}


@pytest.mark.parametrize("command", ["history", "lint"])
def test_commands_that_only_look_take_the_permission_too(
    tmp_path: Path, rules: Path, command: str
) -> None:
    path = linked(tmp_path)
    question = ["history", path] if command == "history" else ["lint", rules, "--index", path]
    assert run(*question).exit == 3
    assert run(*question, "--allow", "links").exit in (0, 1)


def test_no_permission_lets_an_index_lead_out_of_its_folder(tmp_path: Path, rules: Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    (tmp_path / "outside.safetensors").write_bytes(GOOD)
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
        for command in commands(path, tmp_path / "made", rules)[:3]:
            result = run(*command, "--allow", "links")
            assert (result.exit, "M907" in result.err) == (3, True), result


def test_no_folder_that_is_a_link_is_entered_even_with_permission(
    tmp_path: Path, rules: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.json").write_text("{}")
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "model.safetensors").write_bytes(GOOD)
    (path / "sub").symlink_to("../elsewhere")
    done("apply", path, "-o", tmp_path / "made", "--rules", rules, "-q", "--allow", "links")
    assert not list((tmp_path / "made").rglob("secret.json"))


@pytest.mark.parametrize("inside", ["ckpt/out", "ckpt"])
def test_nothing_is_written_into_the_source(tmp_path: Path, rules: Path, inside: str) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "model.safetensors").write_bytes(GOOD)
    (tmp_path / "alias").symlink_to("ckpt")
    for out in (tmp_path / inside, tmp_path / inside.replace("ckpt", "alias")):
        assert run("apply", path, "-o", out, "--rules", rules, "-q").exit == 2
    assert [p.name for p in path.iterdir()] == ["model.safetensors"]
