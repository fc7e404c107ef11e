"""Checkpoints of more files than a process may have open: read, written and compared with a few
open at a time.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import Tensors, contents, done, rules, shards, spawn
from work import HANG

import migrate
from migrate.core.errors import CheckpointError
from migrate.running import publish
from migrate.source import local

OPEN = 48
SHARDS = 150
RULES = (
    "rules: [{name: r, from: 'a.{i:int}.{w}', to: 'b.{i}.{w}'}, {name: s, from: 'c.{i:int}', "
    "to: 'd', via: [{stack: {over: i}}]}]\n"
)


def parts(count: int) -> list[Tensors]:
    """A renamed tensor in each file, and one that goes into a stack of all of them."""
    return [{f"a.{i}.w": ("F32", [5]), f"c.{i}": ("U8", [7])} for i in range(count)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("many") / "in", parts(SHARDS))


@pytest.fixture(scope="module")
def rule(checkpoint: Path) -> Path:
    return rules(checkpoint.parent, RULES)


def limited(*arguments: object) -> str:
    """A command in a process that may have few files open; its answer."""
    child = spawn(
        *arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN, OPEN))
    )
    out, err = child.communicate(timeout=HANG)
    assert child.returncode == 0, err
    return out


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_more_files_than_may_be_open_are_read_written_and_compared(
    checkpoint: Path, rule: Path, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    question = ("--rules", rule, "--max-shard-size", "30", "--output-format", form)
    limited("apply", checkpoint, "-o", out, *question, "-q")
    assert len([f for f in out.iterdir() if f.suffix in (".safetensors", ".bin")]) == SHARDS + 1
    whole = tmp_path / "whole"
    done("apply", checkpoint, "-o", whole, *question)
    names = sorted(f.name for f in whole.iterdir())
    assert names == sorted(f.name for f in out.iterdir())
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)
    assert "every byte equal" in limited("verify", out, "--source", checkpoint, "--rules", rule)
    assert limited("diff", out, whole).startswith("equal")


def open_now() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("threads", [1, 4])
def test_a_run_has_a_bounded_number_of_files_open(
    checkpoint: Path, rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(local, "KEPT", 3)
    monkeypatch.setattr(local, "LENT", 4)
    before, most = open_now(), [0]
    real = os.open

    def watched(*arguments: Any, **keywords: Any) -> int:
        descriptor = real(*arguments, **keywords)
        most[0] = max(most[0], open_now())
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    migrate.apply(checkpoint, tmp_path / "out", rules=[rule], max_shard_size=30, threads=threads)
    # the files of the source, those that are written, and the folder, the journal and what is open
    # for an instant
    assert most[0] - before <= 3 + 4 + 2 * threads + 6
    assert open_now() == before
    opened = contents(tmp_path / "out")
    source = contents(checkpoint)
    assert len(opened) == SHARDS + 1
    assert all(opened[f"b.{i}.w"] == source[f"a.{i}.w"] for i in range(SHARDS))
    assert opened["d"][2] == b"".join(source[f"c.{i}"][2] for i in range(SHARDS))


CALLS = (
    "open",
    "close",
    "dup",
    "stat",
    "fstat",
    "lstat",
    "preadv",
    "pread",
    "readlink",
    "listdir",
    "scandir",
)


def calls(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function of the system was called."""
    found: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            found[name] += 1
            return real(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(name, getattr(os, name)))
        action()
    return found


