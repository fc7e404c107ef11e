"""State dicts in memory: what is tied stays tied, what is copied is not, and nothing of the caller's is touched."""

from __future__ import annotations

import pytest
import torch

import migrate
from migrate.formats import memory
from migrate.live.statedict import materialise, tied
from migrate.planning.graph import Graph, Tensor
from migrate.planning.pipeline import Views

HEAD = "id: t/live\ntitle: t\nlineage: t\nedge: [a, b]\n"


def apply(tmp_path, rules, state):
    file = tmp_path / "rule.yaml"
    file.write_text(HEAD + rules)
    return migrate.apply(state, rules=file)


def kept(state):
    """The graph that keeps a state dict as it is."""
    source = memory.open(state)
    views = Views()
    tensors = {k: Tensor(s.spec, views.stored(s.spec.shape, s.strides), (k,)) for k, s in source.index.tensors.items()}
    return Graph(tensors), source


def test_tied_tensors_come_out_tied_and_new():
    weight = torch.arange(6.0).reshape(2, 3)
    graph, source = kept({"embed": weight, "head": weight, "other": weight.clone()})
    made = materialise(graph, source)
    assert made["embed"] is made["head"]
    assert made["other"] is not made["embed"]
    assert torch.equal(made["embed"], weight)
    made["embed"].zero_()
    assert weight.sum() == 15


def test_views_of_one_storage_at_different_places_are_no_ties():
    both = torch.arange(8.0)
    graph, source = kept({"a": both[:4], "b": both[4:], "t": both.reshape(2, 4).T})
    assert tied(graph.outputs, source.index.tensors) == {"a": "a", "b": "b", "t": "t"}
    made = materialise(graph, source)
    assert torch.equal(made["t"], both.reshape(2, 4).T)
    assert made["t"].is_contiguous()


@pytest.mark.parametrize(("op", "same"), [("tie", True), ("copy", False)])
def test_tie_makes_one_tensor_and_copy_makes_several(tmp_path, op, same):
    rules = f"rules:\n  - {{name: r, from: w, to: '{{n:x|y}}', via: [{{{op}: {{into: n}}}}]}}\n"
    made = apply(tmp_path, rules, {"w": torch.ones(3)})
    assert (made["x"] is made["y"]) is same
    assert torch.equal(made["x"], made["y"])


def test_values_that_are_no_tensors_are_carried():
    graph, source = kept({"w": torch.zeros(1), "epoch": 3})
    assert materialise(graph, source)["epoch"] == 3
