"""`migrate packs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from . import render
from .options import as_json
from .terminal import safe


@click.command()
@click.option("--rules", "rules", multiple=True, metavar="PATH", help="A folder of lineages.")
@as_json
def command(rules: tuple[str, ...], form: str) -> None:
    """Show where rules come from, and which lineages were found.

    Each lineage has its title and its layouts. What --rules names comes first. ./rules, the rules
    included with migrate and those of installed packages rank equally: if two of them have a
    lineage of the same name, its contents must agree.
    """
    from ..rules.packs import list_packs

    document = list_packs(rules)
    render.emit(document, form, text)


def text(document: Mapping[str, Any]) -> str:
    """A line for each pack, and one for each of its lineages: its title and its layouts."""
    out = []
    for pack in safe(document)["packs"]:
        out.append(
            f"{' '.join(word for word in (pack['name'], pack['version']) if word)}   "
            f"{pack['folder'] or ''}".rstrip()
        )
        width = max(map(len, pack["lineages"]), default=0)
        out += [
            f"  {name:<{width}}  {_described(pack['contents'][name])}" for name in pack["lineages"]
        ]
        out += [f"  cannot be used: {pack['error']}"] if pack["error"] else []
    return "\n".join(out)


def _described(content: Mapping[str, Any] | None) -> str:
    if content is None:
        return "(its layouts.yaml cannot be read; `migrate lint` says why)"
    return f"{content['title']} ({', '.join(content['layouts'])})".lstrip()


COMMAND = command
