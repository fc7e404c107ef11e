"""A system call fails: every call of ours on every file of a run, one run per fault, injected from
outside by strace.

First a run is traced, so that the list of calls is what the program does and not what somebody
wrote down. Then each call fails once: the exit status is documented, no traceback is shown, an
output is whole or absent, a partial folder is named and can be resumed to the same bytes, and the
source stays as it was.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import Result, environment, fingerprint, rules, run, safetensors, shards

from migrate.core.errors import page

FAULTS = ("ENOSPC", "EIO", "EMFILE", "EACCES")
# what ends a call on a file that we make or read; calls that only ask about the process are left
# out
CALLS = (
    "openat,read,pread64,preadv,preadv2,write,pwrite64,pwritev,fsync,fdatasync,ftruncate,fallocate,renameat2,renameat,rename,link,linkat,"
    "mkdir,mkdirat,rmdir,unlink,unlinkat,newfstatat,fstat,lstat,stat,statx,statfs,fstatfs,getdents64,flock,ioctl,copy_file_range,sendfile,"
    "readlink,readlinkat,access,faccessat,faccessat2,utimensat,fchmod,chmod,close"
)
# those whose first two arguments are a folder and a name in it
AT = {
    "openat",
    "newfstatat",
    "unlinkat",
    "mkdirat",
    "renameat",
    "renameat2",
    "linkat",
    "statx",
    "readlinkat",
    "faccessat",
    "faccessat2",
}
RULES = """rules:
  - {name: fuse, from: 'l.{i:int}.e.{e:int}', to: 'l.{i}.e', via: [{stack: {over: e}}]}
  - {name: widen, from: 'l.{i:int}.r', to: 'l.{i}.w', via: [{cast: {to: float32, from: bfloat16}}]}
