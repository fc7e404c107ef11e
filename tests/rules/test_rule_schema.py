"""The schemas: current, described everywhere, and each mistake reported at its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema.exceptions import best_match
from rule_text import load_text

from migrate import ops
from migrate.core.errors import Report
from migrate.rules import arguments, schema
from migrate.rules.compiled import compile_file
from migrate.source import yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests" / "data" / "cases").glob("*.yaml"))
RULES = sorted(p for p in (ROOT / "rules").rglob("*.yaml") if p.name != "layouts.yaml")
LAYOUTS = sorted((ROOT / "rules").rglob("layouts.yaml"))
MADE = {name: make() for name, make in schema.schemas().items()}
VALIDATORS = {name: jsonschema.Draft202012Validator(made) for name, made in MADE.items()}
WRITTEN = ("rulefile", "layouts")


def plain(path: Path) -> Any:
    return yaml.core(yaml.parse(path.read_text(), str(path)).data)


def errors(data: Any, name: str = "rulefile") -> list[tuple[str, str]]:
    return sorted((e.json_path, e.validator) for e in VALIDATORS[name].iter_errors(data))


def described(node: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Every property of a schema with its place."""
    if isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            for name, field in node["properties"].items():
                yield f"{path}.{name}", field
        for name, child in node.items():
            if name not in ("examples", "enum", "const"):
                yield from described(child, f"{path}.{name}")
    elif isinstance(node, list):
        for number, child in enumerate(node):
            yield from described(child, f"{path}[{number}]")


def test_the_committed_schemas_are_those_that_the_models_give() -> None:
    assert schema.differences(ROOT / "schemas") == [], "python -m migrate schema -o schemas"


@pytest.mark.parametrize("name", MADE)
def test_a_schema_is_valid_and_says_what_it_describes(name: str) -> None:
    made = MADE[name]
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["title"]
    assert made["description"]
    assert set(re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(made))) == set(
        made.get("$defs", {})
    )


def keywords(schema: Any) -> Iterator[str]:
    """The names in the schema that are not names of fields (`not` of `where` is one)."""
    if isinstance(schema, list):
        for item in schema:
            yield from keywords(item)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            yield name
            fields = name in ("properties", "$defs") and isinstance(value, dict)
            yield from keywords(list(value.values()) if fields else value)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_people_write_has_no_alternatives_that_would_hide_a_mistake(name: str) -> None:
    assert not {"oneOf", "anyOf", "allOf", "not"} & set(keywords(MADE[name]))


@pytest.mark.parametrize("name", MADE)
def test_every_property_says_what_it_is(name: str) -> None:
    silent = [
        place
        for place, field in described(MADE[name])
        if not {"description", "$ref", "const"} & set(field)
    ]
    assert silent == []


@pytest.mark.parametrize("name", MADE)
def test_an_example_is_one(name: str) -> None:
    checked = 0
    for place, field in described(MADE[name]):
        validator = jsonschema.Draft202012Validator({**field, "$defs": MADE[name].get("$defs", {})})
        for example in field.get("examples", ()):
            assert validator.is_valid(json.loads(json.dumps(example))), f"{place}: {example}"
            checked += 1
    assert checked


@pytest.mark.parametrize("name", WRITTEN)
def test_what_people_write_has_examples_wherever_a_name_does_not_say_it_all(name: str) -> None:
    made = {
        **MADE[name],
        "$defs": {
            k: v
            for k, v in MADE[name]["$defs"].items()
            if k not in ("Step", "NumberFormat", "RuleTest", "GivenTensor", "ExpectedTensor")
        },
    }
    plain_enough = {"rules", "tests", "params", "detect", "shape"}
    without = [
        place
        for place, field in described(made)
        if "examples" not in field
        and field.get("type") != "boolean"
        and not {"enum", "const", "$ref", "if"} & set(field)
        and place.rpartition(".")[2]
        not in plain_enough | {"min", "max", "multiple_of", "remainder"}
    ]
    assert without == []


