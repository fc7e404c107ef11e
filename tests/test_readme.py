"""The README names targets and statuses that exist; `tests/docs` runs its blocks."""

from __future__ import annotations

import re

import format_table
from commandline import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_targets_that_are_named_are_in_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"\bmake ([a-z-]+)", README)
    assert {"test", "demo", "docs"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_package_is_installed_under_its_name() -> None:
    assert "$ pip install ckpt-migrate\n" in README
    assert 'name = "ckpt-migrate"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_users_come_first_and_developers_last() -> None:
    titles = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert (titles[0], titles[-1]) == ("Convert a checkpoint", "Develop")


def test_every_lineage_is_listed() -> None:
    from migrate.rules.families import families

    listed = set(
        re.findall(r"`([a-z0-9-]+)`", README.split("## Included lineages")[1].split("\n## ")[0])
    )
    shipped = {path.parent.name for path in (ROOT / "rules").glob("*/layouts.yaml")}
    assert shipped - families().keys() <= listed
    assert families().keys() <= shipped
    # the families are too many for the table: it says how many, and of how many model types
    kinds = sum(len(family.model_types) for family in families().values())
    assert f"| `hf-MODEL-TYPE`, {len(families())} more |" in README
    assert f"[{kinds} model types of transformers](docs/reference/catalogue.md)" in README


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    from migrate.core import errors

    table = README.split("## Exit status")[1].split("\n## ")[0]
    said = {int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    # no error: an answer of no, a bug
    assert said == {0, 1, 70, 130} | {c.exit_code for c in errors.MigrateError.__subclasses__()}


def test_the_number_formats_are_those_of_codecs_rules_and_data() -> None:
    assert format_table.shown(README) == format_table.table(), "python tests/format_table.py"


def test_what_is_recoded_is_planned() -> None:
    for codec, goals in format_table.RECODED.items():
        assert format_table.recodings(codec) == list(goals)
