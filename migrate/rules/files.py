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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    known = _current(home, {})
    if known is None:
        return None
    edges = tuple(
        Edge(source, target, *(tuple(home / name for name in names) for names in (used, old)))
        for source, target, used, old in known["edges"]
    )
    name, title, ordered, layouts, sealed, *aliases = known["lineage"]
    return Lineage(name, title, ordered, layouts, edges, known["ids"], sealed, tuple(aliases))


def shipped_files(paths: Sequence[Path]) -> list[LoadedFile] | None:
    """The shipped rule files at these paths of one lineage; None if none ship or files changed."""
    shipped = shipped_folder()
    if not paths or not all(path.is_relative_to(shipped) for path in paths):
        return None
    homes = {shipped / path.relative_to(shipped).parts[0] for path in paths}
    texts: dict[str, bytes] = {}
    known = _current(home, texts) if len(homes) == 1 and (home := homes.pop()) else None
    if known is None:
        return None
    out = []
    for path in paths:
        name = path.relative_to(home).as_posix()
        model, values, keys, meaning = json.loads(known["lines"][name], object_hook=_made)
        text = texts[name].decode("utf-8-sig")
        out.append(
            LoadedFile(path, model, yaml.Document.of(str(path), text, values, keys), meaning)
        )
    return out


def _current(home: Path, texts: dict[str, bytes]) -> dict[str, Any] | None:
    """What the folder's file holds, if made from the present files; `texts` gets their contents."""
    try:
        first, *lines = (home / NAME).read_bytes().splitlines()
        known = json.loads(first, object_hook=_made)
        if known["form"] != FORM:
            return None
        known["lines"] = dict(zip(known["files"], lines, strict=True))
        for path in files_below(home, layouts=True):
            texts[path.relative_to(home).as_posix()] = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        known
        if {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}
        == known.get("hashes")
        else None
    )


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
