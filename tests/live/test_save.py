"""A live module written in another layout, and state dicts and modules where a checkpoint is asked
for.
"""

from __future__ import annotations

import json

import pytest
import torch
from built import V4, V5, module, rules, same, state_of
from checkpoints import fits
from safetensors.torch import load_file

import migrate
from migrate.core.errors import MigrateError

CONFIG = json.loads((V4 / "config.json").read_text())


@pytest.fixture(scope="module")
def old():
    return state_of(V4)


@pytest.fixture(scope="module")
def new():
    return state_of(V5)


def live(state):
    model = module(state)
    model.load_state_dict(state)
    return model


def equal(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one
    )


@pytest.mark.parametrize("name", ["old.safetensors", "old.pt"])
def test_a_module_is_written_in_the_layout_before(tmp_path, old, new, name):
    model = live(new)
    answer = migrate.save(model, tmp_path / name, "hf-mixtral@v4")
    fits(answer.to_json(), "published")
    assert answer.to_json()["steps"][0]["backwards"] is True
    read = load_file if name.endswith("safetensors") else torch.load
    assert equal(read(tmp_path / name), old)
    assert same(model, new)
    assert migrate.history(tmp_path / name).to_json()["layouts"] == {"hf-mixtral": "v4"}
    again = module(new)
    migrate.load(again, tmp_path / name, "hf-mixtral@v5")
    assert same(again, new)


def test_and_in_the_layout_after(tmp_path, old, new):
    migrate.save(live(old), tmp_path / "new.safetensors", to=["hf-mixtral@v5"])
    assert equal(load_file(tmp_path / "new.safetensors"), new)


def test_a_folder_has_the_configuration_as_the_rules_change_it(tmp_path, old):
    rule = rules(
        tmp_path,
        "files: {config.json: {tie_word_embeddings: false}}\nrules:\n  - {name: r, from: w, to: "
        "v}\n",
    )
    model = module({"w": torch.ones(2)}, fill=1)
    model.config = type(
        "Config",
        (),
        {
            "to_dict": lambda self: {
                "model_type": "x",
                "tie_word_embeddings": True,
                "dtype": torch.float32,
            }
        },
    )()
    answer = migrate.save(model, tmp_path / "out", rules=rule)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "model_type": "x",
        "tie_word_embeddings": False,
        "dtype": "torch.float32",
    }
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), {"v": torch.ones(2)})
    assert answer.path == str(tmp_path / "out")


def test_without_a_goal_the_module_is_written_as_it_is(tmp_path, new):
    migrate.save(live(new), tmp_path / "out.pt")
    assert equal(torch.load(tmp_path / "out.pt"), new)
    migrate.save(live(new), tmp_path / "shards", max_shard_size=20_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_segments_of_wrappers_are_left_out(tmp_path, new):
    migrate.save(torch.nn.DataParallel(torch.compile(live(new))), tmp_path / "out.safetensors")
    assert equal(load_file(tmp_path / "out.safetensors"), new)


def test_ties_stay_ties_where_the_format_knows_them(tmp_path):
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.arange(3.0))
    model.b = model.a
    migrate.save(model, tmp_path / "out.pt")
    made = torch.load(tmp_path / "out.pt")
    assert made["a"].data_ptr() == made["b"].data_ptr()
    answer = migrate.save(model, tmp_path / "out.safetensors")
    assert any("memory with another one" in note for note in answer.to_json()["notes"])


def test_what_a_module_cannot_give_is_named(tmp_path, new):
    with pytest.raises(MigrateError, match=r"M916.*meta device"):
        migrate.save(module(new, "meta"), tmp_path / "out.pt")
    with pytest.raises(MigrateError, match="M115"):
        migrate.save(new, tmp_path / "out.pt")
    (tmp_path / "there.pt").touch()
    with pytest.raises(MigrateError, match="M904"):
        migrate.save(live(new), tmp_path / "there.pt")
    assert not (tmp_path / "out.pt").exists()


class Stateful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return {"calls": 4}

    def set_extra_state(self, state):
        self.state = state


