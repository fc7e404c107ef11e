"""Streams of `.metadata` as Python's pickler writes them from torch's own objects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

# folders that other releases of torch wrote
FOLDERS = sorted((Path(__file__).parents[1] / "data" / "dcp").glob("torch-*"))
# whose properties of tensors have a class of another module, which is left to the machine
OLD = [folder for folder in FOLDERS if folder.name in ("torch-2.0", "torch-2.3")]


def properties(dtype: torch.dtype = torch.float32, grad: bool = False) -> TensorProperties:
    return TensorProperties(dtype, torch.strided, grad, torch.contiguous_format, False)


def checkpoint(count: int, *, ranks: int = 2, dims: int = 2, **more: Any) -> Metadata:
    """The metadata of so many tensors, each cut into a chunk for each rank, and of some values."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    planner: dict[str, tuple[Any, ...]] = {}
    at = [0] * ranks
    for number in range(count):
        key = f"model.layers.{number}.w"
        shape = torch.Size([(number % 7 + 1) * ranks, *range(1, dims)]) if dims else torch.Size([])
        boxes = []
        for rank in range(ranks if dims else 1):
            offsets = torch.Size([rank * shape[0] // ranks, *[0] * (dims - 1)] if dims else [])
            sizes = torch.Size([shape[0] // ranks, *shape[1:]] if dims else [])
            boxes.append(ChunkStorageMetadata(offsets, sizes))
            length = 1500 + number * 131
            index = MetadataIndex(key, torch.Size(offsets), rank)
            places[index] = _StorageInfo(f"__{rank}_0.distcp", at[rank], length)
            at[rank] += length
        dtype = torch.bfloat16 if number % 3 else torch.float32
        entries[key] = TensorStorageMetadata(properties(dtype, number % 2 == 0), shape, boxes)
        planner[key] = ("model", key[6:])
    for number in range(3):
        key = f"optimizer.param_groups.{number}.lr"
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", at[0], 900)
        planner[key] = ("optimizer", "param_groups", number, "lr")
        at[0] += 900
    given = {"planner_data": planner, "storage_data": places, "version": "1.0.0"} | more
    # torch 2.8 names no version yet
    known = {field.name for field in dataclasses.fields(Metadata)}
    return Metadata(entries, **{name: value for name, value in given.items() if name in known})


def by_name(patch: pytest.MonkeyPatch) -> None:
    """Members of enums are pickled as CPython 3.11.0 to 3.11.3 pickle them."""
    encoding = type(properties().__getstate__()[3])
    patch.setattr(encoding, "__reduce_ex__", lambda self, _: (getattr, (encoding, self._name_)))


META = StorageMeta(Path("/a/folder"), "save", None, [])
CASES: dict[str, Metadata] = {
    "few": checkpoint(2),
    # past the memo's first 256 entries, past one batch of pairs, past one frame
    "many": checkpoint(1200),
    "values alone": checkpoint(0),
    "one rank": checkpoint(40, ranks=1),
    "more than a batch of chunks": checkpoint(2, ranks=1003),
    "no dimensions": checkpoint(3, dims=0),
    "one dimension": checkpoint(3, dims=1),
    "three dimensions": checkpoint(3, dims=3),
    "five dimensions": checkpoint(300, dims=5),
    "without planner_data": checkpoint(3, planner_data=None),
    "with storage_meta": checkpoint(3, storage_meta=META),
    "without a version": checkpoint(3, version=None),
}
