"""Whether two patterns share a key: what `common` denies no key shows, and what it answers is such a key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.keys import TwoReadings, parse
from migrate.core.overlap import common


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
    one, other = parse("model.{p...}.experts.{e:int}.{w:w1|w3}.weight"), parse("{q...}.experts.{n}.w3.{leaf}")
    key = common(one.parts, other.parts)
    assert key is not None
    assert one.match(key) is not None
    assert other.match(key) is not None


SEGMENTS = st.sampled_from(["a", "b", "a1", "7", "{n}", "{i:int}", "{w:a|b.c}", "x{m}", "{v:a|b.c}2"])
MIDDLES = st.lists(SEGMENTS, min_size=1, max_size=3, unique=True).map(".".join)
PATTERNS = st.tuples(st.sampled_from(["", "{p...}."]), MIDDLES, st.sampled_from(["", ".{k...}"])).map("".join)
KEYS = st.lists(st.sampled_from(["a", "b", "c", "a1", "7", "12", "xa", "x7", "a2"]), min_size=1, max_size=5).map(".".join)


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
