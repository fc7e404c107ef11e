"""Each documented exit status, through a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commandline import (
    DATA,
    ROOT,
    Result,
    environment,
    fingerprint,
    mixtral,
    rules,
    run,
    safetensors,
    shell,
    spawn,
)
from work import HANG

HUB = DATA / "mixtral__v4" / "hub"


def test_0_when_it_is_done(tmp_path: Path) -> None:
    result = shell("apply", HUB, "-o", "new", "--to", "hf-mixtral@v5", cwd=tmp_path)
    assert result.exit == 0, result.err
    assert result.out.startswith("published new ")
    assert shell("diff", "new", "new", cwd=tmp_path).exit == 0


def test_1_when_the_answer_is_no(tmp_path: Path) -> None:
    assert shell("diff", HUB, DATA / "mixtral__v4" / "v5").exit == 1


def test_1_and_no_output_when_the_layout_is_the_wanted_one_already(tmp_path: Path) -> None:
    there = DATA / "mixtral__v4" / "v5"
    result = shell("apply", there, "-o", "new", "--to", "hf-mixtral@v5", cwd=tmp_path)
    assert (result.exit, result.err) == (1, "")
    assert result.out.startswith("nothing to do: ")
    assert (
        shell(
            "apply", there, "-o", "new", "--to", "hf-mixtral@v5", "--if-needed", cwd=tmp_path
        ).exit
        == 0
    )
    assert not list(tmp_path.iterdir())


def test_2_when_the_question_is_wrong(tmp_path: Path) -> None:
    result = shell("plan", HUB, "--to", "hf-mixtral@v9")
    assert (result.exit, result.out) == (2, "")
    assert result.err.startswith("error[M501]: ")


def test_3_when_the_checkpoint_is_the_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    result = shell("inspect", tmp_path / "bad.safetensors")
    assert (result.exit, result.out) == (3, "")
    assert "bad.safetensors" in result.err


def test_4_when_it_failed_while_running(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", mixtral())
    code = (
        "import errno, os, sys\n"
        "from migrate.cli.main import run\n"
        "def full(*arguments):\n    raise OSError(errno.EIO, 'Input/output error')\n"
        "os.pwrite = os.pwritev = full\n"
        "sys.exit(run(sys.argv[1:]))\n"
    )
    command = [
        sys.executable,
        "-c",
        code,
        "apply",
        str(source),
        "-o",
        "new",
        "--to",
        "hf-mixtral@v5",
    ]
    child = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert child.returncode == 4, child.stderr
    assert "error[M913]" in child.stderr
    assert "--resume" in child.stderr
    assert not (tmp_path / "new").exists()
    assert (
        shell("apply", source, "-o", "new", "--to", "hf-mixtral@v5", "--resume", cwd=tmp_path).exit
        == 0
    )


def test_70_when_it_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    from migrate import api

    monkeypatch.setattr(api, "inspect", lambda *a, **k: 1 / 0)
    result = run("inspect", HUB)
    assert (result.exit, result.out) == (70, "")
    assert "ZeroDivisionError" in result.err
    assert "this is a bug in migrate" in result.err


LARGE = {f"layers.{i}.weight": ("U8", [4, 1 << 20]) for i in range(48)}
RULE = "rules: [{name: r, from: 'layers.{i:int}.weight', to: 'blocks.{i}.weight'}]\n"


def interrupt(source: Path, rule: Path, out: Path) -> Result:
    """Ctrl-C as soon as the journal shows that the run is under way."""
    child = spawn("apply", source, "-o", out, "--rules", rule, "--no-fsync", "--threads", "1")
    journal = out.with_name(out.name + ".migrate-partial") / "journal.jsonl"
    while child.poll() is None and not (
        journal.exists() and journal.read_bytes().count(b"\n") >= 3
    ):
        time.sleep(0.0005)
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
    text = child.communicate(timeout=HANG)
    return Result(child.returncode, *text)


def test_130_when_it_is_interrupted_and_resume_ends_in_the_same_bytes(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", LARGE, holes=True)
    rule = rules(tmp_path, RULE)
    before = fingerprint(source)
    for attempt in range(5):
        out = tmp_path / f"out{attempt}.safetensors"
        result = interrupt(source, rule, out)
        if result.exit == 130:
            break
        # the run was faster than the signal
        assert result.exit == 0, result.err
        out.unlink()
    partial = out.with_name(out.name + ".migrate-partial")
    assert result.exit == 130
    assert not out.exists()
    assert partial.is_dir()
    assert str(partial) in result.err
    assert "--resume" in result.err
    assert "Traceback" not in result.err

    refused = shell("apply", source, "-o", out, "--rules", rule)
    assert refused.exit == 2
    assert "M911" in refused.err
    resumed = shell("apply", source, "-o", out, "--rules", rule, "--resume", "--format", "json")
    assert resumed.exit == 0, resumed.err
    assert resumed.json["bytes_written"] < out.stat().st_size
    assert not partial.exists()
    done = shell("apply", source, "-o", tmp_path / "whole.safetensors", "--rules", rule)
    assert done.exit == 0
    assert list(fingerprint(out).values()) == list(
        fingerprint(tmp_path / "whole.safetensors").values()
    )
    assert fingerprint(source) == before


def test_an_interrupt_before_anything_is_written_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from migrate import api

    def interrupted(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "apply", interrupted)
    result = run("apply", HUB, "-o", tmp_path / "out", "--to", "latest")
    assert (result.exit, result.err) == (130, "interrupted; nothing was published\n")


def test_an_interrupt_behind_the_rename_says_that_the_output_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from migrate import api

    real, out = api.apply, tmp_path / "out"

    def interrupted(*arguments: object, **keywords: object) -> None:
        real(*arguments, **keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "apply", interrupted)
    result = run("apply", HUB, "-o", out, "--to", "latest")
    assert (result.exit, result.err) == (
        130,
        f"interrupted after {out} was published; it is complete\n",
    )
    # what stood there before is not this run's
    monkeypatch.setattr(
        api, "apply", lambda *arguments, **keywords: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    result = run("apply", HUB, "-o", out, "--to", "latest")
    assert (result.exit, result.err) == (130, "interrupted; nothing was published\n")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    source = safetensors(
        tmp_path / "in.safetensors", {f"k{i}.{'x' * 50}{i}": ("U8", [1]) for i in range(4000)}
    )
    command = (
        f"{sys.executable} -m migrate inspect --all {source} | head -1; exit ${{PIPESTATUS[0]}}"
    )
    child = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["migrate", "ckpt-migrate"])
def test_both_scripts_are_declared(name: str) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'{name} = "migrate.cli.main:main"' in text
