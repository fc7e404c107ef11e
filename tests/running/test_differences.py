"""Values beside the tensors are compared one by one, whatever they are called and whatever they are
made of.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import migrate

MADE: dict[str, Any] = {
    "list": [1, 2], "tuple": (1, 2), "deque": deque([1, 2]), "size": torch.Size([1, 2]),
    "set": {1, 2}, "frozenset": frozenset({1, 2}),
    "numbers": {0: 1, 1: 2}, "texts": {"0": 1, "1": 2}, "ordered": OrderedDict({0: 1, 1: 2}),
    "counter": Counter({0: 1, 1: 2}),
    "list in a tuple": ([1],), "tuple in a list": [(1,)], "nothing": [], "no keys": {},
    "none": None,
}  # fmt: skip


def saved(path: Path, value: Any) -> Path:
    torch.save({"state_dict": {"w": torch.ones(2)}, "config": value}, path)
    return path


def test_values_of_the_same_numbers_in_other_containers_differ(tmp_path: Path) -> None:
    paths = {name: saved(tmp_path / f"{name}.pt", value) for name, value in MADE.items()}
    for one, other in combinations(MADE, 2):
        assert not migrate.diff(paths[one], paths[other]).equal, (one, other)
    again = {name: saved(tmp_path / f"{name} again.pt", value) for name, value in MADE.items()}
    assert all(migrate.diff(paths[name], again[name]).equal for name in MADE)


@pytest.mark.parametrize("config", [{"a.b": 9, "a": {"b": 2}}, {"a.b": 1, "a": {"b": 9}}])
def test_each_of_two_values_whose_paths_are_spelled_alike_is_compared(
    config: dict[str, Any], tmp_path: Path
) -> None:
    one, other = (
        saved(tmp_path / "one.pt", {"a.b": 1, "a": {"b": 2}}),
        saved(tmp_path / "other.pt", config),
    )
    assert len(migrate.inspect(one).to_json()["items"]) == 2
    assert not migrate.diff(one, other).equal
    migrate.apply(one, tmp_path / "made.pt", output_format="torch")
    assert migrate.verify(tmp_path / "made.pt", source=one).equal


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": {"a": 1.0, "b": 2.0}}, {"model": {"b": 2.0, "a": 1.0}}),
        (
            {"model": {"w": 1.0}, "optim": {"x": 1.0, "y": 2.0}},
            {"model": {"w": 1.0}, "optim": {"y": 2.0, "x": 1.0}},
        ),
        (
            {"model": {"w": 1.0}, "args": OrderedDict(p=1, q=2)},
            {"model": {"w": 1.0}, "args": OrderedDict(q=2, p=1)},
        ),
    ],
)
def test_another_order_of_keys_is_listed_as_not_compared(
    one: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    def with_tensors(value: Any) -> Any:
        if isinstance(value, float):
            return torch.full((2,), value)
        if isinstance(value, dict):
            return type(value)((key, with_tensors(held)) for key, held in value.items())
        return value

    paths = [tmp_path / "one.pt", tmp_path / "other.pt", tmp_path / "again.pt"]
    for path, value in zip(paths, (one, other, one), strict=True):
        torch.save(with_tensors(value), path)
    found = migrate.diff(paths[0], paths[1])
    assert found.equal
    (entry,) = found.to_json()["not_compared"]
    first = list(one["model"]) if len(one["model"]) > 1 else list(list(one.values())[1])
    assert entry["what"].startswith("the order of keys, which differs from ")
    assert entry["what"].removesuffix(" on").endswith(first[0])
    assert migrate.diff(paths[0], paths[2]).to_json()["not_compared"] == []
