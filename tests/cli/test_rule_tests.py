"""`migrate test` on the command line: which files, which answer, which exit status, and what it may
load.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from commandline import ROOT, done, environment, rules, run

import migrate

SCHEMA = json.loads((ROOT / "schemas" / "test.schema.json").read_text())
GOOD = """rules:
  - {name: one, from: "a.{i:int}", to: "b.{i}"}
tests:
  - {name: it is renamed, given: {a.0: {shape: [2], fill: iota}}, expect: {b.0: {values: [0, 1]}}}
  - {name: nothing to take, given: {c: {shape: [2]}}, error: M206}
"""
BAD = GOOD.replace("[0, 1]", "[0, 2]")


def document(*arguments: object, exit: int = 0, cwd: Path | None = None) -> dict:
    made = done("test", *arguments, "--format", "json", exit=exit, cwd=cwd).json
    assert list(made)[:2] == ["format_version", "kind"]
    jsonschema.Draft202012Validator(SCHEMA).validate(made)
    return made


def names(made: dict, status: str = "") -> list[str]:
    return [c["name"] for f in made["files"] for c in f["checks"] if status in ("", c["status"])]


def test_rules_beside_the_user_come_before_those_that_ship(tmp_path: Path) -> None:
    rules(tmp_path / "rules", GOOD)
    assert [f["id"] for f in document(cwd=tmp_path)["files"]] == ["demo/v2/rules"]


def test_a_failure_is_told_with_both_lines_and_exit_1(tmp_path: Path) -> None:
    file = rules(tmp_path, BAD)
    text = done("test", file, exit=1)
    assert text.err == ""
    for line in (
        "  FAILED  it is renamed",
        "    error[M701]: test 'it is renamed': b.0[1] is 1, expected 2",
        f" --> {file}:8:",
        f" --> {file}:6:",
        "1 rule file: 6 passed, 1 failed",
    ):
        assert line in text.out, line
    made = document(file, exit=1)
    assert made["passed"] is False
    assert names(made, "failed") == ["it is renamed"]


def test_a_folder_a_file_and_both(tmp_path: Path) -> None:
    one, other = (
        rules(tmp_path / "more", GOOD, "one.yaml"),
        rules(tmp_path / "more" / "deep", GOOD, "two.yaml"),
    )
    assert len(document(tmp_path / "more")["files"]) == 2
    assert [f["path"] for f in document(one)["files"]] == [str(one)]
    assert len(document(one, other, tmp_path / "more")["files"]) == 2


def test_checks_are_selected_by_a_part_of_their_name_or_of_the_file(tmp_path: Path) -> None:
    rules(tmp_path, GOOD, "one.yaml")
    rules(tmp_path, BAD, "two.yaml")
    assert names(document(tmp_path, "-k", "NOTHING to")) == ["nothing to take"] * 2
    assert {f["id"] for f in document(tmp_path, "-k", "v2/one")["files"]} == {"demo/v2/one"}
    refused = run("test", tmp_path, "-k", "no such name")
    assert (refused.exit, refused.out) == (2, "")
    assert "M115" in refused.err


def test_fail_fast_stops_at_the_first_failure(tmp_path: Path) -> None:
    rules(tmp_path, BAD, "one.yaml")
    rules(tmp_path, BAD, "two.yaml")
    made = document(tmp_path, "--fail-fast", exit=1)
    assert names(made) == ["it is renamed"]
    assert made["counts"] == {"files": 1, "passed": 0, "failed": 1, "skipped": 0}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rules: [{name: one, from: a, too: b}]\n", "M103"),
        ("rules: [{name: one, from: a, to: '{x}'}]\n", "M203"),
        (GOOD.replace("expect: {b.0: {values", "expect: {b.0: {value"), "M103"),
        (GOOD.replace("error: M206", "error: M999"), "M114"),
        (GOOD.replace("error: M206", "error: M206, expect: {}"), "M114"),
        (GOOD.replace(", error: M206", ""), "M101"),
        (GOOD.replace("error: M206", "contains: x, expect: {}"), "M101"),
        (GOOD.replace("shape: [2], fill: iota", "fill: iota"), "M101"),
        (GOOD.replace("shape: [2], fill: iota", "shape: [2], values: [1, 2, 3]"), "M114"),
        (GOOD.replace("shape: [2], fill: iota", "values: [[1, 2], [3]]"), "M114"),
        (GOOD.replace("shape: [2], fill: iota", "fill: 1, values: [1]"), "M114"),
        (GOOD.replace("shape: [2], fill: iota", "shape: [2], fill: many"), "M106"),
        (GOOD.replace("{values: [0, 1]}", "{same_as: a.1}"), "M114"),
        (GOOD.replace("{values: [0, 1]}", "{values: [0, 1], fill: 1}"), "M114"),
        (GOOD.replace("{values: [0, 1]}", '{slices: {"0:1": 1}}'), "M114"),
        (GOOD.replace("{values: [0, 1]}", '{shape: [2], slices: {"0, 0": 1}}'), "M114"),
        (GOOD.replace("{a.0: {shape", '{"a.{i=2..1}": {shape'), "M114"),
        (GOOD.replace("{a.0: {shape", '{"a.{i=0..1}": {shape: [1]}, a.0: {shape'), "M113"),
        (GOOD.replace("given: {c", "params: {n: 1}, given: {c"), "M112"),
        (GOOD.replace("given: {c", "allow: [everything], given: {c"), "M114"),
    ],
)
def test_a_rule_file_that_is_wrong_is_a_wrong_question(
    tmp_path: Path, text: str, code: str
) -> None:
    refused = run("test", rules(tmp_path, text), "--format", "json")
    assert refused.exit == 2
    assert refused.codes == [code]


def test_no_rule_file_is_a_wrong_question(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, code in ((tmp_path / "empty", "M115"), (tmp_path / "absent.yaml", "M108")):
        refused = run("test", given, "--format", "json")
        assert (refused.exit, refused.codes) == (2, [code])


def test_what_is_read_from_rule_files_is_made_printable(tmp_path: Path) -> None:
    text = run(
        "test",
        rules(
            tmp_path,
            GOOD.replace("it is renamed", '"a\\u001b[31mb"').replace(
                "{values: [0, 1]}", "{fill: 9}"
            ),
        ),
    )
    assert text.exit == 1
    assert "\x1b" not in text.out


# what the command loads, and how many times as long as loading the rule files it takes
CODE = """
import sys
from migrate.cli.main import run
from migrate.rules.loading import load_files
from migrate.rules.packs import rule_files
from work import times
ended = []
files = rule_files([])
took = times(lambda: ended.append(run(sys.argv[1:])), lambda: load_files(files), best_of=1)
print(took, file=sys.stderr)
print(*sorted({"torch", "numpy", "jsonschema", "rich", "xxhash"} & set(sys.modules)), file=sys.stderr)
sys.exit(*ended)
"""  # noqa: E501


def test_specs_of_all_shipped_rules_pass_at_a_small_multiple_of_loading_them(
    tmp_path: Path,
) -> None:
    """With their values they are run in tests/rules/test_shipped.py."""
    child = subprocess.run(
        [sys.executable, "-c", CODE, "test", "--specs", "--format", "json"],
        env={**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert child.returncode == 0, child.stderr
    made = json.loads(child.stdout)
    assert made["passed"] is True
    assert names(made, "failed") == []
    assert {f["id"] for f in made["files"]} >= {
        "hf-mixtral/v5/fuse-experts",
        "te-grouped-bias/multi/bias-per-gemm",
    }
    took, loaded = child.stderr.splitlines()[-2:]
    assert float(took) < 120
    assert not loaded, loaded


def test_python_asks_as_the_command_line_does(tmp_path: Path) -> None:
    file = rules(tmp_path, GOOD)
    made = migrate.test(file)
    assert made.to_json() == document(file)
    assert migrate.test([file], select="coverage").to_json()["counts"]["passed"] == 1
    with pytest.raises(migrate.MigrateError, match="M108"):
        migrate.test(tmp_path / "absent.yaml")
