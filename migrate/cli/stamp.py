"""`migrate stamp`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from . import render
from .options import as_json, places_of_rules
from .terminal import safe


@click.command()
@click.argument("checkpoint")
@click.argument("layout", metavar="LINEAGE@LAYOUT")
@click.option("-o", "--output", metavar="COPY", help="The stamped copy of a single file.")
@places_of_rules("A folder of lineages that is searched first.")
@click.option(
    "--allow",
    "allow",
    multiple=True,
    type=click.Choice(["other-layout", "links"]),
    help="Permit a layout whose signs the checkpoint lacks, or links out of its folder.",
)
@click.option("--why", metavar="TEXT", help="The reason for --allow other-layout; it is kept.")
@click.option(
    "--at", "at", metavar="PATH", help="The dict of a nested checkpoint, e.g. model.state_dict."
)
@as_json
def command(
    checkpoint: str,
    layout: str,
    output: str | None,
    rules: tuple[str, ...],
    allow: tuple[str, ...],
    why: str | None,
    at: str | None,
    form: str,
) -> None:
    """Say in which layout a checkpoint is that has no stamp.

    A folder gets a migrate.history.json; of a single file a stamped copy is made. Commands
    believe the stamp before they look at keys.
    """
    from .. import api

    document = api.stamp(
        checkpoint, layout, output, why=why, rules=rules, allow=allow, at=at
    ).to_json()
    render.emit(document, form, text)


def text(document: Mapping[str, Any]) -> str:
    """What the stamp says, why, and where it stands."""
    doc = safe(document)
    out = [f"{doc['lineage']}@{doc['layout']}, in {doc['written']}"]
    if doc["why"] is not None:
        out.append(f"  against its signs, because {doc['why']}")
    return "\n".join([*out, *(f"  {line}" for line in doc["evidence"])])


COMMAND = command
