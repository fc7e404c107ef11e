"""`migrate seal`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..core.errors import plural
from . import render
from .options import as_json
from .terminal import safe


@click.command()
@click.argument("lineages", nargs=-1, metavar="[LINEAGE]...")
@click.option(
    "--check",
    is_flag=True,
    help="Write nothing; exit with 1 if rules mean something else than when they were sealed.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Also seal what changed since, and forget what is gone: for rules never released.",
)
@click.option("--rules", metavar="DIR", help="The folder of lineages.  [default: ./rules]")
@as_json
def command(
    lineages: tuple[str, ...], check: bool, replace: bool, rules: str | None, form: str
) -> int:
    """Seal rule files: what they mean cannot change unnoticed afterwards.

    LINEAGE is the name of a lineage or its folder; by default all are sealed. The hash of what
    each rule file and layouts.yaml mean goes into rules.lock; titles, comments and tests may still
    change, and new files are free until they are sealed.
    """
    from .. import api

    document = api.seal(lineages, check=check, replace=replace, rules=rules).to_json()
    render.emit(document, form, text)
    return int(document["exit"])


def text(document: Mapping[str, Any]) -> str:
    """What is wrong, and a line for each lineage."""
    doc = safe(document)
    said = {
        "unsealed": "is not sealed",
        "unchanged": "is as it was sealed",
        "open": "is as it was sealed, but for new files",
        "changed": "is not as it was sealed",
        "sealed": "sealed",
    }
    out = []
    for d in document["diagnostics"]:
        out += [render.diagnostic(d), ""]
    rows = [
        [
            one["lineage"],
            plural(one["files"], "file"),
            said[one["state"]] + (f" ({', '.join(one['new'])})" if one["state"] == "open" else ""),
        ]
        for one in doc["lineages"]
    ]
    return "\n".join([*out, *render.columns(rows, indent="")])


COMMAND = command
