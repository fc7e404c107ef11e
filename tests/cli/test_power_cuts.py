"""A power cut at any moment of a run: the disk is left as it was at that instant, and the output is
absent or complete.

The output lies on an ext4 image on an XFS image: a clone of the inner image is what a disk would
hold when the power goes, all that the kernel had not written yet is missing in it. The clone is
mounted and looked at. A run without fsync is the control: there the same look has to find an output
that is damaged, or it would find nothing anywhere.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import contents, rules, safetensors, shell, spawn

RULES = """rules:
  - {name: fuse, from: 'l.{i:int}.e.{e:int}', to: 'l.{i}.e', via: [{stack: {over: e}}]}
"""
MIB = 1 << 20


def system(*command: object) -> None:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]} is not possible here: {done.stderr.strip()}")


class Disk:
    """An ext4 file system at `path` whose power can be cut: `cut()` mounts what would be left of it
    at `after`.

    ext4 commits every second, so that a name may well be on the disk before the bytes behind it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outer, self.path, self.after = (folder / name for name in ("outer", "disk", "after"))
        self._mounted: list[Path] = []

    def make(self) -> None:
        folder = self.folder
        for path in (self.outer, self.path, self.after):
            path.mkdir()
        self._image(folder / "outer.image", 1600, "mkfs.xfs", "-q", "-m", "reflink=1")
        self._mount(folder / "outer.image", self.outer)
        self._image(self.outer / "image", 400, "mkfs.ext4", "-q", "-F")
        self._mount(self.outer / "image", self.path, ",commit=1")

    @staticmethod
    def _image(path: Path, mib: int, *mkfs: str) -> None:
        with path.open("wb") as file:
            file.truncate(mib * MIB)
        system(*mkfs, path)

    def _mount(self, image: Path, at: Path, options: str = "") -> None:
        system("mount", "-o", "loop" + options, image, at)
        self._mounted.append(at)

    def unmount(self, at: Path) -> None:
        subprocess.run(["umount", str(at)], check=True)
        self._mounted.remove(at)

    def cut(self) -> None:
        """What a disk would hold now stands at `after`."""
        if self.after in self._mounted:
            self.unmount(self.after)
        copy = self.outer / "copy"
        copy.unlink(missing_ok=True)
        subprocess.run(["cp", "--reflink=always", str(self.outer / "image"), str(copy)], check=True)
        self._mount(copy, self.after)

    def close(self) -> None:
        for path in reversed(self._mounted[:]):
            self.unmount(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    try:
        made.make()
        yield made
    finally:
        made.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of 48 MB and a rule for it, on the machine's own disk."""
    bits = random.Random(0)
    tensors = {
        f"l.{i}.e.{e}": ("U8", [4 * MIB], bits.randbytes(4 * MIB))
        for i in range(4)
        for e in range(3)
    }
    return safetensors(tmp_path / "in.safetensors", tensors), rules(tmp_path, RULES)


def whole(out: Path, wanted: dict) -> bool:
    try:
        return contents(out) == wanted
    except (ValueError, OSError):
        return False


@pytest.mark.campaign
def test_thirty_power_cuts_leave_an_output_that_is_absent_or_complete(
    disk: Disk, checkpoint: tuple[Path, Path], tmp_path: Path
) -> None:
    source, rule = checkpoint
    arguments = ("apply", source, "--rules", rule, "--max-shard-size", "13MB", "-q", "-o")
    started = time.monotonic()
    assert shell(*arguments, disk.path / "first").exit == 0
    longest = time.monotonic() - started
    wanted = contents(disk.path / "first")
    shutil.rmtree(disk.path / "first")

    found = []
    for seed in range(30):
        chance = random.Random(seed)
        child = spawn(*arguments, disk.path / "out")
        # some just when the run says that it is done: what it said has to be true
        time.sleep(chance.uniform(0.2, 1.0) * longest) if seed % 5 else child.wait(timeout=300)
        done = child.poll() == 0
        disk.cut()
        child.communicate(timeout=300)
        there, partial = disk.after / "out", disk.after / "out.migrate-partial"
        if there.exists():
            assert whole(there, wanted), f"cut {seed}: the output is there and not whole"
        else:
            assert not done, f"cut {seed}: the run had said that the output is there"
            # what a resumed run takes over from the disk is what really lies there
            resumed = shell(*arguments, there, *(["--resume"] if partial.exists() else []))
            assert resumed.exit == 0, resumed.err
            assert whole(there, wanted)
        found.append("whole" if done else "begun" if partial.exists() else "absent")
        shutil.rmtree(disk.path / "out", ignore_errors=True)
    assert {"whole", "begun"} <= set(found), found


@pytest.mark.campaign
def test_without_fsync_a_power_cut_does_damage(disk: Disk, checkpoint: tuple[Path, Path]) -> None:
    source, rule = checkpoint
    arguments = ("apply", source, "--rules", rule, "--no-fsync", "-q", "-o")
    damaged = 0
    for seed in range(5):
        out = f"out{seed}"
        assert shell(*arguments, disk.path / out).exit == 0
        wanted = contents(disk.path / out)
        # one commit of the names, long before the kernel begins to write bytes that wait
        time.sleep(1.5)
        disk.cut()
        damaged += not whole(disk.after / out, wanted)
        shutil.rmtree(disk.path / out)
    assert damaged
