"""What the parts of a checkpoint have beside the model, kept in one tree and taken out of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.errors import CheckpointError
from migrate.source.by_part import (
    PARTS,
    difference,
    names_of,
    of_part,
    with_parts,
    without_parts,
)
from migrate.source.pickle.jsonform import to_json
from migrate.source.pickle.tree import DictNode, ListNode, Storage, TensorRecord
from migrate.source.target import node_of
from migrate.source.tree import FileTree

STORAGE = Storage("0", None, "cpu", 4, 1)


def tensor() -> TensorRecord:
    return TensorRecord("uint8", STORAGE, 0, (4,), (1,), False, None)


def node(value: Any, kind: str = "dict") -> Any:
    """Dicts and lists as nodes; a pair (kind, dict) is a dict of that kind."""
    if isinstance(value, dict):
        return DictNode(kind, tuple((key, node(held)) for key, held in value.items()), None)
    if isinstance(value, list):
        return ListNode("list", tuple(map(node, value)), None)
    if type(value) is tuple:
        return ListNode("tuple", tuple(map(node, value)), None)
    return value


def namespace(**fields: Any) -> DictNode:
    return node(fields, "Namespace")


def text(value: Any) -> str:
    """All that is written of a value."""
    return repr(to_json(node_of(value)))


def tree(root: dict[str, Any]) -> FileTree:
    return FileTree(node({"model": {"w": tensor()}, **root}), ("model",))


def kept(*roots: dict[str, Any]) -> FileTree:
    first, *others = map(tree, roots)
    return with_parts(first, [(f"part {n}", one) for n, one in enumerate(others, 1)], "part 0")


def entry(root: Any, name: str) -> Any:
    return root.get(PARTS).get(name)


def test_only_what_differs_is_kept() -> None:
    args = [namespace(rank=r, layers=4, dtype="bf16") for r in range(2)]
    roots = [{"iteration": 10, "args": held, "seed": 100 + r} for r, held in enumerate(args)]
    root = kept(*roots).root
    assert names_of(root) == ["part 0", "part 1"]
    assert text(entry(root, "part 0")) == text(node({}))
    assert text(entry(root, "part 1")) == text(node({"args": {"rank": 1}, "seed": 101}))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])
    | st.sampled_from(["", "a", "b" * 300])
    | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "c", 1, 0]), inner, max_size=3)
    ),
    max_leaves=8,
)
roots = st.dictionaries(st.sampled_from(["args", "rng", "n", "parts of", "z"]), values, max_size=5)


@given(
    st.lists(roots, min_size=2, max_size=4), st.sampled_from(["dict", "Namespace", "OrderedDict"])
)
def test_every_part_has_its_own_root_back(all_roots: list[dict[str, Any]], kind: str) -> None:
    """Values to the bit, types of numbers, kinds of dicts and the order of keys."""
    parts = [tree(root) for root in all_roots]
    mixed = [
        FileTree(
            DictNode(
                "dict",
                tuple(
                    (key, DictNode(kind, value.pairs, None))
                    if number % 2 and key == "args" and type(value) is DictNode
                    else (key, value)
                    for key, value in part.root.pairs
                ),
                None,
            ),
            part.at,
        )
        for number, part in enumerate(parts)
    ]
    first, *others = mixed
    names = [f"part {number}" for number in range(len(mixed))]
    root = with_parts(first, list(zip(names[1:], others, strict=True)), names[0]).root
    for name, part in zip(names, mixed, strict=True):
        assert text(of_part(root, name)) == text(part.root)
    assert text(without_parts(root)) == text(first.root)


def test_keys_in_another_order_come_back_in_it() -> None:
    one, other = {"a": 1, "b": 2, "c": 3}, {"c": 3, "a": 1, "d": 5}
    root = kept(one, other).root
    assert [key for key, _ in of_part(root, "part 1").pairs] == ["model", "c", "a", "d"]


def test_the_model_is_that_of_the_first_part_and_kept_once() -> None:
    one, other = tree({"a": 1}), tree({"a": 2})
    root = with_parts(one, [("part 1", other)], "part 0").root
    assert of_part(root, "part 1").get("model") is one.root.get("model")
    assert text(entry(root, "part 1")) == text(node({"a": 2}))


def test_values_with_tensors_are_those_of_the_part() -> None:
    """Of tensors no header tells whether they are equal."""
    mine = tensor()
    root = kept({"rng": [{"t": tensor(), "n": 1}]}, {"rng": [{"t": mine, "n": 1}]}).root
    assert of_part(root, "part 1").get("rng").items[0].get("t") is mine


def test_what_parts_keep_of_others_is_kept_of_the_first() -> None:
    """Ranks that are joined, each of parts that were."""
    ranks = [
        with_parts(
            tree({"rank": 2 * r, "seed": r}),
            [(f"{r}_1", tree({"rank": 2 * r + 1, "seed": r}))],
            f"{r}_0",
        )
        for r in range(2)
    ]
    root = with_parts(ranks[0], [("1_0", ranks[1])], "0_0").root
    assert names_of(root) == ["0_0", "0_1", "1_0", "1_1"]
    found = [of_part(root, name) for name in names_of(root)]
    assert [one.get("rank") for one in found] == [0, 1, 2, 3]
    assert [one.get("seed") for one in found] == [0, 0, 1, 1]
    assert all(PARTS not in dict(one.pairs) for one in found)


def test_a_part_of_which_nothing_is_kept_has_no_root() -> None:
    assert of_part(kept({"a": 1}, {"a": 2}).root, "part 7") is None
    assert of_part(node({"a": 1}), "part 0") is None


@pytest.mark.parametrize(
    "own",
    [7, {}, {"a": 1}, {"a": {"b": 1}}, {1: {}}, [1]],
    ids=["a number", "empty", "of numbers", "no first part", "numbered", "a list"],
)
def test_values_of_another_program_are_not_taken_for_what_is_kept(own: Any) -> None:
    root = node({"model": {}, PARTS: own})
    assert names_of(root) == []
    assert without_parts(root) is root


@pytest.mark.parametrize(
    "entry",
    [7, [1], (1, 2, 3), {"a": (1, 2, 3)}, {"a": ({}, 5)}, ({}, ["a"]), ({}, 5), ({"a": 1}, [])],
    ids=repr,
)
def test_what_was_changed_by_hand_is_refused(entry: Any) -> None:
    root = node({"model": {}, "a": {"b": 1}, PARTS: {"first": {}, "other": entry}})
    assert names_of(root) == ["first", "other"]
    with pytest.raises(CheckpointError) as caught:
        of_part(root, "other")
    assert [d.code for d in caught.value.diagnostics] == ["M906"]
    assert "other" in caught.value.diagnostics[0].message


def test_a_difference_of_two_equal_dicts_is_empty() -> None:
    one, other = ({"a": [1, {"b": (2.0, None)}], "c": "d" * 300} for _ in range(2))
    assert not difference(node(one), node(other)).pairs
