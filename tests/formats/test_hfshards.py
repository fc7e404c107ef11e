"""Files that ranks leave by torch's HuggingFaceStorageWriter, read as one checkpoint."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import Box, Cutter, rows, tensor_of
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.source.blobs import ChunkedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(
        "save_distributed" not in inspect.signature(dcp.HuggingFaceStorageWriter).parameters,
        reason=f"torch {torch.__version__} leaves no shards of ranks",
    ),
]

STATE = {
    "rows": torch.arange(14.0).reshape(7, 2),
    "columns": torch.arange(12.0).reshape(2, 6),
    "whole": torch.arange(3, dtype=torch.int64),
    "mesh": torch.arange(24.0).reshape(6, 4).to(torch.bfloat16),
    "empty": torch.arange(4.0),
    "scalar": torch.tensor(2.5),
}
# what each rank has of them
CUTS: dict[str, list[Box]] = {
    "rows": rows((7, 2), [3, 3, 1]),
    "columns": rows((2, 6), [2, 2, 2], dim=1),
    "whole": [([0], [3])],
    "mesh": [([0, 0], [4, 2]), ([0, 2], [4, 2]), ([4, 0], [2, 4])],
    "empty": rows((4,), [2, 2, 0]),
    "scalar": [([], [])],
}


def save_shards(folder: Path) -> Path:
    """As three ranks leave them: stock torch, each rank with a part of every tensor."""
    for rank in range(3):
        boxes = {name: [cut[rank]] for name, cut in CUTS.items() if rank < len(cut)}
        # torch writes a file for each item, and safetensors does not take two of one name
        own = {name: STATE[name] for name in boxes}

        class OfRank(dcp.HuggingFaceStorageWriter):
            def prepare_global_plan(self, plans: Any, number: int = rank + 1) -> Any:
                made = super().prepare_global_plan(plans)
                made[0].storage_data["shard_index"] = number
                return made

        class Plan(Cutter):
            def create_global_plan(self, plans: Any) -> Any:
                # alone a rank's parts leave holes
                made, self.metadata = (
                    torch.distributed.checkpoint.default_planner.create_default_global_save_plan(
                        plans
                    )
                )
                return made, self.metadata

        writer = OfRank(str(folder), save_distributed=True)
        dcp.save(own, storage_writer=writer, planner=Plan(boxes, flatten_state_dict=False))
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [
        f"shard-{n:05}-model-00001-of-00001.safetensors" for n in (1, 2, 3)
    ]
    return folder


def refused(path: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        formats.open(path)
    return [f"{d.code}: {d.message}" for d in caught.value.diagnostics]


def test_shards_of_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "c")
    with formats.open(folder) as source:
        index = source.index
        assert source.format == "safetensors"
        assert index.tensors.keys() == STATE.keys()
        for key, tensor in STATE.items():
            assert torch.equal(tensor_of(source, index.tensors[key]), tensor), key
        assert isinstance(index.tensors["mesh"], ChunkedTensor)
        assert index.metadata == {"format": "pt"}
        assert "put together from 3 files of ranks" in index.notes[0]
    # what stock torch reads from the same files
    loaded = {key: torch.zeros_like(tensor) for key, tensor in STATE.items() if tensor.dim()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)))
    assert all(torch.equal(loaded[key], STATE[key]) for key in loaded)


def test_a_hole_is_refused(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "c")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = refused(folder)
    assert all(": there is a hole" in one for one in found)
    assert {one.split(": ")[2] for one in found} == {"rows", "columns", "mesh", "empty"}


def edit(path: Path, change: Any) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    info = json.loads(metadata["DCP_SHARDING_INFO"])
    change(info, tensors)
    save_file(tensors, path, {**metadata, "DCP_SHARDING_INFO": json.dumps(info)})


def test_what_sharding_info_leaves_open_is_refused(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "c")
    last = folder / "shard-00003-model-00001-of-00001.safetensors"

    def change(info: Any, tensors: Any) -> None:
        del info["rows"]
        info["columns"]["saved_offsets"] = [0]
        tensors["mesh"] = tensors["mesh"].float()

    edit(last, change)
    found = refused(folder)
    assert [one.split("its part of ")[1] for one in found[:2]] == ["columns begins", "rows begins"]
    assert "mesh: its parts have different dtypes" in found[-1]
    edit(last, lambda info, tensors: info.update(mesh={"saved_offsets": [-1, 0]}))
    assert "DCP_SHARDING_INFO does not say where parts begin" in refused(folder)[0]


def test_one_file_of_several_is_not_read_as_a_checkpoint(tmp_path: Path) -> None:
    folder = save_shards(tmp_path / "c")
    for number in (1, 3):
        (found,) = refused(folder / f"shard-{number:05}-model-00001-of-00001.safetensors")
        assert "M915" in found
        assert "holds the parts of tensors that one rank had" in found


def test_files_that_torch_wrote_whole_are_read_as_any(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=False)
    state = {key: tensor for key, tensor in STATE.items() if key != "empty"}
    dcp.save(state, storage_writer=writer)
    for path in (tmp_path, tmp_path / "model-00001-of-00001.safetensors"):
        with formats.open(path) as source:
            assert source.index.metadata == {"format": "pt"}
            for key, tensor in state.items():
                assert torch.equal(tensor_of(source, source.index.tensors[key]), tensor)
