"""What a family of lints looks at: the rule files of one lineage, read and compiled.

A whole lineage is read even where one file of it is asked about, because siblings decide what is
unreachable, shadowed or read twice; findings about the siblings are left out afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core.errors import Diagnostic, MigrateError, OpError, Report, Span, fail, printable
from ..core.types import PathLike
from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule, direct
from ..rules.files import LAYOUTS, SUFFIXES, LoadedFile
from ..rules.lineage import Lineage
from ..rules.loading import read_files
from ..rules.locks import check_lineage
from ..rules.model import RuleFile
from ..rules.packs import Pack, Packs
from ..rules.param_model import Param
from ..rules.params import RefusedError, convert, following
from ..ruletests.binding import CompiledFile, compiled
from ..source import yaml


@dataclass(frozen=True, eq=False, slots=True)
class FileSet:
    """A lineage's files, or one loose rule file (`home`, `lineage` and `layouts` are None then)."""

    home: Path | None
    lineage: Lineage | None
    layouts: yaml.Document | None
    files: tuple[CompiledFile, ...]

    @property
    def edges(self) -> dict[tuple[str, str, str], list[CompiledFile]]:
        """The files by lineage and edge."""
        out: dict[tuple[str, str, str], list[CompiledFile]] = {}
        gone = {file.loaded.model.supersedes for file in self.files}
        for file in self.files:
            if file.loaded.model.id not in gone:
                out.setdefault(file.edge, []).append(file)
        return out


def finding(
    code: str, message: str, span: Span, help: str | None = None, notes: tuple[str, ...] = ()
) -> Diagnostic:
    """What a lint says of one place."""
    return Diagnostic(code, message, (span,), notes, help)


@dataclass(frozen=True, eq=False, slots=True)
class LintInput:
    """All that is linted. `asked`: the files that were asked about, by their names in messages."""

    filesets: tuple[FileSet, ...]
    asked: Mapping[str, yaml.Document | None]
    # what the loader says against them; a file with an error is in no file set
    problems: tuple[Diagnostic, ...]


def read_inputs(
    paths: Sequence[PathLike],
    loaded: Iterable[LoadedFile] = (),
    lineages: Mapping[Path, Lineage] = MappingProxyType({}),
) -> LintInput:
    """The rule files and layouts at `paths`; M115 for a path that is neither. Those that are
    `loaded` without problems are not read again, nor are `lineages`, by their folders.
    """
    known = {file.path: file for file in loaded}
    report = Report()
    # a file outside a lineage's folder has no siblings
    homes: dict[tuple[Path | None, Path | None], dict[str, Path]] = {}
    for path in files_at(paths):
        home = _home(path)
        homes.setdefault((home, None if home else path), {})[name_of(path)] = path
    asked: dict[str, yaml.Document | None] = {}
    filesets = []
    for (home, _), files in homes.items():
        asked |= dict.fromkeys(files)
        fileset = _fileset(home, files, report, known, lineages)
        filesets.append(fileset)
        documents = [file.loaded.document for file in fileset.files] + (
            [fileset.layouts] if fileset.layouts else []
        )
        asked.update({d.name: d for d in documents if d.name in files})
    # a lineage whose layouts cannot be read concerns all of its files
    found = [
        d
        for d in _distinct(report.diagnostics)
        if not d.spans or any(s.file in asked or Path(s.file).name == LAYOUTS for s in d.spans)
    ]
    return LintInput(tuple(filesets), asked, tuple(found))


def files_at(paths: Iterable[PathLike]) -> list[Path]:
    """The rule files and layouts that the paths name, and those in the folders that they name; M115
    for a path that is neither.
    """
    return list(dict.fromkeys(found for given in paths for found in _files(given)))


def _files(given: PathLike) -> list[Path]:
    """The absolute paths of the YAML files that are meant."""
    path = Path(os.path.abspath(given))
    if path.is_dir():
        found = sorted(f for suffix in SUFFIXES for f in path.rglob(f"*{suffix}"))
        found = [
            f for f in found if not any(part.startswith(".") for part in f.relative_to(path).parts)
        ]
        if not found:
            fail(
                "M115",
                f"{printable(os.fspath(given), 300)} holds no rule file",
                help="rule files end in .yaml",
            )
        return found
    if not path.exists():
        fail(
            "M115",
            f"{printable(os.fspath(given), 300)} does not exist",
            help="give rule files or folders of them",
        )
    if path.suffix not in SUFFIXES:
        fail(
            "M115",
            f"{printable(os.fspath(given), 300)} is not a rule file",
            help="rule files end in .yaml",
        )
    return [path]


