"""Whether two patterns share a key: what `common` denies no key shows, and what it answers is such
a key.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.keys import TwoReadings, parse
from migrate.core.overlap import common, shared_key, takes


def shared(one: str, other: str) -> str | None:
    first, second = parse(one), parse(other)
    found = common(first.parts, second.parts)
    assert (found is None) == (common(second.parts, first.parts) is None)
    return found


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.b", "a.c"),
        ("a.b", "a.b.c"),
        ("{n:int}.w", "x.w"),
        ("{n}.w", "a.b.w"),
        ("{p...}.a.w", "{p...}.b.w"),
        ("{p...}.experts.{e:int}.w1", "{p...}.experts.{e:int}.w2"),
        ("{w:a|b}.x", "{w:c|d}.x"),
        ("a.{k...}", "ab.{k...}"),
        ("a{n}", "a"),
        ("x.{k...}.y", "x.z"),
        ("w@{r:int}", "w@x"),
    ],
)
def test_patterns_that_share_no_key(one: str, other: str) -> None:
    assert shared(one, other) is None


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("a.b", "a.b", "a.b"),
        ("{n}.w", "7.w", "7.w"),
        ("{p...}.w", "w", "w"),
        ("a.{k...}", "a", "a"),
        ("{p...}.{w:q|k.v}.b", "x.k.v.b", "x.k.v.b"),
        ("{k...}", "a.{n:int}.b7", "a.7.b7"),
        ("{a}x{b}", "xxx", "xxx"),
    ],
)
def test_patterns_that_share_a_key(one: str, other: str, key: str) -> None:
    assert shared(one, other) == key


def test_both_patterns_match_the_key_that_is_found() -> None:
    one, other = (
        parse("model.{p...}.experts.{e:int}.{w:w1|w3}.weight"),
        parse("{q...}.experts.{n}.w3.{leaf}"),
    )
    key = common(one.parts, other.parts)
    assert key is not None
    assert one.match(key) is not None
    assert other.match(key) is not None


SEGMENTS = st.sampled_from(
    ["a", "b", "a1", "7", "{n}", "{i:int}", "{w:a|b.c}", "x{m}", "{v:a|b.c}2"]
)
MIDDLES = st.lists(SEGMENTS, min_size=1, max_size=3, unique=True).map(".".join)
PATTERNS = st.tuples(
    st.sampled_from(["", "{p...}."]), MIDDLES, st.sampled_from(["", ".{k...}"])
).map("".join)
KEYS = st.lists(
    st.sampled_from(["a", "b", "c", "a1", "7", "12", "xa", "x7", "a2"]), min_size=1, max_size=5
).map(".".join)


def matches(text: str, key: str) -> bool:
    try:
        return parse(text).match(key) is not None
    except TwoReadings:
        return True


@given(PATTERNS, PATTERNS, KEYS)
def test_a_key_that_both_match_is_never_denied(one: str, other: str, key: str) -> None:
    try:
        parse(one), parse(other)
    except ValueError:
        return
    if matches(one, key) and matches(other, key):
        assert shared(one, other) is not None


@given(PATTERNS, PATTERNS)
def test_the_answer_is_a_key_of_both(one: str, other: str) -> None:
    try:
        parse(one), parse(other)
    except ValueError:
        return
    key = shared(one, other)
    if key:
        assert matches(one, key)
        assert matches(other, key)


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        ("b.{i+13}", "b.{j+13}", "b.13"),
        ("b.{8*i+3}", "b.{8*j+3}", "b.3"),
        ("b.{3*i}", "b.{2*i+1}", "b.3"),
        ("b.{6*i+5}", "b.{10*i+1}", "b.11"),
        ("b.{6*i}", "b.{4*i+2}", "b.6"),
        ("b.{i}.{i+1}", "b.{j}.{j+1}", "b.0.1"),
        ("b.{i}.{2*i}", "b.{j+3}.{j+11}", "b.8.16"),
        ("b.{1000000007*i+1}", "b.{998244353*i+2}", None),
        ("b.{2*i}", "b.{2*i+1}", None),
        ("b.{i}.{i+1}", "b.{j}.{j+2}", None),
        ("b.{i}.{2*i}", "b.{j+3}.{j+4}", None),
        ("b.{2*i+1}", "b.12", None),
        ("b.{3*i+1}.{i}", "b.31.{n}", "b.31.10"),
        ("{k...}", "{m...}", "7"),
    ],
)
def test_index_expressions_are_solved(one: str, other: str, key: str | None) -> None:
    first, second = parse(one, INTS), parse(other, INTS)
    found = shared_key(first, second)
    if "1000000007" in one:
        assert found is not None
        assert takes(first, found)
        assert takes(second, found)
    else:
        assert (found, shared_key(second, first)) == (key, key)


INTS = {name: parse(f"{{{name}:int}}").types[name] for name in "ij"}
NUMBERS = st.tuples(st.integers(1, 6), st.integers(0, 9)).map(
    lambda ab: "{i}" if ab == (1, 0) else f"{{{ab[0]}*i+{ab[1]}}}"
)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_no_small_solution_is_missed(one: str, other: str, third: str) -> None:
    for texts in ((one, other), (f"{one}.{third}", f"{other}.{{i}}")):
        first, second = (parse(text, INTS) for text in texts)
        keys = {first.parts[0].write(i) if len(first.parts) == 1 else None for i in range(40)}
        found = shared_key(first, second)
        if found is not None:
            assert takes(first, found)
            assert takes(second, found)
        elif len(first.parts) == 1:
            assert not any(takes(second, str(key)) for key in keys)
