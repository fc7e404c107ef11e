"""`migrate history`."""

from __future__ import annotations

import click

from . import render
from .options import as_json, opening


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--lineage", metavar="NAME", help="Only this lineage.")
@click.option("--rules", "rules", multiple=True, metavar="PATH", help="A folder of lineages.")
@opening()
@as_json
def command(
    checkpoint: str | None,
    lineage: str | None,
    rules: tuple[str, ...],
    allow: tuple[str, ...],
    at: str | None,
    form: str,
) -> None:
    """Show what was applied to a checkpoint, or all layouts.

    Without CHECKPOINT: the known lineages with their layouts and edges.
    """
    from .. import api

    document = api.history(checkpoint, lineage=lineage, rules=rules, allow=allow, at=at).to_json()
    render.emit(document, form, render.history)


COMMAND = command
