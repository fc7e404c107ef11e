"""Where a new rule file stands, and how it comes there: loaded and linted before anyone sees it.

What `new` writes is put into a copy of its lineage first. Only what loads there is published, under
names that did not exist; a file that is there is never touched.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ..core.errors import Diagnostic, MigrateError, Report, Span, fail, option, printable
from ..lints.findings import lint
from ..rules.files import LAYOUTS
from ..rules.lineage import Lineage
from ..rules.packs import built_in, read_lineage
from . import scaffold
from .pack import PackFolder, example_layouts

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
_TWICE = (
    "# migrate: allow M709 because the rules take what they make: "
    "apply them once, or put them into a lineage, whose stamp tells"
)


@dataclass(frozen=True, slots=True)
class NewFile:
    """Where a rule file goes and what it is called; `layouts` is None where the lineage has its
    own, or where the file stands alone. `home` is the folder of its lineage, `around` are the files
    of a new pack around it.
    """

    file: Path
    id: str
    lineage: str
    edge: tuple[str, str]
    home: Path | None
    layouts: str | None
    around: Mapping[Path, str] = field(default_factory=dict)

    @property
    def schema(self) -> str:
        return scaffold.schema_path((3 if self.home else 1) + bool(self.around), "rulefile")

    @property
    def slug(self) -> str:
        return self.id.rsplit("/", 1)[-1]


def alone(file: Path, start: str | None) -> NewFile:
    """The place of a rule file without a lineage."""
    if file.exists():
        _refuse_existing(file)
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in file.stem).strip("-") or "new"
    return NewFile(file, f"local/new/{slug}", "local", (start or "old", "new"), None, None)


def in_pack(name: str | None, start: str | None, pack: PackFolder) -> NewFile:
    """The place of LINEAGE/TO/SLUG in a new pack, without a name that of its example; M904 where a
    file of the pack is there.
    """
    place = in_lineage(name or pack.example, start, pack.rules, deeper=1)
    lineage, goal, _ = place.id.split("/")
    around = pack.files(lineage, goal)
    for file in around:
        if file.exists():
            _refuse_existing(file)
    layouts = place.layouts
    if name is None and layouts is not None:
        layouts = example_layouts(layouts)
    return replace(place, around=around, layouts=layouts)


def in_lineage(name: str, start: str | None, root: Path, deeper: int = 0) -> NewFile:
    """The place of LINEAGE/TO/SLUG below `root`; M904 for a file that is there. Schemas are looked
    for beside `root`, or `deeper` folders above.
    """
    parts = name.split("/")
    if len(parts) != 3 or not all(_PART.fullmatch(part) for part in parts):
        fail(
            "M115",
            f"`{printable(name)}` is not LINEAGE/TO/SLUG",
            help="such as hf-mixtral/v5/fuse-experts: letters, digits, `-`, `_` and dots",
        )
    lineage, goal, slug = parts
    home = root / lineage
    file = home / goal / f"{slug}.yaml"
    if file.exists():
        _refuse_existing(file)
    if (home / LAYOUTS).exists():
        report = Report()
        known = read_lineage(lineage, home, report)
        report.check()
        if known is None:
            fail("M507", f"{home / LAYOUTS} cannot be read")
        return NewFile(file, name, lineage, _edge(known, start, goal, home), home, None)
    shipped = built_in().folder
    if shipped is not None and (shipped / lineage).is_dir() and shipped.resolve() != root.resolve():
        fail(
            "M508",
            f"lineage `{lineage}` is included with migrate",
            help="choose another name for yours",
        )
    start = start or _before(goal)
    if start == goal:
        fail("M115", f"an edge leads from one layout to another, not from `{goal}` to itself")
    text = scaffold.layouts_text(lineage, start, goal, scaffold.schema_path(2 + deeper, "layouts"))
    return NewFile(file, name, lineage, (start, goal), home, text)


def _edge(known: Lineage, start: str | None, goal: str, home: Path) -> tuple[str, str]:
    for layout in (goal, *([start] if start is not None else [])):
        if layout not in known.names:
            fail(
                "M501",
                f"lineage `{known.name}` has no layout `{printable(layout)}`",
                help=f"add it to {home / LAYOUTS} first",
            )
    if start is not None:
        return start, goal
    names = known.names
    last = [edge.source for edge in known.edges if edge.target == goal and edge.source != goal]
    at = names.index(goal)
    before = names[at - 1 : at] if known.ordered else []
    others = [name for name in names if name != goal]
    found = [*before, *reversed(last), *others]
    if not found:
        fail(
            "M115",
            f"no layout leads to `{goal}` yet",
            help=f"name one: {option('from_', 'LAYOUT')}",
        )
    return found[0], goal


def _before(goal: str) -> str:
    """The layout that a new one comes after: `v1` before `v2`, else `old`."""
    numbered = _NUMBERED.fullmatch(goal)
    if numbered and int(numbered[2]) > 1:
        return f"{numbered[1]}{int(numbered[2]) - 1}"
    return "old"


def _refuse_existing(file: Path) -> None:
    fail("M904", f"{printable(str(file))} exists", help="choose another name, or move it away")


def publish(place: NewFile, text: str) -> tuple[list[Path], list[Diagnostic]]:
    """Writes the files, and answers with them and with what lint says of them. Raises the problems
    of a file that does not load, and M904 for one that came to be in the meantime.
    """
    if place.home is None:
        text = _alone_again(place, text)
    files = {place.file: text}
    if place.home is not None and place.layouts is not None:
        files = {place.home / LAYOUTS: place.layouts, **files}
    with TemporaryDirectory(prefix="migrate-new-") as made:
        findings = _checked(place, files, Path(made))
    files = {**place.around, **files}
    _written(files)
    return list(files), findings


def _alone_again(place: NewFile, text: str) -> str:
    """The text; of rules that take what they make, and no lineage keeps from a second run, with a
    comment that allows this.
    """
    from ..ruletests.checks import FAILED, TWICE, FileChecks
    from ..ruletests.run import load_rule_files

    with TemporaryDirectory(prefix="migrate-new-") as folder:
        tried = Path(folder) / place.file.name
        tried.write_text(text, encoding="utf-8")
        try:
            (file,) = load_rule_files([tried])
        except MigrateError:
            # lint reports it
            return text
        checks = FileChecks(file, specs=True)
        if all(checks.run(check).status != FAILED for check in checks.checks(TWICE)):
            return text
    head, _, rest = text.partition("\n")
    return f"{head}\n{_TWICE}\n{rest}"


def _checked(place: NewFile, files: Mapping[Path, str], folder: Path) -> list[Diagnostic]:
    """What lint says of the files where they will stand, tried in a copy; problems are raised."""
    home = place.home
    copy = folder / (home.name if home is not None else "rules")
    if home is not None and home.is_dir():
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns(".*", "compiled.jsonl"))
    tried = []
    for file, text in files.items():
        to = copy / (file.relative_to(home) if home is not None else file.name)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text, encoding="utf-8")
        tried.append(to)
    names = {str(to): str(file) for to, file in zip(tried, files, strict=True)}

    def moved(span: Span) -> Span:
        return replace(span, file=names.get(span.file, span.file))

    def said(found: Diagnostic) -> Diagnostic:
        return replace(found, spans=tuple(map(moved, found.spans)))

    try:
        found = lint(tried)
    except MigrateError as error:
        raise type(error)(tuple(map(said, error.diagnostics))) from None
    problems = tuple(said(d) for d in found.problems if d.severity == "error")
    if problems:
        report = Report()
        report.diagnostics += problems
        report.check()
    return [said(d) for d in found.findings]


def _written(files: Mapping[Path, str]) -> None:
    done: list[Path] = []
    try:
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
            try:
                with partial.open("x", encoding="utf-8") as out:
                    out.write(text)
                # unlike a rename, a link replaces nothing
                os.link(partial, file)
                done.append(file)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        for file in done:
            file.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            fail("M904", f"{printable(str(error.filename2 or error.filename))} exists")
        fail("M115", f"cannot write {printable(str(error.filename))}: {error.strerror or error}")
