"""Layouts that cannot be told apart, reached or recognised."""

from __future__ import annotations

import pytest
from written_rules import Lineage

HEAD = (
    "# yaml-language-server: $schema=../../schemas/layouts.schema.json\nlineage: demo\ntitle: "
    "Demo\nordered: %s\nlayouts:\n"
)
RULES = """rules:
  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}
tests:
  - {name: t, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: [1]}}}
"""


def found(lineage: Lineage, layouts: dict[str, str], ordered: bool = True) -> list[tuple[str, str]]:
    """(code, the text at the place) of each finding."""
    lines = [
        HEAD % str(ordered).lower(),
        *(f"  {name}: {{title: t, {fields}}}\n" for name, fields in layouts.items()),
    ]
    lineage.layouts("".join(lines))
    lineage.rules(RULES)
    return [(d.code, d.spans[0].text.strip().partition(":")[0]) for d in lineage.found()]


OLD, NEW = 'detect: {present: "old.{i:int}.w"}', 'detect: {present: "new.{i:int}.w"}'


def test_layouts_with_signs_of_their_own_are_clean(lineage: Lineage) -> None:
    assert found(lineage, {"v1": OLD, "v2": NEW}) == []


def test_a_layout_has_signs_or_a_note_why_not(lineage: Lineage) -> None:
    assert found(lineage, {"v1": OLD, "v2": "status: current"}) == [("M640", "v2")]
    assert found(lineage, {"v1": OLD, "v2": "detect: {}"}) == [("M640", "v2")]
    assert found(lineage, {"v1": OLD, "v2": "note: nothing shows it"}) == []


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        ('present: "old.{i:int}.w"', 'present: "old.{i:int}.w"', ["v2"]),
        ('present: ["old.{i:int}.w", a]', 'present: "old.{i:int}.w"', ["v2"]),
        ('present: "old.{i:int}.w"', 'present: "old.{n}.w"', ["v2"]),
        ('present: "old.{n}.w"', 'present: "old.{i:int}.w"', ["v1"]),
        ('present: "old.{i:int}.w"', 'present: "old.{i:int}.w", absent: a', ["v1"]),
        ('present: "old.{i:int}.w", absent: b', 'present: "old.{i:int}.w", absent: a', []),
        (
            'present: "old.{i:int}.w", absent: "{k...}.a"',
            'present: "old.{i:int}.w", absent: "x.a"',
            ["v2"],
        ),
        (
            'present: "old.{i:int}.w", config: {n: 1}',
            'present: "old.{i:int}.w", config: {n: [1, 2]}',
            ["v2"],
        ),
        (
            'present: "old.{i:int}.w", config: {n: 1}',
            'present: "old.{i:int}.w", config: {n: 2}',
            [],
        ),
        ('present: "old.{i:int}.w", ndim: {a: 2}', 'present: "old.{i:int}.w", ndim: {a: 3}', []),
        ('ndim: {"old.{i:int}.w": 2}', 'present: "old.{i:int}.w"', ["v2"]),
    ],
)
def test_signs_that_follow_from_a_sibling_tell_nothing(
    lineage: Lineage, one: str, other: str, wrong: list[str]
) -> None:
    result = found(lineage, {"v1": f"detect: {{{one}}}", "v2": f"detect: {{{other}}}"})
    assert [place for code, place in result if code == "M641"] == wrong


def test_a_layout_that_no_file_leads_to_or_from(lineage: Lineage) -> None:
    assert found(lineage, {"v1": OLD, "v2": NEW, "v3": "note: n"}) == [("M642", "v3")]


def test_neighbours_of_an_ordered_lineage_without_an_edge(lineage: Lineage) -> None:
    layouts = {"v1": OLD, "v2": "note: n", "v3": "note: n"}
    lineage.layouts(
        "".join(
            [
                HEAD % "true",
                *(f"  {name}: {{title: t, {fields}}}\n" for name, fields in layouts.items()),
            ]
        )
    )
    lineage.rules(RULES, edge=("v1", "v3"))
    lineage.rules(RULES.replace("old", "x"), "second", ("v2", "v3"))
    assert [(d.code, d.message) for d in lineage.found()] == [
        ("M643", "no path leads from layout `v1` to the next one, `v2`")
    ]
    text = (lineage.root / "demo" / "layouts.yaml").read_text()
    lineage.layouts(text.replace("ordered: true", "ordered: false"))
    assert lineage.found() == []


def test_a_deprecated_layout_says_what_to_use(lineage: Lineage) -> None:
    assert found(lineage, {"v1": OLD + ", status: deprecated", "v2": NEW}) == [("M644", "v1")]
    assert found(lineage, {"v1": OLD + ", status: deprecated, message: use v2", "v2": NEW}) == []


@pytest.mark.parametrize(
    ("one", "two", "wrong"),
    [
        (OLD, 'detect: {present: ["new.{i:int}.w", "new.head"]}', ["v2"]),
        (OLD, 'detect: {present: "new.{i:int}.weight"}', ["v2"]),
        (OLD, 'detect: {present: "{k...}.w", absent: "old.{i:int}.w"}', []),
        ('detect: {present: "older.{i:int}.w"}', NEW, ["v1"]),
    ],
)
def test_a_sign_that_the_edge_never_makes_or_reads(
    lineage: Lineage, one: str, two: str, wrong: list[str]
) -> None:
    assert found(lineage, {"v1": one, "v2": two}) == [("M645", name) for name in wrong]
