"""Options that mean the same in every command, and the documents that some of them save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..core.errors import fail, printable
from ..core.types import PACK
from ..planning.request import ALLOWANCES, MOST_CHUNKS, OUTPUT_FORMATS
from ..source.places import holds, require_local

# how a page of a plan begins
PAGE = b"<!doctype html>\n<!-- migrate plan -->\n"
F = TypeVar("F", bound=Callable[..., Any])
if TYPE_CHECKING:
    _Choice = click.Choice[str]
else:
    # older releases of click have no parameter here
    _Choice = click.Choice


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


class _Written(_Choice):
    """One of the built-in formats, or one that a third party declares."""

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value not in self.choices:
            from ..source.registry import declared

            if any(entry.name == value for entry in declared("migrate.formats")):
                return str(value)
        return super().convert(value, param, ctx)


def output_format(command: F) -> F:
    """`--output-format safetensors|torch|dcp|torch_dist`, `--chunks` and `--rewrite`."""
    option: Callable[[F], F] = click.option(
        "--output-format",
        "output_format",
        type=_Written(OUTPUT_FORMATS),
        help="Format of the output.  [default: that of OUT's ending, or the source's]",
    )
    chunks: Callable[[F], F] = click.option(
        "--chunks",
        "chunks",
        type=click.IntRange(1, MOST_CHUNKS),
        metavar="N",
        help="Cut tensors as FSDP2 on N ranks holds them; for dcp.  [default: up to 537 MB each]",
    )
    rewrite: Callable[[F], F] = click.option(
        "--rewrite",
        is_flag=True,
        help="Write data files of dcp anew even where names alone change.",
    )
    return option(chunks(rewrite(command)))


def side(command: F) -> F:
    """`--side DIR`."""
    option: Callable[[F], F] = click.option(
        "--side",
        "side",
        metavar="DIR",
        help="Take the files beside the weights in DIR too: tokenizer, generation config.",
    )
    return option(command)


def quiet(command: F) -> F:
    """`-q`."""
    option: Callable[[F], F] = click.option(
        "-q", "--quiet", "silent", is_flag=True, help="Suppress progress and hints."
    )
    return option(command)


def opening(
    folder: str = "the checkpoint's folder",
    place: str = "The dict of a nested checkpoint that rules work on, e.g. model.state_dict.",
    more: Mapping[str, str] | None = None,
) -> Callable[[F], F]:
    """`--allow links` and `--at`, of commands that only read; `place` is the help of `--at`, `more`
    are other words to allow, with what they permit.
    """
    said = [f"links out of {folder}", *(more or {}).values()]

    def decorate(command: F) -> F:
        allow: Callable[[F], F] = click.option(
            "--allow",
            "allow",
            multiple=True,
            type=click.Choice(["links", *(more or {})]),
            help=f"Permit {', or '.join(said)}.",
        )
        at: Callable[[F], F] = click.option("--at", "at", metavar="PATH", help=place)
        return allow(at(command))

    return decorate


def places_of_rules(text: str) -> Callable[[F], F]:
    """`--rules`, whose help is `text`, `--pack` and `--no-packs`: where rules are looked for. The
    command gets an installed pack among its `rules`.
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def merged(*, rules: tuple[str, ...], packs: tuple[str, ...], **rest: Any) -> Any:
            return command(rules=(*rules, *(f"{PACK}{name}" for name in packs)), **rest)

        for option in reversed(
            (
                click.option("--rules", "rules", multiple=True, metavar="PATH", help=text),
                click.option(
                    "--pack",
                    "packs",
                    multiple=True,
                    metavar="NAME",
                    help="An installed pack whose lineages come first, by its distribution.",
                ),
                click.option(
                    "--no-packs",
                    is_flag=True,
                    expose_value=False,
                    callback=_without_packs,
                    help="Leave out what installed packages declare: packs, ops, formats, codecs.",
                ),
            )
        ):
            merged = option(merged)
        return cast("F", merged)

    return decorate


def _without_packs(context: click.Context, _: click.Parameter, value: bool) -> None:
    """The variable is what the processes of a run inherit."""
    if value:
        context.with_resource(_variable("MIGRATE_DISABLE_PACKS", "all"))


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def question(command: F) -> F:
    """The options that say what is asked: --to, --from, --rules, --pack, --no-packs, --set, --at,
    --allow.
    """
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
            places_of_rules("A rule file, which is then applied, or a folder of lineages."),
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


def require_savable(output: str, kind: str, source: str, files: Sequence[str] = ()) -> None:
    """M115 for a place in the source, which is a folder or one of `files` beside it, for one
    without a folder to lie in, and for a file that is there and is no document of this `kind`."""
    require_local(output)
    place, shown = Path(os.path.realpath(output)), printable(output, 300)
    if holds(source, output, files):
        fail(
            "M115",
            f"the {kind} cannot be saved as {shown}, which lies in the source",
            help="choose a place outside the source",
        )
    if place.is_file() and not _holds(place, kind):
        fail(
            "M115",
            f"the {kind} cannot be saved as {shown}: that file exists and is not a {kind}",
            help="choose another place",
        )
    if place.is_dir() or not place.parent.is_dir():
        what = "it is a folder" if place.is_dir() else "the folder does not exist"
        fail("M115", f"cannot write the {kind} to {shown}: {what}", help="choose another place")


def save_document(output: str, kind: str, text: str) -> None:
    """Saves the text. M115 if it cannot be written."""
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(
            "M115",
            f"cannot write the {kind} to {printable(output, 300)}: {error.strerror or error}",
            help="choose another place",
        )


def _holds(place: Path, kind: str) -> bool:
    """Whether a file is a document of this kind. Looks at its start before it reads all of it."""
    try:
        if kind == "page":
            with place.open("rb") as file:
                return file.read(len(PAGE)) == PAGE
        with place.open("rb") as file:
            if not file.read(1).startswith(b"{") or f'"kind": "{kind}"'.encode() not in file.read(
                4096
            ):
                return False
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(found, dict)
        and found.get("kind") == kind
        and str(found.get("digest")).startswith("m1:")
    )
