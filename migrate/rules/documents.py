"""The JSON documents that commands answer with, as JSON schemas.

One file per document, `migrate/documents/<kind>.yaml`, is the single source: a new command brings
one file. It holds a schema without what is the same in all of them: every mapping with `properties`
is closed, each property is required unless `optional` lists it, `format_version` and `kind` come
first. What several documents share stands in `_shared.yaml` and is taken along where `$ref` asks
for it.

They are not pydantic models, because no code reads these documents through one: they are made as
plain data, and building models for them would cost every command its start-up.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ..source import yaml

FOLDER = Path(__file__).resolve().parent.parent / "documents"
_VERSION = {
    "description": "the document's format; a reader of 1.x reads every 1.y",
    "type": "string",
    "pattern": "^1\\.[0-9]+$",
    "examples": ["1.0"],
}
_WITHIN = "#/$defs/"


def kinds() -> list[str]:
    """The kinds of documents, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if not path.stem.startswith("_"))


def schema(kind: str) -> dict[str, Any]:
    """The schema of the documents of this kind, without its dialect."""
    made = _closed(_read(kind))
    about = {name: made.pop(name) for name in ("title", "description")}
    properties = {"format_version": _VERSION, "kind": {"const": kind}, **made.pop("properties")}
    required = ["format_version", "kind", *made.pop("required")]
    shared = _needed({**made, "properties": properties})
    definitions = {"$defs": shared} if shared else {}
    return {**about, **definitions, **made, "properties": properties, "required": required}


@cache
def _read(name: str) -> Any:
    path = FOLDER / f"{name}.yaml"
    return yaml.core(yaml.parse(path.read_text(encoding="utf-8"), str(path)).data)


def _closed(node: Any, names: bool = False) -> Any:
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {
        name: value if name == "examples" and not names else _closed(value, name == "properties")
        for name, value in node.items()
    }
    if names or "properties" not in node:
        return out
    optional = out.pop("optional", [])
    about = {name: out.pop(name) for name in ("title", "description") if name in out}
    return {
        **about,
        "type": "object",
        "additionalProperties": False,
        **out,
        "required": [name for name in out["properties"] if name not in optional],
    }


def _needed(node: Any) -> dict[str, Any]:
    """The shared definitions that the schema refers to, and those that these refer to."""
    shared = _read("_shared")
    out: dict[str, Any] = {}
    waiting = _references(node)
    while waiting:
        name = waiting.pop(0)
        if name not in out:
            out[name] = _closed(shared[name])
            waiting += _references(out[name])
    return {name: out[name] for name in shared if name in out}


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _references(item)]
    if not isinstance(node, dict):
        return []
    own = [node["$ref"].removeprefix(_WITHIN)] if isinstance(node.get("$ref"), str) else []
    return own + [
        name for key, value in node.items() if key != "examples" for name in _references(value)
    ]