"""
LINE = re.compile(r"^(?:\d+\s+)?(\w+)\((.*)$")


@dataclass(frozen=True)
class Fault:
    """The `number`-th call `call` on `path` fails with `error`."""

    call: str
    path: str
    number: int
    error: str

    def __str__(self) -> str:
        return f"{self.call} number {self.number} on {self.path}: {self.error}"


@dataclass(frozen=True)
class Scene:
    """A command line that runs in `folder`, what it makes, and how that looks when nothing fails.

    A command that only answers makes nothing: `made` is a place that stays empty.
    """

    folder: Path
    arguments: tuple[str, ...]
    made: Path
    wanted: Path

    @property
    def partial(self) -> Path:
        return self.made.with_name(self.made.name + ".migrate-partial")


def strace(*options: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    return ["strace", "-f", "-qq", *options, sys.executable, "-m", "migrate"]


def traced(scene: Scene, *options: str, more: tuple[str, ...] = ()) -> Result:
    child = subprocess.run(
        [*strace(*options), *scene.arguments, *more],
        cwd=scene.folder,
        # the folder of the scene is not searched for modules: these calls are not ours
        env={**environment(), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Result(child.returncode, child.stdout, child.stderr)


def subject(call: str, rest: str, folder: str) -> str | None:
    """What `strace -P` has to be given for a traced call on something below `folder`: the name as
    it was passed, or a descriptor's path.
    """
    folders = re.match(r'(AT_FDCWD|\d+)<([^<>]*)>, "([^"]*)"', rest) if call in AT else None
    if folders is not None:
        whole, given = os.path.join(folders[2], folders[3]), folders[3] or folders[2]
    elif (named := re.match(r'"([^"]*)"', rest)) is not None:
        whole, given = os.path.join(folder, named[1]), named[1]
    elif (opened := re.match(r"\d+<([^<>]*)>", rest)) is not None:
        whole = given = opened[1]
    else:
        return None
    return given if os.path.normpath(whole).startswith(folder) else None


def calls(scene: Scene) -> Counter[tuple[str, str]]:
    """(call, path) -> how often a run that succeeds makes it."""
    log = scene.folder.parent / "trace"
    result = traced(scene, "-y", "-e", f"trace={CALLS}", "-s", "300", "-o", str(log))
    if result.exit == 1 and "PTRACE" in result.err:
        pytest.skip("processes may not be traced here")
    assert result.exit == 0, result.err
    found: Counter[tuple[str, str]] = Counter()
    for line in log.read_text(errors="replace").splitlines():
        match = None if "resumed>" in line else LINE.match(line)
        given = None if match is None else subject(match[1], match[2], str(scene.folder))
        if match is not None and given is not None:
            found[match[1], given] += 1
    return found


def clean(scene: Scene) -> None:
    for path in (scene.made, scene.partial):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()


def same(made: Path, wanted: Path) -> bool:
    if made.is_dir() != wanted.is_dir():
        return False
    if wanted.is_file():
        return filecmp.cmp(made, wanted, shallow=False)
    names = sorted(str(p.relative_to(wanted)) for p in wanted.rglob("*") if p.is_file())
    there = sorted(str(p.relative_to(made)) for p in made.rglob("*") if p.is_file())
    return names == there and filecmp.cmpfiles(made, wanted, names, shallow=False)[1:] == ([], [])


def complaint(scene: Scene, fault: Fault) -> str | None:
    """What is wrong with how a run took the fault; None if nothing is."""
    result = traced(
        scene,
        "-o",
        "/dev/null",
        "-P",
        fault.path,
        "-e",
        f"inject={fault.call}:error={fault.error}:when={fault.number}",
    )
    said = f"{result.out}{result.err}"[:1500]
    there, partial = scene.made.exists(), scene.partial.exists()
    codes = re.findall(r"error\[(M\d+)\]", result.err)
    if result.exit not in (0, 2, 3, 4):
        return f"exit {result.exit}: {said}"
    if "Traceback" in said:
        return f"a traceback: {said}"
    if result.exit and (not codes or {page(c).exit for c in codes} != {result.exit}):
        return f"exit {result.exit} with codes {codes}: {said}"
    if there and not same(scene.made, scene.wanted):
        return f"the output is there and not whole: {said}"
    if result.exit == 0 and there != scene.wanted.exists():
        return f"exit 0 and no output: {said}"
    if result.exit and there and "published" not in said:
        return f"the output is there, and the message does not say so: {said}"
    if partial and scene.partial.name not in said:
        return f"a partial folder is left without a word: {said}"
    if partial and not there and scene.arguments[0] in ("apply", "downgrade"):
        resumed = traced(scene, "-o", "/dev/null", "-e", "trace=none", more=("--resume",))
        if resumed.exit or not same(scene.made, scene.wanted):
            return f"cannot be resumed: {said}\nthen: {resumed.err[:1500]}"
    return None


def scenes(root: Path) -> Iterator[tuple[str, Scene]]:
    tensors: dict = {}
    for i in range(2):
        tensors.update({f"l.{i}.e.{e}": ("BF16", [8, 16]) for e in range(2)})
        tensors[f"l.{i}.r"] = ("BF16", [4])
    for kind in ("folder", "file", "torch"):
        folder = root / kind / "work"
        rule = rules(folder, RULES, "fuse.yaml")
        if kind == "folder":
            half = len(tensors) // 2
            source = shards(
                folder / "in",
                [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])],
            )
            (source / "config.json").write_text('{"model_type": "none"}\n')
        else:
            source = safetensors(folder / "in.safetensors", tensors)
        made = folder / (
            "out" if kind == "folder" else "out.safetensors" if kind == "file" else "out.pt"
        )
        arguments = ("apply", source.name, "-o", made.name, "--rules", rule.name, "-q")
        yield kind, Scene(folder, arguments, made, folder.parent / f"wanted{made.suffix}")


# commands on a checkpoint `in.safetensors`, and on `new.safetensors` that was made of it
READING = {
    "inspect": ("inspect", "new.safetensors"),
    "plan": ("plan", "in.safetensors", "--rules", "fuse.yaml"),
    "verify": (
        "verify",
        "new.safetensors",
        "--source",
        "in.safetensors",
        "--rules",
        "fuse.yaml",
        "-q",
    ),
    "diff": ("diff", "new.safetensors", "new.safetensors", "-q"),
    "history": ("history", "new.safetensors"),
}


def reading(root: Path, command: str) -> Scene:
    """A scene in which nothing is written."""
    first = dict(scenes(root))["file"]
    arguments = ("apply", "in.safetensors", "-o", "new.safetensors", "--rules", "fuse.yaml", "-q")
    assert run(*arguments, cwd=first.folder).exit == 0
    return Scene(
        first.folder, READING[command], first.folder / "nothing", first.folder / "nothing-either"
    )


def prepared(root: Path, kind: str) -> tuple[Scene, Counter[tuple[str, str]]]:
    """The scene, with what it makes when nothing fails, and the calls that made it."""
    if kind in READING:
        scene = reading(root, kind)
        return scene, calls(scene)
    scene = dict(scenes(root))[kind]
    found = calls(scene)
    scene.made.rename(scene.wanted)
    return scene, found


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["folder", "file", "torch", *READING])
def test_each_system_call_may_fail(tmp_path: Path, kind: str) -> None:
    scene, found = prepared(tmp_path, kind)
    assert ({"openat"} if kind in READING else {"openat", "fsync", "pwrite64"}) <= {
        call for call, _ in found
    }
    before = fingerprint(scene.folder)
    complaints, tried = [], 0
    for (call, path), count in sorted(found.items()):
        for number in sorted({1, count}):
            for error in FAULTS:
                fault = Fault(call, path, number, error)
                wrong = complaint(scene, fault)
                tried += 1
                clean(scene)
                if wrong:
                    complaints.append(f"{fault}\n    {wrong}")
    assert fingerprint(scene.folder) == before
    assert tried > (10 if kind in READING else 100)
    assert not complaints, f"{len(complaints)} of {tried}:\n" + "\n".join(complaints[:20])
