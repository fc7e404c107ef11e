"""Checkpoints of a training as stock torch saves them on ranks: the trees that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dcp_folders import tensor_of
from ranks import Ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training import state_of

from migrate import formats
from migrate.source.blobs import ChunkedTensor

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("spelling", ["nested", "flat", "root"])
def test_a_training_of_two_ranks(
    spelling: str, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(2).run("training", "saves", str(tmp_path / "c"), spelling)
    # what stock torch makes of it, in one process
    dcp_to_torch_save(tmp_path / "c", tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    model, _ = state_of(spelling != "nested")
    with formats.open(tmp_path / "c") as source:
        index = source.index
        table = whole if spelling == "root" else whole["model"]
        assert list(index.tensors) == list(model)
        for key, stored in index.tensors.items():
            found = tensor_of(source, stored)
            assert torch.equal(found, table[key])
            # the model that one process trains
            assert torch.allclose(found, model[key])
        assert any(isinstance(stored, ChunkedTensor) for stored in index.tensors.values())
        moments = {
            f"/optimizer.state.{key}.{name}"
            for key in model
            for name in ("step", "exp_avg", "exp_avg_sq")
        }
        assert index.passed_through.keys() == moments | {"/train_state.step"}
        for key in model:
            name = f"/optimizer.state.{key}.exp_avg"
            held = whole["optimizer"]
            moment = (
                held["state"][key]["exp_avg"]
                if spelling == "nested"
                else held[f"state.{key}.exp_avg"]
            )
            assert torch.equal(tensor_of(source, index.passed_through[name]), moment)
        assert index.items["note"] == "x"
        group = "param_groups.0" if spelling == "nested" else "param_groups.0.weight"
        assert index.items[f"optimizer.{group}.lr"] == 0.125
        assert index.notes == ()


def test_ranks_that_save_without_collectives(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    ranks(2).run("training", "saves_alone", str(tmp_path / "c"))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "__0.metadata",
        "__0_0.distcp",
        "__1.metadata",
        "__1_0.distcp",
    ]
    with formats.open(tmp_path / "c", at=".") as source:
        tensors = {key: tensor_of(source, at) for key, at in source.index.tensors.items()}
    assert tensors.keys() == {"both", "rank0.x", "rank1.x"}
    assert torch.equal(tensors["both"], torch.arange(6.0))
    for rank in range(2):
        assert torch.equal(tensors[f"rank{rank}.x"], torch.full((2,), float(rank)))
