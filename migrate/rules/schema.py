"""JSON schemas of what people write and of what commands answer, generated from the models.

A step of `via` is an object with one property per op and minProperties = maxProperties = 1. A
`oneOf` over the ops would say the same, but editors then offer the first op only and report each
mistake as "valid under none of them". For the same reason an optional field is its type without a
null beside it, and alternatives are written as a list of types or with `if`.

The schema of a rule file and the loader agree on form, whatever is written; a test changes rule
files at random and compares the two. `BEYOND` lists what only the loader can refuse. A schema is of
the data that an editor's YAML 1.2 parser makes of the text: there `2.10` is a number, so fields of
free text take numbers and truths as well, and the loader keeps what was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from .. import ops
from ..core.errors import did_you_mean, fail, listed, printable
from ..core.types import FORMAT_VERSION, PathLike
from ..ops.base import OpCall
from ..source import yaml
from . import arguments, snippets, steps
from .fields import TEXT, match_whole
from .layouts import LayoutsFile
from .model import RuleFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SUFFIX = ".schema.json"
FREE_TEXT = tuple(TEXT["type"])
_ABOUT = "What a file may look like. Whether it holds together is for `migrate lint` to say."

# Codes that the loader may give to a file that fits the schema while it reads field by field, and
# why a schema cannot say it. Whatever else the models refuse, the schema refuses as well.
BEYOND: Mapping[str, str] = {
    "M104": "a key that is written twice is one key to a schema",
    "M105": "anchors, aliases, merge keys and tags are gone before a schema sees the data",
    "M107": "a schema does not know which release of migrate will read the file",
    "M108": "text that is not YAML has no data to compare",
    "M109": "the size of the text and the number of its nodes are not data",
    "M110": "an unquoted pattern is a mapping, or nothing, by the time a schema sees it",
    "M116": "characters of comments, and how others were written, are gone before a schema sees "
    "the data",
    "M111": "arithmetic nests parentheses, which no regular expression can follow, and an index "
    "grows with one capture",
    "M201": "in a pattern a capture has its type where it first occurs, and what stands side by "
    "side must be distinguishable",
}
# Codes of meaning: given when every field is right by itself, by `loading`, `examples` and
# `compiled`.
MEANING: Mapping[str, str] = {
    "M101": "whether `to` is needed depends on what the ops do; a test needs tensors to expect or "
    "an error",
    "M112": "a param is used in one place and declared in another",
    "M113": "names are unique among their siblings; a schema compares whole items only",
    "M114": "values that contradict each other, or name a role, a key or a file of another field; "
    "ranges that end before they begin",
    "M203": "captures of `to` and of the ops come from `from`",
    "M204": "captures of `from` go to `to` or to an op",
    "M205": "an op that counts needs a capture with an order",
    "M303": "whether a dtype can hold the `value` of `fill`",
    "M308": "arguments of an op that no tensor could satisfy together; codecs that packages may "
    "add; the two sides of a `rearrange`",
}


class _Generator(GenerateJsonSchema):
    """pydantic's generator, for types that only a validator of ours reads."""

    ignored_warning_kinds = {"non-serializable-default"}  # noqa: RUF012 - as the base class declares it

    def model_schema(self, schema: Any) -> dict[str, Any]:
        made = super().model_schema(schema)
        if "description" in made:
            # a docstring, whose lines break where the source's do
            made["description"] = " ".join(made["description"].split())
        return made

    def is_instance_schema(self, schema: Any) -> dict[str, Any]:
        return {"$ref": "#/$defs/Step"}

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        """As it comes: examples are read by people, and a model's fields have an order."""
        return value

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        """A key that does not fit its pattern is refused; `patternProperties` would let it pass."""
        made: dict[str, Any] = {
            "type": "object",
            "additionalProperties": self.generate_inner(schema["values_schema"]),
        }
        pattern = self.generate_inner(schema["keys_schema"]).get("pattern")
        return made if pattern is None else {**made, "propertyNames": {"pattern": pattern}}


