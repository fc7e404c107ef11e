"""Optimizer state beside the weights: carried where it stays right, which a step of the resumed
optimizer shows, and refused where not.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import thorough
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import migrate
from migrate.core.errors import CheckpointError, QuestionError
from migrate.planning import copies, optimizer_states, optimizers, state_keys

HEAD = 'id: demo/2/x\ntitle: x\nwhy: x\nlineage: demo\nedge: ["1", "2"]\n'
KEEP = 'keep: ["{k...}"]\n'
RULES = {
    "rename": 'rules: [{name: r, from: "{i:int}.{k}", to: "layers.{i}.{k}"}]\n',
    "cast": 'rules: [{name: r, from: "{k...}", to: "{k}", via: [{cast: {to: float64, from: '
    "float32}}]}]\n",
    "merge": KEEP
    + 'rules: [{name: r, from: "{i:0|2}.weight", to: "all.weight", via: [{stack: {over: i}}]}]\n',
    "split": KEEP
    + 'rules: [{name: r, from: "0.weight", to: "0.{h:a|b}.weight", via: [{split: {into: h, dim: '
    "0, sizes: {a: 1, b: 2}}}]}]\n",
    "drop": KEEP + 'rules: [{name: r, from: "2.bias", via: [{drop: {why: x}}]}]\n',
    "reshape": KEEP
    + 'rules: [{name: r, from: "0.weight", to: "0.weight", via: [{reshape: {from: [3, 3], to: '
    "[9]}}]}]\n",
    "transpose": KEEP
    + 'rules: [{name: r, from: "0.weight", to: "0.weight", via: [{transpose: {dims: [0, 1]}}]}]\n',
    "swap": 'rules: [{name: r, from: "{i:0|2}.{k}", to: "{i}.{k}", map: {i: {"0": "2", "2": '
    '"0"}}}]\n',
    "backwards": 'rules: [{name: r, from: "{i:0|2}.{k}", to: "w{i}.{k}", map: {i: {"0": "9", "2": '
    '"1"}}}]\n',
    "scale": KEEP
    + 'rules: [{name: r, from: "0.weight", to: "0.weight", via: [{affine: {mul: 2.0}}]}]\n',
    "add": KEEP
    + 'rules: [{name: r, from: "0.bias", to: "new.bias", keep_source: true, via: [{fill: {value: '
    "0, dtype: float32, shape: [3]}}]}]\n",
}
# what leaves no number right
CHANGES = [name for name in RULES if name not in ("rename", "cast")]


@pytest.fixture
def rule(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        path = tmp_path / f"{name if name in RULES else 'own'}.yaml"
        path.write_text(HEAD + RULES.get(name, name))
        return path

    return write


def trained(
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    made = optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, made)
    return model, made


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
    optimizer.step()


class Renamed(nn.Module):
    """The model as the rule `rename` calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def by_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "epoch": 3,
    }


def megatron(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    main = [[parameter.detach().clone() for parameter in model.parameters()]]
    held = {
        "optimizer": optimizer.state_dict(),
        "grad_scaler": {"scale": torch.ones(1)},
        "fp32_from_fp16_params": main,
    }
    return {"model": model.state_dict(), "optimizer": held, "iteration": 3}


def deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "module": model.state_dict(),
        "optimizer_state_dict": {"single_partition_of_fp32_groups": [flat], "zero_stage": 1},
    }


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def among_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    moments = {
        key: value
        for key, value in flattened(model, optimizer)["optimizer"].items()
        if isinstance(value, torch.Tensor)
    }
    return {**model.state_dict(), **{f"optimizer.{key}": value for key, value in moments.items()}}


def moment_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    held = {
        f"optimizer.state.exp_avg.{name}": optimizer.state[parameter]["exp_avg"]
        for name, parameter in model.named_parameters()
    }
    return {**model.state_dict(), **held}


