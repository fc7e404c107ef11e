"""`migrate inspect`."""

from __future__ import annotations

import click

from . import render
from .options import as_json, opening, params, places_of_rules


@click.command()
@click.argument("checkpoint")
@click.option("--all", "expand", is_flag=True, help="List every key instead of collapsing them.")
@click.option(
    "--values", is_flag=True, help="List every value that is not a tensor, alike ones once."
)
@places_of_rules("A folder of lineages to detect as well.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="NAME=VALUE",
    help="te_dtype_numbering=0.8|2.4: how to read a dtype of 7; parts=stages|experts: what the "
    "second number of mp_rank_00_001 counts.",
)
@click.option(
    "--save-index",
    "save_index",
    metavar="FILE",
    help="Write names, shapes and dtypes to a new FILE.json, for commands that read no tensor.",
)
@opening()
@as_json
def command(
    checkpoint: str,
    expand: bool,
    values: bool,
    rules: tuple[str, ...],
    assignments: tuple[str, ...],
    save_index: str | None,
    allow: tuple[str, ...],
    at: str | None,
    form: str,
) -> None:
    """Show what a checkpoint contains, from its headers.

    Keys, sizes, dtypes, and the layouts that CHECKPOINT matches, with evidence. No tensor is read.
    """
    from .. import api

    document = api.inspect(
        checkpoint,
        rules=rules,
        params=params(assignments),
        allow=allow,
        expand=expand,
        values=values,
        at=at,
        save_index=save_index,
    ).to_json()
    render.emit(document, form, render.inspection)


COMMAND = command
