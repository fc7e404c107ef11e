"""Cases for `ranks`: what `dcp.load` reads through a reader that migrates, each rank its part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)

import migrate
from migrate.dcp import MigratingReader
from migrate.live import filling

EXPERTS, LAYERS = 4, 2


class Experts(nn.Module):
    """Experts in one stack, of 6 rows each, which do not divide by four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, 6, 5))
        self.norm = nn.LayerNorm(5)


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(LAYERS)])
        self.head = nn.Linear(5, 7, bias=False)


RULES = """\
id: toy/v2/stack
title: One stack of experts for each layer
why: the new module has one parameter
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
keep: [head.weight, step]
rules:
  - name: up
    from: "blocks.{n:int}.experts.{e:int}.up.weight"
    to: "layers.{n}.up"
    via: [{stack: {over: e}}]
  - {name: norm, from: "blocks.{n:int}.norm.{k}", to: "layers.{n}.norm.{k}"}
"""


def old_layout(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = {}
    for n in range(LAYERS):
        for e in range(EXPERTS):
            out[f"blocks.{n}.experts.{e}.up.weight"] = torch.randn(6, 5, generator=generator)
        for k in ("weight", "bias"):
            out[f"blocks.{n}.norm.{k}"] = torch.randn(5, generator=generator)
    out["head.weight"] = torch.randn(7, 5, generator=generator)
    return {key: one.to(dtype) for key, one in out.items()}


def new_layout(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {"head.weight": old["head.weight"]}
    for n in range(LAYERS):
        experts = [old[f"blocks.{n}.experts.{e}.up.weight"] for e in range(EXPERTS)]
        out[f"layers.{n}.up"] = torch.stack(experts)
        out |= {f"layers.{n}.norm.{k}": old[f"blocks.{n}.norm.{k}"] for k in ("weight", "bias")}
    return out


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for key, value in state.items():
        assert torch.equal(full(value), expected[key]), key


def save_parts(rank: int, folder: str) -> None:
    """Saves the old layout by torch, every tensor cut in another way."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    cuts: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())
    model = {}
    for number, (key, value) in enumerate(old_layout().items()):
        cut = cuts[number % 3] if value.dim() > 1 else cuts[0]
        model[key] = distribute_tensor(value, mesh, [cut])
    dcp.save({"model": model, "step": 5}, checkpoint_id=folder)


def fills_fsdp2(rank: int, source: str, rules: str, nested: str = "") -> None:
    """A model with FSDP2, each layer of it sharded, from a checkpoint of the old layout."""
    expected = new_layout(old_layout())
    model = Stacked()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = get_model_state_dict(model)
    reader = MigratingReader(source, rules=[rules])
    if nested:
        step = {"model": state, "step": 0}
        dcp.load(step, storage_reader=reader)
        assert step["step"] == 5
    else:
        dcp.load(state, storage_reader=reader)
    set_model_state_dict(model, state)
    same(model.state_dict(), expected)
    assert reader.report is not None
    held = sum(one.to_local().nbytes for one in model.parameters() if isinstance(one, DTensor))
    assert reader.report.bytes_written == held
    assert reader.report.tensors <= len(expected)
    assert not reader.report.missing
    assert not reader.report.unexpected


def held_in_any_way(rank: int, source: str, rules: str) -> None:
    """Each tensor in placements of its own, on meshes of one and of two dimensions."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    ways: list[tuple[DeviceMesh, list[Placement]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (square, [Shard(0), Shard(1)]),
        (square, [Replicate(), Shard(1)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
    ]
    expected = new_layout(old_layout())
    for first in range(len(ways)):
        state: dict[str, Any] = {}
        for number, (key, value) in enumerate(expected.items()):
            mesh, placements = ways[(first + number) % len(ways)]
            if value.dim() == 1:
                placements = [p if type(p) is Replicate else Shard(0) for p in placements]
            elif number % 2:
                # the last dimension in the place of the one before
                last = Shard(value.dim() - 1)
                placements = [last if p == Shard(1) else p for p in placements]
            state[key] = zeros(
                value.shape, dtype=torch.float64, device_mesh=mesh, placements=placements
            )
        dcp.load(state, storage_reader=MigratingReader(source, rules=[rules]))
        same(state, {key: value.double() for key, value in expected.items()})


def tensor_parallel_within_fsdp2(rank: int, source: str, rules: str) -> None:
    """FSDP2 over tensor parallelism: `_StridedShard` where both cut the same dimension."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    expected = new_layout(old_layout())
    model = Stacked()
    head = distribute_tensor(model.head.weight.detach(), mesh["tp"], [Shard(0)])
    model.head.weight = nn.Parameter(head)
    for layer in model.layers:
        up = distribute_tensor(layer.up.detach(), mesh["tp"], [Shard(1)])
        layer.up = nn.Parameter(up)
        for key, one in layer.norm.named_parameters():
            setattr(
                layer.norm,
                key,
                nn.Parameter(distribute_tensor(one.detach(), mesh["tp"], [Replicate()])),
            )
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds = {type(p).__name__ for one in model.parameters() for p in one.placements}
    assert "_StridedShard" in kinds
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=MigratingReader(source, rules=[rules]))
    same(state, expected)
    for one in model.parameters():
        one.detach().to_local().zero_()

    def whole(*arguments: Any) -> Any:
        raise AssertionError("a whole tensor was made for a shard")

    kept, filling.shard_as = filling.shard_as, whole
    try:
        migrate.load(model, source, rules=[rules])
    finally:
        filling.shard_as = kept
    same(model.state_dict(), expected)


def fills_what_rank_zero_reads(rank: int, source: str, rules: str) -> None:
    """Migrated in one process, and dealt out by torch to the shards of all."""
    model = Stacked()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = migrate.migrate_state_dict(load_file(source), rules=[rules]) if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(state), options=options)
    same(model.state_dict(), new_layout(old_layout()))


def computes_its_boxes(rank: int, source: str, rules: str, whole: str) -> None:
    """Values that are computed, each rank the box of its shard, which ends within a block."""
    expected = load_file(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dim in (0, 1):
        state: dict[str, Any] = {
            key: zeros(one.shape, dtype=one.dtype, device_mesh=mesh, placements=[Shard(dim)])
            for key, one in expected.items()
        }
        reader = MigratingReader(source, rules=[rules], allow={"lossy"})
        dcp.load(state, storage_reader=reader)
        same(state, expected)


def failures(call: Any) -> dict[int, BaseException]:
    """What went wrong on which rank, as every rank sees it."""
    try:
        call()
    except CheckpointException as error:
        return {rank: found for rank, (found, _) in error.failures.items()}
    raise AssertionError("nothing went wrong")


def opened(path: str) -> int:
    """How often this process holds the file open; 0 where the system does not say it."""
    here = Path("/proc/self/fd")
    held = here.iterdir() if here.exists() else ()
    return sum(os.path.samefile(one, path) for one in held if os.path.exists(one))


def is_refused_on_every_rank(rank: int, source: str, rules: str, other: str) -> None:
    """Different rules, shapes, permissions and checkpoints on one of the ranks."""
    expected = new_layout(old_layout())

    def state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        return {key: torch.zeros(one.shape, dtype=dtype) for key, one in expected.items()}

    one = rank == 1
    mine = state()
    found = failures(
        lambda: dcp.load(
            mine, storage_reader=MigratingReader(source, rules=[other if one else rules])
        )
    )
    assert found.keys() == {0}
    assert "M974" in str(found[0])
    assert "rank 1" in str(found[0])
    assert not any(value.any() for value in mine.values())
    mine = state()
    if one:
        mine["head.weight"] = torch.zeros(7, 6)
    reader = MigratingReader(source, rules=[rules])
    found = failures(lambda: dcp.load(mine, storage_reader=reader))
    # torch tells the reader of no rank that a planner failed, and this one is still held
    assert reader.report is None
    assert not opened(source)
    assert not opened(os.path.dirname(source))
    assert found.keys() == {1}
    assert "Size mismatch" in str(found[1])
    assert "head.weight" in str(found[1])
    assert not any(value.any() for value in mine.values())
    path = source + ".absent" if one else source
    found = failures(lambda: dcp.load(mine, storage_reader=MigratingReader(path, rules=[rules])))
    assert found.keys() == {1}
    assert "M917" in str(found[1])
    mine = state(torch.bfloat16 if one else torch.float32)
    found = failures(lambda: dcp.load(mine, storage_reader=MigratingReader(source, rules=[rules])))
    assert found.keys() == {1}
    assert "M961" in str(found[1])
    some = {"head.weight": torch.zeros(7, 5)} if one else {"layers.0.up": torch.zeros(4, 6, 5)}
    reader = MigratingReader(source, rules=[rules])
    dcp.load(some, storage_reader=reader)
    assert reader.report is not None
    # what one rank asks for is not unexpected on the other one
    assert set(reader.report.unexpected) == expected.keys() - {"head.weight", "layers.0.up"}


def condition_that_does_not_hold(rank: int, source: str, rules: str) -> None:
    """A condition on values is checked by the coordinator, before any rank writes."""
    mine = {"norm": torch.zeros(8)}
    found = failures(lambda: dcp.load(mine, storage_reader=MigratingReader(source, rules=[rules])))
    assert found.keys() == {0}
    assert "M4" in str(found[0])
    assert not mine["norm"].any()


SHAPES = {"up": (64, 64, 1024), "wide": (700, 2048), "narrow": (90000, 4), "turned": (2048, 700)}


def reads_what_its_shards_need(rank: int, source: str, rules: str) -> None:
    """Bytes read of the data, against those of the shards; the last dimension has short runs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # runs of 256 KiB, of 64 KiB, of 2 KiB, and of 1 KiB and of 4 bytes
    for key, dim, most in (
        ("up", 0, 1.1),
        ("up", 1, 1.1),
        ("wide", 1, 1.1),
        ("up", 2, 3.0),
        ("narrow", 1, 3.0),
        ("turned", 0, 3.0),
    ):
        shape = SHAPES[key]
        state = {key: zeros(shape, device_mesh=mesh, placements=[Shard(dim)])}
        reader = MigratingReader(source, rules=[rules])
        with counted() as read:
            dcp.load(state, storage_reader=reader)
        assert reader.report is not None
        needed = state[key].to_local().nbytes
        assert reader.report.bytes_written == needed
        assert needed <= read.data <= most * needed, (key, dim, read.data / needed)
        made = zeros(shape, device_mesh=mesh, placements=[Shard(dim)])
        module = nn.Module()
        module.register_parameter(key, nn.Parameter(made, requires_grad=False))
        with counted() as read:
            migrate.load(module, source, rules=[rules], strict=False)
        assert torch.equal(made.to_local(), state[key].to_local())
        # of an archive that is read whole the checksum is compared before anything is written
        assert needed <= read.data <= (most + 1) * needed, (key, dim, read.data / needed)


class Counted:
    """The bytes that were read of files of data, in large stretches and all together."""

    def __init__(self) -> None:
        self.data = self.calls = 0


@contextmanager
def counted() -> Iterator[Counted]:
    """Counts what this process reads by `pread` and `preadv`."""
    out, pread, preadv = Counted(), os.pread, os.preadv

    def one(descriptor: int, size: int, offset: int) -> bytes:
        found = pread(descriptor, size, offset)
        out.data, out.calls = out.data + len(found), out.calls + 1
        return found

    def many(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        found = preadv(descriptor, buffers, offset, *flags)
        out.data, out.calls = out.data + found, out.calls + 1
        return found

    os.pread, os.preadv = one, many
    try:
        yield out
    finally:
        os.pread, os.preadv = pread, preadv


def is_invisible(rank: int, folder: str) -> None:
    """What stock torch saved and loads, with the reader in the place of torch's: placements and
    meshes that change, and plain tensors beside them.
    """
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2))
    ways: list[tuple[DeviceMesh, list[Placement]]] = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (line, [Shard(1)]),
        (square, [Replicate(), Replicate()]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
        (square, [Shard(0), Shard(0)]),
        (square, [Shard(1), Shard(0)]),
    ]
    # five rows: some ranks have none of them
    whole = torch.arange(15, dtype=torch.float32).view(5, 3)
    for number, (mesh, placements) in enumerate(ways):
        held = {"t": distribute_tensor(whole, mesh, placements), "plain": whole[0].clone()}
        dcp.save({**held, "step": number}, checkpoint_id=f"{folder}/{number}")
        for new_mesh, new_placements in ways:
            both = []
            for reader in (dcp.FileSystemReader, MigratingReader):
                part = zeros((5, 3), device_mesh=new_mesh, placements=new_placements)
                state: dict[str, Any] = {"t": part, "plain": torch.zeros(3), "step": -1}
                dcp.load(state, storage_reader=reader(f"{folder}/{number}"))
                both.append(state)
            stock, ours = both
            assert torch.equal(stock["t"].to_local(), ours["t"].to_local())
            assert torch.equal(full(ours["t"]), whole)
            assert torch.equal(ours["plain"], whole[0])
            assert ours["step"] == stock["step"] == number


def fills_sharded_tensors(rank: int, folder: str) -> None:
    """Tensors of torch's older class, of which a rank may have several shards, none in order."""

    def cut(shards: list[tuple[list[int], list[int], int]]) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(
            [ShardMetadata(at, size, f"rank:{owner}/cpu") for at, size, owner in shards]
        )

    specs = [
        ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"]),
        ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu", "rank:1/cpu"]),
        cut([([0, 0], [2, 20], 0), ([2, 0], [1, 20], 1), ([3, 0], [7, 20], 0)]),
        cut([([0, 0], [8, 20], 1), ([8, 0], [2, 20], 0)]),
    ]
    for number, spec in enumerate(specs):
        torch.manual_seed(rank + 10 * number)
        held = sharded_tensor.rand(spec, 10, 20)
        dcp.save({"t": held}, checkpoint_id=f"{folder}/{number}")
        for other in specs:
            both = []
            for reader in (dcp.FileSystemReader, MigratingReader):
                target = sharded_tensor.zeros(other, 10, 20)
                dcp.load({"t": target}, storage_reader=reader(f"{folder}/{number}"))
                both.append(target.local_shards())
            for stock, ours in zip(*both, strict=True):
                assert torch.equal(stock.tensor, ours.tensor)
                assert ours.tensor.any()
