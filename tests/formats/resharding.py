"""Cases for `ranks`: tensors that lie on a mesh of processes in every way that DTensor has, saved
and loaded by stock torch.distributed.checkpoint, and a model with FSDP2.

A case says which mesh and which `turn`. The tensors take their placements from all that there are
for their axes and the mesh's, each beginning at another one, and the turn shifts them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

Tensors = dict[str, torch.Tensor]

LAYERS, EXPERTS = 2, 3
# what stands beside the model
BESIDE = {"step": 7, "schedule": {"name": "cosine", "last_lr": [0.1, 0.2]}}
RULE = """
id: demo/2/all
title: Rename, stack, concatenate, split, transpose
why: a test
lineage: demo
edge: ["1", "2"]
keep: ["{k:embed.weight|one|scale}"]
rules:
  - name: experts
    from: "blocks.{i:int}.experts.{e:int}.{w:gate|up}.weight"
    to: "layers.{i}.gate_up"
    via:
      - stack: {over: e, count: 3}
      - concat: {over: w, dim: 1}
      - transpose: {dims: [1, 2]}
  - name: down
    from: "blocks.{i:int}.experts.{e:int}.down.weight"
    to: "layers.{i}.down"
    via: [{stack: {over: e, count: 3}}]
  - name: qkv
    from: "blocks.{i:int}.qkv.weight"
    to: "layers.{i}.{w:q|k|v}.weight"
    via: [{split: {into: w, dim: 0, sizes: {q: 5, k: 2, v: 2}}}]
  - {name: norm, from: "blocks.{i:int}.norm.weight", to: "layers.{i}.norm.weight"}
  - {name: head, from: head.weight, to: head.kernel, via: [{transpose: {dims: [0, 1]}}]}
  - {name: cube, from: cube, to: box, via: [{permute: {dims: [2, 0, 1]}}]}
"""


def bits(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    """Elements of any bits, so also those that are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def old_tensors() -> Tensors:
    """The model in its old layout. Rows are uneven for most numbers of ranks, and of some tensors
    fewer than ranks.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "embed.weight": (torch.float32, (7, 5)),
        "one": (torch.int16, (1, 4)),
        "scale": (torch.float32, ()),
        "head.weight": (torch.float64, (5, 11)),
        "cube": (torch.bfloat16, (3, 4, 5)),
    }
    for i in range(LAYERS):
        at = f"blocks.{i}."
        shapes[f"{at}norm.weight"] = torch.float32, (5,)
        shapes[f"{at}qkv.weight"] = torch.float16, (9, 5)
        for e in range(EXPERTS):
            for w in ("gate", "up"):
                shapes[f"{at}experts.{e}.{w}.weight"] = torch.bfloat16, (6, 5)
            shapes[f"{at}experts.{e}.down.weight"] = torch.bfloat16, (5, 6)
    return {
        key: bits(dtype, *shape, seed=number)
        for number, (key, (dtype, shape)) in enumerate(shapes.items())
    }


def new_tensors() -> Tensors:
    """What `RULE` stands for, in torch's own words."""
    old = old_tensors()
    new = {key: old[key] for key in ("embed.weight", "one", "scale")}
    new["head.kernel"] = old["head.weight"].T
    new["box"] = old["cube"].permute(2, 0, 1)
    for i in range(LAYERS):
        at, to = f"blocks.{i}.", f"layers.{i}."
        new[f"{to}norm.weight"] = old[f"{at}norm.weight"]
        parts = old[f"{at}qkv.weight"].split((5, 2, 2))
        new |= {f"{to}{w}.weight": part for w, part in zip("qkv", parts, strict=True)}
        experts = [
            torch.cat([old[f"{at}experts.{e}.{w}.weight"] for w in ("gate", "up")])
            for e in range(EXPERTS)
        ]
        new[f"{to}gate_up"] = torch.stack(experts).transpose(1, 2)
        new[f"{to}down"] = torch.stack(
            [old[f"{at}experts.{e}.down.weight"] for e in range(EXPERTS)]
        )
    return {key: tensor.contiguous() for key, tensor in new.items()}


