"""What stands among or around the tensors of a .pt file while rules work: values with and without a
rule, nested dicts, `--at`.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_compare import same

import migrate
from migrate.core.errors import MigrateError

HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def rules(folder: Path, text: str) -> list[Path]:
    (folder / "r.yaml").write_text(HEAD + text)
    return [folder / "r.yaml"]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def codes(call: Any) -> list[str]:
    with pytest.raises(MigrateError) as caught:
        call()
    return [d.code for d in caught.value.diagnostics]


def state() -> Any:
    """Two modules with tensors, versions and a value each."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)).state_dict()
    model["0._extra_state"], model["1._extra_state"] = {"a": 1}, {"a": 2}
    return model


STACK = 'rules:\n  - {name: s, from: "{i:int}.{k}", to: "all.{k}", via: [{stack: {over: i}}]}\n'


def test_values_of_modules_that_became_one_keep_their_names_and_versions_come_back(
    tmp_path: Path,
) -> None:
    source, rule = write(tmp_path / "in.pt", state()), rules(tmp_path, STACK)
    answer = migrate.apply(source, tmp_path / "out.pt", rules=rule)
    assert any("values that keep their names" in note for note in answer.to_json()["notes"])
    made = load(tmp_path / "out.pt")
    assert (made["0._extra_state"], made["1._extra_state"]) == ({"a": 1}, {"a": 2})
    assert made._metadata == {"": {"version": 1}, "all": {"version": 2}}
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rule)
    back = load(tmp_path / "back.pt")
    assert back._metadata == state()._metadata
    same(dict(back), dict(state()))


def test_versions_that_differ_in_a_module_made_of_two_are_left_out_and_the_downgrade_is_not_exact(
    tmp_path: Path,
) -> None:
    model = state()
    model._metadata["1"] = {"version": 7}
    answer = migrate.apply(
        write(tmp_path / "in.pt", model), tmp_path / "out.pt", rules=rules(tmp_path, STACK)
    )
    assert "all" not in load(tmp_path / "out.pt")._metadata
    assert not answer.to_json()["downgrade"]["exact"]
    assert any("other versions" in note for note in answer.to_json()["notes"])


DROP = (
    'keep: ["{i:int}.{k}"]\nrules:\n  - {name: d, from: "{m...}._extra_state", via: [{drop: '
    "{why: made again}}]}\n"
)


def test_a_rule_drops_values_that_it_names_with_permission(tmp_path: Path) -> None:
    model = state()
    model["0._extra_state"] = io.BytesIO(b"old")
    source, rule = write(tmp_path / "in.pt", model), rules(tmp_path, DROP)
    assert codes(lambda: migrate.apply(source, tmp_path / "out.pt", rules=rule)) == ["M402"]
    planned = migrate.plan(source, rules=rule, allow="drop").document
    assert [row["from"] for row in planned["rows"] if row["change"] == "dropped"] == [
        ["{0,1}._extra_state"]
    ]
    assert not planned["downgrade"]["exact"]
    migrate.apply(source, tmp_path / "out.pt", rules=rule, allow="drop")
    assert not [key for key in load(tmp_path / "out.pt") if "_extra_state" in key]
    assert migrate.verify(tmp_path / "out.pt", source=source, rules=rule, allow="drop").equal


def test_a_rule_renames_values_and_the_way_back_too(tmp_path: Path) -> None:
    source = write(tmp_path / "in.pt", state())
    rule = rules(
        tmp_path,
        'keep: ["{i:int}.{k}"]\nrules:\n  - {name: r, from: "{m...}._extra_state", to: '
        '"{m}.state"}\n',
    )
    answer = migrate.apply(source, tmp_path / "out.pt", rules=rule)
    assert answer.to_json()["downgrade"]["exact"]
    assert load(tmp_path / "out.pt")["1.state"] == {"a": 2}
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rule)
    same(dict(load(tmp_path / "back.pt")), dict(state()))
    assert migrate.apply({"0.w": torch.ones(1), "0._extra_state": 5}, rules=rule)["0.state"] == 5


@pytest.mark.parametrize(("second", "fits"), [({"a": 1}, True), ({"a": True}, False)])
def test_values_that_a_rule_takes_for_the_same_are_compared(
    second: Any, fits: bool, tmp_path: Path
) -> None:
    model = state()
    model["1._extra_state"] = second
    same_over = "via: [{same: {over: i, count: 2}}]"
    text = (
        'keep: ["{i:int}.{k}"]\nrules:\n  - {name: s, from: "{i:int}._extra_state", '
        f'to: "one._extra_state", {same_over}}}\n'
    )
    source, rule = write(tmp_path / "in.pt", model), rules(tmp_path, text)
    if not fits:
        assert codes(lambda: migrate.apply(source, tmp_path / "out.pt", rules=rule)) == ["M404"]
        return
    migrate.apply(source, tmp_path / "out.pt", rules=rule)
    assert load(tmp_path / "out.pt")["one._extra_state"] == {"a": 1}
    migrate.downgrade(tmp_path / "out.pt", tmp_path / "back.pt", rules=rule)
    same(dict(load(tmp_path / "back.pt")), dict(model))


