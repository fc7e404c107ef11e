"""All families over all files: what is found, less what the files allow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..core.diagnostics import PAGES, Diagnostic, did_you_mean, fail, page, printable
from ..rules.packs import built_in
from ..source.index import Index
from . import advice, allow, checkpoint, file, layout, loss, matching, shape
from .inputs import Family, read_inputs

FAMILIES: tuple[Family, ...] = (file, matching, shape, loss, layout, advice)
# codes that speak of the comments themselves
_ABOUT_COMMENTS = ("M602", "M603")


@dataclass(frozen=True, slots=True)
class LintFindings:
    """`problems`: files that the loader refuses, which are linted no further. `suppressed`: how
    many findings comments allow.
    """

    files: tuple[str, ...]
    problems: tuple[Diagnostic, ...]
    found: tuple[Diagnostic, ...]
    suppressed: int


def codes() -> dict[str, str]:
    """Code -> name of each finding that lint can make."""
    return {path.stem: page(path.stem).name for path in sorted(PAGES.glob("M6*.md"))}


def lint(
    paths: Sequence[str | os.PathLike[str]] = (),
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    index: Index | None = None,
    read_side: Callable[[str], bytes | None] = lambda name: None,
) -> LintFindings:
    """The findings in the rule files and layouts at `paths`, by file and line.

    Without paths: `./rules`, or the rules that ship with migrate. `select` and `ignore` hold codes
    or names of the findings that are shown; `index` is a checkpoint that the rules are held against
    as well, `read_side` answers with its side files. M115 for a path or a code that there is not.
    """
    known = set(codes())
    wanted = (_codes(select) or known) - _codes(ignore)
    filesets = read_inputs(paths or [_default()])
    families: Iterator[Diagnostic] = chain.from_iterable(
        family.find_problems(fileset) for fileset in filesets.filesets for family in FAMILIES
    )
    if index is not None:
        families = chain(
            families,
            *(
                checkpoint.find_problems(fileset, index, read_side, filesets.asked)
                for fileset in filesets.filesets
            ),
        )
    # all of them, because what a comment allows in vain depends on all that is found
    found = [d for d in families if any(span.file in filesets.asked for span in d.spans)]
    looked_at = known if index is not None else known - set(checkpoint.CODES)
    allowed: list[allow.Allowed] = []
    wrong: list[Diagnostic] = []
    for document in filesets.asked.values():
        if document is not None:
            own, bad = allow.read_suppressions(
                document, lambda code: code in known and code not in _ABOUT_COMMENTS
            )
            allowed += own
            wrong += bad
    left, suppressed = allow.apply_suppressions(found, allowed, looked_at)
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
            hint = did_you_mean(word, [*known, *by_name]) or "`docs/lint.md` lists them"
            fail("M115", f"lint has no finding `{printable(word)}`", help=hint)
        out.add(code)
    return out
