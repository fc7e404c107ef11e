"""`migrate publish`: what the parts of a run wrote appears."""

from __future__ import annotations

import os

import click

from .apply import answer
from .options import as_json, quiet, require_savable


@click.command()
@click.argument("output", metavar="OUT")
@click.option(
    "--source",
    metavar="CKPT",
    help="The checkpoint that the parts read, where it is a signed URL: its query is not recorded.",
)
@click.option("--report", metavar="FILE", help="Save the measured error of every computed tensor.")
@click.option(
    "--no-fsync",
    is_flag=True,
    help="Do not wait for the disk; a power cut may then lose the output.",
)
@quiet
@as_json
def command(
    output: str, source: str | None, report: str | None, no_fsync: bool, silent: bool, form: str
) -> int:
    """Publish what the parts of a run wrote.

    OUT is the one that was given to `migrate apply --part`. All parts have to be done: those that
    are not are named, and nothing is published.
    """
    from .. import api

    if report is not None:
        require_savable(report, "report", output)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    document = api.publish(output, source=source, fsync=not no_fsync).to_json()
    return answer(document, form, silent, report)


COMMAND = command
