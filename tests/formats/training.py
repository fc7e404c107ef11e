"""Cases for `ranks`: a training's checkpoint as FSDP2 ranks save it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model after a step, equal in every process; with rows that two ranks do not divide."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3))
    if dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    held: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(model, optimizer, options=options)
    return held


def saves(rank: int, folder: str, spelling: str) -> None:
    """The checkpoint: `nested`, `flat`, or with the model at the root as torchtitan has it."""
    warnings.simplefilter("ignore")
    model, optimizer = state_of(spelling != "nested")
    state = {"optimizer": optimizer, "train_state": {"step": torch.tensor(3)}, "note": "x"}
    dcp.save(
        {**model, **state} if spelling == "root" else {"model": model, **state},
        checkpoint_id=folder,
    )


def saves_alone(rank: int, folder: str) -> None:
    """Without collectives: each rank writes what it has, and a file that describes it."""
    warnings.simplefilter("ignore")
    state = {"both": torch.arange(6.0), f"rank{rank}": {"x": torch.full((2,), float(rank))}}
    Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    dcp.save(state, checkpoint_id=folder, use_collectives=False)