def test_planning_opens_each_file_once_and_asks_little_of_the_system(
    rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KEPT", 3)
    monkeypatch.setattr(local, "LENT", 2)
    few, many = shards(tmp_path / "few", parts(20)), shards(tmp_path / "many", parts(60))
    migrate.plan(few, rules=[rule])
    counted = [
        calls(lambda at=at: migrate.plan(at, rules=[rule]), monkeypatch) for at in (few, many)
    ]
    each = {name: (counted[1][name] - counted[0][name]) / 40 for name in CALLS}
    # a file is looked at by its name, opened, looked at twice by its descriptor, read twice (how
    # long its header is, the header), once more if it is as small as a pointer of Git LFS, and
    # closed; the descriptor of its folder is duplicated for as long as it is opened
    assert each == {
        **dict.fromkeys(CALLS, 0),
        "open": 1,
        "close": 2,
        "dup": 1,
        "stat": 1,
        "fstat": 2,
        "preadv": 2,
        "pread": 1,
    }


def test_a_run_opens_a_file_again_only_when_it_is_read(
    checkpoint: Path, rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KEPT", 0)
    monkeypatch.setattr(local, "LENT", 4)
    opened: Counter[str] = Counter()
    real = os.open

    def watched(path: Any, *arguments: Any, **keywords: Any) -> int:
        if isinstance(path, str) and "dir_fd" in keywords:
            opened[path] += 1
        return real(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", watched)
    migrate.apply(checkpoint, tmp_path / "out", rules=[rule], threads=1)
    files = [opened[f.name] for f in checkpoint.glob("*.safetensors")]
    # for its header, and once for each of its two tensors, which lie far apart in the output
    assert len(files) == SHARDS
    assert max(files) <= 3


def test_a_file_that_is_replaced_between_two_openings_publishes_nothing(
    rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KEPT", 1)
    monkeypatch.setattr(local, "LENT", 1)
    source, other = shards(tmp_path / "in", parts(5)), shards(tmp_path / "other", parts(5))
    real = publish.Partial.allocate

    def replaced(self: Any, shared: Any = None) -> None:
        name = "model-00003-of-00005.safetensors"
        before = os.stat(source / name)
        os.utime(other / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        (other / name).rename(source / name)
        real(self, shared)

    monkeypatch.setattr(publish.Partial, "allocate", replaced)
    with pytest.raises(
        CheckpointError,
        match=r"model-00003-of-00005\.safetensors: changed while it was read: another file",
    ) as caught:
        migrate.apply(source, tmp_path / "out", rules=[rule])
    assert [d.code for d in caught.value.diagnostics] == ["M905"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["in", "other"]


RANKS = 60
JOIN = (
    "rules: [{name: r, from: 'l.{i:int}.w@{r:int}', to: 'm.{i}.w', via: [{concat: {over: r, "
    "dim: 0, count: 60}}]}]\n"
)
CUT = (
    "rules: [{name: r, from: 'm.{i:int}.w', to: 'l.{i}.w@{r:int}', via: [{split: {dim: 0, into: "
    "r, count: 60}}]}]\n"
)


def test_ranks_of_torch_are_joined_and_cut_with_few_files_open_and_their_values_verified(
    tmp_path: Path,
) -> None:
    source, joined, cut = tmp_path / "in", tmp_path / "joined", tmp_path / "cut"
    for rank in range(RANKS):
        folder = source / f"mp_rank_{rank:02}"
        folder.mkdir(parents=True)
        model = {f"l.{i}.w": torch.full((1, 3), float(100 * rank + i)) for i in range(2)}
        torch.save({"model": model, "iteration": 5}, folder / "model_optim_rng.pt")
    for before, after, text, name in (
        (source, joined, JOIN, "join.yaml"),
        (joined, cut, CUT, "cut.yaml"),
    ):
        question = ("--rules", rules(tmp_path, text, name), "--at", "model")
        limited("apply", before, "-o", after, *question, "-q")
        assert "every byte equal" in limited("verify", after, "--source", before, *question)
    whole = torch.load(joined / "pytorch_model.bin", weights_only=True)
    assert whole["iteration"] == 5
    assert whole["model"]["m.1.w"].tolist() == [[100.0 * rank + 1] * 3 for rank in range(RANKS)]
    assert limited("diff", source, cut).startswith("equal")
    # what stands beside the tensors is looked at in the file that is left of sixty
    torch.save({**whole, "iteration": 6}, joined / "pytorch_model.bin")
    question = ("--rules", tmp_path / "join.yaml", "--at", "model")
    assert (
        "value iteration differs"
        in done("verify", joined, "--source", source, *question, exit=1).out
    )
