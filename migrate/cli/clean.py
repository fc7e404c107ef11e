"""`migrate clean`."""

from __future__ import annotations

import click

from . import render
from .options import as_json
from .store_text import cleaned


@click.command()
@click.argument("output", metavar="OUT")
@click.option(
    "--older-than",
    "older_than",
    metavar="AGE",
    help="Only if its journal, or its last file, was written longer ago, e.g. 36h or 2d.",
)
@click.option("--dry-run", "dry_run", is_flag=True, help="Show what is left, and remove nothing.")
@as_json
def command(output: str, older_than: str | None, dry_run: bool, form: str) -> None:
    """Throw away what a run into a store left when it ended early.

    OUT is the URL that the run was to write. In S3 its unfinished uploads are aborted and its
    journal is removed; uploads of others and objects that have appeared are named, and stay. In
    other stores only a run that was killed leaves anything: files beside OUT, which are removed.
    """
    from .. import api

    document = api.clean(output, older_than=older_than, dry_run=dry_run).to_json()
    render.emit(document, form, cleaned)


COMMAND = command
