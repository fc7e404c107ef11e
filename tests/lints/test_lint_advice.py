"""Advice, and rules held against the headers of a checkpoint."""

from __future__ import annotations

import pytest
from commandline import safetensors
from written_rules import Lineage

from migrate import formats
from migrate.lints.findings import lint


def found(lineage: Lineage, body: str) -> list[tuple[str, str]]:
    lineage.rules(body)
    return [(d.code, d.message.split("`")[1]) for d in lineage.found("M650", "M651")]


def test_a_rule_that_finds_nested_models_beside_one_that_does_not(lineage: Lineage) -> None:
    nested = '  - {name: a, from: "{p...}.old.{i:int}.w", to: "{p}.new.{i}.w"}\n'
    top = '  - {name: b, from: "model.x.{i:int}.w", to: "model.y.{i}.w"}\n'
    assert found(lineage, "rules:\n" + nested + top) == [("M650", "b")]
    assert found(lineage, "rules:\n" + top) == []
    assert (
        found(
            lineage,
            "rules:\n" + nested + '  - {name: c, from: "model.x.{p...}.w", to: "model.y.{p}.w"}\n',
        )
        == []
    )
    assert (
        found(
            lineage, "rules:\n" + nested + "  - {name: c, from: lm_head.weight, to: head.weight}\n"
        )
        == []
    )


@pytest.mark.parametrize(
    ("via", "counted"),
    [
        ("{stack: {over: i}}", False),
        ("{concat: {over: i, dim: 0}}", False),
        ("{stack: {over: i, count: 2}}", True),
        ("{stack: {over: i, count: $n}}", True),
        ("{concat: {over: i, sizes: [1, 2]}}", True),
    ],
)
def test_a_group_of_numbers_says_how_many_there_are(
    lineage: Lineage, via: str, counted: bool
) -> None:
    body = (
        "params: {n: {type: int, default: 2}}\nrules:\n  - {name: a, from: "
        f"'old.{{i:int}}.w', to: new.0.w, via: [{via}]}}\n"
    )
    assert found(lineage, body) == ([] if counted else [("M651", "a")])


RULES = """keep: [norm.w]
rules:
  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}
  - {name: b, from: "old.{i:int}.b", to: "new.{i}.b"%s}
tests:
  - {name: t, given: {old.0.w: {shape: [1]}, old.0.b: {shape: [1]}}, expect: {new.0.w: {shape: [1]}, new.0.b: {shape: [1]}}}
"""  # noqa: E501


def against(lineage: Lineage, *keys: str) -> list[tuple[str, str]]:
    source = formats.open(
        str(
            safetensors(lineage.root.parent / "in.safetensors", {key: ("U8", [1]) for key in keys})
        ),
        False,
    )
    try:
        return [
            (d.code, d.message.partition(": ")[2])
            for d in lint([lineage.root], index=source.index).findings
        ]
    finally:
        source.close()


def test_rules_that_fit_a_checkpoint(lineage: Lineage) -> None:
    lineage.rules(RULES % "")
    assert against(lineage, "old.0.w", "old.0.b", "norm.w") == []


def test_rules_that_take_nothing_of_a_checkpoint_and_keys_that_are_left(lineage: Lineage) -> None:
    lineage.rules(RULES % "")
    assert against(lineage, "old.0.w", "stray", "norm.w") == [
        ("M661", "stray"),
        ("M660", "`old.{i:int}.b`"),
    ]
    lineage.rules(RULES % ", optional: true")
    assert against(lineage, "old.0.w", "norm.w") == []


ALTERNATIVES = """keep: [norm.w]
rules:
  - {name: a, from: "old.{i:int}.{w:w|b|nrom}", to: "new.{i}.{w}"%s}
"""


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("", ["no key of the checkpoint has {w} = nrom"]),
        (", map: {w: {nrom: n}}", ["no key of the checkpoint has {w} = nrom"]),
        (", where: {w: [w, b]}", []),
        (", where: {w: [w, nrom]}", ["no key of the checkpoint has {w} = nrom"]),
        (", optional: {w: [nrom]}", []),
        (", optional: {w: [b]}", ["no key of the checkpoint has {w} = nrom"]),
        (", optional: true", []),
    ],
)
def test_an_alternative_that_no_key_of_a_checkpoint_has_is_an_error(
    lineage: Lineage, said: str, found: list[str]
) -> None:
    lineage.rules(ALTERNATIVES % said)
    assert [d for d in against(lineage, "old.0.w", "old.1.b", "norm.w") if d[0] != "M622"] == [
        ("M624", message) for message in found
    ]
    # all of the rule is another finding
    assert "M624" not in dict(against(lineage, "old.0.x", "norm.w"))


def test_an_alternative_that_a_narrower_rule_takes_is_there(lineage: Lineage) -> None:
    lineage.rules(
        ALTERNATIVES % "" + '  - {name: b, from: "old.{i:int}.nrom", to: "new.{i}.norm"}\n'
    )
    assert {code for code, _ in against(lineage, "old.0.w", "old.1.b", "old.1.nrom", "norm.w")} == {
        "M622"
    }


def test_a_checkpoint_in_another_layout_says_nothing(lineage: Lineage) -> None:
    lineage.rules(RULES % "")
    assert against(lineage, "new.0.w", "stray") == []


def test_a_loose_file_is_held_against_any_checkpoint(lineage: Lineage) -> None:
    path = lineage.rules(RULES % "")
    loose = lineage.root.parent / "loose.yaml"
    loose.write_text(path.read_text())
    source = formats.open(
        str(safetensors(lineage.root.parent / "in.safetensors", {"new.0.w": ("U8", [1])})), False
    )
    try:
        assert [d.code for d in lint([loose], index=source.index).findings] == [
            "M661",
            "M660",
            "M660",
        ]
    finally:
        source.close()
