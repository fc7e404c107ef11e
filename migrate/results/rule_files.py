"""What `lint` and `test` answer."""

from __future__ import annotations

from ..core.document import DocumentPart
from ..core.errors import Diagnostic
from .shared import DocumentReport


class FixedRuleFile(DocumentPart):
    """A file that lint mended, and what it did."""

    file: str
    fixes: tuple[str, ...]


class LintReport(DocumentReport):
    """The findings of lint: `exit` is 0, 1 with findings, 2 if a file cannot be loaded."""

    KIND = "lint"
    exit: int
    files: tuple[str, ...]
    fixed: tuple[FixedRuleFile, ...]
    suppressed: int
    diagnostics: tuple[Diagnostic, ...]


class RuleTestCounts(DocumentPart):
    """How many rule files and checks."""

    files: int
    passed: int
    failed: int
    skipped: int


class RuleTestCheck(DocumentPart):
    """One check of a rule file: `status` is `passed`, `failed` or `skipped`."""

    kind: str
    name: str
    status: str
    reason: str
    diagnostics: tuple[Diagnostic, ...]


class RuleTestFile(DocumentPart):
    """A rule file with its checks."""

    id: str
    path: str
    checks: tuple[RuleTestCheck, ...]


class RuleTestReport(DocumentReport):
    """Whether rule files pass their tests and the checks that every rule must pass."""

    KIND = "test"
    specs: bool
    passed: bool
    counts: RuleTestCounts
    files: tuple[RuleTestFile, ...]


class SealedLineage(DocumentPart):
    """One lineage: `state` is `sealed`, `unchanged`, `open` (new files), `changed`, `unsealed`."""

    lineage: str
    lock: str
    files: int
    sum: str | None
    new: tuple[str, ...]
    state: str


class SealReport(DocumentReport):
    """Lineages sealed or looked at: `exit` is 0, or 1 where with `check` a lock does not fit."""

    KIND = "seal"
    exit: int
    check: bool
    lineages: tuple[SealedLineage, ...]
    diagnostics: tuple[Diagnostic, ...]
