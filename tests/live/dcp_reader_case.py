"""Cases for `ranks`: what `dcp.load` reads through a reader that migrates, each rank its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from migrate.dcp import MigratingReader

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
