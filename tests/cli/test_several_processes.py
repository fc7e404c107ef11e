"""Several processes of one launch, killed, given something else, or left alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import ROOT, done, fingerprint, rules, safetensors
from disks import mounted
from work import HANG

pytestmark = pytest.mark.ranks

RULES = """rules:
  - {name: turn, from: 'l.{i:int}.t', to: 'l.{i}.turned', via: [{transpose: {dims: [0, 1]}}]}
  - {name: keep, from: 'l.{i:int}.r', to: 'l.{i}.renamed'}
"""
# seconds that ranks wait for each other in these tests
APPEAR = 20
# what a rank runs. Its arguments: seconds before each tile is claimed, or a file that has to be
# there before any but the first is; seconds that it waits for the others; the command line
MAIN = """
import os, sys, time
from migrate.cli import main
from migrate.running import publish, ranks
slow, ranks.APPEAR = sys.argv[1], float(sys.argv[2])
claim, claims = publish.Partial.claim, []
def slowly(*arguments):
    if not slow.startswith("/"):
        time.sleep(float(slow))
    while slow.startswith("/") and claims and not os.path.exists(slow):
        time.sleep(0.01)
    claims.append(1)
    claim(*arguments)
publish.Partial.claim = slowly
if os.environ.get("SPARSE"):
    # as on a file system that reserves nothing, so that it is full when a rank writes
    publish._allocate = lambda *_: None
status = main.run(sys.argv[3:])
if "torch" in sys.modules:
    sys.exit("torch was imported")
