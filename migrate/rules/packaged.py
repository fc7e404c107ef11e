"""The rules that ship, read and validated when they were packaged.

Building the models of what people write costs more than migrating a small checkpoint, and what
ships was written by us. So each lineage has a `compiled.json` beside its files: layouts, edges, and
of each rule file what its model says (but for tests), where it stands, and the hash of what it
means. It holds the hash of every file that it was made from, and counts only while these are the
files that are there; else they are read as anybody's are. It is looked for among the rules that
ship and nowhere else: in another pack it could say something else than what a reviewer reads.

`python -m migrate.rules.packaged` makes the files, `--check` says whether they are as they would be
made.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..ops._op import Step
from ..source import yaml
from .lineage import Detect, Edge, Layout, Lineage

if TYPE_CHECKING:
    from .model import RuleFile

NAME = "compiled.json"
LAYOUTS = "layouts.yaml"
SUFFIXES = (".yaml", ".yml")
# of what is written below; another one is not read
_FORM = 1


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


class File(NamedTuple):
    """A rule file: what its model says, where it stands, and the hash of what it means."""

    model: RuleFile
    document: yaml.Document
    hash: str


def folder() -> Path:
    """Where the rules that ship are: `migrate/_rules` in a wheel, `rules/` beside the package in a
    source tree.
    """
    package = Path(__file__).resolve().parent.parent
    return package / "_rules" if (package / "_rules").is_dir() else package.parent / "rules"


def lineage(home: Path) -> Lineage | None:
    """The lineage in this folder with its edges; None where it does not ship or its files are not
    as they were.
    """
    if home.parent != folder():
        return None
    known = _current(home, {})
    if known is None:
        return None
    edges = tuple(
        Edge(source, target, tuple(home / name for name in names))
        for source, target, names in known["edges"]
    )
    name, title, ordered, layouts = known["lineage"]
    return Lineage(name, title, ordered, layouts, edges)


def rule_files(paths: Sequence[Path]) -> list[File] | None:
    """The rule files at these paths of one lineage; None where it does not ship or its files are
    not as they were.
    """
    shipped = folder()
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
        model, values, keys, meaning = known["files"][name]
        out.append(
            File(
                model,
                yaml.Document.of(str(path), texts[name].decode("utf-8-sig"), values, keys),
                meaning,
            )
        )
    return out


def _current(home: Path, texts: dict[str, bytes]) -> dict[str, Any] | None:
    """What the folder's file holds, if it was made from the files that are there; `texts` gets
    their contents.
    """
    try:
        known = json.loads((home / NAME).read_bytes(), object_hook=_made)
        if known["form"] != _FORM:
            return None
        for path in files_below(home, layouts=True):
            texts[path.relative_to(home).as_posix()] = path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        known
        if {name: _hash(text) for name, text in texts.items()} == known.get("hashes")
        else None
    )


def files_below(home: Path, *, layouts: bool = False) -> list[Path]:
    """The YAML files in a folder, sorted, with or without those that describe layouts; hidden ones
    are left out.
    """
    out = []
    for place, folders, names in os.walk(home):
        folders[:] = [name for name in folders if not name.startswith(".")]
        wanted = (name for name in names if name.endswith(SUFFIXES) and not name.startswith("."))
        out += [Path(place, name) for name in wanted if layouts or name != LAYOUTS]
    return sorted(out)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _made(tagged: dict[str, Any]) -> Any:
    ((tag, value),) = tagged.items()
    return _MAKE[tag](value)


_MAKE: dict[str, Any] = {
    "map": dict,
    "tuple": tuple,
    "part": lambda pairs: RulePart(dict(pairs)),
    "step": lambda pair: Step(*pair),
    "Layout": lambda values: Layout(*values),
    "Detect": lambda values: Detect(*values),
}


def make(home: Path) -> str:
    """The text of the folder's file; raises what is wrong with what it is made from."""
    from ..core.diagnostics import Report
    from .model import load_files
    from .packs import read_lineage

    report = Report()
    found = read_lineage(home.name, home, report)
    report.check()
    if found is None:
        raise ValueError(f"{home}: nothing was read and nothing was reported")
    paths = [path for edge in found.edges for path in edge.files]
    files = {}
    for path, file in zip(paths, load_files(paths), strict=True):
        places = [
            [[list(at), list(place)] for at, place in some if at[:1] != ("tests",)]
            for some in file.document.places()
        ]
        files[path.relative_to(home).as_posix()] = [_written(file.model), *places, file.hash]
    whole = {
        "form": _FORM,
        "hashes": {
            path.relative_to(home).as_posix(): _hash(path.read_bytes())
            for path in files_below(home, layouts=True)
        },
        "lineage": [found.name, found.title, found.ordered, _written(found.layouts)],
        "edges": [
            [edge.source, edge.target, [path.relative_to(home).as_posix() for path in edge.files]]
            for edge in found.edges
        ],
        "files": files,
    }
    parts = [_line(name, value) for name, value in whole.items()]
    return '{"map": [\n' + ",\n".join(parts) + "\n]}\n"


def _line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        inner = ",\n".join(json.dumps([key, item]) for key, item in value.items())
        return f'[{json.dumps(name)}, {{"map": [\n{inner}\n]}}]'
    return json.dumps([name, value])


def _written(value: Any) -> Any:
    """`value` as JSON that `_made` makes it again from."""
    if isinstance(value, Step):
        return {"step": [value.op, _written(value.args)]}
    if hasattr(type(value), "model_fields"):
        names = [name for name in type(value).model_fields if name != "tests"]
        names += [name for name, held in vars(type(value)).items() if isinstance(held, property)]
        pairs = [[name, _written(getattr(value, name))] for name in names]
        return {
            "part": pairs
            + ([["tests", {"tuple": []}]] if "tests" in type(value).model_fields else [])
        }
    if is_dataclass(value):
        return {
            type(value).__name__: [_written(getattr(value, field.name)) for field in fields(value)]
        }
    if isinstance(value, Mapping):
        return {"map": [[_written(key), _written(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_written(item) for item in value]}
    if isinstance(value, list):
        return [_written(item) for item in value]
    if isinstance(value, yaml.Plain) or not isinstance(value, (str, int, float, type(None))):
        raise TypeError(f"{value!r} is not what a validated rule file holds")
    return value


def differences() -> Iterator[tuple[Path, str]]:
    """Each file that is not as it would be made, with how it would be."""
    for path in sorted(folder().glob(f"*/{LAYOUTS}")):
        place, text = path.parent / NAME, make(path.parent)
        if not place.is_file() or place.read_text(encoding="utf-8") != text:
            yield place, text


if __name__ == "__main__":
    stale = list(differences())
    for place, text in stale:
        if sys.argv[1:] == ["--check"]:
            sys.stderr.write(
                f"{place} is not what its rules make: python -m migrate.rules.packaged\n"
            )
        else:
            place.write_text(text, encoding="utf-8")
    sys.exit(bool(stale) and sys.argv[1:] == ["--check"])
