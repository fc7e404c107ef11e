"""stdout and stderr that are closed, full, or without a reader: runs end as they would, and the
exit status is true.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import contents, environment, rules, safetensors

RULES = (
    "rules: [{name: a, from: 'l.{i:int}.e.{e:int}', to: 'l.{i}.e', via: [{stack: {over: e}}]}]\n"
)
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("streams")
    safetensors(
        made / "in.safetensors",
        {f"l.{i}.e.{e}": ("BF16", [8, 16]) for i in range(2) for e in range(2)},
    )
    safetensors(made / "other.safetensors", {"l": ("BF16", [8, 16])})
    rules(made, RULES)
    return made


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """A line for sh in which $migrate is the command."""
    variables = {**environment(), "migrate": f"{sys.executable} -m migrate"}
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full"], ids=["closed", "full-stderr"])
def test_a_run_does_not_need_anywhere_to_print_to(folder: Path, streams: str) -> None:
    if "full" in streams and not FULL.exists():
        pytest.skip("there is no /dev/full")
    out = folder / f"out{len(streams)}.safetensors"
    done = shell(
        folder, f"$migrate apply in.safetensors -o {out.name} --rules rules.yaml {streams}"
    )
    assert done.returncode == 0, done.stderr
    # not a byte of what was printed went into a file that had taken the number of a closed stream
    assert contents(out).keys() == {"l.0.e", "l.1.e"}
    assert not Path(f"{out}.migrate-partial").exists()


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_an_answer_that_is_lost_is_said_and_the_output_counts(folder: Path) -> None:
    done = shell(
        folder, "$migrate apply in.safetensors -o kept.safetensors --rules rules.yaml >/dev/full"
    )
    assert done.returncode == 0
    assert "warning[M971]" in done.stderr
    assert "kept.safetensors was published and is complete" in done.stderr
    assert contents(folder / "kept.safetensors").keys() == {"l.0.e", "l.1.e"}


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_command_that_only_answers_has_failed_when_its_answer_is_lost(folder: Path) -> None:
    done = shell(folder, "$migrate inspect in.safetensors >/dev/full")
    assert done.returncode == 4
    assert "error[M971]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_left_does_not_change_the_exit_status(folder: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "migrate", "diff", "in.safetensors", "other.safetensors"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""
