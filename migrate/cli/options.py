"""Options that mean the same in every command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ..planning.request import ALLOWANCES, OUTPUT_FORMATS

F = TypeVar("F", bound=Callable[..., Any])


def as_json(command: F) -> F:
    """`--format text|json`."""
    option: Callable[[F], F] = click.option(
        "--format",
        "form",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Format of the answer on stdout.",
    )
    return option(command)


def output_format(command: F) -> F:
    """`--output-format safetensors|torch`."""
    option: Callable[[F], F] = click.option(
        "--output-format",
        "output_format",
        type=click.Choice(OUTPUT_FORMATS),
        help="Format of the output.  [default: that of OUT's ending, or the source's]",
    )
    return option(command)


def quiet(command: F) -> F:
    """`-q`."""
    option: Callable[[F], F] = click.option(
        "-q", "--quiet", "silent", is_flag=True, help="Suppress progress and hints."
    )
    return option(command)


def question(command: F) -> F:
    """The options that say what is asked: --to, --from, --rules, --set, --at, --allow."""
    for option in reversed(
        (
            click.option(
                "--to",
                "to",
                multiple=True,
                metavar="LAYOUT",
                help="Layout to reach: lineage@layout, latest, +1, -1. Repeatable.",
            ),
            click.option(
                "--from",
                "from_",
                multiple=True,
                metavar="LAYOUT",
                help="Layout the checkpoint is in, if it cannot be detected. Repeatable.",
            ),
            click.option(
                "--rules",
                "rules",
                multiple=True,
                metavar="PATH",
                help="A rule file, which is then applied, or a folder of lineages.",
            ),
            click.option(
                "--set",
                "assignments",
                multiple=True,
                metavar="NAME=VALUE",
                help="Value of a parameter. A list may hold patterns, or be @FILE with one entry "
                "per line. Repeatable.",
            ),
            click.option(
                "--at",
                "at",
                metavar="PATH",
                help="The dict of a nested checkpoint that rules work on, e.g. model.state_dict.",
            ),
            click.option(
                "--allow",
                "allow",
                multiple=True,
                type=click.Choice(ALLOWANCES),
                help="Permit what is refused by default. Repeatable.",
            ),
        )
    ):
        command = option(command)
    return command


def params(assignments: tuple[str, ...]) -> dict[str, str]:
    """`("a=1",)` as {"a": "1"}; UsageError for what has no `=`, and for two values of one name."""
    out: dict[str, str] = {}
    for assignment in assignments:
        name, sep, value = assignment.partition("=")
        if not sep or not name:
            raise click.UsageError(f"--set takes NAME=VALUE, not {assignment!r}")
        if out.setdefault(name, value) != value:
            raise click.UsageError(f"--set gives {name!r} two values: {out[name]!r} and {value!r}")
    return out
