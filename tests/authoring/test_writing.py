"""What is written reads as what was meant, in lines that fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rule_text import load_text

from migrate.authoring import scaffold, writing
from migrate.authoring.compact import compact
from migrate.authoring.relations import Relation, RuleDraft
from migrate.core.errors import Report
from migrate.source import yaml

HEADER = writing.FileHead("made/new/rules", "Made", "made", ("old", "2.0"))
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


def read(text: str) -> Any:
    report = Report()
    document = yaml.read_yaml(text, "made.yaml", report)
    report.check()
    return document.data


@given(TEXT)
@example("\u034f")
def test_a_text_reads_as_itself(said: str) -> None:
    assert read(f"a: {writing.scalar(said)}")["a"] == said
    assert read("\n".join(writing.entry("a", said, 0)))["a"] == said
    assert read(writing.flow({"a": [said], said: 1})) in ({"a": [said], said: "1"}, {"a": "1"})


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
@example("a \u115f b")
def test_a_comment_stays_one(note: str) -> None:
    draft = RuleDraft("x", "a.b", "c.d", note=note)
    made = load_text(writing.text([draft], HEADER), "made.yaml").model
    assert [rule.name for rule in made.rules] == ["x"]


def test_no_line_is_longer_than_140_columns() -> None:
    names = [f"a_rather_long_name_of_a_module_{n}" for n in range(40)]
    relations = [Relation((f"m.{n}.weight",), (f"new.{n}_here.weight",)) for n in names]
    relations += [
        Relation(
            tuple(f"x.{n}.weight" for n in names),
            ("x.all",),
            ({"concat": {"sizes": list(range(1000, 1040))}},),
            note=" ".join(names),
        )
    ]
    text = writing.text(compact(relations), HEADER)
    assert max(map(len, text.splitlines())) <= 140
    model = load_text(text, "made.yaml").model
    assert model.edge == ("old", "2.0")
    assert len(model.rules) == 2


def test_equal_relations_give_equal_files_whatever_their_order() -> None:
    relations = [
        Relation((f"l.{n}.{w}.weight",), (f"h.{n}.{w}_proj.weight",))
        for n in range(12)
        for w in ("q", "k", "v")
    ]
    assert writing.text(compact(relations), HEADER) == writing.text(
        compact(relations[::-1]), HEADER
    )


def test_what_names_alone_decided_is_marked() -> None:
    drafts = compact([Relation(("a.w",), ("b.w",), guessed=True)])
    assert load_text(writing.text(drafts, HEADER), "made.yaml").model.rules[0].guessed


@pytest.mark.parametrize("number", range(scaffold.EXAMPLES.count("- name:")))
def test_an_example_of_the_scaffold_loads(number: int) -> None:
    head = writing.text([], HEADER).replace("rules: []", "rules:")
    one = "- name:" + scaffold.EXAMPLES.split("- name:")[number + 1]
    assert len(load_text(f"{head}{one}", "made.yaml").model.rules) == 1


def test_the_scaffold_has_an_example_of_each_kind_of_op() -> None:
    from migrate import ops

    model = load_text(
        writing.text([], HEADER).replace("rules: []", "rules:") + scaffold.EXAMPLES, "made.yaml"
    ).model
    shown = {ops.get(call.op).kind for rule in model.rules for call in rule.via}
    assert shown >= {ops.get(name).kind for name in ops.names()} - {"exchange"}


def test_a_modeline_names_the_schema_beside_the_folder_of_rules() -> None:
    assert scaffold.schema_path(3, "rulefile") == "../../../schemas/rulefile.schema.json"
