"""The verb `test`: which rule files are meant, and the answer. What a check is stands in `checks`,
loaded when there is one to run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import Report, fail, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import path_text
from ..results import RuleTestReport

if TYPE_CHECKING:
    from .binding import CompiledFile


@guarded
def test(
    paths: PathLike | Iterable[PathLike] = (),  # noqa: PT028 - the verb is called so; it is no test
    *,
    select: str = "",  # noqa: PT028
    specs: bool = False,  # noqa: PT028
    fail_fast: bool = False,  # noqa: PT028
) -> RuleTestReport:
    """Run the tests of rule files, and check what must hold of every rule.

    Args:
        paths: Rule files or folders. Default: none: those in `./rules`, else those included with
            migrate.
        select: A part of the names of checks, or of ids of files, to run. Default: all.
        specs: Check names, shapes and dtypes only, and make no tensor. Default: False.
        fail_fast: Stop at the first check that fails. Default: False.

    Returns:
        A `RuleTestReport`; `passed` says whether nothing failed.

    Raises:
        MigrateError: M1xx to M3xx for what is wrong with the files themselves, all at once; M115
            where there is nothing to test.

    Example:
        >>> migrate.test("rename.yaml", specs=True).passed
        True
    """
    from ..rules.packs import rule_files
    from .checks import FAILED, PASSED, SKIPPED, FileChecks

    given = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
    files = load_rule_files(rule_files([Path(path_text("paths", path)) for path in given]))
    described: list[dict[str, Any]] = []
    counts = dict.fromkeys((PASSED, FAILED, SKIPPED), 0)
    for file in files:
        file_checks = FileChecks(file, specs, files)
        checks = file_checks.checks(select)
        if not checks or (fail_fast and counts[FAILED]):
            continue
        outcomes = []
        for check in checks:
            outcome = file_checks.run(check)
            counts[outcome.status] += 1
            outcomes.append(outcome.to_json())
            if fail_fast and counts[FAILED]:
                break
        described.append({"id": file.model.id, "path": str(file.loaded.path), "checks": outcomes})
    if not described:
        fail(
            "M115",
            f"no check of {len(files)} rule files is called {printable(select)!r}",
            help="-k takes a part of a name or of an id",
        )
    return RuleTestReport.of(
        specs=specs,
        passed=not counts[FAILED],
        counts={"files": len(described), **counts},
        files=described,
    )


def load_rule_files(paths: Sequence[Path]) -> list[CompiledFile]:
    """The rule files, their captures checked as well; raises all problems of all of them."""
    from ..rules.loading import load_files
    from .binding import compiled

    report = Report()
    files = [compiled(file, report) for file in load_files(paths)]
    report.check()
    return files
