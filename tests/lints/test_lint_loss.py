"""Losses and ways back that nobody spoke of."""

from __future__ import annotations

import pytest
from written_rules import Lineage


def found(lineage: Lineage, via: str, extra: str = "", rule: str = "") -> list[str]:
    lineage.rules(
        f"{extra}rules:\n  - {{name: r, from: old.0.w, "
        f"{'' if 'drop' in via else 'to: new.0.w, '}via: [{via}]{rule}}}\n"
    )
    return [d.code for d in lineage.found("M606", "M630", "M631", "M632")]


WHY = "why: the new layout has no room for it\n"


@pytest.mark.parametrize(
    ("via", "codes"),
    [
        ("{transpose: {dims: [0, 1]}}", []),
        ("{drop: {why: computed again}}", []),
        ("{slice: {dim: 0, stop: 2, of: 3, value: 0}}", []),
        ("{slice: {dim: 0, stop: 2}}", ["M630", "M632"]),
        ("{slice: {dim: 0, stop: 2, of: 3}}", ["M630", "M632"]),
        ("{reshape: {to: [4]}}", ["M632"]),
        ("{reshape: {to: [4], from: [2, 2]}}", []),
        ("{cast: {to: float32, from: bfloat16}}", []),
        ("{cast: {to: float32}}", ["M632"]),
    ],
)
def test_a_loss_or_a_way_that_ends_has_to_be_said(
    lineage: Lineage, via: str, codes: list[str]
) -> None:
    assert [c for c in found(lineage, via) if c != "M606"] == codes


def test_a_reason_answers_for_a_loss_and_not_for_the_way_back(lineage: Lineage) -> None:
    assert found(lineage, "{slice: {dim: 0, stop: 2}}", WHY) == ["M632"]
    assert found(lineage, "{slice: {dim: 0, stop: 2}}", WHY, ", inverse: skip") == []


def test_a_rule_that_says_why_nothing_leads_back_is_not_silent(lineage: Lineage) -> None:
    refuse = ", inverse: {refuse: nothing reads it}"
    assert found(lineage, "{slice: {dim: 0, stop: 2}}", WHY, refuse) == []


def test_values_that_change_need_a_reason(lineage: Lineage) -> None:
    assert found(lineage, "{cast: {to: bfloat16, from: float32}}") == ["M606"]
    assert found(lineage, "{cast: {to: bfloat16, from: float32}}", WHY) == []


def test_a_way_back_that_is_written_down_needs_no_inverse(lineage: Lineage) -> None:
    lineage.rules(
        "rules: [{name: back, from: new.0.w, to: old.0.w, via: [{reshape: {to: [2, 2], from: "
        "[4]}}]}]\n",
        "back",
        ("v2", "v1"),
    )
    assert found(lineage, "{reshape: {to: [4]}}") == []


def test_the_finding_is_at_the_op_that_ends_the_way_and_says_how_to_mend_it(
    lineage: Lineage,
) -> None:
    found(lineage, "{flip: {dim: 0}}, {reshape: {to: [4]}}")
    (finding,) = lineage.found("M632")
    span = finding.spans[0]
    assert span.text[span.column - 1 :].startswith("{to: [4]}")
    assert "write `from`" in str(finding.help)
