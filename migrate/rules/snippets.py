"""What editors insert and show beside what a schema says: snippets for rule files and layouts, and
for each op how a step is written.

`defaultSnippets` and `markdownDescription` are words of VS Code's language servers, which others
pass over. A server inserts texts as they stand, so that patterns bring their quotes along; in
`${1:name}` the name is typed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .. import ops
from ..source import yaml

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")

_FROM, _TO = '"{p...}.${2:old}.weight"', '"{p}.${3:new}.weight"'
_SHAPE = {"shape": [2, 3], "dtype": "float32"}

RULE_FILE = {
    "a rule file": (
        "one change from a layout to the next, with a rule that renames",
        {
            "id": "${1:lineage}/${2:v2}/${3:change}",
            "title": "${4:What the file does in one line}",
            "lineage": "${1:lineage}",
            "edge": ['"${5:v1}"', '"${2:v2}"'],
            "requires": '">=0.1"',
            "keep": ['"${6:lm_head.weight}"'],
            "rules": [
                {
                    "name": "${7:rename}",
                    "from": '"{p...}.${8:old}.weight"',
                    "to": '"{p}.${9:new}.weight"',
                }
            ],
        },
    )
}
RULES = {
    "rename": (
        "only the name changes",
        {"name": "${1:rename}", "from": _FROM, "to": _TO},
    ),
    "rename by a map": (
        "several names change, a capture each",
        {
            "name": "${1:rename}",
            "from": '"{p...}.{w:${2:wq}|${3:wk}}.weight"',
            "to": '"{p}.{w}.weight"',
            "map": {"w": {"${2:wq}": "${4:q_proj}", "${3:wk}": "${5:k_proj}"}},
        },
    ),
    "stack": (
        "the tensors of an index become one with a new axis",
        {
            "name": "${1:stack}",
            "from": '"{p...}.${2:experts}.{e:int}.weight"',
            "to": '"{p}.${2:experts}.weight"',
            "via": [{"stack": {"over": "e"}}],
        },
    ),
    "concat": (
        "tensors of several names become one",
        {
            "name": "${1:concat}",
            "from": '"{p...}.{w:${2:gate}|${3:up}}.weight"',
            "to": '"{p}.${4:gate_up}.weight"',
            "via": [{"concat": {"over": "w", "dim": 0}}],
        },
    ),
    "split": (
        "one tensor becomes several",
        {
            "name": "${1:split}",
            "from": '"{p...}.${2:qkv}.weight"',
            "to": '"{p}.{w:${3:q}|${4:k}|${5:v}}.weight"',
            "via": [{"split": {"into": "w"}}],
        },
    ),
    "drop": (
        "what the new layout does not have",
        {
            "name": "${1:drop}",
            "from": '"{p...}.${2:inv_freq}"',
            "via": [{"drop": {"why": "${3:the model computes it again}"}}],
        },
    ),
}
TESTS = {
    "a test": (
        "a small checkpoint and what the rules make of it",
        {
            "name": "${1:what it shows}",
            "given": {'"${2:l.old.weight}"': {"values": [[1, 2], [3, 4]]}},
            "expect": {'"${3:l.new.weight}"': {"values": [[1, 2], [3, 4]]}},
        },
    ),
    "a test of shapes": (
        "for rules that depend on no value",
        {
            "name": "${1:what it shows}",
            "given": {'"${2:l.old.weight}"': _SHAPE},
            "expect": {'"${3:l.new.weight}"': _SHAPE},
        },
    ),
}
LAYOUTS = {
    "the layouts of a lineage": (
        "two of them, each with the keys that tell it",
        {
            "lineage": "${1:lineage}",
            "title": "${2:What changes along this lineage}",
            "layouts": {
                '"${3:v1}"': {
                    "title": "${4:as it was}",
                    "detect": {"present": '"{p...}.${5:old}.weight"'},
                },
                '"${6:v2}"': {
                    "title": "${7:as it is}",
                    "status": "current",
                    "detect": {"present": '"{p...}.${8:new}.weight"'},
                },
            },
        },
    )
}


def offered(snippets: Mapping[str, tuple[str, Any]]) -> list[dict[str, Any]]:
    """The snippets as a schema holds them."""
    return [
        {"label": label, "description": about, "body": body}
        for label, (about, body) in snippets.items()
    ]


def steps() -> list[dict[str, Any]]:
    """A snippet for each built-in op that has arguments in its example."""
    found = {name: next(iter(ops.get(name).samples()), None) for name in ops.registry.builtin()}
    return offered(
        {
            name: (ops.get(name).summary, {name: _verbatim(example[0])})
            for name, example in found.items()
            if example is not None and example[0]
        }
    )


def hover(name: str) -> str:
    """What an op is and how its step is written, as Markdown."""
    example = next(iter(ops.get(name).samples()), None)
    written = "" if example is None else f"\n\n```yaml\n- {name}: {_flow(example[0])}\n```"
    return f"**{name}**: {ops.get(name).summary}{written}"


def _verbatim(value: Any) -> Any:
    """The value with its texts as YAML writes them, and as a snippet has to spell that."""
    if isinstance(value, Mapping):
        return {name: _verbatim(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_verbatim(item) for item in value]
    return re.sub(r"([\\$])", r"\\\1", _text(value)) if isinstance(value, str) else value


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    plain = _PLAIN.fullmatch(value) and isinstance(yaml.core(yaml.PlainScalar(value)), str)
    return value if plain else json.dumps(value)
