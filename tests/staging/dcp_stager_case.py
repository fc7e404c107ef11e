"""Cases for `ranks`: a model under FSDP2 that trains on while torch saves what was staged of it."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_ranks import HAS_STAGERS, async_save, parent
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import migrate

EXECUTORS = {"thread": AsyncCheckpointerType.THREAD, "process": AsyncCheckpointerType.PROCESS}
SAVES = 5
# before torch 2.11 a cycle in its `traverse_state_dict` holds what was saved in this process
LEFT_TO_COLLECTOR = torch.__version__ < (2, 11)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """7 rows for two ranks: their parts are not equal. The large one shows growth."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1024), nn.Linear(1024, 4096, bias=False))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    moments = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": moments, "step": step}


def local(state: Any, path: str = "") -> dict[str, Any]:
    """What this rank has of a state, by path, in memory of its own."""
    if isinstance(state, dict):
        return {k: v for key, one in state.items() for k, v in local(one, f"{path}.{key}").items()}
    if isinstance(state, DTensor):
        return {path: state.to_local().detach().clone()}
    return {path: state.detach().clone() if isinstance(state, torch.Tensor) else state}


def emptied(state: Any) -> Any:
    """The same structure with other values, to load into."""
    if isinstance(state, dict):
        return {key: emptied(one) for key, one in state.items()}
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, -1)
    return -1 if isinstance(state, int) else state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x, other[key]) if isinstance(x, torch.Tensor) else x == other[key]
        for key, x in one.items()
    )


def trains(rank: int, folder: str, executor: str, non_blocking: str) -> None:
    """Saves of five steps in a row; each has the values of its step, and memory does not grow."""
    torch.manual_seed(rank)
    stager = migrate.Stager(share_memory=executor == "process")
    ours = stager.for_dcp(non_blocking=bool(non_blocking))
    model, optimizer = model_and_optimizer()
    step_of(model, optimizer)
    # the collectives of a save run beside those of the training
    group = dist.new_group(backend="gloo")
    wanted: list[dict[str, Any]] = []
    held: list[int] = []
    gc.collect()
    gc.disable()
    try:
        # the process that saves is started by a thread of torch's
        with parent():
            for step in range(SAVES):
                state = state_of(model, optimizer, step)
                wanted.append(local(state))
                saved = async_save(
                    state,
                    f"{folder}/{step}",
                    ours,
                    async_checkpointer_type=EXECUTORS[executor],
                    process_group=group,
                )
                ours.guard()
                step_of(model, optimizer)
                assert hasattr(saved, "upload_completion") == bool(non_blocking)
                getattr(saved, "staging_completion", saved).result()
                getattr(saved, "upload_completion", saved).result()
                del saved, state
                if LEFT_TO_COLLECTOR and (executor == "thread" or not HAS_STAGERS):
                    gc.collect()
                held.append(stager.nbytes)
        free(stager)
    finally:
        gc.enable()
    size = sum(x.nbytes for x in wanted[0].values() if isinstance(x, torch.Tensor))
    assert held[0] >= size
    # a thread of torch's may still have the save before
    assert max(held) <= 2 * held[0], held
    for step, values in enumerate(wanted):
        into = emptied(state_of(model, optimizer, -1))
        dcp.load(into, checkpoint_id=f"{folder}/{step}")
        assert same(local(into), values), step


def loops(rank: int, lines: str, folder: str) -> None:
    """A loop of docs/staging.md over five batches, which saves every other step."""
    torch.manual_seed(rank)
    model, optimizer = model_and_optimizer()
    wanted: dict[int, dict[str, Any]] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        step_of(model, optimizer)
        wanted[step] = local(state_of(model, optimizer, step))

    names = {"migrate": migrate, "torch": torch, "model": model, "optimizer": optimizer}
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(lines, {**names, "train": train, "batches": range(SAVES)})
    finally:
        os.chdir(before)
    for step in (0, 2, 4):
        into = emptied(state_of(model, optimizer, -1))
        dcp.load(into, checkpoint_id=f"{folder}/step-{step}")
        assert same(local(into), wanted[step]), step


def free(stager: migrate.Stager) -> None:
    """Returns when nothing refers to memory of the stager, which a thread of torch's may still do
    when the result is there.
    """
    for _ in range(3000):
        stager.trim()
        if not stager.nbytes:
            return
        time.sleep(0.01)
    raise AssertionError(f"{stager.nbytes} bytes are still lent")
