"""Where rules come from: a named file or folder, `./rules`, what ships, installed packs.

What is named comes first. The others are equals: a checkpoint that was downloaded may have a
`rules` folder beside it, and where that one has another lineage of a known name, neither is taken.
Two homes that do the same are one, so that a checkout of a pack, or of migrate itself, can be
worked in while it is installed.

A pack is a folder of `<lineage>/layouts.yaml` and `<lineage>/<to>/<slug>.yaml`, and nothing but
data: an installed one is located without importing its package, so listing and linting packs runs
no foreign code. A pack that cannot be read is reported and harms no other, and
`MIGRATE_DISABLE_PACKS` leaves installed ones out. Of a lineage's rule
files only the edge is looked at until a way along it is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.errors import (
    Diagnostic,
    MigrateError,
    Report,
    did_you_mean,
    fail,
    listed,
    option,
    printable,
)
from ..core.types import FORMAT_VERSION, PACK, PathLike
from ..source import yaml
from ..source.registry import CODE, LEFT_OUT, canonical, declared, distribution_of, left_out
from .families import Family, families
from .files import LAYOUTS as LAYOUTS
from .files import LoadedFile, shipped_files, shipped_folder, shipped_lineage
from .files import files_below as files_below
from .lineage import Edge, Lineage
from .locks import check_files, check_lineage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "migrate.rulepacks"
# how far below the folder of a pack its lineages are looked for, to say where they are
DEEPEST = 4


@dataclass(frozen=True)
class Pack:
    """One folder of lineages. `origin` is local, built-in or installed; `error`: why it is empty.

    `named`: it was asked for, so its lineages come before all others of their names. `called` are
    the names that an installed one can be asked for by: its distribution's and its entry's.
    """

    name: str
    origin: str
    folder: Path | None
    version: str = ""
    error: str = ""
    named: bool = False
    called: tuple[str, ...] = ()

    @cached_property
    def lineages(self) -> dict[str, Path]:
        """The lineages by name, each with its folder; looks at names of files only, once."""
        if self.folder is None:
            return {}
        if os.path.isfile(self.folder / LAYOUTS):
            return {self.folder.resolve().name: self.folder}
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return {}
        return {
            name: self.folder / name
            for name in names
            if os.path.isfile(os.path.join(self.folder, name, LAYOUTS))
        }

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()

    def astray(self) -> Diagnostic | None:
        """M627 for a folder without a lineage, with the folders below it that have some."""
        if self.folder is None or self.lineages:
            return None
        found: dict[str, list[str]] = {}
        for place, folders, names in os.walk(self.folder):
            depth = len(Path(place).relative_to(self.folder).parts)
            folders[:] = sorted(
                name for name in folders if depth < DEEPEST and not name.startswith((".", "__"))
            )
            if LAYOUTS in names:
                found.setdefault(os.path.dirname(place), []).append(os.path.basename(place))
        what = f"pack {printable(str(self))} has no lineage in {printable(str(self.folder), 300)}"
        notes = tuple(
            f"{printable(place, 300)} has {listed(names, 8)}"
            for place, names in list(found.items())[:4]
        )
        first = next(iter(found), None)
        way = f"a lineage is a folder with a {LAYOUTS}, right below the folder of the pack"
        if first is not None and self.origin == "installed":
            below = ".".join(Path(first).relative_to(self.folder).parts)
            way = (
                f"let the entry point of the group {GROUP} end in {below}: a colon stands "
                "before the first folder below the package"
            )
        elif first is not None:
            way = f"name that folder: {option('rules', printable(first, 300))}"
        return Diagnostic("M627", what, notes=notes, help=way)


class Packs:
    """All packs searched: the named one, then as equals `./rules`, built-in and installed ones."""

    __slots__ = ("_all", "_homes", "_installed", "_loaded", "local", "scanned")

    def __init__(self, local: tuple[Pack, ...], scan: bool = True) -> None:
        self.local = local
        self._all: tuple[Pack, ...] = ()
        self._loaded: dict[str, Lineage] = {}
        self._homes: dict[str, Pack] = {}
        self._installed: tuple[Pack, ...] | None = None if scan else ()
        self.scanned = scan

    @property
    def installed(self) -> tuple[Pack, ...]:
        """The packs that distributions declare, those that cannot be found with their `error`."""
        if self._installed is None:
            self._installed = tuple(_scan())
        return self._installed

    @property
    def all(self) -> tuple[Pack, ...]:
        if not self._all:
            self._all = (*self.local, built_in(), *self.installed)
        return self._all

    def lineages(
        self, suits: Callable[[Family], bool] | None = None
    ) -> tuple[dict[str, Lineage], list[Diagnostic]]:
        """Every lineage by name, without edges, and what is wrong with unreadable ones; of families
        that ship those that `suits` takes.

        Problems of local packs are raised, also that they have a lineage that is known otherwise;
        those of built-in and installed ones are answered, because they belong to others and
        must not stop work on another lineage.
        """
        out: dict[str, Lineage] = {}
        problems: list[Diagnostic] = []
        report = Report()
        known = {} if suits is None else families()
        for name in dict.fromkeys(name for pack in self.all for name in pack.lineages):
            if (
                suits is not None
                and (family := known.get(name)) is not None
                and not suits(family)
                and all(family.is_in(p.lineages[name]) for p in self.all if name in p.lineages)
            ):
                continue
            try:
                pack = self.home(name)
            except MigrateError as error:
                ours = any(name in pack.lineages for pack in self.local)
                (report.diagnostics if ours else problems).extend(error.diagnostics)
                continue
            own = report if pack.origin == "local" else Report()
            lineage = shipped_lineage(pack.lineages[name]) or _layouts(
                name, pack.lineages[name], own
            )
            if lineage is not None:
                out[name] = lineage
            elif own is not report:
                problems += own.diagnostics
        report.check()
        return out, problems

    def load_lineage(self, name: str) -> Lineage:
        """The lineage with its edges, also by an alias; M507 if no pack has it, M508 if packs
        differ in it, M1xx for what its files hold.
        """
        if name not in self._loaded:
            report = Report()
            home = self.home(name)
            if name not in home.lineages:
                return self.load_lineage(self._called(name))
            folder = home.lineages[name]
            lineage = shipped_lineage(folder) or read_lineage(name, folder, report)
            report.check()
            if lineage is None:
                raise ValueError(f"{folder}: nothing was read and nothing was reported")
            check_lineage(folder, lineage)
            self._loaded[name] = lineage
        return self._loaded[name]

    def knows(self, name: str) -> bool:
        """Whether a lineage is called so, or a family that ships has the name as an alias."""
        return any(name in pack.lineages for pack in self.all) or any(
            name in family.aliases for family in families().values()
        )

    def _called(self, name: str) -> str:
        """The name of the lineage that has this one as an alias; the same where none has."""
        known = families()
        for family in known.values():
            if name in family.aliases:
                return family.name
        others = ((n, home) for p in self.all for n, home in p.lineages.items() if n not in known)
        for own, home in others:
            lineage = shipped_lineage(home) or _layouts(own, home, Report())
            if lineage is not None and name in lineage.aliases:
                return own
        return name

    def home(self, name: str) -> Pack:
        """The pack that has the lineage; M507 and M508 as `load_lineage`. Of several that do the
        same, the one that ships is preferred.
        """
        if name not in self._homes:
            having = [pack for pack in self.all if name in pack.lineages]
            if not having and (called := self._called(name)) != name:
                return self.home(called)
            if not having:
                self._refuse_unknown(name)
            home = having[0]
            if not home.named and len(having) > 1:
                # those that ship were checked when they were packaged
                home = next((pack for pack in having if pack.origin == "built-in"), home)
                _refuse_unlike(name, home, [p for p in having if p is not home], self.installed)
            self._homes[name] = home
        return self._homes[name]

    def _refuse_unknown(self, name: str) -> NoReturn:
        known = list(dict.fromkeys(n for pack in self.all for n in pack.lineages))
        known += [alias for family in families().values() for alias in family.aliases]
        hint = did_you_mean(name, known) or (
            f"the lineages are {listed(known)}" if known else "no folder of rules was found"
        )
        notes = [f"searched {pack.folder}" for pack in self.all if pack.folder is not None]
        notes += [f"pack {pack} could not be read: {pack.error}" for pack in self.all if pack.error]
        for lost in filter(None, (pack.astray() for pack in self.all)):
            notes += [lost.message, *lost.notes]
        fail("M507", f"there is no lineage `{printable(name)}`", notes=tuple(notes), help=hint)


def _refuse_unlike(
    name: str, home: Pack, others: Sequence[Pack], installed: Sequence[Pack]
) -> None:
    """M508 where one of the other packs has a lineage of the name that does something else."""
    own = home.lineages[name]
    unlike = [pack for pack in others if not _alike(name, own, pack.lineages[name])]
    if not unlike:
        return
    packs = [home, *unlike]
    ways = dict.fromkeys(_way_to(pack, name, installed) for pack in packs)
    fail(
        "M508",
        f"lineage `{printable(name)}` is defined by {listed([str(pack) for pack in packs])}, "
        "and they differ",
        notes=tuple(
            f"{pack} has it in {printable(str(pack.lineages[name]), 300)}" for pack in packs
        ),
        help=f"name the one you mean: {' or '.join(ways)}; or remove the other one",
    )


def _way_to(pack: Pack, name: str, installed: Sequence[Pack]) -> str:
    """How the pack is named that has this lineage: by its own name or by its folder."""
    if word := _name_for(pack, installed):
        return installed_option(printable(word))
    return option("rules", printable(str(pack.lineages[name].parent), 300))


def installed_option(word: str) -> str:
    """How an installed pack is asked for: `--pack NAME`, or in Python `rules="pack:NAME"`."""
    flag = option("pack", word)
    return flag if flag.startswith("--") else option("rules", f"{PACK}{word}")


def find_packs(
    rules: Path | str | None = None, *, cwd: Path | str = ".", installed: bool = True
) -> Packs:
    """The packs to search: the folder `rules` or the installed `pack:NAME` if one is named,
    `./rules` if it is there, then the built-in and installed ones.

    A rule file in place of a folder is for `load_files`: anything but a folder is M507 here.
    """
    local = []
    if isinstance(rules, str) and rules.startswith(PACK):
        local.append(_named(rules.removeprefix(PACK)))
    elif rules is not None:
        if not Path(rules).is_dir():
            fail(
                "M507",
                f"{printable(str(rules))} is not a folder of rules",
                help=f"it holds <lineage>/{LAYOUTS}",
            )
        ships = built_in()
        local.append(
            replace(ships, named=True)
            if _same(Path(rules), ships.folder)
            else Pack(str(rules), "local", Path(rules), named=True)
        )
    beside = Path(cwd) / "rules"
    if beside.is_dir() and not any(_same(beside, pack.folder) for pack in (*local, built_in())):
        local.append(Pack(str(beside), "local", beside))
    return Packs(tuple(local), installed)


def list_packs(rules: Iterable[PathLike] = ()) -> dict[str, Any]:
    """Where rules are looked for, in order, with each place's lineages and what these are; M507
    where no folder is.
    """
    first = [pack for rule in rules for pack in find_packs(os.fspath(rule)).local[:1]]
    beside = [pack for pack in find_packs().all if all(pack.folder != own.folder for own in first)]
    every = (*first, *beside)
    out = [
        {
            "name": pack.name,
            "origin": pack.origin,
            "version": pack.version,
            "folder": None if pack.folder is None else str(pack.folder),
            "error": pack.error,
            "lineages": list(pack.lineages),
            "contents": {name: _content(name, home) for name, home in pack.lineages.items()},
        }
        for pack in every
    ]
    warnings = [lost.to_json() for pack in every if (lost := pack.astray()) is not None]
    warnings += [replace(one, severity="warning").to_json() for one in _at_odds(every)]
    return {
        "format_version": FORMAT_VERSION,
        "kind": "packs",
        "packs": out,
        "code": [
            {
                "group": group,
                "name": entry.name,
                "distribution": distribution_of(entry),
                "version": entry.dist.version if entry.dist is not None else "",
                "value": entry.value,
            }
            for group in CODE
            for entry in declared(group)
        ],
        "left_out": left_out(),
        "warnings": warnings,
    }


def _at_odds(every: Sequence[Pack]) -> Iterator[Diagnostic]:
    """M508 for each lineage that packs differ in of which none is preferred."""
    packs = Packs(tuple(pack for pack in every if pack.origin == "local"), scan=False)
    packs._installed = tuple(pack for pack in every if pack.origin == "installed")
    for name in dict.fromkeys(name for pack in packs.all for name in pack.lineages):
        try:
            packs.home(name)
        except MigrateError as error:
            yield from error.diagnostics


def _content(name: str, home: Path) -> dict[str, Any] | None:
    """The titles of a lineage and of its layouts; None if they cannot be read."""
    lineage = shipped_lineage(home) or _layouts(name, home, Report())
    if lineage is None:
        return None
    return {"title": lineage.title, "layouts": {x.name: x.title for x in lineage.layouts}}


def load_edge(paths: Sequence[Path]) -> list[LoadedFile]:
    """The rule files of an edge of a lineage; as packaged where they ship and are unchanged.

    Raises all problems of all of them at once (M1xx, M508, M521), exit status 2.
    """
    ready = shipped_files(paths)
    if ready is None:
        from .loading import load_files

        ready = load_files(paths)
    check_files(ready)
    return ready


def built_in() -> Pack:
    """The rules that ship: `migrate/_rules` in a wheel, `rules/` beside the package otherwise."""
    folder = shipped_folder()
    return Pack(
        "built-in",
        "built-in",
        folder if folder.is_dir() else None,
        "",
        "" if folder.is_dir() else f"{folder} does not exist",
    )


def _scan() -> Iterator[Pack]:
    for entry in declared(GROUP):
        yield _located(entry)


def _named(word: str) -> Pack:
    """The installed pack that is called so; M507 if there is none, M508 if there are several."""
    every = tuple(_scan())
    found = _called(word, every)
    if len(found) > 1:
        ways = [installed_option(one) for pack in found if (one := _name_for(pack, every))]
        fail(
            "M508",
            f"{len(found)} installed packs are called `{printable(word)}`",
            notes=tuple(f"{pack} in {printable(str(pack.folder), 300)}" for pack in found),
            help=f"name one of them: {' or '.join(ways)}"
            if ways
            else f"name its folder: {option('rules', 'DIR')}",
        )
    if not found:
        known = list(dict.fromkeys(name for pack in every for name in pack.called))
        fail(
            "M507",
            f"no installed pack is called `{printable(word)}`",
            notes=tuple(f"{LEFT_OUT} leaves {name} out" for name in left_out()),
            help=did_you_mean(word, known)
            or (
                f"there are {listed(known)}" if known else "`migrate packs` lists what is installed"
            ),
        )
    if found[0].error:
        fail("M507", f"pack {found[0]} cannot be used: {printable(found[0].error, 300)}")
    return replace(found[0], named=True)


def _called(word: str, packs: Iterable[Pack]) -> list[Pack]:
    """The packs that are called so; a distribution has its name for itself, and entries of several
    may share theirs.
    """
    every, name = tuple(packs), canonical(word)
    return [p for p in every if p.called[:1] == (name,)] or [p for p in every if name in p.called]


def _name_for(pack: Pack, installed: Iterable[Pack]) -> str | None:
    """The name that this installed pack alone is called by."""
    every = tuple(installed)
    return next((word for word in pack.called if _called(word, every) == [pack]), None)


def _located(entry: EntryPoint) -> Pack:
    """The folder that `package` or `package:folder.below` names, found without an import."""
    distribution = distribution_of(entry)
    version = entry.dist.version if entry.dist is not None else ""
    label = f"{entry.name} ({distribution})"
    called = (canonical(distribution), canonical(entry.name))
    try:
        # `module` and `attr` of an entry point take names of Python only, and folders have others
        package, _, inside = (part.strip() for part in entry.value.split("[")[0].partition(":"))
        top, *below = [*package.split("."), *(inside.split(".") if inside else [])]
        if any("/" in part for part in below):
            raise ValueError(f"{entry.value} has a slash; nested folders are joined by dots")
        spec = importlib.util.find_spec(top)
        places = list(spec.submodule_search_locations or ()) if spec else []
    except Exception as error:  # noqa: BLE001 - what an installed finder raises is its own affair, and never fatal here
        return Pack(
            label, "installed", None, version, f"{type(error).__name__}: {error}", called=called
        )
    for place in places:
        folder = Path(place, *below)
        if folder.is_dir():
            return Pack(label, "installed", folder, version, called=called)
    lost = f"{entry.value} is not a folder of an installed package"
    return Pack(label, "installed", None, version, lost, called=called)


def _same(one: Path, other: Path | None) -> bool:
    return other is not None and one.resolve() == other.resolve()


def _alike(name: str, one: Path, other: Path) -> bool:
    """Whether two folders of a lineage do the same: their files are equal, or else their layouts
    and what their rules mean.
    """
    if _same(one, other):
        return True
    first, second = _contents(one), _contents(other)
    if first is None or second is None:
        return False
    if first == second:
        return True
    meant = _meaning(name, one)
    return meant is not None and meant == _meaning(name, other)


def _contents(folder: Path) -> dict[Path, bytes] | None:
    """The bytes of the lineage's files by their place in its folder; None if they cannot be read,
    or are more than anyone reviews.
    """
    out: dict[Path, bytes] = {}
    try:
        for path in (folder / LAYOUTS, *files_below(folder)):
            with path.open("rb") as file:
                out[path.relative_to(folder)] = file.read(yaml.MAX_BYTES + 1)
    except OSError:
        return None
    return out


def _meaning(name: str, folder: Path) -> Any:
    """Layouts without prose, and the hash of each rule file's meaning; None if some are wrong."""
    from .loading import read_files
    from .model import semantic_hash

    report = Report()
    lineage = read_lineage(name, folder, report)
    files = (
        read_files([path for edge in lineage.edges for path in edge.files], report)
        if lineage is not None
        else []
    )
    if lineage is None or report.has_errors():
        return None
    return (
        lineage.ordered,
        [(x.name, x.detect, x.files) for x in lineage.layouts],
        sorted(semantic_hash(file.model) for file in files),
    )


