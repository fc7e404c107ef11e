"""`rearrange` against einops, and what it says when a pattern or a shape does not fit."""

from __future__ import annotations

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate import ops
from migrate.core.view import stored
from migrate.ops.base import OneWay, OpCall, OpError
from migrate.ops.rearrange import parse
from migrate.testing import opkit

OP = ops.get("rearrange")

# (what it is, pattern, axes, shape)
GOLDEN = [
    ("RoPE, interleaved to halves", "(h d two) i -> (h two d) i", {"h": 4, "two": 2}, (32, 6)),
    ("RoPE, halves to interleaved", "(h two d) i -> (h d two) i", {"h": 4, "two": 2}, (32, 6)),
    ("GQA, groups of a fused qkv weight", "(g x) ... -> g x ...", {"g": 2}, (24, 8)),
    ("GQA, groups of a fused qkv bias", "(g x) ... -> g x ...", {"g": 2}, (24,)),
    ("GQA, back to one axis", "g x ... -> (g x) ...", {"g": 2}, (2, 12, 8)),
    ("gpt-oss, gate and up de-interleaved", "e (i two) h -> e (two i) h", {"two": 2}, (4, 12, 5)),
    ("GLU in blocks of 32", "(two b k) h -> (b two k) h", {"two": 2, "k": 32}, (256, 3)),
    ("GLU in blocks, back", "(b two k) h -> (two b k) h", {"two": 2, "k": 32}, (256, 3)),
    (
        "tensor parallel, ranks of a fused weight",
        "(two r x) h -> (r two x) h",
        {"two": 2, "r": 4},
        (48, 3),
    ),
    ("Mamba norm in groups", "(g d) -> g d", {"g": 4}, (16,)),
    ("MLA, heads first", "(a x) k -> a x k", {"a": 4}, (24, 3)),
    ("GPT-2 style Conv1D", "i o -> o i", {}, (3, 5)),
    ("patch embedding", "o (c p q) -> o c p q", {"p": 2, "q": 3}, (4, 18)),
    ("unit axes", "a 1 b -> b () a 1", {}, (3, 1, 2)),
    ("a unit axis inside", "(a 1 b) -> a b", {"a": 3}, (6,)),
    ("rest in the middle", "a ... b -> b ... a", {}, (2, 3, 4, 5)),
    ("rest that is empty", "a ... b -> b ... a", {}, (2, 3)),
    ("a scalar", "->", {}, ()),
    ("no elements", "(a b) c -> c b a", {"a": 2}, (0, 3)),
]


def realised(pattern: str, axes: dict[str, int], array: np.ndarray) -> np.ndarray:
    (view,) = OP.trace(OP.Args(pattern, axes), [stored(0, array.shape)])
    return opkit.realise(view, [array])


@pytest.mark.parametrize(
    ("pattern", "axes", "shape"), [case[1:] for case in GOLDEN], ids=[case[0] for case in GOLDEN]
)
def test_it_is_what_einops_makes(pattern, axes, shape):
    array = opkit.elements(shape)
    expected = einops.rearrange(array, pattern, **axes)
    np.testing.assert_array_equal(realised(pattern, axes, array), expected, strict=True)
    np.testing.assert_array_equal(
        OP.eager(OP.Args(pattern, axes), [array])[0], expected, strict=True
    )


@st.composite
def patterns(draw):
    names = draw(st.permutations("abcde"))[: draw(st.integers(1, 5))]
    lengths = {n: draw(st.integers(1, 4)) for n in names}

    def side():
        groups: list[list[str]] = []
        for name in draw(st.permutations(names)):
            if groups and draw(st.booleans()):
                groups[-1].append(name)
            else:
                groups.append([name])
        return groups

    left, right = side(), side()
    text = " -> ".join(
        " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in s) for s in (left, right)
    )
    return text, lengths, tuple(int(np.prod([lengths[n] for n in g])) for g in left)


@given(patterns())
def test_any_pattern_is_what_einops_makes_and_its_inverse_undoes_it(case):
    pattern, lengths, shape = case
    array = opkit.elements(shape)
    moved = realised(pattern, lengths, array)
    np.testing.assert_array_equal(moved, einops.rearrange(array, pattern, **lengths), strict=True)
    inverse = OP.invert(OP.Args(pattern, lengths))
    assert isinstance(inverse, OpCall)
    np.testing.assert_array_equal(
        realised(inverse.args.pattern, inverse.args.axes, moved), array, strict=True
    )


