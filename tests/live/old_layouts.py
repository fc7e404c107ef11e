"""A small model, its state dict in an older layout, and what must hold of a module before and after
a load.
"""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

HEAD = "id: t/hook\ntitle: t\nlineage: t\nedge: [a, b]\n"
# two halves become one, the norm is renamed
FUSE = """
rules:
  - {name: fuse, from: "{p...}.half{i:int}", to: "{p}.weight", via: [{concat: {over: i, dim: 0, count: 2}}]}
  - {name: norm, from: "{p...}.ln.{k}", to: "{p}.norm.{k}", optional: true}
keep: ["{p...}.bias"]
"""  # noqa: E501


class Block(nn.Module):
    def __init__(self, size=4):
        super().__init__()
        self.proj = nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)


class Model(nn.Module):
    def __init__(self, layers=2, size=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))


def rule(tmp_path, text, name="rule.yaml"):
    file = tmp_path / name
    file.write_text(HEAD.replace("t/hook", f"t/{name[:-5]}") + text)
    return file


def old(layers=2, size=4, lead=""):
    made = OrderedDict()
    for i in range(layers):
        for half in range(2):
            made[f"{lead}layers.{i}.proj.half{half}"] = torch.randn(size // 2, size)
        made[f"{lead}layers.{i}.proj.bias"] = torch.randn(size)
        made[f"{lead}layers.{i}.ln.weight"] = torch.randn(size)
        made[f"{lead}layers.{i}.ln.bias"] = torch.randn(size)
    return made


def wanted(state, layers=2, lead=""):
    out = {}
    for i in range(layers):
        out[f"{lead}layers.{i}.proj.weight"] = torch.cat(
            [state[f"{lead}layers.{i}.proj.half{h}"] for h in range(2)]
        )
        out[f"{lead}layers.{i}.proj.bias"] = state[f"{lead}layers.{i}.proj.bias"]
        for k in ("weight", "bias"):
            out[f"{lead}layers.{i}.norm.{k}"] = state[f"{lead}layers.{i}.ln.{k}"]
    return out


def photo(module):
    """What must not change when nothing may change."""
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return [
        (name, id(t), t.data_ptr(), t._version, t.requires_grad, id(t.grad), t.detach().clone())
        for name, t in tensors
    ]


def same(a, b):
    return len(a) == len(b) and all(
        x[:-1] == y[:-1] and torch.equal(x[-1], y[-1]) for x, y in zip(a, b, strict=True)
    )


def holds(module, tensors):
    got = module.state_dict()
    assert got.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(got[key], tensor), key


def refused(module, state, *codes, assign=False, strict=True):
    """The message of a refusal that left the module as it was."""
    before = photo(module)
    with pytest.raises(RuntimeError) as caught:
        module.load_state_dict(state, strict=strict, assign=assign)
    assert same(photo(module), before)
    text = str(caught.value)
    for code in codes:
        assert f"error[{code}]" in text
    assert "Missing key" not in text
    assert "Unexpected key" not in text
    return text
