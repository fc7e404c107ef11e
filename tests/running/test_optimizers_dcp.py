"""Optimizer state in distributed checkpoints that stock torch saved, in each way that frameworks
spell it: carried where it stays right, refused where not, and migrated by rules of its own.
"""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import rows, save
from test_optimizers import HEAD, KEEP, Renamed, step, trained
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import migrate
from migrate.core.errors import CheckpointError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Optimizer = torch.optim.Optimizer


def nested_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def flat_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def nested(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": nested_of(model, optimizer), "step": 3}


def flattened(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": flat_of(model, optimizer), "step": 3}


def in_app(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"app": {"model": model.state_dict(), "optim": nested_of(model, optimizer)}}


def torchtitan(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    beside = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": torch.tensor(3)}}
    return {**model.state_dict(), "optimizer": flat_of(model, optimizer), **beside}


def older_torchtitan(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {
        **model.state_dict(),
        "optimizer": nested_of(model, optimizer),
        "train_state": {"step": 3},
    }


def several(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = {"adamw": nested_of(model, optimizer), "muon": flat_of(model, optimizer)}
    return {"model": model.state_dict(), "optimizer": held}


def in_a_list(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = [nested_of(model, optimizer), flat_of(model, optimizer)]
    return {"model": model.state_dict(), "optimizers": held}


def one_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {**model.state_dict(), **flat_of(model, optimizer)}


def one_dict_of_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    held = one_dict(model, optimizer)
    return {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}


def no_paths(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """As a program that knows no nested dicts saves tensors."""
    moments = flat_of(model, optimizer)
    held = {key: value for key, value in moments.items() if isinstance(value, torch.Tensor)}
    return {**model.state_dict(), **{f"optimizer.{key}": value for key, value in held.items()}}


# each with the dict that rules work on and where the state is
SPELLINGS: dict[Any, tuple[str, list[str]]] = {
    nested: ("model", ["`optimizer`"]),
    flattened: ("model", ["`optimizer`"]),
    in_app: ("app.model", ["`app.optim`"]),
    torchtitan: ("", ["`optimizer`"]),
    older_torchtitan: ("", ["`optimizer`"]),
    several: ("model", ["`optimizer.adamw`", "`optimizer.muon`"]),
    in_a_list: ("model", ["`optimizers.0`", "`optimizers.1`"]),
    one_dict: ("", ["the top of the file"]),
    one_dict_of_tensors: ("", ["the top of the file"]),
    no_paths: ("", ["`optimizer`"]),
}
# where rules see the state, they keep it
AMONG = (one_dict, one_dict_of_tensors, no_paths)
RENAME = HEAD + 'rules: [{name: r, from: "{i:int}.{k}", to: "layers.{i}.{k}"}]\n'
BUFFER = HEAD + KEEP + "rules: [{name: r, from: count, to: counts, optional: true}]\n"


def written(folder: Path, state: dict[str, Any]) -> Path:
    """Two chunks of each matrix, as of two ranks."""
    held = torch.empty(3, 3)
    names = [f"model.{i}.weight" for i in (0, 2)] if "model" in state else []
    return save(folder, state, {name: rows(held.shape, (2, 1)) for name in names})


def read(folder: Path) -> dict[str, Any]:
    out = folder.with_name(f"{folder.name}.pt")
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=True)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {path: value}
    return {
        name: leaf
        for key, one in pairs
        for name, leaf in leaves(one, f"{path}.{key}" if path else str(key)).items()
    }


def same(one: Any, other: Any) -> None:
    a, b = leaves(one), leaves(other)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_state_follows_a_rename_of_its_parameters_wherever_it_is(
    spelling: Any, tmp_path: Path
) -> None:
    (tmp_path / "rule.yaml").write_text(RENAME if spelling not in AMONG else RENAME + KEEP)
    source = written(tmp_path / "in", spelling(*trained()))
    at, places = SPELLINGS[spelling]
    assert migrate.inspect(source).at == at
    out, asked = tmp_path / "out", {"rules": tmp_path / "rule.yaml"}
    answer = migrate.apply(source, out, **asked)
    assert answer.optimizer == "followed"
    for place in places:
        assert f"optimizer state at {place} follows its parameters" in answer.notes
    assert migrate.verify(out, source=source, **asked).equal
    found = read(out)
    before, after = leaves(read(source)), leaves(found)
    moments = {key for key in before if key.endswith(("exp_avg", "exp_avg_sq", "step"))}
    assert moments
    for key in moments - {"train_state.step", "step"}:
        new = re.sub(r"(?<=state\.)([02]\.)", r"layers.\1", key)
        assert torch.equal(after[new], before[key]), key
    # by the parameter's name in flat dicts; nested ones list the names
    settings = [key for key in before if "param_groups" in key]
    assert bool(settings) == (spelling not in (one_dict_of_tensors, no_paths))
    for key in settings:
        new = re.sub(r"(?<=param_groups\.)([02]\.(weight|bias)\.)", r"layers.\1", key)
        was = before[key]
        assert after[new] == (f"layers.{was}" if ".params." in key else was), key
    migrate.downgrade(out, tmp_path / "back", **asked)
    assert migrate.diff(tmp_path / "back", source).equal


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_state_of_parameters_that_stay_is_carried(spelling: Any, tmp_path: Path) -> None:
    (tmp_path / "rule.yaml").write_text(BUFFER)
    model, optimizer = trained()
    model.register_buffer("count", torch.ones(2))
    made = spelling(model, optimizer)
    source, out = written(tmp_path / "in", made), tmp_path / "out"
    answer = migrate.apply(source, out, rules=tmp_path / "rule.yaml")
    assert answer.optimizer == "right"
    found, wanted = leaves(read(out)), leaves(made)
    assert {key.replace("count", "counts") for key in wanted} == found.keys()
    same(
        {key: found[key] for key in wanted if "count" not in key},
        {key: one for key, one in wanted.items() if "count" not in key},
    )
    assert migrate.verify(out, source=source, rules=tmp_path / "rule.yaml").equal


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_stale_state_is_carried_where_that_is_allowed(spelling: Any, tmp_path: Path) -> None:
    rules = tmp_path / "rule.yaml"
    rules.write_text(RENAME)
    made = spelling(*trained())
    source, out = written(tmp_path / "in", made), tmp_path / "out"
    answer = migrate.apply(source, out, rules=rules, allow="stale-optimizer")
    assert answer.optimizer == "stale"
    assert migrate.history(out).applied[0].optimizer == "stale"
    found, wanted = leaves(read(out)), leaves(made)
    state = {key for key in wanted if "state." in key}
    assert len(state) >= 12
    same({key: found[key] for key in state}, {key: wanted[key] for key in state})
    assert sum("layers.0.weight" in key for key in found) == 1
    assert migrate.verify(out, source=source, rules=rules).equal
    migrate.downgrade(out, tmp_path / "back", rules=rules, allow="stale-optimizer")
    assert migrate.diff(source, tmp_path / "back").equal


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_state_is_left_out_where_that_is_asked_for_and_allowed(
    spelling: Any, tmp_path: Path
) -> None:
    rules, drop = tmp_path / "rule.yaml", {"optimizer": "drop"}
    rules.write_text(RENAME)
    made = spelling(*trained())
    source, out = written(tmp_path / "in", made), tmp_path / "out"
    at, places = SPELLINGS[spelling]
    with pytest.raises(CheckpointError, match="M402"):
        migrate.apply(source, out, rules=rules, params=drop)
    answer = migrate.apply(source, out, rules=rules, params=drop, allow="drop")
    assert answer.optimizer == "dropped"
    assert any(f"{12 * len(places)} tensors" in note for note in answer.notes)
    found = leaves(read(out))
    beside = {key for key in leaves(made) if "optim" not in key}
    assert {key for key in found if "layers." not in key} == {
        key
        for key in beside
        if not key.removeprefix("app.")
        .removeprefix("model.")
        .startswith(("0.", "2.", "state.", "param_groups."))
    }
    assert sum("layers." in key for key in found) == 4
    assert not any(word in key for key in found for word in ("exp_avg", "param_groups", "betas"))
    assert migrate.inspect(out).at == at
    assert migrate.verify(out, source=source, rules=rules).equal
    # a moment is nowhere in the files
    moment = next(iter(trained()[1].state.values()))["exp_avg"].numpy().tobytes()
    assert not any(moment in file.read_bytes() for file in out.iterdir())
    assert any(moment in file.read_bytes() for file in source.iterdir())


OWN = (
    HEAD
    + 'keep: []\nrules: [{name: r, from: "state.{i:int}.{k...}", to: "state.layers.{i}.{k}"}]\n'
)


@pytest.mark.parametrize("spelling", [flattened, torchtitan, nested, older_torchtitan])
def test_the_optimizer_follows_by_rules_of_its_own_and_steps_on(
    spelling: Any, tmp_path: Path
) -> None:
    """Model and optimizer one after the other, and stock torch resumes from what came of it."""
    (tmp_path / "model.yaml").write_text(RENAME)
    (tmp_path / "optimizer.yaml").write_text(OWN)
    model, optimizer = trained()
    for group in optimizer.param_groups:
        group["lr"] = 0.03
    source = written(tmp_path / "in", spelling(model, optimizer))
    half, out = tmp_path / "half", tmp_path / "out"
    at = SPELLINGS[spelling][0] or "."
    migrate.apply(source, half, rules=tmp_path / "optimizer.yaml", at="optimizer")
    assert migrate.verify(
        half, source=source, rules=tmp_path / "optimizer.yaml", at="optimizer"
    ).equal
    # no new name is an old one, so no parameter seems to have the state of another
    assert migrate.apply(half, out, rules=tmp_path / "model.yaml", at=at).optimizer == "right"
    resumed = Renamed()
    again = torch.optim.AdamW(resumed.parameters(), lr=0.1)
    # torch makes the moments before it loads them
    step(resumed, again)
    state = spelling(resumed, again)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=out)
    resumed.load_state_dict(
        state["model"]
        if at == "model"
        else {key: value for key, value in state.items() if key.startswith("layers.")}
    )
    set_optimizer_state_dict(resumed, again, state["optimizer"], options=FLAT)
    assert {group["lr"] for group in again.param_groups} == {0.03}
    for _ in range(2):
        step(model, optimizer)
        step(resumed, again)
    same(list(resumed.state_dict().values()), list(model.state_dict().values()))
    # and back, the other way round
    migrate.downgrade(
        out, tmp_path / "b", rules=tmp_path / "model.yaml", at=at, allow="stale-optimizer"
    )
    migrate.downgrade(
        tmp_path / "b", tmp_path / "back", rules=tmp_path / "optimizer.yaml", at="optimizer"
    )
    assert migrate.diff(source, tmp_path / "back").equal


SHIFT = HEAD + 'keep: []\nrules: [{name: r, from: "{i:int}.{k}", to: "{i+2}.{k}"}]\n'
SHIFT_OWN = (
    HEAD + 'keep: []\nrules: [{name: r, from: "state.{i:int}.{k...}", to: "state.{i+2}.{k}"}]\n'
)


def test_a_new_name_that_is_also_an_old_one_needs_the_permission(tmp_path: Path) -> None:
    """Layers 0 and 2 become 2 and 4: then 2 seems to be what the state of 2 belongs to."""
    (tmp_path / "model.yaml").write_text(SHIFT)
    (tmp_path / "optimizer.yaml").write_text(SHIFT_OWN)
    made = flattened(*trained())
    source, half, out = written(tmp_path / "in", made), tmp_path / "half", tmp_path / "out"
    migrate.apply(source, half, rules=tmp_path / "optimizer.yaml", at="optimizer")
    with pytest.raises(CheckpointError, match=r"M410.*changes 2 parameters of it"):
        migrate.apply(half, out, rules=tmp_path / "model.yaml", at="model")
    migrate.apply(half, out, rules=tmp_path / "model.yaml", at="model", allow="stale-optimizer")
    found = read(out)
    for old, new in (("0", "2"), ("2", "4")):
        for kind in ("weight", "bias"):
            for moment in ("exp_avg", "exp_avg_sq"):
                was = made["optimizer"][f"state.{old}.{kind}.{moment}"]
                assert torch.equal(found["optimizer"][f"state.{new}.{kind}.{moment}"], was)
            assert torch.equal(found["model"][f"{new}.{kind}"], made["model"][f"{old}.{kind}"])


@pytest.mark.parametrize("form", ["dcp", "torch"])
@pytest.mark.parametrize("place", [0, 1])
def test_each_optimizer_of_a_list_follows_by_rules_of_its_own(
    place: int, form: str, tmp_path: Path
) -> None:
    """The first of them is nested, the second flat."""
    rules, at = tmp_path / "optimizer.yaml", f"optimizers.{place}"
    rules.write_text(OWN)
    made = copy.deepcopy(in_a_list(*trained()))
    # else both hold the same tensors
    made["optimizers"][1] = copy.deepcopy(made["optimizers"][1])
    source, out, back = written(tmp_path / "in", made), tmp_path / "out", tmp_path / "back"
    if form == "torch":
        source, out, back = (one.with_name(f"{one.name}.pt") for one in (source, out, back))
        torch.save(made, source)
    migrate.apply(source, out, rules=rules, at=at)
    assert migrate.verify(out, source=source, rules=rules, at=at).equal
    assert migrate.inspect(out).at == "model"
    found = torch.load(out, weights_only=True) if form == "torch" else read(out)
    same(found["model"], made["model"])
    same(found["optimizers"][1 - place], made["optimizers"][1 - place])
    was, now = leaves(made["optimizers"][place]), leaves(found["optimizers"][place])
    moments = {key: one for key, one in was.items() if isinstance(one, torch.Tensor)}
    assert len(moments) == 12
    same(
        {key.replace("state.", "state.layers."): one for key, one in moments.items()},
        {key: one for key, one in now.items() if isinstance(one, torch.Tensor)},
    )
    texts = [text.replace("weight_decay", "") for text in map(str, (*now, *now.values()))]
    names = [text for text in texts if ".weight" in text or ".bias" in text]
    assert len(names) > 12
    assert [name for name in names if "layers." not in name] == []
    migrate.downgrade(out, back, rules=rules, at=at)
    assert migrate.diff(source, back).equal