def test_an_extra_state_is_written_where_the_format_can_hold_it(tmp_path):
    migrate.save(Stateful(), tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt")["_extra_state"] == {"calls": 4}
    again = Stateful()
    migrate.load(again, tmp_path / "out.pt")
    assert again.state == {"calls": 4}
    with pytest.raises(MigrateError, match="M916"):
        migrate.save(Stateful(), tmp_path / "out.safetensors")


RENAMED = "rules:\n  - {name: r, from: 'inner.{k...}', to: 'core.{k}'}\n"


def test_an_extra_state_and_the_versions_follow_their_module(tmp_path):
    rule = rules(tmp_path, RENAMED)
    model = torch.nn.ModuleDict(
        {"inner": torch.nn.ModuleDict({"s": Stateful(), "norm": torch.nn.BatchNorm1d(2)})}
    )
    migrate.save(model, tmp_path / "out.pt", rules=rule)
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert made["core.s._extra_state"] == {"calls": 4}
    assert made._metadata == {
        "": {"version": 1},
        "core": {"version": 1},
        "core.s": {"version": 1},
        "core.norm": {"version": 2},
    }
    again = torch.nn.ModuleDict(
        {"core": torch.nn.ModuleDict({"s": Stateful(), "norm": torch.nn.BatchNorm1d(2)})}
    )
    again.load_state_dict(made)
    # by way of its state dict too, and a dict without versions stays one
    migrate.apply(model.state_dict(), tmp_path / "dict.pt", rules=rule)
    assert torch.load(tmp_path / "dict.pt", weights_only=True)._metadata == made._metadata
    migrate.apply(dict(model.state_dict()), tmp_path / "plain.pt", rules=rule)
    assert type(torch.load(tmp_path / "plain.pt", weights_only=True)) is dict


def test_versions_have_no_place_in_safetensors_and_are_no_matter(tmp_path):
    rule = rules(tmp_path, RENAMED)
    answer = migrate.save(
        torch.nn.ModuleDict({"inner": torch.nn.BatchNorm1d(2), "act": torch.nn.ReLU()}),
        tmp_path / "out",
        rules=rule,
    )
    assert answer.to_json()["notes"] == []
    assert not (tmp_path / "out" / "migrate.items.json").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_versions_are_by_the_names_of_the_model_inside_its_wrappers(tmp_path):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    migrate.save(wrapped, tmp_path / "out.pt")
    assert (
        torch.load(tmp_path / "out.pt", weights_only=True)._metadata == model.state_dict()._metadata
    )


def test_a_module_goes_back_by_a_rule_file(tmp_path):
    rule = rules(tmp_path, RENAMED)
    model = torch.nn.ModuleDict({"core": torch.nn.Linear(2, 2)})
    for given, name in ((model, "a.pt"), (model.state_dict(), "b.pt")):
        answer = migrate.downgrade(given, tmp_path / name, rules=rule)
        assert answer.to_json()["steps"][0]["backwards"] is True
        made = torch.load(tmp_path / name, weights_only=True)
        assert equal(made, {f"inner.{k}": t.detach() for k, t in model["core"].named_parameters()})


# -- state dicts and modules where a checkpoint is asked for ---------------------------------------


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["module", "state dict"])
def test_what_lies_in_memory_is_inspected_and_planned(new, device, kind):
    given = module(new, device)
    given.config = CONFIG
    if kind == "state dict":
        given = given.state_dict()
    said = fits(migrate.inspect(given).to_json(), "inspection")
    assert (said["path"], said["format"], said["tensors"]) == ("<memory>", "memory", len(new))
    assert [f"{x['lineage']}@{x['layout']}" for x in said["layouts"]] == ["hf-mixtral@v5"]
    assert said["index_hash"] == migrate.inspect(V5).index_hash
    plan = migrate.plan(given, to="hf-mixtral@v4", backwards=True)
    fits(plan.document, "plan")
    assert plan.document["source"]["path"] == "<memory>"
    assert (
        plan.document["path"]
        == migrate.plan(V5, to="hf-mixtral@v4", backwards=True).document["path"]
    )
    assert plan.document["target"]["tensors"] == len(state_of(V4))


def test_apply_takes_a_module_as_it_takes_its_state_dict(tmp_path, old, new):
    model = live(old)
    assert equal(migrate.apply(model, to="hf-mixtral@v5"), new)
    migrate.apply(model, tmp_path / "out.safetensors", to="hf-mixtral@v5")
    assert equal(load_file(tmp_path / "out.safetensors"), new)


@pytest.mark.parametrize("given", [3, None, [torch.ones(1)]])
def test_anything_else_is_no_checkpoint(given):
    for verb in (migrate.inspect, migrate.plan):
        with pytest.raises(MigrateError, match="M115"):
            verb(given)
