"""Made tests hold what two checkpoints held, and show each rule's mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import migrate
from migrate.authoring import writing
from migrate.authoring.compact import compact
from migrate.authoring.examples import Examples, made_tests
from migrate.authoring.relations import Relation
from migrate.core.spec import Spec

PARAMS = {"experts": {"type": "int", "config": "num_experts", "optional": True}}
HEADER = writing.FileHead(
    "made/new/rules", "Made", "made", ("old", "new"), params=PARAMS, schema="x/rulefile.schema.json"
)


def numbered(shape: tuple[int, ...], start: int) -> Any:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.uint32).reshape(shape)


@pytest.fixture
def checkpoints() -> tuple[dict[str, Any], dict[str, Any], list[Relation]]:
    """Two layers of four experts, joined by numpy, and what else a layer has."""
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}
    relations = []
    start = 1
    for n in range(2):
        for e in range(4):
            for w in ("gate", "up"):
                old[f"l.{n}.experts.{e}.{w}.weight"] = numbered((6, 8), start)
                start += 48
        keys = [f"l.{n}.experts.{e}.{w}.weight" for w in ("gate", "up") for e in range(4)]
        halves = [np.stack([old[k] for k in keys[at : at + 4]]) for at in (0, 4)]
        new[f"l.{n}.experts.gate_up"] = np.concatenate(halves, axis=1)
        relations.append(
            Relation(
                tuple(keys),
                (f"l.{n}.experts.gate_up",),
                ({"stack": {"count": "$experts"}}, {"concat": {"dim": 1}}),
            )
        )
        old[f"l.{n}.wo.weight"] = numbered((5, 7), start)
        start += 35
        new[f"l.{n}.o_proj.weight"] = old[f"l.{n}.wo.weight"].T
        relations.append(
            Relation(
                (f"l.{n}.wo.weight",), (f"l.{n}.o_proj.weight",), ({"transpose": {"dims": [0, 1]}},)
            )
        )
        for a, b in (("ln1", "norm1"), ("ln2", "norm2")):
            old[f"l.{n}.{a}.weight"] = new[f"l.{n}.{b}.weight"] = numbered((9,), start)
            start += 9
            relations.append(Relation((f"l.{n}.{a}.weight",), (f"l.{n}.{b}.weight",)))
    return old, new, relations


def made(
    checkpoints: tuple[dict[str, Any], dict[str, Any], list[Relation]], folder: Path
) -> tuple[Path, Examples]:
    old, new, relations = checkpoints
    specs = {key: Spec("float32", array.shape) for key, array in old.items()}
    params = {"experts": 4}
    drafts = compact(relations, params=params)
    found = made_tests(drafts, relations, specs, (old.__getitem__, new.__getitem__), HEADER, params)
    path = folder / "made.yaml"
    path.write_text(writing.text(drafts, HEADER, found.tests))
    return path, found


def test_each_rule_gets_a_small_test_that_passes_and_lint_finds_nothing(
    checkpoints: Any, tmp_path: Path
) -> None:
    path, found = made(checkpoints, tmp_path)
    assert found.untested == ()
    assert all(len(str(test)) < 2500 for test in found.tests)
    assert migrate.test([path]).passed
    assert [d.code for d in migrate.lint([path]).diagnostics] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("{w:gate|up}", "{w:up|gate}"),
        ("dim: 1", "dim: 2"),
        ("via: [{transpose: {dims: [0, 1]}}]", "via: []"),
        ("{ln1: norm1, ln2: norm2}", "{ln1: norm2, ln2: norm1}"),
    ],
)
def test_a_mistake_in_a_made_rule_fails_its_test(
    checkpoints: Any, tmp_path: Path, right: str, wrong: str
) -> None:
    path, _ = made(checkpoints, tmp_path)
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    assert not migrate.test([path]).passed


def test_a_rule_whose_elements_are_all_alike_gets_no_test(checkpoints: Any, tmp_path: Path) -> None:
    old, new, relations = checkpoints
    for key in old:
        if ".wo." in key:
            old[key] = np.ones((50, 70), np.uint32)
            new[key.replace("wo", "o_proj")] = np.ones((70, 50), np.uint32)
    _, found = made((old, new, relations), tmp_path)
    assert found.untested == ("l-o-proj",)


def test_values_that_the_rules_do_not_make_are_no_test(checkpoints: Any, tmp_path: Path) -> None:
    old, new, relations = checkpoints
    new["l.0.norm1.weight"] = new["l.0.norm1.weight"][::-1]
    _, found = made((old, new, relations), tmp_path)
    assert found.untested == ("l",)
