"""`migrate verify`."""

from __future__ import annotations

from typing import Any

import click

from . import render
from .options import as_json, params, question, quiet
from .progress import Progress


@click.command()
@click.argument("output")
@click.option("--source", required=True, metavar="CKPT", help="The checkpoint that OUTPUT was made from.")
@question
@quiet
@as_json
def command(output: str, source: str, assignments: tuple[str, ...], silent: bool, form: str, **arguments: Any) -> int:
    """Recompute a migrated checkpoint and compare its bytes.

    It is recomputed on the eager path, which shares nothing with what wrote OUTPUT. What was applied is read from OUTPUT's
    stamp unless --to or --rules says it. Exits with 1 if a byte differs,
    other than by what an op declares that libraries may disagree about.
    """
    from .. import api

    with Progress("verifying", silent) as progress:
        document = api.verify(output, source=source, params=params(assignments), progress=progress.update, **arguments)
    render.emit(document, form, render.verification)
    return 0 if document["equal"] else 1


COMMAND = command
