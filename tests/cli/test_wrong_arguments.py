"""Arguments that make no sense are refused with status 2 before anything runs or is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import DATA, done, mixtral, rules, run, safetensors

import migrate
from migrate.cli.options import ALLOWANCES
from migrate.core.errors import QuestionError
from migrate.planning import request

HUB = DATA / "mixtral__v4" / "hub"


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0}, {"threads": -1}, {"threads": 1.5}, {"threads": True}, {"threads": 65},
        {"max_memory": 0}, {"max_memory": 1000},
        {"max_memory": 1.5}, {"max_memory": None}, {"max_shard_size": 2.5}, {"out": b"new"},
        {"out": 7}, {"to": 5}, {"path": b"hub"},
        {"path": 5}, {"rules": 5}, {"allow": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_argument_makes_nothing(tmp_path: Path, wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"path": HUB, "out": tmp_path / "new", "to": "hf-mixtral@v5", **wrong}
    with pytest.raises(QuestionError) as caught:
        migrate.apply(**given)
    assert [d.code for d in caught.value.diagnostics] == ["M115"]
    assert list(tmp_path.iterdir()) == []


def test_a_plan_to_a_number_is_a_wrong_argument() -> None:
    with pytest.raises(QuestionError, match="`to`"):
        migrate.plan(HUB, to=5)


def test_two_values_of_one_name_are_refused_and_both_named(tmp_path: Path) -> None:
    result = run("plan", HUB, "--to", "v5", "--set", "n=4", "--set", "n=5")
    assert result.exit == 2
    assert "'4' and '5'" in result.err
    assert "two values" not in run("plan", HUB, "--to", "v5", "--set", "n=4", "--set", "n=4").err


def test_verify_of_an_output_without_a_stamp_asks_what_was_applied(tmp_path: Path) -> None:
    lineages = Path(migrate.__file__).parents[1] / "rules"
    for more in ([], ["--rules", lineages]):
        result = run("verify", HUB, "--source", HUB, *more)
        assert result.exit == 2
        assert "has no stamp that says what was applied" in result.err
        assert "give --to LINEAGE@LAYOUT or --rules FILE" in result.err


def test_an_output_that_is_called_like_a_file_of_another_format_is_not_made_as_a_folder(
    tmp_path: Path,
) -> None:
    for name, hint in (
        ("y.gguf", "files end in .safetensors"),
        ("new.safetensor", "did you mean `new.safetensors`?"),
    ):
        result = run("apply", HUB, "-o", tmp_path / name, "--to", "hf-mixtral@v5")
        assert (result.exit, hint in result.err) == (2, True)
        with pytest.raises(QuestionError, match="would be a folder"):
            migrate.apply(HUB, tmp_path / name, to="hf-mixtral@v5")
    assert list(tmp_path.iterdir()) == []
    done("apply", HUB, "-o", tmp_path / "Llama-3.1-8B", "--to", "hf-mixtral@v5")
    assert (tmp_path / "Llama-3.1-8B").is_dir()


@pytest.mark.parametrize("command", ["apply", "downgrade"])
def test_an_output_in_a_folder_that_is_not_there_is_a_wrong_question(
    tmp_path: Path, command: str
) -> None:
    result = run(command, HUB, "-o", tmp_path / "nodir" / "new", "--to", "v5", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M115"])
    assert "nodir does not exist" in result.out
    assert list(tmp_path.iterdir()) == []


def test_the_history_of_a_lineage_that_is_not_known_is_refused(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", mixtral())
    done("apply", source, "-o", tmp_path / "new.safetensors", "--to", "hf-mixtral@v5")
    for checkpoint in (source, tmp_path / "new.safetensors"):
        result = run("history", checkpoint, "--lineage", "hf-mixtrall", "--format", "json")
        assert (result.exit, result.codes) == (2, ["M507"])
        assert "did you mean `hf-mixtral`?" in result.out
        done("history", checkpoint, "--lineage", "hf-mixtral")
    assert done(
        "history", tmp_path / "new.safetensors", "--lineage", "hf-mixtral", "--format", "json"
    ).json["applied"]


def test_a_published_document_says_what_is_shared(tmp_path: Path) -> None:
    rule = rules(tmp_path, "keep: ['{k...}']\nrules: [{name: r, from: a, to: b}]\n")
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [2])})
    document = done(
        "apply", source, "-o", tmp_path / "out.safetensors", "--rules", rule, "--format", "json"
    ).json
    assert 0 <= document["bytes_shared"] <= document["bytes_read"]


def test_what_can_be_allowed_is_listed_once() -> None:
    assert ALLOWANCES is request.ALLOWANCES
