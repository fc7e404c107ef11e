"""What `import migrate` offers, used from Python."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from commandline import DATA, contents, mixtral, rules, safetensors
from safetensors.torch import load_file

import migrate
from migrate.core import errors

HUB, V5 = DATA / "mixtral__v4" / "hub", DATA / "mixtral__v4" / "v5"
ON_DISK = [
    "apply",
    "clean",
    "diff",
    "downgrade",
    "history",
    "inspect",
    "lint",
    "new",
    "plan",
    "publish",
    "seal",
    "stamp",
    "test",
    "verify",
]
VERBS = sorted([*ON_DISK, "attach", "convert_module", "load", "migrate_state_dict", "save"])
NAMES = ["Diagnostic", "Index", "Job", "MigrateError", "Plan", "Snapshot", "Spec", "Stager", *VERBS]


def test_the_public_names_are_these() -> None:
    assert migrate.__all__ == NAMES
    for name in NAMES:
        assert getattr(migrate, name) is not None
    assert set(NAMES) <= set(dir(migrate))
    with pytest.raises(AttributeError, match="nothing"):
        migrate.nothing


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is_for(name: str) -> None:
    text = inspect.getdoc(getattr(migrate, name))
    assert text
    assert len(text.split()) >= 8
    assert text.split("\n\n")[0].endswith((".", ":"))


@pytest.mark.parametrize("name", ["plan", "apply", "downgrade", "verify"])
def test_every_verb_takes_the_same_question(name: str) -> None:
    parameters = inspect.signature(getattr(migrate, name)).parameters
    assert {"to", "from_", "rules", "params", "allow"} <= parameters.keys()


def test_the_verbs_there_and_back_again(tmp_path: Path) -> None:
    new, back = tmp_path / "new", tmp_path / "back"
    assert [f"{x['lineage']}@{x['layout']}" for x in migrate.inspect(HUB).to_json()["layouts"]] == [
        "hf-mixtral@v4", "megatron-gpt@mixtral",
    ]  # fmt: skip
    plan = migrate.plan(HUB, to="hf-mixtral@v5")
    assert isinstance(plan, migrate.Plan)
    assert plan.document["downgrade"]["exact"] is True
    (tmp_path / "plan.json").write_text(plan.to_json())
    seen: list[tuple[int, int]] = []
    published = migrate.apply(
        HUB, new, to=["hf-mixtral@v5"], progress=lambda done, total: seen.append((done, total))
    )
    assert published.digest == plan.digest
    assert seen[-1][0] == seen[-1][1] == (new / "model.safetensors").stat().st_size
    assert contents(new) == contents(V5)
    assert migrate.verify(new, source=HUB).equal is True
    assert migrate.history(new).to_json()["layouts"] == {"hf-mixtral": "v5"}
    assert {x["name"] for x in migrate.history().to_json()["lineages"]} >= {
        "hf-mixtral",
        "te-grouped-bias",
    }
    assert migrate.plan(new, backwards=True).document["path"][0]["backwards"] is True
    migrate.downgrade(new, back)
    assert migrate.diff(back, HUB).equal is True
    assert migrate.diff(back, new).equal is False
    migrate.apply(tmp_path / "plan.json", tmp_path / "planned")
    assert contents(tmp_path / "planned") == contents(new)


def test_one_word_is_a_list_of_one(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [1])})
    rule = rules(
        tmp_path,
        "rules: [{name: r, from: a, via: [{drop: {why: unused}}]}, {name: s, from: a, to: b, "
        "keep_source: true}]\n",
    )
    one = migrate.plan(source, rules=rule, allow="drop")
    assert one.digest == migrate.plan(str(source), rules=[str(rule)], allow={"drop"}).digest


def test_params_are_python_values(tmp_path: Path) -> None:
    source = safetensors(
        tmp_path / "in.safetensors", {f"fc.weight{i}": ("F32", [2, 2]) for i in range(2)}
    )
    question = {"to": "te-grouped-weight@single", "from_": "te-grouped-weight@multi"}
    assert migrate.plan(source, **question, params={"modules": ["fc"], "gemms": 2}).document[
        "params"
    ] == {"modules": ["fc"], "gemms": 2}
    with pytest.raises(migrate.MigrateError):
        migrate.plan(source, **question, params={"modules": ["fc"], "gemms": "two"})


def test_a_state_dict_in_memory_becomes_what_the_file_becomes(tmp_path: Path) -> None:
    state = load(HUB)
    before = {key: tensor.clone() for key, tensor in state.items()}
    made = migrate.apply(state, to="hf-mixtral@v5")
    wanted = load(V5)
    assert made.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert made[key].dtype == tensor.dtype
        assert torch.equal(made[key], tensor)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in before.items())


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_tied_tensors_stay_tied_in_memory() -> None:
    state = load(HUB)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    made = migrate.apply(state, to="hf-mixtral@v5")
    assert made["lm_head.weight"].data_ptr() == made["model.embed_tokens.weight"].data_ptr()
    assert made["lm_head.weight"].data_ptr() != state["lm_head.weight"].data_ptr()
    pointers = {key: tensor.data_ptr() for key, tensor in made.items() if key != "lm_head.weight"}
    assert len(set(pointers.values())) == len(pointers)


def test_tied_tensors_are_reported_where_a_file_cannot_hold_ties(tmp_path: Path) -> None:
    state = load(HUB)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    published = migrate.apply(state, tmp_path / "new", to="hf-mixtral@v5")
    assert any("memory with another one" in note for note in published.to_json()["notes"])
    made = contents(tmp_path / "new")
    assert made["lm_head.weight"] == made["model.embed_tokens.weight"]


def test_views_and_transposed_tensors_are_read_as_they_are_seen(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {"a.0": base.t(), "a.1": base[:, ::1].t().contiguous(), "b": base[1:3, ::2]}
    rule = rules(
        tmp_path,
        "keep: [b]\nrules: [{name: r, from: 'a.{i:int}', to: a, via: [{stack: {over: i}}]}]\n",
    )
    made = migrate.apply(state, rules=rule)
    assert torch.equal(made["a"], torch.stack([state["a.0"], state["a.1"]]))
    assert torch.equal(made["b"], state["b"])


def test_a_state_dict_that_is_there_already_comes_back() -> None:
    state = load(V5)
    made = migrate.apply(state, to="hf-mixtral@v5", from_="hf-mixtral@v5")
    assert made.keys() == state.keys()
    assert all(torch.equal(made[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (lambda tmp: migrate.inspect(tmp / "nowhere"), 2, "M917"),
        (lambda tmp: migrate.plan(HUB), 2, "M115"),
        (lambda tmp: migrate.plan(HUB, to="hf-mixtral@v9"), 2, "M501"),
        (lambda tmp: migrate.apply(HUB, to="hf-mixtral@v5"), 2, "M115"),
        (
            lambda tmp: migrate.apply(
                {"stray": torch.zeros(1)}, to="hf-mixtral@v5", from_="hf-mixtral@v4"
            ),
            3,
            "M211",
        ),
        (
            lambda tmp: migrate.inspect(
                safetensors(tmp / "x.safetensors", {}).write_bytes(b"?") and tmp / "x.safetensors"
            ),
            3,
            "M906",
        ),
        (lambda tmp: migrate.downgrade(HUB, tmp / "out"), 2, "M115"),
    ],
)
def test_an_error_carries_diagnostics_and_an_exit_status(
    tmp_path: Path, call: object, status: int, code: str
) -> None:
    with pytest.raises(migrate.MigrateError) as caught:
        call(tmp_path)  # type: ignore[operator]
    assert caught.value.exit_code == status
    assert code in [d.code for d in caught.value.diagnostics]
    assert all(isinstance(d, migrate.Diagnostic) for d in caught.value.diagnostics)
    assert code in str(caught.value)
    wanted = {2: errors.QuestionError, 3: errors.CheckpointError}[status]
    assert isinstance(caught.value, wanted)


def test_a_checkpoint_of_a_small_model_is_a_checkpoint(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    assert migrate.inspect(source).tensors == len(mixtral())
    assert len(migrate.inspect(source, expand=True).to_json()["keys"]) == len(mixtral())
