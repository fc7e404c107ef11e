"""Values that are no tensors go with the tensors of their modules: dropped, copied and merged as
these are, in `apply` to files and through the reader alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch_compare import same

import migrate
from migrate.core.errors import MigrateError
from migrate.dcp import MigratingReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"
KEPT = {"k.w": torch.zeros(1), "k._extra_state": {"calls": 3}, "epoch": 4}
# how a path of each format ends
TORCH, DCP = ".pt", ""
MODULE = {
    "a.w": torch.ones(2),
    "a.sub.w": torch.arange(3.0),
    "a._extra_state": {"calls": [5, None]},
    "a.sub._extra_state": {"calls": 7},
    "a.idle.config": {"p": 0.5},
}
DROP = 'keep: ["k.w"]\nrules:\n  - {name: gone, from: "a.{k...}", via: [{drop: {why: unused}}]}\n'
COPY = """keep: ["k.w"]
rules:
  - {name: twice, from: "a.{k...}", to: "{m:MODULES}.{k}", via: [{OP: {into: m}}]}
"""
SAME = """rules:
  - {name: one, from: "{m:a|b}.{k...}", to: "c.{k}", via: [{same: {over: m}}]}
"""


def rules(folder: Path, text: str) -> list[str]:
    (folder / "r.yaml").write_text(HEAD + text)
    return [str(folder / "r.yaml")]


def saved(folder: Path, state: dict[str, Any], form: str) -> Path:
    path = folder / f"in{form}"
    if form == TORCH:
        torch.save(state, path)
    else:
        dcp.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner(False), no_dist=True)
    return path


def content(path: Path, form: str) -> dict[str, Any]:
    if form == TORCH:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found
    return read(dcp.FileSystemReader(path))


def read(reader: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def renamed(state: dict[str, Any], *names: str) -> dict[str, Any]:
    """What `a` has under each of the names, all else as it is."""
    out = {key: value for key, value in state.items() if not key.startswith("a.")}
    for name in names:
        out.update(
            {f"{name}{key[1:]}": value for key, value in state.items() if key.startswith("a.")}
        )
    return out


@pytest.mark.parametrize("form", [TORCH, DCP])
def test_values_of_a_module_that_is_dropped_go_and_count_as_a_loss(
    form: str, tmp_path: Path
) -> None:
    path, rule = saved(tmp_path, {**MODULE, **KEPT}, form), rules(tmp_path, DROP)
    with pytest.raises(MigrateError) as caught:
        migrate.apply(path, tmp_path / f"out{form}", rules=rule)
    (found,) = caught.value.diagnostics
    assert found.code == "M402"
    assert found.message.startswith("rule 'gone' drops 5 keys")
    planned = migrate.plan(path, rules=rule, allow="drop", expand=True).document
    rows = [row["from"] for row in planned["rows"] if row["change"] == "dropped"]
    assert sorted(key for row in rows for key in row) == sorted(MODULE)
    assert not planned["downgrade"]["exact"]
    migrate.apply(path, tmp_path / f"out{form}", rules=rule, allow="drop")
    same(content(tmp_path / f"out{form}", form), KEPT)
    assert migrate.verify(tmp_path / f"out{form}", source=path, rules=rule, allow="drop").equal
    same(read(MigratingReader(path, rules=rule, allow={"drop"})), KEPT)


@pytest.mark.parametrize("form", [TORCH, DCP])
@pytest.mark.parametrize(
    ("modules", "op"), [(("b", "c"), "copy"), (("a", "b"), "copy"), (("b", "c"), "tie")]
)
def test_values_of_a_module_that_is_copied_are_copied_and_become_one_again(
    modules: tuple[str, str], op: str, form: str, tmp_path: Path
) -> None:
    state = {**MODULE, **KEPT}
    path = saved(tmp_path, state, form)
    rule = rules(tmp_path, COPY.replace("MODULES", "|".join(modules)).replace("OP", op))
    answer = migrate.apply(path, tmp_path / f"out{form}", rules=rule).to_json()
    assert answer["downgrade"] == {"exact": True, "because": []}
    (note,) = [note for note in answer["notes"] if "copied with their modules" in note]
    first, second = modules
    assert f"a._extra_state is now {first}._extra_state, {second}._extra_state" in note
    wanted = renamed(state, *modules)
    same(content(tmp_path / f"out{form}", form), wanted)
    same(read(MigratingReader(path, rules=rule)), wanted)
    migrate.downgrade(tmp_path / f"out{form}", tmp_path / f"back{form}", rules=rule)
    same(content(tmp_path / f"back{form}", form), state)


@pytest.mark.parametrize("equal", [True, False])
def test_values_of_modules_that_are_the_same_become_one_if_they_are_equal(
    equal: bool, tmp_path: Path
) -> None:
    """What differs stays under its names, which the plan says, and returns."""
    state = {f"{m}.w": torch.ones(2) for m in "ab"}
    state |= {"a._extra_state": {"n": 1}, "b._extra_state": {"n": 1 if equal else True}}  # type: ignore[dict-item]
    path, rule = saved(tmp_path, state, TORCH), rules(tmp_path, SAME)
    answer = migrate.apply(path, tmp_path / "out.pt", rules=rule).to_json()
    assert answer["downgrade"]["exact"]
    said = " ".join(answer["notes"])
    made = content(tmp_path / "out.pt", TORCH)
    if equal:
        assert "b._extra_state is now c._extra_state" in said
        same(made, {"c.w": torch.ones(2), "c._extra_state": {"n": 1}})
    else:
        assert "values that keep their names" in said
        same(made, {"c.w": torch.ones(2)} | {k: v for k, v in state.items() if "_extra" in k})
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rule)
    same(content(tmp_path / "back.pt", TORCH), state)


KEPT_PARTLY = "keep: [a.sub.w]\nrules:\n  - {name: gone, from: a.w, via: [{drop: {why: x}}]}\n"
# one module, whose tensor comes apart: its value belongs to no part
APART = """keep: [a.sub.w]
rules:
  - {name: apart, from: a.w, to: "a{e:int}.w", via: [{unbind: {into: e, count: 2}}]}
