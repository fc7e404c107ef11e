"""Optimizer state that cannot follow is refused by name, with the ways out; and what keeps it where
a target was there before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from following import HEAD, random

import migrate
from migrate.core.errors import CheckpointError

WAYS = ("optimizer: drop", 'params={"optimizer": "drop"}', 'allow={"stale-optimizer"}')
SHAPES = {"a.weight": (4, 6), "b.weight": (4, 6)}
LORA = "{lora_merge: {alpha: 4, rank: 2}}]}"
OTHERS = {
    "neg_exp": (
        '{name: r, from: "a.{k}", to: "a.{k}", via: [neg_exp]}',
        "`neg_exp` makes other numbers",
    ),
    "affine": (
        '{name: r, from: "a.{k}", to: "a.{k}", via: [{affine: {mul: 2.0}}]}',
        "`affine` makes other numbers",
    ),
    "lora_merge": (
        "{name: r, from: {base: a.weight, a: lora.A, b: lora.B}, to: a.weight, via: [" + LORA,
        "`lora_merge` makes other numbers",
    ),
}


def saved(path: Path, state: dict[Any, Any], groups: list[dict[str, Any]], **more: Any) -> Path:
    held = {"model": {**random(SHAPES, 0), **more}}
    torch.save({**held, "optimizer": {"state": state, "param_groups": groups}}, path)
    return path


def moments(names: Any = SHAPES) -> dict[str, Any]:
    found = random(dict.fromkeys(names, SHAPES["a.weight"]), 1)
    return {key: {"step": torch.tensor(3.0), "exp_avg": value} for key, value in found.items()}


def groups(*names: Any, lr: float = 0.5) -> list[dict[str, Any]]:
    return [{"lr": lr, "params": list(names)}]


def rules_of(folder: Path, text: str, name: str = "rules") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f'{HEAD}keep: ["{{k...}}"]\nrules: [{text}]\n')
    return path


def refused(source: Path, rules: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(source, rules=rules, allow={"lossy"})
    assert {d.code for d in caught.value.diagnostics} == {"M410"}
    said = str(caught.value)
    assert not [part for part in parts if part not in said], said


@pytest.mark.parametrize("op", OTHERS)
def test_state_of_a_parameter_whose_numbers_are_others_is_refused(op: str, tmp_path: Path) -> None:
    text, why = OTHERS[op]
    lora = {"lora.A": torch.ones(2, 6), "lora.B": torch.ones(4, 2)} if op == "lora_merge" else {}
    source = saved(tmp_path / "in.pt", moments(), groups(*SHAPES), **lora)
    refused(source, rules_of(tmp_path, text), why, "a.weight", "rule 'r'", *WAYS)
    # the rule leaves the state of its parameter out, and that of the other stays
    rules = rules_of(tmp_path, text.replace("name: r,", "name: r, optimizer: drop,"), "dropping")
    out = tmp_path / "out.pt"
    answer = migrate.apply(source, out, rules=rules, allow={"lossy", "drop"})
    assert answer.optimizer == "followed"
    assert list(torch.load(out, weights_only=True)["optimizer"]["state"]) == ["b.weight"]


@pytest.mark.parametrize(
    ("moment", "shape"),
    [("exp_avg_sq_row", (4,)), ("absmax", (1,)), ("state1", (24,)), ("q", (4, 3))],
)
def test_factored_and_quantized_state_is_refused(
    moment: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    state = moments()
    state["a.weight"][moment] = torch.ones(shape)
    source = saved(tmp_path / "in.pt", state, groups(*SHAPES))
    turn = '{name: r, from: "a.{k}", to: "a.{k}", via: [{transpose: {dims: [0, 1]}}]}'
    refused(
        source,
        rules_of(tmp_path, turn),
        f"`{moment}` has another shape than its parameter ({list(shape)} beside [4, 6])",
        "a.weight",
        *WAYS,
    )


STACK = '{name: r, from: "{w:a|b}.weight", to: all.weight, via: [{stack: {over: w}}]}'


@pytest.mark.parametrize("by", ["name", "number"])
def test_settings_that_disagree_are_refused(by: str, tmp_path: Path) -> None:
    called: list[Any] = [0, 1] if by == "number" else list(SHAPES)
    state = dict(zip(called, moments().values(), strict=True))
    apart = [*groups(called[0]), *groups(called[1], lr=0.25)]
    if by == "number":
        for group, name in zip(apart, SHAPES, strict=True):
            group["param_names"] = [name]
    source = saved(tmp_path / "in.pt", state, apart)
    refused(source, rules_of(tmp_path, STACK), "settings of groups", *map(str, called), *WAYS[1:])
    # groups that say the same of both are no obstacle
    for group in apart:
        group["lr"] = 0.5
    source = saved(tmp_path / "equal.pt", state, apart)
    out = tmp_path / "out.pt"
    assert migrate.apply(source, out, rules=rules_of(tmp_path, STACK)).optimizer == "followed"
    kept = torch.load(out, weights_only=True)["optimizer"]["param_groups"]
    assert [len(group["params"]) for group in kept] == [1, 0]


def test_settings_among_the_weights_go_with_their_parameter(tmp_path: Path) -> None:
    """As one dict of the model and `flatten_optimizer_state_dict`; one has no state so far."""
    model = random({**SHAPES, "c.weight": (4, 6)}, 0)
    state = {
        f"state.{name}.{moment}": value
        for name, held in moments().items()
        for moment, value in held.items()
    }
    settings = {f"param_groups.{name}.lr": 0.5 for name in model}
    rest = {"param_groups": 3, "param_groups.lr": 4, "param_groups.no.lr": 5}
    source, out = tmp_path / "in.pt", tmp_path / "out.pt"
    text = STACK + ', {name: c, from: c.weight, to: "new.c.weight"}'
    torch.save({**model, **state, **settings, **rest}, source)
    rules = rules_of(tmp_path, text)
    assert migrate.apply(source, out, rules=rules).optimizer == "followed"
    found = torch.load(out, weights_only=True)
    expected = {"param_groups.all.weight.lr": 0.5, "param_groups.new.c.weight.lr": 0.5, **rest}
    assert {key: value for key, value in found.items() if "param_groups" in key} == expected
    assert migrate.verify(out, source=source, rules=rules).equal
    # where the stack comes apart, each part has them
    migrate.downgrade(out, tmp_path / "back.pt", rules=rules)
    assert migrate.diff(tmp_path / "back.pt", source).equal
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert {k: v for k, v in back.items() if "param_groups" in k} == {**settings, **rest}
    # in memory as in files
    made = migrate.migrate_state_dict({**model, **state, **settings, **rest}, rules=rules)
    assert {key: value for key, value in made.items() if "param_groups" in key} == expected
    settings["param_groups.b.weight.lr"] = 0.25
    torch.save({**model, **state, **settings}, source)
    differ = "settings of parameters that become one differ: "
    names = "param_groups.a.weight.lr, param_groups.b.weight.lr"
    refused(source, rules, differ + names, *WAYS[1:])
    # a rule that drops the parameter takes them along
    gone = '{name: r, from: "{w:a|b}.weight", via: [{drop: {why: to test}}]}'
    dropped = {"rules": rules_of(tmp_path, gone, "gone"), "allow": {"drop"}}
    migrate.apply(source, tmp_path / "less.pt", **dropped)
    less = torch.load(tmp_path / "less.pt", weights_only=True)
    assert {key for key in less if key.startswith(("state", "param_groups"))} == {
        "param_groups.c.weight.lr"
    }


def test_counters_that_are_no_tensors_have_to_agree(tmp_path: Path) -> None:
    state = moments()
    for number, held in enumerate(state.values()):
        held["step"] = 3 + number
    source = saved(tmp_path / "in.pt", state, groups(*SHAPES))
    refused(source, rules_of(tmp_path, STACK), "`step` of parameters that become one differ")


@pytest.mark.parametrize(
    "numbers", [(0, 1, 2), (0, 5), (1,)], ids=["more", "not in a group", "fewer"]
)
def test_ids_that_fit_nowhere_are_refused(numbers: tuple[int, ...], tmp_path: Path) -> None:
    state = dict(zip(numbers, moments(map(str, numbers)).values(), strict=True))
    listed = (0, 1) if 5 in numbers else numbers
    source = saved(tmp_path / "in.pt", state, groups(*listed))
    refused(
        source,
        rules_of(tmp_path, STACK),
        "would go stale",
        "`optimizer`",
        '"optimizer_names": "@FILE"',
        *WAYS[1:],
    )


def test_ids_of_a_shape_that_no_tensor_has_are_refused(tmp_path: Path) -> None:
    state = {number: {"exp_avg": torch.ones(5, 6)} for number in range(2)}
    source = saved(tmp_path / "in.pt", state, groups(0, 1))
    refused(source, rules_of(tmp_path, STACK), "would go stale", *WAYS[1:])
    with pytest.raises(CheckpointError, match=r"M410[\s\S]*does not fit"):
        migrate.plan(
            source, rules=rules_of(tmp_path, STACK), params={"optimizer_names": list(SHAPES)}
        )


@pytest.mark.parametrize("spelling", ["nested", "flattened"])
def test_state_of_a_parameter_that_does_not_exist_is_refused(spelling: str, tmp_path: Path) -> None:
    state: dict[str, Any] = moments([*SHAPES, "gone.weight"])
    source = saved(tmp_path / "in.pt", state, groups(*state))
    if spelling == "flattened":
        held = torch.load(source, weights_only=True)
        held["optimizer"] = {
            f"state.{name}.{moment}": value
            for name, moments_ in state.items()
            for moment, value in moments_.items()
        }
        torch.save(held, source)
    at = "state.gone.weight.step" if spelling == "flattened" else "gone.weight"
    strange = f"there is no parameter for {at}"
    refused(source, rules_of(tmp_path, STACK), "would go stale", "a.weight", strange, *WAYS[1:])


CUT = '{name: r, from: "a.{k}", to: "a.{k}", via: [{slice: {dim: 0, stop: 3, of: 4, value: 1.0}}]}'


@pytest.mark.parametrize("zeros", [True, False])
def test_cut_elements_of_state_have_to_be_0_whatever_those_of_the_parameter_are(
    zeros: bool, tmp_path: Path
) -> None:
    state = moments()
    if zeros:
        state["a.weight"]["exp_avg"][3:] = 0
    weight = random(SHAPES, 0)["a.weight"]
    weight[3:] = 1
    source = saved(tmp_path / "in.pt", state, groups(*SHAPES), **{"a.weight": weight})
    out, back, rules = tmp_path / "out.pt", tmp_path / "back.pt", rules_of(tmp_path, CUT)
    if not zeros:
        with pytest.raises(CheckpointError, match="M404") as caught:
            migrate.apply(source, out, rules=rules)
        assert "a.weight.exp_avg" in str(caught.value)
        assert not out.exists()
        return
    assert migrate.apply(source, out, rules=rules).optimizer == "followed"
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


KEEP = "{name: r, from: a.weight, to: b.weight, if_exists: keep}"


def test_a_target_that_was_there_keeps_its_state_and_that_of_the_source_goes(
    tmp_path: Path,
) -> None:
    same = {"b.weight": random(SHAPES, 0)["a.weight"]}
    source = saved(tmp_path / "in.pt", moments(), groups(*SHAPES), **same)
    out, rules = tmp_path / "out.pt", rules_of(tmp_path, KEEP)
    with pytest.raises(CheckpointError, match=r"M402[\s\S]*state of the optimizer") as caught:
        migrate.plan(source, rules=rules)
    assert "a.weight.exp_avg" in str(caught.value)
    answer = migrate.apply(source, out, rules=rules, allow={"drop"})
    assert answer.optimizer == "followed"
    assert not answer.to_json()["downgrade"]["exact"]
    held = torch.load(out, weights_only=True)
    assert list(held["model"]) == ["b.weight"]
    (kept,) = held["optimizer"]["state"].values()
    assert torch.equal(kept["exp_avg"], moments()["b.weight"]["exp_avg"])
    assert held["optimizer"]["param_groups"][0]["params"] == ["b.weight"]
    assert migrate.verify(out, source=source, rules=rules).equal


def test_without_a_target_the_state_takes_the_new_name(tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", moments(), groups(*SHAPES))
    out = tmp_path / "out.pt"
    rules = rules_of(tmp_path, KEEP.replace("b.weight", "c.weight"))
    assert migrate.apply(source, out, rules=rules).optimizer == "followed"
    state = torch.load(out, weights_only=True)["optimizer"]["state"]
    assert list(state) == ["c.weight", "b.weight"]
    assert torch.equal(state["c.weight"]["exp_avg"], moments()["a.weight"]["exp_avg"])


JOIN = (
    HEAD
    + """rules:
  - name: rows
    from: "a.weight@{r:int}"
    to: a.w
    via: [{concat: {over: r, dim: 0, sizes: [2, 2]}}]
  - {name: norm, from: norm.weight, to: norm.w}
