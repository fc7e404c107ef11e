"""The verb `seal`: locks of lineages written, or held against what the rules mean now."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import Diagnostic, Report, Span, did_you_mean, fail, listed, option, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import path_text
from ..results import SealReport
from ..rules.files import LAYOUTS, LoadedFile
from ..rules.lineage import Lineage
from ..rules.locks import LOCK, Lock, compared, lock_of, read_lock
from ..rules.packs import Pack, read_lineage
from ..source import yaml

# findings of lint that keep a lineage from being sealed, although they are no errors
UNSEALABLE = frozenset({"M652"})


@dataclass(frozen=True, slots=True)
class _Sealed:
    """One lineage: what its lock says, what it would say now, and what is wrong."""

    name: str
    home: Path
    old: Lock | None
    new: Lock
    files: int
    problems: tuple[Diagnostic, ...]


@guarded
def seal(
    paths: PathLike | Iterable[PathLike] = (),
    *,
    check: bool = False,
    replace: bool = False,
    rules: PathLike | None = None,
) -> SealReport:
    """Write what the rules of lineages mean into their locks, `rules.lock`.

    From then on a change of what a sealed file or layout means is refused (M521) wherever the
    lineage is used. Prose and tests may change, and new files may come.

    Args:
        paths: Lineages: their names, or their folders. Default: none: all those of `rules`.
        check: Write nothing; say whether every lock fits what is there. Default: False.
        replace: Seal files again that mean something else than when they were sealed, and forget
            those that are gone: for rules that were never released. Default: False.
        rules: The folder of lineages. Default: `./rules`.

    Returns:
        A `SealReport`: its `exit` is 0, and 1 where with `check` a lock does not fit.

    Raises:
        MigrateError: M115 for wrong arguments, M507 for a lineage that is not there, M521 for what
            changed since it was sealed, M522 for a lock that cannot be read, M523 for rules that
            cannot be sealed, M1xx for rule files that cannot be read. Nothing is written then.

    Example:
        >>> report = migrate.seal("rules/hf-mixtral", check=True)
        >>> report.exit, report.lineages[0].state
        (0, 'unchanged')
    """
    if check and replace:
        fail("M115", f"{option('check')} writes nothing, and {option('replace')} is for writing")
    found = [_looked_at(name, home) for name, home in _homes(paths, rules).items()]
    report = Report()
    for one in found:
        report.diagnostics.extend(one.problems if check or not replace else _others(one.problems))
    if not check:
        report.check()
        for one in found:
            _write(one.new)
    wrong = {one.name for one in found if one.problems}
    missing = [] if not check else [o for o in found if o.old is None and o.name not in wrong]
    report.diagnostics.extend(_unsealed(one) for one in missing)
    return SealReport.of(
        exit=int(bool(report.diagnostics)),
        check=check,
        lineages=[_told(one, check) for one in found],
        diagnostics=[d.to_json() for d in report.diagnostics],
    )


def _others(problems: Iterable[Diagnostic]) -> list[Diagnostic]:
    return [d for d in problems if d.code != "M521"]


def _homes(paths: PathLike | Iterable[PathLike], rules: PathLike | None) -> dict[str, Path]:
    """The folders of the lineages that are meant, by name."""
    given = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
    folder = Path("rules") if rules is None else Path(path_text("rules", rules))
    known = dict(Pack(str(folder), "local", folder).lineages) if folder.is_dir() else {}
    if not given:
        if not known:
            lost = Pack(str(folder), "local", folder).astray() if folder.is_dir() else None
            fail(
                "M507",
                f"{printable(str(folder), 300)} is not a folder of rules",
                notes=() if lost is None else lost.notes,
                help=f"name a lineage's folder, or the folder of all with {option('rules', 'DIR')}",
            )
        return known
    out: dict[str, Path] = {}
    for one in given:
        text = path_text("paths", one)
        place = Path(text)
        if text in known:
            out[text] = known[text]
        elif place.is_dir() and (inside := Pack(text, "local", place).lineages):
            out |= inside
        else:
            hint = did_you_mean(text, list(known)) or (
                f"the lineages of {printable(str(folder), 300)} are {listed(list(known))}"
                if known
                else f"name its folder, or the folder of all with {option('rules', 'DIR')}"
            )
            fail("M507", f"there is no lineage `{printable(text, 300)}`", help=hint)
    return out


def _looked_at(name: str, home: Path) -> _Sealed:
    from ..rules.loading import read_files

    report = Report()
    documents: dict[Path, yaml.Document] = {}
    lineage = read_lineage(name, home, report, documents)
    report.check()
    if lineage is None:
        raise ValueError(f"{home}: nothing was read and nothing was reported")
    paths = [path for edge in lineage.edges for path in (*edge.files, *edge.superseded)]
    files = read_files(paths, report, documents)
    report.check()
    old, new = read_lock(home), lock_of(home, lineage, files)
    spans = {file.model.id: file.span("id") for file in files}
    spans[LAYOUTS] = Span(str(home / LAYOUTS), 1, 1)
    problems = [] if old is None else compared(old, new, spans)
    problems += _unsealable(home, lineage, files)
    return _Sealed(name, home, old, new, len(files), tuple(problems))


def _unsealable(home: Path, lineage: Lineage, files: Sequence[LoadedFile]) -> list[Diagnostic]:
    """M523 for each file without tests, and for errors and guesses that lint finds."""
    from ..lints.findings import lint

    out = [
        Diagnostic(
            "M523",
            f"`{printable(file.model.id)}` has no tests",
            spans=(file.span("id"),),
            help="write `tests:` with an example of each rule; `migrate explain M622` shows how",
        )
        for file in files
        if not file.model.tests
    ]
    found = lint([home], loaded=files, lineages={home: lineage})
    return out + [
        Diagnostic(
            "M523",
            f"lint refuses the lineage: {d.message}",
            spans=d.spans,
            notes=d.notes,
            help=d.help,
        )
        for d in (*found.problems, *found.findings)
        if (d.severity == "error" or d.code in UNSEALABLE) and d.code != "M521"
    ]


def _unsealed(one: _Sealed) -> Diagnostic:
    return Diagnostic(
        "M521",
        f"lineage `{printable(one.name)}` has no {LOCK}",
        spans=(Span(str(one.home / LAYOUTS), 1, 1),),
        help=f"`migrate seal {printable(one.name)}` writes it",
    )


def _told(one: _Sealed, check: bool) -> dict[str, Any]:
    old = {} if one.old is None else one.old.entries
    same = one.old is not None and one.old.text() == one.new.text()
    shown = one.old if check else one.new
    return {
        "lineage": one.name,
        "lock": str(one.home / LOCK),
        "files": one.files,
        "sum": None if shown is None else shown.sum,
        "new": sorted(one.new.entries.keys() - old.keys()),
        "state": "unsealed"
        if one.old is None and check
        else "unchanged"
        if same
        else "open"
        if check and not one.problems
        else "changed"
        if check
        else "sealed",
    }


def _write(lock: Lock) -> None:
    """Writes the lock beside itself first: what is there is whole at any time."""
    if lock.path.is_file() and lock.path.read_bytes() == lock.text().encode("ascii"):
        return
    new = lock.path.with_name(f".{lock.path.name}.new")
    try:
        new.write_text(lock.text(), encoding="ascii")
        os.replace(new, lock.path)
    except OSError as error:
        fail(
            "M115",
            f"cannot write {printable(str(lock.path), 300)}: {error.strerror or error}",
            help="seal a copy of the lineage that can be written to",
        )
