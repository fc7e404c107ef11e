"""Saves by a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from built import V5, state_of
from disks import mounted
from work import HANG

import migrate
from migrate.running.publish import partial_folder
from migrate.staging import jobs, process


def test_a_child_process_writes_the_same_bytes(tmp_path) -> None:
    state = {"model": state_of(V5), "step": 1000, "e": torch.empty(0)}
    reports = []
    for apart in (False, True):
        with migrate.Stager(process=apart) as stager:
            job = stager.stage(state).migrate(to="hf-mixtral@v4").save_async(tmp_path / str(apart))
            reports.append(job.result(HANG))
        assert job.progress[0] == job.progress[1] > 0
    assert reports[0].digest == reports[1].digest
    for file in (tmp_path / "False").iterdir():
        assert file.read_bytes() == (tmp_path / "True" / file.name).read_bytes()


@pytest.mark.parametrize("apart", [False, True])
def test_a_full_disk_leaves_nothing_behind_and_a_retry_succeeds(tmp_path, apart) -> None:
    stager = migrate.Stager(process=apart)
    with mounted(tmp_path / "disk", "4m") as disk:
        (disk / "other").write_bytes(bytes(3 << 20))
        snapshot = stager.stage({"w": torch.ones(500_000)})
        job = snapshot.save_async(disk / "out")
        with pytest.raises(migrate.MigrateError) as caught:
            job.result(HANG)
        assert [d.code for d in caught.value.diagnostics] == ["M909"]
        assert str(disk / "out") in str(caught.value)
        assert "--resume" not in str(caught.value)
        assert os.listdir(disk) == ["other"]
        (disk / "other").unlink()
        assert snapshot.save_async(disk / "out").result(HANG).path == str(disk / "out")
    stager.close()


@pytest.mark.parametrize("way", ["killed", "cancelled"])
def test_a_child_that_is_killed_publishes_nothing_and_a_retry_succeeds(
    tmp_path, monkeypatch, way
) -> None:
    begun, children = threading.Event(), []
    popen = subprocess.Popen

    def started(command, **given):
        # it stops where a real one would write
        code = (
            "import sys, time\nsys.stdin.buffer.read()\n"
            f"import os\nos.makedirs({str(partial_folder(tmp_path / 'out') / 'data')!r})\n"
            f"f = open({str(partial_folder(tmp_path / 'out') / 'journal.jsonl')!r}, 'w')\n"
            "print('{\"progress\": [1, 2]}', flush=True)\ntime.sleep(600)\n"
        )
        children.append(popen([sys.executable, "-c", code], **given))
        return children[-1]

    monkeypatch.setattr(jobs.Job, "_told", lambda *progress: begun.set())
    stager = migrate.Stager(process=True)
    snapshot = stager.stage({"w": torch.ones(2)})
    with monkeypatch.context() as patched:
        patched.setattr(process.subprocess, "Popen", started)
        job = snapshot.save_async(tmp_path / "out")
        assert begun.wait(HANG)
    assert os.listdir(tmp_path) == ["out.migrate-partial"]
    if way == "killed":
        os.kill(children[0].pid, signal.SIGKILL)
        with pytest.raises(migrate.MigrateError, match=r"M980.*out.* killed by signal 9"):
            job.result(HANG)
    else:
        assert job.cancel()
        with pytest.raises(CancelledError):
            job.result(HANG)
    assert os.listdir(tmp_path) == []
    assert snapshot.save_async(tmp_path / "out").result(HANG).path
    stager.close()


def test_the_interpreter_waits_for_jobs_at_its_exit(tmp_path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch, migrate
        for apart in (False, True):
            stager = migrate.Stager(process=apart)
            for n in range(2):
                stager.stage({"w": torch.full((1000,), n)}).save_async(f"{sys.argv[1]}/{apart}{n}")
        """
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=HANG)
    assert sorted(os.listdir(tmp_path)) == ["False0", "False1", "True0", "True1"]