def read_lineage(
    name: str,
    folder: Path,
    report: Report,
    documents: dict[Path, yaml.Document] | None = None,
) -> Lineage | None:
    """The lineage in a folder with its edges, read as written; its problems go into the report.
    `documents` gets its rule files as they were read.
    """
    lineage = _layouts(name, folder, report)
    ids: list[str] = []
    edges = _edges(name, folder, lineage, report, ids, {} if documents is None else documents)
    return None if lineage is None else replace(lineage, edges=edges, ids=tuple(sorted(ids)))


def _layouts(name: str, folder: Path, report: Report) -> Lineage | None:
    from .layouts import load_layouts

    path = folder / LAYOUTS
    lineage = load_layouts(path, report)
    if lineage is not None and lineage.name != name:
        what = (
            f"{path} describes lineage `{printable(lineage.name)}`, its folder is called "
            f"`{printable(name)}`"
        )
        report.add("M114", what, help="rename one of the two")
        return None
    return lineage


def _edges(
    name: str,
    folder: Path,
    lineage: Lineage | None,
    report: Report,
    ids: list[str],
    read: dict[Path, yaml.Document],
) -> tuple[Edge, ...]:
    """The edges of the rule files below the folder; `ids` gets the ids of all of these, and `read`
    what was read of them.
    """
    from .loading import read_files

    found: dict[tuple[str, str], dict[Path, yaml.Document]] = {}
    for path in files_below(folder):
        quiet = Report()
        document = yaml.read_file(path, quiet)
        data = document.data if isinstance(document.data, dict) else {}
        edge, owner = data.get("edge"), data.get("lineage")
        if (
            quiet.diagnostics
            or not isinstance(edge, list)
            or not _is_edge(edge)
            or not isinstance(owner, str)
        ):
            read_files([path], report)
            continue
        if owner != name:
            hint = f"move the file, or write `lineage: {name}`"
            report.add(
                "M114",
                f"the file says lineage `{printable(owner)}`, it lies in `{name}`",
                spans=(document.span(("lineage",)),),
                help=hint,
            )
            continue
        source, target = str(edge[0]), str(edge[1])
        for number, layout in enumerate((source, target)):
            if lineage is not None and layout not in lineage.names:
                hint = (
                    did_you_mean(layout, lineage.names)
                    or f"its layouts are {listed(lineage.names)}"
                )
                what = f"lineage `{name}` has no layout `{printable(layout)}`"
                report.add("M501", what, spans=(document.span(("edge", number)),), help=hint)
        ids.append(str(data.get("id")))
        found.setdefault((source, target), {})[path] = read[path] = document
    return tuple(_edge(*ends, documents, report) for ends, documents in found.items())


