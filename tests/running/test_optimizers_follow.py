"""Optimizer state follows its parameters, in each spelling and both ways, and the optimizer steps
on to the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import following
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commandline import done
from following import (
    SPELLINGS,
    adamw,
    among_weights,
    moved,
    random,
    sgd,
    shapes_per_expert,
    states,
    step,
    trained,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import migrate
from migrate.core.errors import CheckpointError

pytestmark = pytest.mark.heavy

Spelling = Callable[[nn.Module, torch.optim.Optimizer], dict[str, Any]]


def save_pt(value: dict[str, Any], path: Path) -> Path:
    torch.save(value, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def load_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def save_dcp(value: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(value, checkpoint_id=str(path), no_dist=True)
    return path


def load_dcp(path: Path) -> Any:
    whole = path.with_suffix(".whole.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(str(path), str(whole))
    return torch.load(whole, weights_only=True)


def save_safetensors(value: dict[str, Any], path: Path) -> Path:
    save_file(value, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


FORMATS = {
    "pt": (save_pt, load_pt),
    "dcp": (save_dcp, load_dcp),
    "safetensors": (save_safetensors, load_file),
}
CASES = [
    (spelling, name)
    for spelling in SPELLINGS
    for name in FORMATS
    if name != "safetensors" or spelling is among_weights
]


def model_in(loaded: dict[str, Any]) -> dict[str, torch.Tensor]:
    if "model" in loaded:
        return dict(loaded["model"])
    beside = ("optimizer", "train_state")
    return {key: value for key, value in loaded.items() if not key.startswith(beside)}


def optimizer_in(loaded: dict[str, Any], make: Any, model: nn.Module) -> Any:
    if "optimizer" in loaded:
        return loaded["optimizer"]
    # settings are not among tensors; those that the optimizer begins with are those of the old one
    state = {
        key.removeprefix("optimizer."): value
        for key, value in loaded.items()
        if key.startswith("optimizer.")
    }
    groups = {
        f"param_groups.{name}.{setting}": value
        for name, _ in model.named_parameters()
        for setting, value in make(model).param_groups[0].items()
        if setting != "params"
    }
    return {**state, **groups}


def resumed(loaded: dict[str, Any], make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that loaded the checkpoint."""
    model = following.module_of(model_in(loaded))
    optimizer = make(model)
    held = optimizer_in(loaded, make, model)
    set_optimizer_state_dict(model, optimizer, held)
    return model, optimizer


