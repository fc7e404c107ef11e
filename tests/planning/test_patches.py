"""Merge patches as RFC 7396 shows them, and the way back: every value, null and order of names
returns.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.planning.patches import (
    apply_patch,
    dump_json,
    fill_patch,
    is_undo,
    json_depth,
    list_changes,
    merge_patch,
    restore_value,
    same_json,
    undo_steps,
)

# the examples of the RFC's appendix whose patch is an object
RFC = [
    ({"a": "b"}, {"a": "c"}, {"a": "c"}),
    ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
    ({"a": "b"}, {"a": None}, {}),
    ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
    ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
    ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
    ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
    ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
    ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
    ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
    ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
]
NAMES = st.sampled_from("abcd")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from([1.0, 0.5, "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=4)


@pytest.mark.parametrize(("target", "patch", "result"), RFC)
def test_the_examples_of_the_rfc_hold(target: Any, patch: dict, result: Any) -> None:
    assert merge_patch(target, patch) == result


@given(OBJECTS, OBJECTS)
def test_what_a_patch_changed_returns_with_its_nulls_its_types_and_its_order(
    before: dict, patch: dict
) -> None:
    kept = json.dumps([before, patch])
    after = merge_patch(before, patch)
    steps = json.loads(json.dumps(undo_steps(before, after)))
    assert is_undo(steps)
    assert json.dumps(restore_value(after, steps)) == json.dumps(before)
    assert json.dumps([before, patch]) == kept, "the arguments were changed"


@given(OBJECTS, OBJECTS)
def test_any_two_objects_are_told_apart_and_the_first_returns_in_value(
    before: dict, after: dict
) -> None:
    found = list_changes(before, after)
    assert bool(found) == (not same_json(before, after))
    assert same_json(restore_value(after, undo_steps(before, after)), before)


def test_a_file_that_was_not_there_goes_again_unless_somebody_wrote_into_it() -> None:
    steps = undo_steps(None, {"a": 1, "b": {"c": 2}})
    assert restore_value({"a": 1, "b": {"c": 2}}, steps) is None
    assert restore_value({"a": 1, "mine": 3}, steps) == {"mine": 3}
    assert restore_value({"a": 1}, undo_steps({}, {"a": 1})) == {}


def test_a_place_that_is_gone_is_not_made_again() -> None:
    steps = undo_steps({"a": {"b": 1}}, {"a": {"b": 2}})
    assert restore_value({"x": 1}, steps) == {"x": 1}
    assert restore_value({"a": 7}, steps) == {"a": 7}


@pytest.mark.parametrize(
    "steps",
    [{}, [[]], [{"was": 1}], [{"at": "a"}], [{"at": [1]}], [{"at": ["a"], "next": 1}], None],
)
def test_what_is_no_undo_is_not_taken_for_one(steps: Any) -> None:
    assert not is_undo(steps)


def test_one_and_true_and_one_point_zero_are_three_values() -> None:
    assert not same_json(1, True)
    assert not same_json(1, 1.0)
    assert not same_json([0], [False])
    assert same_json({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert same_json(float("nan"), float("nan"))


@pytest.mark.parametrize(
    "style",
    [
        {"indent": 2},
        {"indent": 4},
        {"indent": "\t"},
        {},
        {"separators": (",", ":")},
        {"indent": 2, "ensure_ascii": False},
    ],
)
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_document_keeps_the_style_it_is_written_in(style: dict, end: str) -> None:
    value = {"a": [1, {"b": None}], "ü": "é", "c": {}, "d": 1e-05}
    written = json.dumps(value, **style) + end
    assert dump_json(value, written).decode() == written


def test_a_new_document_is_written_as_hugging_face_writes_it() -> None:
    assert dump_json({"a": [1]}) == b'{\n  "a": [\n    1\n  ]\n}\n'


def test_only_a_whole_text_is_a_param_and_an_unset_one_is_not_written() -> None:
    name = re.compile(r"\$([A-Za-z_]\w*)")
    patch = {
        "a": "$n",
        "b": "n is $n",
        "c": "$unset",
        "d": ["$n", "$unset", {"e": "$n"}],
        "f": None,
    }
    assert fill_patch(patch, {"n": 3}, name) == {
        "a": 3,
        "b": "n is $n",
        "d": [3, {"e": 3}],
        "f": None,
    }


def test_null_is_written_where_it_is_asked_for_and_removes_elsewhere() -> None:
    name = re.compile(r"\$([A-Za-z_]\w*)")
    patch = {"a": "$null", "b": {"c": "$null", "d": None}, "e": [None, "$null", {"f": "$null"}]}
    filled = fill_patch(patch, {"null": 3}, name)
    written = {"a": None, "b": {"c": None}, "e": [None, None, {"f": None}]}
    assert merge_patch({}, filled) == written
    old = {"a": 1, "b": {"c": {"x": 1}, "d": 2, "y": None}, "z": 3}
    new = apply_patch(old, [{"z": None}, filled])
    assert new == {"a": None, "b": {"c": None, "y": None}, "e": written["e"]}
    assert json.loads(dump_json(new)) == new
    assert restore_value(new, undo_steps(old, new)) == old


def test_the_depth_of_a_document_is_counted_without_recursion() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    assert json_depth(deep) == 50_000
    assert json_depth({"a": [1, {"b": 2}]}) == 3
    while isinstance(deep, list):
        (deep,) = deep
