"""Plans of many keys and of many files: the work grows as these do, and no faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import rules, shards
from header_files import write_headers
from work import processor

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


def exponent(plan: Callable[[Path], object], places: dict[int, Path]) -> float:
    """The exponent of a power law through the processor time that the plans take, by least
    squares.
    """
    points = [
        (math.log(size), math.log(processor(lambda: plan(place), best_of=2)))
        for size, place in places.items()
    ]
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    above = sum((a - x) * (b - y) for a, b in points)
    return above / sum((a - x) ** 2 for a, _ in points)


def keys_of(count: int) -> list[str]:
    groups = range(count // (MEMBERS + 1))
    return [
        key for i in groups for key in (*(f"l.{i}.e.{j}.w" for j in range(MEMBERS)), f"l.{i}.n")
    ]


def test_planning_is_linear_in_keys(tmp_path: Path) -> None:
    places = {}
    for count in (50_000, 100_000, 200_000):
        tensors = dict.fromkeys(keys_of(count), ("uint8", (16,)))
        assert len(tensors) == count
        places[count] = write_headers(tmp_path / str(count), tensors)
    rule = rules(tmp_path, RULES)
    assert 0.5 < exponent(lambda place: migrate.plan(place, rules=[rule]), places) < ROOM


def test_planning_is_linear_in_files(tmp_path: Path) -> None:
    places = {}
    for count in (500, 1_000, 2_000):
        parts = [
            {f"l.{i}.n": ("U8", [16]), f"l.{i}.e.0.w": ("U8", [16]), f"l.{i}.e.1.w": ("U8", [16])}
            for i in range(count)
        ]
        places[count] = shards(tmp_path / str(count), parts)
    rule = rules(tmp_path, RULES)

    def plan(place: Path) -> None:
        # as many files come out as go in
        made = migrate.plan(place, rules=[rule], max_shard_size=48)
        assert len(made.report.target.files) >= len(list(place.glob("*.safetensors")))

    assert 0.5 < exponent(plan, places) < ROOM