NUMBERED = [by_number, lightning, megatron, deepspeed]
NAMED = [by_name, flattened, among_weights, moment_first]


def saved(path: Path, value: Mapping[str, Any]) -> Path:
    torch.save(dict(value), path)
    return path


def refused(path: Any, rules: Path, **more: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(path, rules=rules, **{"allow": {"drop", "lossy"}, **more})
    assert [d.code for d in caught.value.diagnostics] == ["M410"]
    return str(caught.value)


@pytest.mark.parametrize(
    "optimizer", thorough([torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
)
@pytest.mark.parametrize("kind", [by_number, lightning, megatron])
def test_state_by_number_is_right_behind_new_names(
    kind: Any, optimizer: Any, rule: Any, tmp_path: Path
) -> None:
    model, made = trained(optimizer)
    source, out = saved(tmp_path / "in.pt", kind(model, made)), tmp_path / "out.pt"
    answer = migrate.apply(source, out, rules=rule("rename"))
    assert answer.optimizer == "renamed"
    assert any("goes by number, and is carried" in note for note in answer.to_json()["notes"])
    assert answer.to_json()["downgrade"]["exact"]
    loaded = torch.load(out, weights_only=True)
    resumed = Renamed()
    resumed.load_state_dict(loaded["state_dict" if kind is lightning else "model"])
    again = optimizer(resumed.parameters(), lr=0.1)
    state = {
        by_number: lambda: loaded["optimizer"],
        lightning: lambda: loaded["optimizer_states"][0],
        megatron: lambda: loaded["optimizer"]["optimizer"],
    }
    again.load_state_dict(state[kind]())
    for _ in range(2):
        step(model, made)
        step(resumed, again)
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    # the way back too
    migrate.downgrade(out, tmp_path / "back.pt", rules=rule("rename"))
    assert migrate.diff(tmp_path / "back.pt", source).equal


def test_the_moments_that_are_refused_would_be_wrong(rule: Any, tmp_path: Path) -> None:
    """The control: state by number that `swap` carries as it is steps elsewhere, and what `merge`
    carries is not loaded.
    """
    model, made = trained()
    source = saved(tmp_path / "in.pt", by_number(model, made))
    migrate.apply(source, tmp_path / "swapped.pt", rules=rule("swap"), allow={"stale-optimizer"})
    loaded = torch.load(tmp_path / "swapped.pt", weights_only=True)
    resumed = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    resumed.load_state_dict(loaded["model"])
    assert torch.equal(resumed[0].weight, model[2].weight)
    again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    again.load_state_dict(loaded["optimizer"])
    assert not torch.equal(
        again.state[resumed[0].weight]["exp_avg"], made.state[model[2].weight]["exp_avg"]
    )
    migrate.apply(source, tmp_path / "merged.pt", rules=rule("merge"), allow={"stale-optimizer"})
    state = torch.load(tmp_path / "merged.pt", weights_only=True)["optimizer"]
    three = [nn.Parameter(torch.zeros(n)) for n in (3, 3, 2)]
    with pytest.raises(ValueError, match="doesn't match the size"):
        torch.optim.AdamW(three).load_state_dict(state)


# what state by number follows, where it is known which parameters the numbers are
FOLLOWED = ("merge", "split", "drop", "reshape", "transpose", "swap")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", thorough(NUMBERED))
def test_state_by_number_is_refused_where_the_numbers_would_count_others(
    kind: Any, change: str, rule: Any, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in.pt", kind(*trained()))
    if kind in (by_number, lightning) and change in FOLLOWED:
        answer = migrate.apply(source, tmp_path / "out.pt", rules=rule(change), allow={"drop"})
        assert answer.optimizer == "followed"
        assert any("its numbers are known by the order" in note for note in answer.notes)
        assert migrate.verify(tmp_path / "out.pt", source=source, rules=rule(change)).equal
        return
    said = refused(source, rule(change))
    assert (
        "it refers to parameters by number" in said
        or "`affine` makes other numbers" in said
        or "it adds tensors, and no file says which numbers" in said
    )
    assert f"{change}.yaml" in said or change == "add"
    with pytest.raises(CheckpointError, match="M410"):
        migrate.apply(source, tmp_path / "out.pt", rules=rule(change), allow={"drop", "lossy"})
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt", ".yaml"}
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize(
    "change", ["rename", "merge", "split", "drop", "reshape", "transpose", "swap", "backwards"]
)
@pytest.mark.parametrize("kind", thorough(NAMED))
def test_state_by_name_follows_where_a_name_goes_or_means_another_tensor(
    kind: Any, change: str, rule: Any, tmp_path: Path
) -> None:
    source, out = saved(tmp_path / "in.pt", kind(*trained())), tmp_path / "out.pt"
    asked: dict[str, Any] = {"rules": rule(change)}
    answer = migrate.apply(source, out, **asked, allow={"drop"})
    assert answer.optimizer == "followed"
    assert migrate.verify(out, source=source, **asked).equal
    exact = answer.to_json()["downgrade"]["exact"]
    assert exact == (change != "drop")
    if exact:
        migrate.downgrade(out, tmp_path / "back.pt", **asked)
        assert migrate.diff(tmp_path / "back.pt", source).equal


@pytest.mark.parametrize("kind", thorough(NAMED))
def test_state_by_name_is_refused_where_numbers_change(
    kind: Any, rule: Any, tmp_path: Path
) -> None:
    said = refused(saved(tmp_path / "in.pt", kind(*trained())), rule("scale"))
    assert "cannot follow 1 parameter through rule 'r': `affine` makes other numbers" in said
    assert "0.weight" in said
    assert "optimizer: drop" in said


@pytest.mark.parametrize("kind", [*NUMBERED, *NAMED])
def test_a_cast_leaves_moments_right(kind: Any, rule: Any, tmp_path: Path) -> None:
    model, made = trained()
    source = saved(tmp_path / "in.pt", kind(model, made))
    text = (
        RULES["cast"]
        if kind not in (among_weights, moment_first)
        else RULES["cast"].replace("{k...}", "{i:int}.{k}").replace('"{k}"', '"{i}.{k}"')
    )
    text = ('keep: ["optimizer.{k...}"]\n' if kind in (among_weights, moment_first) else "") + text
    answer = migrate.apply(source, tmp_path / "out.pt", rules=rule(text))
    assert (
        answer.optimizer,
        [note for note in answer.to_json()["notes"] if "optimizer" in note],
    ) == (
        "right",
        [],
    )
    if kind is by_number:
        loaded = torch.load(tmp_path / "out.pt", weights_only=True)
        resumed = copy.deepcopy(model).double()
        resumed.load_state_dict(loaded["model"])
        again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
        again.load_state_dict(loaded["optimizer"])
        for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(again.state[other]["exp_avg"], made.state[one]["exp_avg"].double())


@pytest.mark.parametrize("kind", NAMED)
def test_state_by_name_of_parameters_that_stay_is_carried(
    kind: Any, rule: Any, tmp_path: Path
) -> None:
    value = kind(*trained())
    table = value.get("model", value)
    table["norm.running_mean"] = torch.ones(3)
    source = saved(tmp_path / "in.pt", value)
    text = KEEP + 'rules: [{name: r, from: "norm.{k}", to: "bn.{k}"}]\n'
    answer = migrate.apply(source, tmp_path / "out.pt", rules=rule(text))
    assert (answer.optimizer, answer.to_json()["downgrade"]["exact"]) == ("right", True)


def test_rules_that_take_state_by_name_along_are_asked_for_nothing(
    rule: Any, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in.pt", among_weights(*trained()))
    text = (
        RULES["rename"]
        + '  - {name: s, from: "optimizer.state.{k...}", to: "optimizer.state.layers.{k}"}\n'
    )
    text = text.replace("rules: [", "rules:\n  - ").replace("}]\n", "}\n", 1)
    assert migrate.plan(source, rules=rule(text)).document["optimizer"] == "right"


# state among the weights, which `keep` of these does not speak of
UNKEPT = {
    "rename": 'rules: [{name: r, from: "{i:int}.{k}", to: "layers.{i}.{k}"}]\n',
    "buffer": 'keep: ["{i:int}.{k}"]\nrules: [{name: r, from: "norm.{k}", to: "bn.{k}"}]\n',
}


@pytest.mark.parametrize("kind", [among_weights, moment_first])
@pytest.mark.parametrize(("change", "becomes"), [("rename", "stale"), ("buffer", "right")])
def test_state_among_the_weights_that_no_rule_names_is_carried_where_that_is_allowed(
    kind: Any, change: str, becomes: str, rule: Any, tmp_path: Path
) -> None:
    value = {**kind(*trained()), **({"norm.mean": torch.ones(3)} if change == "buffer" else {})}
    source, out = saved(tmp_path / "in.pt", value), tmp_path / "out.pt"
    asked: dict[str, Any] = {"rules": rule(UNKEPT[change])}
    follows = migrate.plan(source, **asked).document["optimizer"]
    assert follows == ("followed" if change == "rename" else "right")
    answer = migrate.apply(source, out, **asked, allow={"stale-optimizer"})
    assert (answer.optimizer, answer.to_json()["downgrade"]) == (
        becomes,
        {"exact": True, "because": []},
    )
    told = [note for note in answer.to_json()["notes"] if "is stale and carried as it is" in note]
    assert bool(told) is (becomes == "stale")
    loaded = torch.load(out, weights_only=True)
    state = {key for key in value if key.startswith("optimizer.")}
    assert state == {key for key in loaded if key.startswith("optimizer.")}
    assert all(torch.equal(loaded[key], value[key]) for key in state)
    assert migrate.verify(out, source=source, **asked).equal
    back = tmp_path / "back.pt"
    migrate.downgrade(out, back, **asked, allow={"stale-optimizer"})
    assert migrate.diff(back, source).equal
    in_memory = migrate.apply(value, **asked, allow={"stale-optimizer"})
    assert in_memory.keys() == loaded.keys()
    weights = migrate.apply(
        source, tmp_path / "weights.pt", **asked, params={"optimizer": "drop"}, allow={"drop"}
    )
    assert weights.optimizer == "dropped"
    assert migrate.verify(tmp_path / "weights.pt", source=source, **asked).equal


def test_only_state_is_carried_with_state_that_no_rule_names(rule: Any, tmp_path: Path) -> None:
    model, made = trained()
    value = {**among_weights(model, made), "norm.mean": torch.ones(3)}
    source = saved(tmp_path / "in.pt", value)
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(source, rules=rule(UNKEPT["rename"]), allow={"stale-optimizer"})
    (found,) = caught.value.diagnostics
    assert (found.code, found.permit) == ("M211", "")
    assert found.message.startswith("norm.mean")


@pytest.mark.parametrize(("names", "becomes"), [("plain", "right"), ("wrapped", "followed")])
def test_names_without_wrappers_come_to_fit(names: str, becomes: str, tmp_path: Path) -> None:
    model, made = trained()
    state = get_optimizer_state_dict(model, made)
    if names == "wrapped":
        state["state"] = {f"module.{name}": held for name, held in state["state"].items()}
        state["param_groups"] = [
            {**group, "params": [f"module.{name}" for name in group["params"]]}
            for group in state["param_groups"]
        ]
    source = saved(
        tmp_path / "in.pt",
        {
            "model": {f"module.{key}": value for key, value in model.state_dict().items()},
            "optim": state,
        },
    )
    answer = migrate.apply(source, tmp_path / "out.pt", to="torch-wrappers@plain")
    assert answer.optimizer == becomes
    found = torch.load(tmp_path / "out.pt", weights_only=True)["optim"]
    assert [*found["state"]] == found["param_groups"][0]["params"] == [*model.state_dict()]


def test_of_several_optimizers_those_are_named_whose_parameters_change(
    rule: Any, tmp_path: Path
) -> None:
    model, made = trained()
    state = get_optimizer_state_dict(model, made)
    parts = [
        {"state": {n: s for n, s in state["state"].items() if n[0] == i}, "param_groups": []}
        for i in "02"
    ]
    source = saved(
        tmp_path / "in.pt",
        {"model": model.state_dict(), "optimizers": {"one": parts[0], "two": parts[1]}},
    )
    said = refused(source, rule(RULES["scale"].replace("0.weight", "2.weight")))
    assert "`optimizers.two`" in said
    assert "`optimizers.one`" not in said


def test_buffers_are_no_parameters_where_that_can_be_told(rule: Any, tmp_path: Path) -> None:
    text = KEEP + 'rules: [{name: r, from: "rope.inv_freq", via: [{drop: {why: x}}]}]\n'
    model, made = trained()
    for buffer, names, right in (
        (torch.ones(7), False, True),
        (torch.ones(3, dtype=torch.int64), False, True),
        (torch.ones(3), False, False),
        (torch.ones(3), True, True),
    ):
        value = by_number(model, made)
        value["model"] = {**value["model"], "rope.inv_freq": buffer}
        if names:
            named = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
            named.load_state_dict(made.state_dict())
            value["optimizer"] = named.state_dict()
        source = saved(tmp_path / "in.pt", value)
        if right:
            assert (
                migrate.plan(source, rules=rule(text), allow={"drop"}).document["optimizer"]
                == "right"
            )
        else:
            assert "rope.inv_freq" in refused(source, rule(text))


def test_an_optimizer_without_moments_counts_parameters_as_well(rule: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", by_number(*trained(torch.optim.SGD)))
    assert migrate.plan(source, rules=rule("rename")).document["optimizer"] == "renamed"
    refused(source, rule("merge"))


@pytest.mark.parametrize("kind", [*NUMBERED, *NAMED])
def test_stale_state_is_carried_where_that_is_allowed_and_plan_answer_and_stamp_say_so(
    kind: Any, rule: Any, tmp_path: Path
) -> None:
    source, out = saved(tmp_path / "in.pt", kind(*trained())), tmp_path / "out.pt"
    asked = {"rules": rule("merge"), "allow": {"stale-optimizer"}}
    document = migrate.plan(source, **asked).document
    answer = migrate.apply(source, out, **asked)
    for told in (document, answer.to_json()):
        assert told["optimizer"] == "stale"
        assert any("is stale and carried as it is" in note for note in told["notes"])
    (entry,) = migrate.history(out).to_json()["applied"]
    assert entry["optimizer"] == "stale"
    assert migrate.verify(out, source=source, rules=rule("merge")).equal
    moments = migrate.inspect(source).to_json()["carried"]["tensors"]
    assert migrate.inspect(out).to_json()["carried"]["tensors"] == moments
    if kind in NUMBERED:
        # a stamp permits nothing, and tells
        with pytest.raises(CheckpointError, match="it would fit again"):
            migrate.downgrade(out, tmp_path / "back.pt", rules=rule("merge"))
    answer = migrate.downgrade(out, tmp_path / "back.pt", **asked)
    assert answer.optimizer == "right"
    assert migrate.diff(tmp_path / "back.pt", source).equal


@pytest.mark.parametrize("change", thorough(["merge", "rename"]))
@pytest.mark.parametrize("kind", [*NUMBERED, *NAMED])
def test_optimizer_state_is_left_out_where_that_is_asked_for(
    kind: Any, change: str, rule: Any, tmp_path: Path
) -> None:
    model, made = trained()
    source, out = saved(tmp_path / "in.pt", kind(model, made)), tmp_path / "out.pt"
    asked = {"rules": rule(change), "params": {"optimizer": "drop"}}
    with pytest.raises(CheckpointError, match="M402"):
        migrate.plan(source, **asked)
    answer = migrate.apply(source, out, **asked, allow={"drop"})
    assert answer.optimizer == "dropped"
    assert any("optimizer state is left out" in note for note in answer.to_json()["notes"])
    assert answer.to_json()["downgrade"] == {
        "exact": False,
        "because": ["the state of the optimizer does not come back"],
    }
    assert migrate.history(out).to_json()["applied"][0]["optimizer"] == "dropped"
    loaded = torch.load(out, weights_only=True)
    assert not any("optim" in key for key in loaded)
    there = torch.load(source, weights_only=True)
    beside = {
        key for key in there if "optim" not in key and not isinstance(there[key], torch.Tensor)
    }
    assert beside <= set(loaded)
    assert migrate.verify(out, source=source, rules=rule(change)).equal


def test_any_other_word_for_the_optimizer_is_refused(rule: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", by_number(*trained()))
    with pytest.raises(QuestionError, match="M115"):
        migrate.plan(source, rules=rule("rename"), params={"optimizer": "keep"})
    none = saved(tmp_path / "none.pt", {"0.weight": torch.ones(3, 3)})
    notes = migrate.plan(none, rules=rule("rename"), params={"optimizer": "drop"}).document["notes"]
    assert "there is no optimizer state to leave out" in notes


def test_state_that_lies_beside_safetensors_is_found_as_well(rule: Any, tmp_path: Path) -> None:
    source, folder = saved(tmp_path / "in.pt", by_number(*trained())), tmp_path / "folder"
    migrate.apply(source, folder, output_format="safetensors")
    assert (folder / "migrate.items.safetensors").exists()
    refused(folder, rule("backwards"))
    assert migrate.plan(folder, rules=rule("merge")).document["optimizer"] == "followed"
    migrate.apply(
        folder, tmp_path / "new", rules=rule("merge"), params={"optimizer": "drop"}, allow={"drop"}
    )
    assert not (tmp_path / "new" / "migrate.items.safetensors").exists()
    assert "epoch" in (tmp_path / "new" / "migrate.items.json").read_text()
    migrate.apply(
        source,
        tmp_path / "weights",
        output_format="safetensors",
        params={"optimizer": "drop"},
        allow={"drop"},
    )
    assert migrate.verify(tmp_path / "weights", source=source, params={"optimizer": "drop"}).equal
    assert "exp_avg" not in (tmp_path / "weights" / "migrate.items.json").read_text()


def test_state_dicts_in_memory_are_judged_as_files_are(rule: Any) -> None:
    model, made = trained()
    state = {**model.state_dict(), "optimizer": made.state_dict()}
    told: list[dict[str, Any]] = []
    for call in (migrate.apply, migrate.migrate_state_dict):
        out = call(state, rules=rule("rename"), inform=told.append)
        assert out["optimizer"] is state["optimizer"]
        assert any("goes by number, and is carried" in note for note in told[-1].to_json()["notes"])
        out = call(state, rules=rule("merge"), inform=told.append)
        assert list(out["optimizer"]["state"]) == [0, 1, 2]
        assert any("follows its parameters" in note for note in told[-1].to_json()["notes"])
        with pytest.raises(CheckpointError, match="M410"):
            call(state, rules=rule("scale"), allow={"lossy"})
        out = call(
            state,
            rules=rule("merge"),
            params={"optimizer": "drop"},
            allow={"drop"},
            inform=told.append,
        )
        assert set(out) == {"all.weight", "0.bias", "2.bias"}
        call(state, rules=rule("merge"), allow={"stale-optimizer"}, inform=told.append)
        assert any("is stale and carried as it is" in note for note in told[-1].to_json()["notes"])
    named = {**model.state_dict(), "optim": get_optimizer_state_dict(model, made)}
    followed = migrate.apply(named, rules=rule("rename"))
    assert followed["optim"]["state"].keys() == followed.keys() - {"optim"}


def test_a_stamp_says_of_an_optimizer_only_what_migrate_writes(rule: Any, tmp_path: Path) -> None:
    migrate.apply(
        saved(tmp_path / "in.pt", by_number(*trained())),
        tmp_path / "out",
        rules=rule("rename"),
        output_format="safetensors",
    )
    path = tmp_path / "out" / "migrate.history.json"
    stamp = json.loads(path.read_text())
    assert "optimizer" not in stamp["applied"][0]
    for wrong in ("fine", 5, ["stale"], None):
        stamp["applied"][0]["optimizer"] = wrong
        path.write_text(json.dumps(stamp))
        assert migrate.history(tmp_path / "out").to_json()["notes"] == [
            "the stamp cannot be read and is ignored"
        ]


def test_a_checkpoint_without_anything_beside_its_tensors_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, rule: Any, tmp_path: Path
) -> None:
    def never(*arguments: Any) -> Any:
        raise AssertionError("looked for what is not there")

    for name in ("find_states", "_Search", "_seen"):
        monkeypatch.setattr(optimizer_states, name, never)
    for module in (optimizers, copies):
        monkeypatch.setattr(module, "follow_tensors", never)
    monkeypatch.setattr(state_keys, "read_all", never)
    source = saved(tmp_path / "in.pt", trained()[0].state_dict())
    assert migrate.apply(source, tmp_path / "out.pt", rules=rule("merge")).optimizer is None


@pytest.fixture
def alone() -> Iterator[Any]:
    """One process that is a world of its own."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_state_of_fsdp2_by_name_steps_on_where_its_parameters_stay(
    alone: Any, rule: Any, tmp_path: Path
) -> None:
    def sharded() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        fully_shard(model, mesh=alone)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    whole = StateDictOptions(full_state_dict=True)
    model, made = sharded()
    step(model, made)
    weights, state = get_state_dict(model, made, options=whole)
    source = saved(
        tmp_path / "in.pt", {"model": {**weights, "ema.decay": torch.ones(1)}, "optim": state}
    )
    renamed = rule('keep: ["ema.{k}"]\n' + RULES["rename"])
    assert migrate.plan(source, rules=renamed).document["optimizer"] == "followed"
    answer = migrate.apply(
        source,
        tmp_path / "out.pt",
        rules=rule(KEEP + 'rules: [{name: r, from: "ema.{k}", to: "average.{k}"}]\n'),
    )
    assert answer.optimizer == "right"
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["model"].pop("average.decay") == 1
    resumed, again = sharded()
    set_state_dict(
        resumed,
        again,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optim"],
        options=whole,
    )
    for one in ((model, made), (resumed, again)):
        step(*one)
    for name, value in get_state_dict(model, made, options=whole)[0].items():
        assert torch.equal(value, get_state_dict(resumed, again, options=whole)[0][name])


def test_what_is_only_called_like_an_optimizer_is_none(rule: Any, tmp_path: Path) -> None:
    names = ("optimizer_net.state.fc.weight", "0.weight", "2.weight")
    source = saved(
        tmp_path / "in.pt",
        {"optim_model": {name: torch.ones(3, 3) for name in names}, "optimizer_steps": 3},
    )
    document = migrate.plan(source, rules=rule("merge"), at="optim_model").document
    assert (document["optimizer"], document["downgrade"]["exact"]) == (None, True)
    migrate.apply(
        source,
        tmp_path / "out.pt",
        rules=rule("merge"),
        at="optim_model",
        params={"optimizer": "drop"},
        allow={"drop"},
    )
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert set(loaded["optim_model"]) == {"all.weight", "optimizer_net.state.fc.weight"}
    assert loaded["optimizer_steps"] == 3
