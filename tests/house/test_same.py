"""The comparison of two commits can say no: each kind of difference of two answers is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import same


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"exit": 0}, {"exit": 1}),
        ({"json": {"digest": "a"}}, {"json": {"digest": "b"}}),
        ({"json": {"a": 1}}, {"json": {}}),
        ({"json": {}}, {"json": {"a": None}}),
        ({"files": {"x": "1"}}, {"files": {"y": "1"}}),
        ({"json": [1]}, {"json": [1, 2]}),
        ({"json": {"code": "M101"}}, {"json": {"code": "M102"}}),
        ({"json": {"message": "a"}}, {"json": {"message": None}}),
        ({"json": {"notes": ["a"]}}, {"json": {"notes": ["a", "b"]}}),
    ],
)
def test_a_difference_is_found(old: Any, new: Any) -> None:
    assert [text for text, soft in same.differences(old, new) if not soft]
    assert not list(same.differences(old, old))


def test_only_the_wording_of_a_text_for_people_may_differ() -> None:
    old = {"json": {"message": "no", "free": 1, "notes": [{"text": "a"}]}}
    new = {"json": {"message": "not", "free": 2, "notes": [{"text": "b"}]}}
    assert [soft for _, soft in same.differences(old, new)] == [True, True]
