"""`migrate verify`."""

from __future__ import annotations

from typing import Any

import click

from . import render
from .options import as_json, params, question


@click.command()
@click.argument("output")
@click.option("--source", required=True, metavar="CKPT", help="The checkpoint that OUTPUT was made from.")
@question
@as_json
def command(output: str, source: str, assignments: tuple[str, ...], form: str, **arguments: Any) -> int:
    """Recompute OUTPUT from its source on the eager path, which shares nothing with the tiles, and compare every byte.

    What was applied is read from OUTPUT's stamp unless --to or --rules says it.
    """
    from .. import api

    document = api.verify(output, source=source, params=params(assignments), **arguments)
    render.emit(document, form, render.verification(document))
    return 0 if document["equal"] else 1


COMMAND = command
