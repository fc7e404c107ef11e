"""What stops a save, really: killed trainers, killed children, interrupts, failures that nobody
asks for; and what is left of it then.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import thorough
from safetensors.torch import load_file
from work import HANG

import migrate
from migrate.core.errors import fail
from migrate.running.publish import partial_folder
from migrate.staging import jobs, process

MIB = 1 << 20
RULE = 'id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nrules: [{name: r, from: "a", to: "b"}]\n'
# the child stops where it says for the first time how far it is
STOPPED = process._CODE.replace(
    "main()",
    "import os, time; say = os.write; "
    "os.write = lambda to, text: "
    "[say(to, text), b'progress' in text and time.sleep({seconds})][0]; "
    "main()",
)


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[], subprocess.Popen[bytes]]:
    """The writing process, stopped in the middle of its work: there is something on disk."""
    begun, children, popen = threading.Event(), [], subprocess.Popen

    def started(*given: Any, **more: Any) -> Any:
        children.append(popen(*given, **more))
        return children[-1]

    monkeypatch.setattr(process, "_CODE", STOPPED.replace("{seconds}", "600"))
    monkeypatch.setattr(process.subprocess, "Popen", started)
    monkeypatch.setattr(jobs.Job, "_told", lambda *progress: begun.set())

    def found() -> subprocess.Popen[bytes]:
        assert begun.wait(HANG)
        monkeypatch.undo()
        return children[0]

    return found


@pytest.mark.parametrize("way", thorough(["killed", "cancelled", "abandoned"]))
def test_a_child_that_ends_in_the_middle(
    child: Any, way: str, tmp_path: Path, without_collector: None
) -> None:
    """It publishes nothing and leaves nothing, frees the memory, and the retry succeeds."""
    stager = migrate.Stager(process=True)
    snapshot = stager.stage({"w": torch.ones(MIB)})
    job = snapshot.save_async(tmp_path / "out")
    behind = snapshot.save_async(tmp_path / "behind")
    running = child()
    assert os.listdir(tmp_path) == [partial_folder(tmp_path / "out").name]
    assert not job.done()
    if way == "killed":
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(migrate.MigrateError, match=r"M980.*out.* killed by signal 9"):
            job.result(HANG)
        assert behind.result(HANG).path == str(tmp_path / "behind")
    else:
        if way == "cancelled":
            assert job.cancel()
            assert behind.cancel()
        else:
            stager.close(wait=False)
        for one in (job, behind):
            with pytest.raises(CancelledError, match=one.path):
                one.result(HANG)
        assert os.listdir(tmp_path) == []
    # no process is left behind
    assert running.wait(HANG) < 0
    assert not partial_folder(tmp_path / "out").exists()
    assert snapshot.save_async(tmp_path / "out").result(HANG).tensors == 1
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].eq(1).all()
    del snapshot
    assert not any(block.lent for block in stager._pool._blocks)
    stager.close()


@pytest.mark.parametrize("when", thorough(["thread", "child", "child, all written"]))
def test_a_trainer_that_is_killed_is_no_obstacle_to_the_next(when: str, tmp_path: Path) -> None:
    """The save dies with it, even one that had only to be published."""
    apart = when != "thread"
    script = """
        import os, signal, sys, torch, migrate
        from migrate.staging import jobs

        def told(job, done, total):
            if done == total or "written" not in sys.argv[2]:
                os.kill(os.getpid(), signal.SIGKILL)

        jobs.Job._told = told
        stager = migrate.Stager(process=sys.argv[2] != "thread")
        stager.stage({"w": torch.zeros(1 << 24)}).save_async(sys.argv[1]).result()
    """
    if apart:
        slow = STOPPED.replace("{seconds}", "0.5")
        script = script.replace(
            "def told",
            f"from migrate.staging import process\n        process._CODE = {slow!r}\n\n"
            "        def told",
        )
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "out"), when]
    run = subprocess.run(command, timeout=HANG, check=False, stderr=subprocess.DEVNULL)
    assert run.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == [partial_folder(tmp_path / "out").name]
    snapshot = migrate.Stager().stage({"w": torch.ones(MIB)})
    for _ in range(20 * HANG):
        try:
            snapshot.save(tmp_path / "out")
            break
        except migrate.MigrateError as error:
            if not apart or "one that goes on" not in str(error):
                raise
        time.sleep(0.05)
    assert os.listdir(tmp_path) == ["out"]
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].eq(1).all()


@pytest.mark.thorough
def test_the_interpreter_waits_for_what_computes_and_says_what_failed(tmp_path: Path) -> None:
    """Jobs that have not begun when the program ends; one of them fails, and nobody asks for it."""
    script = """
        import sys, time, torch, migrate
        from migrate.staging import jobs

        begin = jobs.Writer._work
        jobs.Writer._work = lambda writer: (time.sleep(0.5), begin(writer))
        out, rule = sys.argv[1:]
        for apart in (False, True):
            stager = migrate.Stager(process=apart)
            snapshot = stager.stage({"model": {"a": torch.full((1 << 20,), 1.5)}, "n": 3})
            asked = snapshot.migrate(rules=rule, allow={"lossy"})
            asked.save_async(f"{out}/{apart}")
            lost = asked.save_async(f"{out}/gone/{apart}")
            import os
            os.rmdir(f"{out}/gone")
            jobs_left = snapshot.save_async(f"{out}/{apart}.pt")
        print("the end", lost.done(), jobs_left.done())
    """
    rule = tmp_path / "rule.yaml"
    rule.write_text(RULE.replace("}]", ", via: [{cast: {to: bfloat16, from: float32}}]}]"))
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "out"), str(rule)]
    run = subprocess.run(command, timeout=HANG, check=True, capture_output=True, text=True)
    assert run.stdout == "the end False False\n"
    assert sorted(os.listdir(tmp_path / "out")) == ["False", "False.pt", "True", "True.pt"]
    for apart in (False, True):
        made = load_file(tmp_path / "out" / str(apart) / "model.safetensors")
        assert (made["b"].dtype, made["b"].eq(1.5).all().item()) == (torch.bfloat16, True)
        assert f"nothing was published at {tmp_path}/out/gone/{apart}" in run.stderr


def test_an_interrupt_of_a_save_that_is_waited_for_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write(work: Any, progress: Any, stop: threading.Event) -> Any:
        # not before somebody waits, and sleeps in it: what comes in between, the interpreter sees
        # only once the wait is over
        while not progress.__self__._asked:
            time.sleep(0.01)
        time.sleep(0.3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert stop.wait(HANG)
        return jobs.write_here(work, progress, stop)

    monkeypatch.setattr("migrate.staging.stager.write_here", write)
    stager = migrate.Stager()
    with pytest.raises(KeyboardInterrupt):
        stager.stage({"w": torch.ones(2)}).save(tmp_path / "out")
    stager.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("started", [False, True])
def test_an_interrupt_before_the_job_is_there_ends_it(
    started: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody could ask the job or cancel it, and what comes after it must find a writer."""
    stager = migrate.Stager()
    snapshot = stager.stage({"w": torch.ones(2)})
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if started:
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            snapshot.save_async(tmp_path / "out")
    assert not stager._writer._waiting
    job = snapshot.save_async(tmp_path / "next")
    assert job.result(HANG).tensors == 1
    stager.close()
    assert os.listdir(tmp_path) == ["next"]
    del snapshot, job
    assert not any(block.lent for block in stager._pool._blocks)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves fail once it is set."""
    go = threading.Event()

    def write(work: Any, progress: Any, stop: threading.Event) -> Any:
        assert go.wait(HANG)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("migrate.staging.stager.write_here", write)
    return go


def ended(stager: migrate.Stager) -> None:
    """Returns when the writer has nothing left to do."""
    thread = stager._writer._thread
    if thread is not None:
        thread.join(HANG)


@pytest.mark.parametrize("asked", ["never", "in vain", "done", "progress"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_failure_that_nobody_was_told_of_is_logged_and_raised_by_close(
    failing: threading.Event, asked: str, wait: bool, tmp_path: Path, caplog: Any
) -> None:
    """To have asked and given up is not to have been told, nor to know that it has ended."""
    stager = migrate.Stager()
    with caplog.at_level(logging.ERROR, "migrate"):
        job = stager.stage({"w": torch.ones(2)}).save_async(tmp_path / "out")
        if asked == "in vain":
            with pytest.raises(TimeoutError):
                job.exception(0.01)
        failing.set()
        ended(stager)
        assert job.done()
        if asked == "progress":
            assert job.progress == (0, 0)
        with pytest.raises(migrate.MigrateError, match=r"M980(.|\n)*Input/output") as caught:
            stager.close(wait)
    assert str(tmp_path / "out") in str(caught.value)
    assert len(caplog.records) == 1
    assert str(tmp_path / "out") in caplog.text
    # once
    stager.close()


@pytest.mark.parametrize("how", ["result", "exception", "before"])
def test_a_failure_that_somebody_was_told_of_is_not_said_again(
    failing: threading.Event, how: str, tmp_path: Path, caplog: Any
) -> None:
    stager = migrate.Stager()
    job = stager.stage({"w": torch.ones(2)}).save_async(tmp_path / "out")
    told: list[Any] = []
    waiting = threading.Thread(target=lambda: told.append(job.exception(HANG)))
    if how == "before":
        waiting.start()
        while not job._asked:
            time.sleep(0.001)
    failing.set()
    if how == "before":
        waiting.join(HANG)
        assert isinstance(told[0], migrate.MigrateError)
        assert not caplog.records
    elif how == "result":
        with pytest.raises(migrate.MigrateError):
            job.result(HANG)
    else:
        assert isinstance(job.exception(HANG), migrate.MigrateError)
    stager.close()


def test_close_raises_the_first_of_several_failures_after_the_last_job(
    failing: threading.Event, tmp_path: Path, caplog: Any
) -> None:
    stager = migrate.Stager()
    with caplog.at_level(logging.ERROR, "migrate"):
        made = [
            stager.stage({"w": torch.ones(2)}).save_async(tmp_path / name) for name in ("a", "b")
        ]
        failing.set()
        with pytest.raises(migrate.MigrateError, match=str(tmp_path / "a")):
            stager.close()
    assert all(job.done() for job in made)
    assert [str(tmp_path / name) in one.message for name, one in zip("ab", caplog.records)] == [
        True,
        True,
    ]
    stager.close()


def test_a_with_block_raises_what_nobody_asked_for_unless_it_ends_in_an_error_of_its_own(
    failing: threading.Event, tmp_path: Path
) -> None:
    failing.set()
    with pytest.raises(migrate.MigrateError, match="M980"), migrate.Stager() as stager:
        stager.stage({"w": torch.ones(2)}).save_async(tmp_path / "a")

    def goes_wrong() -> None:
        with migrate.Stager() as stager:
            made.append(stager.stage({"w": torch.ones(2)}).save_async(tmp_path / "b"))
            raise KeyError

    made: list[migrate.Job] = []
    with pytest.raises(KeyError):
        goes_wrong()
    assert made[0].done()


def test_a_job_that_is_cancelled_before_its_turn_is_never_begun(
    failing: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[str] = []
    snapshot = migrate.Stager().stage({"w": torch.ones(2)})
    write = snapshot._writer._write  # type: ignore[union-attr]

    def writes(work: Any, *more: Any) -> Any:
        begun.append(work.out.given)
        return write(work, *more)

    monkeypatch.setattr(snapshot._writer, "_write", writes)
    first, second = (snapshot.save_async(tmp_path / name) for name in ("a", "b"))
    assert second.cancel()
    failing.set()
    assert isinstance(second.exception(HANG), CancelledError)
    assert begun == [str(tmp_path / "a")]
    assert [repr(job).split(", ")[1] for job in (first, second)] == ["failed>", "cancelled>"]
    assert first.exception() is not None


def test_one_of_many_threads_gets_a_path(failing: threading.Event, tmp_path: Path) -> None:
    """And the others' memory is free."""
    stager = migrate.Stager()
    snapshot = stager.stage({"w": torch.ones(2)})
    ready, taken, refused = threading.Barrier(8), [], []

    def saves() -> None:
        ready.wait(HANG)
        try:
            taken.append(snapshot.save_async(tmp_path / "out"))
        except migrate.MigrateError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=saves) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(HANG)
    assert (len(taken), len(refused)) == (1, 7)
    assert all("M904" in said for said in refused)
    failing.set()
    assert taken[0].exception(HANG) is not None
    ended(stager)
    snapshot.release()
    assert not any(block.lent for block in stager._pool._blocks)


