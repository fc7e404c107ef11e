"""`migrate history`."""

from __future__ import annotations

import click

from . import render
from .options import as_json


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--lineage", metavar="NAME", help="Only this lineage.")
@click.option("--rules", "rules", multiple=True, metavar="PATH", help="A folder of lineages.")
@as_json
def command(checkpoint: str | None, lineage: str | None, rules: tuple[str, ...], form: str) -> None:
    """Show what was applied to a checkpoint, or all layouts.

    Without CHECKPOINT: the known lineages with their layouts and edges.
    """
    from .. import api

    document = api.history(checkpoint, lineage=lineage, rules=rules)
    render.emit(document, form, render.history(document))


COMMAND = command
