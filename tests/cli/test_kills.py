"""kill -9 at random moments: the target is whole or absent, the source untouched, and --resume ends
in the same bytes.

Three kills in every run of the suite, ten under the mark `thorough`, two hundred under
`make campaign`. The seed of each is its number.
"""

from __future__ import annotations

import filecmp
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import fingerprint, rules, run, safetensors, shell, spawn
from marks import thorough
from work import HANG

RULES = """rules:
  - {name: fuse, from: 'l.{i:int}.e.{e:int}.{w:a|b}', to: 'l.{i}.{w}', via: [{stack: {over: e}}]}
  - {name: turn, from: 'l.{i:int}.t', to: 'l.{i}.turned', via: [{transpose: {dims: [0, 1]}}]}
  - {name: keep, from: 'l.{i:int}.r', to: 'l.{i}.renamed'}
"""


@dataclass(frozen=True)
class Scene:
    """A checkpoint of about 64 MB, its rules, what comes of it, how long that takes in all and from
    the first sign on.
    """

    folder: Path
    source: Path
    rule: Path
    wanted: Path
    whole: float
    writing: float
    lines: int

    def arguments(self, out: Path) -> list[object]:
        return [
            "apply",
            self.source,
            "-o",
            out,
            "--rules",
            self.rule,
            "--max-shard-size",
            "9MB",
            "--no-fsync",
            "-q",
        ]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("kills")
    bits = random.Random(0)
    tensors: dict = {}
    for i in range(8):
        for e in range(3):
            for w in "ab":
                tensors[f"l.{i}.e.{e}.{w}"] = ("U8", [1 << 20], bits.randbytes(1 << 20))
        tensors[f"l.{i}.t"] = ("BF16", [640, 800], bits.randbytes(640 * 800 * 2))
        tensors[f"l.{i}.r"] = ("U8", [1 << 20], bits.randbytes(1 << 20))
    source, rule, wanted = (
        safetensors(folder / "in.safetensors", tensors),
        rules(folder, RULES),
        folder / "wanted",
    )
    scene = Scene(folder, source, rule, wanted, 0, 0, 0)
    started = time.monotonic()
    child = spawn(*scene.arguments(wanted))
    wait_for(partial(wanted), child)
    seen = time.monotonic()
    assert child.communicate(timeout=HANG)[1] == ""
    assert child.returncode == 0
    ended = time.monotonic()
    lines = sum(-(-f.stat().st_size // (4 << 20)) for f in wanted.glob("*.safetensors"))
    return Scene(folder, source, rule, wanted, ended - started, ended - seen, lines)


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".migrate-partial")


def wait_for(path: Path, child: object, lines: int = 0) -> None:
    """Until `path` is there, with so many lines, or the child has ended."""
    while child.poll() is None:  # type: ignore[attr-defined]
        try:
            if not lines and path.exists():
                return
            if lines and path.read_bytes().count(b"\n") > lines:
                return
        except OSError:
            pass
        time.sleep(0.0003)


def kill(scene: Scene, out: Path, chance: random.Random, *more: str) -> None:
    """Starts a run and kills it: at any moment, some time after its first sign, or after some lines
    of its journal.
    """
    child = spawn(*scene.arguments(out), *more)
    moment = chance.randrange(3)
    if moment == 0:
        time.sleep(chance.uniform(0, scene.whole))
    elif moment == 1:
        wait_for(partial(out), child)
        time.sleep(chance.uniform(0, scene.writing))
    else:
        wait_for(partial(out) / "journal.jsonl", child, chance.randint(1, scene.lines))
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=HANG)


def assert_whole(scene: Scene, out: Path) -> None:
    names = sorted(p.name for p in scene.wanted.iterdir())
    assert sorted(p.name for p in out.iterdir()) == names
    _, different, unreadable = filecmp.cmpfiles(scene.wanted, out, names, shallow=False)
    assert (different, unreadable) == ([], [])
    assert not partial(out).exists()


def one(scene: Scene, seed: int) -> str:
    """One kill (or several on end) and the resumed run; what the kill found: absent, begun or
    whole.
    """
    chance = random.Random(seed)
    out = scene.folder / f"out{seed}"
    kill(scene, out, chance)
    while not out.exists() and chance.random() < 0.25:
        kill(scene, out, chance, "--resume")
    found = "whole" if out.exists() else "begun" if partial(out).exists() else "absent"
    if found != "whole":
        resumed = shell(*scene.arguments(out), "--resume")
        assert resumed.exit == 0, resumed.err
    elif partial(out).exists():
        # killed between the rename and the removal of what is left
        shutil.rmtree(partial(out))
    assert_whole(scene, out)
    shutil.rmtree(out)
    return found


def survive(scene: Scene, kills: int, first: int) -> None:
    before = fingerprint(scene.source)
    found = [one(scene, first + seed) for seed in range(kills)]
    assert fingerprint(scene.source) == before
    assert "begun" in found


# the first two of the few wait for a line of the journal
@pytest.mark.parametrize(("kills", "first"), thorough([(3, 5), (10, 0)]))
def test_kills_are_survived(scene: Scene, kills: int, first: int) -> None:
    survive(scene, kills, first)


@pytest.mark.campaign
def test_two_hundred_kills_are_survived(scene: Scene) -> None:
    survive(scene, 200, 1000)


def test_a_claim_of_the_journal_that_is_not_true_is_written_again(scene: Scene) -> None:
    out = scene.folder / "lied"
    child = spawn(*scene.arguments(out))
    wait_for(partial(out) / "journal.jsonl", child, 4)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=HANG)
    if out.exists():
        pytest.skip("the run was faster than the kill")
    for file in (partial(out) / "data").glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(b"a power cut lost this")
    assert run(*scene.arguments(out), "--resume").exit == 0
    assert_whole(scene, out)
