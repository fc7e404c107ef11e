"""JSON schemas of what people write, for editors: generated from the models, so they cannot say anything else.

A step of `via` is an object with one property per op and minProperties = maxProperties = 1. A `oneOf` over the ops would
say the same, but editors then offer the first op only and report each mistake as "valid under none of them". For
the same reason an optional field is its type without a null beside it.
"""

from __future__ import annotations

import json
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from .. import ops
from . import arguments
from .layouts import LayoutsFile
from .model import RuleFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ABOUT = "What a file may look like. Whether it holds together is for `migrate lint` to say."


class _Generator(GenerateJsonSchema):
    """pydantic's generator, for types that only a validator of ours reads."""

    ignored_warning_kinds = {"non-serializable-default"}  # noqa: RUF012 - as the base class declares it

    def is_instance_schema(self, schema: Any) -> dict[str, Any]:
        return {"$ref": "#/$defs/Step"}

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


def rule_file() -> dict[str, Any]:
    """The schema of a rule file, with the ops that are built in."""
    schema = _of(RuleFile, "migrate rule file")
    schema["$defs"]["Step"] = _step()
    return schema


def layouts() -> dict[str, Any]:
    """The schema of a `layouts.yaml`."""
    return _of(LayoutsFile, "migrate layouts")


SCHEMAS = {"rulefile.schema.json": rule_file, "layouts.schema.json": layouts}


def text(schema: dict[str, Any]) -> str:
    """The schema as its file holds it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write(folder: Path) -> None:
    """Writes all schemas into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SCHEMAS.items():
        (folder / name).write_text(text(make()), encoding="utf-8")


def _of(model: type[BaseModel], title: str) -> dict[str, Any]:
    made = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    described = {"$schema": DIALECT, "title": title, "description": f"{made.pop('description', '')} {_ABOUT}".strip()}
    made.pop("title", None)
    return {**described, **_cleaned(made)}


def _step() -> dict[str, Any]:
    properties = {}
    for name in ops.registry.builtin():
        fields = arguments.model(name).model_json_schema(by_alias=True, schema_generator=_Generator)
        fields.pop("title", None)
        fields = _cleaned(fields)
        for argument in arguments.arguments(name):
            if argument.default is not MISSING and argument.default not in (None, (), {}):
                fields["properties"][argument.word]["default"] = argument.default
        # `flip:` without arguments is nothing in YAML
        kind = "object" if any(a.default is MISSING for a in arguments.arguments(name)) else ["object", "null"]
        properties[name] = {**fields, "type": kind, "description": ops.get(name).summary}
    return {
        "type": "object",
        "description": "One operation and its arguments",
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }


def _cleaned(schema: Any, *, names: bool = False) -> Any:
    """Without the titles that pydantic makes from field names, and without null defaults."""
    if isinstance(schema, dict):
        drop = () if names else ("title",)
        return {
            key: _cleaned(value, names=key in ("properties", "$defs") and not names)
            for key, value in schema.items()
            if key not in drop and not (key == "default" and not names and value in (None, [], {}))
        }
    return [_cleaned(item) for item in schema] if isinstance(schema, list) else schema


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent.parent / "schemas")
