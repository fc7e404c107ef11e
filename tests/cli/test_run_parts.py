"""Parts of a run: in any order, at the same time, killed, left out, twice, and published."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from commandline import DATA, ROOT, Result, done, fingerprint, rules, run, safetensors, spawn
from work import HANG

from migrate.cli.launcher import part_of
from migrate.core.errors import MigrateError
from migrate.core.types import RunPart

RULES = """rules:
  - {name: turn, from: 'l.{i:int}.t', to: 'l.{i}.turned', via: [{transpose: {dims: [0, 1]}}]}
  - {name: half, from: 'l.{i:int}.h', to: 'l.{i}.half', via: [{cast: {from: float32, to: float16}}]}
  - {name: same, from: 'l.{i:int}.{j:int}.r', to: 'l.{i}.r', via: [{same: {over: j, count: 2}}]}
"""
# a run that takes its time: seconds before each tile is claimed
SLOW = """
import sys, time
from migrate.cli import main
from migrate.running import publish
claim = publish.Partial.claim
def slowly(*arguments):
    claim(*arguments)
    time.sleep(float(sys.argv[1]))
publish.Partial.claim = slowly
sys.exit(main.run(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Scene:
    """A checkpoint of 44 MB, its rules, and what one process makes of them."""

    folder: Path
    wanted: dict[str, str]
    said: dict[str, Any]

    def words(self, out: Path) -> list[object]:
        folder = self.folder
        words = ["apply", folder / "in.safetensors", "-o", out, "--rules", folder / "rules.yaml"]
        return [*words, "--max-shard-size", "6MB", "--allow", "lossy", "-q"]

    def made(self, out: Path) -> dict[str, str]:
        return {Path(name).name: found for name, found in fingerprint(out).items()}

    def part(self, out: Path, number: int, of: int, *more: object, exit: int = 0) -> Result:
        return done(*self.words(out), "--part", f"{number}/{of}", *more, exit=exit)

    def slow(self, out: Path, part: str, seconds: float) -> subprocess.Popen[str]:
        words = [*map(str, self.words(out)), "--part", part, "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", SLOW, str(seconds), *words]
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("parts")
    tensors: dict = {}
    for i in range(8):
        tensors[f"l.{i}.t"] = ("F32", [1000, 1300])
        tensors[f"l.{i}.h"] = ("F32", [200, 300])
        tensors[f"l.{i}.0.r"] = tensors[f"l.{i}.1.r"] = ("U8", [1000], bytes([i]) * 1000)
    safetensors(folder / "in.safetensors", tensors)
    rules(folder, RULES)
    scene = Scene(folder, {}, {})
    said = done(*scene.words(folder / "one"), "--format", "json").json
    return Scene(folder, scene.made(folder / "one"), said)


def claimed(out: Path, number: int) -> int:
    journal = Path(f"{out}.migrate-partial/journal-{number + 1}.jsonl")
    return journal.read_bytes().count(b'"tile"') if journal.exists() else 0


def wait_for(out: Path, number: int, tiles: int, child: subprocess.Popen[str]) -> None:
    while claimed(out, number) < tiles:
        assert child.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_parts_and_publish_give_what_one_process_gives(
    scene: Scene, tmp_path: Path, order: tuple[int, ...]
) -> None:
    out = tmp_path / "out"
    for at, number in enumerate(order):
        said = scene.part(out, number, 3, "--format", "json").json
        assert (said["part"], said["parts"], said["already"]) == (number, 3, False)
        assert said["missing"] == sorted(order[at + 1 :])
        assert said["digest"] == scene.said["digest"]
        assert not out.exists()
    again = done("publish", out, "-q", "--format", "json").json
    # but for the place all that one process says: checksums, bytes, errors
    files = {name: again["files"][name] for name in scene.said["files"]}
    assert {**again, "files": files, "path": ""} == {**scene.said, "path": ""}
    assert again["report"]["complete"] is True
    assert scene.made(out) == scene.wanted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_parts_at_the_same_time_begin_once(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    children = [spawn(*scene.words(out), "--part", f"{n}/4") for n in range(4)]
    found = [(child.communicate(timeout=HANG), child.returncode) for child in children]
    assert [status for _, status in found] == [0] * 4, found
    done("publish", out, "-q")
    assert scene.made(out) == scene.wanted


def test_a_part_that_is_killed_three_times_goes_on(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scene.part(out, 1, 2)
    for tiles in (1, 2, 3):
        child = scene.slow(out, "0/2", 0.3)
        wait_for(out, 0, tiles, child)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=HANG)
        assert child.returncode == -signal.SIGKILL
    refused = run("publish", out)
    assert refused.exit == 2
    assert "error[M984]: 1 part of 2 is not done: 0/2" in refused.err
    assert "part 0/2 ended early" in refused.err
    # without --resume: a part goes on by itself
    said = scene.part(out, 0, 2, "--format", "json").json
    sizes = [file["size"] for file in said["files"].values()]
    assert 0 < said["bytes_written"] < sum(sizes)
    done("publish", out, "-q")
    assert scene.made(out) == scene.wanted


def test_a_part_at_work_is_not_published_and_not_begun_twice(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    child = scene.slow(out, "0/2", 0.5)
    wait_for(out, 0, 1, child)
    twice = run(*scene.words(out), "--part", "0/2")
    assert (twice.exit, "error[M911]: another run is using" in twice.err) == (2, True)
    # nor does a run that is none of parts take the folder over
    whole = run(*scene.words(out), "--resume")
    assert (whole.exit, "error[M911]: another run is using" in whole.err) == (2, True)
    scene.part(out, 1, 2)
    refused = run("publish", out)
    assert refused.exit == 2
    assert "part 0/2 is at work" in refused.err
    child.communicate(timeout=HANG)
    assert child.returncode == 0
    done("publish", out, "-q")
    assert scene.made(out) == scene.wanted


def test_a_part_does_not_join_a_run_that_is_at_work_alone(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scene.part(out, 0, 2)
    with open(tmp_path / "out.migrate-partial" / "journal.jsonl", "rb") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        refused = run(*scene.words(out), "--part", "1/2")
    assert refused.exit == 2
    assert "error[M911]: a run that is not one of parts is using" in refused.err


def test_a_part_that_is_done_has_nothing_to_do(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = scene.part(out, 0, 2, "--format", "json").json
    again = scene.part(out, 0, 2, "--format", "json").json
    assert again == {**first, "already": True, "bytes_written": 0}
    assert "part 0/2 is done before" in scene.part(out, 0, 2).out
    # a file that is gone is written again
    shutil.rmtree(tmp_path / "out.migrate-partial" / "data")
    assert scene.part(out, 0, 2, "--format", "json").json == first


def test_what_parts_left_is_finished_by_one_process(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scene.part(out, 1, 3)
    refused = run(*scene.words(out))
    assert (refused.exit, "error[M911]" in refused.err) == (2, True)
    said = done(*scene.words(out), "--resume", "--format", "json").json
    assert said["bytes_written"] < scene.said["bytes_written"]
    assert scene.made(out) == scene.wanted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_part_goes_on_with_what_one_process_left(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [*map(str, scene.words(out)), "--threads", "1"]
    command = [sys.executable, "-c", SLOW, "0.3", *words]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    journal = tmp_path / "out.migrate-partial" / "journal.jsonl"
    while not journal.exists() or journal.read_bytes().count(b'"tile"') < 2:
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    said = [scene.part(out, n, 2, "--format", "json").json for n in range(2)]
    assert sum(one["bytes_written"] for one in said) < scene.said["bytes_written"]
    done("publish", out, "-q")
    assert scene.made(out) == scene.wanted


def test_missing_parts_are_named(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scene.part(out, 2, 4)
    refused = run("publish", out)
    assert refused.exit == 2
    assert "error[M984]: 3 parts of 4 are not done: 0/4, 1/4, 3/4" in refused.err
    assert "part 3/4 was not begun" in refused.err
    assert "--part 0/4" in refused.err
    assert not out.exists()


def test_there_is_nothing_to_publish(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = run("publish", out)
    assert refused.exit == 2
    assert "error[M983]: there are no parts of" in refused.err
    assert "does not exist" in refused.err
    scene.part(out, 0, 1)
    done("publish", out, "-q")
    twice = run("publish", out)
    assert twice.exit == 2
    assert "error[M983]: " in twice.err
    assert "is there already" in twice.err
    (tmp_path / "x.migrate-partial").mkdir()
    assert "was not begun by parts" in run("publish", tmp_path / "x").err


def test_other_parts_and_other_plans_are_refused(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    scene.part(out, 0, 3)
    other = run(*scene.words(out), "--part", "0/4")
    assert other.exit == 2
    assert "error[M918]: " in other.err
    assert "was begun with 3 parts, and this is part 0/4" in other.err
    plan = run(*scene.words(out), "--max-shard-size", "3MB", "--part", "1/3")
    assert plan.exit == 2
    assert "error[M918]: " in plan.err
    assert "belongs to another plan" in plan.err


def test_a_source_that_changed_meanwhile_is_refused(scene: Scene, tmp_path: Path) -> None:
    shutil.copytree(scene.folder, tmp_path / "in", ignore=shutil.ignore_patterns("one"))
    own, out = replace(scene, folder=tmp_path / "in"), tmp_path / "out"
    for number in range(2):
        own.part(out, number, 3)
    os.utime(tmp_path / "in" / "in.safetensors", ns=(1, 1))
    part = run(*own.words(out), "--part", "2/3")
    assert part.exit == 2
    assert "error[M918]: " in part.err
    assert "another state of the source: in.safetensors" in part.err
    shutil.copy(
        tmp_path / "out.migrate-partial" / "parts" / "1.json",
        tmp_path / "out.migrate-partial" / "parts" / "2.json",
    )
    refused = run("publish", out)
    assert refused.exit == 2
    assert "error[M903]: the source is not what it was when the plan was made" in refused.err


def test_what_a_part_says_is_not_believed_of_another_plan(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in range(2):
        scene.part(out, number, 2)
    said = tmp_path / "out.migrate-partial" / "parts" / "1.json"
    found = json.loads(said.read_text())
    said.write_text(json.dumps({**found, "digest": "m1:" + "0" * 64}))
    assert "1 part of 2 is not done: 1/2" in run("publish", out).err
    said.write_text("{")
    assert "1 part of 2 is not done: 1/2" in run("publish", out).err


def test_checks_of_values_are_made_once_over_all_parts(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import tiles

    made: list[int] = []
    require = tiles.require_checks

    def counted(checks: Any, *arguments: Any) -> None:
        made.append(len(checks))
        require(checks, *arguments)

    monkeypatch.setattr(tiles, "require_checks", counted)
    done(*scene.words(tmp_path / "one"))
    alone, made[:] = list(made), []
    for number in range(3):
        scene.part(tmp_path / "out", number, 3)
    done("publish", tmp_path / "out", "-q")
    assert sum(made) == sum(alone) == 8
    assert max(made) == 3


def test_values_that_differ_refuse_the_part_and_keep_the_others(
    scene: Scene, tmp_path: Path
) -> None:
    tensors: dict = {f"l.0.{j}.r": ("U8", [1000], bytes([j]) * 1000) for j in range(2)}
    tensors |= {"l.0.t": ("F32", [100, 100]), "l.0.h": ("F32", [10, 10])}
    safetensors(tmp_path / "in.safetensors", tensors)
    shutil.copy(scene.folder / "rules.yaml", tmp_path)
    own, out = replace(scene, folder=tmp_path), tmp_path / "out"
    small = ("--max-shard-size", "10kB")
    found = [run(*own.words(out), *small, "--part", f"{n}/2") for n in (1, 0)]
    assert [one.exit for one in found] == [0, 3], found
    assert (tmp_path / "out.migrate-partial" / "parts" / "1.json").exists()
    assert "1 part of 2 is not done: 0/2" in run("publish", out).err


def test_parts_that_have_no_file_say_so(tmp_path: Path) -> None:
    safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1000])})
    rule = rules(tmp_path, "rules: [{name: a, from: a, to: b}]\n")
    words = ["apply", tmp_path / "in.safetensors", "--rules", rule, "-q"]
    for number in range(2):
        out = [*words, "-o", tmp_path / "out.safetensors"]
        said = done(*out, "--part", f"{number}/2", "--format", "json").json
        assert bool(said["files"]) is not bool(said["notes"])
    done("publish", tmp_path / "out.safetensors", "-q")
    done(*words, "-o", tmp_path / "one.safetensors")
    one, other = (tmp_path / f"{name}.safetensors" for name in ("one", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_a_value_that_two_parts_need_is_said(tmp_path: Path) -> None:
    safetensors(tmp_path / "in.safetensors", {"a": ("F32", [1000, 100])})
    rule = rules(
        tmp_path,
        "rules: [{name: cut, from: a, to: 'a.{i:int}',"
        " via: [{cast: {to: float16}}, {split: {into: i, dim: 0, count: 2}}]}]\n",
    )
    words = ["apply", tmp_path / "in.safetensors", "--rules", rule, "--allow", "lossy", "-q"]
    words += ["--max-shard-size", "150kB"]
    done(*words, "-o", tmp_path / "one")
    parts = [*words, "-o", tmp_path / "out", "--format", "json"]
    planned = done(*parts, "--part", "0/2", "--dry-run")
    assert "1 value is computed by several parts" in planned.json["notes"][0]
    assert not done(*parts, "--dry-run").json["notes"]
    # which does not keep that plan from being run, by however many
    (tmp_path / "plan.json").write_text(planned.out)
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "by_plan", "-q")
    said = [done(*parts, "--part", f"{n}/2").json for n in range(2)]
    for one in said:
        assert "1 value is computed by several parts" in one["notes"][0]
    done("publish", tmp_path / "out", "-q")
    one, other, planned_one = (
        list(fingerprint(tmp_path / name).values()) for name in ("one", "out", "by_plan")
    )
    assert one == other == planned_one


@pytest.mark.parametrize("words", [("--chunks", "4"), ("--max-shard-size", "4MB")])
def test_parts_of_a_distributed_checkpoint(
    scene: Scene, tmp_path: Path, words: tuple[str, ...]
) -> None:
    more = ["--output-format", "dcp", *words]
    done(*scene.words(tmp_path / "one"), *more)
    for number in range(3):
        done(*scene.words(tmp_path / "out"), *more, "--part", f"{number}/3")
    done("publish", tmp_path / "out", "-q")
    assert scene.made(tmp_path / "out") == scene.made(tmp_path / "one")


def test_the_way_back_by_parts(scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = ["downgrade", scene.folder / "one", "--rules", scene.folder / "rules.yaml"]
    start += ["--allow", "lossy", "--max-shard-size", "4MB", "-q"]
    alone = done(*start, "-o", tmp_path / "back", "--format", "json").json
    for number in range(3):
        done(*start, "-o", out, "--part", f"{number}/3")
    again = done("publish", out, "-q", "--format", "json").json
    files = {name: again["files"][name] for name in alone["files"]}
    assert {**again, "files": files, "path": ""} == {**alone, "path": ""}
    assert scene.made(out) == scene.made(tmp_path / "back")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("5/4", "parts of 4 are 0/4 to 3/4"),
        ("3/3", "parts of 3 are 0/3 to 2/3"),
        ("0/0", "count from 0"),
        ("-1/3", "names no part"),
        ("1", "names no part"),
        ("x/y", "names no part"),
        ("1/99999999999", "there is no part"),
        ("slurm", "SLURM_ARRAY_TASK_ID"),
    ],
)
def test_what_names_no_part(
    scene: Scene, tmp_path: Path, text: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    refused = run(*scene.words(tmp_path / "out"), "--part", text)
    assert refused.exit == 2
    assert "error[M115]: " in refused.err
    assert what in refused.err
    assert list(tmp_path.iterdir()) == []


def test_parts_are_not_for_ranks_reports_and_undo(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*scene.words(tmp_path / "out"), "--part", "0/2"]
    undo = run(*words, "--undo", tmp_path / "undo")
    assert "error[M115]: --undo is not for parts of a run" in undo.err
    report = run(*words, "--report", tmp_path / "report.json")
    assert report.exit == 2
    assert "`migrate publish` saves it" in report.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = run(*words)
    assert "error[M115]: --part 0/2 in one of 2 processes of a launcher" in ranks.err
    assert "--ranks off" in ranks.err
    assert done(*words, "--ranks", "off").out.startswith("part 0/2 is done")


def array(task: int, first: int, last: int, count: int) -> dict[str, str]:
    said = {"ID": task, "MIN": first, "MAX": last, "COUNT": count}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in said.items()}


def test_the_task_of_a_slurm_array() -> None:
    assert part_of("slurm", array(0, 0, 3, 4)) == RunPart(0, 4)
    assert part_of("slurm", array(7, 1, 7, 7)) == RunPart(6, 7)
    # --array=0-10:2
    assert part_of("slurm", array(4, 0, 10, 6)) == RunPart(2, 6)
    assert part_of("slurm", array(9, 9, 9, 1)) == RunPart(0, 1)
    # never without the option
    assert part_of(None, array(0, 0, 3, 4)) is None
    # --array=1,3,7; and --array=0-9,20, of which a task falls between two steps
    for uneven in (array(3, 1, 7, 3), array(2, 0, 20, 11)):
        with pytest.raises(MigrateError, match="no numbers with equal steps"):
            part_of("slurm", {**uneven, "SLURM_ARRAY_TASK_ID": "3"})


def test_a_slurm_array_writes_a_checkpoint(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for task in (2, 3, 1):
        for name, value in array(task, 1, 3, 3).items():
            monkeypatch.setenv(name, value)
        done(*scene.words(out), "--part", "slurm")
    done("publish", out, "-q")
    assert scene.made(out) == scene.wanted


def shown(page: str, start: str) -> str:
    """The block of a page that begins so."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return next(b for b in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if b.startswith(start))


def a_shell_in(folder: Path) -> dict[str, str]:
    """An environment with the commands of the page, and what they are about."""
    for name, module in (("migrate", "migrate"), ("torchrun", "torch.distributed.run")):
        (folder / "bin").mkdir(exist_ok=True)
        place = folder / "bin" / name
        place.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        place.chmod(0o755)
    shutil.copytree(DATA / "mixtral__v4" / "hub", folder / "OLD")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}


def test_the_array_of_the_page(tmp_path: Path) -> None:
    environment = a_shell_in(tmp_path)
    (tmp_path / "array.sh").write_text(shown("scale.md", "#!/bin/bash").replace("2GB", "2kB"))
    for task in range(8):
        one = {**environment, **array(task, 0, 7, 8)}
        subprocess.run(["bash", "array.sh"], cwd=tmp_path, env=one, check=True, timeout=HANG)
    line = shown("scale.md", "migrate publish NEW")
    subprocess.run(line, shell=True, cwd=tmp_path, env=environment, check=True, timeout=HANG)
    words = ["apply", "OLD", "-o", "ONE", "--to", "hf-mixtral@v5", "--max-shard-size", "2kB", "-q"]
    done(*words, cwd=tmp_path)
    one, other = (fingerprint(tmp_path / name).values() for name in ("ONE", "NEW"))
    assert list(one) == list(other)
    assert len(one) > 8


@pytest.mark.ranks
def test_the_launch_of_the_page(tmp_path: Path) -> None:
    environment = a_shell_in(tmp_path)
    line = shown("scale.md", "torchrun").replace("2GB", "2kB")
    subprocess.run(line, shell=True, cwd=tmp_path, env=environment, check=True, timeout=HANG)
    words = ["apply", "OLD", "-o", "ONE", "--to", "hf-mixtral@v5", "--max-shard-size", "2kB", "-q"]
    done(*words, cwd=tmp_path)
    one, other = (fingerprint(tmp_path / name).values() for name in ("ONE", "NEW"))
    assert list(one) == list(other)


def test_a_cluster_without_its_library(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import ray_run

    monkeypatch.setattr(ray_run, "is_installed", lambda: False)
    refused = run(*scene.words(tmp_path / "out"), "--on", "ray")
    assert refused.exit == 2
    assert "error[M967]: --on ray needs Ray, which is not installed" in refused.err
    assert "pip install 'ckpt-migrate[ray]'" in refused.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("on", ["dask", "ray://", "ray:/x", ""])
def test_what_names_no_cluster(scene: Scene, tmp_path: Path, on: str) -> None:
    refused = run(*scene.words(tmp_path / "out"), "--on", on)
    assert refused.exit == 2
    assert "error[M115]: " in refused.err
    assert "names no cluster" in refused.err


def test_a_cluster_and_parts_contradict_each_other(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import ray_run

    monkeypatch.setattr(ray_run, "is_installed", lambda: True)
    refused = run(*scene.words(tmp_path / "out"), "--on", "ray", "--part", "0/2")
    assert refused.exit == 2
    assert "error[M115]: --on ray and --part 0/2 contradict each other" in refused.err
