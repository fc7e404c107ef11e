"""What a checkpoint or a rule file says never drives the terminal: names are escaped wherever text is written."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Result, environment, rules, run, safetensors
from work import HANG

from migrate.cli import render

EVIL = "\x1b[2J\x1b]0;owned\x07\nerror: all is lost\r\u202e\x9b"
TEXT = "params: {n: {type: str, default: x}}\nkeep: ['{k...}']\nrules:\n"
RENAME = "  - {name: r, from: a, to: b, optional: true}\n"


def escaped(text: str) -> str:
    """A YAML double-quoted scalar of `text`, which may hold what a plain one may not."""
    return json.dumps(text)


def assert_tame(result: Result) -> None:
    for text in (result.out, result.err):
        assert all(line.isprintable() for line in text.split("\n")), ascii(text)
        assert not any(line.startswith("error: all is lost") for line in text.split("\n"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose keys, side file, place and metadata are hostile."""
    home = tmp_path / f"in{EVIL.replace('/', '')}"
    safetensors(
        home / "model.safetensors", {"a": ("U8", [2]), f"k{EVIL}.0": ("U8", [2]), f"k{EVIL}.1": ("U8", [2]), "": ("U8", [1])}, {"m": EVIL}
    )
    (home / f"side{EVIL}.json").write_text("{}")
    return home


def test_every_command_writes_hostile_names_escaped(tmp_path: Path, folder: Path) -> None:
    drop = f"  - {{name: NAME, from: a, via: [{{drop: {{why: {escaped('why' + EVIL)}}}}}]}}\n"
    gone = rules(tmp_path, TEXT + drop.replace("NAME", "gone"), "gone.yaml")
    named = rules(tmp_path, TEXT + drop.replace("NAME", escaped(EVIL)), "named.yaml")
    renamed = rules(tmp_path, TEXT + RENAME, "renamed.yaml").rename(tmp_path / f"ren{EVIL}.yaml")
    wrong = rules(tmp_path, TEXT + "  - {nam: r}\n", "wrong.yaml").rename(tmp_path / f"wrong{EVIL}.yaml")
    out, other = tmp_path / f"out{EVIL}", tmp_path / "other"
    lines = [
        ["inspect", folder], ["inspect", folder, "--all"], ["history", folder], ["plan", folder, "--rules", gone, "--allow", "drop"],
        ["plan", folder, "--rules", gone], ["plan", folder, "--rules", wrong], ["plan", folder, "--rules", named],
        ["plan", folder, "--rules", renamed, "-o", tmp_path / f"plan{EVIL}.json"],
        ["apply", folder, "--rules", renamed, "-o", out], ["verify", out, "--source", folder, "--rules", renamed],
        ["history", out], ["apply", folder, "--rules", gone, "--allow", "drop", "-o", other],
    ]  # fmt: skip
    for line in lines:
        result = run(*line)
        assert result.exit in (0, 2, 3), result.err
        assert_tame(result)
    assert out.exists(), out
    assert other.exists(), other
    (other / f"side{EVIL}.json").write_text("[]")
    for line in (["diff", folder, other], ["diff", out, folder], ["verify", other, "--source", folder, "--rules", renamed]):
        result = run(*line)
        assert result.exit == 1
        assert_tame(result)


def test_a_terminal_gets_no_escapes_of_the_checkpoint(folder: Path) -> None:
    control, terminal = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "migrate", "inspect", str(folder)], env=environment(), stdout=terminal, stderr=terminal)
    child.wait(timeout=HANG)
    os.close(terminal)
    said = b""
    while True:
        try:
            part = os.read(control, 65536)
        except OSError:
            break
        if not part:
            break
        said += part
    os.close(control)
    assert b"\\x1b[2J" in said
    assert b"\x1b" not in said
    assert b"\x07" not in said


def test_an_empty_key_can_be_seen(folder: Path) -> None:
    assert any(line.strip().startswith('""') for line in run("inspect", folder).out.splitlines())


def test_the_next_line_can_be_copied_whatever_the_names(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "a b" / "in'; touch x.safetensors", {"a": ("U8", [2])})
    rule = rules(tmp_path / "r ü", TEXT + RENAME)
    out = tmp_path / "new $(x).safetensors"
    result = run("apply", source, "-o", out, "--rules", rule)
    line = next(line for line in result.err.splitlines() if line.startswith("next:"))
    command = shlex.split(line.removeprefix("next:"))
    assert command == ["migrate", "verify", str(out), "--source", str(source), "--rules", str(rule)]
    assert run(*command[1:]).exit == 0


def test_what_is_shared_is_told_and_only_then() -> None:
    document = {
        "path": "out", "tensors": 1, "files": {"f": {"size": 10_000}}, "bytes_shared": 8_000, "steps": [], "notes": [], "report": None,
        "downgrade": {"exact": True, "because": []},
    }  # fmt: skip
    assert ", 8.00 kB of it shared with the source by the file system" in render.published(document)
    assert "shared" not in render.published({**document, "bytes_shared": 0})
