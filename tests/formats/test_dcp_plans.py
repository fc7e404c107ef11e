"""What `plan` shows of a distributed checkpoint, and what a saved plan notices of one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from commandline import done, run
from dcp_folders import save


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return save(tmp_path / "old", {"model": {"a.weight": torch.arange(24.0).reshape(8, 3)}})


def test_new_chunks_and_new_files_are_something_to_do(old: Path, tmp_path: Path) -> None:
    cut = done("plan", old, "--chunks", "4").out
    assert "dcp → dcp, cut for 4 ranks" in cut
    assert "in 4 dcp files" in cut
    assert "dcp → dcp, written anew" in done("plan", old, "--rewrite").out
    again = done("plan", old, "--chunks", "4", "--check", exit=1).out
    # others write to the same disk
    free = re.compile(r"[0-9.]+ .B free")
    assert free.sub("", again) == free.sub("", cut)
    saved = tmp_path / "plan.json"
    done("plan", old, "--chunks", "4", "-o", saved)
    done("apply", saved, "-o", tmp_path / "new")
    assert len(list((tmp_path / "new").glob("*.distcp"))) == 4


def test_what_cuts_or_rewrites_data_files_is_refused_for_other_formats(
    old: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new"
    for form in ("torch", "safetensors"):
        for verb in (("plan", old), ("apply", old, "-o", out)):
            refused = run(*verb, "--output-format", form, "--rewrite")
            assert refused.exit == 2
            assert f"error[M115]: --rewrite: {form} is always written anew" in refused.err
    assert not out.exists()
    assert run("plan", old, "--output-format", "dcp", "--rewrite").exit == 0


def test_a_question_without_a_goal_names_what_can_be_asked(old: Path) -> None:
    refused = run("plan", old)
    assert refused.exit == 2
    for word in ("--to LINEAGE@LAYOUT", "--rules FILE", "--output-format", "--chunks N"):
        assert word in refused.err
    assert "--chunks N or --rewrite" in refused.err


def test_tensors_that_rules_do_not_see_are_counted(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    old = save(tmp_path / "in", {"a.weight": tensor, "rng": [tensor, tensor + 1]})
    out = tmp_path / "out"
    shown = done("inspect", old).out
    assert "dcp, 1 file, 3 tensors, 72 B" in shown
    assert "rules work on nothing here: no dict of tensors" in shown
    said = "rules see none of the tensors: 3 tensors with 72 bytes are carried as they are"
    cut = ("--output-format", "dcp", "--chunks", "2")
    assert f"note: {said}" in done("plan", old, *cut).out
    assert f"note: {said}" in done("apply", old, "-o", out, *cut).out
    assert "verified: 3 tensors, 72 B recomputed" in done("verify", out, "--source", old).out
    assert "equal: 3 tensors, 72 B, keys, specs and bytes" in done("diff", out, old).out


def test_a_saved_plan_notices_other_metadata(old: Path, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done("plan", old, "--output-format", "safetensors", "-o", saved)
    metadata = old / ".metadata"
    then = metadata.stat()
    os.utime(metadata, ns=(then.st_atime_ns, then.st_mtime_ns + 1))
    refused = run("apply", saved, "-o", tmp_path / "new")
    assert refused.exit == 2
    assert ".metadata: it was modified or replaced" in refused.err
    assert not (tmp_path / "new").exists()


def test_what_a_plan_reads_are_the_files_that_it_copies(old: Path, tmp_path: Path) -> None:
    (tmp_path / "rule.yaml").write_text(
        "id: t\ntitle: t\nlineage: t\nedge: [v1, v2]\n"
        'rules:\n  - {name: r, from: "a.{k}", to: "b.{k}"}\n'
    )
    plan = done("plan", old, "--rules", tmp_path / "rule.yaml").out
    size = (old / "__0_0.distcp").stat().st_size
    assert f"reads {size / 1000:.2f} kB, writes" in plan
    assert "the data files are copied as they are" in plan


def test_damage_is_said_with_the_tensor_that_it_is_in(old: Path, tmp_path: Path) -> None:
    path = old / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(24.0).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    refused = run("apply", old, "-o", tmp_path / "new", "--output-format", "safetensors")
    assert refused.exit == 3
    assert "__0_0.distcp: the data of a.weight: its 96 bytes at " in refused.err
    assert not (tmp_path / "new").exists()