def rule_file(templates: Sequence[str] = ()) -> dict[str, Any]:
    """The schema of a rule file, with the ops that are built in. `templates` are the keys of one
    checkpoint as patterns: what editors complete in `from` and `keep`.
    """
    schema = _of(RuleFile, "migrate rule file")
    # a step of `via`, which pydantic calls as the class that it is read into
    made = {"Step": _step(), "NumberFormat": _cleaned(steps.number_format(_Generator))}
    schema["$defs"].pop(OpCall.__name__)
    schema["$defs"] = made | schema["$defs"]
    rule = schema["$defs"]["Rule"]
    rule["properties"]["via"]["items"] = {"$ref": "#/$defs/Step"}
    rule["defaultSnippets"] = snippets.offered(snippets.RULES)
    schema["$defs"]["RuleTest"]["defaultSnippets"] = snippets.offered(snippets.TESTS)
    schema["defaultSnippets"] = snippets.offered(snippets.RULE_FILE)
    if templates:
        # examples refuse nothing, and editors offer them where a value is typed
        sides = rule["properties"]["from"]
        kept = schema["properties"]["keep"]["items"]
        for place in (sides, sides["items"], sides["additionalProperties"], kept):
            place["examples"] = list(templates)
    return schema


def layouts() -> dict[str, Any]:
    """The schema of a `layouts.yaml`."""
    made = _of(LayoutsFile, "migrate layouts")
    return {**made, "defaultSnippets": snippets.offered(snippets.LAYOUTS)}


def document(kind: str) -> dict[str, Any]:
    """The schema of one of the JSON documents that commands answer with."""
    return {"$schema": DIALECT, **_document(kind)}


# The documents that commands answer with. One file each, `migrate/documents/<kind>.yaml`, is the
# single source. It holds a schema without what is the same in all of them: every mapping with
# `properties` is closed, each property is required unless `optional` lists it, `format_version` and
# `kind` come first. What several documents share stands in `_shared.yaml`. They are not pydantic
# models, because nothing reads these documents through one: they are made as plain data, and
# building models for them would cost every command its start-up.
DOCUMENTS = Path(__file__).resolve().parent.parent / "documents"
_VERSION = {
    "description": "the document's format; a reader of 1.x reads every 1.y",
    "type": "string",
    "pattern": "^1\\.[0-9]+$",
    "examples": ["1.0"],
}
_WITHIN = "#/$defs/"


def document_kinds() -> list[str]:
    """The kinds of documents, sorted."""
    return sorted(path.stem for path in DOCUMENTS.glob("*.yaml") if not path.stem.startswith("_"))


def _document(kind: str) -> dict[str, Any]:
    """The schema of the documents of this kind, without its dialect."""
    made = _closed(_read_document(kind))
    about = {name: made.pop(name) for name in ("title", "description")}
    properties = {"format_version": _VERSION, "kind": {"const": kind}, **made.pop("properties")}
    required = ["format_version", "kind", *made.pop("required")]
    shared = _needed({**made, "properties": properties})
    definitions = {"$defs": shared} if shared else {}
    return {**about, **definitions, **made, "properties": properties, "required": required}


@cache
def _read_document(name: str) -> Any:
    path = DOCUMENTS / f"{name}.yaml"
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
    shared = _read_document("_shared")
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


def schemas() -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each schema, by its name: `rulefile`, `layouts`, and the kinds of documents."""
    return {
        "rulefile": rule_file,
        "layouts": layouts,
        **{kind: partial(document, kind) for kind in document_kinds()},
    }


def dump_schema(schema: dict[str, Any]) -> str:
    """The schema as its file holds it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def write_schemas(folder: Path, names: Iterable[str] | None = None) -> list[Path]:
    """Writes the schemas, all or those named, into the folder; the files that it wrote.

    Files that are right already stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = schemas()
    out = []
    for name in known if names is None else names:
        path, made = folder / f"{name}{SUFFIX}", dump_schema(known[name]())
        if _committed(path) != made:
            path.write_text(made, encoding="utf-8")
            out.append(path)
    return out


def differences(folder: Path) -> list[tuple[str, str]]:
    """(file name, `missing`, `differs` or `unknown`) of each file unlike the models', sorted."""
    made = {f"{name}{SUFFIX}": make for name, make in schemas().items()}
    out = []
    for name, make in made.items():
        committed = _committed(folder / name)
        if committed != dump_schema(make()):
            out.append((name, "missing" if committed is None else "differs"))
    out += [(path.name, "unknown") for path in folder.glob(f"*{SUFFIX}") if path.name not in made]
    return sorted(out)


