"""Cases for `ranks`: distributed checkpoints that torch saves and loads, each rank its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_case import sharded
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

# how the tensors of a load are held, one after the other
HELD: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())


def save(rank: int, folder: str, whole: str) -> None:
    """Saves a model with FSDP2 by torch, and all of it in one file of torch.save."""
    torch.manual_seed(3)
    model = sharded("cpu")
    state = get_model_state_dict(model)
    full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    if rank == 0:
        torch.save({"model": full, "epoch": 3}, whole)
    dcp.save({"model": state, "epoch": 3}, checkpoint_id=folder)


def load(rank: int, folder: str, whole: str) -> None:
    """Loads every tensor as a part of it that this rank holds, and compares."""
    expected: dict[str, Any] = torch.load(whole, weights_only=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target: dict[str, Any] = {"model": {}, "epoch": 0}
    for number, (key, value) in enumerate(expected["model"].items()):
        held = HELD[number % 3] if value.dim() > 1 else HELD[0] if value.dim() else HELD[2]
        target["model"][key] = zeros(
            value.shape, dtype=value.dtype, device_mesh=mesh, placements=[held]
        )
    dcp.load(target, checkpoint_id=folder)
    assert target["epoch"] == expected["epoch"]
    for key, value in expected["model"].items():
        assert torch.equal(target["model"][key].full_tensor(), value), key


def load_model(rank: int, folder: str, whole: str) -> None:
    """Loads a model with FSDP2 from what it is not cut for, and compares."""
    expected = torch.load(whole, weights_only=True)["model"]
    torch.manual_seed(4)
    model = sharded("cpu")
    state = get_model_state_dict(model)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(model, state)
    for key, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, expected[key]), key
