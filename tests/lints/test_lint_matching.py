"""Patterns that take everything, nothing, or what another rule takes."""

from __future__ import annotations

import pytest
from written_rules import LAYOUTS, Lineage


def found(lineage: Lineage, body: str, *only: str) -> list[str]:
    lineage.rules(body)
    return [d.message for d in lineage.found(*only)]


@pytest.mark.parametrize(
    ("pattern", "everything"),
    [("{k...}", True), ("{k...}.weight", False), ("{p...}.{leaf}", True), ("{top}.{k...}", True), ("{leaf}", False)],
)
def test_a_keep_that_matches_every_key_is_found(lineage: Lineage, pattern: str, everything: bool) -> None:
    messages = found(lineage, f'keep: ["{pattern}"]\nrules: [{{name: a, from: "old.{{i:int}}.w", to: "new.{{i}}.w"}}]\n', "M612")
    assert bool(messages) is everything


def test_a_rule_from_x_to_x_needs_a_broader_one(lineage: Lineage) -> None:
    same = '  - {name: same, from: "old.head.w", to: "old.head.w"}\n'
    assert found(lineage, "rules:\n" + same, "M613")
    assert not found(lineage, "rules:\n" + same + '  - {name: a, from: "old.{n}.w", to: "new.{n}.w"}\n', "M613")
    assert not found(lineage, 'rules:\n  - {name: up, from: "old.{i:int}.w", to: "old.{i+1}.w"}\n', "M613")


def test_a_rule_whose_alternatives_all_belong_to_narrower_rules_takes_nothing(lineage: Lineage) -> None:
    wide = 'rules:\n  - {name: wide, from: "{p...}.{w:a|b}", to: "{p}.x.{w}"}\n  - {name: a, from: "{p...}.a", to: "{p}.1"}\n'
    assert not found(lineage, wide, "M614")
    assert found(lineage, wide + '  - {name: b, from: "{p...}.b", to: "{p}.2"}\n', "M614") == [
        "rule `wide` never takes a key: narrower rules take all of them"
    ]
    assert not found(lineage, wide + '  - {name: b, from: "{p...}.b", to: "{p}.2", when: {ndim: 2}}\n', "M614")


def test_two_rules_for_one_key_are_found_with_the_key(lineage: Lineage) -> None:
    two = 'rules:\n  - {name: a, from: "old.{i:int}.{w}", to: "a.{i}.{w}"}\n  - {name: b, from: "old.{n}.w", to: "b.{n}"}\n'
    assert found(lineage, two, "M615") == ["rules `a` and `b` both take `old.7.w`, and neither is narrower"]
    assert not found(lineage, two.replace("{w}", "w").replace('to: "a.{i}.w', 'to: "a.{i}.w'), "M615")


def test_conditions_may_divide_the_keys(lineage: Lineage) -> None:
    two = (
        'rules:\n  - {name: a, from: "old.{x}.{w}", to: "a.{x}.{w}", when: {ndim: 1}}\n  - {name: b, from: "{y}.0.{w}", to: "b.{y}.{w}"}\n'
    )
    assert not found(lineage, two, "M615")
    assert found(lineage, two.replace(", when: {ndim: 1}", ""), "M615")
    assert not found(lineage, two.replace("when: {ndim: 1}", "keep_source: true"), "M615")


def test_files_of_an_edge_may_not_read_one_key_even_where_one_is_narrower(lineage: Lineage) -> None:
    lineage.rules('rules: [{name: a, from: "old.{i:int}.w", to: "new.{i}.w"}]\n')
    lineage.rules('rules: [{name: b, from: "old.0.w", to: "new.x.w"}]\n', "second")
    (finding,) = lineage.found("M615")
    assert "two files of one edge" in finding.message
    assert {s.file.rpartition("/")[2] for s in finding.spans} == {"first.yaml", "second.yaml"}


THREE = LAYOUTS + "  v3: {title: third, note: n}\n"


@pytest.mark.parametrize(
    ("second", "reachable"),
    [
        ('{name: b, from: "new.{i:int}.w", to: "x.{i}"}', True),
        ('{name: b, from: "new.{i:int}.ww", to: "x.{i}"}', False),
        ('{name: b, from: "new.{i:int}.ww", to: "x.{i}", optional: true}', True),
        ('{name: b, from: "kept.{k...}", to: "x.{k}"}', True),
        ('{name: b, from: "old.{i:int}.w", to: "x.{i}"}', False),
        ('{name: b, from: "{k...}.w", to: "x.{k}"}', True),
    ],
)
def test_what_no_edge_before_makes_cannot_be_read(lineage: Lineage, second: str, reachable: bool) -> None:
    lineage.layouts(THREE)
    lineage.rules('keep: ["kept.{n}.bias"]\nrules: [{name: a, from: "old.{i:int}.w", to: "new.{i}.w"}]\n')
    lineage.rules(f"rules: [{second}]\n", edge=("v2", "v3"))
    assert bool(lineage.found("M616")) is not reachable
