"""The pytest plugin, in a pytest of its own: which files it takes, what it reports, and that it
disturbs nobody.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ROOT, rules

GOOD = """rules:
  - {name: one, from: "a.{i:int}", to: "b.{i}"}
tests:
  - {name: it is renamed, given: {a.0: {shape: [2], fill: iota}}, expect: {b.0: {values: [0, 1]}}}
"""


def pytest_in(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest in `folder`, with the plugin as an installed migrate would
    load it.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "migrate.testing.plugin",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        *arguments,
    ]
    child = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return child.returncode, child.stdout + child.stderr


def test_rule_files_below_rules_are_collected_and_pass(tmp_path: Path) -> None:
    rules(tmp_path / "rules" / "demo" / "v2", GOOD)
    status, out = pytest_in(tmp_path, "rules", "-v")
    assert status == 0, out
    for name in (
        "it is renamed",
        "round trip",
        "eager twins",
        "order of rules",
        "applied twice",
        "coverage",
    ):
        assert f"rules/demo/v2/rules.yaml::{name} PASSED" in out


def test_a_failure_is_shown_in_our_words_and_without_a_traceback(tmp_path: Path) -> None:
    file = rules(tmp_path / "rules", GOOD.replace("[0, 1]", "[0, 2]"))
    status, out = pytest_in(tmp_path, "rules")
    assert status == 1
    assert "error[M701]: test 'it is renamed': b.0[1] is 1, expected 2" in out
    assert f"--> {file.relative_to(tmp_path)}:8:" in out
    assert "Traceback" not in out
    assert "plugin.py" not in out
    assert "1 failed, 5 passed" in out


def test_a_rule_file_that_cannot_be_read_is_an_error_of_collection(tmp_path: Path) -> None:
    rules(tmp_path / "rules", GOOD.replace("to:", "too:"))
    status, out = pytest_in(tmp_path, "rules")
    assert status == 2
    assert "M103" in out
    assert "Traceback" not in out


def test_yaml_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "layouts.yaml").write_text("lineage: demo\nlayouts: {}\n")
    (tmp_path / "rules" / "alerts.yaml").write_text("id: 3\ngroups: [{name: x, edge: y}]\n")
    (tmp_path / "rules" / "broken.yaml").write_bytes(b"\xff\xfe{{{")
    (tmp_path / "config").mkdir()
    rules(tmp_path / "config", GOOD.replace("[0, 1]", "[0, 2]"))
    status, out = pytest_in(tmp_path)
    assert status == 0, out
    assert "1 passed" in out
    named, out = pytest_in(tmp_path, "config/rules.yaml")
    assert named == 1, "a file that is named is meant"


def test_selecting_by_name_runs_that_check_alone(tmp_path: Path) -> None:
    rules(tmp_path / "rules", GOOD)
    _, out = pytest_in(tmp_path, "rules", "-k", "coverage")
    assert "1 passed, 5 deselected" in out


def test_loading_the_plugin_loads_nothing_else() -> None:
    code = (
        "import sys, migrate.testing.plugin; print([m for m in ('pydantic', 'yaml', 'torch', "
        "'numpy', 'migrate.api') if m in sys.modules])"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["migrate"])
def test_the_plugin_is_declared(name: str) -> None:
    assert (
        f'[project.entry-points.pytest11]\n{name} = "migrate.testing.plugin"'
        in (ROOT / "pyproject.toml").read_text()
    )