sys.exit(status)
"""


@dataclass(frozen=True)
class Scene:
    """A checkpoint of 24 MB, its rules, and what one process makes of them."""

    folder: Path
    wanted: dict[str, str]

    @property
    def source(self) -> Path:
        return self.folder / "in.safetensors"

    def words(self, out: Path) -> list[object]:
        rule = self.folder / "rules.yaml"
        return ["apply", self.source, "-o", out, "--rules", rule, "--max-shard-size", "3MB"]

    def made(self, out: Path) -> dict[str, str]:
        return {Path(name).name: found for name, found in fingerprint(out).items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("ranks")
    tensors: dict = {}
    for i in range(6):
        tensors[f"l.{i}.t"] = ("F32", [700, 900])
        tensors[f"l.{i}.r"] = ("U8", [1_500_000])
    safetensors(folder / "in.safetensors", tensors)
    rules(folder, RULES)
    scene = Scene(folder, {})
    done(*scene.words(folder / "one"), "-q")
    return Scene(folder, scene.made(folder / "one"))


def rank(
    words: list[object], number: int, world: int, *, slow: float | Path = 0, appear: float = APPEAR
) -> subprocess.Popen[str]:
    """One process of a launch."""
    place = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": world}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in place.items()}}
    command = [sys.executable, "-c", MAIN, str(slow), str(appear), *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=HANG)
    return child.returncode, out, err


def launch(words: list[object], world: int, **more: float) -> list[tuple[int, str, str]]:
    return [ended(child) for child in [rank(words, n, world, **more) for n in range(world)]]


def claimed(out: Path, number: int) -> int:
    """The tiles that a rank has claimed."""
    name = f"journal-{number}.jsonl" if number else "journal.jsonl"
    journal = Path(f"{out}.migrate-partial") / name
    return journal.read_bytes().count(b'"tile"') if journal.exists() else 0


def wait_for(out: Path, children: list[subprocess.Popen[str]]) -> None:
    """Until each process has claimed a tile, or one has ended."""
    while min(claimed(out, n) for n in range(len(children))) < 1:
        assert all(child.poll() is None for child in children)
        time.sleep(0.01)


@pytest.mark.parametrize("world", [2, 3])
def test_the_output_does_not_depend_on_the_number_of_processes(
    scene: Scene, tmp_path: Path, world: int
) -> None:
    out = tmp_path / "out"
    found = launch([*scene.words(out), "-q"], world)
    # no process imports torch, and rank 0 alone answers
    assert [(status, err) for status, _, err in found] == [(0, "")] * world
    assert found[0][1].startswith(f"published {out}")
    assert [text for _, text, _ in found[1:]] == [""] * (world - 1)
    assert scene.made(out) == scene.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_ranks_without_a_file_are_counted_in_the_answer(scene: Scene, tmp_path: Path) -> None:
    words = [*scene.words(tmp_path / "out")[:-1], "30MB", "-q"]
    found = launch(words, 3)
    assert [status for status, _, _ in found] == [0, 0, 0], found
    assert "2 ranks had nothing to write: the plan makes 1 file; a smaller" in found[0][1]
    assert [text for _, text, _ in found[1:]] == ["", ""]


@pytest.mark.parametrize(("killed", "world", "then"), [(1, 2, 3), (0, 3, 2), (2, 3, 1)])
def test_a_rank_that_is_killed_ends_all_and_another_number_goes_on(
    scene: Scene, tmp_path: Path, killed: int, world: int, then: int
) -> None:
    out = tmp_path / "out"
    children = [rank(scene.words(out), n, world, slow=0.3) for n in range(world)]
    wait_for(out, children)
    children[killed].send_signal(signal.SIGKILL)
    found = {n: ended(child) for n, child in enumerate(children)}
    assert found.pop(killed)[0] == -signal.SIGKILL
    for status, text, err in found.values():
        assert (status, text) == (4, "")
        assert f"error[M973]: rank {killed} died (process {children[killed].pid} on " in err
        assert "--resume" in err
    assert not out.exists()
    kept = sum(claimed(out, n) for n in range(world))
    assert kept >= world
    if then == 1:
        done(*scene.words(out), "--resume", "-q")
    else:
        again = launch([*scene.words(out), "--resume"], then)
        assert [status for status, _, _ in again] == [0] * then, again
    assert scene.made(out) == scene.wanted
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    with mounted(tmp_path / "disk", "40m", lazily=True) as disk:
        yield disk


def test_a_disk_that_fills_up_under_several_ends_all_and_can_be_resumed(
    scene: Scene, tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE", "1")
    out, gate, filler = small_disk / "out", tmp_path / "gate", small_disk / "filler"
    children = [rank(scene.words(out), n, 3, slow=gate) for n in range(3)]
    wait_for(out, children)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    gate.touch()
    found = [ended(child) for child in children]
    assert [(status, text) for status, text, _ in found] == [(4, "")] * 3, found
    assert any("error[M909]: " in err and "No space left" in err for _, _, err in found), found
    assert all(re.search(r"error\[M9(09|73)\]: ", err) for _, _, err in found), found
    assert not out.exists()
    filler.unlink()
    again = launch([*scene.words(out), "--resume"], 2)
    assert [status for status, _, _ in again] == [0, 0], again
    assert scene.made(out) == scene.wanted
    assert sorted(p.name for p in small_disk.iterdir()) == ["out"]


def test_a_launcher_that_ends_all_lets_each_say_why(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    children = [rank(scene.words(out), n, 3, slow=0.3) for n in range(3)]
    wait_for(out, children)
    children[1].kill()
    children[1].wait()
    for n in (0, 2):
        children[n].terminate()
    for n in (0, 2):
        status, text, err = ended(children[n])
        assert (status, text) == (4, "")
        assert "error[M973]: rank 1 died" in err
    ended(children[1])


def test_a_rank_on_another_source_is_named(scene: Scene, tmp_path: Path) -> None:
    copied = tmp_path / "in.safetensors"
    copied.write_bytes(scene.source.read_bytes())
    words = scene.words(tmp_path / "out")
    other = [copied if word == scene.source else word for word in words]
    first, second = rank(words, 0, 2), rank(other, 1, 2)
    one, two = ended(first), ended(second)
    assert (one[0], two[0], one[1], two[1]) == (4, 4, "", "")
    for text, who in ((one[2], "rank 1"), (two[2], "this process, rank 1,")):
        wanted = (
            rf"error\[M974\]: the ranks do not see the same: {who} sees another source: "
            r"in\.safetensors: inode \d+ instead of \d+"
        )
        assert re.match(wanted, text), text
    assert not (tmp_path / "out").exists()


def test_another_plan_on_one_rank_is_named(scene: Scene, tmp_path: Path) -> None:
    words = scene.words(tmp_path / "out")
    first, second = rank(words, 0, 2), rank([*words[:-1], "5MB"], 1, 2)
    assert "error[M974]: the ranks do not see the same: rank 1 has another plan" in ended(first)[2]
    assert ended(second)[0] == 4


def test_another_output_folder_on_one_rank_is_named(scene: Scene, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    first = rank(scene.words(tmp_path / "out"), 0, 2, appear=5)
    second = rank(scene.words(tmp_path / "elsewhere" / "out"), 1, 2, appear=5)
    one, two = ended(first), ended(second)
    assert (one[0], two[0]) == (4, 4)
    assert f"error[M972]: rank 1 did not appear in {tmp_path}/out.migrate-partial" in one[2]
    assert "file system that they share" in one[2]
    assert "error[M972]: rank 0 did not appear in " in two[2]
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_of_two_launches_on_one_output_one_publishes(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    gate = tmp_path / "gate"
    children = [rank(scene.words(out), n, 2, slow=gate) for n in range(2)]
    wait_for(out, children)
    second = [rank([*scene.words(out), *words], 0, 2, appear=3) for words in ((), ("--resume",))]
    late = rank([*scene.words(out), "--resume"], 1, 2, appear=3)
    for child, what in zip(
        second, ("was left by an earlier run", "another run is using"), strict=True
    ):
        status, text, err = ended(child)
        assert (status, text) == (2, "")
        assert "error[M911]: " in err
        assert what in err
    status, _, err = ended(late)
    assert status == 2
    assert "error[M911]: another run is using" in err
    gate.touch()
    assert [ended(child)[0] for child in children] == [0, 0]
    assert scene.made(out) == scene.wanted


def test_verify_by_several_finds_what_one_finds(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done(*scene.words(out), "-q")
    words = ["verify", out, "--source", scene.source, "--rules", scene.folder / "rules.yaml"]
    words += ["--threads", "2"]
    right = launch([*words, "-q"], 3)
    assert [status for status, _, _ in right] == [0, 0, 0], right
    assert right[0][1] == done(*words, "-q").out
    assert [text for _, text, _ in right[1:]] == ["", ""]
    for file in sorted(out.glob("*.safetensors"))[::4]:
        with file.open("r+b") as opened:
            opened.seek(-7, os.SEEK_END)
            opened.write(b"\x01\x02\x03")
    alone = done(*words, "--format", "json", exit=1)
    wrong = launch([*words, "--format", "json"], 2)
    assert [status for status, _, _ in wrong] == [1, 1]
    assert wrong[0][1] == alone.out
    assert wrong[1][1] == ""
    told = launch(words, 3)
    assert "in 3 processes with 2 threads each: at most " in told[0][2]
    assert "of memory in each for tensors" in told[0][2]
    assert [text for _, _, text in told[1:]] == ["", ""]
    sampled = launch([*words, "--sample", "30%", "-q"], 2)
    assert {status for status, _, _ in sampled} <= {0, 1}
    assert len({status for status, _, _ in sampled}) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("words", [("--chunks", "4"), ("--max-shard-size", "1MB")])
def test_chunks_of_one_tensor_in_files_of_several_ranks(
    scene: Scene, tmp_path: Path, words: tuple[str, ...]
) -> None:
    start = ["apply", scene.source, "--rules", scene.folder / "rules.yaml", "-q"]
    more = ["--output-format", "dcp", *words]
    done(*start, "-o", tmp_path / "one", *more)
    found = launch([*start, "-o", tmp_path / "out", *more], 3)
    assert [status for status, _, _ in found] == [0, 0, 0], found
    assert scene.made(tmp_path / "out") == scene.made(tmp_path / "one")
    # and back, with the checksums of records compared by whoever copies them
    back = ["apply", tmp_path / "out", "-o", tmp_path / "back", "-q", "--max-shard-size", "3MB"]
    found = launch([*back, "--output-format", "safetensors"], 2)
    assert [status for status, _, _ in found] == [0, 0], found
    done("diff", tmp_path / "back", tmp_path / "one", "--tensors-only")


def test_the_errors_of_computed_tensors_are_those_of_all(scene: Scene, tmp_path: Path) -> None:
    safetensors(tmp_path / "in.safetensors", {f"t.{i}": ("F32", [300, 500]) for i in range(5)})
    rule = rules(
        tmp_path,
        "rules: [{name: half, from: 't.{i:int}', to: 'u.{i}', via: [{cast: {to: float16}}]}]\n",
    )
    start = ["apply", tmp_path / "in.safetensors", "--rules", rule, "--allow", "lossy", "-q"]
    start += ["--max-shard-size", "300kB"]
    done(*start, "-o", tmp_path / "one", "--report", tmp_path / "one.json")
    found = launch([*start, "-o", tmp_path / "several", "--report", tmp_path / "several.json"], 3)
    assert [status for status, _, _ in found] == [0, 0, 0], found
    one, several = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "several"))
    assert len(one["tensors"]) == 5
    for what in ("complete", "tensors", "rules"):
        assert several[what] == one[what]
    assert scene.made(tmp_path / "several") == scene.made(tmp_path / "one")


def test_torchrun_launches_apply_verify_and_downgrade(scene: Scene, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    out, back = tmp_path / "out", tmp_path / "back"

    def torchrun(*words: object) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        return subprocess.run(
            [*start, "-m", "migrate", *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    found = torchrun(*scene.words(out))
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("published") == 1
    assert scene.made(out) == scene.wanted
    words = ["verify", out, "--source", scene.source, "--rules", scene.folder / "rules.yaml", "-q"]
    found = torchrun(*words)
    assert found.returncode == 0, found.stderr
    assert found.stdout == done(*words).out
    found = torchrun(
        "downgrade",
        out,
        "-o",
        back,
        "--rules",
        scene.folder / "rules.yaml",
        "--max-shard-size",
        "5MB",
    )
    assert found.returncode == 0, found.stderr
    done("diff", back, scene.source)
    refused = torchrun(*scene.words(out))
    assert refused.returncode == 1
    assert "error[M904]" in refused.stderr
