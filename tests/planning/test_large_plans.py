"""Plans of many keys and of many files: the work grows as these do, and no faster."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from commandline import ROOT, rules, shards
from header_files import write_headers
from work import HANG, processor

import migrate

pytestmark = pytest.mark.heavy

RULES = """rules:
  - {name: stack, from: 'l.{i:int}.e.{j:int}.w', to: 'l.{i}.w', via: [{stack: {over: j}}]}
  - {name: rename, from: 'l.{i:int}.n', to: 'l.{i}.m'}
"""
# of a group: the members of a stack, and what is renamed
MEMBERS = 49
# between 1, where work is linear, and 2, where each key is compared with each other one
ROOM = 1.5
# where what does not grow with the size takes most of the time
LEAST = 0.5


def exponent(plan: Callable[[Path], object], places: dict[int, Path]) -> float:
    """The exponent of a power law through the processor time that the plans take: the least of
    rounds in turns, because a virtual machine is at times half as fast as before. There are more
    of them as long as it is not that of work that grows with the size.
    """
    taken = dict.fromkeys(places, math.inf)
    for number in range(9):
        if number >= 3 and LEAST < fitted(taken) < ROOM:
            break
        for size, place in places.items():
            taken[size] = min(taken[size], processor(partial(plan, place), best_of=1))
    return fitted(taken)


def fitted(taken: dict[int, float]) -> float:
    """The exponent of a power law through what each size takes, by least squares."""
    points = [(math.log(size), math.log(found)) for size, found in taken.items()]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    above = sum((a - x) * (b - y) for a, b in points)
    return above / sum((a - x) ** 2 for a, _ in points)


def keys_of(count: int) -> list[str]:
    groups = range(count // (MEMBERS + 1))
    return [
        key for i in groups for key in (*(f"l.{i}.e.{j}.w" for j in range(MEMBERS)), f"l.{i}.n")
    ]


# the memory that a plan takes beside what a small one does
# (that of getrusage would begin with what the parent held when it forked)
PEAK = """
import re, sys, migrate
from pathlib import Path
def most(place):
    migrate.plan(Path(place), rules=[Path(sys.argv[1])], max_shard_size=int(sys.argv[2]))
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
small, large = map(most, sys.argv[3:])
print(large - small)
"""


def peaks(places: dict[int, Path], small: Path, rule: Path, size: int) -> dict[int, float]:
    """KiB of memory that the plan of each place takes at its peak, in a process of its own."""
    return {
        count: float(ended(PEAK, str(rule), str(size), str(small), str(place)))
        for count, place in places.items()
    }


def ended(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def many_keys(folder: Path, *counts: int) -> dict[int, Path]:
    places = {}
    for count in counts:
        tensors = dict.fromkeys(keys_of(count), ("uint8", (16,)))
        assert len(tensors) == count
        places[count] = write_headers(folder / str(count), tensors)
    return places


def many_files(folder: Path, *counts: int) -> dict[int, Path]:
    places = {}
    for count in counts:
        parts = [
            {f"l.{i}.n": ("U8", [16]), f"l.{i}.e.0.w": ("U8", [16]), f"l.{i}.e.1.w": ("U8", [16])}
            for i in range(count)
        ]
        places[count] = shards(folder / str(count), parts)
    return places


@pytest.mark.parametrize(
    ("most", "held"),
    [(50_000, 40_000), pytest.param(200_000, 80_000, marks=pytest.mark.thorough)],
)
def test_planning_is_linear_in_keys(tmp_path: Path, most: int, held: int) -> None:
    places, rule = many_keys(tmp_path, most // 4, most // 2, most), rules(tmp_path, RULES)
    assert LEAST < exponent(lambda place: migrate.plan(place, rules=[rule]), places) < ROOM
    small, *others = many_keys(tmp_path, 5_000, held // 4, held // 2, held).items()
    assert LEAST < fitted(peaks(dict(others), small[1], rule, 5 * 10**9)) < ROOM


def test_planning_is_linear_in_files(tmp_path: Path) -> None:
    places, rule = many_files(tmp_path, 500, 1_000, 2_000), rules(tmp_path, RULES)

    def plan(place: Path) -> None:
        # as many files come out as go in
        made = migrate.plan(place, rules=[rule], max_shard_size=48)
        assert len(made.report.target.files) >= len(list(place.glob("*.safetensors")))

    assert LEAST < exponent(plan, places) < ROOM
    (small,) = many_files(tmp_path, 20).values()
    assert LEAST < fitted(peaks(places, small, rule, 48)) < ROOM
