"""`where` and `when`: what they may ask for, and that a condition which can never hold is refused
where it stands.
"""

from __future__ import annotations

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError

HEAD = "id: a/b\ntitle: t\nlineage: l\nedge: [v1, v2]\n"
RULE = 'rules: [{{name: r, from: "a.{{e:int}}", to: "b.{{e}}", {}}}]\n'


@pytest.mark.parametrize(
    ("fields", "code", "under"),
    [
        ("where: {e: []}", "M114", "[]"),
        ("where: {e: {multiple_of: 0}}", "M114", "0"),
        ("where: {e: {max: -1}}", "M114", "-1"),
        ("where: {e: {multiple_of: 2, remainder: -1}}", "M114", "-1"),
        ("where: {e: {min: 9007199254740992}}", "M114", "9007199254740992"),
        ("where: {e: {min: 1e400}}", "M111", "1e400"),
        ("where: {e f: 1}", "M114", "e f"),
        ('where: {"{e}": 1}', "M114", '"{e}"'),
        ("where: {$: 1}", "M114", "$"),
        ("where: {$1: 1}", "M114", "$1"),
        ("when: {dtype: []}", "M114", "[]"),
        ("when: {ndim: []}", "M114", "[]"),
        ("when: {ndim: -1}", "M106", "-1"),
        ("map: {e f: {a: b}}", "M114", "e f"),
        ("via: [{flip: {dim: 0, only: {e: []}}}]", "M114", "[]"),
        ("via: [{flip: {dim: 0, only: {e f: 1}}}]", "M114", "e f"),
        ('via: [{flip: {dim: "1 +"}}]', "M111", '"1 +"'),
    ],
)
def test_a_condition_that_can_never_hold_is_refused_where_it_stands(
    fields: str, code: str, under: str
) -> None:
    with pytest.raises(QuestionError) as caught:
        load_text(HEAD + RULE.format(fields), "r.yaml")
    (found,) = caught.value.diagnostics
    span = found.spans[0]
    assert found.code == code
    # arithmetic is pointed at inside the quotes
    assert (
        span.text[span.column - 1 : span.column - 1 + span.length] in (under, "") or code == "M111"
    )


def test_limits_and_lists_that_something_can_meet_are_taken() -> None:
    text = RULE.format(
        "where: {e: {min: -5, max: 0, multiple_of: 1, remainder: 0}, $p: [1]}, when: {ndim: 0}"
    )
    load_text(HEAD + "params: {p: {type: int, default: 1}}\n" + text, "r.yaml")
