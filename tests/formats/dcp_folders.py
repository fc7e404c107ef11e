"""Folders that stock torch.distributed.checkpoint writes in one process, cut as several ranks would
have cut them, and their tensors as an `Index` says where they lie.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from migrate.source.blobs import ChunkedTensor, StoredTensor, chunks_of
from migrate.source.index import Source

# where a chunk begins, and its size
Box = tuple[Sequence[int], Sequence[int]]


class Cutter(DefaultSavePlanner):
    """torch's planner, which writes the tensors named in `boxes` in these chunks."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]], **options: Any) -> None:
        super().__init__(**options)
        self.boxes = boxes

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            for number, (offsets, sizes) in enumerate(self.boxes.get(item.index.fqn, ())):
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, item.tensor_data.properties, item.tensor_data.size)
                index = MetadataIndex(item.index.fqn, chunk.offsets, number)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            if item.index.fqn not in self.boxes:
                items.append(item)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index.fqn not in self.boxes:
            return super().lookup_object(index)
        found = self.state_dict[index.fqn]
        sizes = next(s for o, s in self.boxes[index.fqn] if tuple(o) == tuple(index.offset))
        for dim, (offset, size) in enumerate(zip(index.offset, sizes, strict=True)):
            found = found.narrow(dim, offset, size)
        return found


def save(
    folder: Path,
    state: Mapping[str, Any],
    boxes: Mapping[str, Sequence[Box]] | None = None,
    *,
    files: int = 1,
    **options: Any,
) -> Path:
    """Saves `state` by stock torch, the tensors in `boxes` by flat key in these chunks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(folder, thread_count=files, sync_files=False)
        dcp.save(dict(state), storage_writer=writer, planner=Cutter(boxes or {}, **options))
    return folder


def rows(shape: Sequence[int], counts: Sequence[int], dim: int = 0) -> list[Box]:
    """The chunks of a tensor that is cut along one dimension into so many rows each."""
    out: list[Box] = []
    at = 0
    for count in counts:
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = at, count
        out.append((offsets, sizes))
        at += count
    return out


def tensor_of(source: Source, stored: StoredTensor) -> torch.Tensor:
    """The tensor, put together from the bytes of its chunks. Not for packed numbers."""
    starts = (
        stored.starts if isinstance(stored, ChunkedTensor) else ((0,) * len(stored.spec.shape),)
    )
    dtype = getattr(torch, stored.spec.dtype)
    out = torch.full(stored.spec.shape, 1, dtype=torch.uint8).to(dtype)
    for chunk, start in zip(chunks_of(stored), starts, strict=True):
        if 0 in chunk.spec.shape:
            continue
        strides = chunk.strides or torch.empty(chunk.spec.shape, device="meta").stride()
        last = sum((n - 1) * s for n, s in zip(chunk.spec.shape, strides, strict=True))
        raw = bytearray(source.blobs[chunk.blob].size - chunk.offset)
        raw = raw[: (last + 1) * dtype.itemsize]
        source.blobs[chunk.blob].readinto(chunk.offset, memoryview(raw))
        held = torch.frombuffer(raw, dtype=dtype).as_strided(chunk.spec.shape, strides)
        part = out
        for dim, (at, size) in enumerate(zip(start, chunk.spec.shape, strict=True)):
            part = part.narrow(dim, at, size)
        part.copy_(held)
    return out
