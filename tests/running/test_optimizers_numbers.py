"""Numbered optimizer state that has no moments, or beside which a rule adds parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from following import HEAD, adamw, module_of, random, step, trained
from torch import nn

import migrate
from migrate.core.errors import CheckpointError

SHAPES = {"a.bias": (3,), "a.weight": (3, 4), "b.bias": (3,), "b.weight": (3, 4)}
STACK = (
    'keep: ["{m:a|b}.bias"]\n'
    'rules: [{name: r, from: "{m:a|b}.weight", to: all.weight, via: [{stack: {over: m}}]}]\n'
)
ADD = (
    'keep: ["{k...}"]\n'
    "rules: [{name: r, OPTIMIZER from: a.bias, to: a.scale, keep_source: true, "
    "via: [{fill: {value: 0, dtype: float32, shape: [3]}}]}]\n"
)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125)


def saved(folder: Path, make: Any, **groups: float) -> Path:
    model, optimizer = trained(make, SHAPES)
    held = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    held["optimizer"]["param_groups"][0].update(groups)
    torch.save(held, folder / "in.pt")
    return folder / "in.pt"


def rules_of(folder: Path, text: str) -> Path:
    (folder / "rules.yaml").write_text(HEAD + text)
    return folder / "rules.yaml"


def refused(source: Path, **asked: Any) -> str:
    with pytest.raises(CheckpointError, match="M410") as caught:
        migrate.plan(source, **asked)
    return str(caught.value)


def resumed(out: Path, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    held = torch.load(out, weights_only=True)
    model = module_of({key: held["model"][key] for key in sorted(held["model"])})
    optimizer = make(model)
    optimizer.load_state_dict(held["optimizer"])
    return model, optimizer


def test_numbers_without_moments_follow_where_names_are_given(tmp_path: Path) -> None:
    source, rules = saved(tmp_path, plain_sgd), rules_of(tmp_path, STACK)
    assert '"optimizer_names": "@FILE"' in refused(source, rules=rules)
    (tmp_path / "names").write_text("\n".join(SHAPES) + "\n")
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    params = {"optimizer_names": f"@{tmp_path / 'names'}"}
    answer = migrate.apply(source, out, rules=rules, params=params)
    assert answer.optimizer == "followed"
    held = torch.load(out, weights_only=True)["optimizer"]
    assert held["state"] == {}
    assert held["param_groups"][0]["params"] == [0, 1, 2]
    resumed(out, plain_sgd)
    assert migrate.verify(out, source=source, rules=rules).equal
    assert migrate.downgrade(out, back, rules=rules).optimizer == "followed"
    assert migrate.diff(back, source).equal
    wrong = {"optimizer_names": [*list(SHAPES)[1:], "c.weight"]}
    assert "names c.weight" in refused(source, rules=rules, params=wrong)


def test_settings_without_moments_have_to_agree(tmp_path: Path) -> None:
    held = torch.load(saved(tmp_path, plain_sgd), weights_only=True)
    (group,) = held["optimizer"]["param_groups"]
    held["optimizer"]["param_groups"] = [
        {**group, "params": [0, 1]},
        {**group, "params": [2, 3], "lr": 0.5},
    ]
    torch.save(held, tmp_path / "in.pt")
    asked: dict[str, Any] = {"params": {"optimizer_names": list(SHAPES)}}
    said = refused(tmp_path / "in.pt", rules=rules_of(tmp_path, STACK), **asked)
    assert "settings of groups of parameters that become one differ" in said


@pytest.mark.parametrize("make", [adamw, plain_sgd])
def test_added_tensors_have_no_number_unless_the_rule_drops_state(
    make: Any, tmp_path: Path
) -> None:
    source, rules = saved(tmp_path, make), rules_of(tmp_path, ADD.replace("OPTIMIZER", ""))
    asked: dict[str, Any] = {"params": {"optimizer_names": list(SHAPES)}}
    said = refused(source, rules=rules, **asked)
    assert "it adds tensors, and no file says which numbers" in said
    assert "a.scale" in said
    rules = rules_of(tmp_path, ADD.replace("OPTIMIZER", "optimizer: drop,"))
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    answer = migrate.apply(source, out, rules=rules, **asked)
    assert answer.optimizer == "followed"
    held = torch.load(out, weights_only=True)["optimizer"]
    assert held["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    (note,) = [note for note in answer.notes if "its numbers are known" in note]
    assert "count in the output a.bias, a.scale, a.weight, b.bias" in note
    old, optimizer = trained(make, SHAPES)
    new, again = resumed(out, make)
    grads = random({**SHAPES, "a.scale": (3,)}, 9)
    step(old, optimizer, grads)
    step(new, again, grads)
    there = dict(new.named_parameters())
    for key, value in old.named_parameters():
        assert torch.equal(there[key], value), key
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


RENAMED = 'keep: [b]\nrules: [{name: r, from: "w.{k}", to: "v.w.{k}"}]\n'


def test_state_by_the_name_of_an_object_is_refused_where_its_components_change(
    tmp_path: Path,
) -> None:
    moments = {key: {"exp_avg": torch.ones(4, 6)} for key in ("w", "b")}
    weights = {"w._data": torch.zeros(4, 6, dtype=torch.uint8), "w._scale_inv": torch.ones(1)}
    held = {
        "model": {**weights, "b": torch.ones(4, 6)},
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.5, "params": ["w", "b"]}]},
    }
    torch.save(held, tmp_path / "in.pt")
    rules = rules_of(tmp_path, RENAMED)
    said = refused(tmp_path / "in.pt", rules=rules)
    assert "parameters that are several tensors" in said
    assert "w._data" in said
    for params, allow, became in (
        ({"optimizer": "drop"}, {"drop"}, "dropped"),
        ({}, {"stale-optimizer"}, "stale"),
    ):
        out = tmp_path / f"{became}.pt"
        answer = migrate.apply(tmp_path / "in.pt", out, rules=rules, params=params, allow=allow)
        assert answer.optimizer == became
        assert ("optimizer" in torch.load(out, weights_only=True)) == (became == "stale")
