"""`migrate apply`, and what it shares with `migrate downgrade`: the same engine, the other way."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import click

from ..running.resources import COPYING, NAMES
from ..source.urls import is_url, shown_url
from . import render
from .launcher import ending_with_the_others, part, part_of, part_text, ranks, ranks_of, threads_of
from .options import (
    as_json,
    output_format,
    params,
    question,
    quiet,
    require_savable,
    save_document,
    side,
)
from .terminal import Progress, safe, say


def running(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run."""
    for option in reversed(
        (
            click.option(
                "-o",
                "--output",
                "output",
                metavar="OUT",
                help="The new checkpoint; must not exist.  [required]",
            ),
            click.option(
                "--dry-run",
                "dry_run",
                is_flag=True,
                help="Show the plan, as `migrate plan` does, and write nothing.",
            ),
            click.option(
                "--max-shard-size",
                default=None,
                metavar="SIZE",
                help="Maximum size of an output file, e.g. 500MB.  [default: 5GB]",
            ),
            click.option(
                "--threads",
                type=click.IntRange(1, 64),
                help="Output files to write at the same time; as many processes compute values.  "
                "[default: 2; with --on 1; with several ranks the machine's cores divided by its "
                "ranks]",
            ),
            ranks,
            part,
            click.option(
                "--on",
                "on",
                metavar="ray[://ADDRESS]",
                help="Have the workers of a Ray cluster write the files: of the one at ADDRESS, or "
                "of RAY_ADDRESS, or of this machine's cores.",
            ),
            click.option(
                "--max-memory",
                default="1GB",
                show_default=True,
                metavar="SIZE",
                help="Memory for tensors that are computed or transposed.",
            ),
            click.option(
                "--device",
                type=click.Choice(NAMES),
                default="cpu",
                show_default=True,
                help="Device that computes values; cuda:all includes ops whose bits differ there.",
            ),
            click.option(
                "--report",
                metavar="FILE",
                help="Save the measured error of every computed tensor.",
            ),
            click.option(
                "--undo",
                metavar="DIR",
                help="Folder for the tensors that a downgrade does not restore bit for bit: apply "
                "writes it, downgrade reads it.",
            ),
            click.option(
                "--copy",
                "copy",
                type=click.Choice(COPYING),
                default="auto",
                show_default=True,
                help="From bucket to bucket: whether the store copies what only moves.",
            ),
            click.option(
                "--read-back",
                "read_back",
                is_flag=True,
                help="Read what the store has copied, and compare.",
            ),
            click.option("--resume", is_flag=True, help="Continue a killed or failed run."),
            click.option(
                "--if-needed",
                is_flag=True,
                help="Exit with 0, not 1, if the checkpoint is already in the wanted layout.",
            ),
            click.option(
                "--no-fsync",
                is_flag=True,
                help="Do not wait for the disk; a power cut may then lose the output.",
            ),
        )
    ):
        command = option(command)
    return command


def execute(
    call: Callable[..., Any],
    checkpoint: str,
    *,
    assignments: tuple[str, ...],
    form: str,
    silent: bool,
    output: str | None,
    no_fsync: bool,
    report: str | None,
    dry_run: bool,
    if_needed: bool,
    launched: str,
    threads: int | None,
    part: str | None,
    **arguments: Any,
) -> int:
    """Runs `call` with a progress display, prints what it published, and saves the `report` if one
    is asked for.

    With `dry_run` it prints the plan, which is all that the call then answers with; without an
    `output` that of one like the source. The exit status is 1 where there was nothing to do and so
    no output, unless `if_needed`. Of several processes the first alone answers.
    """
    here, one = ranks_of(launched), part_of(part)
    first = here is None or not here.rank
    alone = threads is None and arguments["on"] is not None
    arguments |= {"threads": 1 if alone else threads_of(threads, here), "ranks": here, "part": one}
    if dry_run:
        plan = call(checkpoint, output, params=params(assignments), dry_run=True, **arguments)
        if first:
            render.emit(plan.to_json(), form, render.plan)
        return 0
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.", click.get_current_context())
    # each thread has a box of its own: more threads inside an op would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if report is not None and one is not None:
        raise click.UsageError("--report: `migrate publish` saves it, when all parts are done")
    if report is not None and first:
        require_savable(report, "report", checkpoint)
    stood = is_url(output) or os.path.lexists(output)
    try:
        with (
            ending_with_the_others(here),
            # Ray prints there that a worker has died, and no setting prevents it
            redirect_stdout(sys.stdout if arguments["on"] is None else sys.stderr),
            Progress("writing", silent or not first) as progress,
        ):
            document = call(
                checkpoint,
                output,
                params=params(assignments),
                fsync=not no_fsync,
                progress=progress.update if first else None,
                **arguments,
            ).to_json()
    except KeyboardInterrupt:
        raise click.Abort(_interrupted(output, stood, "--resume" if one is None else "")) from None
    if document["kind"] == "part":
        render.emit(document, form, part_text)
        return 0
    return answer(document, form, silent or not first, report, if_needed, first)


