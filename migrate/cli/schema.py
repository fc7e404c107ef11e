"""`migrate schema`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..core.errors import plural, printable
from . import render
from .options import as_json, opening, require_savable, save_document
from .terminal import safe


@click.command()
@click.argument("name", required=False)
@click.option(
    "--check",
    is_flag=True,
    help="Exit with 1 if the schemas in a folder are out of date.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="Folder to write to; with --check the folder to look at (./schemas).",
)
@click.option(
    "--path",
    "where",
    is_flag=True,
    help="Print the path of the included schemas, for an editor's settings.",
)
@click.option(
    "--for",
    "checkpoint",
    metavar="CKPT",
    help="Print the schema of rule files that completes this checkpoint's keys in from and keep; "
    "with -o into a FILE.json.",
)
@opening(
    folder="that checkpoint's folder",
    place="The dict of that checkpoint, if nested, that rules work on, e.g. model.state_dict.",
)
@as_json
def command(
    name: str | None,
    check: bool,
    output: str | None,
    where: bool,
    checkpoint: str | None,
    allow: tuple[str, ...],
    at: str | None,
    form: str,
) -> int:
    """Print or write the JSON schemas of rule files and answers.

    NAME is rulefile, layouts or the kind of an answer; its schema is printed. Without NAME
    and -o, all of them are listed.
    """
    from ..rules import schema

    if checkpoint is not None:
        if name not in (None, "rulefile") or check or where:
            raise click.UsageError("--for makes the schema of rule files, and goes with -o alone")
        return _made_for(checkpoint, output, allow, at)
    if where:
        if check or output is not None:
            raise click.UsageError("--path takes neither -o nor --check")
        document = schema.check_schemas(name, folder=_shipped())
        place = _shipped() if name is None else _shipped() / document["schemas"][0]["file"]
        render.emit(document, form, lambda _: printable(str(place), 4096))
        return 0
    if name is not None and not check and output is None:
        schema.check_schemas(name)
        click.echo(schema.dump_schema(schema.schemas()[name]()), nl=False)
        return 0
    folder = Path("schemas") if check and output is None else output
    if check and output is None and not Path("schemas").is_dir():
        folder = _shipped()
    document = schema.check_schemas(name, folder=folder, write=output is not None and not check)
    render.emit(document, form, text)
    return 1 if check and not document["current"] else 0


def _made_for(checkpoint: str, output: str | None, allow: tuple[str, ...], at: str | None) -> int:
    from ..api.schemas import schema_for
    from ..rules.schema import dump_schema

    if output is not None and not _is_rule_schema(Path(output)):
        require_savable(output, "schema", checkpoint)
    made = dump_schema(schema_for(checkpoint, allow=allow, at=at))
    if output is None:
        click.echo(made, nl=False)
    else:
        save_document(output, "schema", made)
        click.echo(f"{printable(output, 4096)}: written")
    return 0


def _is_rule_schema(place: Path) -> bool:
    """Whether a schema that `--for` made lies there, which another one may replace."""
    try:
        with place.open("rb") as file:
            return b'"title": "migrate rule file"' in file.read(200)
    except OSError:
        return False


def text(document: Mapping[str, Any]) -> str:
    """A line for each schema; where a folder was looked at, for each file that is or was wrong."""
    doc = safe(document)
    if doc["folder"] is None:
        return "\n".join(
            render.columns([[s["name"], s["title"]] for s in doc["schemas"]], indent="")
        )
    wrong = [s for s in doc["schemas"] if s["state"] != "current"]
    said = {
        "missing": "is missing",
        "differs": "differs from the models",
        "unknown": "belongs to no model",
        "written": "written",
    }
    out = [f"{doc['folder']}/{s['file']}: {said[s['state']]}" for s in wrong]
    hint = (
        []
        if doc["current"]
        else [f"`migrate schema -o {render.word(document['folder'])}` writes them"]
    )
    return "\n".join(
        [*out, *hint]
        or [f"{doc['folder']}: {plural(len(doc['schemas']), 'schema')} as the models give them"]
    )


def _shipped() -> Path:
    package = Path(__file__).resolve().parent.parent
    return package / "_schemas" if (package / "_schemas").is_dir() else package.parent / "schemas"


COMMAND = command
