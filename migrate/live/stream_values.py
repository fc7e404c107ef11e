"""The value in a stream of torch.save, decoded by the reader that executes nothing, and a planner
of torch.distributed.checkpoint that reads its byte entries so.

torch's own planner unpickles every entry that is not a tensor, whatever it calls.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import ReadItem

from ..core.errors import fail, printable, raise_all
from ..source.blobs import BytesBlob
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import ARCHIVE
from ..source.pickle.policy import decode, refusal
from ..source.pickle.tree import TensorRecord
from ..source.zip_archive import ArchiveRecord, compare_crc, crc32, read_archive, read_record
from .load import value_of


class SafeLoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """A planner for `dcp.load` with readers of torch, which executes nothing in byte entries.

    It takes the arguments of `DefaultLoadPlanner`. Entries that are not tensors are decoded by an
    allow-list: numbers, texts, containers, tensors and the like. What is outside of it is refused.
    torch's `FileSystemReader` unpickles `.metadata` before any planner is asked; `MigratingReader`
    does not.

    Raises:
        MigrateError: M935 for names outside of the allow-list, M916 for an object that cannot be
            made, M930 to M942 for what is damaged; inside of torch's `CheckpointException`.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts the decoded value where the state dict has this entry."""
        key = read_item.dest_index.fqn
        found = decode_stream(value.read(), key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], found)
        else:
            self.state_dict[key] = found


def decode_stream(data: bytes, name: str) -> Any:
    """The value that torch.save wrote, without executing anything; `name` is for messages."""
    label = printable(name)
    blob = BytesBlob(name, data)
    archive = read_archive(blob, start=0, size=len(data), label=label)
    if "data.pkl" not in archive.records:
        fail("M930", f"{label}: holds no `data.pkl`", help="it is not a stream of torch.save")
    stream = read_record(blob, archive.records["data.pkl"], ARCHIVE.size, label)
    records = {n[5:]: r for n, r in archive.records.items() if n.startswith("data/")}
    nodes = read_pickle(stream, ARCHIVE, name=f"{label}: data.pkl", persistent=True)
    found = decode(nodes, label, {key: record.size for key, record in records.items()})
    if found.outside:
        raise_all([refusal(found.outside, name)])
    return value_of(found.tree, name, lambda record: _tensor(data, record, records, label))


def _tensor(
    data: bytes, record: TensorRecord, records: Mapping[str, ArchiveRecord], label: str
) -> torch.Tensor:
    """A tensor of its own; M942 if its bytes are not those that were saved."""
    place = records[record.storage.key]
    stretch = data[place.offset : place.offset + place.size]
    if place.crc is not None:
        compare_crc(label, place, crc32(stretch))
    dtype = getattr(torch, record.dtype)
    if not place.size:
        return torch.empty(record.shape, dtype=dtype)
    storage = torch.frombuffer(bytearray(stretch), dtype=torch.uint8).view(dtype)
    return storage.as_strided(record.shape, record.strides, record.offset).clone()
