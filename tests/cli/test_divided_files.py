"""One long file, written by several parts: killed, twice, out of order, from and into archives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT, done, fingerprint, rules, run, safetensors
from marks import thorough
from test_run_parts import SLOW
from work import HANG

RULES = """rules:
  - {name: turn, from: 'l.{i:int}.t', to: 'l.{i}.turned', via: [{transpose: {dims: [0, 1]}}]}
  - {name: half, from: 'l.{i:int}.h', to: 'l.{i}.half', via: [{cast: {from: float32, to: float16}}]}
  - {name: long, from: long, to: longer}
"""
BACK = "keep: ['{k...}']\nrules: [{name: again, from: longer, to: long}]\n"


@dataclass(frozen=True)
class Scene:
    """A checkpoint, and what one process makes of it under several names."""

    folder: Path
    said: dict[str, Any]

    def words(self, out: Path, *more: object) -> list[object]:
        folder = self.folder
        words = ["apply", folder / "in.safetensors", "-o", out, "--rules", folder / "rules.yaml"]
        return [*words, "--allow", "lossy", "-q", *more]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("divided")
    tensors: dict = {}
    for i in range(3):
        tensors[f"l.{i}.t"] = ("F32", [1000, 1100])
        tensors[f"l.{i}.h"] = ("F32", [200, 300])
    tensors |= {"long": ("F32", [4_000_000]), "none": ("F32", [0]), "short": ("U8", [7])}
    safetensors(folder / "in.safetensors", tensors)
    rules(folder, f"keep: [none, short]\n{RULES}")
    scene = Scene(folder, {})
    for name in ("one.safetensors", "one.pt"):
        scene.said[name] = done(*scene.words(folder / name), "--format", "json").json
    return scene


def bytes_of(out: Path) -> bytes | dict[str, str]:
    if out.is_file():
        return out.read_bytes()
    return {Path(name).name: found for name, found in fingerprint(out).items()}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("out.safetensors", ()),
        ("out.pt", ()),
        *thorough([("out", ("--output-format", "dcp"))], default=0),
    ],
)
def test_parts_of_one_file_give_what_one_process_gives(
    scene: Scene, tmp_path: Path, name: str, more: tuple[str, ...]
) -> None:
    out, one = tmp_path / name, tmp_path / name.replace("out", "one")
    alone = done(*scene.words(one, *more), "--format", "json").json
    (file,) = alone["files"]
    sizes = []
    for number in (1, 2, 0):
        said = done(*scene.words(out, *more), "--part", f"{number}/3", "--format", "json").json
        assert said["files"][file]["xxh3_128"] is None
        assert f"of {file} this part has written bytes " in said["notes"][0]
        sizes.append(said["files"][file]["size"])
    assert sum(sizes) == alone["files"][file]["size"]
    assert min(sizes) > 8 << 20
    again = done("publish", out, "--format", "json").json
    # no process has read the whole of it
    assert again["files"] == {file: {"size": sum(sizes), "xxh3_128": None}}
    unlike = {key for key in alone if again[key] != alone[key]}
    assert unlike == {"files", "path"}
    assert bytes_of(out) == bytes_of(one)
    if name.endswith(".pt"):
        with zipfile.ZipFile(out) as archive:
            assert archive.testzip() is None
    assert done("verify", out, "--source", scene.folder / "in.safetensors", "--rules",
                scene.folder / "rules.yaml", "--allow", "lossy", "-q").exit == 0  # fmt: skip


def test_an_archive_is_read_in_pieces(scene: Scene, tmp_path: Path) -> None:
    """Its checksums are compared by all parts that read something of a record."""
    shutil.copy(scene.folder / "one.pt", tmp_path / "in.pt")
    rule = rules(tmp_path, BACK)
    for name in ("out.safetensors", "out.pt"):
        words = ["apply", tmp_path / "in.pt", "--rules", rule, "-q"]
        for number in range(3):
            done(*words, "-o", tmp_path / name, "--part", f"{number}/3")
        done("publish", tmp_path / name, "-q")
        done(*words, "-o", tmp_path / f"one-{name}")
        assert bytes_of(tmp_path / name) == bytes_of(tmp_path / f"one-{name}")
    with zipfile.ZipFile(tmp_path / "in.pt") as archive:
        longest = max(archive.infolist(), key=lambda found: found.file_size)
    with open(tmp_path / "in.pt", "r+b") as file:
        file.seek(longest.header_offset + longest.file_size // 2)
        file.write(b"\x55\xaa" * 8)
    refused = [
        run(*words, "-o", tmp_path / "bad.safetensors", "--part", f"{number}/3").exit
        for number in range(3)
    ]
    assert 3 in refused


@pytest.mark.parametrize("name", thorough(["out.pt", "out.safetensors"]))
def test_a_part_that_is_killed_goes_on_in_its_piece(
    scene: Scene, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    words = [*map(str, scene.words(out)), "--part", "1/3", "--threads", "1"]
    command = [sys.executable, "-c", SLOW, "0.5", *words]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    journal = Path(f"{out}.migrate-partial/journal-2.jsonl")
    while not journal.exists() or b'"tile"' not in journal.read_bytes():
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=HANG)
    done(*scene.words(out), "--part", "0/3")
    said = done(*scene.words(out), "--part", "1/3", "--format", "json").json
    (file,) = said["files"].values()
    assert 0 < said["bytes_written"] < file["size"]
    refused = run("publish", out)
    assert refused.exit == 2
    assert "error[M984]: 1 part of 3 is not done: 2/3" in refused.err
    done(*scene.words(out), "--part", "2/3")
    done("publish", out, "-q")
    assert bytes_of(out) == bytes_of(scene.folder / name.replace("out", "one"))


def test_two_that_write_the_same_piece_write_the_same(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    for number in range(3):
        done(*scene.words(out), "--part", f"{number}/3")
    first = (tmp_path / "out.pt.migrate-partial" / "data" / "model.pt").read_bytes()
    (tmp_path / "out.pt.migrate-partial" / "parts" / "1.json").unlink()
    (tmp_path / "out.pt.migrate-partial" / "journal-2.jsonl").unlink()
    done(*scene.words(out), "--part", "1/3")
    assert (tmp_path / "out.pt.migrate-partial" / "data" / "model.pt").read_bytes() == first
    done("publish", out, "-q")
    assert bytes_of(out) == bytes_of(scene.folder / "one.pt")


def test_parts_of_a_file_that_is_gone_are_not_done(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    for number in range(3):
        done(*scene.words(out), "--part", f"{number}/3")
    shutil.rmtree(tmp_path / "out.safetensors.migrate-partial" / "data")
    done(*scene.words(out), "--part", "0/3")
    refused = run("publish", out)
    assert "error[M984]: 2 parts of 3 are not done: 1/3, 2/3" in refused.err
    for number in (1, 2):
        done(*scene.words(out), "--part", f"{number}/3")
    done("publish", out, "-q")
    assert bytes_of(out) == bytes_of(scene.folder / "one.safetensors")


def test_what_parts_left_of_a_file_is_finished_by_one_process(scene: Scene, tmp_path: Path) -> None:
    for name in ("out.pt", "out.safetensors"):
        out, one = tmp_path / name, name.replace("out", "one")
        for number in (0, 2):
            done(*scene.words(out), "--part", f"{number}/3")
        said = done(*scene.words(out), "--resume", "--format", "json").json
        assert said["files"] == scene.said[one]["files"]
        assert bytes_of(out) == bytes_of(scene.folder / one)
    # the piece that begins a file is the beginning of it, but in an archive, where it is not sealed
    assert said["bytes_written"] < scene.said[one]["bytes_written"]
