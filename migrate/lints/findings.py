"""All families over all files: what is found, less what the files allow."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from ..core.errors import PAGES, Diagnostic, Span, did_you_mean, fail, page, printable
from ..core.types import PathLike
from ..rules.files import LoadedFile
from ..rules.lineage import Lineage, Matcher
from ..rules.packs import built_in
from ..ruletests.properties import ALLOWABLE
from ..source import yaml
from ..source.index import Index
from . import file, layout, matching, shape
from .inputs import FileSet, finding, read_inputs
from .layout import CODES, find_misfits

FAMILIES: tuple[Callable[[FileSet], Iterator[Diagnostic]], ...] = (
    file.find_problems,
    matching.find_problems,
    shape.find_problems,
    file.find_losses,
    layout.find_problems,
)
# codes that speak of the comments themselves
_ABOUT_COMMENTS = ("M602", "M603")


@dataclass(frozen=True, slots=True)
class LintFindings:
    """`problems`: files that the loader refuses, which are linted no further. `suppressed`: how
    many findings comments allow.
    """

    files: tuple[str, ...]
    problems: tuple[Diagnostic, ...]
    findings: tuple[Diagnostic, ...]
    suppressed: int


def codes() -> dict[str, str]:
    """Code -> name of each finding that lint can make."""
    return {path.stem: page(path.stem).name for path in sorted(PAGES.glob("M6*.md"))}


def lint(
    paths: Sequence[PathLike] = (),
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    index: Index | None = None,
    read_side: Callable[[str], bytes | None] = lambda name: None,
    loaded: Iterable[LoadedFile] = (),
    lineages: Mapping[Path, Lineage] = MappingProxyType({}),
) -> LintFindings:
    """The findings in the rule files and layouts at `paths`, by file and line.

    Without paths: `./rules`, or the rules that ship with migrate. `select` and `ignore` hold codes
    or names of the findings that are shown; `index` is a checkpoint that the rules are held against
    as well, `read_side` answers with its side files. Rule files that are `loaded` without problems
    are not read again, nor are `lineages`, by their folders. M115 for a path or a code that there
    is not.
    """
    known = set(codes())
    wanted = (_codes(select) or known) - _codes(ignore)
    filesets = read_inputs(paths or [_default()], loaded, lineages)
    families: Iterator[Diagnostic] = chain.from_iterable(
        family(fileset) for fileset in filesets.filesets for family in FAMILIES
    )
    if index is not None:
        match = Matcher(index)
        families = chain(
            families,
            *(
                find_misfits(fileset, index, match, read_side, filesets.asked)
                for fileset in filesets.filesets
            ),
        )
    # all of them, because what a comment allows in vain depends on all that is found
    found = [d for d in families if any(span.file in filesets.asked for span in d.spans)]
    looked_at = known if index is not None else known - set(CODES)
    allowed: list[Allowed] = []
    wrong: list[Diagnostic] = []
    for document in filesets.asked.values():
        if document is not None:
            own, bad = _read_suppressions(
                document,
                lambda code: code in ALLOWABLE or (code in known and code not in _ABOUT_COMMENTS),
            )
            allowed += own
            wrong += bad
    left, suppressed = _apply_suppressions(found, allowed, looked_at)
    left = [d for d in (*left, *wrong) if d.code in wanted]
    order = {name: number for number, name in enumerate(filesets.asked)}
    left.sort(
        key=lambda d: (
            order.get(d.spans[0].file, len(order)),
            d.spans[0].line,
            d.spans[0].column,
            d.code,
        )
    )
    return LintFindings(
        tuple(filesets.asked),
        filesets.problems,
        tuple(left),
        sum(d.code in wanted for d in suppressed),
    )


def _default() -> Path:
    here = Path("rules")
    if here.is_dir():
        return here
    folder = built_in().folder
    if folder is None:
        fail("M507", "there is no folder `rules` here", help="give rule files or folders of them")
    return folder


def _codes(words: Iterable[str]) -> set[str]:
    known = codes()
    by_name = {name: code for code, name in known.items()}
    out = set()
    for word in (w.strip() for words_ in words for w in words_.split(",")):
        code = by_name.get(word, word)
        if code not in known:
            hint = did_you_mean(word, [*known, *by_name]) or "`migrate explain` lists them"
            fail("M115", f"lint has no finding `{printable(word)}`", help=hint)
        out.add(code)
    return out


# Suppressions: `# migrate: allow M620 because the two axes are equal by construction`, on the line
# of a finding or above it. A suppression without a reason is a finding and suppresses nothing, and
# so is one that is no longer needed: else a file collects permissions that cannot be checked.
_COMMENT = re.compile(r"(?<!\S)#\s*migrate:\s*allow\b")
_FORM = re.compile(r"\s*(?P<codes>M[67][0-9]{2}(?:\s*,?\s+M[67][0-9]{2})*)\s+because\s+\S")
_CODE = re.compile(r"M[67][0-9]{2}")
_SECOND = re.compile(r"\bM[67][0-9]{2}\s+because\b")


@dataclass(frozen=True, slots=True)
class Allowed:
    """One code that a comment allows. `lines` are the lines whose findings it takes away."""

    code: str
    span: Span
    lines: frozenset[int]


def _read_suppressions(
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
                    finding(
                        "M602", "a suppression needs the code of a finding and a reason", span, hint
                    )
                )
                continue
            if _SECOND.search(text, form.end(), end):
                hint = "write `# migrate: allow M620 because …` once for each reason"
                wrong.append(
                    finding(
                        "M602", "a suppression has one reason; the second is not read", span, hint
                    )
                )
            for code in _CODE.findall(form["codes"]):
                if known(code):
                    allowed.append(Allowed(code, span, frozenset(lines)))
                else:
                    wrong.append(
                        finding(
                            "M602",
                            f"{code} is the code of no finding",
                            span,
                            "`migrate explain` lists them",
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


def _apply_suppressions(
    found: Iterable[Diagnostic], allowed: Sequence[Allowed], looked_for: Collection[str]
) -> tuple[list[Diagnostic], list[Diagnostic]]:
    """The findings that nothing allows, with M603 for what allows none; and the allowed ones.

    `looked_for` are the codes of which findings would have been found: only theirs can be unused.
    """
    used: set[int] = set()
    left: list[Diagnostic] = []
    taken: list[Diagnostic] = []
    for problem in found:
        by = [
            number
            for number, a in enumerate(allowed)
            if any(s.file == a.span.file and s.line in a.lines for s in problem.spans[:1])
            and a.code == problem.code
        ]
        used.update(by)
        (taken if by else left).append(problem)
    for number, a in enumerate(allowed):
        if number not in used and a.code in looked_for:
            left.append(
                finding("M603", f"{a.code} no longer occurs here", a.span, "remove the comment")
            )
    return left, taken
