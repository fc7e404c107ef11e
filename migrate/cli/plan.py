"""`migrate plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from . import render
from .options import as_json, params, question


@click.command()
@click.argument("checkpoint")
@question
@click.option("-o", "--output", "output", metavar="FILE", help="Save the plan; `-` writes it to stdout.")
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest output file, e.g. 5GB or 500MiB.")
@click.option("--single-file/--folder", "single", default=None, help="Shape of the output; like the source unless said.")
@click.option("--check", is_flag=True, help="Exit with 1 if there is anything to do.")
@click.option("--all", "expand", is_flag=True, help="List unchanged rows too.")
@as_json
def command(
    checkpoint: str,
    to: tuple[str, ...],
    from_: tuple[str, ...],
    rules: tuple[str, ...],
    assignments: tuple[str, ...],
    allow: tuple[str, ...],
    output: str | None,
    max_shard_size: str,
    single: bool | None,
    check: bool,
    expand: bool,
    form: str,
) -> int:
    """Show what a migration of CHECKPOINT would do: every name, shape, size and problem, before a byte is read."""
    from .. import api

    plan = api.plan(
        checkpoint, to=to, from_=from_, rules=rules, params=params(assignments), allow=allow, max_shard_size=max_shard_size, single_file=single
    )
    if output == "-":
        click.echo(plan.to_json(), nl=False)
    else:
        if output:
            Path(output).write_text(plan.to_json(), encoding="utf-8")
        render.emit(plan.document, form, render.plan(plan.document, expand))
        if output and form == "text":
            click.echo(f"Saved {output}. To run exactly this:  migrate apply {output} -o NEW", file=sys.stderr)
    return 1 if check and plan.document["path"] else 0


COMMAND = command
