"""Cases for `ranks`: what the README and docs/distributed.md show, as it stands there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import built
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import migrate
from migrate.core.errors import MigrateError


def sharded(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A model with these tensors under FSDP2, each zero."""
    model = built.module(state, fill=0)
    fully_shard(model)
    return model


def same(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    held = model.state_dict()
    assert held.keys() == expected.keys()
    for key, value in held.items():
        assert isinstance(value, DTensor), key
        assert torch.equal(value.full_tensor(), expected[key]), key


def execute(code: str, folder: str, names: dict[str, Any]) -> None:
    """Runs `code` where its paths are; the ranks live on in the folder that they have."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(code, names)
    finally:
        os.chdir(before)


def happens_as_shown(rank: int, folder: str, code: str) -> None:
    """Runs `code` on a sharded model of transformers 5 in `folder`, which has TRAINED; then all of
    the model is there.
    """
    expected = built.state_of(built.V5)
    model = sharded(expected)
    names: dict[str, Any] = {
        "migrate": migrate,
        "dcp": dcp,
        "get_model_state_dict": get_model_state_dict,
        "set_model_state_dict": set_model_state_dict,
        "StateDictOptions": StateDictOptions,
        "model": model,
        "rank": rank,
        "old": load_file(Path(built.V4) / "model.safetensors"),
    }
    execute(code, folder, names)
    same(model, expected)


def attach_happens_as_shown(rank: int, folder: str, code: str) -> None:
    """The same for the hook: the rules only rename; where they need elements it refuses them."""
    old = built.state_of(built.V4)
    expected = {key.removeprefix("model."): value for key, value in old.items()}
    model, former = sharded(expected), sharded(old)
    names: dict[str, Any] = {
        "migrate": migrate,
        "dcp": dcp,
        "get_model_state_dict": get_model_state_dict,
        "model": model,
        "former": former,
    }
    execute(code, folder, names)
    same(model, expected)
    stacked = sharded(built.state_of(built.V5))
    migrate.attach(stacked, to="hf-mixtral@v5")
    with pytest.raises((MigrateError, RuntimeError), match="M916") as raised:
        stacked.load_state_dict(get_model_state_dict(former))
    assert "a DTensor is moved as a whole or not at all" in str(raised.value)
    assert not any(one.to_local().any() for one in stacked.parameters())
