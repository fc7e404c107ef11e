"""Rule files as they are worked with: what stands in them, where it stands, and what it means; and
those that ship, which were read and validated when they were packaged.

Building the models of what people write costs more than migrating a small checkpoint, and what
ships was written by us. So each lineage has a `compiled.jsonl` beside its files: layouts, edges,
and of each rule file, on a line of its own, what its model says (but for tests), where it stands,
and the hash of what it means; a line is parsed when its file is asked for. It holds the hash of
every file that it was made from, and counts only while these are the files that are there; else
they are read like any others. It is looked for among the rules that ship and nowhere else: in
another pack it could say something else than what a reviewer reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import Span
from ..ops.base import OpCall
from ..source import yaml
from .lineage import Detect, Edge, Layout, LayoutGrid, Lineage

if TYPE_CHECKING:
    from .model import RuleFile

NAME = "compiled.jsonl"
LAYOUTS = "layouts.yaml"
SUFFIXES = (".yaml", ".yml")
# the values beside the model, among the side files that are patched; no file is called so
VALUES = "/values"
# of what is written below; another one is not read
FORM = 3
# nanoseconds; the coarsest clock of a file system in use ticks every second or two
_SOON = 3 * 10**9


@dataclass(frozen=True, eq=False, slots=True)
class LoadedFile:
    """A rule file and where each of its values stands.

    Of a file that was read when it was packaged, `model` is what stands for the model of what its
    author wrote, without `tests`, and `sealed` its semantic hash.
    """

    path: Path
    model: RuleFile
    document: yaml.Document
    sealed: str = ""

    @property
    def hash(self) -> str:
        """The hash of what the file means."""
        if self.sealed:
            return self.sealed
        from .model import semantic_hash

        return semantic_hash(self.model)

    def span(self, *path: Any) -> Span:
        """The place of the value at `path` (`"rules", 0, "from"`) or of its nearest ancestor."""
        return self.document.span(written_at(path) if VALUES in path else path)

    def key_span(self, *path: Any) -> Span:
        """The place of the last key of `path`; of the value where that is a list index."""
        return self.document.key_span(written_at(path) if VALUES in path else path)


def used_beside(file: LoadedFile, others: Iterable[LoadedFile]) -> list[LoadedFile]:
    """Those of the other files of its edge that are used where this one is: neither superseded nor
    in its place.
    """
    known = {other.model.id: other for other in others if other is not file}
    supersedes = {name: other.model.supersedes for name, other in known.items()}
    gone = {*supersedes.values(), file.model.supersedes}
    in_place = {file.model.id}
    while more := {n for n, old in supersedes.items() if old in in_place} - in_place:
        in_place |= more
    return [other for name, other in known.items() if name not in gone | in_place]


def written_at(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a rule file has what stands at a path: patches of values have a field of their own."""
    if path[1:2] != (VALUES,):
        return path
    return str(path[0]).replace("files", "values"), *path[2:]


