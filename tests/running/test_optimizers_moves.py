"""State that follows `copy` and `rearrange`, and that of two optimizers of one checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_compare import same

import migrate

HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"
COPY = 'rules:\n  - {name: twice, from: a.w, to: "{m:b|c}.w", via: [{copy: {into: m}}]}\n'
HEADS = """rules:
  - {name: heads, from: a.w, to: b.w, via: [{rearrange: {pattern: "(h d) k -> (d h) k", axes: {h: 2}}}]}
"""  # noqa: E501
RENAME = 'rules:\n  - {name: moved, from: "{m:a|k}.w", to: "new.{m}.w"}\n'


def rules(folder: Path, text: str) -> str:
    (folder / "r.yaml").write_text(HEAD + text)
    return str(folder / "r.yaml")


def moments(shift: float) -> dict[str, Any]:
    values = torch.arange(12.0).reshape(4, 3) + shift
    return {"step": torch.tensor(3.0), "exp_avg": values, "exp_avg_sq": values + 100}


def saved(name: str, state: dict[str, Any]) -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(4, 3)
    groups = [{"lr": 0.5, "params": [name]}]
    return {"model": {name: weight}, "optimizer": {"state": {name: state}, "param_groups": groups}}


@pytest.mark.parametrize("form", [".pt", ""])
def test_state_is_copied_with_its_parameter_and_becomes_one_again(
    form: str, tmp_path: Path
) -> None:
    state, rule = saved("a.w", moments(0)), rules(tmp_path, COPY)
    torch.save(state, tmp_path / "in.pt")
    made = "torch" if form else "dcp"
    answer = migrate.apply(
        tmp_path / "in.pt", tmp_path / f"out{form}", rules=rule, output_format=made
    )
    assert answer.to_json()["downgrade"]["exact"]
    migrate.apply(tmp_path / f"out{form}", tmp_path / "read.pt", output_format="torch")
    found = torch.load(tmp_path / "read.pt", weights_only=True)
    for name in ("b.w", "c.w"):
        same(found["optimizer"]["state"][name], moments(0))
        assert torch.equal(found["model"][name], state["model"]["a.w"])
    assert found["optimizer"]["param_groups"][0]["params"] == ["b.w", "c.w"]
    migrate.downgrade(
        tmp_path / f"out{form}", tmp_path / "back.pt", rules=rule, output_format="torch"
    )
    same(torch.load(tmp_path / "back.pt", weights_only=True), state)


def test_state_is_rearranged_as_its_parameter_is(tmp_path: Path) -> None:
    held, rule = saved("a.w", moments(1)), rules(tmp_path, HEADS)
    made = migrate.apply(held, rules=rule)
    state = made["optimizer"]["state"]["b.w"]

    def turned(value: torch.Tensor) -> torch.Tensor:
        return value.reshape(2, 2, 3).transpose(0, 1).reshape(4, 3)

    assert torch.equal(state["exp_avg"], turned(moments(1)["exp_avg"]))
    assert torch.equal(state["exp_avg_sq"], turned(moments(1)["exp_avg_sq"]))
    assert torch.equal(state["step"], torch.tensor(3.0))
    assert torch.equal(made["model"]["b.w"], turned(held["model"]["a.w"]))
    back = migrate.migrate_state_dict(made, rules=rule, backwards=True)
    same(dict(back["optimizer"]["state"]["a.w"]), moments(1))


PAD = """rules:
  - {name: wider, from: a.w, to: b.w, via: [{pad: {dim: 0, size: 6, of: 4, value: 1.0}}]}
"""


def test_state_of_what_is_padded_is_padded_with_zeros(tmp_path: Path) -> None:
    """Whatever the parameter is padded with: what was added had no gradient so far."""
    held, rule = saved("a.w", moments(1)), rules(tmp_path, PAD)
    torch.save(held, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=rule)
    assert answer.to_json()["downgrade"]["exact"]
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(made["model"]["b.w"][4:], torch.ones(2, 3))
    state = made["optimizer"]["state"]["b.w"]
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[moment][:4], moments(1)[moment])
        assert torch.equal(state[moment][4:], torch.zeros(2, 3))
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rule)
    same(torch.load(tmp_path / "back.pt", weights_only=True), held)


OWN = """rules:
  - {name: weights, from: "{k}.w", to: "{k}.weight", via: [{transpose: {dims: [0, 1]}}]}
  - {name: all, from: "optimizer.state.{k}.w.{m}", to: "optimizer.state.{k}.weight.{m}"}
  - name: one
    from: "optimizer.state.a.w.exp_avg"
    to: "optimizer.state.a.weight.m"
    via: [{flip: {dim: 0}}]
"""


def test_state_that_rules_spell_is_theirs(tmp_path: Path) -> None:
    """Nothing of it follows its parameter: it comes out as the narrowest of these rules says."""
    given = {"a.w": torch.arange(12.0).reshape(4, 3)}
    given |= {f"optimizer.state.a.w.{moment}": one for moment, one in moments(0).items()}
    made = migrate.apply(given, rules=rules(tmp_path, OWN))
    home = "optimizer.state.a.weight"
    same(
        dict(made),
        {
            "a.weight": given["a.w"].t(),
            f"{home}.step": torch.tensor(3.0),
            f"{home}.m": moments(0)["exp_avg"].flip(0),
            f"{home}.exp_avg_sq": moments(0)["exp_avg_sq"],
        },
    )


def test_two_optimizers_of_one_checkpoint_follow_at_once(tmp_path: Path) -> None:
    """Each has the parameters that it steps, as Muon beside AdamW."""
    model = {"a.w": torch.ones(4, 3), "k.w": torch.zeros(4, 3)}
    held = {"model": model}
    for number, (name, key) in enumerate((("muon", "a.w"), ("adamw", "k.w"))):
        state = moments(number * 10)
        groups = [{"lr": 0.5 + number, "params": [key]}]
        held[f"optimizer_{name}"] = {"state": {key: state}, "param_groups": groups}  # type: ignore[assignment]
    torch.save(held, tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=rules(tmp_path, RENAME))
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made["model"].keys() == {"new.a.w", "new.k.w"}
    for number, (name, key) in enumerate((("muon", "new.a.w"), ("adamw", "new.k.w"))):
        found = made[f"optimizer_{name}"]
        same(found["state"], {key: moments(number * 10)})
        assert found["param_groups"] == [{"lr": 0.5 + number, "params": [key]}]
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rules(tmp_path, RENAME))
    same(torch.load(tmp_path / "back.pt", weights_only=True), held)
