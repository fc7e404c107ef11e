from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from migrate import ops
from migrate.rules import schema
from migrate.source import yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests" / "data" / "cases").glob("*.yaml"))
RULES = sorted(p for p in (ROOT / "rules").rglob("*.yaml") if p.name != "layouts.yaml")
LAYOUTS = sorted((ROOT / "rules").rglob("layouts.yaml"))
VALIDATORS = {name: jsonschema.Draft202012Validator(make()) for name, make in schema.SCHEMAS.items()}


def plain(path: Path) -> Any:
    return yaml.core(yaml.load(path.read_text(), str(path)).data)


def errors(data: Any, name: str = "rulefile.schema.json") -> list[tuple[str, str]]:
    return sorted((e.json_path, e.validator) for e in VALIDATORS[name].iter_errors(data))


@pytest.mark.parametrize("name", schema.SCHEMAS)
def test_the_schemas_are_current(name: str) -> None:
    committed = (ROOT / "schemas" / name).read_text(encoding="utf-8")
    assert committed == schema.text(schema.SCHEMAS[name]()), "python -m migrate.rules.schema"


@pytest.mark.parametrize("name", schema.SCHEMAS)
def test_the_schemas_are_valid_and_offer_no_alternatives(name: str) -> None:
    made = schema.SCHEMAS[name]()
    jsonschema.Draft202012Validator.check_schema(made)
    assert not {"oneOf", "anyOf"} & set(json.dumps(made).split('"'))


@pytest.mark.parametrize("path", [*CASES, *RULES], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_rule_file_fits_the_schema(path: Path) -> None:
    data = plain(path)
    missing = [op for rule in data["rules"] for step in rule.get("via", []) for op in step if op not in ops.registry.builtin()]
    found = errors(data)
    assert len(found) == len(missing)
    assert {validator for _, validator in found} <= {"additionalProperties"}


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda p: p.parent.name)
def test_every_layouts_file_fits_the_schema(path: Path) -> None:
    assert errors(plain(path), "layouts.schema.json") == []


def test_each_mistake_is_one_error_at_its_place() -> None:
    rule = {
        "name": "r",
        "from": "a",
        "too": "b",
        "via": [{"splitt": {}}, {"stack": {"over": "e", "dim": [1]}}, {"flip": {"dim": 0}, "roll": {}}],
    }
    data = {"id": "i", "title": "t", "lineage": "l", "edge": ["a", "b"], "rules": [rule]}
    assert errors(data) == [
        ("$.rules[0]", "additionalProperties"),
        ("$.rules[0].via[0]", "additionalProperties"),
        ("$.rules[0].via[1].stack.dim", "type"),
        ("$.rules[0].via[2]", "maxProperties"),
        *[("$.rules[0].via[2].roll", "required") for _ in range(len(errors(data)) - 4)],
    ]


def test_a_step_lists_every_built_in_op_with_its_description() -> None:
    step = schema.rule_file()["$defs"]["Step"]
    assert set(step["properties"]) == set(ops.registry.builtin())
    assert (step["minProperties"], step["maxProperties"]) == (1, 1)
    assert all(op["description"] and op["additionalProperties"] is False for op in step["properties"].values())
