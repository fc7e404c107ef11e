"""Hostile rule files (Y1 and its neighbours): tags that construct, expressions, what grows when it
is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Row = tuple[str, str, bool, Callable[[Path, str], Path]]
FILES: list[Row] = []

HEAD = "id: evil/v2/x\ntitle: x\nlineage: evil\nedge: [v1, v2]\n"
BODY = 'rules:\n  - {name: r, from: "a.{n}", to: "b.{n}"}\n'


def add(name: str, rows: str, make: Callable[[str], str | bytes], live: bool = False) -> None:
    def build(folder: Path, canary: str) -> Path:
        path = folder / "rules.yaml"
        made = make(canary)
        path.write_bytes(made.encode() if isinstance(made, str) else made)
        return path

    FILES.append((name, rows, live, build))


def tag(name: str, content: Callable[[str], str]) -> None:
    add(name, "Y1", lambda c: f"{HEAD}why: {content(c)}\n{BODY}", live=True)


def rule(name: str, rows: str, text: str) -> None:
    add(name, rows, lambda c: f"{HEAD}rules:\n  - {text}\n")


tag("object-apply", lambda c: f"!!python/object/apply:posix.mknod [{c!r}]")
tag(
    "object-new",
    lambda c: (
        "!!python/object/new:tuple [!!python/object/new:map [!!python/name:posix.mknod '', "
        f"[{c!r}]]]"
    ),
)
tag(
    "object-apply-with-state",
    lambda c: f"!!python/object/apply:builtins.exec [\"open({c!r}, 'w').close()\"]",
)
tag("module", lambda c: "!!python/module:attack_touches_on_import")
tag("name", lambda c: "!!python/name:attack_touches_on_import.nothing")
add(
    "whole-file-a-call",
    "Y1",
    lambda c: f"!!python/object/apply:os.system [\"touch '{c}'\"]\n",
    live=True,
)
add(
    "tag-with-a-directive",
    "Y1",
    lambda c: (
        f"%TAG !e! tag:yaml.org,2002:python/\n---\n{HEAD}why: !e!object/apply:posix.mknod "
        f"[{c!r}]\n{BODY}"
    ),
    live=True,
)
add("include", "Y1", lambda c: f"{HEAD}why: !include /etc/passwd\n{BODY}")
add("environment", "Y1", lambda c: f"{HEAD}why: !ENV ${{HOME}}\n{BODY}")
rule(
    "expression-that-calls",
    "Y1",
    '{name: r, from: "a.{n}", to: "b.{n}", via: [{reshape: {to: '
    "[\"__import__('os').system('true')\"]}}]}",
)
rule(
    "expression-with-attributes",
    "Y1",
    '{name: r, from: "a.{n}", to: "b.{n}", via: [{slice: {dim: 0, start: 0, stop: '
    '"().__class__"}}]}',
)
rule("format-string", "Y1", '{name: r, from: "a.{n}", to: "b.{n.__class__}"}')
rule("format-string-with-index", "Y1", '{name: r, from: "a.{n}", to: "b.{n[0]}"}')
rule("unknown-op", "Y1", '{name: r, from: "a.{n}", to: "b.{n}", via: [{python: "import os"}]}')
add(
    "alias-bomb",
    "Y2",
    lambda c: (
        HEAD
        + "a0: &a0 [x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
        + BODY
    ),
)
add(
    "merge-bomb",
    "Y2",
    lambda c: (
        HEAD
        + "a0: &a0 {x: 1}\n"
        + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))
        + BODY
    ),
)
add("alias-of-itself", "Y2", lambda c: f"{HEAD}why: &a [*a]\n{BODY}")
add("twenty-thousand-deep", "Y2", lambda c: f"{HEAD}why: {'[' * 20_000}{']' * 20_000}\n{BODY}")
add("million-items", "Y2", lambda c: f"{HEAD}why: [{'1,' * 400_000}]\n{BODY}")
add("two-megabytes", "Y2", lambda c: f"{HEAD}why: {'x' * 2_000_000}\n{BODY}")
add("second-document", "Y2", lambda c: f"{HEAD}{BODY}---\n{HEAD}")
add("key-twice", "Y2", lambda c: f"{HEAD}title: y\n{BODY}")
add("utf-16", "Y2", lambda c: f"{HEAD}{BODY}".encode("utf-16"))
add("not-utf-8", "Y2", lambda c: f"{HEAD}{BODY}".encode() + b"\xff")
add("endless-integer", "Y3", lambda c: f"{HEAD}requires: {'9' * 100_000}\n{BODY}")
add("unknown-field", "Y3", lambda c: f"{HEAD}run: rm\n{BODY}")
rule(
    "hundred-captures",
    "Y4",
    '{name: r, from: "' + ".".join(f"{{c{i}...}}" for i in range(100)) + '", to: "b"}',
)
rule(
    "count-of-a-billion",
    "Y5",
    '{name: r, from: "a.{n}", to: "b.{n}.{i}", via: [{unbind: {into: i, dim: 0, count: '
    "1000000000}}]}",
)
rule(
    "reshape-to-a-number-of-many-digits",
    "Y5",
    f'{{name: r, from: "a.{{n}}", to: "b.{{n}}", via: [{{reshape: {{to: [{"9" * 5000}]}}}}]}}',
)
