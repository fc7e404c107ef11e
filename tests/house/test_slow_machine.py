"""The default tests on a machine that is busy with something else: nothing in them depends on how
fast it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUSY = "while True: pass"


@pytest.mark.campaign
def test_the_suite_passes_beside_a_busy_loop_on_each_core() -> None:
    cores = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else range(os.cpu_count() or 1)
    )
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in cores]
    try:
        if hasattr(os, "sched_setaffinity"):
            for core, loop in zip(cores, loops, strict=True):
                os.sched_setaffinity(loop.pid, {core})
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        suite = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert all(loop.poll() is None for loop in loops)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert suite.returncode == 0, suite.stdout[-4000:] + suite.stderr[-1000:]
