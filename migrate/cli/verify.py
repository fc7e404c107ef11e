"""`migrate verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import render
from .launcher import ending_with_the_others, ranks, ranks_of, threads_of
from .options import as_json, params, question, quiet, side
from .terminal import Progress

if TYPE_CHECKING:
    from ..results import VerifyEstimate


@click.command()
@click.argument("output")
@click.option(
    "--source", required=True, metavar="CKPT", help="The checkpoint from which OUTPUT was made."
)
@question
@side
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    help="Tensors to make at the same time.  [default: 2, or with several ranks the machine's "
    "cores divided by its ranks]",
)
@ranks
@click.option(
    "--max-memory",
    "max_memory",
    metavar="SIZE",
    help="Refuse what needs more, e.g. 4GB.  [default: two tensors within 1 GB, or the largest]",
)
@click.option(
    "--sample",
    metavar="SHARE",
    help="Compare a random part only, e.g. 5%: tensors, and rows of large ones.",
)
@click.option(
    "--seed", type=int, help="Seed of an earlier --sample, to choose the same part again."
)
@quiet
@as_json
def command(
    output: str,
    source: str,
    assignments: tuple[str, ...],
    silent: bool,
    form: str,
    launched: str,
    threads: int | None,
    **arguments: Any,
) -> int:
    """Recompute a migrated checkpoint and compare its bytes.

    It is recomputed by a second implementation, one or two tensors at a time. The memory and time
    that this takes are printed first. What was applied is read from OUTPUT's stamp unless --to or
    --rules is given. Exits with 1 if a byte differs by more than an op declares as the difference
    between libraries. What was not compared is listed.
    """
    from .. import api

    here = ranks_of(launched)
    first = here is None or not here.rank

    def announce(estimate: VerifyEstimate) -> None:
        if not silent:
            click.echo(render.announcement(estimate.to_json()), err=True)

    with (
        ending_with_the_others(here),
        Progress("verifying", silent or not first) as progress,
    ):
        document = api.verify(
            output,
            source=source,
            params=params(assignments),
            progress=progress.update if first else None,
            inform=announce if first else None,
            threads=threads_of(threads, here),
            ranks=here,
            **arguments,
        ).to_json()
    if first:
        render.emit(document, form, render.verification)
    return 0 if document["equal"] else 1


COMMAND = command
