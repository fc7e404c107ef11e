"""Relations that are found between two checkpoints in memory, op by op, and what is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from raw_states import applied, bits, opened

from migrate.authoring.infer import Inferred, infer
from migrate.authoring.infer.wholes import apart
from migrate.authoring.relations import Relation
from migrate.core.errors import MigrateError

Arrays = dict[str, np.ndarray]


def inferred(old: Arrays, new: Arrays, dtype: str, **options: Any) -> Inferred:
    sides = ({k: (dtype, a) for k, a in side.items()} for side in (old, new))
    return infer(*map(opened, sides), **options)


def gqa(old: Arrays) -> Arrays:
    """Two groups of three queries, a key and a value, of width 4."""
    heads = old["qkv"].reshape(2, 5, 4, 24)
    parts = {"q": heads[:, :3], "k": heads[:, 3], "v": heads[:, 4]}
    return {name: part.reshape(-1, 24) for name, part in parts.items()}


def rotary(array: np.ndarray) -> np.ndarray:
    rest = array.shape[1:]
    return array.reshape(-1, 2, 4, *rest).swapaxes(1, 2).reshape(array.shape)


def experts(old: Arrays) -> Arrays:
    both = [np.concatenate([old[f"e.{i}.gate"], old[f"e.{i}.up"]]) for i in range(3)]
    return {"gate_up": np.stack([one.T for one in both])}


CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[Arrays], Arrays], list[str]]] = {
    "rename": ({"a": (6, 8)}, lambda o: {"b": o["a"]}, []),
    "transpose": ({"a": (6, 8)}, lambda o: {"b": o["a"].T}, ["transpose"]),
    "permute": ({"a": (2, 3, 4, 8)}, lambda o: {"b": o["a"].transpose(2, 0, 3, 1)}, ["permute"]),
    "reshape": ({"a": (6, 8)}, lambda o: {"b": o["a"].reshape(4, 12)}, ["reshape"]),
    "unsqueeze": ({"a": (6, 8)}, lambda o: {"b": o["a"][:, None]}, ["unsqueeze"]),
    "squeeze": ({"a": (6, 1, 8)}, lambda o: {"b": o["a"][:, 0]}, ["squeeze"]),
    "rotary": ({"a": (64, 24)}, lambda o: {"b": rotary(o["a"])}, ["rearrange"]),
    "rotary bias": ({"a": (64,)}, lambda o: {"b": rotary(o["a"])}, ["rearrange"]),
    "concat": (
        {"q": (8, 16), "k": (4, 16), "v": (4, 16)},
        lambda o: {"qkv": np.concatenate(list(o.values()))},
        ["concat"],
    ),
    "concat of rotary ones": (
        {"q": (32, 16), "k": (16, 16), "v": (16, 16)},
        lambda o: {"qkv": np.concatenate([rotary(o["q"]), rotary(o["k"]), o["v"]])},
        ["rearrange", "concat"],
    ),
    "split": (
        {"a": (12, 8)},
        lambda o: {"x": o["a"][:6], "y": o["a"][6:8], "z": o["a"][8:]},
        ["split"],
    ),
    "interleaved": (
        {"a": (12, 8)},
        lambda o: {"x": o["a"][::2], "y": o["a"][1::2]},
        ["rearrange", "unbind"],
    ),
    "by group": ({"qkv": (40, 24)}, gqa, ["rearrange", "split", "rearrange"]),
    "stack": ({"a": (6, 8), "b": (6, 8)}, lambda o: {"c": np.stack([o["a"], o["b"]])}, ["stack"]),
    "unbind": ({"a": (2, 6, 8)}, lambda o: {"x": o["a"][0], "y": o["a"][1]}, ["unbind"]),
    "experts": (
        {f"e.{i}.{w}": (16, 24) for i in range(3) for w in ("gate", "up")},
        experts,
        ["transpose", "stack", "concat"],
    ),
    "pad": ({"a": (6, 8)}, lambda o: {"b": np.pad(o["a"], ((0, 2), (0, 0)))}, ["pad"]),
    "slice": ({"a": (6, 8)}, lambda o: {"b": o["a"][1:5]}, ["slice"]),
    "roll": ({"a": (6, 8)}, lambda o: {"b": np.roll(o["a"], 2, 0)}, ["roll"]),
    "copy": ({"a": (6, 8)}, lambda o: {"a": o["a"], "b": o["a"]}, ["copy"]),
    "drop": ({"a": (6, 8), "gone": (8,)}, lambda o: {"a": o["a"]}, ["drop"]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_each_op_is_found_and_holds_for_other_weights(case: str, dtype: str) -> None:
    shapes, made, ops = CASES[case]
    seed = np.random.default_rng(7)
    olds: list[Arrays] = [{k: bits(seed, dtype, s) for k, s in shapes.items()} for _ in range(2)]
    found = inferred(olds[0], made(olds[0]), dtype)
    assert (found.questions, found.unexplained) == ((), ())
    assert [next(iter(op)) for r in found.relations for op in r.ops] == ops
    assert found.matched == found.total
    got = applied(found.relations, {k: (dtype, a) for k, a in olds[1].items()})
    wanted = made(olds[1])
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[key][1], array) for key, array in wanted.items())


def test_a_cast_before_a_transpose_is_found() -> None:
    seed = np.random.default_rng(1)
    wide = seed.standard_normal((6, 8)).astype("<f4")
    old = opened({"a": ("float32", wide.view("<u4"))})
    new = opened({"b": ("float16", wide.astype("<f2").view("<u2").T)})
    (relation,) = infer(old, new).relations
    assert [next(iter(op)) for op in relation.ops] == ["cast", "transpose"]


def test_a_power_of_two_is_found() -> None:
    wide = np.random.default_rng(1).standard_normal((6, 8)).astype("<f4")
    found = inferred({"a": wide.view("<u4")}, {"b": (wide * 0.125).view("<u4")}, "float32")
    (relation,) = found.relations
    assert relation.ops == ({"affine": {"mul": 0.125, "exact": True}},)


def test_equal_tensors_that_names_cannot_tell_apart_are_asked_and_an_answer_decides() -> None:
    ones = np.full(8, 0x3F800000, "<u4")
    old = {f"l.{i}.{w}_norm": ones for i in range(2) for w in ("input", "post")}
    new = {f"b.{i}.norm{n}": ones for i in range(2) for n in (1, 2)}
    found = inferred(old, new, "float32")
    assert [q.target for q in found.questions] == ["b.{n:int}.norm1", "b.{n:int}.norm2"]
    assert {c for c, _ in found.questions[0].candidates} == {
        "l.{n:int}.input_norm",
        "l.{n:int}.post_norm",
    }
    answers = {"l.{n:int}.input_norm": "b.{n}.norm1", "l.{n:int}.post_norm": "b.{n}.norm2"}
    found = inferred(old, new, "float32", answers=answers)
    assert not found.questions
    assert {r.sources[0]: r.targets[0] for r in found.relations}["l.1.post_norm"] == "b.1.norm2"


def test_an_answer_that_is_not_true_is_refused() -> None:
    seed = np.random.default_rng(2)
    old, new = ({k: bits(seed, "float32", (4, 4))} for k in "ab")
    with pytest.raises(MigrateError, match="is not true"):
        inferred(old, new, "float32", answers={"a": "b"})


@pytest.mark.heavy
def test_a_tensor_that_differs_in_one_element_is_named_with_its_index() -> None:
    old = {"a": bits(np.random.default_rng(3), "bfloat16", (12, 16))}
    other = old["a"].copy()
    other[3, 4] ^= 1
    (rest,) = inferred(old, {"b": other}, "bfloat16").unexplained
    assert (rest.key, "1 of 192" in rest.why, "[3, 4]" in rest.why) == ("b", True, True)


def test_other_weights_match_nothing() -> None:
    seed = np.random.default_rng(4)
    found = inferred(*({"a": bits(seed, "float32", (8, 8))} for _ in range(2)), "float32")
    assert (found.matched, [u.key for u in found.unexplained]) == (0, ["a"])


def test_constants_follow_their_neighbours_and_are_marked() -> None:
    seed = np.random.default_rng(5)
    old = {f"{w}.weight": bits(seed, "float32", (8, 8)) for w in "qkv"}
    new = {"qkv.weight": np.concatenate(list(old.values())), "qkv.bias": np.zeros(24, "<u4")}
    old |= {f"{w}.bias": np.zeros(8, "<u4") for w in "qkv"}
    by_target = {r.targets: r for r in inferred(old, new, "float32").relations}
    bias, weight = by_target["qkv.bias",], by_target["qkv.weight",]
    assert (bias.ops, bias.guessed, weight.guessed) == (weight.ops, True, False)


def test_constants_of_one_rank_follow_those_of_another() -> None:
    """Both are the same backwards."""
    flat = np.array([1, 1], "<u4")
    old = {"g.a@0": np.array([1, 0], "<u4"), "g.a@1": flat}
    new = {"h.a@0": old["g.a@0"][::-1], "h.a@1": flat}
    first, second = inferred(old, new, "float32").relations
    assert [next(iter(op)) for op in first.ops] == ["flip"]
    assert (second.ops, second.guessed) == (first.ops, True)


def test_tensors_that_share_a_value_by_chance_are_no_whole() -> None:
    """Parts of two tensors, one of each equal: nothing has to be joined to cut it again."""
    relation = Relation(
        ("a", "b", "c"),
        ("u", "v", "w", "x"),
        ({"concat": {"dim": 0, "sizes": [2, 2, 1]}}, {"split": {"dim": 0, "sizes": [1, 1, 2, 1]}}),
    )
    assert [(r.sources, r.targets, r.ops) for r in apart(relation)] == [
        (("a",), ("u", "v"), ({"split": {"dim": 0, "count": 2}},)),
        (("b",), ("w",), ()),
        (("c",), ("x",), ()),
    ]
    across = replace(
        relation, ops=({"concat": {"dim": 0, "count": 3}}, {"split": {"dim": 0, "count": 4}})
    )
    assert apart(across) == [across]


def test_nans_scalars_and_empty_tensors_go_along() -> None:
    nan = np.full((4, 4), 0x7FC00000, "<u4")
    state = {"nan": nan, "scalar": np.array(3, "<u4"), "empty": np.zeros((0, 4), "<u4")}
    found = inferred(state, state, "float32")
    assert not found.questions
    assert all(r.sources == r.targets and not r.ops for r in found.relations)


def test_headers_give_marked_guesses_and_ask_where_names_come_near() -> None:
    def headers(*names: str) -> Arrays:
        return {f"layers.{i}.{n}.weight": np.zeros((4, 4), "<u4") for i in range(2) for n in names}

    found = inferred(headers("q_proj", "out"), headers("q", "out"), "float32", headers=True)
    assert not found.questions
    assert all(r.guessed for r in found.relations)
    assert {r.targets[0] for r in found.relations if "q_proj" in r.sources[0]} == {
        "layers.0.q.weight",
        "layers.1.q.weight",
    }
    found = inferred(headers("a1", "a2"), headers("b1", "b2"), "float32", headers=True)
    assert len(found.questions) == 2


def test_ranks_of_joined_tensors_are_joined_and_cut() -> None:
    def ranks(seed: int) -> Arrays:
        dice = np.random.default_rng(seed)
        return {f"qkv@{r}": bits(dice, "bfloat16", (40, 24)) for r in range(2)}

    def made(old: Arrays) -> Arrays:
        heads = np.concatenate([old[f"qkv@{r}"] for r in range(2)]).reshape(4, 5, 4, 24)
        parts = {"q": heads[:, :3], "k": heads[:, 3], "v": heads[:, 4]}
        return {name: part.reshape(-1, 24) for name, part in parts.items()}

    def unmade(new: Arrays) -> Arrays:
        joined = [new["q"].reshape(4, 12, 24), new["k"].reshape(4, 4, 24)]
        whole = np.concatenate([*joined, new["v"].reshape(4, 4, 24)], 1).reshape(-1, 24)
        return {f"qkv@{r}": whole[40 * r : 40 * r + 40] for r in range(2)}

    for seeds, way in (([ranks(1), ranks(2)], made), ([made(ranks(1)), made(ranks(2))], unmade)):
        (relation,) = inferred(seeds[0], way(seeds[0]), "bfloat16").relations
        got = applied([relation], {k: ("bfloat16", a) for k, a in seeds[1].items()})
        wanted = way(seeds[1])
        assert got.keys() == wanted.keys()
        assert all(np.array_equal(got[key][1], array) for key, array in wanted.items())


@pytest.mark.parametrize("back", [False, True])
def test_a_name_that_is_near_to_its_neighbours_is_asked_by_headers(back: bool) -> None:
    # what is before the attention is called after the attention on one side, and input on the other
    names = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    shape = ("float32", np.zeros(8, "<u4"))
    sides = [
        {f"{stem}.{n}.{name}.weight": shape for n in range(2) for name in side}
        for stem, side in (("layers", names), ("model.layers", names.values()))
    ]
    old, new = sides[::-1] if back else sides
    found = infer(opened(old), opened(new), headers=True)
    assert found.relations == ()
    assert len(found.questions) == 2
    assert all(len(question.candidates) == 2 for question in found.questions)


def test_numbers_in_words_that_count_from_elsewhere_are_asked_by_headers() -> None:
    shape = ("float32", np.zeros(8, "<u4"))
    old, new = (
        {f"{stem}.{n}.norm{k}.weight": shape for n in range(2) for k in counted}
        for stem, counted in (("blocks", (0, 1)), ("layers", (1, 2)))
    )
    found = infer(opened(old), opened(new), headers=True)
    assert found.relations == ()
    same = {key.replace("blocks", "layers"): held for key, held in old.items()}
    assert len(infer(opened(old), opened(same), headers=True).relations) == 4
