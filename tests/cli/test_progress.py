"""Progress on stderr: a line per 10 % in a log, a bar on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from commandline import environment, rules, run, safetensors

from migrate.cli import terminal

LINE = re.compile(
    r"writing +(\d+) %  [\d.]+ [kMG]?B of [\d.]+ [kMG]?B  [\d.]+ [kMGT]?B/s, \d+ s left, private "
    r"memory [\d.]+ [kMG]?B"
)


@pytest.fixture
def large(tmp_path: Path) -> list[object]:
    """The arguments of a run over 200 MB."""
    source = safetensors(
        tmp_path / "in.safetensors", {f"a.{i}": ("U8", [1 << 20]) for i in range(200)}, holes=True
    )
    rule = rules(tmp_path, "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}'}]\n")
    return ["apply", source, "-o", tmp_path / "out.safetensors", "--rules", rule, "--no-fsync"]


def test_a_log_has_a_line_per_ten_percent(
    large: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE", 0.0)
    lines = [line for line in run(*large).err.splitlines() if line.startswith("writing")]
    said = [int(LINE.fullmatch(line)[1]) for line in lines]
    assert said == list(range(10, 101, 10))


# each look at the clock finds it a quarter of a second on: how fast a run is says nothing here
TICKING = """
import itertools, threading, time
ticks = itertools.count(1000)
time.monotonic = lambda: next(ticks) / 4
from migrate.cli.main import main
main()
"""


def test_a_terminal_has_a_bar_with_speed_time_left_and_memory(large: list[object]) -> None:
    reader, writer = pty.openpty()
    command = [sys.executable, "-c", TICKING, *(str(a) for a in large)]
    terminal = {**environment(), "TERM": "xterm", "COLUMNS": "140"}
    with subprocess.Popen(command, env=terminal, stdout=subprocess.PIPE, stderr=writer) as child:
        os.close(writer)
        seen = b""
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:
                break
            if not part:
                break
            seen += part
        out = child.stdout.read()
    os.close(reader)
    assert child.returncode == 0
    assert out.startswith(b"published ")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    assert "writing" in text
    assert re.search(r"[\d.]+/[\d.]+ MB", text)
    assert re.search(r"[\d.]+ [kMG]B/s", text)
    assert re.search(r"\d:\d\d:\d\d", text)
    assert re.search(r"private memory [\d.]+ MB", text)


def test_a_log_has_no_line_of_a_run_that_is_soon_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    shown = terminal.Progress("writing", quiet=False)
    for seconds, done in ((0.1, 30), (1.9, 90), (2.5, 91), (2.6, 92), (4.0, 100)):
        now[0] = 100.0 + seconds
        shown.update(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert [line[:13] for line in lines] == ["writing  90 %", "writing 100 %"]


def test_macos_tells_the_most_memory_that_was_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(terminal.sys, "platform", "darwin")
    monkeypatch.setattr(
        resource, "getrusage", lambda who: type("Usage", (), {"ru_maxrss": 123_400_000})()
    )
    assert terminal.describe_memory() == "peak memory 123.40 MB"


def test_a_system_that_tells_no_memory_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    assert terminal.describe_memory() == ""


def test_verbose_has_lines_instead_of_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(terminal.Progress, "_draw", lambda self, done, total: drawn.append(done))
    monkeypatch.setattr(terminal.sys.stderr, "isatty", lambda: True, raising=False)
    for verbosity in (0, 1):
        context = click.Context(click.Command("apply"))
        context.params["verbosity"] = verbosity
        with context:
            terminal.Progress("writing", quiet=False).update(1, 2)
        assert drawn == [1]
    assert capsys.readouterr().err == ""


def test_quiet_is_quiet(large: list[object]) -> None:
    assert run(*large, "-q").err == ""
