"""A whole run into files: an opened checkpoint planned, written and published, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import fail, option, plural, printable
from ..core.types import PathLike, Ranks
from ..planning.path import remarks
from ..planning.request import Request, output_format_of, path_text, shape_of
from ..planning.savedplan import require_source, require_unchanged
from ..results import ApplyReport, PlanReport
from ..source.index import with_all_tensors, with_files
from ..source.places import output_in_store, require_local, same_location
from .prepare import is_folder, plan_for
from .publish import check_place
from .resources import RunOptions, RunResult
from .tiles import write_target

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..source.index import Source


def write_checkpoint(
    opened: Callable[[], Source],
    out: PathLike | None,
    request: Request,
    options: RunOptions,
    *,
    saved: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    changed: bool = False,
    ranks: Ranks | None = None,
    undo: PathLike | None = None,
    planned: Plan | None = None,
) -> ApplyReport | PlanReport:
    """Migrates what `opened` answers with into `out`, and closes it. The answer says what was
    published.

    A checkpoint on disk that is where it shall go already is left alone: the answer's `path` is
    then None. `saved` is the plan that must come out again (M903), and from the same files, unless
    they may have `changed` or are a copy of those elsewhere. With `dry_run` the answer is the
    plan's document, and nothing is written; without `out`, that of an output which is shaped like
    the source. `ranks`: this process is one of several that write it. `planned` is the plan for
    this source and output, if there is one. `undo` is the folder for what the way back does not
    bring back, which a way back reads.
    """
    if out is None and not dry_run:
        fail("M115", "no output is given", help="out=PATH")
    kept_at = None if undo is None else path_text("undo", undo)
    where = None if out is None else path_text("out", out)
    if kept_at is not None:
        require_local(kept_at)
    # hardly any path has a colon in front of a slash
    stored = output_in_store(where) if where is not None and ":/" in where else None
    place = None if where is None else Path(where if stored is None else stored.name)
    if stored is not None and ranks is not None and ranks.world > 1:
        fail("M115", "several processes write to a folder of one file system, not into a bucket")
    if request.undo != (kept_at is not None):
        fail(
            "M115",
            "the plan was made to keep what the way back does not bring back, or it was not",
            help=option("undo", "DIR") if request.undo else f"plan with {option('undo', True)}",
        )
    source, kept = opened(), None
    try:
        if place is None:
            folder = (
                is_folder(source, None, output_format_of(source.format, request))
                if saved is None
                else saved["options"]["folder"]
            )
        else:
            if stored is None:
                check_place(place, source.path)
            else:
                from .store_run import check_store_place

                check_store_place(stored, source.path, options.resume)
            if kept_at is not None and not request.takes_back:
                from .undo import check_undo_place

                beside_undo = place if stored is None else None
                check_undo_place(kept_at, beside_undo, source.path, options.resume)
            folder, request = shape_of(place.name, source.format, request)
            if stored is not None:
                stored.single = not folder
            if saved is not None:
                # of a folder of which nothing is said its layout decides
                said = request.output_format
                _check_shape(
                    saved,
                    place,
                    folder,
                    said if folder else output_format_of(source.format, request),
                )
        if kept_at is not None and request.takes_back:
            from .undo import open_undo

            kept = open_undo(kept_at)
        made, copy_of = planned, None
        if made is None:
            made = plan_for(source, request, folder, options.max_shard_size, kept)
        if saved is not None:
            require_unchanged(saved, made.document)
            made, copy_of = _taken(made, saved, changed)
        if place is None or dry_run:
            if stored is None:
                return PlanReport.from_json(made.document)
            from .store_run import describe_upload

            found = describe_upload(made, source, stored, options)
            return PlanReport.from_json({**made.document, "store": found})
        stays = not made.document["path"] and (made.grid is None or made.grid.again)
        if stays and source.format != "memory" and not request.reshapes:
            return _published(made, source, None, copy_of, RunResult({}, 0, 0))
        beside = made.target.beside
        side_files = [
            (f["path"], made.sides.read_file(f["path"].removeprefix(beside)) or b"")
            for f in made.document["side_files"]
        ]
        tensors = source if kept is None else kept.beside(source)
        if made.target.whole:
            tensors = with_files(source, made.target.whole)
        elif source.index.passed_through:
            tensors = with_all_tensors(tensors)
        write: Callable[..., RunResult] = write_target
        if stored is not None:
            from .store_run import write_to_store

            write = write_to_store
        if ranks is not None and ranks.world > 1:
            from .rank_run import write_by_ranks

            write = partial(write_by_ranks, ranks=ranks)
        target, more = made.target, dict[str, Any]()
        if made.parts is not None or made.expected is not None:
            from .restored import parts_of_run

            hashes = None
            if kept_at is not None and made.lost and (ranks is None or not ranks.rank):
                from .undo import UndoRun

                more["undo"] = UndoRun(made, source, kept_at, options)
                hashes = more["undo"].hashes
            target, more["parts"] = parts_of_run(made, tensors, hashes)
        result = write(
            made.written,
            tensors,
            target,
            place if stored is None else stored,
            digest=made.digest,
            side_files=side_files,
            checks=made.checks,
            options=options,
            **more,
        )
        shown = os.fspath(place) if stored is None else stored.location
        return _published(made, source, shown, copy_of, result, kept_at)
    finally:
        source.close()
        if kept is not None:
            kept.close()


def _check_shape(saved: Mapping[str, Any], out: Path, folder: bool, written: str | None) -> None:
    """M115 where the name of the output says another shape or format than the saved plan."""
    if saved["options"]["folder"] != folder:
        made_as, other = ("a folder", True) if not folder else ("one file", False)
        what = f"the plan makes {made_as}, and {printable(str(out))} does not name one"
        fail("M115", what, help=f"rename it, or plan with {option('single_file', other)}")
    if written is not None and saved["options"].get("format", "safetensors") != written:
        fail(
            "M115",
            f"the plan makes {saved['options']['format']}, and {printable(str(out))} is the name "
            "of the other",
            help="rename it",
        )


def _taken(made: Plan, saved: Mapping[str, Any], changed: bool) -> tuple[Plan, str | None]:
    """The plan, notes on its source, its original's place if this is a copy; M903 if refused."""
    place, now = saved["source"]["path"], made.document["source"]["path"]
    copied = not same_location(place, now)
    notes = require_source(saved, made.document, copied=copied, changed=changed)
    if copied:
        notes = [
            (
                f"read from {printable(now)}, a copy of {printable(place)}, which the plan was "
                "made for"
            ),
            *notes,
        ]
    return replace(
        made, document={**made.document, "notes": [*made.document["notes"], *notes]}
    ), place if copied else None


