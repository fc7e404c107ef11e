"""Cases for `ranks`: what ranks saved with releases of Transformer Engine before 2.16."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager

import quantized_classes as classes
import quantized_load_case
import quantized_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_ranks import KINDS, Kind
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import migrate

# before and after dtypes were numbered anew, because one program writes a checkpoint; scales of
# blocks in the order of rows, which ended with 2.11; numbers in place of objects
RELEASES: dict[str, list[tuple[str, tuple[int, int]]]] = {
    "to 2.3": [
        ("te-float8", (1, 2)),
        ("te-float8", (1, 9)),
        ("te-float8", (1, 13)),
        ("te-float8", (2, 0)),
        ("te-mxfp8", (2, 0)),
        ("te-mxfp8", (2, 3)),
        ("te-block-2d-even", (2, 3)),
        ("te-block-1d", (2, 3)),
    ],
    "to 2.13": [
        ("te-float8", (2, 13)),
        ("te-mxfp8", (2, 4)),
        ("te-mxfp8", (2, 6)),
        ("te-mxfp8-swizzled", (2, 12)),
        ("te-block-1d-gemm-ready", (2, 5)),
        ("te-block-2d-even", (2, 12)),
        ("te-nvfp4-2d", (2, 8)),
        ("te-nvfp4-2d", (2, 12)),
    ],
    "compact": [("te-block-1d-compact", (2, 11)), ("te-mxfp8-rowwise", (2, 6))],
    "dense": [("te-float8", (2, 14)), ("te-mxfp8-rowwise", (2, 15))],
}


def old_kinds(group: str) -> dict[str, Kind]:
    """The kinds as these releases pickle them, by names of their own."""
    return {
        f"{name}-of-{major}-{minor}": dataclasses.replace(KINDS[name], release=(major, minor))
        for name, (major, minor) in RELEASES[group]
    }


@contextmanager
def known(group: str) -> Iterator[list[str]]:
    """`KINDS` has these kinds, too; their names."""
    found = old_kinds(group)
    KINDS.update(found)
    try:
        yield list(found)
    finally:
        for name in found:
            del KINDS[name]


def saves(rank: int, folder: str, group: str, way: str = "save") -> None:
    with known(group) as names:
        quantized_ranks.saves(rank, folder, names, way)


def loads(rank: int, source: str, group: str) -> None:
    """Parameters of today's classes are filled."""
    with known(group) as names:
        for name in names:
            KINDS[name] = today(KINDS[name])
        quantized_load_case.loads(rank, source, json.dumps(names), "rows")


def today(kind: Kind) -> Kind:
    """The kind in 2.18, which says nothing of the order of scales that is the only one."""
    options = {**kind.options_of(), "_data_format": None}
    if kind.cls != "Float8BlockwiseQTensor" or kind.options_of().get("_data_format"):
        options = kind.options_of()
    return dataclasses.replace(kind, release=(2, 18), options=options)


def saves_unwritten(rank: int, folder: str, kinds: str, way: str) -> None:
    """Saves with a release whose tensors are dense as soon as one makes another like them."""
    classes.DENSE_COPIES = True
    try:
        quantized_ranks.saves(rank, folder, json.loads(kinds), way)
    finally:
        classes.DENSE_COPIES = False


def loads_dense(rank: int, source: str, kind: str) -> None:
    """The reader fills shards of a dense tensor."""
    one, world = KINDS[kind], dist.get_world_size()
    state = {
        "model": {
            kind: distribute_tensor(
                torch.zeros(one.shape), init_device_mesh("cpu", (world,)), [Shard(0)]
            )
        }
    }
    dcp.load(state, storage_reader=migrate.dcp.MigratingReader(source))
    assert torch.equal(state["model"][kind].full_tensor(), torch.full(one.shape, classes.UNWRITTEN))
