"""Saves by a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from built import V5, state_of
from disks import mounted
from work import HANG

import migrate


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
