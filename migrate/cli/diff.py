"""`migrate diff`."""

from __future__ import annotations

import click

from . import render
from .options import as_json, opening, quiet
from .terminal import Progress


@click.command()
@click.argument("a")
@click.argument("b")
@opening(place="The dict of nested checkpoints that rules work on, e.g. model.state_dict.")
@click.option(
    "--tensors-only",
    "tensors_only",
    is_flag=True,
    help="Compare tensors: no side files, and no values beside tensors.",
)
@quiet
@as_json
def command(
    a: str,
    b: str,
    allow: tuple[str, ...],
    at: str | None,
    tensors_only: bool,
    silent: bool,
    form: str,
) -> int:
    """Compare two checkpoints: keys, specs, bytes and side files.

    Values that are not tensors are compared too. Exits with 1 if anything differs. Differences are
    measured: how many elements, the first of them, maximum error, SQNR. What was not compared is
    listed.
    """
    from .. import api

    with Progress("comparing", silent) as progress:
        document = api.diff(
            a, b, allow=allow, at=at, tensors_only=tensors_only, progress=progress.update
        ).to_json()
    render.emit(document, form, render.difference)
    return 0 if document["equal"] else 1


COMMAND = command