TENSORS = {"old": old_tensors, "new": new_tensors}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def spread(tensors: Tensors, sizes: list[int], turn: int) -> dict[str, DTensor]:
    """The part of each tensor that lies on this rank."""
    found = {}
    for number, (key, tensor) in enumerate(tensors.items()):
        each: list[Placement] = [*map(Shard, range(tensor.ndim)), Replicate()]
        ways = list(itertools.product(each, repeat=len(sizes)))
        way = ways[(number + turn) % len(ways)]
        found[key] = distribute_tensor(tensor, mesh_of(*sizes), way, src_data_rank=None)
    return found


def empty_like(state: Mapping[str, DTensor]) -> dict[str, DTensor]:
    """Places for the same parts, with other bits."""
    return {
        key: DTensor.from_local(
            bits(one.dtype, *one.to_local().shape, seed=99),
            one.device_mesh,
            one.placements,
            run_check=False,
            shape=one.shape,
            stride=one.stride(),
        )
        for key, one in state.items()
    }


def saves(rank: int, folder: str, which: str, sizes: list[int], turn: int) -> None:
    """The checkpoint of ranks on this mesh."""
    state = {"model": spread(TENSORS[which](), sizes, turn), **BESIDE}
    dcp.save(state, checkpoint_id=folder)


def saves_grids(rank: int, folder: str, which: str, sizes: list[int], turn: int) -> None:
    """The same as ShardedTensor, which may have any boxes: a grid of uneven ones, of which a rank
    has several, none of them neighbours.
    """
    world, state = math.prod(sizes), {}
    for number, (key, tensor) in enumerate(TENSORS[which]().items()):
        if not tensor.ndim:
            state[key] = tensor
            continue
        edges = [sorted({0, (n + turn) % 3 % n, n - n // 2, n}) for n in tensor.shape]
        boxes = itertools.product(*(itertools.pairwise(one) for one in edges))
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    [start for start, _ in box],
                    [stop - start for start, stop in box],
                    f"rank:{(number + place) % world}/cpu",
                )
                for place, box in enumerate(boxes)
            ]
        )
        made = sharded_tensor.empty(spec, *tensor.shape, dtype=tensor.dtype)
        for shard in made.local_shards():
            part = shard.metadata
            at = (
                slice(o, o + n) for o, n in zip(part.shard_offsets, part.shard_sizes, strict=True)
            )
            shard.tensor.copy_(tensor[tuple(at)])
        state[key] = made
    dcp.save({"model": state, **BESIDE}, checkpoint_id=folder)


def loads(rank: int, folder: str, which: str, sizes: list[int], turn: int) -> None:
    """Every rank gets its part of every tensor, to the bit, and what stands beside them."""
    wanted = spread(TENSORS[which](), sizes, turn)
    state: dict[str, Any] = {
        "model": empty_like(wanted),
        "step": 0,
        "schedule": {"name": "", "last_lr": []},
    }
    dcp.load(state, checkpoint_id=folder)
    for key, one in wanted.items():
        held = state["model"][key].to_local()
        assert same_bits(held, one.to_local()), (key, one.placements, held, one.to_local())
    assert {key: state[key] for key in BESIDE} == BESIDE


def keeps_its_parts(rank: int, folder: str, which: str, sizes: list[int], turn: int) -> None:
    """`loads` of a checkpoint with tensors alone."""
    wanted = spread(TENSORS[which](), sizes, turn)
    state = empty_like(wanted)
    dcp.load(state, checkpoint_id=folder)
    for key, one in wanted.items():
        assert same_bits(state[key].to_local(), one.to_local()), (key, one.placements)


class OldNet(nn.Module):
    """7 rows here and 6 there: parts are not equal."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 6)
        self.down = nn.Linear(6, 7, bias=False)
        self.experts = nn.ModuleList(nn.Linear(7, 3, bias=False) for _ in range(EXPERTS))
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x).relu())
        return sum((expert(x) for expert in self.experts), self.count)


class NewNet(nn.Module):
    """The same with its experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(5, 6)
        self.lower = nn.Parameter(torch.zeros(6, 7))
        self.experts = nn.Parameter(torch.zeros(EXPERTS, 7, 3))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x).relu() @ self.lower
        return torch.einsum("ni,eio->no", x, self.experts) + self.count