def _published(
    made: Plan,
    source: Source,
    path: str | None,
    copy_of: str | None,
    result: RunResult,
    undo: str | None = None,
) -> ApplyReport:
    """The answer of a run; without a `path` there was nothing to do."""
    planned = made.document
    return ApplyReport.of(
        path=path,
        source=source.path,
        copy_of=copy_of,
        digest=made.digest,
        steps=planned["path"],
        question=planned["question"],
        tensors=len(made.composition.graph.outputs),
        files=result.files,
        bytes_read=result.bytes_read,
        bytes_written=result.bytes_written,
        bytes_shared=result.bytes_shared,
        layouts=planned["layouts"],
        losses=planned["losses"],
        optimizer=planned["optimizer"],
        downgrade=planned["downgrade"],
        # a rule file was named; a folder may have been found
        notes=[
            *planned["notes"],
            *remarks(origin for origin in planned["origins"] if origin["origin"] != "file"),
            *(
                [
                    (
                        f"{plural(result.idle, 'rank')} had nothing to write: the plan makes "
                        f"{plural(len(result.files), 'file')}; a smaller maximum size of a file "
                        "gives more"
                    )
                ]
                if result.idle
                else []
            ),
            *(
                [
                    (
                        f"{printable(result.left, 300)} could not be removed and is no longer "
                        "needed: remove it"
                    )
                ]
                if result.left
                else []
            ),
        ],
        warnings=planned["warnings"],
        report=result.report,
        **({} if result.restored is None else {"restored": result.restored}),
        **({} if result.stored is None else {"store": result.stored}),
        **({"undo": {**planned["undo"], "path": undo}} if "undo" in planned else {}),
    )