def test_a_tensor_may_not_be_called_like_a_value(tmp_path: Path) -> None:
    source = write(tmp_path / "in.pt", {"model": {"w": torch.ones(1), "v": 3}})
    assert codes(
        lambda: migrate.apply(
            source,
            tmp_path / "o.pt",
            rules=rules(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n"),
        )
    ) == ["M212"]


def megatron(rank: int) -> dict[str, Any]:
    """The weights of a rank as Megatron nested them before its Core."""
    layers = OrderedDict(
        {
            "layers.0.query_key_value.weight": torch.full((4, 2), float(rank)),
            "final_layernorm.weight": torch.ones(2),
        }
    )
    embedding = {
        "word_embeddings": {"weight": torch.full((3, 2), float(rank))},
        "position_embeddings": {"weight": torch.ones(3, 2)},
    }
    return {
        "model": {"language_model": {"embedding": embedding, "encoder": layers}},
        "iteration": 5,
        "checkpoint_version": 3.0,
    }


NESTED = """keep: ["language_model.encoder.final_layernorm.weight"]
rules:
  - {name: e, from: "language_model.embedding.{k...}", to: "embedding.{k}"}
  - {name: l, from: "language_model.encoder.layers.{n:int}.query_key_value.weight", to: "language_model.encoder.layers.{n}.qkv.weight"}
"""  # noqa: E501


@pytest.mark.parametrize("between", ["torch", "safetensors"])
def test_nested_dicts_of_ranks_are_seen_flat_and_come_back_nested(
    between: str, tmp_path: Path
) -> None:
    for rank in range(2):
        write(tmp_path / "in" / f"mp_rank_0{rank}" / "model_optim_rng.pt", megatron(rank))
    rule = rules(tmp_path, NESTED)
    assert "language_model.embedding.word_embeddings.weight@1" in {
        key
        for row in migrate.inspect(tmp_path / "in", expand=True).to_json()["keys"]
        for key in [row["keys"]]
    }
    answer = migrate.apply(tmp_path / "in", tmp_path / "out", rules=rule, output_format=between)
    assert answer.to_json()["downgrade"]["exact"]
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in", rules=rule).equal
    migrate.downgrade(tmp_path / "out", tmp_path / "back", rules=rule, output_format="torch")
    for rank in range(2):
        if between == "torch":
            made = load(tmp_path / "out" / f"mp_rank_0{rank}" / "model_optim_rng.pt")
            assert list(made["model"]["language_model"]["encoder"]) == [
                "layers.0.qkv.weight",
                "final_layernorm.weight",
            ]
            assert torch.equal(
                made["model"]["embedding.word_embeddings.weight"], torch.full((3, 2), float(rank))
            )
        same(load(tmp_path / "back" / f"mp_rank_0{rank}" / "model_optim_rng.pt"), megatron(rank))


def test_two_models_under_no_usual_name_are_one_with_at_dot(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.pt", {"generator": {"w": torch.ones(1)}, "critic": {"w": torch.zeros(2)}}
    )
    with pytest.raises(MigrateError) as caught:
        migrate.inspect(source)
    assert 'at="." takes them all' in caught.value.diagnostics[0].notes[-1]
    rule = rules(tmp_path, 'rules:\n  - {name: r, from: "{m}.w", to: "{m}.kernel"}\n')
    migrate.apply(source, tmp_path / "out.pt", rules=rule, at=".")
    same(
        load(tmp_path / "out.pt"),
        {"generator": {"kernel": torch.ones(1)}, "critic": {"kernel": torch.zeros(2)}},
    )


def test_a_stamp_says_which_dict_it_is_about(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.pt", {"model": {"w": torch.ones(1)}, "ema": {"w": torch.zeros(1)}}
    )
    migrate.apply(
        source,
        tmp_path / "out.pt",
        rules=rules(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n"),
        at="ema",
    )
    assert len(migrate.history(tmp_path / "out.pt", at="ema").to_json()["applied"]) == 1
    (note,) = migrate.history(tmp_path / "out.pt").to_json()["notes"]
    assert "`ema`, which has to be named" in note


@pytest.mark.parametrize(("name", "allow"), [("out.pt", "opaque"), ("out.safetensors", "drop")])
def test_a_downgrade_is_not_exact_where_something_was_left_out(
    name: str, allow: str, tmp_path: Path
) -> None:
    held = {
        "model": {"w": torch.ones(1)},
        "ema": {"w": torch.ones(1)},
        "odd": SimpleNamespace(lr=1) if allow == "opaque" else 1,
    }
    answer = migrate.apply(
        write(tmp_path / "in.pt", held),
        tmp_path / name,
        output_format=None if name.endswith("s") else "torch",
        allow=allow,
    )
    assert answer.to_json()["downgrade"] == {
        "exact": False,
        "because": [f"what the permission `{allow}` leaves out does not come back"],
    }


WEIGHT = torch.arange(3.0)


def versioned(version: int) -> Any:
    state = OrderedDict(w=torch.ones(1))
    state._metadata = {"": {"version": version}}  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (versioned(1), versioned(2), "_metadata of"),
        ({"w": torch.ones(1)}, OrderedDict(w=torch.ones(1)), "kind of the dict"),
        ({"w": torch.nn.Parameter(torch.ones(1))}, {"w": torch.ones(1)}, "flags of w"),
        (
            {"a": WEIGHT, "b": WEIGHT},
            {"a": WEIGHT, "b": WEIGHT.clone()},
            "b is one tensor with others",
        ),
        (
            {"m": {"w": WEIGHT}, "ema": [WEIGHT]},
            {"m": {"w": WEIGHT}, "ema": [WEIGHT.clone()]},
            "one tensor with others",
        ),
    ],
)
def test_diff_and_verify_see_what_no_byte_of_a_tensor_says(
    one: Any, other: Any, said: str, tmp_path: Path
) -> None:
    a, b = write(tmp_path / "a.pt", one), write(tmp_path / "b.pt", other)
    assert any(said in what for what in migrate.diff(a, b).to_json()["others"])
    rule = rules(tmp_path, 'rules:\n  - {name: r, from: "{k}", to: "new.{k}"}\n')
    migrate.apply(a, tmp_path / "out_a.pt", rules=rule)
    migrate.apply(b, tmp_path / "out_b.pt", rules=rule)
    assert migrate.verify(tmp_path / "out_a.pt", source=a, rules=rule).equal
    assert not migrate.verify(tmp_path / "out_b.pt", source=a, rules=rule).equal
    migrate.apply(tmp_path / "out_a.pt", tmp_path / "st", output_format="safetensors")
    assert migrate.diff(tmp_path / "out_a.pt", tmp_path / "st").equal


