"""`migrate inspect`."""

from __future__ import annotations

import click

from . import render
from .options import as_json


@click.command()
@click.argument("checkpoint")
@click.option("--all", "expand", is_flag=True, help="List every key instead of collapsing them.")
@click.option("--rules", "rules", multiple=True, metavar="PATH", help="A folder of lineages to detect as well.")
@click.option("--allow", "allow", multiple=True, type=click.Choice(["links"]), help="Permit links out of the checkpoint's folder.")
@as_json
def command(checkpoint: str, expand: bool, rules: tuple[str, ...], allow: tuple[str, ...], form: str) -> None:
    """Show what a checkpoint holds, from its headers.

    Keys, sizes, dtypes, and the layouts that CHECKPOINT fits, with evidence. No tensor is read.
    """
    from .. import api

    document = api.inspect(checkpoint, rules=rules, allow=allow, expand=expand)
    render.emit(document, form, render.inspection(document))


COMMAND = command
