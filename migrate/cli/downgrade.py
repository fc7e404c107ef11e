"""`migrate downgrade`."""

from __future__ import annotations

from typing import Any

import click

from .apply import execute, running
from .options import as_json, params, question


@click.command()
@click.argument("checkpoint")
@question
@running
@as_json
def command(checkpoint: str, assignments: tuple[str, ...], form: str, quiet: bool, output: str, no_fsync: bool, **arguments: Any) -> None:
    """Take CHECKPOINT back to an older layout, or, without --to, undo what its stamp says was applied last."""
    from .. import api

    execute(checkpoint, form, quiet, output, api.downgrade, params=params(assignments), fsync=not no_fsync, **arguments)


COMMAND = command
