"""State dicts in memory: what is tied stays tied, what is copied is not, and nothing of the
caller's is touched.
"""

from __future__ import annotations

import pytest
import torch

import migrate
from migrate.core.errors import MigrateError
from migrate.formats import memory
from migrate.live.statedict import materialise, tied
from migrate.planning.graph import Graph, Tensor
from migrate.planning.pipeline import Views

HEAD = "id: t/live\ntitle: t\nlineage: t\nedge: [a, b]\n"


def apply(tmp_path, rules, state):
    file = tmp_path / "rule.yaml"
    file.write_text(HEAD + rules)
    return migrate.apply(state, rules=file)


def kept(state):
    """The graph that keeps a state dict as it is."""
    source = memory.open(state)
    views = Views()
    tensors = {
        k: Tensor(s.spec, views.stored(s.spec.shape, s.strides), (k,))
        for k, s in source.index.tensors.items()
    }
    return Graph(tensors), source


def test_tied_tensors_come_out_tied_and_new():
    weight = torch.arange(6.0).reshape(2, 3)
    graph, source = kept({"embed": weight, "head": weight, "other": weight.clone()})
    made = materialise(graph, source)
    assert made["embed"] is made["head"]
    assert made["other"] is not made["embed"]
    assert torch.equal(made["embed"], weight)
    made["embed"].zero_()
    assert weight.sum() == 15


def test_views_of_one_storage_at_different_places_are_no_ties():
    both = torch.arange(8.0)
    graph, source = kept({"a": both[:4], "b": both[4:], "t": both.reshape(2, 4).T})
    assert tied(graph.outputs, source.index.tensors) == {"a": "a", "b": "b", "t": "t"}
    made = materialise(graph, source)
    assert torch.equal(made["t"], both.reshape(2, 4).T)
    assert made["t"].is_contiguous()


@pytest.mark.parametrize(("op", "same"), [("tie", True), ("copy", False)])
def test_tie_makes_one_tensor_and_copy_makes_several(tmp_path, op, same):
    rules = f"rules:\n  - {{name: r, from: w, to: '{{n:x|y}}', via: [{{{op}: {{into: n}}}}]}}\n"
    made = apply(tmp_path, rules, {"w": torch.ones(3)})
    assert (made["x"] is made["y"]) is same
    assert torch.equal(made["x"], made["y"])


def test_values_that_are_no_tensors_are_carried():
    graph, source = kept({"w": torch.zeros(1), "epoch": 3})
    assert materialise(graph, source)["epoch"] == 3


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
