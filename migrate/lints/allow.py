"""Suppressions: `# migrate: allow M620 because the two axes are equal by construction`, on the line of a finding or above it.

A suppression without a reason is a finding and suppresses nothing, and so is one that nothing needs any more: else a
file collects permissions that nobody can check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..core.diagnostics import Diagnostic, Span
from ..source import yaml

_COMMENT = re.compile(r"(?:^|\s)(?P<all>#\s*migrate:\s*allow\b(?P<rest>.*))$")
_FORM = re.compile(r"\s*(?P<codes>M6[0-9]{2}(?:\s*,?\s+M6[0-9]{2})*)\s+because\s+\S")
_CODE = re.compile(r"M6[0-9]{2}")


@dataclass(frozen=True, slots=True)
class Allowed:
    """One code that a comment allows. `lines` are the lines whose findings it takes away."""

    code: str
    span: Span
    lines: frozenset[int]


def read(document: yaml.Document, known: Callable[[str], bool]) -> tuple[list[Allowed], list[Diagnostic]]:
    """What the file's comments allow, and M602 for comments that are no suppression; `known` says which codes are findings."""
    allowed: list[Allowed] = []
    wrong: list[Diagnostic] = []
    for number, text in enumerate(document.lines, 1):
        match = _COMMENT.search(text)
        if match is None:
            continue
        span = Span(document.name, number, match.start("all") + 1, len(match["all"].rstrip()), text)
        form = _FORM.match(match["rest"])
        if form is None:
            hint = "write `# migrate: allow M620 because …`: codes, and why they do not apply here"
            wrong.append(Diagnostic("M602", "a suppression needs the code of a finding and a reason", (span,), (), hint))
            continue
        lines = {number}
        if not text[: match.start("all")].strip():
            lines.add(_below(document.lines, number))
        for code in _CODE.findall(form["codes"]):
            if known(code):
                allowed.append(Allowed(code, span, frozenset(lines)))
            else:
                wrong.append(Diagnostic("M602", f"{code} is the code of no finding", (span,), (), "`docs/lint.md` lists them"))
    return allowed, wrong


def _below(lines: Sequence[str], number: int) -> int:
    """The first line below line `number` that is neither empty nor a comment of its own."""
    after = number
    while after < len(lines) and (not lines[after].strip() or lines[after].lstrip().startswith("#")):
        after += 1
    return after + 1


def sift(found: Iterable[Diagnostic], allowed: Sequence[Allowed], judged: Callable[[str], bool]) -> tuple[list[Diagnostic], int]:
    """The findings that nothing allows and M603 for what allows nothing, with the number of those that were allowed.

    `judged` says whether findings of a code were looked for at all: only then is a suppression known to be unused.
    """
    used: set[int] = set()
    left: list[Diagnostic] = []
    taken = 0
    for finding in found:
        by = [
            number
            for number, a in enumerate(allowed)
            if any(s.file == a.span.file and s.line in a.lines for s in finding.spans[:1]) and a.code == finding.code
        ]
        used.update(by)
        taken += bool(by)
        if not by:
            left.append(finding)
    for number, a in enumerate(allowed):
        if number not in used and judged(a.code):
            left.append(Diagnostic("M603", f"nothing here is {a.code} any more", (a.span,), (), "remove the comment"))
    return left, taken
