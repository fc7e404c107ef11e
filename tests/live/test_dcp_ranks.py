"""Distributed checkpoints that are written, and torch on several ranks: what it would have written
itself, and what it loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Ranks

import migrate
from migrate.source.pickle.dcp_metadata import Metadata, read_metadata

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]


def metadata(folder: Path) -> Metadata:
    return read_metadata((folder / ".metadata").read_bytes(), ".metadata")


def boxes(found: Metadata) -> dict[str, list[tuple[object, ...]]]:
    """Where the chunks begin, their sizes, and the rank whose file holds each; empty ones apart."""
    return {
        key: sorted(
            (chunk.offsets, chunk.sizes, part.file.split("_")[2])
            for chunk, part in zip(entry.chunks, entry.parts, strict=True)
            if 0 not in chunk.sizes
        )
        for key, entry in found.tensors.items()
    }


@pytest.mark.parametrize("world", [2, 3, 4])
def test_chunks_are_those_that_ranks_of_fsdp_save(world: int, ranks: Start, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    ranks(world).run("dcp_case", "save", str(tmp_path / "torch"), str(whole))
    migrate.apply(whole, tmp_path / "out", output_format="dcp", chunks=world)
    ours, theirs = metadata(tmp_path / "out"), metadata(tmp_path / "torch")
    mine, saved = boxes(ours), boxes(theirs)
    assert mine.keys() == saved.keys()
    cut = [key for key in saved if len(saved[key]) > 1]
    assert len(cut) > 8
    for key in cut:
        assert mine[key] == saved[key]
    # a buffer is whole on every rank, and one of them saves it
    for key in saved.keys() - set(cut):
        assert [box[:2] for box in saved[key]] == [
            ((0,) * len(box[1]), box[1]) for box in saved[key]
        ]
    assert ours.planner == theirs.planner
    assert ours.bytes.keys() == theirs.bytes.keys() == {"epoch"}
    migrate.apply(tmp_path / "torch", tmp_path / "again", chunks=world)
    assert boxes(metadata(tmp_path / "again")) == mine


@pytest.mark.parametrize("chunks", [None, 1, 2, 5])
@pytest.mark.parametrize("world", [2, 3])
def test_torch_loads_them_onto_any_number_of_ranks(
    chunks: int | None, world: int, ranks: Start, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = {f"w{n}": torch.randn(7, 6 + n) for n in range(8)}
    model |= {"line": torch.randn(5), "scalar": torch.tensor(2.5), "one": torch.randn(1, 3)}
    model |= {"half": torch.randn(9, 4).bfloat16(), "byte": torch.arange(30).reshape(10, 3)}
    torch.save({"model": model, "epoch": 7}, tmp_path / "whole.pt")
    migrate.apply(
        tmp_path / "whole.pt",
        tmp_path / "out",
        output_format="dcp",
        chunks=chunks,
        max_shard_size=100,
    )
    ranks(world).run("dcp_case", "load", str(tmp_path / "out"), str(tmp_path / "whole.pt"))


@pytest.mark.parametrize(("saved", "chunks", "loaded"), [(3, 2, 2), (2, 4, 3), (2, None, 4)])
def test_a_checkpoint_is_cut_anew_for_other_ranks(
    saved: int, chunks: int | None, loaded: int, ranks: Start, tmp_path: Path
) -> None:
    whole = str(tmp_path / "whole.pt")
    ranks(saved).run("dcp_case", "save", str(tmp_path / "torch"), whole)
    migrate.apply(tmp_path / "torch", tmp_path / "out", chunks=chunks, output_format="dcp")
    ranks(loaded).run("dcp_case", "load_model", str(tmp_path / "out"), whole)
