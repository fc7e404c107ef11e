"""`migrate lint --fix`: what has one answer is mended in the text, and nothing else is touched."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import migrate
from migrate.core.errors import Report
from migrate.lints.fixing import fixed
from migrate.rules.files import files_below, shipped_folder
from migrate.rules.loading import load_document
from migrate.rules.model import semantic_hash
from migrate.source import yaml

LINE = "# yaml-language-server: $schema=../schemas/rulefile.schema.json\n"
RULE = """\
# licence: ours
id: toy/v2/y   # stable
title: Rename b
lineage: toy
edge: [v1, v2]   # two layouts
requires: ">=0.1"
rules:
  - name: r   # a remark
    from: "{p...}.a"
    to: "{p}.b"
"""
MODEL = LINE + RULE


def mended(text: str, folder: Path, name: str = "y.yaml") -> str:
    """The text after `fix`, which is the same after a second one."""
    made, _ = fixed(text, folder / name)
    assert fixed(made, folder / name) == (made, [])
    return made


def test_all_at_once_and_every_comment_stays_where_it_was(tmp_path: Path) -> None:
    text = RULE.replace('requires: ">=0.1"\n', "").replace("[v1, v2]", "[1.0, '2.0']")
    text = text.replace("rules:", 'kep: ["b.{k}", m, a]\nrules:').replace('"{p...}.a"', "{p...}.a")
    text = text.replace("    to:", "    too:") + "    optionl: true  # or not\n"
    wanted = MODEL.replace("[v1, v2]", "[\"1.0\", '2.0']")
    wanted = (
        wanted.replace("rules:", 'keep: [a, "b.{k}", m]\nrules:') + "    optional: true  # or not\n"
    )
    assert mended(text, tmp_path) == wanted


@pytest.mark.parametrize("field", ["lineage", "edge", "rules", "from", "requires", "title"])
def test_a_misspelt_field_is_put_right(tmp_path: Path, field: str) -> None:
    for word in {field[:-1], field[0] + field[2] + field[1] + field[3:], field + "s"} - {field}:
        assert mended(MODEL.replace(f"{field}:", f"{word}:"), tmp_path) == MODEL


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # two words for one field, a field that is there already, and words that are near to none
        ("    to:", "    optionl: true\n    optinal: true\n    to:"),
        ("    to:", "    optional: true\n    optionl: true\n    to:"),
        ("    to:", "    because: so\n    to:"),
        # the value is no value of the field
        ("    to:", "    optionl: maybe\n    to:"),
        # another file's affair, and no text at all
        ("lineage: toy", "lineage: [toy"),
        ("edge: [v1, v2]", "edge: [v1]"),
    ],
)
def test_what_has_several_answers_or_none_is_left_as_it_is(
    tmp_path: Path, before: str, after: str
) -> None:
    text = RULE.replace(before, after)
    assert text != RULE
    assert mended(text, tmp_path) == text


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [
        ("[c, b,\n  a]", "[a, b,\n  c]"),
        (
            "\n  - \"c.{k}\"  # the last\n  - a\n  - 'b'\n",
            "\n  - a\n  - 'b'\n  - \"c.{k}\"  # the last\n",
        ),
        ("\n- b\n- a", "\n- a\n- b"),
        # a comment or an empty line says why they stand so
        ("\n  - c\n  # of b\n  - b", None),
        ("\n  - c\n\n  - b", None),
        ("[c, # of b\n  b]", None),
    ],
)
def test_keep_is_sorted_unless_a_comment_divides_it(
    tmp_path: Path, keep: str, wanted: str | None
) -> None:
    text = MODEL.replace("rules:", f"keep: {keep}\nrules:")
    after = text if wanted is None else MODEL.replace("rules:", f"keep: {wanted}\nrules:")
    assert mended(text, tmp_path) == after


def test_line_ends_marks_and_modes_of_files_stay(tmp_path: Path) -> None:
    file = tmp_path / "y.yaml"
    text = RULE.replace('requires: ">=0.1"\n', "").replace("\n", "\r\n")
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    file.chmod(0o640)
    report = migrate.lint([file], fix=True)
    assert report.fixed[0].fixes == ("the schema for editors", "`requires`")
    assert file.read_bytes() == b"\xef\xbb\xbf" + MODEL.replace("\n", "\r\n").encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert migrate.lint([file], fix=True).fixed == ()
    assert os.listdir(tmp_path) == ["y.yaml"]


def test_an_edge_below_its_key_and_a_file_without_a_last_line_end(tmp_path: Path) -> None:
    text = (
        LINE
        + "rules: [{name: r, from: a, to: b}]\nid: a\ntitle: T\nlineage: l\nedge:\n  - v1\n  - v2"
    )
    assert mended(text, tmp_path) == text + '\nrequires: ">=0.1"'


def test_layouts_are_quoted_and_the_schema_is_that_of_the_others(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "rules" / "toy"
    (home / "2.0").mkdir(parents=True)
    there = MODEL.replace("../schemas", "../../../../schemas").replace("[v1, v2]", '["1.0", "2.0"]')
    (home / "2.0" / "y.yaml").write_text(there.replace("toy/v2", "toy/2.0"))
    layouts = home / "layouts.yaml"
    layouts.write_text(
        "lineage: toy\ntitle: A toy  # so\nlayouts:\n  1.0: {title: one}\n  2.0: {titel: two}\n"
    )
    migrate.lint([home], fix=True)
    assert layouts.read_text() == (
        "# yaml-language-server: $schema=../../../schemas/layouts.schema.json\n"
        'lineage: toy\ntitle: A toy  # so\nlayouts:\n  "1.0": {title: one}\n  "2.0": {title: two}\n'
    )


def test_the_meaning_of_shipped_rules_stays_and_only_keep_moves(tmp_path: Path) -> None:
    def meaning(text: str) -> str:
        report = Report()
        loaded = load_document(tmp_path, yaml.read_yaml(text, "x", report), report)
        assert loaded is not None
        return semantic_hash(loaded.model)

    sorted_files = 0
    for path in files_below(shipped_folder())[::4]:
        text = path.read_text(encoding="utf-8")
        made, said = fixed(text, path)
        assert set(said) <= {"sorted `keep`"}
        assert sorted(made.splitlines()) == sorted(text.splitlines()) or "keep: [" in text
        if said:
            sorted_files += 1
            assert meaning(made) == meaning(text)
            assert fixed(made, path) == (made, [])
    assert sorted_files


def test_included_rules_are_not_mended_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(migrate.MigrateError, match="M115"):
        migrate.lint(fix=True)


def test_a_file_that_cannot_be_written_is_told_and_stays(tmp_path: Path) -> None:
    (tmp_path / "y.yaml").write_text(RULE)
    (tmp_path / f".y.yaml.{os.getpid()}.partial").mkdir()
    with pytest.raises(migrate.MigrateError, match=r"M115.*cannot write"):
        migrate.lint([tmp_path], fix=True)
    assert (tmp_path / "y.yaml").read_text() == RULE