class RulePart:
    """What stands for a model of `model` or below: its fields and properties, as attributes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)

    def model_copy(self, *, update: Mapping[str, Any]) -> RulePart:
        return RulePart({**self.__dict__, **update})

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{NAME} knows no `{name}`: it was made by other code; python -m "
            "migrate.rules.packaged makes it again"
        )


@cache
def shipped_folder() -> Path:
    """Where the shipped rules are: `migrate/_rules` in a wheel, `rules/` beside the package."""
    package = Path(__file__).resolve().parent.parent
    return package / "_rules" if (package / "_rules").is_dir() else package.parent / "rules"


def shipped_lineage(home: Path) -> Lineage | None:
    """The shipped lineage in this folder with its edges; None if none ships or files changed."""
    if home.parent != shipped_folder():
        return None
    return shipped.lineage if (shipped := _shipped(home)) is not None else None


def shipped_files(paths: Sequence[Path]) -> list[LoadedFile] | None:
    """The shipped rule files at these paths of one lineage; None if none ship or files changed."""
    folder = shipped_folder()
    if not paths or not all(path.is_relative_to(folder) for path in paths):
        return None
    homes = {folder / path.relative_to(folder).parts[0] for path in paths}
    shipped = _shipped(home) if len(homes) == 1 and (home := homes.pop()) else None
    if shipped is None:
        return None
    out = []
    for path in paths:
        if (loaded := shipped.loaded.get(path)) is not None:
            out.append(loaded)
            continue
        name = path.relative_to(home).as_posix()
        try:
            text = path.read_bytes()
        except OSError:
            return None
        if hashlib.sha256(text).hexdigest() != shipped.hashes[name]:
            return None
        model, values, keys, meaning = json.loads(shipped.lines[name], object_hook=_made)
        document = yaml.Document.of(str(path), text.decode("utf-8-sig"), values, keys)
        loaded = shipped.loaded[path] = LoadedFile(path, model, document, meaning)
        out.append(loaded)
    return out


@dataclass(frozen=True, slots=True)
class _Shipped:
    """What a lineage's compiled file holds, and `stats` of all that it was compared with. `loaded`
    are the rule files that were asked for.
    """

    lineage: Lineage
    hashes: Mapping[str, str]
    lines: Mapping[str, bytes]
    stats: Mapping[str, tuple[int, ...]]
    loaded: dict[Path, LoadedFile] = field(default_factory=dict)


_kept: dict[Path, _Shipped] = {}


def _shipped(home: Path) -> _Shipped | None:
    """What the folder's compiled file holds, if made from the present files. What was read before
    holds while no file and no folder there has changed: an answer about one checkpoint asks for
    each lineage several times.
    """
    kept = _kept.get(home)
    try:
        if kept is not None and all(_stat(path) == stat for path, stat in kept.stats.items()):
            return kept
    except OSError:
        pass
    _kept.pop(home, None)
    now = time.time_ns()
    found = _read(home)
    # a write as soon after a look as this shows in no time of a file
    if found is not None and all(changed < now - _SOON for changed, *_ in found.stats.values()):
        _kept[home] = found
    return found


def _stat(path: str) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino


def _read(home: Path) -> _Shipped | None:
    try:
        places = [str(home / NAME), *(place for place, _, _ in os.walk(home))]
        paths = files_below(home, layouts=True)
        stats = {place: _stat(place) for place in (*places, *map(str, paths))}
        first, *lines = (home / NAME).read_bytes().splitlines()
        known = json.loads(first, object_hook=_made)
        if known["form"] != FORM:
            return None
        name, title, ordered, layouts, sealed, *aliases = known["lineage"]
        edges = tuple(
            Edge(source, target, *(tuple(home / name for name in names) for names in (used, old)))
            for source, target, used, old in known["edges"]
        )
        lineage = Lineage(
            name, title, ordered, layouts, edges, known["ids"], sealed, tuple(aliases)
        )
        hashes = {
            path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
        }
        if hashes != known["hashes"]:
            return None
        return _Shipped(lineage, hashes, dict(zip(known["files"], lines, strict=True)), stats)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def files_below(home: Path, *, layouts: bool = False) -> list[Path]:
    """The YAML files in a folder, sorted, hidden ones left out, with or without `layouts.yaml`."""
    out = []
    for place, folders, names in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        wanted = (name for name in names if name.endswith(SUFFIXES) and not name.startswith("."))
        out += [Path(place, name) for name in wanted if layouts or name != LAYOUTS]
    return sorted(out)


def _made(tagged: dict[str, Any]) -> Any:
    ((tag, value),) = tagged.items()
    if tag == "part":
        return RulePart(dict(value))
    return _MAKE[tag](value) if tag in ("map", "tuple") else _MAKE[tag](*value)


_MAKE: dict[str, Any] = {
    "map": dict,
    "tuple": tuple,
    "step": OpCall,
    "Layout": Layout,
    "Detect": Detect,
    "LayoutGrid": LayoutGrid,
}
