"""`migrate lint` as a command: its three forms, its exit status, and that the rules that ship are
clean.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
from commandline import DATA, ROOT, done, run
from test_imports import loaded
from work import times

from migrate.rules.loading import load_files

SCHEMA = json.loads((ROOT / "schemas" / "lint.schema.json").read_text())
HEAD = (
    "# yaml-language-server: $schema=x\nid: x/y/z\ntitle: Some rules\nlineage: x\nedge: [a, "
    'b]\nrequires: ">=0.1"\n'
)
CLEAN = """rules:
  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}
tests:
  - {name: t, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: [1]}}}
"""


def write(folder: Path, body: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(HEAD + body)
    return path


def test_the_rules_that_ship_are_clean_by_a_small_multiple_of_loading_them(tmp_path: Path) -> None:
    files = sorted((ROOT / "rules").rglob("*/*/*.yaml"))
    answers = []

    def lint() -> None:
        answers.append(run("lint", "--format", "json", cwd=tmp_path))

    assert times(lint, lambda: load_files(files), best_of=1) < 60
    (result,) = answers
    assert [d["message"] for d in result.json["diagnostics"]] == []
    assert result.exit == 0
    assert len(result.json["files"]) == len(list((ROOT / "rules").rglob("*.yaml")))


def test_it_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    path = write(tmp_path, CLEAN)
    assert not loaded("lint", path) & {"torch", "numpy", "jsonschema", "rich", "xxhash"}
    assert not loaded("lint", path, "--index", DATA / "mixtral__v4" / "hub", status=1) & {
        "torch",
        "numpy",
        "jsonschema",
        "rich",
    }


def test_findings_are_drawn_with_their_place_and_counted(tmp_path: Path) -> None:
    write(tmp_path, 'keep: ["{k...}"]\n' + CLEAN)
    write(tmp_path, CLEAN.replace("old", "older"), "s.yaml")
    result = done("lint", tmp_path, exit=1, cwd=tmp_path)
    assert result.err == ""
    assert "warning[M612]: `{k...}` keeps everything" in result.out
    assert "--> r.yaml:7:8" in result.out
    assert '7 | keep: ["{k...}"]' in result.out
    assert result.out.endswith("2 files: 1 warning\n")


def test_a_clean_file_and_an_allowed_finding(tmp_path: Path) -> None:
    path = write(tmp_path, CLEAN)
    assert done("lint", path).out == "1 file: nothing found\n"
    write(tmp_path, 'keep: ["{k...}"]  # migrate: allow M612 because of the example\n' + CLEAN)
    assert done("lint", path).out == "1 file: nothing found, 1 allowed by comments\n"


def test_the_document_fits_its_schema(tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for body, status in ((CLEAN, 0), ('keep: ["{k...}"]\n' + CLEAN, 1), ("rulez: []\n", 2)):
        document = done("lint", write(tmp_path, body), "--format", "json", exit=status).json
        assert list(document)[:2] == ["format_version", "kind"]
        assert document["kind"] == "lint"
        assert document["exit"] == status
        jsonschema.Draft202012Validator(SCHEMA).validate(document)


def test_github_annotations_are_one_line_each(tmp_path: Path) -> None:
    write(tmp_path, 'keep: ["{k...}"]\n' + CLEAN, "50%, of: it.yaml")
    (line,) = done("lint", ".", "--format", "github", exit=1, cwd=tmp_path).out.splitlines()
    place, _, message = line.removeprefix("::warning ").partition("::")
    assert (
        place == "file=50%25%2C of%3A it.yaml,line=7,col=8,endColumn=16,title=M612 keeps-everything"
    )
    assert message.startswith("`{k...}` keeps everything: ")
    assert "%0Ahelp: " in message
    assert done("lint", write(tmp_path / "..", CLEAN, "clean.yaml"), "--format", "github").out == ""


def test_a_file_that_does_not_load_is_the_wrong_question_and_the_others_are_linted(
    tmp_path: Path,
) -> None:
    write(tmp_path, "rulez: []\n", "a.yaml")
    write(tmp_path, 'keep: ["{k...}"]\n' + CLEAN, "b.yaml")
    document = done("lint", tmp_path, "--format", "json", exit=2).json
    assert [d["code"] for d in document["diagnostics"]] == ["M103", "M612"]
    assert "did you mean" in done("lint", tmp_path, exit=2).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "does not exist"),
        (["r.txt"], "is not a rule file"),
        (["--select", "M999"], "lint has no finding `M999`"),
        (["--ignore", "keeps-everythink"], "did you mean `keeps-everything`?"),
        (["--index", "nowhere"], "nowhere"),
        (["--format", "xml"], "'xml' is not one of"),
    ],
)
def test_a_wrong_question(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "r.txt").write_text("")
    result = run("lint", *arguments, cwd=tmp_path)
    assert (result.exit, result.out) == (2, "")
    assert said in result.err


def test_findings_about_siblings_are_left_out(tmp_path: Path) -> None:
    home = tmp_path / "x"
    (home / "b").mkdir(parents=True)
    (home / "layouts.yaml").write_text(
        "lineage: x\ntitle: x\nlayouts: {a: {title: a}, b: {title: b}}\n"
    )
    write(home / "b", CLEAN.replace("{i:int}", "{i}"), "z.yaml")
    (home / "b" / "other.yaml").write_text((HEAD + CLEAN).replace("x/y/z", "x/b/other"))
    asked = home / "b" / "other.yaml"
    # its test does not bind, because the sibling takes its keys as well
    assert [
        d["code"] for d in done("lint", asked, "--format", "json", exit=1).json["diagnostics"]
    ] == ["M621", "M615"]
    every = {
        d["code"] for d in done("lint", tmp_path, "--format", "json", exit=1).json["diagnostics"]
    }
    assert {"M604", "M610", "M640", "M615"} <= every
    (home / "b" / "z.yaml").write_text("rulez: []\n")
    assert done("lint", asked).out == "1 file: nothing found\n"


def test_rules_are_held_against_a_checkpoint(tmp_path: Path) -> None:
    hub = DATA / "mixtral__v4" / "hub"
    assert done("lint", ROOT / "rules" / "hf-mixtral", "--index", hub).out.startswith(
        "2 files: nothing found"
    )
    result = done(
        "lint", write(tmp_path, CLEAN), "--index", hub, "--select", "M660,keys-without-rule", exit=1
    )
    assert "are taken by no rule" in result.out


def test_equal_contents_in_a_shipped_test_are_noticed(tmp_path: Path) -> None:
    text = (ROOT / "rules" / "hf-mixtral" / "v5" / "fuse-experts.yaml").read_text()
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert done("lint", path).out == "1 file: nothing found\n"
    given = re.compile(r"(?<=values: )\[\[.*\]\](?=\}$)|(?<=fill: )\d+", re.MULTILINE)
    path.write_text(given.sub(lambda m: re.sub(r"\d+", "1", m[0]), text))
    assert "if concat had w1 and w3 interchanged" in done("lint", path, exit=1).out


def test_the_rules_of_all_cases_can_be_linted() -> None:
    result = run("lint", ROOT / "tests" / "data" / "cases", "--format", "json")
    assert result.exit in (1, 2)
    assert {"M612", "M620", "M622", "M651"} <= set(result.codes)
