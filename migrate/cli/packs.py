"""`migrate packs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import click

from . import render
from .options import as_json, places_of_rules
from .terminal import safe


@click.command()
@places_of_rules("A folder of lineages.")
@as_json
def command(rules: tuple[str, ...], form: str) -> None:
    """Show where rules come from, and which lineages were found.

    Each lineage has its title and its layouts. What --rules names comes first. ./rules, the rules
    included with migrate and those of installed packages rank equally: if two of them have a
    lineage of the same name, its contents must agree. With -v also the ops, codecs and formats
    of installed packages, which are code and are imported when they are used.
    """
    from ..rules.packs import list_packs

    document = list_packs(rules)
    loud = click.get_current_context().params.get("verbosity", 0) > 0
    render.emit(document, form, partial(text, code=loud))


def text(document: Mapping[str, Any], code: bool = False) -> str:
    """A line for each pack, and one for each of its lineages: its title and its layouts; with
    `code` one for each op, codec and format that an installed package declares.
    """
    out = []
    doc = safe(document)
    for pack in doc["packs"]:
        out.append(
            f"{' '.join(word for word in (pack['name'], pack['version']) if word)}   "
            f"{pack['folder'] or ''}".rstrip()
        )
        width = max(map(len, pack["lineages"]), default=0)
        out += [
            f"  {name:<{width}}  {_described(pack['contents'][name])}" for name in pack["lineages"]
        ]
        out += [f"  cannot be used: {pack['error']}"] if pack["error"] else []
    if doc["left_out"]:
        out.append(f"left out of what is installed: {', '.join(doc['left_out'])}")
    if code:
        out += _code(doc["code"])
    return "\n".join(out)


def _code(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    if not entries:
        return ["no installed package declares code"]
    rows = [
        [
            e["group"].partition(".")[2].removesuffix("s"),
            e["name"],
            f"{e['distribution']} {e['version']}".strip(),
            e["value"],
        ]
        for e in entries
    ]
    lines = render.columns(rows, indent="  ")
    return ["code, imported when a rule or a checkpoint asks for it:", *lines]


def _described(content: Mapping[str, Any] | None) -> str:
    if content is None:
        return "(its layouts.yaml cannot be read; `migrate lint` says why)"
    return f"{content['title']} ({', '.join(content['layouts'])})".lstrip()


COMMAND = command
