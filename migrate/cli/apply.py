"""`migrate apply`, and with it `migrate downgrade`: the same engine, the other way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

from . import render
from .options import as_json, params, question
from .progress import Progress


def running(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run."""
    for option in reversed(
        (
            click.option("-o", "--output", "output", required=True, metavar="OUT", help="The new checkpoint; must not exist."),
            click.option("--max-shard-size", default=None, help="Largest output file, e.g. 5GB (default) or 500MiB."),
            click.option("--threads", default=2, show_default=True, type=click.IntRange(1, 64), help="Output files written at a time."),
            click.option("--max-memory", default="1GiB", show_default=True, help="Memory for tensors that are computed or transposed."),
            click.option("--resume", is_flag=True, help="Go on with what a killed or failed run left behind."),
            click.option("--no-fsync", is_flag=True, help="Do not wait for the disk; a power cut may then lose the output."),
            click.option("-q", "--quiet", is_flag=True, help="No progress."),
        )
    ):
        command = option(command)
    return command


def execute(checkpoint: str, form: str, quiet: bool, output: str, call: Callable[..., Any], **arguments: Any) -> None:
    """Runs `call` with a progress display and prints what it published."""
    with Progress(quiet or form == "json") as progress:
        document = call(checkpoint, output, progress=progress.update, **arguments)
    text = (
        f"published {document['path']}   {document['tensors']:,} tensors, {render.size(document['bytes_written'])}"
        f" in {render.plural(len(document['files']), 'file')}   downgrade: {'exact' if document['downgrade']['exact'] else 'not exact'}"
    )
    render.emit(document, form, text)
    if form == "text" and not quiet:
        click.echo(f"next:  migrate verify {output} --source {document['source']}", file=sys.stderr)


@click.command()
@click.argument("checkpoint")
@question
@running
@as_json
def command(checkpoint: str, assignments: tuple[str, ...], form: str, quiet: bool, output: str, no_fsync: bool, **arguments: Any) -> None:
    """Migrate CHECKPOINT (or run a saved plan.json) into OUT.

    OUT is a folder, or one file if it ends in .safetensors. The source is never written; OUT is whole or absent.
    """
    from .. import api

    execute(checkpoint, form, quiet, output, api.apply, params=params(assignments), fsync=not no_fsync, **arguments)


COMMAND = command
