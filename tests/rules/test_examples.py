"""What a test of a rule file may say, before anything is run."""

from __future__ import annotations

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError
from migrate.rules.files import LoadedFile

TEXT = """id: a/b
title: t
lineage: l
edge: [v1, v2]
rules: [{{name: r, from: a, to: b}}]
tests:
  - {{name: t, given: {{a: {{shape: [2], {given}}}}}, expect: {{b: {{shape: [2], {expect}}}}}}}
"""


def load(given: str = "fill: 1", expect: str = "") -> LoadedFile:
    return load_text(TEXT.format(given=given, expect=expect), "r.yaml")


def refused(given: str = "fill: 1", expect: str = "") -> tuple[str, str]:
    with pytest.raises(QuestionError) as caught:
        load(given, expect)
    (found,) = caught.value.diagnostics
    span = found.spans[0]
    return found.code, span.text[span.column - 1 : span.column - 1 + span.length]


@pytest.mark.parametrize(
    "rtol", ["-1", "-0.001", ".inf", "-.inf", ".nan", "1e400", "1" + "0" * 400]
)
def test_a_tolerance_is_a_finite_number_of_zero_or_more(rtol: str) -> None:
    assert refused(expect=f"rtol: {rtol}") == ("M114", rtol)


@pytest.mark.parametrize("rtol", ["0", "-0.0", "1e-3", "5", "1e308"])
def test_such_tolerances_are_taken(rtol: str) -> None:
    assert load(expect=f"rtol: {rtol}").model.tests[0].expect


def test_an_integer_that_no_double_comes_near_is_infinite() -> None:
    assert load("fill: " + "9" * 400).model.tests[0].given["a"].fill == float("inf")
    assert load("fill: -" + "9" * 400).model.tests[0].given["a"].fill == float("-inf")
    assert load("values: [0x" + "f" * 400 + ", 1]").model.tests[0].given["a"].values[0] == float(
        "inf"
    )
    assert refused("fill: 1" + "0" * 4000)[0] == "M109"


def test_a_slice_outside_of_the_shape_that_is_written_is_refused_at_its_place() -> None:
    assert refused(expect='slices: {"2": 1}') == ("M114", '"2"')
    assert refused(expect='slices: {"-3": 1}') == ("M114", '"-3"')
    assert load(expect='slices: {"1": 1, "-2": 1}').model.tests


def test_an_error_is_one_of_the_codes_that_there_are() -> None:
    text = TEXT.format(given="fill: 1", expect="").replace(
        "expect: {b: {shape: [2], }}", "error: M999"
    )
    with pytest.raises(QuestionError) as caught:
        load_text(text, "r.yaml")
    assert [d.message for d in caught.value.diagnostics] == ["there is no diagnostic M999"]
