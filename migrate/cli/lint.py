"""`migrate lint`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from ..core.errors import plural
from . import render
from .options import opening
from .terminal import safe, say


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@click.option(
    "--select",
    "select",
    multiple=True,
    metavar="CODES",
    help="Show only these findings: codes or names, comma-separated.",
)
@click.option(
    "--ignore", "ignore", multiple=True, metavar="CODES", help="Show all findings but these."
)
@click.option(
    "--fix",
    "fix",
    is_flag=True,
    help="First mend what has one answer: schema line, requires, quotes, order of keep, misspelt "
    "fields.",
)
@click.option(
    "--since",
    "since",
    metavar="REF",
    help="Look only at files that changed since this commit of their git repository.",
)
@click.option(
    "--index",
    "index",
    metavar="CKPT",
    help="Also check the rules against the headers of this checkpoint.",
)
@opening(
    folder="that checkpoint's folder",
    place="The dict of that checkpoint, if nested, that rules work on, e.g. model.state_dict.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github"]),
    default="text",
    help="Format of the answer on stdout.",
)
def command(
    paths: tuple[str, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fix: bool,
    since: str | None,
    index: str | None,
    allow: tuple[str, ...],
    at: str | None,
    form: str,
) -> int:
    """Check rule files for mistakes and gaps.

    PATH is a rule file or a folder of them; the default is ./rules, or else the rules included with
    migrate. A comment `# migrate: allow M620 because …` on the line of a finding, or above it,
    suppresses it. Exits with 1 if something is found, with 2 if a file cannot be loaded.
    """
    from .. import api

    document = api.lint(
        paths, select=select, ignore=ignore, index=index, fix=fix, since=since, allow=allow, at=at
    ).to_json()
    if form == "json":
        click.echo(json.dumps(document, indent=1))
    elif form == "github":
        for line in workflow_commands(document):
            click.echo(line)
    else:
        say(text(document))
    return int(document["exit"])


def text(document: Mapping[str, Any]) -> str:
    """Each finding as rustc would draw it, and a line that counts them."""
    out = [f"{one['file']}: fixed {', '.join(one['fixes'])}" for one in safe(document)["fixed"]]
    for d in document["diagnostics"]:
        out += [render.diagnostic(d), ""]
    return "\n".join([*out, _summary(document)])


def _summary(document: Mapping[str, Any]) -> str:
    found = document["diagnostics"]
    errors = sum(d["severity"] == "error" for d in found)
    counts = [
        plural(n, word) for n, word in ((errors, "error"), (len(found) - errors, "warning")) if n
    ]
    allowed = f", {document['suppressed']} allowed by comments" if document["suppressed"] else ""
    return (
        f"{plural(len(document['files']), 'file')}: {', '.join(counts) or 'nothing found'}{allowed}"
    )


def workflow_commands(document: Mapping[str, Any]) -> list[str]:
    """The findings as workflow commands of GitHub Actions, one line each."""
    out = []
    for d in document["diagnostics"]:
        kind = "error" if d["severity"] == "error" else "warning"
        place = ""
        if d["spans"]:
            span = d["spans"][0]
            place = f"file={_property(span['file'])},line={span['line']},col={span['column']},endColumn={span['column'] + span['length']},"  # noqa: E501
        body = "\n".join(
            [d["message"], *d["notes"], *([f"help: {d['help']}"] if d["help"] else [])]
        )
        out.append(f"::{kind} {place}title={_property(d['code'] + ' ' + d['name'])}::{_data(body)}")
    return out


def _data(text: str) -> str:
    """Text as a workflow command writes it."""
    return "%0A".join(str(safe(line)).replace("%", "%25") for line in text.split("\n"))


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


COMMAND = command
