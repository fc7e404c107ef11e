"""Loads through a reader that migrates which do not come to a good end, on several ranks: all of
them end with an error that says whose fault it is and what is written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import ROOT, environment
from ranks import Ranks
from work import HANG

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]


def test_ranks_that_ask_for_different_layouts_are_named(ranks: Start) -> None:
    ranks(2).run("dcp_trouble_case", "other_layouts")


@pytest.mark.parametrize("world", [2, 3])
def test_shapes_and_placements_that_cannot_be_served(
    world: int, ranks: Start, old: str, rules: str
) -> None:
    ranks(world).run("dcp_trouble_case", "other_shapes_and_placements", old, rules)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_fails_says_on_all_what_it_has_written(
    world: int, ranks: Start, old: str, rules: str
) -> None:
    ranks(world).run("dcp_trouble_case", "fails_in_the_middle", old, rules)


def test_a_rank_that_is_killed_ends_the_others(old: str, rules: str, tmp_path: Path) -> None:
    folders = [str(ROOT), str(ROOT / "tests"), *(str(ROOT / "tests" / n) for n in ("live", "cli"))]
    script = str(ROOT / "tests" / "live" / "dcp_trouble_case.py")
    world = 3
    children = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world), str(tmp_path / "store"), old, rules],
            env={**environment(), "PYTHONPATH": ":".join(folders), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [child.communicate(timeout=HANG) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0, 7], said
    for out, err in said[:-1]:
        # the last line: gloo of torch 2.8 prints others
        found = json.loads(out.splitlines()[-1])
        # the process group's own error is the cause, because torch asks all ranks how it went
        assert "M965" in found["error"], err
        assert "has written 7 tensors, and the model is written in part" in found["error"]
        assert "Error" in found["cause"]
        assert found["written"] == 7
