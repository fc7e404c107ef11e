"""What editors insert is what the loader reads, and what they complete are a checkpoint's keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import DATA, done, mixtral, run, safetensors
from rule_text import load_text

from migrate import formats
from migrate.core.errors import Report
from migrate.core.keys import parse
from migrate.rules import schema, snippets
from migrate.rules.compiled import compile_file
from migrate.rules.layouts import read_layouts
from migrate.source import yaml

HUB = DATA / "mixtral__v4" / "hub"
HEAD = "id: a/b/c\ntitle: t\nlineage: a\nedge: [v1, v2]\n"
RULE_FILE = schema.rule_file()


def inserted(text: str) -> str:
    """A text of a snippet once its names were left as they are."""
    typed = re.sub(r"\$\{[0-9]+:([^}]*)\}", r"\1", text)
    return re.sub(r"\\([\\$}])", r"\1", typed)


def written(value: Any) -> str:
    """A body as an editor's server writes it: texts as they stand."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inserted(k)}: {written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return inserted(value) if isinstance(value, str) else json.dumps(value)


def bodies(node: dict[str, Any]) -> list[Any]:
    found = node["defaultSnippets"]
    assert len({one["label"] for one in found}) == len(found)
    assert all(one["description"] for one in found)
    return [pytest.param(written(one["body"]), id=one["label"]) for one in found]


def loads(text: str) -> None:
    report = Report()
    compile_file(load_text(text, "a.yaml"), report)
    assert not report.diagnostics


@pytest.mark.parametrize("text", bodies(RULE_FILE))
def test_a_rule_file_that_is_inserted_loads(text: str) -> None:
    loads(text)


@pytest.mark.parametrize("text", bodies(RULE_FILE["$defs"]["Rule"]))
def test_a_rule_that_is_inserted_loads(text: str) -> None:
    loads(f"{HEAD}rules: [{text}]\n")


@pytest.mark.parametrize("text", bodies(RULE_FILE["$defs"]["RuleTest"]))
def test_a_test_that_is_inserted_loads(text: str) -> None:
    rule = "rules: [{name: r, from: '{p...}.old.weight', to: '{p}.new.weight'}]\n"
    loads(f"{HEAD}{rule}tests: [{text}]\n")


@pytest.mark.parametrize("text", bodies(schema.layouts()))
def test_layouts_that_are_inserted_load(text: str) -> None:
    report = Report()
    made = read_layouts(yaml.read_yaml(text, "layouts.yaml", report), report)
    assert not report.diagnostics
    assert made is not None
    assert made.names == ["v1", "v2"]


def ops() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from RULE_FILE["$defs"]["Step"]["properties"].items()


def test_a_step_that_is_inserted_is_the_example_of_its_op() -> None:
    examples = {name: op["examples"][0] for name, op in ops() if op["examples"][0]}
    for param in bodies(RULE_FILE["$defs"]["Step"]):
        (text,) = param.values
        assert yaml.core(yaml.parse(text, "a").data) == {param.id: examples.pop(str(param.id))}
    assert examples == {}


def test_the_hover_text_of_an_op_shows_how_a_step_is_written() -> None:
    for name, op in ops():
        about, _, example = op["markdownDescription"].partition("\n\n```yaml\n")
        assert about == f"**{name}**: {op['description']}"
        (step,) = yaml.core(yaml.parse(example.removesuffix("\n```"), "a").data)
        assert step == {name: op["examples"][0]}


def test_a_param_and_a_quote_are_typed_as_they_are() -> None:
    for value in ("$heads", "a \\ b", 'a"b', "{p...}.weight", "2.0", "no", "}"):
        assert yaml.core(yaml.parse(written(snippets._verbatim([value])), "a").data) == [value]


def places(made: dict[str, Any]) -> list[dict[str, Any]]:
    side = made["$defs"]["Rule"]["properties"]["from"]
    kept = made["properties"]["keep"]["items"]
    return [kept, side, side["items"], side["additionalProperties"]]


def test_the_keys_of_a_checkpoint_are_completed_in_from_and_keep() -> None:
    made = json.loads(done("schema", "--for", HUB).out)
    jsonschema.Draft202012Validator.check_schema(made)
    with formats.open(HUB) as source:
        keys = set(source.index.tensors)
    for place in places(made):
        offered = place["examples"]
        assert "model.layers.{n:int}.block_sparse_moe.experts.{e:int}.w1.weight" in offered
        taken = {key for text in offered for key in keys if parse(text).match(key) is not None}
        assert taken == keys
        # they are offered, and nothing else is refused
        validator = jsonschema.Draft202012Validator({**place, "$defs": made["$defs"]})
        assert all(map(validator.is_valid, [*offered, "another.{k}"]))
    # and nothing else differs
    for place in (*places(made), *(plain := places(schema.rule_file()))):
        place.pop("examples", None)
    assert plain == places(made)


def test_it_is_written_into_a_file_and_replaces_no_other(tmp_path: Path) -> None:
    first = safetensors(tmp_path / "a.safetensors", {"a.b": ("F32", [1])})
    other = safetensors(tmp_path / "b.safetensors", mixtral())
    file = tmp_path / "old.json"
    assert done("schema", "--for", first, "-o", file).out == f"{file}: written\n"
    assert places(json.loads(file.read_text()))[0]["examples"] == ["a.b"]
    done("schema", "rulefile", "--for", other, "-o", file)
    assert len(places(json.loads(file.read_text()))[0]["examples"]) > 5
    (tmp_path / "mine.json").write_text("{}")
    for words in (
        ("--for", first, "-o", tmp_path / "mine.json"),
        ("--for", first, "-o", tmp_path),
        ("--for", first, "--check"),
        ("--for", first, "layouts"),
        ("--for", tmp_path / "nowhere"),
    ):
        assert run("schema", *words).exit == 2
    assert (tmp_path / "mine.json").read_text() == "{}"
