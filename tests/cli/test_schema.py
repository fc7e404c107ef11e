"""`migrate schema`, `migrate explain`, `migrate packs`: what needs no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from commandline import ROOT, done, run
from test_imports import loaded

from migrate.core.errors import PAGES
from migrate.rules import schema

SCHEMAS = ROOT / "schemas"


def fits(document: dict[str, object]) -> None:
    assert list(document)[:2] == ["format_version", "kind"]
    text = (SCHEMAS / f"{document['kind']}.schema.json").read_text()
    jsonschema.Draft202012Validator(json.loads(text)).validate(document)


@pytest.mark.parametrize("name", schema.schemas())
def test_a_schema_is_printed_as_its_file_holds_it(name: str) -> None:
    assert done("schema", name).out == (SCHEMAS / f"{name}.schema.json").read_text()


def test_without_a_name_they_are_listed() -> None:
    assert [line.split()[0] for line in done("schema").out.splitlines()] == list(schema.schemas())
    document = done("schema", "--format", "json").json
    fits(document)
    assert document["current"] is None


def test_the_files_of_a_folder_are_written_and_checked(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    said = done("schema", "--check", "-o", folder, exit=1).out
    assert said.count("is missing") == len(schema.schemas())
    assert done("schema", "-o", folder).out.count("written") == len(schema.schemas())
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in SCHEMAS.iterdir()
    }
    assert done("schema", "--check", "-o", folder).out.startswith(str(folder))
    (folder / "plan.schema.json").write_text("{}")
    (folder / "old.schema.json").write_text("{}")
    result = done("schema", "--check", "-o", folder, exit=1)
    assert f"{folder}/plan.schema.json: differs" in result.out
    assert f"{folder}/old.schema.json: belongs to no model" in result.out
    assert "rulefile" not in result.out
    document = done("schema", "--check", "-o", folder, "--format", "json", exit=1).json
    fits(document)
    assert {s["file"]: s["state"] for s in document["schemas"] if s["state"] != "current"} == {
        "plan.schema.json": "differs",
        "old.schema.json": "unknown",
    }
    assert done("schema", "layouts", "--check", "-o", folder).exit == 0
    assert done("schema", "plan", "--check", "-o", folder, exit=1).exit == 1
    done("schema", "plan", "-o", folder)
    assert done("schema", "plan", "--check", "-o", folder).exit == 0


def test_check_looks_at_the_schemas_beside_and_else_at_the_shipped_ones(tmp_path: Path) -> None:
    assert done("schema", "--check", cwd=ROOT).out.startswith("schemas: ")
    assert str(SCHEMAS) in done("schema", "--check", cwd=tmp_path).out
    (tmp_path / "schemas").mkdir()
    assert "is missing" in done("schema", "--check", cwd=tmp_path, exit=1).out


def test_a_schema_that_is_not_there_and_a_folder_that_cannot_be_written_are_wrong_questions(
    tmp_path: Path,
) -> None:
    result = run("schema", "rulefiel", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M115"])
    assert "rulefile" in result.json["diagnostics"][0]["help"]
    (tmp_path / "file").write_text("")
    assert run("schema", "-o", tmp_path / "file" / "below", "--format", "json").codes == ["M115"]


def test_every_code_op_and_codec_is_explained() -> None:
    document = done("explain", "--format", "json").json
    fits(document)
    by_name = {topic["name"]: topic for topic in document["topics"]}
    assert {"stack", "drop", "fp8-block"} | {page.stem for page in PAGES.glob("M*.md")} <= set(
        by_name
    )
    assert len(done("explain").out.splitlines()) == len(by_name)
    one = done("explain", "stack", "--format", "json").json
    fits(one)
    assert one["topics"] == [by_name["stack"]]
    assert "`over`" in done("explain", "stack").out
    said = done("explain", "M207").out
    assert said.startswith("M207: incomplete-group   (error, exit status 3)\n")
    assert done("explain", "incomplete-group").out == said


def test_what_cannot_be_explained_is_a_wrong_question() -> None:
    result = run("explain", "stakc", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M115"])
    assert "`stack`" in result.json["diagnostics"][0]["help"]


def test_packs_are_listed_in_the_order_in_which_they_are_searched(tmp_path: Path) -> None:
    for folder in ("rules", "other"):
        home = tmp_path / folder / "demo"
        home.mkdir(parents=True)
        (home / "layouts.yaml").write_text("lineage: demo\ntitle: t\nlayouts: {v1: {title: one}}\n")
    text = done("packs", cwd=tmp_path)
    first, shipped = "rules   rules\n  demo  t (v1)\n", f"built-in   {ROOT / 'rules'}\n"
    assert text.out.startswith(first + shipped)
    (line,) = (line for line in text.out.splitlines() if line.startswith("  gpt-oss "))
    assert " ".join(line.split()) == (
        "gpt-oss The number format and the names of gpt-oss (original, mxfp4, bf16)"
    )
    document = done("packs", "--rules", "other", "--format", "json", cwd=tmp_path).json
    fits(document)
    assert [(p["name"], p["origin"]) for p in document["packs"]] == [
        ("other", "local"),
        ("rules", "local"),
        ("built-in", "built-in"),
    ]
    assert run("packs", "--rules", "nowhere", "--format", "json", cwd=tmp_path).codes == ["M507"]
    assert document["packs"][0]["contents"] == {"demo": {"title": "t", "layouts": {"v1": "one"}}}
    (tmp_path / "other" / "demo" / "layouts.yaml").write_text("lineage: demo\nlayouts: [v1]\n")
    document = done("packs", "--rules", "other", "--format", "json", cwd=tmp_path).json
    fits(document)
    assert document["packs"][0]["contents"] == {"demo": None}
    assert "\n  demo  (its layouts.yaml cannot be read; `migrate lint`" in (
        done("packs", "--rules", "other", cwd=tmp_path).out
    )


@pytest.mark.parametrize("arguments", [["schema", "-o", "made"], ["explain"], ["packs"]])
def test_neither_torch_nor_numpy_nor_jsonschema_is_loaded(
    arguments: list[str], tmp_path: Path
) -> None:
    assert not loaded(*arguments, cwd=tmp_path) & {"torch", "numpy", "jsonschema", "rich", "xxhash"}


@pytest.mark.parametrize("command", ["schema", "explain", "packs"])
def test_help_loads_click_alone(command: str) -> None:
    assert loaded(command, "--help") == {"click"}


def test_where_the_shipped_schemas_lie_is_said_for_an_editors_settings(tmp_path: Path) -> None:
    assert done("schema", "--path", cwd=tmp_path).out == f"{SCHEMAS}\n"
    place = Path(done("schema", "rulefile", "--path", cwd=tmp_path).out.strip())
    assert json.loads(place.read_text())["title"] == "migrate rule file"
    document = done("schema", "rulefile", "--path", "--format", "json", cwd=tmp_path).json
    fits(document)
    assert (document["folder"], [s["file"] for s in document["schemas"]]) == (
        str(SCHEMAS),
        [place.name],
    )
    assert run("schema", "--path", "--check").exit == 2
    assert run("schema", "rulefiel", "--path").exit == 2
