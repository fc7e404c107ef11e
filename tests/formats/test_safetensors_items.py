"""`migrate.items.json`: what it says comes back, and what somebody else wrote into it is refused or
does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import migrate
from migrate.core.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = torch.nn.Linear(2, 2).state_dict()
    torch.save(
        {"model": model, "rng": torch.ones(3), "lr": 0.1, "args": {"a": (1, 2)}}, tmp_path / "in.pt"
    )
    migrate.apply(tmp_path / "in.pt", tmp_path / "st", output_format="safetensors")
    return tmp_path / "st"


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "migrate.items.json"
    document = json.loads(path.read_text())
    changed = change(document)
    text = json.dumps(document if changed is None else changed)
    path.write_text(text.replace('"@deep"', "[" * 100_000 + "]" * 100_000))


def root(document: Any) -> list[Any]:
    return document["parts"][0]["root"]["dict"]  # type: ignore[no-any-return]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "no document of ours": lambda d: [1],
    "no parts": lambda d: d.update(parts=5),
    "a part that is none": lambda d: d.update(parts=[5]),
    "a path that leads nowhere": lambda d: d["parts"][0].update(at=["nowhere"]),
    "a path that is none": lambda d: d["parts"][0].update(at=[1]),
    "a name outside the allow-list": lambda d: root(d).append(
        ["x", {"call": [["os", "system"], ["true"]]}]
    ),
    "a name as a value": lambda d: root(d).append(["x", {"name": ["builtins", "eval"]}]),
    "a tensor that is not there": lambda d: root(d).append(["x", {"tensor": "nowhere"}]),
    "a tensor twice and one not at all": lambda d: root(d)[0][1]["pairs"].__setitem__(
        0, ["weight", {"tensor": "bias"}]
    ),
    "a carried tensor among the weights": lambda d: root(d)[0][1]["pairs"].append(
        ["more", {"tensor": "/rng"}]
    ),
    "a tie to nothing": lambda d: root(d)[0][1]["pairs"].__setitem__(
        0, ["weight", {"tensor": "weight", "tied": "nowhere"}]
    ),
    "a flag that is none": lambda d: root(d)[0][1]["pairs"].__setitem__(
        0, ["weight", {"tensor": "weight", "parameter": 1}]
    ),
    "a key twice": lambda d: root(d).append(["lr", 2]),
    "something that goes back on itself": lambda d: root(d).append(
        ["x", {"id": 0, "is": [{"ref": 0}]}]
    ),
    "a reference to nothing": lambda d: root(d).append(["x", {"ref": 7}]),
    "an unknown word": lambda d: root(d).append(["x", {"exec": 1}]),
    "bytes that are none": lambda d: root(d).append(["x", {"bytes": "?"}]),
    "more than can be held": lambda d: root(d).append(["x", "@deep"]),
    "deeper than anybody nests": lambda d: root(d).append(["x", deep(300)]),
    "a member of a set twice": lambda d: root(d).append(["x", {"set": [1, True]}]),
    "a container as a key": lambda d: root(d).append([["x"], 1]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_migrate_does_not_write_is_refused(what: str, folder: Path, tmp_path: Path) -> None:
    edit(folder, HOSTILE[what])
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(folder, tmp_path / "out.pt", output_format="torch")
    assert {d.code for d in caught.value.diagnostics} <= {
        "M906",
        "M914",
        "M932",
        "M933",
        "M935",
        "M936",
    }
    assert not (tmp_path / "out.pt").exists()


def test_the_weights_alone_are_left_when_the_files_are_removed(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("migrate.items.json", "migrate.items.safetensors"):
        (folder / name).unlink()
    migrate.apply(folder, tmp_path / "out.pt", output_format="torch")
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)) == {"weight", "bias"}


def test_others_load_the_weights_and_nothing_else(folder: Path) -> None:
    from safetensors.torch import load_file

    assert set(load_file(folder / "model.safetensors")) == {"weight", "bias"}


def test_a_value_that_was_changed_by_hand_goes_back_as_it_is_now(
    folder: Path, tmp_path: Path
) -> None:
    edit(folder, lambda d: root(d).append(["more", [1.5, None, "x"]]))
    migrate.apply(folder, tmp_path / "out.pt", output_format="torch")
    assert torch.load(tmp_path / "out.pt", weights_only=True)["more"] == [1.5, None, "x"]
