"""What -v and --log-file say, and that the library says it to nobody who does not listen."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import done, environment, mixtral, run, safetensors

import migrate


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "old" / "model.safetensors", mixtral()).parent


def test_verbose_says_decisions_and_times_on_stderr_and_leaves_the_answer(
    tmp_path: Path, old: Path
) -> None:
    plain = done("apply", old, "-o", tmp_path / "a", "--to", "hf-mixtral@v5", "-q")
    told = done("apply", old, "-o", tmp_path / "b", "--to", "hf-mixtral@v5", "-q", "-v")
    assert told.out == plain.out.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    assert plain.err == ""
    said = [line.partition(" ms  ")[2] for line in told.err.splitlines()]
    assert f"{old} is safetensors: 1 file, 27 tensors" in said
    assert any(
        line.startswith("it is in hf-mixtral@v4: model.layers.0.block_sparse_moe.") for line in said
    )
    assert "apply hf-mixtral v4 -> v5 by hf-mixtral/v5/fuse-experts.yaml" in said
    for phase in (
        f"reading the headers of {old}",
        "finding the way",
        "composing the rules",
        "planning",
        "publishing",
    ):
        assert any(
            line.startswith(f"{phase} took ") and line.endswith(" s of processor time")
            for line in said
        ), phase
    assert not any(line.startswith("opened ") for line in said)


def test_twice_verbose_names_the_files_that_are_opened(old: Path) -> None:
    told = done("inspect", old, "-vv")
    assert f"opened {old}/model.safetensors, " in told.err


def test_the_options_of_logs_may_stand_before_the_command(tmp_path: Path, old: Path) -> None:
    def said(*words: object) -> list[str]:
        return [line.partition(" ms  ")[2] for line in done(*words).err.splitlines()]

    once = said("-v", "inspect", old)
    assert f"{old} is safetensors: 1 file, 27 tensors" in once
    assert not any(line.startswith("opened ") for line in once)
    for words in (("-vv", "inspect", old), ("-v", "inspect", old, "-v")):
        assert any(line.startswith(f"opened {old}/model.safetensors, ") for line in said(*words))
    log, later = tmp_path / "run.log", tmp_path / "later.log"
    assert said("--log-file", log, "inspect", old) == []
    assert f"opened {old}/model.safetensors, " in log.read_text()
    before = log.read_text()
    done("--log-file", log, "inspect", old, "--log-file", later)
    assert log.read_text() == before
    assert f"opened {old}/model.safetensors, " in later.read_text()
    refused = run("--log-file", old / "run.log", "inspect", old)
    assert (refused.exit, "which lies in the source" in refused.err) == (2, True)


def test_a_log_file_has_everything_and_grows(tmp_path: Path, old: Path) -> None:
    log = tmp_path / "run.log"
    plain = done("plan", old, "--to", "hf-mixtral@v5")
    assert done("plan", old, "--to", "hf-mixtral@v5", "--log-file", log).err == plain.err
    first = log.read_text()
    assert " TRACE opened " in first
    assert " DEBUG planning took " in first
    wrong = run("plan", old, "--to", "v9", "--log-file", log, "-v")
    assert wrong.exit == 2
    assert log.read_text().startswith(first)
    assert " ERROR error[M501]: no lineage has a layout `v9`" in log.read_text()
    assert wrong.err.count("M501") == 1


def test_a_log_in_the_source_or_nowhere_is_refused(tmp_path: Path, old: Path) -> None:
    for place, why in (
        (old / "run.log", "which lies in the source"),
        (tmp_path / "no" / "run.log", "No such file"),
        (tmp_path, "Is a directory"),
    ):
        refused = run("inspect", old, "--log-file", place)
        assert (refused.exit, why in refused.err) == (2, True)
    assert [p.name for p in old.iterdir()] == ["model.safetensors"]


def test_a_log_has_no_escapes_of_the_checkpoint(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "a\x1b[2Jb.safetensors", {"k\n\x1b[2J": ("U8", [1])})
    told = done("inspect", source, "-vv", "--log-file", tmp_path / "run.log")
    for text in (told.err, (tmp_path / "run.log").read_text()):
        assert "\\x1b[2J" in text
        assert "\x1b" not in text


def test_python_hears_it_where_it_listens(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    handlers = list(logging.getLogger("migrate").handlers)
    migrate.inspect(old)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="migrate"):
        migrate.plan(old, to="hf-mixtral@v5")
    assert any(
        record.getMessage().startswith("it is in hf-mixtral@v4: ") for record in caplog.records
    )
    assert logging.getLogger("migrate").handlers == handlers


def test_a_command_that_does_not_log_does_not_import_logging(old: Path) -> None:
    code = (
        "import sys; from migrate.cli.main import run; run(sys.argv[1:]); print('logging' in "
        "sys.modules)"
    )
    for arguments, wanted in (
        (["inspect", str(old)], "False"),
        (["inspect", str(old), "-v"], "True"),
    ):
        child = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert child.stdout.splitlines()[-1] == wanted