def _committed(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        return ""


def _of(model: type[BaseModel], title: str) -> dict[str, Any]:
    made = model.model_json_schema(by_alias=True, schema_generator=_Generator)
    described = {
        "$schema": DIALECT,
        "title": title,
        "description": f"{made.pop('description', '')} {_ABOUT}".strip(),
    }
    made.pop("title", None)
    return {**described, **_cleaned(made)}


def _step() -> dict[str, Any]:
    properties = {}
    bare = []
    for name in ops.registry.builtin():
        fields = steps.model(name).model_json_schema(by_alias=True, schema_generator=_Generator)
        fields.pop("title", None)
        fields.pop("description", None)
        if arguments.takes_codec(name):
            del fields["additionalProperties"]
        fields = {**_cleaned(fields), **_cleaned(steps.codec_forms(name, _Generator))}
        for argument in arguments.arguments(name):
            if argument.form == arguments.FORMAT:
                fields["properties"][argument.word] = {
                    "$ref": "#/$defs/NumberFormat",
                    "description": argument.doc,
                }
            if argument.default is not MISSING and argument.default not in (None, (), {}):
                fields["properties"][argument.word]["default"] = argument.default
        # `flip:` without arguments is nothing in YAML
        kind: Any = "object"
        if not any(a.default is MISSING for a in arguments.arguments(name)):
            kind = ["object", "null"]
            bare.append(name)
        example = next(iter(ops.get(name).samples()), None)
        shown = {} if example is None else {"examples": [example[0]]}
        properties[name] = {
            "title": name,
            "description": ops.get(name).summary,
            "markdownDescription": snippets.hover(name),
            **fields,
            "type": kind,
            **shown,
        }
    return {
        "title": "Step",
        "type": ["object", "string"],
        "description": "One operation and its arguments; one without arguments may be its name "
        "alone",
        "properties": properties,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
        "pattern": match_whole("|".join(re.escape(name) for name in bare) or "(?!)"),
        "defaultSnippets": snippets.steps(),
    }


def _cleaned(schema: Any, *, names: bool = False, top: bool = False) -> Any:
    """Without titles that pydantic makes from field names and null defaults; models keep theirs."""
    if isinstance(schema, list):
        return [_cleaned(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if names:
            out[key] = _cleaned(value, top=top)
        elif key in ("examples", "enum"):
            out[key] = value
        elif (key == "title" and not top) or (key == "default" and value in (None, [], {})):
            continue
        else:
            out[key] = _cleaned(
                value, names=key in ("properties", "$defs", "patternProperties"), top=key == "$defs"
            )
    return out


def check_schemas(
    name: str | None = None, *, folder: PathLike | None = None, write: bool = False
) -> dict[str, Any]:
    """Which schemas there are; with a folder, whether its files are current, or, `write`, made so.

    `name` limits it to one; M115 if there is none of this name, or if the folder cannot be written.
    """
    known = schemas()
    if name is not None and name not in known:
        fail(
            "M115",
            f"there is no schema `{printable(name)}`",
            help=did_you_mean(name, list(known)) or f"there are {listed(list(known))}",
        )
    names = list(known) if name is None else [name]
    states: dict[str, str | None] = dict.fromkeys((f"{n}{SUFFIX}" for n in names), None)
    if folder is not None:
        place = Path(folder)
        wrong = {
            file: state for file, state in differences(place) if name is None or file in states
        }
        written: list[Path] = []
        if write:
            try:
                written = write_schemas(place, names)
            except OSError as error:
                fail(
                    "M115",
                    f"cannot write to {printable(str(place))}: {error.strerror or error}",
                    help="choose another folder",
                )
        states = {
            **dict.fromkeys(states, "current"),
            **wrong,
            **{path.name: "written" for path in written},
        }
    out = []
    for file, state in states.items():
        own = file.removesuffix(SUFFIX)
        title = known[own]()["title"] if own in known else ""
        out.append({"name": own, "file": file, "title": title, "state": state})
    good = all(state in ("current", "written") for state in states.values())
    return {
        "format_version": FORMAT_VERSION,
        "kind": "schemas",
        "folder": None if folder is None else str(folder),
        "current": None if folder is None else good,
        "schemas": out,
    }


if __name__ == "__main__":
    write_schemas(Path(__file__).resolve().parent.parent.parent / "schemas")
