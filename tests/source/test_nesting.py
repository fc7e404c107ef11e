"""Dicts inside the dict that rules work on: seen flat, written nested again, and refused where the
way back would be a guess.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.errors import CheckpointError
from migrate.source.nesting import flatten, nest, values_below
from migrate.source.pickle.tree import DictNode


def node(value: Any) -> Any:
    return (
        DictNode("dict", tuple((key, node(held)) for key, held in value.items()), None)
        if type(value) is dict
        else value
    )


def plain(value: Any) -> Any:
    return {key: plain(held) for key, held in value.pairs} if type(value) is DictNode else value


def every_key(value: Any) -> list[str]:
    return (
        [key for name, held in value.items() for key in (name, *every_key(held))]
        if type(value) is dict
        else []
    )


def flat(value: dict[str, Any]) -> dict[str, Any]:
    return plain(flatten(node(value), "f.pt")[0])


def code_of(call: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value.diagnostics[0].code


def test_keys_are_joined_by_dots_and_may_hold_dots_at_their_end() -> None:
    assert flat({"lm": {"embed": {"w": 1}, "layers": {"0.w": 2, "1.w": 3}}, "head": 4}) == {
        "lm.embed.w": 1,
        "lm.layers.0.w": 2,
        "lm.layers.1.w": 3,
        "head": 4,
    }


VALUES = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(
        st.sampled_from(["a", "b", "a.b", "c", "b.c"]), inner, max_size=3
    ),
)


@given(st.dictionaries(st.sampled_from(["a", "b", "a.b", "c", "b.c"]), VALUES, max_size=4))
def test_what_is_flattened_comes_back_or_is_refused(value: dict[str, Any]) -> None:
    try:
        made, nests = flatten(node(value), "f.pt")
    except CheckpointError:
        # `test_keys_that_could_belong_to_two_dicts_are_refused` says which those are
        assert any("." in key for key in every_key(value))
        return
    assert all(type(held) is not DictNode or "." in key for key, held in made.pairs)
    assert plain(nest(made, nests)) == value


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": 1}, "a.b": 2},
        {"a": {"b": {"c": 1}, "b.c": 2}},
        {"a.b": {"c": 1}, "a": {"b": {"d": 1}}},
        {"a.b": {"c": 1}, "a": {"b.d": 2}},
    ],
)
def test_keys_that_could_belong_to_two_dicts_are_refused(value: dict[str, Any]) -> None:
    assert code_of(lambda: flatten(node(value), "f.pt")) == "M945"


def test_a_dict_that_was_emptied_stays_and_what_returns_lies_in_it_again() -> None:
    made, nests = flatten(node({"a": {"w": 1}, "b": {"v": 2}}), "f.pt")
    moved = DictNode("dict", (("new.w", 1), ("b.v", 2)), None)
    there = nest(moved, nests)
    assert plain(there) == {"new.w": 1, "b": {"v": 2}, "a": {}}
    _, nests = flatten(there, "f.pt")
    assert plain(nest(DictNode("dict", made.pairs, None), nests)) == {
        "a": {"w": 1},
        "b": {"v": 2},
    }


def test_a_tensor_called_like_a_dict_is_refused() -> None:
    _, nests = flatten(node({"a": {"b": {"w": 1}}}), "f.pt")
    for key in ("a", "a.b"):
        assert (
            code_of(lambda key=key: nest(DictNode("dict", ((key, 1), ("a.b.w", 1)), None), nests))
            == "M916"
        )


def test_a_dict_that_stands_in_two_places_is_not_entered() -> None:
    shared = node({"w": 1})
    for _ in range(60):
        shared = DictNode("dict", (("x", shared), ("y", shared)), None)
    assert values_below(shared) is None


def test_numbers_as_keys_are_no_names() -> None:
    assert values_below(node({"a": 1, 2: 3})) is None
    assert values_below(node({"a": 1, "s": {2: 3}})) is not None


def test_names_that_would_fill_the_memory_are_not_joined() -> None:
    long = "x" * (1 << 20)
    assert values_below(node({str(n): {long: n} for n in range(100)})) is None
    assert values_below(node({str(n): {long: n} for n in range(10)})) is not None


def test_a_key_of_dots_is_told_in_no_time() -> None:
    dots = "." * (1 << 20)
    made, nests = flatten(node({"a": {"w": 1, dots: 2}, dots: 3}), "f.pt")
    assert plain(nest(made, nests)) == {"a": {"w": 1, dots: 2}, dots: 3}


STATE = {
    "state": {"a.w": {"step": 1, "exp_avg": 2}, "b": {"step": 3}},
    "param_groups": "settings",
}


def test_the_state_of_parameters_is_seen_by_their_whole_names() -> None:
    made, nests = flatten(node(STATE), "f.pt")
    assert plain(made) == {
        "state.a.w.step": 1,
        "state.a.w.exp_avg": 2,
        "state.b.step": 3,
        "param_groups": "settings",
    }
    assert plain(nest(made, nests)) == STATE
    new = {"state.x.y.w.step": 1, "state.a.step": 3, "state.count": 4, "param_groups": "settings"}
    assert plain(nest(node(new), nests)) == {
        "state": {"x.y.w": {"step": 1}, "a": {"step": 3}, "count": 4},
        "param_groups": "settings",
    }


@pytest.mark.parametrize(
    "state",
    [{"a.w": {"step": {"x": 1}}}, {"a.w": {"exp.avg": 1}}, {"a.w": {"step": 1}, "count": 2}],
)
def test_only_a_dict_for_each_parameter_is_its_state(state: dict[str, Any]) -> None:
    found = [plain(value) for value in values_below(node({"state": state})) or ()]
    assert found == list(state.values())
