"""Checkpoints that several ranks saved, migrated in one process and loaded on other ranks, by stock
torch.distributed.checkpoint on both sides.

The patterns are those of PyTorch's own tests (test/distributed/checkpoint: test_dtensor_resharding,
test_file_system_checkpoint, test_hsdp_checkpoint, test_fsdp_tp_checkpoint_conversion): from M ranks
to N, meshes of one axis and of two, every axis of a tensor cut, replicated, rows that do not divide
and ranks without any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from resharding import NET_RULE, RULE, new_tensors, old_tensors, same_bits
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import migrate

MESHES = {"2": [2], "3": [3], "4": [4], "2x2": [2, 2]}
SAVED = [(mesh, turn) for turn in range(4) for mesh in MESHES]
SAVED += [("2x2", turn) for turn in range(4, 16)]
CUTS = (None, 3, 2, 5)

pytestmark = pytest.mark.ranks


@pytest.fixture
def on(ranks: Callable[[int], Ranks]) -> Callable[..., None]:
    """`on(mesh, function, folder, …)`: a case of `resharding` on the ranks of a mesh."""

    def call(mesh: str, function: str, folder: Path, *arguments: Any) -> None:
        sizes = MESHES[mesh]
        where = [sizes if one == "mesh" else one for one in arguments]
        ranks(math.prod(sizes)).run("resharding", function, str(folder), *where)

    return call


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    (tmp_path / "rule.yaml").write_text(RULE)
    return tmp_path / "rule.yaml"


@pytest.mark.parametrize(("mesh", "turn"), SAVED)
def test_what_ranks_saved_is_loaded_on_others_in_the_new_layout(
    mesh: str, turn: int, on: Callable[..., None], rule: Path, tmp_path: Path
) -> None:
    old, new, back = (tmp_path / name for name in ("old", "new", "back"))
    on(mesh, "saves", old, "old", "mesh", turn)
    cut = CUTS[turn % len(CUTS)]
    answer = migrate.apply(old, new, rules=rule, chunks=cut)
    assert answer.downgrade.exact
    assert migrate.verify(new, source=old, rules=rule).equal
    for number, other in enumerate(MESHES):
        if other != mesh:
            on(other, "loads", new, "new", "mesh", turn + number)
    migrate.downgrade(new, back, rules=rule, chunks=CUTS[(turn + 1) % len(CUTS)])
    assert migrate.diff(old, back).equal
    on(mesh, "loads", back, "old", "mesh", turn + 1)


@pytest.mark.parametrize(("mesh", "turn"), [("3", 0), ("2x2", 2)])
def test_the_parts_of_ranks_become_one_file_and_parts_again(
    mesh: str, turn: int, on: Callable[..., None], rule: Path, tmp_path: Path
) -> None:
    on(mesh, "saves", tmp_path / "old", "old", "mesh", turn)
    made = tmp_path / "new.safetensors"
    migrate.apply(tmp_path / "old", made, rules=rule, output_format="safetensors")
    held, wanted = load_file(made), new_tensors()
    assert held.keys() == wanted.keys()
    assert [key for key in wanted if not same_bits(held[key], wanted[key])] == []
    save_file(old_tensors(), tmp_path / "old.safetensors")
    migrate.apply(
        tmp_path / "old.safetensors", tmp_path / "dcp", rules=rule, output_format="dcp", chunks=2
    )
    on(mesh, "keeps_its_parts", tmp_path / "dcp", "new", "mesh", turn)


def test_only_the_cut_changes_without_rules(on: Callable[..., None], tmp_path: Path) -> None:
    on("2x2", "saves", tmp_path / "old", "old", "mesh", 5)
    migrate.apply(tmp_path / "old", tmp_path / "new", chunks=3)
    assert migrate.diff(tmp_path / "old", tmp_path / "new").equal
    for mesh in MESHES:
        on(mesh, "loads", tmp_path / "new", "old", "mesh", 0)
    dcp_to_torch_save(tmp_path / "new", tmp_path / "new.pt")
    held = torch.load(tmp_path / "new.pt", weights_only=True)["model"]
    wanted = old_tensors()
    assert list(held) == list(wanted)
    assert [key for key in wanted if not same_bits(held[key], wanted[key])] == []


@pytest.mark.parametrize(("mesh", "turn"), [("2", 0), ("3", 1), ("4", 2)])
def test_grids_of_uneven_boxes_are_loaded_in_the_new_layout(
    mesh: str, turn: int, on: Callable[..., None], rule: Path, tmp_path: Path
) -> None:
    on(mesh, "saves_grids", tmp_path / "old", "old", "mesh", turn)
    migrate.apply(tmp_path / "old", tmp_path / "new", rules=rule)
    for number, other in enumerate(MESHES):
        on(other, "loads", tmp_path / "new", "new", "mesh", turn + number)


@pytest.mark.parametrize("mesh", ["3", "2x2"])
def test_a_model_of_fsdp2_trains_on_in_another_layout_and_on_other_ranks(
    mesh: str, on: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "rule.yaml").write_text(NET_RULE)
    old, new = tmp_path / "old", tmp_path / "new"
    on(mesh, "trains_and_saves", old, "mesh")
    answer = migrate.apply(old, new, rules=tmp_path / "rule.yaml", chunks=2)
    assert answer.optimizer == "followed"
    for other in ("2", "4"):
        on(other, "loads_the_new_net", new, "mesh")
        on(other, "loads_the_new_moments", new, "mesh")
    bare = tmp_path / "bare"
    answer = migrate.apply(
        old, bare, rules=tmp_path / "rule.yaml", params={"optimizer": "drop"}, allow="drop"
    )
    assert answer.optimizer == "dropped"
    on("2", "loads_the_new_net", bare, "mesh")