NET_RULE = """
id: demo/2/net
title: One parameter for all experts
why: a test
lineage: demo
edge: ["1", "2"]
keep: ["count"]
rules:
  - {name: lift, from: "up.{k}", to: "lift.{k}"}
  - {name: lower, from: down.weight, to: lower, via: [{transpose: {dims: [0, 1]}}]}
  - name: experts
    from: "experts.{e:int}.weight"
    to: experts
    via: [{stack: {over: e, count: 3}}, {transpose: {dims: [1, 2]}}]
"""


def net(sizes: list[int]) -> OldNet:
    """The old model, the same in every process: FSDP2, and tensor parallel where the mesh has two
    axes.
    """
    torch.manual_seed(5)
    made = OldNet()
    mesh = mesh_of(*sizes)
    if len(sizes) == 2:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(made, mesh["tp"], plan)
        mesh = mesh["dp"]
    for module in (made.up, made.down):
        fully_shard(module, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return made


def trains_and_saves(rank: int, folder: str, sizes: list[int]) -> None:
    """A step of training, and the checkpoint behind it, with what one process would have got in
    `wanted.pt` beside it.
    """
    model = net(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.arange(20.0).reshape(4, 5) / 7
    model(x).square().sum().backward()
    optimizer.step()
    wanted = {
        key: one.full_tensor() if isinstance(one, DTensor) else one
        for key, one in get_model_state_dict(model).items()
    }
    held, moments = get_state_dict(model, optimizer)
    dcp.save({"model": held, "optimizer": moments, "step": 1}, checkpoint_id=folder)
    of_state = _whole_moments(moments)
    if rank == 0:
        torch.save(wanted, Path(folder).with_name("wanted.pt"))
        torch.save(of_state, Path(folder).with_name("moments.pt"))


def _whole_moments(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{key}.{name}": one.full_tensor() if isinstance(one, DTensor) else one
        for key, held in state["state"].items()
        for name, one in held.items()
    }


def loads_the_new_net(rank: int, folder: str, sizes: list[int]) -> None:
    """The new model with FSDP2 on another mesh has what the old one had, to the bit."""
    old = OldNet()
    old.load_state_dict(torch.load(Path(folder).with_name("wanted.pt"), weights_only=True))
    model = NewNet()
    fully_shard(model, mesh=mesh_of(*sizes))
    state = {"model": get_model_state_dict(model), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    whole = {
        key: one.full_tensor() if isinstance(one, DTensor) else one
        for key, one in model.state_dict().items()
    }
    stacked = torch.stack([expert.weight.T for expert in old.experts])
    for key, wanted in (
        ("lift.weight", old.up.weight),
        ("lift.bias", old.up.bias),
        ("lower", old.down.weight.T),
        ("experts", stacked),
        ("count", old.count),
    ):
        assert same_bits(whole[key], wanted.detach()), key
    assert state["step"] == 1


def loads_the_new_moments(rank: int, folder: str, sizes: list[int]) -> None:
    """The optimizer of the new model with FSDP2 on another mesh has the moments of the old one."""
    model = NewNet()
    fully_shard(model, mesh=mesh_of(*sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.2)
    held, moments = get_state_dict(model, optimizer)
    state = {"model": held, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=held, optim_state_dict=state["optimizer"])
    now = _whole_moments(get_state_dict(model, optimizer)[1])
    old = torch.load(Path(folder).with_name("moments.pt"), weights_only=True)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    for name in ("exp_avg", "exp_avg_sq"):
        experts = [old[f"experts.{i}.weight.{name}"].T for i in range(EXPERTS)]
        for key, wanted in (
            ("lift.weight", old[f"up.weight.{name}"]),
            ("lift.bias", old[f"up.bias.{name}"]),
            ("lower", old[f"down.weight.{name}"].T),
            ("experts", torch.stack(experts)),
        ):
            assert bool(wanted.any()), key
            assert same_bits(now[f"{key}.{name}"], wanted), key
    for key in ("lift.weight", "lift.bias", "lower", "experts"):
        assert float(now[f"{key}.step"]) == 1
