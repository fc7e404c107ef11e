"""What is wrong in one stream: the first problems in words, the rest as a number.

A hostile file can hold millions of problems, and nobody reads more than some of them.
"""

from __future__ import annotations

from ...core.diagnostics import Diagnostic, printable
from ...core.errors import raise_all

MOST = 20


class Findings:
    """The problems of the stream `name`, which is printable here. `count` is how many there are, of
    which `MOST` are kept.
    """

    __slots__ = ("_kept", "count", "name")

    def __init__(self, name: str) -> None:
        self.name = printable(name, 400)
        self.count = 0
        self._kept: list[Diagnostic] = []

    def add(self, code: str, message: str, help: str | None = None) -> None:
        """Adds a problem; `message` goes on after the stream's name."""
        self.count += 1
        if len(self._kept) < MOST:
            self._kept.append(Diagnostic(code, f"{self.name}: {message}", help=help))

    def check(self, *others: Diagnostic) -> None:
        """Raises `others` and what was added, if there is any of them; the last line counts what
        was not kept.
        """
        found = [*others, *self._kept]
        if self.count > MOST:
            found.append(
                Diagnostic(
                    self._kept[-1].code,
                    f"{self.name}: {self.count - MOST:,} more contradictions like these",
                )
            )
        if found:
            raise_all(found)
