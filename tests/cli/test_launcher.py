"""What the command line reads from the environment of a launcher, and Python functions do not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from commandline import contents, done, rules, run, safetensors

import migrate
from migrate.cli import launcher
from migrate.core.errors import QuestionError
from migrate.core.types import Ranks
from migrate.running import ranks
from migrate.running.rank_run import Terminated

RULES = "rules: [{name: r, from: 'a', to: 'b'}]\n"


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    safetensors(tmp_path / "in.safetensors", {"a": ("U8", [100])})
    rules(tmp_path, RULES)
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Ranks(1, 4, 0, "||||")),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"},
            Ranks(1, 4, 1, "29500||||"),
        ),
    ],
)
def test_a_launch_is_what_rank_and_world_size_say(
    environment: dict[str, str], found: Ranks | None
) -> None:
    assert launcher.ranks_of("auto", environment) == found
    assert launcher.ranks_of("off", environment) is None


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK=x is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE=-1 is not a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 and WORLD_SIZE=4 contradict each other"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 and WORLD_SIZE=0 contradict each other"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": ""}, 'LOCAL_RANK="" is not a number'),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(environment: dict[str, str], what: str) -> None:
    with pytest.raises(QuestionError) as caught:
        launcher.ranks_of("auto", environment)
    assert (caught.value.diagnostics[0].code, caught.value.diagnostics[0].message) == ("M115", what)


def test_the_cores_of_a_machine_are_divided_among_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "_cores", lambda: 32)
    here = Ranks(1, 8)
    assert launcher.threads_of(5, here, {"LOCAL_WORLD_SIZE": "4"}) == 5
    assert launcher.threads_of(None, here, {"LOCAL_WORLD_SIZE": "4"}) == 8
    assert launcher.threads_of(None, here, {"LOCAL_WORLD_SIZE": "100"}) == 1
    assert launcher.threads_of(None, here, {}) == 2
    assert launcher.threads_of(None, None, {"LOCAL_WORLD_SIZE": "1"}) == 2
    monkeypatch.setattr(launcher, "_cores", lambda: 1000)
    assert launcher.threads_of(None, here, {"LOCAL_WORLD_SIZE": "4"}) == 64


def test_a_python_function_does_not_look_at_the_environment(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rule = scene / "rules.yaml"
    migrate.apply(scene / "in.safetensors", scene / "new", rules=rule)
    assert list(contents(scene / "new")) == ["b"]
    assert migrate.verify(scene / "new", source=scene / "in.safetensors", rules=rule).equal
    migrate.downgrade(scene / "new", scene / "back", rules=rule)
    assert list(contents(scene / "back")) == ["a"]


def test_a_command_in_a_job_runs_alone_with_ranks_off(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "APPEAR", 0.2)
    words = ("apply", "in.safetensors", "-o", "new", "--rules", "rules.yaml")
    waited = run(*words, cwd=scene)
    assert waited.exit == 4
    assert waited.out == ""
    assert "error[M972]: rank 0 did not appear in " in waited.err
    assert "--ranks off" in waited.err
    assert sorted(p.name for p in scene.iterdir()) == ["in.safetensors", "rules.yaml"]
    assert done(*words, "--ranks", "off", cwd=scene).out.startswith("published new")


def test_rank_0_alone_says_who_is_missing_and_keeps_the_folder(
    scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(ranks, "APPEAR", 0.2)
    words = ("apply", "in.safetensors", "-o", "new", "--rules", "rules.yaml")
    waited = run(*words, cwd=scene)
    assert waited.exit == 4
    assert "error[M972]: ranks 1, 2 did not appear in " in waited.err
    assert not (scene / "new").exists()
    # one process goes on with what was begun
    monkeypatch.delenv("RANK")
    assert run(*words, cwd=scene).exit == 2
    assert done(*words, "--resume", cwd=scene).out.startswith("published new")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_of_several_processes_one_shows_the_plan_and_what_was_there_already(
    scene: Path, monkeypatch: pytest.MonkeyPatch, rank: str, lines: int
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("apply", "in.safetensors", "--rules", "rules.yaml", "--dry-run")
    assert bool(done(*words, cwd=scene).out) is bool(lines)
    assert not (scene / "new").exists()


def test_a_signal_to_end_is_an_interrupt_once_and_only_with_others() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with launcher.ending_with_the_others(None):
        assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(Terminated), launcher.ending_with_the_others(Ranks(0, 2)):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