def answer(
    document: Mapping[str, Any],
    form: str,
    silent: bool,
    report: str | None,
    if_needed: bool = False,
    first: bool = True,
) -> int:
    """Prints what was published, and saves the `report`; the exit status."""
    click.get_current_context().obj.published = document["path"]
    if first:
        if report is not None:
            save_document(report, "report", json.dumps(_report(document), indent=1) + "\n")
        render.emit(document, form, render.published)
    if document["path"] is None:
        return 0 if if_needed else 1
    # what was taken back is not what the rules would make again
    if form == "text" and not silent and not _took_back(document):
        source = render.word(render.place(document["source"]))
        say(
            f"next:  migrate verify {render.word(document['path'])} --source "
            f"{source}{_again(document['question'])}",
            err=True,
        )
    return 0


def _took_back(document: Mapping[str, Any]) -> bool:
    return "undo" in document and bool(document["question"]["backwards"])


def _again(question: Mapping[str, Any]) -> str:
    """The options that `verify` has to be given too: the stamp does not hold them."""
    said = "".join(f" --rules {render.word(render.place(r))}" for r in question["rules"])
    said += f" --at {render.word(at)}" if (at := question["at"]) is not None else ""
    said += f" --side {render.word(render.place(s))}" if (s := question.get("side")) else ""
    said += " --set optimizer=drop" if "optimizer" in question["params"] else ""
    said += f" --set parts={parts}" if (parts := question["params"].get("parts")) else ""
    return said + "".join(
        f" --allow {word}" for word in ("links", "opaque", "carry") if word in question["allow"]
    )


def _report(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document that --report saves: the errors of all tensors, and of which run."""
    head = {"format_version": document["format_version"], "kind": "report"}
    found = document["report"] or {"complete": True, "rules": [], "tensors": []}
    return {
        **head,
        "digest": document["digest"],
        "path": document["path"],
        "source": document["source"],
        **found,
    }


def _interrupted(output: str, stood: bool, again: str) -> str:
    """What is left of an interrupted run, which goes on with the option `again`; `stood`: there was
    something at `output` before it.
    """
    if output.startswith("hf://"):
        return "interrupted; nothing was committed: run the same command with --resume to go on"
    if is_url(output):
        where = safe(shown_url(output))
        return (
            f"interrupted; run the same command {f'with {again} ' if again else ''}to go on, or "
            f"throw away what was uploaded to {where} with `migrate clean {where}`"
        )
    if not stood and os.path.lexists(output):
        # an output appears by one rename, so it is whole
        return f"interrupted after {safe(output)} was published; it is complete"
    partial = os.path.normpath(output) + ".migrate-partial"
    if not os.path.isdir(partial):
        return "interrupted; nothing was published"
    return (
        "interrupted; nothing was published, and what was written so far is kept in "
        f"{safe(partial)}\nrun the same command {f'with {again} ' if again else ''}to go on, or "
        "remove that folder"
    )


@click.command()
@click.argument("checkpoint")
@click.option(
    "--source",
    "source",
    metavar="COPY",
    help="Run a saved plan on a copy of the checkpoint that it was made for.",
)
@question
@output_format
@side
@running
@quiet
@as_json
def command(checkpoint: str, **arguments: Any) -> int:
    """Migrate a checkpoint into a new one.

    CHECKPOINT may also be a saved plan (`migrate plan -o plan.json`), which is run exactly as it
    was reviewed, on files that have not changed since, unless --allow changed-source. OUT is a
    folder, or one file if it ends in .safetensors, .pt, .pth, .bin or .ckpt, or an s3:// URL. The
    source is never written; OUT is complete or absent. If the checkpoint is already in the wanted
    layout, no OUT is made and the exit status is 1, or 0 with --if-needed.
    """
    from .. import api

    return execute(api.apply, checkpoint, **arguments)


COMMAND = command
