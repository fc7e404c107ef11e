"""Suppressions: where they stand, what they must say, and that none outlives its finding."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_rules import MODELINE, Lineage

from migrate.lints.findings import codes

KEEP = 'keep: ["{k...}"]'
RULES = """rules:
  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}
tests:
  - {name: t, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: [1]}}}
"""


def write(lineage: Lineage, *lines: str) -> None:
    lineage.rules("\n".join(lines) + "\n" + RULES)


def test_the_file_is_clean_but_for_what_is_to_be_allowed(lineage: Lineage) -> None:
    write(lineage)
    assert lineage.codes() == []
    write(lineage, KEEP)
    assert lineage.codes() == ["M612"]


@pytest.mark.parametrize(
    "lines",
    [
        [f"{KEEP}   # migrate: allow M612 because the names do not tell"],
        ["# migrate: allow M612 because the names do not tell", KEEP],
        ["# migrate: allow M612 because the names do not tell", "# and nobody knows them", KEEP],
        ["#migrate:allow M612 because of the names", KEEP],
        ["# migrate: allow M612, M612 because one of them does it", KEEP],
    ],
)
def test_a_comment_with_a_reason_takes_a_finding_away(lineage: Lineage, lines: list[str]) -> None:
    write(lineage, *lines)
    found = lineage.lint()
    assert (found.findings, found.suppressed) == ((), 1)


BOTH = '{name: same, from: "x.{i:int}.w", to: "x.{i}.w", optional: true}'


@pytest.mark.parametrize("above", [True, False])
def test_a_line_may_hold_two_suppressions(lineage: Lineage, above: bool) -> None:
    rules = RULES.replace("rules:\n", f"rules:\n  - {BOTH}%s\n")
    said = "# migrate: allow M613 because it is so # migrate: allow M622 because it does nothing"
    lineage.rules(f"{rules % ''}")
    assert lineage.codes() == ["M613", "M622"]
    lineage.rules(
        rules.replace(f"  - {BOTH}", f"  {said}\n  - {BOTH}") % "" if above else rules % f"  {said}"
    )
    result = lineage.lint()
    assert (result.findings, result.suppressed) == ((), 2)


@pytest.mark.parametrize(
    ("comment", "codes"),
    [
        ("M612 because # migrate: allow M603 because x", ["M602", "M602", "M612"]),
        ("M612 because x # migrate: allow M613", ["M602"]),
        ("M612 because x, M613 because y", ["M602"]),
    ],
)
def test_what_is_not_read_of_two_suppressions_is_told(
    lineage: Lineage, comment: str, codes: list[str]
) -> None:
    write(lineage, f"# migrate: allow {comment}", KEEP)
    assert lineage.codes() == codes


@pytest.mark.parametrize(
    "comment",
    [
        "M612",
        "M612 because",
        "M612 because   ",
        "because I say so",
        "",
        "M612: never mind",
        "M999 because x",
        "M211 because x",
    ],
)
def test_a_comment_without_code_and_reason_suppresses_nothing(
    lineage: Lineage, comment: str
) -> None:
    write(lineage, f"# migrate: allow {comment}", KEEP)
    assert lineage.codes() == ["M602", "M612"]


def test_a_code_that_no_finding_has_is_told(lineage: Lineage) -> None:
    write(lineage, "# migrate: allow M699 because x", KEEP)
    assert [d.message for d in lineage.found("M602")] == ["M699 is the code of no finding"]
    write(lineage, "# migrate: allow M603 because x")
    assert lineage.codes() == ["M602"]


@pytest.mark.parametrize(
    "lines",
    [
        ["# migrate: allow M612 because the names do not tell"],
        [f"{KEEP}", "# migrate: allow M612 because it stands below"],
        ["# migrate: allow M612 because there is a line between", "params: {}", KEEP],
        ["params: {}   # migrate: allow M612 because it is behind another value", KEEP],
    ],
)
def test_a_comment_that_nothing_needs_is_a_finding(lineage: Lineage, lines: list[str]) -> None:
    write(lineage, *lines)
    (unused,) = lineage.found("M603")
    assert unused.spans[0].text[unused.spans[0].column - 1 :].startswith("# migrate: allow M612")


def test_one_comment_with_two_codes_may_be_half_unused(lineage: Lineage) -> None:
    write(lineage, "# migrate: allow M612, M645 because of both", KEEP)
    assert [d.message for d in lineage.found()] == ["M645 no longer occurs here"]


def test_select_and_ignore_choose_what_is_shown_and_all_is_looked_for(lineage: Lineage) -> None:
    unused = "# migrate: allow M612 because the names do not tell"
    write(lineage, unused)
    assert [d.message for d in lineage.lint(select=["M603"]).findings] == [
        "M612 no longer occurs here"
    ]
    assert [d.code for d in lineage.lint(select=["M603,M605"], ignore=["M612"]).findings] == [
        "M603"
    ]
    assert lineage.lint(ignore=["M603"]).findings == lineage.lint(select=["M605"]).findings == ()
    # what is found and allowed is needed, and counted where it would have been shown
    write(lineage, unused, KEEP)
    for select, suppressed in ((["M603"], 0), (["M612"], 1), ([], 1)):
        result = lineage.lint(select=select)
        assert (result.findings, result.suppressed) == ((), suppressed)


def test_what_was_not_looked_for_is_not_unused(lineage: Lineage) -> None:
    write(lineage, "# migrate: allow M661 because of the old release")
    assert lineage.found() == []


TEXTS = [
    'why: "a # migrate: allow M612 because of the text"',
    "why: 'a # migrate: allow M612 because of the text'",
    "why: |\n  # migrate: allow M612 because of the text",
    "why: >-\n  a\n\n  # migrate: allow M612 because of the text\n  # b",
    'why: "a\n  # migrate: allow M612 because of the text\n  b"',
    '"why": "# migrate: allow M612 because of the text"',
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_looks_like_a_comment_allows_nothing(lineage: Lineage, text: str) -> None:
    write(lineage, text, KEEP)
    assert lineage.codes() == ["M612"]


@pytest.mark.parametrize("text", [text for text in TEXTS if text[-1] in "\"'"])
def test_behind_such_a_text_a_comment_counts(lineage: Lineage, text: str) -> None:
    write(lineage, text + "  # migrate: allow M606 because a comment stands behind the text", KEEP)
    assert lineage.codes() == ["M603", "M612"]


def test_a_key_that_looks_like_a_comment_allows_nothing(lineage: Lineage) -> None:
    body = RULES.replace("old.0.w:", '"old.0.w # migrate: allow M621 because of the key":')
    lineage.rules(body)
    assert lineage.codes() == ["M621"]


@pytest.mark.parametrize(
    "before",
    [
        "why: |   %s\n  text",
        "why: |\n  text\n%s",
        "why: >-\n  text\n\n%s",
        'why: "text\n  more"   %s',
    ],
)
def test_a_comment_beside_a_long_text_is_one(lineage: Lineage, before: str) -> None:
    write(lineage, before % "# migrate: allow M612 because of the names" + "\n" + KEEP)
    assert [d.code for d in lineage.found("M602", "M603", "M612")] == (
        [] if before.endswith("\n%s") else ["M603", "M612"]
    )


def test_an_empty_line_below_a_suppression_does_not_part_it_from_its_line(lineage: Lineage) -> None:
    write(lineage, "# migrate: allow M612 because the names do not tell", "", KEEP)
    assert lineage.codes() == []


def test_select_and_ignore_take_codes_and_names(lineage: Lineage) -> None:
    lineage.rules(KEEP + "\nparams: {n: {type: int, default: 1}}\n" + RULES)
    assert [d.code for d in lineage.lint().findings] == ["M612", "M607"]
    assert [d.code for d in lineage.lint(select=["unused-param"]).findings] == ["M607"]
    assert [d.code for d in lineage.lint(ignore=["M607"]).findings] == ["M612"]
    assert [d.code for d in lineage.lint(select=["M607,M612"], ignore=["M612"]).findings] == [
        "M607"
    ]


def test_layouts_can_be_allowed_things_too(lineage: Lineage) -> None:
    lineage.rules(RULES)
    text = (lineage.root / "demo" / "layouts.yaml").read_text()
    lineage.layouts(text + "  v3: {title: third, note: to come}\n")
    assert lineage.codes() == ["M642"]
    lineage.layouts(
        text
        + "  # migrate: allow M642 because its rules come with the next release\n  v3: {title: "
        "third, note: to come}\n"
    )
    assert lineage.codes() == []


def test_every_finding_is_in_the_docs_under_its_name() -> None:
    root = Path(__file__).resolve().parents[2]
    rows = [
        line.split("|")
        for line in (root / "docs" / "reference" / "lint.md").read_text().splitlines()
        if line.startswith("| M6")
    ]
    assert {row[1].strip(): row[2].strip() for row in rows} == codes()


def test_the_modeline_of_the_tests_is_the_one_that_lint_wants(lineage: Lineage) -> None:
    lineage.rules(RULES, head="id: demo/v2/first\ntitle: Some rules\n")
    assert lineage.codes() == ["M610"]
    assert MODELINE.startswith("# yaml-language-server")
