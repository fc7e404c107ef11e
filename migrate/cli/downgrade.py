"""`migrate downgrade`."""

from __future__ import annotations

from typing import Any

import click

from .apply import execute, running
from .options import as_json, output_format, question, quiet


@click.command()
@click.argument("checkpoint")
@question
@output_format
@running
@quiet
@as_json
def command(checkpoint: str, **arguments: Any) -> int:
    """Take a checkpoint back to an older layout.

    Without --to and --rules it undoes the last run that CHECKPOINT's stamp records. `migrate plan
    --downgrade` shows in advance what it would do.
    """
    from .. import api

    return execute(api.downgrade, checkpoint, **arguments)


COMMAND = command
