"""Suppressions: `# migrate: allow M620 because the two axes are equal by construction`, on the line
of a finding or above it.

A suppression without a reason is a finding and suppresses nothing, and so is one that nothing needs
any more: else a file collects permissions that nobody can check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..core.diagnostics import Diagnostic, Span
from ..source import yaml

_COMMENT = re.compile(r"(?<!\S)#\s*migrate:\s*allow\b")
_FORM = re.compile(r"\s*(?P<codes>M6[0-9]{2}(?:\s*,?\s+M6[0-9]{2})*)\s+because\s+\S")
_CODE = re.compile(r"M6[0-9]{2}")
_SECOND = re.compile(r"\bM6[0-9]{2}\s+because\b")


@dataclass(frozen=True, slots=True)
class Allowed:
    """One code that a comment allows. `lines` are the lines whose findings it takes away."""

    code: str
    span: Span
    lines: frozenset[int]


def read_suppressions(
    document: yaml.Document, known: Callable[[str], bool]
) -> tuple[list[Allowed], list[Diagnostic]]:
    """What the file's comments allow, and M602 for comments that are no suppression; `known` says
    which codes are findings.
    """
    allowed: list[Allowed] = []
    wrong: list[Diagnostic] = []
    for number, text in enumerate(document.lines, 1):
        comments = [
            m for m in _COMMENT.finditer(text) if not document.is_text(number, m.start() + 1)
        ]
        if not comments:
            continue
        lines = {number}
        if not text[: comments[0].start()].strip():
            lines.add(_below(document.lines, number))
        ends = [*(m.start() for m in comments[1:]), len(text)]
        for match, end in zip(comments, ends, strict=True):
            span = Span(
                document.name,
                number,
                match.start() + 1,
                len(text[:end].rstrip()) - match.start(),
                text,
            )
            form = _FORM.match(text, match.end(), end)
            if form is None:
                hint = (
                    "write `# migrate: allow M620 because …`: codes, and why they do not apply here"
                )
                wrong.append(
                    Diagnostic(
                        "M602",
                        "a suppression needs the code of a finding and a reason",
                        (span,),
                        (),
                        hint,
                    )
                )
                continue
            if _SECOND.search(text, form.end(), end):
                hint = "write `# migrate: allow M620 because …` once for each reason"
                wrong.append(
                    Diagnostic(
                        "M602",
                        "a suppression has one reason, the second is not read",
                        (span,),
                        (),
                        hint,
                    )
                )
            for code in _CODE.findall(form["codes"]):
                if known(code):
                    allowed.append(Allowed(code, span, frozenset(lines)))
                else:
                    wrong.append(
                        Diagnostic(
                            "M602",
                            f"{code} is the code of no finding",
                            (span,),
                            (),
                            "`docs/lint.md` lists them",
                        )
                    )
    return allowed, wrong


def _below(lines: Sequence[str], number: int) -> int:
    """The first line below line `number` that is neither empty nor a comment of its own."""
    after = number
    while after < len(lines) and (
        not lines[after].strip() or lines[after].lstrip().startswith("#")
    ):
        after += 1
    return after + 1


def apply_suppressions(
    found: Iterable[Diagnostic], allowed: Sequence[Allowed], looked_for: Collection[str]
) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """The findings that nothing allows, with M603 for what allows nothing; and those that are
    allowed.

    `looked_for` are the codes of which findings would have been found: only of those a suppression
    is known to be unused.
    """
    used: set[int] = set()
    left: list[Diagnostic] = []
    taken: list[Diagnostic] = []
    for finding in found:
        by = [
            number
            for number, a in enumerate(allowed)
            if any(s.file == a.span.file and s.line in a.lines for s in finding.spans[:1])
            and a.code == finding.code
        ]
        used.update(by)
        (taken if by else left).append(finding)
    for number, a in enumerate(allowed):
        if number not in used and a.code in looked_for:
            left.append(
                Diagnostic(
                    "M603",
                    f"nothing here is {a.code} any more",
                    (a.span,),
                    (),
                    "remove the comment",
                )
            )
    return left, taken
