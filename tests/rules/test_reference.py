"""The reference is what the code says, and what it shows is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from migrate import codecs, ops
from migrate.core.keys import parse
from migrate.rules import arguments, reference, schema

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "rule-files.md").read_text(encoding="utf-8")


def test_the_committed_page_is_what_the_code_says() -> None:
    assert reference.render_reference() == PAGE, "python -m migrate.rules.reference"


@pytest.mark.parametrize("syntax", reference.PATTERNS, ids=lambda s: s.pattern)
def test_an_example_of_a_pattern_matches_as_it_says(syntax: reference.Syntax) -> None:
    pattern = parse(syntax.pattern)
    values = pattern.match(syntax.key)
    assert values is not None
    found = dict(zip(pattern.captures, values, strict=True))
    assert found == dict(syntax.captures)
    if syntax.to:
        assert parse(syntax.to, pattern.types).expand(found) == syntax.result


def test_every_notation_is_shown() -> None:
    shown = " ".join(s.pattern + s.to for s in reference.PATTERNS)
    for notation in (":int}", "...}", "|", ":flat}", "*n+", "{{", "@{"):
        assert notation in shown


def test_every_op_codec_field_and_code_has_its_place() -> None:
    for name in [*ops.registry.builtin(), *codecs.names()]:
        assert f"\n### `{name}`\n" in PAGE
    for page in reference.pages():
        assert f"\n| {page.code} | {page.name} | {page.severity} | {page.exit} |" in PAGE
    for name in ops.registry.builtin():
        section = PAGE.split(f"\n### `{name}`\n")[1].split("\n### ")[0]
        assert [a.word for a in arguments.arguments(name)] == re.findall(
            r"^\| `(\w+)` \|", section, re.MULTILINE
        )
    for model in (schema.rule_file(), schema.layouts()):
        for part in (model, *(d for name, d in model["$defs"].items() if name != "Step")):
            for field in part["properties"]:
                assert f"\n| `{field}` |" in PAGE


def test_a_table_has_as_many_cells_in_each_row_as_in_its_head() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, (
            table[:200]
        )


def test_the_check_says_no_when_the_page_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(["--check"]) == 0
    monkeypatch.setattr(reference, "FILE", tmp_path / "rule-files.md")
    assert reference.main([]) == 0
    assert (tmp_path / "rule-files.md").read_text() == PAGE
    (tmp_path / "rule-files.md").write_text(PAGE + "more\n")
    assert reference.main(["--check"]) == 1
    assert "rule-files.md" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["stack", "M207", "incomplete-group", "m207", "fp8-block"])
def test_a_topic_is_found_by_its_name(word: str) -> None:
    topic = reference.explain(word)
    assert word.lower() in (topic["name"].lower(), topic["title"])
    assert len(topic["text"]) > 60
