"""Expressions match what `re.match` matches, in time linear in the text."""

from __future__ import annotations

import random
import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from migrate.core.regexes import LONGEST, RegexError, Regexes

ATOMS = ["a", "b", "c", "0", ".", r"\.", r"\d", r"\w", r"\D", "[ab]", "[^a]", "[a-c1]", "[.-]", "{"]


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,1}", "{1,}", "*?", "+?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        inner.map("({})".format),
        st.tuples(inner, repeated).map("(?:{0[0]}){0[1]}".format),
        inner.map("^{}".format),
        inner.map("{}$".format),
    )


EXPRESSIONS = st.recursive(st.sampled_from(ATOMS), nested, max_leaves=8)
AHEAD = st.one_of(
    EXPRESSIONS,
    st.tuples(st.sampled_from(["(?!{})", "^(?!{})", "(?={})"]), EXPRESSIONS, EXPRESSIONS).map(
        lambda t: t[0].format(t[1]) + t[2]
    ),
)


@given(AHEAD, st.text(alphabet="abc0.\n{", max_size=7))
@example("(?!a)(?:a|b)", "b")
@example("a$", "a\n")
def test_what_re_matches_is_matched_and_nothing_else(expression: str, text: str) -> None:
    mine = Regexes([expression])
    assert mine.match(text) is (re.match(expression, text) is not None)
    # an end that is found is one that `re` can be made to stop at
    for end in range(len(text) + 1):
        stops = re.match(rf"(?:{expression})(?<=\A{re.escape(text[:end])})", text) if end else None
        if end:
            assert (end in set(mine.ends(text))) is (stops is not None), end


def test_one_of_several_is_enough() -> None:
    several = Regexes(["x", r"model\.layers\.\d+\.mlp\.gate$", "(?!.*experts)lm"])
    assert several.match("model.layers.12.mlp.gate")
    assert not several.match("model.layers.12.mlp.gate_proj")
    assert several.match("lm_head")
    assert not several.match("lm.experts")
    assert not Regexes([]).match("")


def test_a_pattern_that_keeps_re_busy_for_years_takes_no_longer_than_others() -> None:
    text = "a" * 20_000
    steps = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal steps
        steps += event == "call"

    hostile = Regexes(["(?:a*)*(?:a|a)*(?:a+)+b"])
    sys.setprofile(count)
    try:
        assert not hostile.match(text)
    finally:
        sys.setprofile(None)
    assert steps < 4 * len(text)


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("a(?<=a)", "`(?<=` at 1"),
        ("a(?=b)", "`(?=b` at 1"),
        ("(?i)a", "`(?i)` at 0"),
        (r"(a)\1", r"`\1` at 3"),
        (r"\bgate", r"`\b` at 0"),
        ("a++", "a possessive repetition"),
        ("a**", "a repetition of a repetition"),
        ("*a", "nothing to repeat"),
        ("(a", "`(` without `)`"),
        ("a)", "`)` without `(`"),
        ("[a", "`[` without `]`"),
        ("[b-a]", "a range that is none"),
        ("a\\", "a backslash at its end"),
        ("a{3,2}", "a repetition from 3 to 2"),
        ("((((((((((a{9}){9}){9}){9}){9}){9}){9}){9}){9}){9})", "make it too large"),
        ("(" * 60 + "a" + ")" * 60, "nested more than 50 deep"),
        ("a" * (LONGEST + 1), f"it has {LONGEST + 1} characters"),
        ("(?!a)b|c", "a look ahead in one of several alternatives"),
    ],
)
def test_what_is_not_read_is_refused_with_its_text(expression: str, why: str) -> None:
    with pytest.raises(RegexError) as caught:
        Regexes(["fine", expression])
    assert why in str(caught.value)
    assert expression[:40] in str(caught.value)


def test_what_re_refuses_is_refused() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(3000):
        # no `[`: of nested sets `re` says that their meaning may change
        text = "".join(rng.choice("ab.*+?()]{}|^$\\,12") for _ in range(rng.randrange(1, 7)))
        try:
            re.compile(text)
        except (re.error, OverflowError):
            refused += 1
            with pytest.raises(RegexError):
                Regexes([text])
    assert refused > 500
