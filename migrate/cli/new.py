"""`migrate new`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import plural, printable
from . import render
from .options import as_json, opening
from .terminal import safe

if TYPE_CHECKING:
    from ..authoring.infer.names import Question


@click.command()
@click.argument("name", required=False, metavar="[LINEAGE/TO/SLUG]")
@click.option(
    "-o", "--output", "output", metavar="FILE", help="A rule file without a lineage instead."
)
@click.option(
    "--from",
    "from_",
    metavar="LAYOUT",
    help="Layout the edge begins in.  [default: the one before]",
)
@click.option(
    "--index",
    "index",
    metavar="CKPT",
    help="List this checkpoint's key templates under `keep`, to be deleted and moved.",
)
@click.option(
    "--from-transformers",
    "from_transformers",
    metavar="CKPT",
    help="Import the rules for this checkpoint's class from the installed transformers.",
)
@click.option(
    "--class", "cls", metavar="CLASS", help="That class.  [default: as config.json names it]"
)
@click.option(
    "--reverse", is_flag=True, help="That checkpoint is in the layout of transformers 5 already."
)
@click.option(
    "--from-diff",
    "from_diff",
    nargs=2,
    metavar="OLD NEW",
    help="Find the rules between two checkpoints with the same weights.",
)
@click.option(
    "--headers", "headers", is_flag=True, help="With --from-diff: names, shapes and dtypes alone."
)
@click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="OLD=NEW",
    help="With --from-diff: a pattern of old keys, and what became of them.",
)
@click.option(
    "--partial",
    "partial",
    is_flag=True,
    help="With --from-diff: leave out what nothing explains.",
)
@click.option(
    "--max-memory",
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="With --from-diff: memory for tensors that have to be held.",
)
@click.option(
    "--rules",
    "rules",
    metavar="DIR",
    default="rules",
    show_default=True,
    help="The folder of lineages that the file goes to.",
)
@click.option(
    "--pack",
    "pack",
    metavar="NAME",
    help="Make a folder to publish, with a pyproject.toml, tests and CI, that the file goes to.",
)
@opening(
    folder="that checkpoint's folder",
    more={"code": "a module to be made by the code that OLD or NEW names"},
    place="The dict of that checkpoint, if nested, that rules work on, e.g. model.state_dict.",
)
@as_json
def command(
    name: str | None,
    output: str | None,
    from_: str | None,
    index: str | None,
    from_transformers: str | None,
    cls: str | None,
    reverse: bool,
    from_diff: tuple[str, str] | None,
    headers: bool,
    answers: tuple[str, ...],
    partial: bool,
    max_memory: str,
    rules: str,
    pack: str | None,
    allow: tuple[str, ...],
    at: str | None,
    form: str,
) -> None:
    """Write a rule file, to fill in or imported.

    It goes to rules/LINEAGE/TO/SLUG.yaml; a lineage that is new gets its layouts.yaml as well. What
    is written has been loaded and linted, and nothing is ever replaced. With --pack NAME alone, an
    example is written.
    """
    from .. import api

    if (name is None) == (output is None) and (pack is None or output is not None):
        raise click.UsageError("name LINEAGE/TO/SLUG, a file with -o, or a pack with --pack")
    if output is not None and not output.endswith((".yaml", ".yml")):
        raise click.UsageError("-o takes a file that ends in .yaml")
    for path in from_diff or ():
        if path.startswith("module:") and "code" in allow:
            click.echo(f"running {printable(path.removeprefix('module:'))}", err=True)
    said = dict(_answer(text) for text in answers)
    on_terminal = from_diff is not None and sys.stdin.isatty() and sys.stderr.isatty()
    document = api.new(
        name or output,
        from_=from_,
        index=index,
        from_transformers=from_transformers,
        cls=cls,
        reverse=reverse,
        from_diff=from_diff,
        headers=headers,
        answers=said,
        ask=_ask if on_terminal else None,
        partial=partial,
        max_memory=max_memory,
        rules=rules,
        pack=pack,
        allow=allow,
        at=at,
    ).to_json()
    render.emit(document, form, text)


def _answer(said: str) -> tuple[str, str]:
    before, equals, after = said.partition("=")
    if not equals or not before:
        raise click.UsageError("--answer takes OLD PATTERN=NEW PATTERN")
    return before, after


def _ask(question: Question) -> int | None:
    """What a person at the terminal says."""
    click.echo(f"\nwhich old tensor became {printable(question.target)}? {question.why}", err=True)
    for number, (pattern, score) in enumerate(question.candidates, 1):
        click.echo(f"  {number}  {printable(pattern)} (likeness {score})", err=True)
    most = len(question.candidates)
    answer: int = click.prompt(
        f"1 to {most}, or 0 to leave it open", type=click.IntRange(0, most), err=True
    )
    return answer - 1 if answer else None


def text(document: Mapping[str, Any]) -> str:
    """The files, how much stands in the new one, and what lint says of it."""
    doc = safe(document)
    made = doc["counts"]
    counts = [
        plural(made["rules"], "rule"),
        *([f"{made['guessed']} of them guessed"] if made["guessed"] else []),
        f"{plural(made['keep'], 'pattern')} under keep",
        *([f"{made['keep_guessed']} of them guessed"] if made["keep_guessed"] else []),
        plural(made["tests"], "test"),
    ]
    out = [f"{file}: written" for file in doc["files"][:-1]]
    out.append(f"{doc['files'][-1]}: written, {', '.join(counts)}")
    found = [render.diagnostic(d) for d in document["diagnostics"]]
    if found:
        out += ["", "\n\n".join(found), "", f"lint: {plural(len(found), 'finding')}"]
    return "\n".join(out)


COMMAND = command
