"""The other files of an edge, as an example of one file needs them.

Which keys are taken and which are left over is settled by all files of an edge together. So an
example may give keys that another file takes: that file is then bound beside its own. A file that
has nothing to say of what is given stays away, and the rules of one that has may match nothing: an
example is about the file that it stands in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.diagnostics import Report
from ..core.keys import Pattern
from ..core.ranks import fitting
from ..core.templates import group
from .compiled import CompiledRule, compile_file
from .files import LoadedFile
from .loading import read_files
from .packs import LAYOUTS, files_below


@dataclass(frozen=True, eq=False, slots=True)
class Neighbour:
    """Another file of an edge."""

    file: LoadedFile
    rules: tuple[CompiledRule, ...]
    keep: tuple[Pattern, ...]

    def speaks_of(self, keys: Iterable[str], *, backwards: bool) -> bool:
        """Whether a pattern of the file fits one of the keys, or may fit it once params are
        known.
        """
        sides = [rule.targets if backwards else rule.sources for rule in self.rules]
        patterns = [
            pattern for side in sides for pattern in side.values() if not pattern.has_flat
        ] + list(self.keep)
        templates = group(keys)
        return any(
            pattern.params or any(fitting(pattern, template))
            for pattern in patterns
            for template in templates
        )


def neighbour(
    file: LoadedFile, rules: Iterable[CompiledRule], keep: Iterable[Pattern]
) -> Neighbour:
    """The file as a neighbour of others: no rule of it has to match anything."""
    return Neighbour(file, tuple(spared(rule) for rule in rules), tuple(keep))


def spared(rule: CompiledRule) -> CompiledRule:
    """The rule, as one that may match nothing."""
    return replace(rule, spare=True)


def neighbours(file: LoadedFile) -> list[Neighbour]:
    """The other files of the file's edge in its lineage's folder; none outside of one. A file that
    cannot be read is left out.
    """
    home = next(
        (
            folder
            for folder in list(file.path.resolve().parents)[:3]
            if (folder / LAYOUTS).is_file()
        ),
        None,
    )
    own = file.path.resolve()
    others = [path for path in files_below(home) if path != own] if home is not None else []
    # the others are called as the file is: from the working directory where they lie below it
    here = Path.cwd()
    named = [
        path.relative_to(here)
        if not file.path.is_absolute() and path.is_relative_to(here)
        else path
        for path in others
    ]
    out = []
    for other in read_files(named, Report()):
        said = Report()
        if (other.model.lineage, other.model.edge) == (file.model.lineage, file.model.edge):
            rules, keep = compile_file(other, said)
            if not said.has_errors():
                out.append(neighbour(other, rules, keep))
    return out
