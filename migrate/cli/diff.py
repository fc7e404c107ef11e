"""`migrate diff`."""

from __future__ import annotations

import click

from . import render
from .options import as_json


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--allow", "allow", multiple=True, type=click.Choice(["links"]), help="Permit links out of the checkpoint's folder.")
@as_json
def command(a: str, b: str, allow: tuple[str, ...], form: str) -> int:
    """Compare two checkpoints: keys, specs, bytes; exit with 1 if they differ."""
    from .. import api

    document = api.diff(a, b, allow=allow)
    render.emit(document, form, render.difference(document))
    return 0 if document["equal"] else 1


COMMAND = command
