"""State dicts in memory: what is tied stays tied, what is copied is not, and nothing of the
caller's is touched.
"""

from __future__ import annotations

import pytest
import torch

import migrate
from migrate.core.errors import MigrateError

HEAD = "id: t/live\ntitle: t\nlineage: t\nedge: [a, b]\n"


def apply(tmp_path, rules, state):
    file = tmp_path / "rule.yaml"
    file.write_text(HEAD + rules)
    return migrate.apply(state, rules=file)


KEEP = "keep: ['{k...}']\nrules: [{name: r, from: none, to: gone, optional: true}]\n"


def test_tied_tensors_come_out_tied_and_new(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    made = apply(tmp_path, KEEP, {"embed": weight, "head": weight, "other": weight.clone()})
    assert made["embed"] is made["head"]
    assert made["other"] is not made["embed"]
    assert torch.equal(made["embed"], weight)
    made["embed"].zero_()
    assert weight.sum() == 15


def test_views_of_one_storage_at_different_places_are_no_ties(tmp_path):
    both = torch.arange(8.0)
    made = apply(tmp_path, KEEP, {"a": both[:4], "b": both[4:], "t": both.reshape(2, 4).T})
    assert len({tensor.data_ptr() for tensor in made.values()}) == 3
    assert torch.equal(made["t"], both.reshape(2, 4).T)
    assert made["t"].is_contiguous()


def test_versions_of_modules_come_along(tmp_path):
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    rules = "rules: [{name: r, from: '0.{k}', to: 'norm.{k}'}]\n"
    made = apply(tmp_path, rules, state)
    assert list(made) == [key.replace("0.", "norm.") for key in state]
    assert made._metadata == {"": {"version": 1}, "norm": {"version": 2}}
    mapped = migrate.migrate_state_dict(state, rules=tmp_path / "rule.yaml")
    assert mapped._metadata == made._metadata


@pytest.mark.parametrize(("op", "same"), [("tie", True), ("copy", False)])
def test_tie_makes_one_tensor_and_copy_makes_several(tmp_path, op, same):
    rules = f"rules:\n  - {{name: r, from: w, to: '{{n:x|y}}', via: [{{{op}: {{into: n}}}}]}}\n"
    made = apply(tmp_path, rules, {"w": torch.ones(3)})
    assert (made["x"] is made["y"]) is same
    assert torch.equal(made["x"], made["y"])


def test_values_that_are_no_tensors_are_carried(tmp_path):
    assert apply(tmp_path, KEEP, {"w": torch.zeros(1), "epoch": 3})["epoch"] == 3


def test_what_a_run_into_files_would_answer_is_told_in_memory_too(tmp_path):
    file = tmp_path / "rule.yaml"
    file.write_text(
        HEAD + "files: {config.json: {dtype: bfloat16}}\nparams: {n: {type: int}}\n"
        "rules:\n  - {name: r, from: '{k}', to: '{k}', where: {k: [w]}, via: [{cast: {to: "
        "bfloat16}}]}\nkeep: ['{k:n|m}']\n"
    )
    state = {"w": torch.tensor([1.0, 1.0 + 2**-10]), "n": torch.zeros(1)}
    said = []
    migrate.apply(state, rules=file, params={"n": 3}, allow="lossy", inform=said.append)
    (told,) = said
    assert told.to_json()["steps"] == [{"lineage": "t", "from": "a", "to": "b", "backwards": False}]
    assert told.to_json()["params"] == {"n": 3}
    assert told.to_json()["notes"] == ["t/live changes config.json, which only a folder has"]
    assert [(loss["kind"], loss["keys"]) for loss in told.to_json()["losses"]] == [("lossy", ["w"])]
    (rule,) = told.to_json()["report"]["rules"]
    assert (rule["op"], rule["max_abs_error"]) == ("cast", 2**-10)
    answer = migrate.apply(
        state, tmp_path / "out.safetensors", rules=file, params={"n": 3}, allow="lossy"
    )
    document = {**answer.to_json(), "params": {"n": 3}}
    assert told.to_json() == {name: document[name] for name in told.to_json()}


def test_only_a_state_dict_in_memory_has_someone_to_inform(tmp_path):
    with pytest.raises(MigrateError, match="M115") as caught:
        migrate.apply({"w": torch.zeros(1)}, tmp_path / "o.safetensors", to="x@y", inform=print)
    assert "inform" in caught.value.diagnostics[0].message


def test_an_output_that_counts_as_the_older_layout_is_refused_in_memory_too(tmp_path):
    home = tmp_path / "rules" / "demo"
    (home / "v2").mkdir(parents=True)
    (home / "layouts.yaml").write_text(
        "lineage: demo\ntitle: t\nlayouts:\n  v1: {title: a, detect: {present: '{k...}.w'}}\n  "
        "v2: {title: b, detect: {present: x}}\n"
    )
    (home / "v2" / "r.yaml").write_text(
        "id: demo/v2/r\ntitle: t\nlineage: demo\nedge: [v1, v2]\nrules: [{name: r, from: 'l.w', "
        "to: 'm.w'}]\n"
    )
    with pytest.raises(MigrateError, match="M506"):
        migrate.apply({"l.w": torch.zeros(1)}, to="demo@v2", rules=tmp_path / "rules")
