"""Optimizer state of parameters that are objects made of tensors follows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import following
import pytest
import quantized_classes as classes
import torch
from following import HEAD
from marks import thorough
from quantized_ranks import KINDS, whole, wrapped

import migrate
from migrate.core.errors import CheckpointError

# one of each library, one that is packed, and a group first
NAMES = ["te-mxfp8", "ao-nvfp4", "te-grouped"]
NAMES += [name for name in KINDS if name not in NAMES]
RENAME = HEAD + 'keep: [bias]\nrules: [{name: r, from: "old.{k...}", to: "{k}"}]\n'


def moments(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """State by name, as an optimizer with master weights has it."""
    found = {}
    for name, shape in shapes.items():
        drawn = following.random({"exp_avg": shape, "master_param": shape}, len(name))
        found[name] = {"step": torch.tensor(3.0), **drawn}
    return found


def saved(folder: Path, kinds: Mapping[str, str], state: Mapping[str, Any]) -> Path:
    """A file with objects of these kinds by their names, a bias, and an optimizer."""
    names = [*kinds, "bias"]
    with classes.installed():
        model: dict[str, Any] = {
            name: wrapped(kind, KINDS[kind].shape, whole(kind, seed))
            for seed, (name, kind) in enumerate(kinds.items())
        }
        model["bias"] = torch.arange(5.0)
        groups = [{"lr": 0.5, "params": names}]
        held = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
        torch.save(held, folder / "in.pt")
    return folder / "in.pt"


def optimizer_in(path: Path) -> Any:
    with classes.installed():
        return torch.load(path, weights_only=True)["optimizer"]


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert list(found[name]) == list(one)
        for moment, value in one.items():
            assert found[name][moment].dtype == value.dtype
            assert torch.equal(found[name][moment], value), (name, moment)


def shape_of(kind: str) -> tuple[int, ...]:
    return KINDS[kind].shape


def rules_of(folder: Path, text: str) -> Path:
    return following.rules(folder, text)


@pytest.mark.parametrize("kind", thorough(NAMES, default=3))
@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_state_goes_by_the_new_name_of_an_object_and_back(
    form: str, kind: str, tmp_path: Path
) -> None:
    state = moments({"old.w": shape_of(kind), "bias": (5,)})
    source, rules = saved(tmp_path, {"old.w": kind}, state), rules_of(tmp_path, RENAME)
    out, back = tmp_path / "out", tmp_path / "back.pt"
    answer = migrate.apply(source, out, rules=rules, output_format=form)
    assert answer.optimizer == "followed"
    assert migrate.verify(out, source=source, rules=rules).equal
    migrate.apply(out, tmp_path / "out.pt", output_format="torch")
    found = optimizer_in(tmp_path / "out.pt")
    same(found["state"], {"w": state["old.w"], "bias": state["bias"]})
    assert found["param_groups"][0]["params"] == ["w", "bias"]
    migrate.downgrade(out, back, rules=rules, output_format="torch")
    assert migrate.diff(back, source).equal


def test_state_of_objects_that_become_a_group_is_stacked(tmp_path: Path) -> None:
    kind, shape = "te-mxfp8", shape_of("te-mxfp8")
    state = moments({f"w{e}": shape for e in range(3)})
    source = saved(tmp_path, dict.fromkeys(state, kind), state)
    rules = rules_of(
        tmp_path,
        HEAD
        + 'keep: [bias]\nrules: [{name: r, from: "w{e:int}.{part}", to: "w.{part}", '
        + "via: [{stack: {over: e, count: 3}}]}]\n",
    )
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    assert migrate.apply(source, out, rules=rules).optimizer == "followed"
    assert migrate.verify(out, source=source, rules=rules).equal
    found = optimizer_in(out)
    (name,) = found["state"]
    assert name == "w"
    for moment in ("exp_avg", "master_param"):
        stacked = torch.stack([one[moment] for one in state.values()])
        assert torch.equal(found["state"]["w"][moment], stacked)
    assert found["param_groups"][0]["params"] == ["w", "bias"]
    migrate.downgrade(out, back, rules=rules)
    same(optimizer_in(back)["state"], state)


def test_state_of_an_object_that_a_rule_decodes_keeps_its_dtype(tmp_path: Path) -> None:
    """Two numbers lie in a byte of the codes."""
    state = moments({"w": shape_of("ao-mx-fp4")})
    source = saved(tmp_path, {"w": "ao-mx-fp4"}, state)
    with classes.installed():
        held = torch.load(source, weights_only=True)
        # as they are drawn they are of any size
        held["model"]["w"].scale.view(torch.uint8).fill_(127)
        torch.save(held, source)
    rules = rules_of(
        tmp_path,
        HEAD
        + "keep: [bias]\nrules:\n"
        + "  - name: decode\n"
        + "    from: {weight: w.qdata, scale: w.scale}\n"
        + "    to: v.weight\n"
        + "    via: [{dequantize: {codec: mxfp4, dtype: bfloat16}}, "
        + "{transpose: {dims: [0, 1]}}]\n",
    )
    answer = migrate.apply(source, tmp_path / "out.pt", rules=rules, allow={"lossy"})
    assert answer.optimizer == "followed"
    found = optimizer_in(tmp_path / "out.pt")
    turned = {name: one.t() if one.ndim == 2 else one for name, one in state["w"].items()}
    same(found["state"], {"v.weight": turned})


def test_dropped_objects_take_their_state_along(tmp_path: Path) -> None:
    state = moments({"w": shape_of("te-mxfp8"), "old.w": shape_of("ao-mx"), "bias": (5,)})
    source = saved(tmp_path, {"w": "te-mxfp8", "old.w": "ao-mx"}, state)
    text = (
        HEAD
        + "keep: [bias, 'old.{k...}']\nrules: [{name: d, from: 'w.{k}', via: [{drop: {why: x}}]}]\n"
    )
    migrate.apply(source, tmp_path / "out.pt", rules=rules_of(tmp_path, text), allow="drop")
    found = optimizer_in(tmp_path / "out.pt")
    same(found["state"], {name: state[name] for name in ("old.w", "bias")})
    assert found["param_groups"][0]["params"] == ["old.w", "bias"]


@pytest.mark.parametrize("named", [True, False])
def test_numbers_of_objects_follow(named: bool, tmp_path: Path) -> None:
    """Two objects become one group, so that numbers change."""
    shape = shape_of("te-mxfp8")
    of = moments({"w0": shape, "w1": shape, "bias": (5,)})
    source = saved(tmp_path, {"w0": "te-mxfp8", "w1": "te-mxfp8"}, {})
    with classes.installed():
        held = torch.load(source, weights_only=True)
        group = {"lr": 0.5, "params": [0, 1, 2]} | ({"param_names": list(of)} if named else {})
        state = dict(enumerate(of.values()))
        held["optimizer"] = {"state": state, "param_groups": [group]}
        torch.save(held, source)
    rules = rules_of(
        tmp_path,
        HEAD
        + 'keep: [bias]\nrules: [{name: r, from: "w{e:int}.{part}", to: "w.{part}", '
        + "via: [{stack: {over: e, count: 2}}]}]\n",
    )
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    assert any("count in the output w, bias" in note for note in answer.notes)
    found = optimizer_in(out)
    assert list(found["state"]) == [0, 1]
    stacked = torch.stack([of["w0"]["exp_avg"], of["w1"]["exp_avg"]])
    assert torch.equal(found["state"][0]["exp_avg"], stacked)
    assert torch.equal(found["state"][1]["exp_avg"], of["bias"]["exp_avg"])
    if named:
        assert found["param_groups"][0]["param_names"] == ["w", "bias"]
    migrate.downgrade(out, back, rules=rules)
    again = optimizer_in(back)
    same(again["state"], state)
    assert again["param_groups"] == [group]


def test_names_that_are_given_call_objects_as_the_module_does(tmp_path: Path) -> None:
    """Without moments nothing else says which numbers are which."""
    source = saved(tmp_path, {"old.w": "ao-mx"}, {})
    with classes.installed():
        held = torch.load(source, weights_only=True)
        held["optimizer"] = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
        torch.save(held, source)
    text = HEAD + 'keep: [bias]\nrules: [{name: d, from: "old.w.{k}", via: [{drop: {why: x}}]}]\n'
    asked: dict[str, Any] = {"rules": rules_of(tmp_path, text), "allow": "drop"}
    with pytest.raises(CheckpointError, match="M410"):
        migrate.plan(source, **asked)
    out, names = tmp_path / "out.pt", {"optimizer_names": ["old.w", "bias"]}
    assert migrate.apply(source, out, params=names, **asked).optimizer == "followed"
    assert optimizer_in(out)["param_groups"][0]["params"] == [0]
    assert migrate.history(out).applied[-1].optimizer_names[0].before == ("old.w", "bias")
