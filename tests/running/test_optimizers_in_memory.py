"""Training checkpoints in memory: dicts in a dict, whose optimizer state follows the model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import following
import pytest
import torch
from following import adamw, moved, random, sgd, shapes_per_expert, states, step, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import migrate
from migrate.core.errors import CheckpointError

Held = dict[str, Any]


def by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def with_lists(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """As Lightning holds it."""
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def at_the_root_by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    return {**model.state_dict(), "optimizer": optimizer.state_dict()}


CASES: list[tuple[Callable[..., Held], Any]] = [
    (following.nested, adamw),
    (following.flattened, sgd),
    (following.at_the_root, adamw),
    (by_number, sgd),
    (by_number, adamw),
    (with_lists, adamw),
    (at_the_root_by_number, sgd),
]


def loaded(held: Any, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    weights = held.get("model", held.get("state_dict"))
    if weights is None:
        weights = {k: v for k, v in held.items() if isinstance(v, torch.Tensor)}
    model = following.module_of(weights)
    optimizer = make(model)
    state = held["optimizer_states"][0] if "optimizer_states" in held else held["optimizer"]
    numbered = "state" in state and all(isinstance(key, int) for key in state["state"])
    if numbered:
        optimizer.load_state_dict(state)
    else:
        set_optimizer_state_dict(model, optimizer, state)
    return model, optimizer


@pytest.mark.parametrize(("spelling", "make"), [CASES[0], CASES[1], CASES[4]])
def test_a_training_in_memory_goes_back_and_steps_on_to_the_same_bits(
    spelling: Any, make: Any, tmp_path: Path
) -> None:
    rules = following.rules(tmp_path)
    old, optimizer = trained(make)
    held = copy.deepcopy(spelling(old, optimizer))
    there = migrate.migrate_state_dict(held, rules=rules)
    back = migrate.migrate_state_dict(there, rules=rules, backwards=True)
    again, resumed = loaded(back, make)
    for one, other in ((old, optimizer), (again, resumed)):
        step(one, other, random(shapes_per_expert(), 9))
    wanted = dict(old.named_parameters())
    assert all(torch.equal(value, wanted[key]) for key, value in again.named_parameters())
    before, after = states(optimizer, old), states(resumed, again)
    for key, moments in before.items():
        assert all(torch.equal(value, after[key][name]) for name, value in moments.items())


@pytest.mark.parametrize(("spelling", "make"), CASES)
@pytest.mark.parametrize("call", [migrate.migrate_state_dict, migrate.apply])
def test_a_training_in_memory_steps_on_to_the_same_bits(
    spelling: Any, make: Any, call: Any, tmp_path: Path
) -> None:
    rules = following.rules(tmp_path)
    old, optimizer = trained(make)
    # what comes out may share memory with what went in, and the old training goes on below
    held = copy.deepcopy(spelling(old, optimizer))
    told: list[Any] = []
    new, again = loaded(call(held, rules=rules, inform=told.append), make)
    assert any("follows its parameters" in note for note in told[0].to_json()["notes"])
    grads = random(shapes_per_expert(), 9)
    step(old, optimizer, grads)
    step(new, again, moved(grads, rules))
    wanted = moved(dict(old.state_dict()), rules)
    assert all(torch.equal(value, wanted[key]) for key, value in new.named_parameters())
    before, after = states(optimizer, old), states(again, new)
    assert before.keys() == after.keys()
    for moment in before.keys() - {"step"}:
        given = moved(before[moment], rules)
        assert after[moment].keys() == given.keys()
        assert all(torch.equal(value, given[key]) for key, value in after[moment].items())
    assert {float(one) for one in after.get("step", {}).values()} <= {4.0}


SPLIT = following.HEAD + (
    'keep: ["other.weight"]\n'
    'rules: [{name: split, from: "qkv.weight", to: "{w:q|k|v}.weight", via: [{split: {into: w, '
    "dim: 0}}]}]\n"
)


@pytest.mark.parametrize("call", [migrate.migrate_state_dict, migrate.apply])
def test_what_did_not_change_is_the_callers_own_and_nothing_is_shared(
    call: Any, tmp_path: Path
) -> None:
    old, optimizer = trained(adamw, {"qkv.weight": (6, 4), "other.weight": (3,)})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5)
    beside = {"scheduler": scheduler, "history": [1, {"loss": 0.5}]}
    held = {**by_number(old, optimizer), **beside}
    new = call(held, rules=following.rules(tmp_path, SPLIT))
    assert list(new) == list(held)
    assert new["scheduler"] is scheduler
    assert new["history"] is held["history"]
    assert (len(new), "model" in new, "q.weight" in new) == (5, True, False)
    assert list(held["model"]) == ["qkv.weight", "other.weight"]
    assert list(new["model"]) == ["q.weight", "k.weight", "v.weight", "other.weight"]
    assert "k" in new["model"]._metadata
    state = new["optimizer"]["state"]
    counters = [state[number]["step"] for number in range(4)]
    assert len({counter.data_ptr() for counter in counters}) == 4
    # torch changes counters in place: one that is shared would count twice
    model, again = loaded(new, adamw)
    step(model, again, dict(new["model"]))
    assert {float(again.state[one]["step"]) for one in model.parameters()} == {4.0}
    if call is migrate.migrate_state_dict:
        assert new["model"]["other.weight"] is held["model"]["other.weight"]
        whole = new.materialise()
        assert type(whole["model"]) is OrderedDict
        assert whole["model"].keys() == new["model"].keys()
        assert "training checkpoint of model, optimizer" in repr(new)
        lazy = new.lazy()["model"]
        model.load_state_dict(lazy)
        assert torch.equal(model.get_parameter("k.weight"), held["model"]["qkv.weight"][2:4])


def test_a_training_in_memory_is_refused_as_a_file_is(tmp_path: Path) -> None:
    held = following.nested(*trained(adamw))
    held["optimizer"]["state"].pop("layers.0.moe.experts.2.w1.weight")
    rules = following.rules(tmp_path)
    with pytest.raises(CheckpointError, match="M410"):
        migrate.migrate_state_dict(held, rules=rules)
    out = migrate.migrate_state_dict(
        held, rules=rules, params={"optimizer": "drop"}, allow={"drop"}
    )
    assert list(out) == ["model", "step"]
    out = migrate.migrate_state_dict(held, rules=rules, allow={"stale-optimizer"})
    assert out["optimizer"] is held["optimizer"]
    twice = {"student": held["model"], "teacher": held["model"].copy()}
    with pytest.raises(CheckpointError, match=r"M945[\s\S]*several|M945[\s\S]*2 dicts of tensors"):
        migrate.migrate_state_dict(twice, rules=rules)
