"""Layouts that a person states: of a folder beside it, of a file in a copy, never over a stamp."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import DATA, run
from safetensors.torch import load_file, save_file

import migrate
from migrate.core.errors import MigrateError

HUB = DATA / "mixtral__v4" / "hub"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HUB, tmp_path / "plain"))


def code(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        call(*args, **options)
    return caught.value.diagnostics[0].code


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_a_folder_gets_its_stamp_and_nothing_else_changes(plain: Path) -> None:
    before = sums(plain)
    report = migrate.stamp(plain, "hf-mixtral@v4")
    assert report.why is None
    assert report.written == str(plain / "migrate.history.json")
    after = sums(plain)
    assert after.keys() - before.keys() == {"migrate.history.json"}
    assert {name: after[name] for name in before} == before
    held = migrate.history(plain)
    assert held.layouts == {"hf-mixtral": "v4"}
    assert held.applied == ()
    assert migrate.plan(plain, to="hf-mixtral@v5").report.downgrade.exact
    # and never over another one
    assert code(migrate.stamp, plain, "hf-mixtral@v4") == "M904"
    assert sums(plain) == after


def test_signs_that_say_otherwise_need_a_reason_which_stays(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(MigrateError) as caught:
        migrate.stamp(plain, "hf-mixtral@v5")
    (found,) = caught.value.diagnostics
    assert found.code == "M524"
    assert any(note.startswith("v5: not: no key fits") for note in found.notes)
    assert any("its signs are those of v4" in note for note in found.notes)
    assert not (plain / "migrate.history.json").exists()
    for options in ({"allow": ("other-layout",)}, {"why": "so"}, {"why": " "}):
        assert code(migrate.stamp, plain, "hf-mixtral@v5", **options) == "M115"
    given = {"allow": ("other-layout",), "why": "renamed by hand"}
    assert migrate.stamp(plain, "hf-mixtral@v5", **given).why == "renamed by hand"
    (said,) = migrate.history(plain).declared
    assert (said.lineage, said.layout, said.why) == ("hf-mixtral", "v5", "renamed by hand")
    assert "renamed by hand" in migrate.history(plain).notes[0]
    # a later run keeps it
    migrate.apply(plain, tmp_path / "out", output_format="torch")
    (kept,) = migrate.history(tmp_path / "out").declared
    assert kept.why == "renamed by hand"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_single_file_gets_a_stamped_copy(tmp_path: Path, suffix: str) -> None:
    tensors = {}
    for part in sorted(HUB.glob("*.safetensors")):
        tensors.update(load_file(part))
    file = tmp_path / f"one{suffix}"
    if suffix == ".pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    whole = file.read_bytes()
    assert code(migrate.stamp, file, "hf-mixtral@v4") == "M115"
    copy = tmp_path / f"two{suffix}"
    report = migrate.stamp(file, "hf-mixtral@v4", copy)
    assert report.path == str(copy)
    assert file.read_bytes() == whole
    assert migrate.history(copy).layouts == {"hf-mixtral": "v4"}
    assert migrate.diff(file, copy).equal
    assert code(migrate.stamp, file, "hf-mixtral@v4", copy) == "M904"
    assert code(migrate.stamp, copy, "hf-mixtral@v4", tmp_path / f"three{suffix}") == "M904"


def test_what_is_not_there_is_told(plain: Path) -> None:
    assert code(migrate.stamp, plain, "hf-mixtrl@v4") == "M507"
    assert code(migrate.stamp, plain, "hf-mixtral@v9") == "M501"
    assert code(migrate.stamp, plain / "none", "hf-mixtral@v4") == "M917"
    assert code(migrate.stamp, plain, "hf-mixtral@v4", plain / "copy") == "M115"
    assert code(migrate.stamp, "s3://bucket/key", "hf-mixtral@v4") == "M115"
    plain.joinpath("migrate.history.json").mkdir()
    assert code(migrate.stamp, plain, "hf-mixtral@v4") in ("M904", "M907")


def test_the_command_says_what_it_wrote_without_torch(plain: Path) -> None:
    made = run("stamp", str(plain), "hf-mixtral@v4", cwd=plain.parent)
    assert made.exit == 0, made.err
    assert made.out.splitlines()[0] == f"hf-mixtral@v4, in {plain}/migrate.history.json"
    again = run("stamp", str(plain), "hf-mixtral@v4", cwd=plain.parent)
    assert again.exit == 2
    assert "M904" in again.err