"""
# the target exists, and is equal: nothing is dropped
REDUNDANT = (
    'keep: ["b.{k...}"]\nrules:\n  - {name: r, from: "a.{k...}", to: "b.{k}", if_exists: keep}\n'
)


@pytest.mark.parametrize("text", [KEPT_PARTLY, APART, REDUNDANT])
def test_values_stay_where_not_all_tensors_are_dropped_or_copied(text: str, tmp_path: Path) -> None:
    state = dict(MODULE)
    if text == REDUNDANT:
        state |= {key.replace("a", "b", 1): v for key, v in MODULE.items() if "w" in key}
    path = saved(tmp_path, state, TORCH)
    migrate.apply(path, tmp_path / "out.pt", rules=rules(tmp_path, text), allow="drop")
    made = content(tmp_path / "out.pt", TORCH)
    for key, value in MODULE.items():
        if not isinstance(value, torch.Tensor):
            assert made[key] == value


def test_settings_of_a_parameter_stay_when_its_moments_are_dropped(tmp_path: Path) -> None:
    """An optimizer makes moments anew; what it was told of the parameter holds on."""
    state = {
        "state.a.w.exp_avg": torch.ones(2),
        "state.k.w.exp_avg": torch.ones(2),
        "param_groups.a.w.lr": 0.5,
        "param_groups.k.w.lr": 0.25,
    }
    text = """keep: ["state.k.w.{s}"]
rules:
  - {name: anew, from: "state.a.w.{s}", via: [{drop: {why: a new start}}]}
"""
    made = migrate.apply(state, rules=rules(tmp_path, text), allow="drop")
    assert made["param_groups.a.w.lr"] == 0.5
    assert "state.a.w.exp_avg" not in made
