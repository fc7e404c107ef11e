"""What a checkpoint or a rule file says never drives the terminal: names are escaped wherever text
is written.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commandline import Result, environment, rules, run, safetensors
from work import HANG

from migrate.cli import render
from migrate.cli.terminal import wants_colour

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
        home / "model.safetensors",
        {"a": ("U8", [2]), f"k{EVIL}.0": ("U8", [2]), f"k{EVIL}.1": ("U8", [2]), "": ("U8", [1])},
        {"m": EVIL},
    )
    (home / f"side{EVIL}.json").write_text("{}")
    return home


def test_every_command_writes_hostile_names_escaped(tmp_path: Path, folder: Path) -> None:
    drop = f"  - {{name: NAME, from: a, via: [{{drop: {{why: {escaped('why' + EVIL)}}}}}]}}\n"
    gone = rules(tmp_path, TEXT + drop.replace("NAME", "gone"), "gone.yaml")
    named = rules(tmp_path, TEXT + drop.replace("NAME", escaped(EVIL)), "named.yaml")
    renamed = rules(tmp_path, TEXT + RENAME, "renamed.yaml").rename(tmp_path / f"ren{EVIL}.yaml")
    wrong = rules(tmp_path, TEXT + "  - {nam: r}\n", "wrong.yaml").rename(
        tmp_path / f"wrong{EVIL}.yaml"
    )
    out, other = tmp_path / f"out{EVIL}", tmp_path / "other"
    lines = [
        ["inspect", folder], ["inspect", folder, "--all"], ["history", folder],
        ["plan", folder, "--rules", gone, "--allow", "drop"],
        ["plan", folder, "--rules", gone], ["plan", folder, "--rules", wrong],
        ["plan", folder, "--rules", named],
        ["plan", folder, "--rules", renamed, "-o", tmp_path / f"plan{EVIL}.json"],
        ["apply", folder, "--rules", renamed, "-o", out],
        ["verify", out, "--source", folder, "--rules", renamed],
        ["history", out], ["apply", folder, "--rules", gone, "--allow", "drop", "-o", other],
    ]  # fmt: skip
    for line in lines:
        result = run(*line)
        assert result.exit in (0, 2, 3), result.err
        assert_tame(result)
    assert out.exists(), out
    assert other.exists(), other
    (other / f"side{EVIL}.json").write_text("[]")
    for line in (
        ["diff", folder, other],
        ["diff", out, folder],
        ["verify", other, "--source", folder, "--rules", renamed],
    ):
        result = run(*line)
        assert result.exit == 1
        assert_tame(result)


COLOURS = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")


def on_a_terminal(*arguments: object, **variables: str) -> bytes:
    """What a command line writes to a terminal, stdout and stderr together."""
    control, terminal = pty.openpty()
    plain = {name: value for name, value in environment().items() if name not in COLOURS}
    command = [sys.executable, "-m", "migrate", *map(str, arguments)]
    child = subprocess.Popen(
        command, env={**plain, "TERM": "xterm", **variables}, stdout=terminal, stderr=terminal
    )
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
    return said


def test_a_terminal_gets_no_escapes_of_the_checkpoint(folder: Path) -> None:
    said = on_a_terminal("inspect", folder)
    assert b"\\x1b[2J" in said
    assert b"\x1b" not in re.sub(rb"\x1b\[[0-9;]*m", b"", said)
    assert b"\x07" not in said


def test_a_terminal_has_colours_that_no_color_takes_away(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [2])})
    question = ["plan", source, "--rules", rules(tmp_path, TEXT + RENAME)]
    said = on_a_terminal(*question)
    assert b" \x1b[33m~\x1b[0m b" in said
    assert b"\x1b[32mdowngrade: exact\x1b[0m" in said
    assert b"\x1b" not in on_a_terminal(*question, NO_COLOR="1")


@pytest.mark.parametrize(
    ("variables", "terminal", "coloured"),
    [
        ({}, True, True), ({}, False, False), ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True), ({"CLICOLOR_FORCE": "1"}, False, True),
        ({"CLICOLOR_FORCE": "0"}, False, False),
        ({"CLICOLOR": "0"}, True, False), ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
    ],
)  # fmt: skip
def test_the_usual_variables_decide_on_colour(
    variables: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*COLOURS, "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    assert wants_colour(stream) is coloured


def test_colour_changes_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"a": ("U8", [2])})
    lines = [
        ["plan", source, "--rules", rules(tmp_path, TEXT + RENAME)],
        ["plan", source, "--to", "v9"],
        ["inspect", source],
    ]
    for line in lines:
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        plain = run(*line)
        monkeypatch.setenv("FORCE_COLOR", "1")
        painted = run(*line)
        # other programs fill and empty the disk meanwhile
        was, now = (
            re.sub(
                r"[\d.]+ [kMGT]?B free", "free", re.sub(r"\x1b\[[0-9;]*m", "", one.out + one.err)
            )
            for one in (plain, painted)
        )
        assert now == was
        assert "\x1b" not in plain.out + plain.err
    assert "\x1b[31m\x1b[1merror[M501]\x1b[0m: " in run("plan", source, "--to", "v9").err


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


def test_the_next_line_repeats_what_no_stamp_holds(tmp_path: Path) -> None:
    weights = {"a": torch.ones(2)}
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save(
        {"model": weights, "optimizer": state, "args": SimpleNamespace(lr=1)},
        tmp_path / "old.pt",
    )
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "old.pt").symlink_to(tmp_path / "old.pt")
    result = run(
        "apply",
        "links/old.pt",
        "-o",
        "new.safetensors",
        "--output-format",
        "safetensors",
        "--set",
        "optimizer=drop",
        "--allow",
        "drop",
        "--allow",
        "opaque",
        "--allow",
        "links",
        cwd=tmp_path,
    )
    command = shlex.split(
        next(line for line in result.err.splitlines() if line.startswith("next:")).removeprefix(
            "next:"
        )
    )
    assert command[-6:] == ["--set", "optimizer=drop", "--allow", "links", "--allow", "opaque"]
    assert run(*command[1:], cwd=tmp_path).exit == 0


def test_the_next_line_names_the_folder_of_side_files(tmp_path: Path) -> None:
    source = tmp_path / "old"
    safetensors(source / "model.safetensors", {"a": ("U8", [2])})
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / "tokenizer.json").write_text("{}")
    rule = rules(tmp_path / "r", TEXT + RENAME)
    result = run("apply", source, "-o", "new", "--rules", rule, "--side", "side", cwd=tmp_path)
    line = next(line for line in result.err.splitlines() if line.startswith("next:"))
    command = shlex.split(line.removeprefix("next:"))
    assert command[-2:] == ["--side", "side"]
    assert run(*command[1:], cwd=tmp_path).exit == 0


def test_what_is_shared_is_told_and_only_then() -> None:
    document = {
        "path": "out", "tensors": 1, "files": {"f": {"size": 10_000}}, "bytes_shared": 8_000,
        "steps": [], "notes": [], "report": None,
        "downgrade": {"exact": True, "because": []},
    }  # fmt: skip
    assert ", 8.00 kB of it shared with the source by the file system" in render.published(document)
    assert "shared" not in render.published({**document, "bytes_shared": 0})