@pytest.mark.parametrize("path", [*CASES, *RULES], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_rule_file_fits_the_schema(path: Path) -> None:
    data = plain(path)
    missing = [
        op
        for rule in data["rules"]
        for step in rule.get("via", [])
        for op in step
        if op not in ops.registry.builtin()
    ]
    found = errors(data)
    assert len(found) == len(missing)
    assert {validator for _, validator in found} <= {"additionalProperties"}


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
@pytest.mark.parametrize("where", ["op", "argument", "field", "field of the file"])
def test_a_typo_in_a_shipped_rule_is_reported_where_it_is(path: Path, where: str) -> None:
    data = plain(path)
    number, rule = next(
        ((n, r) for n, r in enumerate(data["rules"]) if r.get("via")), (0, data["rules"][0])
    )
    op, arguments = next(iter(rule.setdefault("via", [{"flip": {"dim": 0}}])[0].items()))
    at: list[Any] = ["rules", number]
    if where == "op":
        rule["via"][0] = {f"{op}x": arguments}
        word, at = f"{op}x", [*at, "via", 0]
    elif where == "argument":
        word, at = "overr", [*at, "via", 0, op]
        arguments["overr"] = 1
    elif where == "field":
        word = "form"
        rule["form"] = "a"
    else:
        word, at = "linage", []
        data["linage"] = "x"
    found = list(VALIDATORS["rulefile"].iter_errors(data))
    assert [(list(e.absolute_path), e.validator) for e in found] == [(at, "additionalProperties")]
    assert list(best_match(found).absolute_path) == at
    assert f"'{word}' was unexpected" in found[0].message


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda p: p.parent.name)
def test_every_layouts_file_fits_the_schema(path: Path) -> None:
    assert errors(plain(path), "layouts") == []


@pytest.mark.parametrize("path", [*RULES, *LAYOUTS], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_first_line_of_a_shipped_file_leads_to_its_schema(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    modeline = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert modeline
    target = (path.parent / modeline[1]).resolve()
    name = "layouts" if path.name == "layouts.yaml" else "rulefile"
    assert target == ROOT / "schemas" / f"{name}{schema.SUFFIX}"


def test_each_mistake_is_one_error_at_its_place() -> None:
    rule = {
        "name": "r",
        "from": "a",
        "too": "b",
        "via": [
            {"splitt": {}},
            {"stack": {"over": "e", "dim": [1]}},
            {"flip": {"dim": 0}, "roll": {"dim": 0, "shift": 1}},
        ],
        "when": {"dtype": "bfloat61"},
        "where": {"e": {"min": 1, "maks": 2}},
    }
    data = {"id": "i", "title": "t", "lineage": "l", "edge": ["a", "b"], "rules": [rule]}
    assert errors(data) == [
        ("$.rules[0]", "additionalProperties"),
        ("$.rules[0].via[0]", "additionalProperties"),
        ("$.rules[0].via[1].stack.dim", "type"),
        ("$.rules[0].via[2]", "maxProperties"),
        ("$.rules[0].when.dtype", "enum"),
        ("$.rules[0].where.e", "additionalProperties"),
    ]


def test_a_step_lists_every_built_in_op_with_its_description_and_an_example() -> None:
    step = MADE["rulefile"]["$defs"]["Step"]
    assert set(step["properties"]) == set(ops.registry.builtin())
    assert (step["minProperties"], step["maxProperties"]) == (1, 1)
    for name, op in step["properties"].items():
        assert op["description"]
        # what codecs of third parties take is not known
        closed = op["then"] if arguments.takes_codec(name) else op
        assert closed["additionalProperties"] is False
        assert (
            errors(
                {
                    "id": "i",
                    "title": "t",
                    "lineage": "l",
                    "edge": ["a", "b"],
                    "rules": [
                        {"name": "r", "from": "a", "to": "b", "via": [{name: op["examples"][0]}]}
                    ],
                }
            )
            == []
        )


def test_the_first_example_of_each_field_makes_a_rule_file_that_can_be_loaded() -> None:
    made = MADE["rulefile"]
    lines = [
        f"{name}: {json.dumps(field['examples'][0])}"
        for name, field in made["properties"].items()
        if name not in ("files", "rules", "tests")
    ]
    fields = made["$defs"]["Rule"]["properties"]
    rule = {name: fields[name]["examples"][0] for name in ("name", "from", "to", "via")}
    loaded = load_text("\n".join([*lines, f"rules: [{json.dumps(rule)}]"]), "examples.yaml")
    report = Report()
    compile_file(loaded, report)
    assert report.diagnostics == []


def test_each_document_has_one_source_and_one_schema() -> None:
    assert set(schema.document_kinds()) | set(WRITTEN) == {
        p.name.removesuffix(schema.SUFFIX) for p in (ROOT / "schemas").iterdir()
    }
    for kind in schema.document_kinds():
        assert list(MADE[kind]["properties"])[:2] == ["format_version", "kind"]
        assert MADE[kind]["additionalProperties"] is False
