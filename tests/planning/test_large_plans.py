"""Plans of many keys and of many files: the work grows as these do, and no faster."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT, rules, shards
from header_files import write_headers
from work import HANG, steps

import migrate

pytestmark = pytest.mark.heavy

RULES = """rules:
  - {name: stack, from: 'l.{i:int}.e.{j:int}.w', to: 'l.{i}.w', via: [{stack: {over: j}}]}
  - {name: rename, from: 'l.{i:int}.n', to: 'l.{i}.m'}
"""
# of a group: the members of a stack, and what is renamed
MEMBERS = 49
# of a power law through counts, which are the same in every run: what is linear, with a part that
# does not grow
LINEAR = (0.9, 1.2)
# and through what is measured: 2 where each key is compared with each other one, and little where
# what does not grow takes most of it
ABOUT = (0.5, 1.5)


def fitted(taken: dict[int, float]) -> float:
    """The exponent of a power law through what each size takes, by least squares."""
    points = [(math.log(size), math.log(found)) for size, found in taken.items()]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    above = sum((a - x) * (b - y) for a, b in points)
    return above / sum((a - x) ** 2 for a, _ in points)


def within(bounds: tuple[float, float], taken: dict[int, float]) -> bool:
    least, most = bounds
    found = fitted(taken)
    if not least < found < most:
        print(f"exponent {found:.3f} of", taken)
    return least < found < most


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
# seconds of the processor that the plan of each place takes, the least of some rounds in turns
TIMES = """
import sys, migrate
from functools import partial
from pathlib import Path
sys.path.append(sys.argv[1])
from work import processor
options = dict(rules=[Path(sys.argv[2])], max_shard_size=int(sys.argv[3]))
plans = [partial(migrate.plan, Path(place), **options) for place in sys.argv[4:]]
rounds = [[processor(plan, best_of=1) for plan in plans] for _ in range(4)]
print(*map(min, zip(*rounds)))
"""


def planned(rule: Path, size: int) -> Callable[[Path], Any]:
    return lambda place: migrate.plan(place, rules=[rule], max_shard_size=size)


def counted(places: dict[int, Path], plan: Callable[[Path], Any]) -> dict[int, float]:
    """The lines of Python that the plan of each place runs."""
    for place in places.values():
        plan(place)
    return {count: float(steps(partial(plan, place))) for count, place in places.items()}


def times(places: dict[int, Path], rule: Path, size: int) -> dict[int, float]:
    """Seconds of the processor in a process of its own, which has no garbage of others."""
    found = ended(TIMES, str(ROOT / "tests"), str(rule), str(size), *map(str, places.values()))
    return dict(zip(places, map(float, found.split()), strict=True))


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
    assert within(LINEAR, counted(places, planned(rule, 5 * 10**9)))
    small, *others = many_keys(tmp_path, 5_000, held // 4, held // 2, held).items()
    assert within(ABOUT, peaks(dict(others), small[1], rule, 5 * 10**9))


def test_planning_is_linear_in_files(tmp_path: Path) -> None:
    places, rule = many_files(tmp_path, 500, 1_000, 2_000), rules(tmp_path, RULES)
    # as many files come out as go in
    for count, place in places.items():
        assert len(planned(rule, 48)(place).report.target.files) >= count
    assert within(LINEAR, counted(places, planned(rule, 48)))
    (small,) = many_files(tmp_path, 20).values()
    assert within(ABOUT, peaks(places, small, rule, 48))


@pytest.mark.thorough
def test_so_is_what_python_does_in_c(tmp_path: Path) -> None:
    rule = rules(tmp_path, RULES)
    keys = many_keys(tmp_path / "keys", 50_000, 100_000, 200_000)
    assert within(ABOUT, times(keys, rule, 5 * 10**9))
    assert within(ABOUT, times(many_files(tmp_path / "files", 500, 1_000, 2_000), rule, 48))
