"""`migrate plan`."""

from __future__ import annotations

import click

from ..core.errors import MigrateError
from . import render
from .options import as_json, output_format, params, question, require_savable, save_document, side


@click.command()
@click.argument("checkpoint")
@question
@output_format
@click.option(
    "--downgrade", "backwards", is_flag=True, help="Plan what `migrate downgrade` would do."
)
@click.option(
    "-o", "--output", "output", metavar="FILE", help="Save the plan; `-` writes it to stdout."
)
@click.option(
    "--max-shard-size",
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Maximum size of an output file, e.g. 500MB.",
)
@click.option(
    "--single-file/--folder",
    "single",
    default=None,
    help="One file or a folder; by default like the source.",
)
@side
@click.option("--undo", "undo", is_flag=True, help="Plan what `migrate apply --undo DIR` would do.")
@click.option("--expand", is_flag=True, help="List every tensor in a row of its own.")
@click.option(
    "--key", "key", metavar="KEY", help="Show one key of the source or the output instead."
)
@click.option(
    "--html", "html", metavar="FILE", help="Write a page for a browser, of one file, as well."
)
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
    at: str | None,
    output_format: str | None,
    chunks: int | None,
    rewrite: bool,
    undo: bool,
    side: str | None,
    expand: bool,
    key: str | None,
    html: str | None,
) -> int:
    """Show what a migration would do, and save it for review.

    It lists every name, shape, size and problem of the result before a tensor is read.
    """
    if key is not None and output == "-":
        raise click.UsageError("--key answers on stdout, and so does -o -: give one of them")
    from .. import api

    try:
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
            at=at,
            output_format=output_format,
            chunks=chunks,
            rewrite=rewrite,
            undo=undo,
            side=side,
            expand=expand,
        )
    except MigrateError as error:
        if html is not None:
            _save_problems(html, checkpoint, at, error)
        raise
    click.get_current_context().obj.result = plan
    if html is not None:
        from .plan_page import page

        source = plan.document["source"]
        require_savable(html, "page", source["path"], source["files"])
        save_document(html, "page", page(plan))
    if output == "-":
        click.echo(plan.to_json(), nl=False)
    else:
        if output:
            require_savable(
                output, "plan", plan.document["source"]["path"], plan.document["source"]["files"]
            )
            save_document(output, "plan", plan.to_json())
        if key is None:
            render.emit(plan.document, form, render.plan)
        else:
            from . import key_view

            render.emit(plan.key(key).to_json(), form, key_view.key)
        if output and form == "text":
            name = render.word(output)
            click.echo(f"saved {name}; to run exactly this:  migrate apply {name} -o NEW", err=True)
    return (
        1
        if check
        and (plan.document["path"] or output_format is not None or chunks is not None or rewrite)
        else 0
    )


def _save_problems(html: str, checkpoint: str, at: str | None, error: MigrateError) -> None:
    """A page of what stands against a plan, beside the keys of the checkpoint, if that opens. A
    page that cannot be written is said beside what stands against the plan.
    """
    from contextlib import closing

    from .. import formats
    from ..source.urls import shown_url
    from .plan_page import page_of_problems

    try:
        source = formats.open(checkpoint, at=at)
    except MigrateError:
        return
    with closing(source):
        text = page_of_problems(shown_url(checkpoint), source, error.diagnostics)
    try:
        require_savable(html, "page", checkpoint)
        save_document(html, "page", text)
    except MigrateError as unsaved:
        raise type(error)((*error.diagnostics, *unsaved.diagnostics)) from unsaved


COMMAND = command