"""
)


def test_state_in_the_files_of_ranks_follows_the_parameters_of_its_rank(tmp_path: Path) -> None:
    source, out, back = (tmp_path / name for name in ("old", "new", "back"))
    source.mkdir()
    shapes = {"a.weight": (2, 3), "norm.weight": (3,)}
    held = []
    for rank in range(2):
        state = random(shapes, 10 + rank)
        held.append(state["a.weight"])
        among = {f"optimizer.state.{key}.exp_avg": value for key, value in state.items()}
        among |= {f"optimizer.state.{key}.step": torch.tensor(3.0) for key in state}
        torch.save({**random(shapes, rank), **among}, source / f"consolidated.0{rank}.pth")
    (rules := tmp_path / "rules.yaml").write_text(JOIN)
    answer = migrate.apply(source, out, rules=rules)
    assert answer.optimizer == "followed"
    made = [torch.load(out / f"consolidated.0{n}.pth", weights_only=True) for n in range(2)]
    assert torch.equal(made[0]["optimizer.state.a.w.exp_avg"], torch.cat(held))
    assert list(made[1]) == [
        "norm.w",
        "optimizer.state.norm.w.exp_avg",
        "optimizer.state.norm.w.step",
    ]
    assert migrate.verify(out, source=source, rules=rules).equal
    migrate.downgrade(out, back, rules=rules)
    assert migrate.diff(back, source).equal


def test_numbered_state_in_the_files_of_ranks_is_refused(tmp_path: Path) -> None:
    (source := tmp_path / "old").mkdir()
    for rank in range(2):
        weights = random({"a.weight": (2, 3), "norm.weight": (3,)}, rank)
        state = {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": groups(0, 1)}
        torch.save({"model": weights, "optimizer": state}, source / f"consolidated.0{rank}.pth")
    (rules := tmp_path / "rules.yaml").write_text(JOIN)
    refused(source, rules, "`optimizer` of rank 0", "`optimizer` of rank 1", *WAYS[1:])
