"""A pytest plugin: `pytest rules/` runs the tests of rule files and shows what `migrate test` does.

It is loaded in every pytest run of an environment that has migrate, so it costs nothing and takes
nothing until it meets a rule file: a YAML file below a folder called `rules`, or one named on the
command line, that begins like one. `-p no:migrate` switches it off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..ruletests.checks import CheckOutcome, FileChecks, RuleCheck

_SUFFIXES = (".yaml", ".yml")
_FIELDS = [re.compile(rb"(?m)^" + name + rb"[ \t]*:") for name in (b"id", b"lineage", b"edge")]
_HEAD = 1 << 14


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    """A collector for a rule file; None for everything else."""
    if file_path.suffix not in _SUFFIXES:
        return None
    folders = (
        file_path.relative_to(parent.config.rootpath).parts[:-1]
        if file_path.is_relative_to(parent.config.rootpath)
        else ()
    )
    if "rules" not in folders and not _is_named(file_path, parent):
        return None
    collector: pytest.File | None = (
        RuleTests.from_parent(parent, path=file_path) if is_rule_file(file_path) else None
    )
    return collector


def _is_named(path: Path, parent: pytest.Collector) -> bool:
    """Whether the command line names the file, or a folder called `rules` that it lies in."""
    session = parent.session
    return session.isinitpath(path) or any(
        folder.name == "rules" and session.isinitpath(folder) for folder in path.parents
    )


def is_rule_file(path: Path) -> bool:
    """Whether a file begins as rule files do: `id`, `lineage`, `edge` at the margin. Not parsed."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return all(field.search(head) for field in _FIELDS)


class RuleFailed(Exception):  # noqa: N818 - it is an outcome, not an error of the caller
    """A check of a rule file failed; the text is what `migrate test` prints."""


class RuleTests(pytest.File):
    """One rule file."""

    def collect(self) -> Iterator[RuleItem]:
        from ..core.errors import MigrateError
        from ..ruletests.checks import FileChecks
        from ..ruletests.run import load_rule_files

        try:
            file_checks = FileChecks(load_rule_files([self.path])[0])
        except MigrateError as error:
            raise self.CollectError(str(error)) from None
        for check in file_checks.checks():
            yield RuleItem.from_parent(self, name=check.name, file_checks=file_checks, check=check)


class RuleItem(pytest.Item):
    """One check of a rule file."""

    def __init__(self, *, file_checks: FileChecks, check: RuleCheck, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.file_checks, self.check = file_checks, check

    def runtest(self) -> None:
        """Runs the check; skipped where it says nothing about the file."""
        outcome: CheckOutcome = self.file_checks.run(self.check)
        if outcome.status == "skipped":
            pytest.skip(outcome.reason)
        if outcome.status == "failed":
            raise RuleFailed("\n\n".join(d.render() for d in outcome.diagnostics))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Our text without a traceback, where the check failed and not this code."""
        if isinstance(excinfo.value, RuleFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """The line of the test in its file."""
        return self.path, self.check.span.line - 1, f"{self.file_checks.file.model.id}: {self.name}"
