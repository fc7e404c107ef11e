from __future__ import annotations

import pytest
from rule_text import load_text

from migrate.rules.model import semantic_hash

TEXT = """
id: a/b
title: t
lineage: a
edge: [one, two]
params: {n: {type: int, optional: true}}
keep: [x, y]
rules:
  - {name: r, from: {u: "{p...}.u", v: "{p...}.v"}, to: {u: "{p}.w", v: "{p}.x"}, via: [{flip: {dim: 0}}]}
  - {name: s, from: "{p...}.{w:a|b}.c", to: "{p}.d", via: [{concat: {over: w, count: $n}}]}
  - {name: d, from: "z", via: [{drop: {why: gone}}]}
  - {name: o, from: a, to: b, inverse: {refuse: why}}
"""  # noqa: E501


def hashed(text: str) -> str:
    return semantic_hash(load_text(text, "r").model)


def test_the_hash_names_its_version() -> None:
    assert hashed(TEXT).startswith("m1:")
    assert len(hashed(TEXT)) == 67


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("title: t", "title: another # with a comment\nwhy: because"),
        ("lineage: a\nedge: [one, two]", "edge:\n  - one\n  - 'two'\nlineage: \"a\""),
        ("{type: int, optional: true}", "{optional: true, title: how many, type: int}"),
        ("[x, y]", "[y, x]"),
        ("{dim: 0}", "{ 'dim' : 0 }"),
        ("{over: w, count: $n}", '{count: "$n", over: w, dim: 0}'),
        ("why: gone", "why: nobody wants it"),
        ("refuse: why", "refuse: another reason"),
        ("id: a/b", 'id: a/b\nrequires: ">=0.1"\ntests: [{name: t, given: {}, expect: {}}]'),
        ("via: [{flip: {dim: 0}}]", "via: [{flip: {dim: 0}}], optional: false, if_exists: error"),
    ],
)
def test_what_means_the_same_has_the_same_hash(old: str, new: str) -> None:
    assert old in TEXT
    assert hashed(TEXT.replace(old, new)) == hashed(TEXT)


def test_the_order_of_rules_means_nothing() -> None:
    head, *rules = TEXT.split("\n  - ")
    assert hashed(head + "".join(f"\n  - {r}" for r in reversed(rules))) == hashed(TEXT)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("id: a/b", "id: a/c"),
        ("edge: [one, two]", "edge: [two, one]"),
        ("optional: true", "optional: false"),
        ("[x, y]", "[x]"),
        ("{dim: 0}", "{dim: 1}"),
        ("{over: w, count: $n}", "{over: w}"),
        ('{u: "{p...}.u", v: "{p...}.v"}', '{v: "{p...}.v", u: "{p...}.u"}'),
        ("name: s,", "name: s, optional: true,"),
        ("name: s,", "name: s, where: {w: [a]},"),
        ("name: s,", "name: s, keep_source: true,"),
        ('"{p}.d"', '"{p}.e"'),
        (", inverse: {refuse: why}", ", inverse: skip"),
        (", inverse: {refuse: why}", ""),
    ],
)
def test_what_means_something_else_has_another_hash(old: str, new: str) -> None:
    assert old in TEXT
    assert hashed(TEXT.replace(old, new)) != hashed(TEXT)


def test_what_is_done_where_no_stamp_is_may_be_added_to_rules_that_were_applied() -> None:
    files = "files: {c.json: {a: null}}\n"
    assert hashed(TEXT + files) != hashed(TEXT)
    assert hashed(TEXT + files + "files_back: {c.json: {a: 1}}\n") == hashed(TEXT + files)
