"""The genuine twins of the hostile files are read: a reader that refuses everything would pass all
the other tests.
"""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path

import hostile_dcp
import hostile_legacy
import opcodes as o
import pytest
import torch
import torch.distributed.checkpoint as dcp
from archives import archive, data_pkl, genuine_pickle, safetensors
from file_readers import Bytes, read_metadata, read_path, read_torch
from mutants import flipped

from migrate.core.errors import CheckpointError
from migrate.source.pickle import machine
from migrate.source.pickle.nodes import EXTRA_STATE
from migrate.source.pickle.tree import DictNode, TensorRecord


def shape_of(tree: object) -> tuple[int, ...]:
    assert isinstance(tree, DictNode)
    held = tree.get("w")
    assert isinstance(held, TensorRecord)
    return held.shape


@pytest.mark.parametrize("more", [{}, {"zip64": {}}], ids=["plain", "zip64"])
def test_an_archive_made_by_hand_is_read(more: dict) -> None:
    raw = archive(data_pkl(genuine_pickle()), **more)
    assert shape_of(read_torch(Bytes(raw))) == (4,)
    raw = archive(data_pkl(genuine_pickle(o.value([1, "two", None, (3.5, True)]))), **more)
    assert shape_of(read_torch(Bytes(raw))) == (4,)


def test_a_legacy_stream_made_by_hand_is_read() -> None:
    assert shape_of(read_torch(Bytes(hostile_legacy.good()))) == (4,)


# torch says that it saves and loads without a process group
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@alone
def test_a_dcp_folder_made_by_hand_is_read_and_torch_reads_it_too(tmp_path: Path) -> None:
    folder = hostile_dcp.written(tmp_path, hostile_dcp.good())
    assert read_path(folder).tensors["w"].shape == (4,)
    held = {"w": torch.ones(4)}
    dcp.load(held, checkpoint_id=folder, no_dist=True)
    assert torch.equal(held["w"], torch.zeros(4))


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_writes_is_read(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.arange(4.0), "epoch": 3}, path, _use_new_zipfile_serialization=zipped)
    assert shape_of(read_path(path)) == (4,)


@alone
def test_what_torch_saves_distributed_is_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    assert read_path(tmp_path).tensors["w"].shape == (4,)
    assert set(read_metadata(Bytes((tmp_path / ".metadata").read_bytes())).bytes) == {"step"}


def test_a_safetensors_file_and_a_pickle_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors({"x": b"abcd"}, {"format": "pt"}))
    read_path(path)
    assert machine.read_pickle(o.stream(o.value([1, 2])), EXTRA_STATE, name="x") == [1, 2]


def described(tree: object) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Key -> dtype, shape and strides of the tensors of a flat dict, as our decoders or torch have
    it.
    """
    if isinstance(tree, DictNode):
        records = {key: value for key, value in tree.pairs if isinstance(value, TensorRecord)}
        return {
            key: (record.dtype, record.shape, record.strides) for key, record in records.items()
        }
    assert isinstance(tree, dict)
    tensors = {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}
    return {
        key: (str(value.dtype)[6:], tuple(value.shape), value.stride())
        for key, value in tensors.items()
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_mutant_that_is_opened_is_what_torch_takes_it_for(zipped: bool) -> None:
    """Two readings of one file would be an attack. torch may refuse what we open (an unknown
    device), never read it otherwise.
    """
    out = io.BytesIO()
    torch.save(
        {"w": torch.arange(4.0), "b": torch.ones(3, dtype=torch.int64)},
        out,
        _use_new_zipfile_serialization=zipped,
    )
    compared = 0
    for mutant in flipped(out.getvalue(), random.Random(7), 1500):
        try:
            ours = read_torch(Bytes(mutant))
        except CheckpointError:
            continue
        try:
            theirs = torch.load(io.BytesIO(mutant), weights_only=True)
        except (RuntimeError, pickle.UnpicklingError):
            continue
        assert described(ours) == described(theirs)
        compared += 1
    assert compared > 100