def test_a_job_that_fails_while_it_is_cancelled_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = threading.Event()

    def write(work: Any, progress: Any, stop: threading.Event) -> Any:
        begun.set()
        assert stop.wait(HANG)
        fail("M909", "no room")

    monkeypatch.setattr("migrate.staging.stager.write_here", write)
    job = migrate.Stager().stage({"w": torch.ones(2)}).save_async(tmp_path / "out")
    assert repr(job) == f"<migrate.Job '{tmp_path / 'out'}', 0 of 0 bytes>"
    assert begun.wait(HANG)
    assert job.cancel()
    with pytest.raises(migrate.MigrateError, match="M909"):
        job.result(HANG)
    assert repr(job) == f"<migrate.Job '{tmp_path / 'out'}', failed>"


def test_a_child_whose_trainer_is_gone_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that was not yet there to be killed with it: it has another parent by then."""
    run = process._CODE.replace("main()", "import os; os.getppid = lambda: 1; main()")
    monkeypatch.setattr(process, "_CODE", run)
    stager = migrate.Stager(process=True)
    job = stager.stage({"w": torch.ones(2)}).save_async(tmp_path / "out")
    with pytest.raises(migrate.MigrateError, match=r"M980(.|\n)*ended with status 0"):
        job.result(HANG)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("apart", thorough([False, True]))
def test_progress_grows_to_the_whole(apart: bool, monkeypatch: Any, tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    told = jobs.Job._told

    def heard(job: jobs.Job, done: int, total: int) -> None:
        said.append((done, total))
        told(job, done, total)

    monkeypatch.setattr(jobs.Job, "_told", heard)
    with migrate.Stager(process=apart) as stager:
        job = stager.stage({"w": torch.ones(16 * MIB)}).save_async(tmp_path / "out")
        job.result(HANG)
    assert job.progress == said[-1]
    assert said == sorted(said)
    assert len(said) > 2
    assert {total for _, total in said} == {job.progress[0]}
    assert job.progress[0] >= 64 * MIB


@pytest.mark.parametrize("apart", thorough([True, False]))
def test_a_rule_file_that_changes_behind_a_job(
    apart: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    """A thread has the plan; a child plans again, from the same folder, and refuses another."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    Path("rule.yaml").write_text(RULE)
    with migrate.Stager(process=apart) as stager:
        migration = stager.stage({"a": torch.ones(2)}).migrate(rules="rule.yaml")
        monkeypatch.chdir(tmp_path)
        migration.save(tmp_path / "first")
        assert set(load_file(tmp_path / "first" / "model.safetensors")) == {"b"}
        Path("there/rule.yaml").write_text(RULE.replace('to: "b"', 'to: "c"'))
        if apart:
            with pytest.raises(migrate.MigrateError, match=r"M903(.|\n)*second"):
                migration.save(tmp_path / "second")
            assert not (tmp_path / "second").exists()
        else:
            migration.save(tmp_path / "second")
            assert set(load_file(tmp_path / "second" / "model.safetensors")) == {"b"}


def test_a_child_imports_nothing_from_the_folder_that_a_trainer_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of data may hold any file, `json.py` too."""
    for name in ("json", "migrate", "torch"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    with migrate.Stager(process=True) as stager:
        stager.stage({"a": torch.ones(2)}).save("out")
    assert sorted(os.listdir(tmp_path)) == ["json.py", "migrate.py", "out", "torch.py"]
