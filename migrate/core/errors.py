"""The exceptions of the project.

    MigrateError                 carries .diagnostics and .exit_code
    ├─ QuestionError         2   flags, rule files, lineages, a stale plan, a target that exists
    ├─ CheckpointError       3   the checkpoint is unreadable, unsafe, not accounted for, or would
    lose something └─ RunError              4   it failed while running; nothing was published
    unless the message says so

    OpError, PatternError        raised by ops and patterns, which know neither key nor file;
                                 the caller adds rule, key and span and turns them into a Diagnostic

The class follows from the exit status that stands in the page of the diagnostic's code
(`explain/<code>.md`), so a code cannot leave with two different statuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from .diagnostics import Diagnostic, Span
from .spelling import option


class MigrateError(Exception):
    """One or more diagnostics; `str()` is their full rendering. `permits` are the words of `allow`
    that would let some of them pass.
    """

    exit_code = 70

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        self.permits = tuple(dict.fromkeys(d.permit for d in self.diagnostics if d.permit))
        parts = [d.render() for d in self.diagnostics]
        if len(self.permits) > 1:
            parts.append(f"to permit all of this: {option('allow', *self.permits)}")
        super().__init__("\n\n".join(parts))


class QuestionError(MigrateError):
    exit_code = 2


class CheckpointError(MigrateError):
    exit_code = 3


class RunError(MigrateError):
    exit_code = 4


_BY_EXIT = {c.exit_code: c for c in (QuestionError, CheckpointError, RunError)}


class OpError(ValueError):
    """An op cannot take these tensors. `code` is a diagnostic code, `notes` and `help` go into the
    Diagnostic.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        notes: Iterable[str] = (),
        help: str | None = None,
        permit: str = "",
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.notes, self.help, self.permit = (
            code,
            message,
            tuple(notes),
            help,
            permit,
        )


class PatternError(ValueError):
    """A pattern cannot be understood. `start` and `end` are code-point offsets into the pattern's
    text.
    """

    def __init__(
        self, code: str, message: str, start: int, end: int, *, help: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.start, self.end, self.help = code, message, start, end, help


def raise_all(diagnostics: Iterable[Diagnostic]) -> NoReturn:
    """Raises the error class of the diagnostics' exit status; a wrong question outranks a bad
    checkpoint.
    """
    found = tuple(diagnostics)
    errors = [d for d in found if d.severity == "error"] or found
    raise _BY_EXIT[min(d.exit_status for d in errors)](found)


class Report:
    """Collects diagnostics so that all problems come out at once."""

    __slots__ = ("diagnostics",)

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def add(
        self,
        code: str,
        message: str,
        *,
        spans: tuple[Span, ...] = (),
        notes: tuple[str, ...] = (),
        help: str | None = None,
        permit: str = "",
    ) -> None:
        self.diagnostics.append(Diagnostic(code, message, spans, notes, help, permit=permit))

    def has_errors(self) -> bool:
        """Whether one of them is an error."""
        return any(d.severity == "error" for d in self.diagnostics)

    def check(self) -> None:
        """Raises all collected diagnostics if one of them is an error, repetitions condensed."""
        if self.has_errors():
            raise_all(condensed(self.diagnostics))


def condensed(
    diagnostics: Sequence[Diagnostic], limit: int = 3, placeless: int = 20
) -> list[Diagnostic]:
    """The diagnostics with at most `limit` of one code at one place, or `placeless` of one that has
    none; the last of these says how many more there are.

    A rule that is wrong is wrong in every layer, and a checkpoint of another family is wrong in
    every key.
    """
    alike: dict[tuple[Any, ...], int] = {}
    for found in diagnostics:
        key = _kind(found)
        alike[key] = alike.get(key, 0) + 1
    out: list[Diagnostic] = []
    seen: dict[tuple[Any, ...], int] = {}
    for found in diagnostics:
        key, most = _kind(found), limit if found.spans else placeless
        seen[key] = seen.get(key, 0) + 1
        more = alike[key] - most
        if seen[key] == most and more > 0:
            found = replace(found, notes=(*found.notes, f"and {more:,} more like this"))
        if seen[key] <= most:
            out.append(found)
    return out


def _kind(found: Diagnostic) -> tuple[Any, ...]:
    return found.code, found.severity, found.permit, found.spans


def fail(
    code: str,
    message: str,
    *,
    spans: tuple[Span, ...] = (),
    notes: tuple[str, ...] = (),
    help: str | None = None,
    permit: str = "",
) -> NoReturn:
    """Raises the one diagnostic."""
    raise_all([Diagnostic(code, message, spans, notes, help, permit=permit)])