def assert_equal(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype, key
        assert torch.equal(value, b[key]), key


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize(("spelling", "format"), CASES)
def test_an_optimizer_steps_on_to_the_same_bits_behind_its_parameters(
    spelling: Spelling, format: str, make: Any, tmp_path: Path
) -> None:
    save, load = FORMATS[format]
    rules = following.rules(tmp_path)
    old, optimizer = trained(make)
    source = save(spelling(old, optimizer), tmp_path / "old")
    out = source.with_name("new" + source.suffix)
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    assert answer.to_json()["downgrade"] == {"exact": True, "because": []}
    assert migrate.verify(out, source=source, rules=rules).equal

    new, again = resumed(load(out), make)
    grads = random(shapes_per_expert(), 9)
    step(old, optimizer, grads)
    step(new, again, moved(grads, rules))
    assert_equal(dict(new.named_parameters()), moved(dict(old.state_dict()), rules))
    before, after = states(optimizer, old), states(again, new)
    assert before.keys() == after.keys()
    for moment in before:
        if moment == "step":
            assert {float(one) for one in after[moment].values()} == {4.0}
        else:
            assert_equal(after[moment], moved(before[moment], rules))

    back = source.with_name("back" + source.suffix)
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


@pytest.mark.parametrize(
    ("make", "spelling", "format"),
    [(adamw, following.nested, "pt"), (sgd, following.flattened, "dcp")],
)
def test_stacked_experts_come_apart_and_together_again_and_step_on(
    make: Any, spelling: Spelling, format: str, tmp_path: Path
) -> None:
    save, load = FORMATS[format]
    rules = following.rules(tmp_path)
    begun = moved(random(shapes_per_expert(), 0), rules)
    shapes = {key: value.shape for key, value in begun.items()}
    assert shapes["layers.1.mlp.experts.gate_up_proj"] == (4, 6, 6)
    old, optimizer = trained(make, shapes)
    source = save(spelling(old, optimizer), tmp_path / "stacked")
    apart = source.with_name("apart" + source.suffix)
    again = source.with_name("again" + source.suffix)
    answer = migrate.downgrade(source, apart, rules=rules)
    assert answer.optimizer == "followed"
    assert answer.to_json()["downgrade"] == {"exact": True, "because": []}
    assert migrate.apply(apart, again, rules=rules).optimizer == "followed"

    grads = random(shapes, 9)
    each = moved(grads, rules, back=True)
    assert each.keys() == shapes_per_expert().keys()
    step(old, optimizer, grads)
    wanted = states(optimizer, old)
    for path, back, given in ((apart, True, each), (again, False, grads)):
        model, resumed_optimizer = resumed(load(path), make)
        step(model, resumed_optimizer, given)
        weights = dict(old.state_dict())
        assert_equal(
            dict(model.named_parameters()), moved(weights, rules, back) if back else weights
        )
        found = states(resumed_optimizer, model)
        assert found.keys() == wanted.keys()
        for moment in wanted.keys() - {"step"}:
            one = wanted[moment]
            assert_equal(found[moment], moved(one, rules, back) if back else one)
        assert {float(one) for one in found.get("step", {}).values()} <= {4.0}


def resaved(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The nested training of the toy model, changed before it is saved."""
    held = following.nested(*trained(adamw))
    change(held)
    return save_pt(held, path)


def saying(optimizer: str) -> str:
    """The rules, of which the first says so of optimizer state."""
    return following.MERGE.replace(
        "name: gate-up\n", f"name: gate-up\n    optimizer: {optimizer}\n"
    )


def state_of(held: dict[str, Any], key: Any) -> dict[str, Any]:
    return dict(held["optimizer"]["state"][key])


W1 = "layers.0.moe.experts.2.w1.weight"


def test_a_group_of_which_a_part_has_state_is_refused_or_gets_zeros(tmp_path: Path) -> None:
    source = resaved(tmp_path / "old", lambda held: held["optimizer"]["state"].pop(W1))
    rules = following.rules(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(source, rules=rules)
    assert {d.code for d in caught.value.diagnostics} == {"M410"}
    said = str(caught.value)
    assert f"{W1} of the same group as" in said
    assert "optimizer: {missing: zeros}" in said
    assert "gate-up" in said
    rules, out = following.rules(tmp_path, saying("{missing: zeros}")), tmp_path / "new.pt"
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    # the way back has zeros where there was nothing
    exact = answer.to_json()["downgrade"]
    assert not exact["exact"]
    assert any("optimizer state does not return" in why for why in exact["because"])
    assert migrate.verify(out, source=source, rules=rules).equal
    made = state_of(load_pt(out), "layers.0.mlp.experts.gate_up_proj")
    assert made["step"] == 3
    for moment in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert not made[moment][2, : following.INNER].any()
        assert made[moment][2, following.INNER :].all()
        assert made[moment][[0, 1, 3]].all()


def test_a_rule_drops_the_state_of_its_parameters(tmp_path: Path) -> None:
    source = resaved(tmp_path / "old", lambda held: None)
    rules, out = following.rules(tmp_path, saying("drop")), tmp_path / "new.pt"
    with pytest.raises(CheckpointError, match=r"M402[\s\S]*state of the optimizer"):
        migrate.plan(source, rules=rules)
    answer = migrate.apply(source, out, rules=rules, allow="drop")
    assert answer.optimizer == "followed"
    assert not answer.to_json()["downgrade"]["exact"]
    (loss,) = answer.to_json()["losses"]
    assert (loss["kind"], loss["rule"]) == ("drop", "gate-up")
    assert migrate.verify(out, source=source, rules=rules).equal
    state = load_pt(out)["optimizer"]["state"]
    assert "layers.0.mlp.experts.gate_up_proj" not in state
    assert "layers.0.mlp.experts.down_proj" in state


def test_a_plan_lists_the_state_under_the_row_of_its_parameters(tmp_path: Path) -> None:
    source = resaved(tmp_path / "old", lambda held: None)
    plan = migrate.plan(source, rules=following.rules(tmp_path))
    rows = plan.document["rows"]
    first = [row["rule"] for row in rows].index("down")
    assert [row["change"] for row in rows[first : first + 4]] == ["merged", *["followed"] * 3]
    step, first_moment, second = rows[first + 1 : first + 4]
    home = "/optimizer.state.layers.{0,1}.mlp.experts.down_proj"
    assert (step["to"], step["count"], step["spec"]) == (f"{home}.step", 2, "float32 []")
    assert first_moment["to"] == f"{home}.exp_avg"
    assert second["count"] == 2 * first_moment["count"] == 4
    size = following.EXPERTS * following.INNER * following.HIDDEN * 4
    assert [row["bytes"] for row in (step, first_moment, second)] == [8, 2 * size, 4 * size]
    assert first_moment["from"] == [
        "/optimizer.state.layers.0.moe.experts.{0..3}.w2.weight.exp_avg"
    ]
    assert plan.document["optimizer"] == "followed"


def test_an_expanded_plan_lists_each_tensor_of_state_under_its_parameter(tmp_path: Path) -> None:
    source = resaved(tmp_path / "old", lambda held: None)
    rules = following.rules(tmp_path)
    plan, whole = (migrate.plan(source, rules=rules, expand=each) for each in (False, True))
    assert plan.digest == whole.digest
    rows = whole.document["rows"]
    assert {row["count"] for row in rows} == {1}
    at = [row["to"] for row in rows].index("layers.1.mlp.experts.down_proj")
    parameter, *state = rows[at : at + 5]
    assert (parameter["change"], parameter["spec"]) == ("merged", "float32 [4, 3, 6]")
    assert parameter["from"] == ["layers.1.moe.experts.{0..3}.w2.weight"]
    home = "/optimizer.state.layers.1.mlp.experts.down_proj"
    moments = ["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert [(row["change"], row["to"], row["bytes"]) for row in state] == [
        ("followed", f"{home}.{moment}", 4 if moment == "step" else 288) for moment in moments
    ]
    assert state[1]["from"] == ["/optimizer.state.layers.1.moe.experts.{0..3}.w2.weight.exp_avg"]
    for each in (plan, whole):
        counted = sum(row["count"] for row in each.document["rows"] if row["change"] == "followed")
        assert counted == 24


def test_the_command_line_lists_each_tensor_of_state(tmp_path: Path) -> None:
    source, rules = resaved(tmp_path / "old", lambda held: None), following.rules(tmp_path)
    asked = ["plan", source, "--rules", rules]
    line = "    ^ /optimizer.state.layers.1.mlp.gate.weight.exp_avg  f32 [4, 6]  96 B"
    assert line not in done(*asked).out.splitlines()
    assert line in done(*asked, "--expand").out.splitlines()


def by_number(names: bool, beside: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """The training as `state_dict()` has it; with `param_names`, if torch was given them."""

    def made(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        held = optimizer.state_dict()
        if names:
            held["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
        return {"model": dict(model.state_dict()), "optimizer": held, **beside}

    return made


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("names", [False, True])
def test_numbered_state_follows_and_steps_on(names: bool, make: Any, tmp_path: Path) -> None:
    rules = following.rules(tmp_path)
    old, optimizer = trained(make)
    source = save_pt(by_number(names, {"epoch": 3})(old, optimizer), tmp_path / "old")
    out = tmp_path / "new.pt"
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    (note,) = [note for note in answer.notes if "its numbers are known" in note]
    assert ("by `param_names`" if names else "by the order of the tensors") in note
    assert migrate.verify(out, source=source, rules=rules).equal
    loaded = load_pt(out)
    new = following.module_of(loaded["model"])
    again = make(new)
    if names:
        called = loaded["optimizer"]["param_groups"][0].pop("param_names")
        assert called == [name for name, _ in new.named_parameters()]
    again.load_state_dict(loaded["optimizer"])
    grads = random(shapes_per_expert(), 9)
    step(old, optimizer, grads)
    step(new, again, moved(grads, rules))
    assert_equal(dict(new.named_parameters()), moved(dict(old.state_dict()), rules))
    before, after = states(optimizer, old), states(again, new)
    for moment in before.keys() - {"step"}:
        assert_equal(after[moment], moved(before[moment], rules))
    back = tmp_path / "back.pt"
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


def said_of(source: Path, rules: Path, **more: Any) -> str:
    """What a plan is refused with, which is M410 alone."""
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(source, rules=rules, **more)
    assert {d.code for d in caught.value.diagnostics} == {"M410"}
    return str(caught.value)


def test_steps_of_parameters_that_become_one_have_to_be_equal(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        held["optimizer"]["state"][W1]["step"] += 1

    source, out = resaved(tmp_path / "old", change), tmp_path / "new.pt"
    with pytest.raises(CheckpointError, match="M404") as caught:
        migrate.apply(source, out, rules=following.rules(tmp_path))
    assert "the optimizer state `step` differs in what becomes layers.0.mlp" in str(caught.value)
    assert not out.exists()


def test_settings_of_parameters_that_become_one_have_to_be_equal(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        (group,) = held["optimizer"]["param_groups"]
        group["params"] = [name for name in group["params"] if name != W1]
        held["optimizer"]["param_groups"].append({**group, "lr": 0.5, "params": [W1]})

    source = resaved(tmp_path / "old", change)
    assert "settings of groups of parameters that become one differ" in said_of(
        source, following.rules(tmp_path)
    )


def test_state_of_another_shape_does_not_follow(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        for state in held["optimizer"]["state"].values():
            state["exp_avg_sq"] = state["exp_avg_sq"].flatten()[:2].clone()

    source = resaved(tmp_path / "old", change)
    said = said_of(source, following.rules(tmp_path))
    assert "`exp_avg_sq` has another shape than its parameter ([2] beside [3, 6])" in said
    for way in ("optimizer: drop", 'params={"optimizer": "drop"}', 'allow={"stale-optimizer"}'):
        assert way in said
    out = tmp_path / "new.pt"
    answer = migrate.apply(source, out, rules=following.rules(tmp_path), allow="stale-optimizer")
    assert answer.optimizer == "stale"


def test_state_of_a_parameter_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        held["optimizer"]["state"]["head.weight"] = held["optimizer"]["state"][W1]

    source = resaved(tmp_path / "old", change)
    assert "would go stale" in said_of(source, following.rules(tmp_path))


CUT = following.HEAD + (
    'keep: ["layers.{k...}"]\n'
    "rules: [{name: cut, from: embed.weight, to: embed.weight, via: [{slice: {dim: 0, stop: 3, "
    "of: 5, value: 0}}]}]\n"
)


@pytest.mark.parametrize("zeros", [True, False])
def test_what_is_cut_of_state_has_to_be_zero(zeros: bool, tmp_path: Path) -> None:
    def change(held: dict[str, Any]) -> None:
        held["model"]["embed.weight"][3:] = 0
        for moment, value in held["optimizer"]["state"]["embed.weight"].items():
            if zeros and moment != "step":
                value[3:] = 0

    source, out = resaved(tmp_path / "old", change), tmp_path / "new.pt"
    asked: dict[str, Any] = {"rules": following.rules(tmp_path, CUT)}
    if not zeros:
        with pytest.raises(CheckpointError, match="M404"):
            migrate.apply(source, out, **asked)
        return
    assert migrate.apply(source, out, **asked).optimizer == "followed"
    assert state_of(load_pt(out), "embed.weight")["exp_avg"].shape == (3, following.HIDDEN)
    migrate.downgrade(out, tmp_path / "back.pt", **asked)
    assert migrate.diff(tmp_path / "back.pt", source).equal


def test_state_keeps_its_dtype_where_the_parameter_is_cast(tmp_path: Path) -> None:
    text = following.MERGE.replace(
        "{stack: {over: e, count: 4}}, {concat",
        "{cast: {from: float32, to: bfloat16}}, {stack: {over: e, count: 4}}, {concat",
    )
    source, out = resaved(tmp_path / "old", lambda held: None), tmp_path / "new.pt"
    rules = following.rules(tmp_path, text)
    migrate.apply(source, out, rules=rules, allow="lossy")
    held, key = load_pt(out), "layers.0.mlp.experts.gate_up_proj"
    assert held["model"][key].dtype == torch.bfloat16
    assert state_of(held, key)["exp_avg"].dtype == torch.float32
    assert migrate.verify(out, source=source, rules=rules).equal


def numbered(tmp_path: Path) -> tuple[Path, list[str]]:
    """State by number, beside a buffer of the shape of a parameter: several orders fit."""
    model, optimizer = trained(adamw)
    held = by_number(False, {})(model, optimizer)
    weights = {}
    for key, value in held["model"].items():
        weights[key] = value
        if key.endswith("0.norm.weight"):
            weights[f"{key}_average"] = torch.ones(following.HIDDEN)
    return save_pt({**held, "model": weights}, tmp_path / "old"), [
        name for name, _ in model.named_parameters()
    ]


BUFFER = following.MERGE.replace("{p...}.norm.weight", "{p...}.norm.{k}")


def test_numbers_that_fit_in_several_orders_have_to_be_named(tmp_path: Path) -> None:
    source, names = numbered(tmp_path)
    rules = following.rules(tmp_path, BUFFER)
    assert '"optimizer_names": "@FILE"' in said_of(source, rules)
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    said: dict[str, Any] = {"params": {"optimizer_names": f"@{tmp_path / 'names.txt'}"}}
    out = tmp_path / "new.pt"
    answer = migrate.apply(source, out, rules=rules, **said)
    assert answer.optimizer == "followed"
    assert any("known by `optimizer_names`" in note for note in answer.notes)
    # the stamp remembers them: neither the check nor the ways from here ask again
    assert migrate.verify(out, source=source, rules=rules).equal
    back, again = tmp_path / "back.pt", tmp_path / "again.pt"
    undone = migrate.downgrade(out, back, rules=rules)
    assert undone.optimizer == "followed"
    assert any("known by the stamp" in note for note in undone.notes)
    assert migrate.diff(back, source).equal
    assert migrate.apply(back, again, rules=rules).optimizer == "followed"
    assert migrate.diff(again, out).equal
    (entry,) = migrate.history(out).to_json()["applied"]
    (said,) = entry["optimizer_names"]
    assert (said["place"], said["before"]) == ("`optimizer`", names)
    assert said["after"][1] == "layers.0.mlp.experts.gate_up_proj"
    wrong = {"params": {"optimizer_names": [*names[1:], names[0]]}}
    assert "`optimizer_names` names layers.0" in said_of(source, rules, **wrong)


ORDER = (
    following.HEAD
    + """rules:
  - {name: q, from: "q.{k}", to: "attn.q.{k}"}
  - {name: mlp, from: "mlp.weight", to: "mlp.w.{h:a|b}", via: [{split: {into: h, dim: 0}}]}
  - {name: r, from: "r.{k}", to: "attn.r.{k}"}
"""
)


def test_numbers_return_though_the_tensors_stand_in_another_order(tmp_path: Path) -> None:
    """A module has `attn` in one piece, and the tensors keep their places in the dict."""
    shapes = {"q.weight": (2, 4), "mlp.weight": (4, 4), "r.weight": (2, 4)}
    model, optimizer = trained(adamw, shapes)
    source = save_pt(by_number(False, {})(model, optimizer), tmp_path / "old")
    out, back, rules = tmp_path / "new.pt", tmp_path / "back.pt", following.rules(tmp_path, ORDER)
    answer = migrate.apply(source, out, rules=rules)
    assert answer.to_json()["downgrade"]["exact"]
    loaded = load_pt(out)
    assert list(loaded["model"]) == ["attn.q.weight", "mlp.w.a", "mlp.w.b", "attn.r.weight"]
    new = following.module_of(loaded["model"])
    names = [name for name, _ in new.named_parameters()]
    assert names == ["attn.q.weight", "attn.r.weight", "mlp.w.a", "mlp.w.b"]
    was = state_of(load_pt(source), 2)["exp_avg"]
    assert torch.equal(state_of(loaded, 1)["exp_avg"], was)
    assert migrate.verify(out, source=source, rules=rules).equal
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


SWAP = following.HEAD + (
    'rules: [{name: swap, from: "{w:a|b|c}.weight", to: "{w}.weight", map: {w: {a: c, c: a}}}]\n'
)


@pytest.mark.parametrize("names", [False, True])
def test_numbers_follow_parameters_that_change_places(names: bool, tmp_path: Path) -> None:
    old, optimizer = trained(adamw, {f"{name}.weight": (2, 3) for name in "abc"})
    source = save_pt(by_number(names, {})(old, optimizer), tmp_path / "old")
    out, back, rules = tmp_path / "new.pt", tmp_path / "back.pt", following.rules(tmp_path, SWAP)
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    assert answer.to_json()["downgrade"]["exact"]
    assert migrate.verify(out, source=source, rules=rules).equal
    loaded = load_pt(out)
    if names:
        called = loaded["optimizer"]["param_groups"][0].pop("param_names")
        assert called == ["a.weight", "b.weight", "c.weight"]
    new = following.module_of({f"{name}.weight": torch.zeros(2, 3) for name in "abc"})
    new.load_state_dict(loaded["model"])
    again = adamw(new)
    again.load_state_dict(loaded["optimizer"])
    grads = random({f"{name}.weight": (2, 3) for name in "abc"}, 9)
    step(old, optimizer, grads)
    step(new, again, moved(grads, rules))
    assert_equal(dict(new.named_parameters()), moved(dict(old.state_dict()), rules))
    before, after = states(optimizer, old), states(again, new)
    for moment in before.keys() - {"step"}:
        assert_equal(after[moment], moved(before[moment], rules))
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal
