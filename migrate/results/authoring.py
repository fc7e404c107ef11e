"""What `new` answers."""

from __future__ import annotations

from ..core.document import DocumentPart
from ..core.errors import Diagnostic
from .shared import DocumentReport


class RuleFileCounts(DocumentPart):
    """How many rules a made file has, patterns of keys that stay, tests, rules by guess, and such
    patterns by guess.
    """

    rules: int
    keep: int
    tests: int
    guessed: int
    keep_guessed: int


class NewReport(DocumentReport):
    """A new rule file: `files` were written, `diagnostics` is what lint says of them."""

    KIND = "new"
    id: str
    files: tuple[str, ...]
    counts: RuleFileCounts
    diagnostics: tuple[Diagnostic, ...]