def _home(path: Path) -> Path | None:
    """The folder of the lineage that the file belongs to."""
    return next((folder for folder in list(path.parents)[:3] if (folder / LAYOUTS).is_file()), None)


def name_of(path: Path) -> str:
    """What messages call the file: its path from the working directory, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _fileset(
    home: Path | None,
    files: Mapping[str, Path],
    report: Report,
    known: Mapping[Path, LoadedFile],
    lineages: Mapping[Path, Lineage],
) -> FileSet:
    if home is None:
        rules = [Path(name) for name in files]
        return FileSet(None, None, None, _compile_all(rules, report, known))
    place = Path(name_of(home))
    rules = [Path(name_of(path)) for path in _files(home) if path.name != LAYOUTS]
    lineage = None
    pack = Pack(str(place), "local", place)
    name = next(iter(pack.lineages))
    try:
        if place in lineages and lineages[place].name == name:
            check_lineage(place, lineages[place])
            lineage = lineages[place]
        else:
            lineage = Packs((pack,), scan=False).load_lineage(name)
    except MigrateError as error:
        report.diagnostics += error.diagnostics
    return FileSet(
        place,
        lineage,
        yaml.read_file(place / LAYOUTS, Report()),
        _compile_all(rules, report, known),
    )


def _compile_all(
    paths: Sequence[Path], report: Report, known: Mapping[Path, LoadedFile]
) -> tuple[CompiledFile, ...]:
    said = Report()
    if known.keys() >= set(paths):
        loaded = [known[path] for path in paths]
    else:
        loaded = read_files(paths, said)
    out = []
    for file in loaded:
        own = Report()
        written = compiled(file, own)
        said.diagnostics += own.diagnostics
        broken = any(
            span.file == str(file.path)
            for d in said.diagnostics
            if d.severity == "error"
            for span in d.spans[:1]
        )
        if not broken:
            out.append(written)
    report.diagnostics += said.diagnostics
    return tuple(out)


def _distinct(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Each problem once: a file that a folder's scan and the loader both refuse is one problem."""
    return list(
        {
            (d.code, d.message, tuple(replace(s, label="") for s in d.spans)): d
            for d in diagnostics
        }.values()
    )


def sample_params(model: RuleFile) -> dict[str, Any]:
    """A value for each param, for questions whose answer does not depend on which: default, bound,
    choice, or a small one.
    """
    out: dict[str, Any] = {}
    for name, param in model.params.items():
        if param.has_default:
            out[name] = convert(param.default, param)
        elif (made := _followed(param, out)) is not None:
            out[name] = made
        elif param.choices:
            out[name] = [param.choices[0]] if param.type == "list" else param.choices[0]
        else:
            number = max(2, param.minimum or 2) if param.maximum is None else param.maximum
            out[name] = {
                "int": number,
                "float": 0.5,
                "bool": True,
                "str": "a",
                "list": [number if param.items == "int" else "a"],
            }[param.type]
    return out


def directed(file: CompiledFile) -> list[tuple[CompiledRule, DirectedRule]]:
    """The file's rules forwards with sample params, without those that none would suit."""
    params = sample_params(file.model)
    made = [(rule, direct(rule, params, Report())) for rule in file.rules]
    return [
        (rule, forwards)
        for rule, forwards in made
        if forwards is not None and all(map(_valid, forwards.steps))
    ]


def _valid(step: CompiledCall) -> bool:
    try:
        step.op.validate(step.args)
    except OpError:
        return False
    return True


def _followed(param: Param, values: Mapping[str, Any]) -> Any:
    """What the param is made of others; None also where samples cannot be divided as numbers of a
    checkpoint can.
    """
    try:
        return following(param, values)
    except RefusedError:
        return None
