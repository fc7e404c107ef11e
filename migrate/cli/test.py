"""`migrate test`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..core.errors import plural
from . import render
from .options import as_json
from .terminal import safe

_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "-k",
    "select",
    default="",
    metavar="TEXT",
    help="Only checks whose name, or whose file's id, contains TEXT.",
)
@click.option("--specs", is_flag=True, help="Names, shapes and dtypes only; no tensor is made.")
@click.option("--fail-fast", is_flag=True, help="Stop after the first check that fails.")
@as_json
def command(paths: tuple[str, ...], select: str, specs: bool, fail_fast: bool, form: str) -> int:
    """Test rule files.

    PATH is a rule file or a folder of them; the default is ./rules, or else the rules included with
    migrate. Runs the examples in the files and checks what must hold for every rule: the downgrade,
    the order of rules, a second application, and that each rule and op is exercised. Exits with 1
    if a check fails.
    """
    from .. import api

    document = api.test(paths, select=select, specs=specs, fail_fast=fail_fast).to_json()
    render.emit(document, form, text)
    return 0 if document["passed"] else 1


def text(document: Mapping[str, Any]) -> str:
    """The answer for people: a line for each check of a file, what failed below it, and a sum."""
    doc = safe(document)
    out = []
    for file in doc["files"]:
        out.append(f"{file['id']}   {file['path']}")
        alike: dict[str, list[str]] = {}
        for check in file["checks"]:
            if check["kind"] == "example" or check["status"] == "failed":
                out.append(
                    f"  {_MARKS[check['status']]:<8}{check['name']}"
                    + (f"   ({check['reason']})" if check["reason"] else "")
                )
            elif check["status"] == "skipped" or check["reason"]:
                out.append(f"  {_MARKS[check['status']]:<8}+ {check['name']}   ({check['reason']})")
            else:
                alike.setdefault(check["status"], []).append(check["name"])
            out += [
                f"    {line}"
                for found in check["diagnostics"]
                for line in render.diagnostic(found).splitlines()
            ]
        out += [f"  {_MARKS[status]:<8}+ {', '.join(names)}" for status, names in alike.items()]
    counts = doc["counts"]
    files = plural(counts["files"], "rule file")
    said = [
        f"{counts[status]} {status}"
        for status in ("passed", "failed", "skipped")
        if counts[status] or status == "passed"
    ]
    return "\n".join([*out, f"{files}: {', '.join(said)}"])


COMMAND = command
