"""What the benchmarks use of the package exists: they run rarely, and it moves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
CHECKPOINT = ROOT / "tests" / "data" / "hf" / "mixtral__v4" / "hub"


@pytest.mark.thorough
def test_each_benchmark_can_be_imported() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert "bench" in names
    child = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(names)}"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr


@pytest.mark.thorough
def test_binding_is_timed_with_the_functions_that_a_plan_calls() -> None:
    command = [
        sys.executable,
        FOLDER / "bind_time.py",
        CHECKPOINT,
        FOLDER / "rules" / "rename.yaml",
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    counts = json.loads(child.stdout)
    assert counts["keys"] == counts["outputs"] > 0
