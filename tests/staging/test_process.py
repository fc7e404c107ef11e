"""Saves by a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from built import V5, state_of
from disks import mounted
from marks import thorough
from safetensors.torch import load_file
from work import HANG

import migrate
from migrate.running import publish, tiles
from migrate.staging import process


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


# what fills the disk as soon as the first tile is written, in the process that writes
FILLING = """
import os
from migrate.running import publish, tiles
write, full = tiles.write_at, []
def filling(descriptor, data, offset):
    write(descriptor, data, offset)
    if not full and len(data) > 4096:
        full.append(True)
        with open({filler!r}, "wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError as error:
                assert error.errno == 28
tiles.write_at = filling
"""
# as a file system that allocates nothing in advance
UNALLOCATED = "publish._allocate = lambda *given: None\n"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("allocated", thorough([False, True]))
def test_a_disk_that_is_full_in_the_middle(
    apart: bool, allocated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else takes the room while a tensor is written, or behind the tensors, where what
    describes them has none.
    """
    state = {"w": torch.arange(4_000_000), "v": torch.ones(4_000_000)}
    with (
        migrate.Stager(process=apart) as stager,
        mounted(tmp_path / "disk", "64m") as disk,
    ):
        code = FILLING.format(filler=str(disk / "filler")) + ("" if allocated else UNALLOCATED)
        snapshot = stager.stage(state)
        with monkeypatch.context() as patched:
            if apart:
                patched.setattr(
                    process, "_CODE", process._CODE.replace("main()", f"exec({code!r}); main()")
                )
            else:
                patched.setattr(tiles, "write_at", tiles.write_at)
                patched.setattr(publish, "_allocate", publish._allocate)
                exec(code, {})
            error = snapshot.save_async(disk / "out", max_shard_size="20MB").exception(HANG)
        assert isinstance(error, migrate.MigrateError)
        assert [d.code for d in error.diagnostics] == ["M909"]
        assert f"nothing was published at {disk / 'out'}" in str(error)
        assert "--resume" not in str(error)
        assert os.listdir(disk) == ["filler"]
        (disk / "filler").unlink()
        assert snapshot.save_async(disk / "out").result(HANG).tensors == 2
        held = load_file(disk / "out" / "model.safetensors")
        assert all(torch.equal(held[key], x) for key, x in state.items())
        # these are mapped
        del held
        snapshot.release()
        assert not any(block.lent for block in stager._pool._blocks)


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
