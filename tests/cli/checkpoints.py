"""Checkpoint folders with side files, and the round trip that must leave them as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from commandline import ROOT, contents, done, fingerprint, safetensors

CASES = ROOT / "tests" / "data" / "cases"
MOVE = "rules: [{name: move, from: old.weight, to: new.weight}]\n"


def folder(path: Path, tensors: Any, **sides: Any) -> Path:
    """A checkpoint folder; each side file as text, or as a value written the way Hugging Face
    does.
    """
    safetensors(path / "model.safetensors", tensors)
    for name, value in sides.items():
        text = value if isinstance(value, str) else json.dumps(value, indent=2) + "\n"
        (path / f"{name}.json").write_text(text)
    return path


def fits(document: Any, kind: str) -> Any:
    """The document, which must fit its schema."""
    schema = json.loads((ROOT / "schemas" / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def small(path: Path, **sides: Any) -> Path:
    return folder(path, {"old.weight": ("F32", [4, 2])}, **sides)


def side(path: Path, name: str = "config") -> Any:
    return json.loads((path / f"{name}.json").read_text())


def stamp(path: Path) -> Any:
    return json.loads((path / "migrate.history.json").read_text())


def files(path: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes()
        for p in path.iterdir()
        if p.suffix == ".json" and p.name != "migrate.history.json"
    }


def round_trip(
    source: Path, tmp: Path, *question: object, back: tuple[object, ...] | None = None
) -> Path:
    """Forwards, verified, and back without a flag but the rule file; source and return are equal,
    side files to the byte.
    """
    before = fingerprint(source)
    new, old = tmp / "there", tmp / "back"
    done("apply", source, "-o", new, *question)
    done("verify", new, "--source", source, *question)
    done("downgrade", new, "-o", old, *(question[:2] if back is None else back))
    assert contents(old) == contents(source)
    assert files(old) == files(source)
    done("diff", old, source)
    done("verify", old, "--source", new, *(question[:2] if back is None else back))
    assert fingerprint(source) == before
    return new


def refusal(*arguments: object, exit: int) -> Any:
    (found,) = done(*arguments, "--format", "json", exit=exit).json["diagnostics"]
    return found
