"""`migrate plan`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from . import render
from .options import as_json, params, question


@click.command()
@click.argument("checkpoint")
@question
@click.option("--downgrade", "backwards", is_flag=True, help="Plan the way back, what `migrate downgrade` would do.")
@click.option("-o", "--output", "output", metavar="FILE", help="Save the plan; `-` writes it to stdout.")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest output file, e.g. 500MiB.")
@click.option("--single-file/--folder", "single", default=None, help="Shape of the output; like the source unless said.")
@click.option("--check", is_flag=True, help="Exit with 1 if there is anything to do.")
@as_json
def command(
    checkpoint: str,
    to: tuple[str, ...],
    from_: tuple[str, ...],
    rules: tuple[str, ...],
    assignments: tuple[str, ...],
    allow: tuple[str, ...],
    backwards: bool,
    output: str | None,
    max_shard_size: str,
    single: bool | None,
    check: bool,
    form: str,
) -> int:
    """Show what a migration would do, and save it for review.

    Every name, shape, size and problem of the result is told before a tensor of CHECKPOINT is read.
    """
    from .. import api

    plan = api.plan(
        checkpoint,
        to=to,
        from_=from_,
        rules=rules,
        params=params(assignments),
        allow=allow,
        max_shard_size=max_shard_size,
        single_file=single,
        backwards=backwards,
    )
    if output == "-":
        click.echo(plan.to_json(), nl=False)
    else:
        if output:
            _save(output, plan.to_json(), plan.document["source"])
        render.emit(plan.document, form, render.plan(plan.document))
        if output and form == "text":
            name = render.word(output)
            click.echo(f"saved {name}; to run exactly this:  migrate apply {name} -o NEW", err=True)
    return 1 if check and plan.document["path"] else 0


def _save(output: str, text: str, source: Mapping[str, Any]) -> None:
    """Writes the plan. M115 for a place in the source, and for a file that is there and is no plan."""
    from ..core.diagnostics import fail, printable

    place, shown = Path(os.path.realpath(output)), printable(output, 300)
    home = Path(os.path.realpath(source["path"]))
    files = {Path(os.path.realpath(home.parent / name)) for name in source["files"]} if not home.is_dir() else set()
    if place == home or home in place.parents or place in files:
        fail("M115", f"the plan cannot be saved as {shown}: that lies in the source", help="choose a place outside the source")
    if place.is_file() and not _holds_plan(place):
        fail("M115", f"the plan cannot be saved as {shown}: that file is there and is no plan", help="choose another place")
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        fail("M115", f"cannot write the plan to {printable(output, 300)}: {error.strerror or error}", help="choose another place")


def _holds_plan(place: Path) -> bool:
    """Whether a file is a plan of ours, which a new one may replace. Looks at its start before it reads all of it."""
    try:
        with place.open("rb") as file:
            if not file.read(1).startswith(b"{") or b'"kind": "plan"' not in file.read(4096):
                return False
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind") == "plan" and str(found.get("digest")).startswith("m1:")


COMMAND = command