def _edge(
    source: str, target: str, documents: Mapping[Path, yaml.Document], report: Report
) -> Edge:
    """The edge of these rule files, those apart that others of them supersede; M114 where what is
    superseded is none of them.
    """
    homes = {str(document.data.get("id")): path for path, document in documents.items()}
    gone = set()
    for path, document in documents.items():
        named = document.data.get("supersedes")
        if named is None:
            continue
        old = homes.get(str(named))
        if old is None or old == path:
            others = [name for name, place in homes.items() if place != path]
            hint = did_you_mean(str(named), others) or (
                f"the others of the edge are {listed(others)}"
                if others
                else "no other file is on its edge; `supersedes` names the one it replaces there"
            )
            what = (
                f"no other rule file of {source} -> {target} has the id `{printable(str(named))}`"
            )
            report.add("M114", what, spans=(document.span(("supersedes",)),), help=hint)
        else:
            gone.add(old)
    used = tuple(path for path in documents if path not in gone)
    return Edge(source, target, used, tuple(path for path in documents if path in gone))


def _is_edge(edge: list[Any]) -> bool:
    return len(edge) == 2 and all(isinstance(layout, str) for layout in edge)


def rule_files(paths: Sequence[Path]) -> list[Path]:
    """The rule files that `paths` name and those in the folders that they name; without paths those
    of `./rules`, else the built-in ones.

    M115 for a folder without rule files; a file that is not there is for its reader to report.
    """
    if not paths:
        here = Path("rules")
        shipped = built_in().folder
        paths = [here] if here.is_dir() or shipped is None else [shipped]
    out: list[Path] = []
    for path in paths:
        found = files_below(path) if path.is_dir() else [path]
        if not found:
            fail(
                "M115",
                f"there is no rule file in {printable(str(path), 300)}",
                help="rule files end in .yaml or .yml",
            )
        out += found
    return list(dict.fromkeys(out))
