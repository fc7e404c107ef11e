"""Modules made to measure: one with exactly the tensors of a state dict."""

from __future__ import annotations

from pathlib import Path

import torch
from commandline import DATA
from safetensors.torch import load_file

V4, V5 = DATA / "mixtral__v4" / "hub", DATA / "mixtral__v4" / "v5"
HEAD = "id: t/live\ntitle: t\nlineage: t\nedge: [a, b]\n"


def state_of(folder):
    return load_file(folder / "model.safetensors")


def module(state, device="cpu", fill=7):
    """A module whose parameters have these names, shapes and dtypes; what stands in them is
    `fill`.
    """
    root = torch.nn.Module()
    for key, tensor in state.items():
        *path, last = key.split(".")
        owner = root
        for name in path:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.Module())
            owner = owner._modules[name]
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        owner.register_parameter(
            last,
            torch.nn.Parameter(made if device == "meta" else made.fill_(fill), requires_grad=False),
        )
    return root


def same(model, state):
    """Whether the module holds exactly these bits."""
    held = model.state_dict()
    return held.keys() == state.keys() and all(
        held[key].dtype == one.dtype and held[key].shape == one.shape and raw(held[key]) == raw(one)
        for key, one in state.items()
    )


def raw(tensor):
    return (
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


def untouched(model, fill=7):
    """Whether nothing was written to a module that `module` made."""
    return all(bool((one == fill).all()) for one in model.parameters())


def rules(folder: Path, text: str) -> Path:
    path = folder / f"rule{len(list(folder.iterdir()))}.yaml"
    path.write_text(HEAD + text)
    return path


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.got = []

    def get_extra_state(self):
        return {"calls": 0}

    def set_extra_state(self, state):
        self.got.append((state, self.w.tolist()))


class Refusing(torch.nn.Module):
    """Has an extra state and must never be given one."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((2,), 7.0))

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        raise AssertionError(state)
