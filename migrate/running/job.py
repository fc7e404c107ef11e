"""A whole run into files: an opened checkpoint planned, written and published, and its report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import Diagnostic, MigrateError, fail, option, plural, printable
from ..core.types import PathLike, Ranks, RunPart
from ..planning.path import remarks
from ..planning.request import Request, path_text
from ..planning.savedplan import (
    TWICE,
    checked_plan,
    request_of,
    require_source,
    require_unchanged,
)
from ..results import ApplyReport, PartReport, PlanReport
from ..source.places import output_in_store, output_on_hub, require_local, same_location
from ..source.urls import is_url
from .output_shapes import is_folder, output_format_of, shape_of
from .prepare import plan_for, what_is_read
from .publish import check_place, partial_folder
from .resources import RunOptions, RunResult
from .tiles import TargetRun, write_target

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..source.index import Source
    from ..source.stores.s3_uploads import S3Output
    from ..source.stores.system_output import SystemOutput
    from ..source.target import OutputFile
    from .parts import Begun, LeftBehind, PartResult
    from .ray_run import Cluster


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
    part: RunPart | None = None,
    publishes: Begun | None = None,
    cluster: Cluster | None = None,
) -> ApplyReport | PartReport | PlanReport:
    """Migrates what `opened` answers with into `out`, and closes it. The answer says what was
    published.

    A checkpoint on disk that is where it shall go already is left alone: the answer's `path` is
    then None. `saved` is the plan that must come out again (M903), and from the same files, unless
    they may have `changed` or are a copy of those elsewhere. With `dry_run` the answer is the
    plan's document, and nothing is written; without `out`, that of an output which is shaped like
    the source. `ranks`: this process is one of several that write it. `planned` is the plan for
    this source and output, if there is one. `undo` is the folder for what the way back does not
    bring back, which a way back reads. `part`: the files of one part are written, and nothing
    appears; `publishes`: what parts wrote appears, and nothing is written; `cluster`: its workers
    write.
    """
    if out is None and not dry_run:
        fail("M115", "no output is given", help="out=PATH")
    kept_at = None if undo is None else path_text("undo", undo)
    where = None if out is None else path_text("out", out)
    if kept_at is not None:
        require_local(kept_at)
    # hardly any path has a colon in front of a slash
    hub = output_on_hub(where) if where is not None and ":/" in where else None
    if hub is not None:
        from .hub_run import write_to_hub

        if part is not None or cluster is not None or (ranks is not None and ranks.world > 1):
            fail(
                "M115",
                f"{printable(hub.shown, 240)}: is committed to by one process, when all of the "
                "output is on this machine",
                help="write to a folder, and commit that when it is there: "
                f"`hf upload {printable(hub.repo)} DIR`",
            )
        return write_to_hub(
            hub,
            lambda place: write_checkpoint(
                opened,
                place,
                request,
                options,
                saved=saved,
                dry_run=dry_run,
                changed=changed,
                undo=undo,
                planned=planned,
            ),
        )
    stored = output_in_store(where) if where is not None and ":/" in where else None
    if stored is not None and stored.kind == "system":
        from .stream_run import require_alone

        several = ranks is not None and ranks.world > 1
        apart = part is not None or publishes is not None or cluster is not None
        require_alone(stored, options, apart or several)
    place = None if where is None else Path(where if stored is None else stored.name)
    shared = part is not None or cluster is not None
    together = stored is not None and ranks is not None and ranks.world > 1
    if together and kept_at is not None:
        fail(
            "M115",
            f"{option('undo')} is not for several processes that write into a bucket",
            help=f"run it in one process, with {option('ranks', 'off')}",
        )
    if shared:
        _require_parts(part, cluster, ranks, kept_at)
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

                goes_on = options.resume or shared or publishes is not None
                check_store_place(stored, source.path, goes_on)
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
            document = made.document
            if part is not None:
                twice = _twice(made, _dealt(made, part.of, stored))
                document = {**document, "notes": [*document["notes"], *twice]}
            if stored is None:
                return PlanReport.from_json(document)
            if stored.kind == "s3":
                from .store_run import describe_upload

                found = describe_upload(made, source, stored, options)
            else:
                from .stream_run import describe_stream

                found = describe_stream(made)
            return PlanReport.from_json({**document, "store": found})
        same_grid = made.grid is None or (made.grid.again and source.index.grid is not None)
        stays = not made.document["path"] and same_grid
        if stays and source.format != "memory" and not request.reshapes:
            return _published(made, source, None, copy_of, RunResult({}, 0, 0))
        write: Callable[..., Any] = write_target
        more, kind = dict[str, Any](), dict[str, Any]()
        if stored is not None:
            more["kind"] = _run_into(stored)
            if shared or publishes is not None:
                from .store_parts import StorePartRun

                kind["kind"] = StorePartRun
        if together and ranks is not None:
            from .parts import Begun
            from .store_ranks import write_to_bucket_by_ranks

            begun = Begun(ranks.world, made.document, copy_of)
            write, more = write_to_bucket_by_ranks, {"ranks": ranks, "begun": begun}
        elif ranks is not None and ranks.world > 1:
            from .rank_run import write_by_ranks

            write, more = write_by_ranks, {"ranks": ranks}
        elif part is not None:
            from .parts import Begun, write_part

            write, more = (
                write_part,
                {"begun": Begun(part.of, made.document, copy_of), "part": part},
            )
        elif publishes is not None:
            from .parts import publish_parts

            write, more = publish_parts, {"of": publishes.of}
            copy_of = publishes.copy_of
        elif cluster is not None:
            from .parts import Begun
            from .ray_run import write_on_ray

            begun = Begun(len(made.target.files), made.document, copy_of)
            order = {"opened": opened, "request": request, "folder": folder}
            write, more = write_on_ray, {"cluster": cluster, "begun": begun, "order": order}
        hashes = None
        hashed = made.parts is not None or made.expected is not None
        if hashed and kept_at is not None and made.lost and (ranks is None or not ranks.rank):
            from .undo import UndoRun

            more["undo"] = UndoRun(made, source, kept_at, options)
            hashes = more["undo"].hashes
        tensors, side_files = what_is_read(made, source, kept)
        target = made.target
        if hashed:
            from .restored import parts_of_run

            target, more["parts"] = parts_of_run(made, tensors, hashes)
        goes = place if stored is None else stored
        named = {"digest": made.digest, "side_files": side_files, "checks": made.checks}
        result = write(
            made.written, tensors, target, goes, options=options, **named, **more, **kind
        )
        shown = os.fspath(place) if stored is None else stored.location
        if part is not None:
            return _part_done(made, shown, part, result)
        return _published(made, source, shown, copy_of, result, kept_at)
    finally:
        source.close()
        if kept is not None:
            kept.close()


def _run_into(stored: S3Output | SystemOutput) -> type[TargetRun]:
    if stored.kind == "s3":
        from .store_run import StoreRun

        return StoreRun
    from .stream_run import StreamRun

    return StreamRun


def publish_checkpoint(
    out: PathLike,
    opened: Callable[[str, Request], Source],
    options: RunOptions,
    source: str | None = None,
) -> ApplyReport:
    """Publishes what the parts of a run wrote for `out`; `opened` opens their source, which is
    `source` where what is recorded does not lead there.

    QuestionError M983 without parts, M984 where one is not done; what `write_checkpoint` raises
    of a saved plan, which is the one that the parts were begun with.
    """
    from .parts import LeftInFolder, begun_at, require_done

    text = path_text("out", out)
    stored, shown = output_in_store(text), text
    left: LeftBehind
    if stored is None:
        folder = partial_folder(Path(text))
        left = LeftInFolder(folder)
    elif stored.kind == "system":
        from .stream_run import require_alone

        require_alone(stored, options, shared=True)
    else:
        from .store_parts import LeftInBucket

        shown, left = stored.location, LeftInBucket(stored)
    begun = begun_at(left, shown)
    saved = checked_plan(begun.plan, left.shown)
    require_done(left, begun.of, saved["digest"])
    request, recorded = request_of(saved), saved["source"]["path"]

    def found() -> Source:
        try:
            return opened(source or recorded, request)
        except MigrateError as error:
            if source is not None or not is_url(recorded):
                raise
            raise type(error)([_recorded(d) for d in error.diagnostics]) from error

    report = write_checkpoint(
        found,
        out,
        request,
        replace(options, max_shard_size=saved["options"]["max_shard_size"]),
        saved=saved,
        publishes=begun,
    )
    if not isinstance(report, ApplyReport):
        raise TypeError(type(report).__name__)
    return report


def _recorded(found: Diagnostic) -> Diagnostic:
    """The diagnostic, of a URL as it is recorded."""
    way = f"if the parts were given a signed URL, give it again with {option('source')}: its query"
    way += " is not recorded"
    return replace(found, help=f"{found.help}; {way}" if found.help else way)


def _require_parts(
    part: RunPart | None, cluster: Cluster | None, ranks: Ranks | None, undo: str | None
) -> None:
    """M115 for a part that does not exist, or a run that cannot be divided."""
    if part is not None and not 0 <= part.number < part.of:
        last = f"0/{part.of} to {part.of - 1}/{part.of}" if part.of > 0 else "I/N, I from 0 on"
        fail("M115", f"there is no part {part}", help=f"parts are {last}")
    ways = [option("on", cluster.address)] if cluster is not None else []
    ways += [option("part", str(part))] if part is not None else []
    if len(ways) > 1:
        fail("M115", f"{' and '.join(ways)} contradict each other", help="leave one of them out")
    if ranks is not None and ranks.world > 1:
        fail(
            "M115",
            f"{ways[0]} in one of {ranks.world} processes of a launcher, which share the work "
            "already",
            help=f"leave it out, or {option('ranks', 'off')}",
        )
    if undo is not None:
        fail(
            "M115",
            f"{option('undo')} is not for {'parts of a run' if part is not None else 'a cluster'}",
            help="run it in one process, or in several of one launcher",
        )


def _part_done(made: Plan, path: str, part: RunPart, result: PartResult) -> PartReport:
    """The answer of one part."""
    notes = [
        f"of {printable(name)} this part has written bytes {start:,} to {stop:,}"
        for name, (start, stop) in result.pieces.items()
    ]
    if not result.files:
        notes.append(
            "the part had nothing to write: the plan makes "
            f"{plural(len(made.target.files), 'file')}; a smaller maximum size of a file gives more"
        )
    notes += _twice(made, result.dealt)
    return PartReport.of(
        path=path,
        partial=result.partial,
        part=part.number,
        parts=part.of,
        digest=made.digest,
        files=result.files,
        bytes_written=result.bytes_written,
        already=result.already,
        missing=list(result.missing),
        notes=notes,
    )


def _dealt(made: Plan, of: int, stored: S3Output | SystemOutput | None) -> list[list[OutputFile]]:
    """What each of `of` parts would write."""
    from .pieces import deal_files

    whole = stored is not None and stored.kind == "s3" and stored.equal_parts() is not None
    return deal_files(made.target, made.written, of, whole=whole, uploaded=stored is not None)


def _twice(made: Plan, dealt: Sequence[Sequence[OutputFile]]) -> list[str]:
    """The note of values that several parts compute, if there are any."""
    from .parts import computed_twice

    if not (twice := computed_twice(made.written, dealt)):
        return []
    return [f"{plural(twice, 'value')} {'is' if twice == 1 else 'are'} {TWICE}"]


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
