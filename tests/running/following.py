"""A toy mixture of experts in two layouts, its optimizers, and the rules between the layouts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import migrate

HEAD = 'id: demo/2/x\ntitle: x\nwhy: x\nlineage: demo\nedge: ["1", "2"]\n'
EXPERTS, HIDDEN, INNER, LAYERS = 4, 6, 3, 2
# per expert -> stacked, gate above up, and the router by another name
MERGE = (
    HEAD
    + """keep: ["{p...}.norm.weight", embed.weight]
rules:
  - name: gate-up
    from: "{p...}.moe.experts.{e:int}.{w:w1|w3}.weight"
    to: "{p}.mlp.experts.gate_up_proj"
    via: [{stack: {over: e, count: 4}}, {concat: {over: w, dim: 1}}]
  - name: down
    from: "{p...}.moe.experts.{e:int}.w2.weight"
    to: "{p}.mlp.experts.down_proj"
    via: [{stack: {over: e, count: 4}}, {transpose: {dims: [1, 2]}}]
  - name: router
    from: "{p...}.moe.gate.weight"
    to: "{p}.mlp.gate.weight"
"""
)
Optimizer = torch.optim.Optimizer


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.125, weight_decay=0.1, amsgrad=True)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)


def random(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def shapes_per_expert() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (5, HIDDEN)}
    for layer in range(LAYERS):
        p = f"layers.{layer}"
        for e in range(EXPERTS):
            for w in ("w1", "w3", "w2"):
                shape = (HIDDEN, INNER) if w == "w2" else (INNER, HIDDEN)
                found[f"{p}.moe.experts.{e}.{w}.weight"] = shape
        found[f"{p}.moe.gate.weight"] = (EXPERTS, HIDDEN)
        found[f"{p}.norm.weight"] = (HIDDEN,)
    return found


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module with these parameters by their names, in this order."""
    root = nn.Module()
    for key, value in tensors.items():
        here = root
        *path, last = key.split(".")
        for name in path:
            if not hasattr(here, name):
                here.add_module(name, nn.Module())
            here = here.get_submodule(name)
        here.register_parameter(last, nn.Parameter(value.clone()))
    return root


def step(model: nn.Module, optimizer: Optimizer, grads: Mapping[str, torch.Tensor]) -> None:
    for key, parameter in model.named_parameters():
        parameter.grad = grads[key].clone()
    optimizer.step()


def trained(
    make: Callable[[nn.Module], Optimizer], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[nn.Module, Optimizer]:
    """A model per expert after three steps, and its optimizer."""
    shapes = shapes_per_expert() if shapes is None else shapes
    model = module_of(random(shapes, 0))
    optimizer = make(model)
    for seed in (1, 2, 3):
        step(model, optimizer, random(shapes, seed))
    return model, optimizer


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def nested(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = get_optimizer_state_dict(model, optimizer)
    return {"model": dict(model.state_dict()), "optimizer": held, "step": 3}


def flattened(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"model": dict(model.state_dict()), "optimizer": held, "step": 3}


def at_the_root(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """As torchtitan has it."""
    held = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {**model.state_dict(), "optimizer": held, "train_state": {"step": torch.tensor(3)}}


def among_weights(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """In one flat dict of tensors."""
    held = get_optimizer_state_dict(model, optimizer, options=FLAT)
    moments = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
    return {**model.state_dict(), **{f"optimizer.{key}": value for key, value in moments.items()}}


SPELLINGS = [nested, flattened, at_the_root, among_weights]


def rules(folder: Path, text: str = MERGE) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def moved(tensors: Mapping[str, torch.Tensor], rules: Path, back: bool = False) -> Any:
    """Tensors by name, such as gradients, moved as parameters are."""
    if back:
        with tempfile.TemporaryDirectory() as folder:
            migrate.downgrade(tensors, f"{folder}/x.safetensors", rules=rules)
            return load_file(f"{folder}/x.safetensors")
    return migrate.migrate_state_dict(tensors, rules=rules).materialise()


def states(optimizer: Optimizer, model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Moment -> parameter -> tensor."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state[parameter].items():
            found.setdefault(moment, {})[name] = value
    return found
