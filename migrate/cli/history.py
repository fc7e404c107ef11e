"""`migrate history`."""

from __future__ import annotations

from functools import partial

import click

from ..core.errors import fail
from . import families as family_table
from . import lineage_graph, render
from .lineage_graph import FORMS
from .options import as_json, opening, places_of_rules


@click.command()
@click.argument("checkpoint", required=False)
@click.option("--lineage", metavar="NAME", help="Only this lineage.")
@places_of_rules("A folder of lineages.")
@click.option(
    "--graph",
    "graph",
    type=click.Choice(FORMS),
    help="Draw the lineages as a graph; with --format json count their rules.",
)
@click.option("--families", is_flag=True, help="The lineages for model types, as a table.")
@opening()
@as_json
def command(
    checkpoint: str | None,
    lineage: str | None,
    rules: tuple[str, ...],
    allow: tuple[str, ...],
    at: str | None,
    form: str,
    graph: str | None,
    families: bool,
) -> None:
    """Show what was applied to a checkpoint, or all layouts.

    Without CHECKPOINT: the known lineages with their layouts and edges.
    """
    from .. import api

    document = api.history(
        checkpoint, lineage=lineage, rules=rules, allow=allow, at=at, counts=graph is not None
    ).to_json()
    if families and (checkpoint or graph):
        fail("M115", "--families lists what is known, of no checkpoint and as no graph")
    if families:
        render.emit(document, form, family_table.table)
    elif graph is None:
        whole = checkpoint or lineage
        render.emit(document, form, render.history if whole else family_table.listing)
    else:
        render.emit(document, form, partial(lineage_graph.graph, form=graph))


COMMAND = command
