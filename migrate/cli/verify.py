"""`migrate verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import render
from .options import as_json, params, question, quiet
from .progress import Progress

if TYPE_CHECKING:
    from ..results import VerifyEstimate


@click.command()
@click.argument("output")
@click.option(
    "--source", required=True, metavar="CKPT", help="The checkpoint that OUTPUT was made from."
)
@question
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="Tensors that are made at the same time.",
)
@click.option(
    "--max-memory",
    "max_memory",
    metavar="SIZE",
    help="Refuse what needs more, e.g. 4GB.  [default: two tensors within 1 GB, or the largest]",
)
@click.option(
    "--sample",
    metavar="SHARE",
    help="Look at a part only, e.g. 5%: tensors, and rows of large ones, chosen by chance.",
)
@click.option(
    "--seed", type=int, help="The seed of an earlier --sample, which chooses the same again."
)
@quiet
@as_json
def command(
    output: str,
    source: str,
    assignments: tuple[str, ...],
    silent: bool,
    form: str,
    **arguments: Any,
) -> int:
    """Recompute a migrated checkpoint and compare its bytes.

    It is recomputed on the eager path, which shares nothing with what wrote OUTPUT: whole tensors,
    one or two at a time. How much memory and time that takes is said first. What was applied is
    read from OUTPUT's stamp unless --to or --rules says it. Exits with 1 if a byte differs, other
    than by what an op declares that libraries may disagree about. What was not looked at is listed.
    """
    from .. import api

    def announce(estimate: VerifyEstimate) -> None:
        if not silent:
            click.echo(render.announcement(estimate.to_json()), err=True)

    with Progress("verifying", silent) as progress:
        document = api.verify(
            output,
            source=source,
            params=params(assignments),
            progress=progress.update,
            inform=announce,
            **arguments,
        ).to_json()
    render.emit(document, form, render.verification)
    return 0 if document["equal"] else 1


COMMAND = command
