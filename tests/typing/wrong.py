"""Mistakes that type checkers must find, one a line; each line says so to both of them."""

from __future__ import annotations

from pathlib import Path

import migrate
from migrate.results import ApplyReport


def mistakes(path: Path, report: ApplyReport) -> None:
    migrate.apply(path, to="a@b")  # wrong: no output is given
    migrate.apply(path, "new", too="a@b")  # wrong: no such argument
    migrate.apply({}, "new", inform=print, to="a@b")  # wrong: the report says it all
    migrate.downgrade(path, "back", threads="2")  # wrong: a number
    migrate.lint(path, at=1)  # wrong: text
    report.path = "elsewhere"  # wrong: read-only
    report.paths  # wrong: no such field
    report.files["x"].xxh3  # wrong: no such field