@given(patterns(), st.data())
def test_with_fewer_lengths_it_is_exact_backwards_or_says_what_it_needs(case, data):
    pattern, lengths, shape = case
    kept = data.draw(st.sets(st.sampled_from(sorted(lengths))))
    args = OP.Args(pattern, {n: lengths[n] for n in kept})
    inverse = OP.invert(args)
    told = [sum(name not in kept for name in group) < 2 for group in parse(pattern).left]
    if not all(told):
        with pytest.raises(OpError, match="not known"):
            OP.trace(args, [stored(0, shape)])
        return
    (view,) = OP.trace(args, [stored(0, shape)])
    if isinstance(inverse, OneWay):
        needed = [n for n in lengths if f"{n}: …" in (inverse.help or "")]
        assert needed
        assert not set(needed) & kept
        inverse = OP.invert(OP.Args(pattern, {**args.axes, **{n: lengths[n] for n in needed}}))
    (back,) = OP.trace(inverse.args, [view])
    array = opkit.elements(shape)
    np.testing.assert_array_equal(opkit.realise(back, [array]), array, strict=True)


@pytest.mark.parametrize(
    ("pattern", "axes", "shape", "code", "words"),
    [
        (
            "(h d) i -> h d i",
            {"h": 5},
            (12, 2),
            "M302",
            ["axis 0 of shape [12, 2] has 12 elements", "divisible by 5 (h = 5) to give d"],
        ),
        ("(h d) i -> h d i", {"h": 0}, (12, 2), "M302", ["divisible by 0 (h = 0)"]),
        (
            "(h d) i -> h d i",
            {"h": 3, "d": 5},
            (12, 2),
            "M301",
            ["12 elements, h = 3, d = 5 makes 15"],
        ),
        ("h i -> i h", {"h": 3}, (12, 2), "M301", ["12 elements, h = 3 makes 3"]),
        (
            "h 1 -> h",
            {},
            (12, 2),
            "M301",
            ["axis 1 of shape [12, 2] has 2 elements, 1 in the pattern makes 1"],
        ),
        (
            "(h d) i -> h d i",
            {},
            (12, 2),
            "M301",
            ["lengths of h and d in axis 0 of shape [12, 2] are not known"],
        ),
        (
            "a b c -> c b a",
            {},
            (12, 2),
            "M304",
            ["names 3 axes, the tensor has rank 2, shape [12, 2]"],
        ),
        ("a b ... -> b a ...", {}, (12,), "M304", ["names at least 2 axes, the tensor has rank 1"]),
    ],
)
def test_a_shape_that_does_not_fit_is_told_with_axis_numbers_and_pattern(
    pattern, axes, shape, code, words
):
    with pytest.raises(OpError) as caught:
        OP.trace(OP.Args(pattern, axes), [stored(0, shape)])
    assert caught.value.code == code
    assert caught.value.message.startswith(f'rearrange "{pattern}": ')
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("pattern", "axes", "word"),
    [
        ("a b", {}, "0 `->`"),
        ("a -> b -> a", {}, "2 `->`"),
        ("a b -> a", {}, "axis b does not stand on the right"),
        ("a -> a b", {}, "axis b does not stand on the left"),
        ("a ... -> a", {}, "axis ... does not stand on the right"),
        ("a a -> a", {}, "a stands twice on one side"),
        ("(a (b c)) -> a b c", {}, "parentheses within parentheses"),
        ("(a b -> a b", {}, "`(` without `)`"),
        ("a b) -> a b", {}, "`)` without `(`"),
        ("a ... -> (a ...)", {}, "`...` in parentheses"),
        ("(a 2) -> a 2", {}, "the length 2"),
        ("_a b -> b _a", {}, "_a is not the name of an axis"),
        ("a, b -> b a", {}, ", is not the name of an axis"),
        ("a .. b -> b a", {}, ". is not the name of an axis"),
        ("a b -> b a", {"c": 2}, "`axes` gives c"),
        ("a ... -> ... a", {"...": 2}, "`axes` gives ..."),
        ("a b -> b a", {"a": -2}, "the length -2"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_told_before_any_tensor_is_seen(pattern, axes, word):
    with pytest.raises(OpError) as caught:
        OP.validate(OP.Args(pattern, axes))
    assert caught.value.code == "M308"
    assert word in caught.value.message
    assert pattern in caught.value.message


def test_a_misspelt_axis_gets_a_hint():
    with pytest.raises(OpError) as caught:
        OP.validate(OP.Args("heads dim -> dim haeds"))
    assert caught.value.help == "did you mean `haeds`?"


def test_a_pattern_is_parsed_once():
    assert parse("(a b) -> a b") is parse("(a b) -> a b")
