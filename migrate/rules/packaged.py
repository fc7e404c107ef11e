"""The packaged form of the rules that ship: `files` says what it is for and reads it.

`python -m migrate.rules.packaged` makes the files, `--check` says whether they are current.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..core.errors import Report
from ..ops.base import OpCall
from ..source import yaml
from .families import INDEX, family_of
from .families import text as index_text
from .files import FORM, LAYOUTS, NAME, files_below, shipped_folder
from .lineage import Lineage
from .loading import load_files
from .locks import layouts_hash
from .packs import read_lineage


def _read(home: Path) -> Lineage:
    report = Report()
    found = read_lineage(home.name, home, report)
    report.check()
    if found is None:
        raise ValueError(f"{home}: nothing was read and nothing was reported")
    return found


def make(home: Path, lineage: Lineage | None = None) -> str:
    """The text of the folder's file; raises what is wrong with what it is made from."""
    found = lineage or _read(home)
    paths = [path for edge in found.edges for path in (*edge.files, *edge.superseded)]
    read = load_files(paths)
    lines = []
    for file in read:
        places = [
            [[list(at), list(place)] for at, place in some if at[:1] != ("tests",)]
            for some in file.document.places()
        ]
        lines.append([_written(file.model), *places, file.hash])
    whole = {
        "form": FORM,
        "hashes": _written(
            {
                path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in files_below(home, layouts=True)
            }
        ),
        "lineage": [
            *(found.name, found.title, found.ordered, _written(found.layouts)),
            layouts_hash(found),
            *found.aliases,
        ],
        "ids": _written(tuple(sorted(file.model.id for file in read))),
        "edges": [
            [
                *(edge.source, edge.target),
                *(
                    [p.relative_to(home).as_posix() for p in f]
                    for f in (edge.files, edge.superseded)
                ),
            ]
            for edge in found.edges
        ],
        "files": [path.relative_to(home).as_posix() for path in paths],
    }
    written = [{"map": [list(entry) for entry in whole.items()]}, *lines]
    return "".join(json.dumps(line) + "\n" for line in written)


def _written(value: Any) -> Any:
    """`value` as JSON that `_made` makes it again from."""
    if isinstance(value, OpCall):
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
    if isinstance(value, yaml.PlainScalar) or not isinstance(value, (str, int, float, type(None))):
        raise TypeError(f"{value!r} is not what a validated rule file holds")
    return value


def differences() -> Iterator[tuple[Path, str]]:
    """Each file that is not as it would be made, with how it would be."""
    found = []
    for path in sorted(shipped_folder().glob(f"*/{LAYOUTS}")):
        lineage = _read(path.parent)
        yield from _stale(path.parent / NAME, make(path.parent, lineage))
        family = family_of(lineage, path.stat().st_size)
        found += [family] if family is not None else []
    yield from _stale(shipped_folder() / INDEX, index_text(found))


def _stale(place: Path, text: str) -> Iterator[tuple[Path, str]]:
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
