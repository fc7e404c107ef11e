"""Twenty kinds of .pt files, as torch writes them, to torch, to safetensors and back: torch.load
says what each holds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from inert_unpickler import load_stand_ins
from torch_compare import same, ties
from torch_kinds import KINDS, loaded

import migrate

# what torch itself does not load with weights_only=True
PLAIN = {"protocol_five"}


def load(path: Path, name: str) -> dict[str, object]:
    if name in PLAIN and path.name == "model.pt":
        return {"": load_stand_ins(path)}
    return loaded(path)


def out_name(source: Path) -> str:
    return source.name if source.is_file() else "folder"


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_written_again_as_torch_loads_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = KINDS[name](tmp_path / "in")
    migrate.apply(
        source,
        tmp_path / "folder" if source.is_dir() else tmp_path / source.name,
        output_format="torch",
    )
    made = tmp_path / out_name(source)
    before, after = load(source, name), loaded(made)
    assert before.keys() == after.keys()
    for rank, value in before.items():
        same(value, after[rank])
        assert ties(value) == ties(after[rank])


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_goes_to_safetensors_and_comes_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = KINDS[name](tmp_path / "in")
    migrate.apply(source, tmp_path / "between", output_format="safetensors")
    back = tmp_path / (source.name if source.is_file() else "back")
    migrate.apply(tmp_path / "between", back, output_format="torch")
    before, after = load(source, name), loaded(back)
    assert before.keys() == after.keys()
    for rank, value in before.items():
        same(value, after[rank])
        assert ties(value) == ties(after[rank])
    assert migrate.diff(source, back).equal
    assert migrate.verify(tmp_path / "between", source=source).equal
    assert migrate.verify(back, source=tmp_path / "between").equal


@pytest.mark.parametrize("name", sorted(KINDS))
def test_torch_maps_what_was_written_and_sees_its_shapes_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = KINDS[name](tmp_path / "in")
    made = tmp_path / (source.name if source.is_file() else "out")
    migrate.apply(source, made, output_format="torch")
    for file in (
        [made] if made.is_file() else sorted([*made.glob("**/*.pth"), *made.glob("**/*.bin")])
    ):
        whole = torch.load(file, weights_only=True)
        same(whole, torch.load(file, weights_only=True, mmap=True))
        torch.load(file, weights_only=True, map_location="meta")
