"""Two checkpoints held against each other: the answers of `verify` and `diff`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.errors import fail, option, printable
from ..core.types import Progress
from ..extra_state.states import States
from ..planning.graph import ReadKey
from ..planning.optimizers import DROP
from ..planning.path import find_path
from ..planning.request import OPTIMIZER_PARAM, OUTPUT_FORMATS
from ..planning.sides import SideFiles
from ..results import DiffReport, VerifyEstimate, VerifyReport
from . import spotcheck
from . import stamp as stamps
from .checksums import check_all_records
from .diff import diff as compare
from .differences import (
    TENSORS_ONLY,
    Unlooked,
    form_differences,
    item_differences,
    made_form_differences,
    not_compared,
    side_differences,
    spec_differences,
    unread_differences,
    unread_outcome,
)
from .output_tree import with_all_tensors
from .prepare import compose_for, path_state_for, side_reader, stamp_of, without_optimizers
from .verify import Recomputation, estimate_seconds

if TYPE_CHECKING:
    from ..planning.request import Request
    from ..source.index import Source


def verify_output(
    opened: Source,
    made: Source,
    request: Request,
    *,
    budget: int | None,
    share: float | None,
    seed: int | None,
    threads: int,
    progress: Progress | None,
    inform: Callable[[VerifyEstimate], None] | None,
) -> VerifyReport:
    """Whether `made` is what `opened` gives when it is computed again.

    What was applied is read from the stamp of `made`, unless the request says it. `share` and
    `seed` choose a sample.
    """
    request = replace(request, allow=request.allow | {"lossy", "drop", "delayed-scaling"})
    index_hash = made.index.hash()
    stamp, notes = stamps.read_stamp(made.history, index_hash)
    applied = _applied_after(opened, stamp)
    if (
        not (applied or request.to or request.files)
        and made.history is not None
        and index_hash == opened.index.hash()
    ):
        # the same tensors in another format
        request = replace(request, output_format=OUTPUT_FORMATS[0])
    if not (request.to or request.files or applied or request.output_format):
        missing = (
            f"no stamp in {printable(made.path)} says that it was made from "
            f"{printable(opened.path)}"
        )
        if made.history is None:
            missing = f"the output {printable(made.path)} has no stamp that says what was applied"
        fail(
            "M115",
            missing,
            notes=tuple(notes),
            help=f"give {option('to', 'LINEAGE@LAYOUT')} or {option('rules', 'FILE')}",
        )
    if any(entry.get("optimizer") == "dropped" for entry in applied):
        request = replace(request, params={**request.params, OPTIMIZER_PARAM: DROP})
    before, (opened, _) = stamp_of(opened)[0], without_optimizers(opened, request)
    migration_path = find_path(
        opened.index, side_reader(opened), before, request, applied, States(opened)
    )
    notes += [
        *migration_path.remarks,
        *(d.message for d in migration_path.warnings if d.code == "M518"),
    ]
    path_state = path_state_for(opened, migration_path, os.path.isdir(made.path))
    composition = compose_for(
        opened, migration_path, request, path_state, programs=True, prove=False
    )
    differences = spec_differences(composition, made)
    wrong = {d["key"] for d in differences}
    programs = {key: program for key, program in composition.programs.items() if key not in wrong}
    if made.index.tree is not None:
        programs.update((key, ReadKey(key)) for key in opened.index.passed_through)
    both = with_all_tensors(opened), with_all_tensors(made)
    chosen = None if share is None else spotcheck.choose_sample(programs, *both, share, seed)
    work = Recomputation(programs, *both, budget, chosen)
    if inform is not None:
        inform(VerifyEstimate.of(**work.announced(threads, estimate_seconds(work, threads))))
    if chosen is None:
        for one in (opened, made):
            check_all_records(one)
    near: list[dict[str, str]] = []
    for found in work.run(threads, progress):
        first = "" if found.index is None else f", first at {list(found.index)}"
        (near if found.what == "near" else differences).append(
            {"key": found.key, "what": f"{found.detail}{first}"}
        )
    unread, unlooked = unread_outcome(opened, made, "opaque" in request.allow)
    if chosen is not None:
        unlooked += spotcheck.left_out_of(
            chosen, programs, both[1], any(one.index.sums() for one in both)
        )
    differences += side_differences(opened, made, path_state.sides) + unread
    differences += item_differences(
        opened, made, bool(migration_path.steps)
    ) + made_form_differences(opened, composition, made)
    opened.check_unchanged()
    return VerifyReport.of(
        path=made.path,
        source=opened.path,
        equal=not differences,
        tensors=len(composition.graph.outputs),
        bytes=made.index.nbytes,
        memory=work.memory(threads),
        sample=None if chosen is None else chosen.to_json(both[1]),
        differences=differences,
        near=near,
        not_compared=[one.to_json() for one in unlooked],
        notes=notes,
    )


def compare_checkpoints(
    one: Source, other: Source, progress: Progress | None, *, tensors_only: bool
) -> DiffReport:
    """Where the two differ, and what was not looked at."""
    found = compare(with_all_tensors(one), with_all_tensors(other), progress=progress)
    side: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    notes: list[str] = []
    if tensors_only:
        unlooked = [Unlooked(what, "only tensors were asked for") for what in TENSORS_ONLY]
    else:
        unread, notes = unread_differences(one, other)
        side = side_differences(one, other, SideFiles(side_reader(one)))
        others = [*item_differences(one, other), *form_differences(one, other), *unread]
        unlooked = not_compared(one, other)
    return DiffReport.of(
        a=one.path,
        b=other.path,
        equal=found.equal and not (side or others),
        tensors_equal=found.equal,
        tensors=len(one.index.tensors),
        bytes=one.index.nbytes,
        only_a=list(found.only_a),
        only_b=list(found.only_b),
        specs=[{"key": k, "a": str(x), "b": str(y)} for k, x, y in found.specs],
        bytes_differ=[
            {
                "key": d.key,
                "index": list(d.index),
                "count": d.count,
                "max_abs_error": _number(d.max_abs_error),
                "sqnr_db": _number(d.sqnr_db),
            }
            for d in found.bytes
        ],
        side_files=[d["what"] for d in side],
        others=[d["what"] for d in others],
        not_compared=[one.to_json() for one in unlooked],
        notes=notes,
    )


def _number(value: float | None) -> float | None:
    """A float that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def _applied_after(source: Source, stamp: stamps.Stamp) -> Sequence[Mapping[str, Any]]:
    """The edges that the stamp of an output has beyond its source's: those that made the one of the
    other.
    """
    index_hash = source.index.hash()
    for position, entry in enumerate(stamp.applied):
        if entry["source"] == index_hash:
            return stamp.applied[position:]
    return ()