def test_verify_sees_a_value_that_is_not_what_it_was(tmp_path: Path) -> None:
    source, rule = (
        write(tmp_path / "in.pt", state()),
        rules(tmp_path, 'rules:\n  - {name: r, from: "{i:int}.{k}", to: "net.{i}.{k}"}\n'),
    )
    migrate.apply(source, tmp_path / "out.pt", rules=rule)
    assert migrate.verify(tmp_path / "out.pt", source=source, rules=rule).equal
    made = load(tmp_path / "out.pt")
    made["net.1._extra_state"] = {"a": 3}
    (found,) = migrate.verify(
        write(tmp_path / "other.pt", made), source=source, rules=rule
    ).to_json()["differences"]
    assert found["what"] == "value net.1._extra_state differs"


def test_values_that_the_way_back_does_not_restore_are_told(tmp_path: Path) -> None:
    rule = rules(tmp_path, DROP.replace("from: ", "inverse: skip, from: "))
    answer = migrate.apply(
        write(tmp_path / "in.pt", state()), tmp_path / "out.pt", rules=rule, allow="drop"
    )
    assert answer.to_json()["downgrade"] == {
        "exact": False,
        "because": ["values not restored: 0._extra_state, 1._extra_state"],
    }


def test_a_dict_under_an_integer_key_is_named_by_that_integer(tmp_path: Path) -> None:
    a, b, c = ({"w": torch.full((2,), float(n))} for n in range(3))
    source = write(tmp_path / "in.pt", {"models": {0: a, 1: b, "1": c}, "step": 3})
    rule = rules(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n")
    # an integer is what it is spelled like where no text key is
    for at, changed in (("models.0", 0), ("models.1", "1")):
        out = tmp_path / f"{at}.pt"
        migrate.apply(source, out, rules=rule, at=at)
        made = load(out)
        assert list(made) == ["models", "step"]
        assert {key: list(held) for key, held in made["models"].items()} == {
            key: ["v" if key == changed else "w"] for key in (0, 1, "1")
        }
        same(made["models"][changed]["v"], {0: a, "1": c}[changed]["w"])
        assert migrate.verify(out, source=source, rules=rule, at=at).equal
        migrate.downgrade(out, tmp_path / f"back {at}.pt", rules=rule, at=at)
        assert migrate.diff(source, tmp_path / f"back {at}.pt", at=at).equal
        # the path is kept where the format has no integers
        between = tmp_path / f"{at} between"
        migrate.apply(source, between, output_format="safetensors", at=at)
        migrate.apply(between, tmp_path / f"again {at}.pt", rules=rule, output_format="torch")
        same(load(tmp_path / f"again {at}.pt"), made)
    for at in ("models.2", "models.00", "models.-0"):
        assert codes(lambda at=at: migrate.inspect(source, at=at)) == ["M945"]


def test_tensors_at_the_root_beside_lists_of_them_are_named_by_a_dot(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    source = write(tmp_path / "in.pt", {"w": tensor, "rng": [tensor, tensor]})
    rule = rules(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n")
    (note,) = migrate.inspect(source).notes
    assert "tensors stand at the root, beside rng with tensors as well" in note
    assert codes(lambda: migrate.apply(source, tmp_path / "no.pt", rules=rule)) == ["M945"]
    migrate.apply(source, tmp_path / "out.pt", rules=rule, at=".")
    assert list(load(tmp_path / "out.pt")) == ["v", "rng"]
