"""A request put to an opened checkpoint: path, graph, target and plan, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from .. import formats, ops
from ..core import log
from ..core.errors import MigrateError, Report, command, fail, listed, option, plural, printable
from ..core.spec import Spec
from ..core.templates import list_collapsed
from ..core.types import __version__
from ..extra_state.states import States, lift_states
from ..ops.base import ValueOp
from ..planning import optimizer_states, optimizers, restoring, state_keys
from ..planning.bind import BindContext
from ..planning.compose import Composition, compose
from ..planning.copies import stale_copies
from ..planning.graph import ComputedTensor, Tensor
from ..planning.numbered_states import GIVEN, REMEMBERED, GivenNames, read_names
from ..planning.path import MigrationPath, find_path
from ..planning.pathstate import PathState
from ..planning.pipeline import Views
from ..planning.plan import Plan, document
from ..planning.request import (
    DESCRIBED,
    DISTRIBUTED,
    OBJECT_FORM,
    OPTIMIZER_NAMES,
    OPTIMIZER_PARAM,
    OUTPUT_FORMATS,
    STALE_OPTIMIZER,
    WHOLE_TENSORS,
    Request,
    with_permissions,
)
from ..planning.sides import SideFiles, clash, refuse_clash
from ..planning.stored import find_renamed, initial, torn_in
from ..planning.unchanged import undone_source
from ..rules.files import VALUES
from ..source import places
from ..source.blobs import Stored
from ..source.index import Source, specs_hash, with_all_tensors, with_files
from ..source.jsontext import collector_paused
from ..source.paths import METADATA
from ..source.pickle.tree import PARAMETER
from ..source.shards import RANK_NAMES, check_names, naming
from ..source.torn_tensors import REQUANTIZE, refuse_torn
from . import stamp as stamps
from .gathered_ranks import UNCUT
from .geometry import ByteLayouts
from .kept import kept_parts
from .output_shapes import has_place, is_folder, output_format_of
from .output_tree import (
    OutputTree,
    in_form,
    items_of_index,
    output_tree,
    writable_items,
)
from .part_hashes import NO_HASH, expected_parts, parts_of, size_of_file, with_hash
from .share import LEAST, origins_of, shared_extents
from .ties import describe_ties, find_ties

if TYPE_CHECKING:
    from ..planning.optimizer_states import OptimizerState
    from ..planning.state_keys import StateKeys
    from ..source.blobs import Identity
    from ..source.target import Target
    from .undo import UndoFolder


S = TypeVar("S", bound=Source)


class Describes(Protocol):
    """What says how an output will lie: a format, or what stands for one."""

    def describe(self, specs: Mapping[str, Spec], **asked: Any) -> Target:
        """As `formats.Format.describe`."""


def stamp_of(source: Source) -> tuple[stamps.Stamp, list[str]]:
    return stamps.read_stamp(source.history, source.index.hash())


def side_reader(source: Source) -> Callable[[str], bytes | None]:
    present = {f.path for f in source.index.side_files}
    return lambda name: source.side_file(name) if name in present else None


def path_state_for(source: Source, migration_path: MigrationPath, folder: bool) -> PathState:
    """The path before its first step; side files go along, between two folders or made anew."""
    carried = folder and (is_folder(source, None) or migration_path.makes_files)
    there = [f.path for f in source.index.side_files] if carried else ()
    return PathState(
        migration_path.given,
        SideFiles(side_reader(source), frozenset(source.index.left_out), there, source.index),
        carried=carried,
    )


@log.phase("composing the rules")
def compose_for(
    source: Source,
    migration_path: MigrationPath,
    request: Request,
    path_state: PathState,
    *,
    programs: bool = False,
    prove: bool = True,
    states: Sequence[OptimizerState] = (),
    names_before: Mapping[str, GivenNames] | None = None,
    keeps: bool = False,
) -> Composition:
    """The path over what the source holds. The state of optimizers `states` follows; of numbered
    parameters `names_before` are the names, None where the source's stamp says them. `keeps`: what
    is cut has a place in the output.
    """
    index = source.index
    around: AbstractContextManager[None] = nullcontext()
    if index.grid is not None:
        from ..planning.grids import naming_part, replica_checks, require_ranks

        require_ranks(index.grid, migration_path)
        around = naming_part(index.grid)
    beside = index.tree is not None or bool(index.items)
    if beside and (patterns := migration_path.decided_patterns()):
        lift_states(source, patterns, alike=migration_path.decides_alike())
    every = cache(partial(with_all_tensors, source))

    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        from .checks import tensors_equal

        return tensors_equal(present, made, source)

    stored = source.index.tensors
    # of the last tensor: thousands of modules share one state
    last: tuple[Any, Any, bytes] = (None, None, b"")

    def payload(tensor: Tensor) -> bytes:
        nonlocal last
        key = tensor.sources[0] if len(tensor.sources) == 1 else None
        at = stored.get(key) if type(key) is str else None
        if at is None or at is not last[0] or tensor.view is not last[1]:
            from .checks import read_content

            last = (at, tensor.view, read_content(tensor, every()))
        return last[2]

    report = Report()
    prove = prove and bool(migration_path.steps)
    with around:
        composition = compose(
            source.index.tensors,
            migration_path.steps,
            BindContext(
                same_bytes,
                # of what was kept nothing is lost
                request.allow | {"lossy", "drop"}
                if request.undo and request.backwards
                else request.allow,
                payload,
                part=payload,
                states=optimizer_states.state_keys,
                undo=request.undo and not request.backwards,
                partial=path_state.sides.partial,
            ),
            report,
            programs=programs,
            prove=prove,
            path_state=path_state,
            items=items_of_index(source.index) if beside else None,
            follow=_state_keys(states, source, request, names_before)
            if states and migration_path.steps
            else (),
            outside=index.passed_through if states else None,
            kept_parts=kept_parts(index) if keeps else None,
            lifted=source.index.lifted,
        )
        report.check()
    if index.grid is not None:
        composition.graph.checks += replica_checks(index.grid, composition)
    if index.torn:
        refuse_torn(torn_in(composition.graph.outputs, with_all_tensors(source).index.tensors))
        if REQUANTIZE in request.params:
            from .encoding_anew import require_lossy

            require_lossy(composition.graph.outputs, request)
    return composition


def require_known(source: Source, request: Request, *, empty: bool = False) -> list[str]:
    """M935 for what was not read, unless allowed, M939 if nothing is left and it may not be `empty`
    of tensors; notes otherwise.
    """
    index, report = source.index, Report()
    if index.outside and "opaque" not in request.allow:
        from ..source.pickle.policy import refusal

        report.diagnostics.append(refusal(index.outside, source.path))
    if not (index.tensors or index.passed_through or empty):
        report.add(
            "M939",
            f"{printable(source.path, 240)}: holds no tensor",
            help=f"`{command('inspect')}` shows what it holds",
        )
    report.check()
    if index.carried:
        names = listed([printable(one.name) for one in index.carried], 1000)
        return [*index.notes, f"carried without being read ({option('allow', 'carry')}): {names}"]
    return [*index.notes]


def without_optimizers(source: S, request: Request) -> tuple[S, optimizers.OptimizerVerdict | None]:
    """The source without optimizer state, where that is asked for, and what there is to say of it;
    as it is and None otherwise.

    M402 unless dropping is allowed.
    """
    if OPTIMIZER_PARAM not in request.params or not optimizers.dropped(request.params):
        return source, None
    states = optimizer_states.find_states(source.index)
    optimizers.require_drop(states, request.allow)
    return optimizers.without_states(source, states), optimizers.left_out(states)


def _state_keys(
    states: Sequence[OptimizerState],
    source: Source,
    request: Request,
    names_before: Mapping[str, GivenNames] | None,
) -> list[StateKeys]:
    """The tensors of the states that may follow: not of one that the last run worked on, which may
    have new names already. `names_before` are what a later stamp says of numbers.
    """
    at = stamps.dict_of(source.history)
    left = [state for state in states if at is None or ".".join(state.path) != at]
    given = request.params.get(OPTIMIZER_NAMES)
    if given is not None:
        said = GivenNames(read_names(given), GIVEN)
        return state_keys.read_all(left, source.index, lambda state: said)
    known = names_before if names_before is not None else _names_of_last(source)
    return state_keys.read_all(left, source.index, lambda state: known.get(state.place))


def _names_of_last(source: Source) -> Mapping[str, GivenNames]:
    """What the stamp says of the numbers of parameters, by the place of the optimizer."""
    applied = stamp_of(source)[0].applied if source.history is not None else ()
    found = applied[-1].get("optimizer_names", ()) if applied else ()
    return {
        one["place"]: GivenNames(one["after"], REMEMBERED, tuple(one["before"])) for one in found
    }


def find_optimizers(source: Source) -> list[OptimizerState]:
    """The states of optimizers that the source holds."""
    index = source.index
    # such state lies outside of what rules work on, or its keys say so
    if not (index.passed_through or index.items):
        text = "\n".join(("", *index.tensors))
        if "ptim" not in text and "\nstate." not in text:
            return []
    return optimizer_states.find_states(index)


def plan_for(
    source: Source,
    request: Request,
    folder: bool,
    max_shard_size: int,
    undo: UndoFolder | None = None,
    form: Describes | None = None,
    prove: bool = True,
) -> Plan:
    """The plan. Permissions that are missing are raised together. `undo` holds what the way that
    is planned does not bring back. `form` describes the output in the place of the format that the
    request names. Unless it is to `prove` the downgrade, the document does not say whether that is
    exact.
    """
    return with_permissions(
        request, lambda asked: _plan(source, asked, folder, max_shard_size, undo, form, prove)
    )


def what_is_read(
    made: Plan, source: Source, kept: UndoFolder | None = None
) -> tuple[Source, list[tuple[str, bytes]]]:
    """What a run of the plan reads tensors from, and the files that go beside them."""
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
    return tensors, side_files


# hardly anything that a plan of many tensors makes is a cycle, and all of it is kept
@collector_paused()
@log.phase("planning")
def _plan(
    source: Source,
    request: Request,
    folder: bool,
    max_shard_size: int,
    undo: UndoFolder | None,
    form: Describes | None,
    prove: bool,
) -> Plan:
    written = output_format_of(source.format, request)
    if request.chunks is not None and written != DISTRIBUTED:
        fail(
            "M115",
            f"{option('chunks', request.chunks)}: {written} has whole tensors",
            help=f"{option('output_format', DISTRIBUTED)} cuts them for ranks",
        )
    if request.rewrite and written != DISTRIBUTED:
        fail(
            "M115",
            f"{option('rewrite', True)}: {written} is always written anew",
            help="leave it out",
        )
    index_hash = source.index.hash()
    known_notes = require_known(source, request, empty=form is not None)
    if source.format != "memory" and any("@" in key for key in source.index.tensors):
        check_names(source.index, source.path)
    stamp, notes = stamps.NONE, list[str]()
    if source.history is not None:
        stamp, notes = stamps.read_stamp(source.history, index_hash)
    fresh: optimizers.OptimizerVerdict | None = None
    if OPTIMIZER_PARAM in request.params:
        source, fresh = without_optimizers(source, request)
    if REQUANTIZE in request.params:
        from .encoding_anew import encodes_anew

        source = encodes_anew(source, request)
    sides, has = side_reader(source), States(source)
    migration_path = find_path(source.index, sides, stamp, request, states=has)
    if request.output_format == WHOLE_TENSORS:
        from .cutting import joins_ranks

        if (asked := joins_ranks(request, migration_path, source)) is not request:
            migration_path = find_path(source.index, sides, stamp, asked, states=has)
        request = asked
    steps, read = migration_path.steps, source.index.grid
    apart = read is not None or bool(migration_path.goals) or migration_path.grid is not None
    if apart:
        from .cutting import format_for

        written = format_for(source, request, migration_path, folder)
    if read is not None:
        from ..planning.grids import judge_grid

        fresh, more = judge_grid(read, request, fresh, written=form is None)
        notes += more
    if undo is not None:
        steps = tuple(replace(step, undo=True) for step in steps)
        migration_path = replace(migration_path, steps=steps)
    path_state = path_state_for(source, migration_path, folder)
    states = find_optimizers(source)
    follow = () if STALE_OPTIMIZER in request.allow else states
    try:
        keeps = form is None and has_place(source.index, written, folder)
        composition = compose_for(
            source,
            migration_path,
            request,
            path_state,
            prove=prove,
            states=follow,
            keeps=keeps,
        )
    except MigrateError as error:
        from .configured import check_misfits
        from .number_formats import read_elements

        check_misfits(error, source.index, side_reader(source), partial(read_elements, source))
        raise
    if not request.reshapes and steps and steps[-1].start == steps[-1].goal:
        from ..planning.loops import refuse_idle

        both = composition.graph.outputs, source.index.tensors
        refuse_idle(migration_path.steps, migration_path.given, *both)
    reading, lost, extra = source, tuple[str, ...](), tuple[str, ...]()
    if request.undo:
        from .undo import find_lost, take_back

        if undo is not None:
            reading = take_back(composition, source, undo, stamp, path_state)
        else:
            lost, extra = find_lost(composition, source)
    for name, value in path_state.params.items():
        log.debug("param %s is %s", name, value)
    became = fresh or optimizers.OptimizerVerdict(None)
    if states:
        became = optimizers.judge_states(states, composition, source.index, request.allow)
    notes += became.notes
    index, outputs = source.index, composition.graph.outputs
    if index.tensors and not outputs:
        _refuse_empty(composition)
    specs = {key: t.spec for key, t in outputs.items()}
    report = Report()
    migration_path.check_output(composition.graph.outputs, path_state.sides.read_file, report)
    report.check()
    if path_state.changes or composition.losses:
        from .configured import check_configuration
        from .number_formats import read_elements

        elements, walked = partial(read_elements, source), composition.steps
        check_configuration(
            index, side_reader(source), walked, path_state, outputs, elements, report
        )
        report.check()
    known = zip(migration_path.entries, path_state.remembered, strict=True)
    entries = [
        {**entry, **memory, "tool": __version__, "source": index_hash} for entry, memory in known
    ]
    if states and (said := optimizers.said_names(composition)):
        entries = [{**entry, "optimizer_names": said} for entry in entries]
    was_cut = None if read is None else read.again()
    if was_cut is not None and entries:
        entries[0]["grid"] = was_cut.to_json()
    if became.became in optimizers.LASTING:
        entries = [{**entry, "optimizer": became.became} for entry in entries]
    called = source.index.files and source.index.files[0].startswith(RANK_NAMES)
    was = naming(source.index.files) if called and places.is_folder(source.path) else None
    if was is not None and entries:
        entries[0]["ranks"] = was.name(0, os.path.splitext(source.index.files[0])[1])
    grid, ranks, cut = UNCUT
    ranked = bool(steps and steps[-1].memory.get("ranks")) or any("@" in key for key in specs)
    if (apart and form is None) or (folder and ranked):
        from .cutting import cut_for

        wanted = request if form is None else None
        grid, ranks, cut = cut_for(
            source, wanted, migration_path, specs, written, folder, was, stamp, notes
        )
    # a rule file given by hand belongs to no lineage: the stamp's layouts may not hold any more
    before = stamps.Stamp({}, stamp.applied) if request.files else stamp
    output_hash = specs_hash(specs)
    computes = any(isinstance(s, ComputedTensor) for t in outputs.values() for s in t.sources)
    kept: restoring.PartsFile | None = None
    expected: restoring.Expected | None = None
    if computes or stamp.applied:
        applied = [*stamp.applied, *entries]
        kept = parts_of(source, composition, index_hash, output_hash, applied)
        undone = undone_source(stamp.applied, entries) if stamp.applied else None
        expected = expected_parts(source, composition, index_hash, {output_hash, undone}, stamp)
        if undo is None and undone not in (None, output_hash):
            notes.append(
                "tensors, dtypes or shapes are not those of the checkpoint before that migration: "
                f"what it dropped returns only with a folder that {option('undo', 'DIR')} kept"
            )
    if lost:
        earlier = () if kept is None else kept.runs
        runs = (*(run for run in earlier if run.hashes), restoring.HashedParts(index_hash, lost))
        kept = restoring.PartsFile(output_hash, runs)
    if undo is not None:
        required = tuple(sorted(undo.hashes))
        expected = restoring.Expected(required, undo.hashes, required=frozenset(required))
    alone_hash = kept is not None and not folder and kept.runs[-1].hashes is None

    stamp_text = partial(
        stamps.write_stamp,
        before,
        migration_path.layouts,
        output_hash=output_hash,
        at=request.at,
        carried=[one.name for one in index.carried],
        declared=request.declared,
        grid=(was_cut or stamp.grid) if grid is None and not entries else None,
    )
    unordered = was_cut is not None and not was_cut.order and (grid is None or bool(entries))
    text = stamp_text(with_hash(entries, kept, NO_HASH) if alone_hash else entries)
    alone: list[str] = []
    if index.items or index.passed_through:
        alone = _left_behind(source, written, folder, request)
    formed = OBJECT_FORM in request.params
    values = path_state.sides.values if VALUES in path_state.sides.changed else None
    if grid is not None or written == WHOLE_TENSORS:
        from .cutting import values_for

        values = values_for(source, values, written, grid is not None, cut)
    beside = bool(index.tree or formed or composition.parts or values)
    with_tree = beside or written != OUTPUT_FORMATS[0]
    out: OutputTree | None = None
    first: Mapping[str, str] | None = None
    if with_tree:
        out = output_tree(
            reading,
            composition,
            alone=bool(alone) and index.tree is not None,
            drop="drop" in request.allow,
            cut=cut,
            values=values,
        )
        if formed:
            out = in_form(out, request.params[OBJECT_FORM], request.params.get(PARAMETER))
        first = out.rest.first
    elif computes or any(
        isinstance(at, Stored) and at.storage is not None for at in index.tensors.values()
    ):
        first = find_ties(outputs, reading.index.tensors)
    if index.passed_through and not index.tensors:
        count = plural(len(index.passed_through), "tensor")
        nbytes = sum(at.spec.nbytes for at in index.passed_through.values())
        notes.append(
            f"rules see none of the tensors: {count} with {nbytes:,} bytes are carried as they are"
        )
    notes += [
        *known_notes,
        *(out.notes if out is not None else ()),
        *alone,
        *(describe_ties(index, first, written) if first is not None else ()),
    ]
    made = outputs if out is None else out.outputs
    if index.torn:
        refuse_torn(torn_in(made, with_all_tensors(reading).index.tensors))
    gone = [
        *(["what the permission `opaque` leaves out"] if source.index.outside else []),
        *(["what the permission `drop` leaves out"] if alone else []),
        *(out.lost if out is not None else ()),
        *(["the order of keys in the parts"] if unordered else []),
        *(["the state of the optimizer"] if became.became == "dropped" else []),
    ]
    if ranks is not None:
        notes.append("each rank has one file, of any size: the limit on shards does not apply")
    chunks: dict[str, Any] = {} if request.chunks is None else {"chunks": request.chunks}
    describing: Any = form or formats.get(written if grid is None else formats.PARTS)
    target = None
    if written == source.format == DISTRIBUTED and out is not None and not request.recuts:
        target = _renamed(reading, composition, out, text)
    # shorter files share nothing
    large = sum(t.spec.nbytes for t in made.values()) >= LEAST
    described = partial(
        describing.describe,
        specs,
        folder=folder,
        max_shard_size=max_shard_size,
        metadata=source.index.metadata,
        origins=origins_of(made, with_all_tensors(reading)) if large else None,
        ranks=ranks,
        tree=None if out is None else out.rest,
        last=_following(made) if computes else (),
        **chunks,
        **(_anew_at(request) if chunks else {}),
        **({} if grid is None else {"grid": grid}),
    )
    if target is None:
        target = described(stamp=text)
    alike = len(made) == len(source.index.tensors) and bool(migration_path.steps)
    if alike and written == source.format == OUTPUT_FORMATS[0]:
        notes += _note_runs(reading, made, target)
    if target.whole:
        made = initial(with_files(source, target.whole).index.tensors, Views())
        chunks["data"] = "copied"
    if target.copies:
        made = {**made, **{key: copy(made[first]) for key, first in target.copies.items()}}
    if target.cuts:
        from .encoding_anew import cut_components

        made = {**made, **cut_components(made, target.cuts, request)}
    notes += target.notes
    gone += target.lost
    watched = source.identities() or {}
    location, free = places.look_around(source.path)
    side_files = [
        (target.beside + path, size)
        for path, size in path_state.list_side_files(source.index.side_files)
    ]
    if found := clash(
        [*(f.name for f in target.files), *target.small, *(path for path, _ in side_files)]
    ):
        refuse_clash(*found)
    body = document(
        request,
        migration_path,
        path_state,
        composition,
        target,
        tool=__version__,
        source={
            "path": source.path if source.format == "memory" else location,
            "format": source.format,
            "index_hash": index_hash,
            "tensors": len(source.index.tensors),
            "bytes": source.index.nbytes,
            "files": list(source.index.files),
            "states": [
                # not of the blobs that hold what was lifted out of pickles
                *(
                    _state(name, blob.size, blob.identity)
                    for name, blob in zip(source.index.files, source.blobs, strict=False)
                ),
                *(
                    _state(f.path, f.size, watched.get(f.path))
                    for f in (source.index.side_files if folder else ())
                ),
                *(_metadata_states(watched) if source.format in DESCRIBED else ()),
            ],
        },
        stored=with_all_tensors(reading).index.tensors,
        options={"max_shard_size": max_shard_size, "folder": folder, "format": written, **chunks},
        side_files=[{"path": path, "size": size} for path, size in side_files],
        left_out=source.index.left_out if folder else (),
        shared=source.index.shared,
        reference=getattr(source, "reference", {}),
    )
    body["notes"] += [*path_state.notes, *notes]
    body["optimizer"] = became.became
    if computes and (returns := restoring.list_returns(composition)):
        body["returns"] = returns
    if request.undo:
        there = reading.index.tensors
        keys = lost if undo is None else tuple(map(undo.name, undo.hashes))
        if not keys:
            body["notes"].append("the way back brings all tensors back: there is nothing to keep")
        if tied := restoring.tied_keys(lost, index.tensors):
            gone.append(f"that {listed(tied, 4)} share their bytes")
        body["undo"] = {
            "path": None if undo is None else undo.path,
            "tensors": len(keys),
            "bytes": sum(there[key].spec.nbytes for key in keys),
            "exact": not (gone or composition.values_lost or path_state.inexact),
        }
    if kept is not None and folder:
        nbytes = size_of_file(kept)
        body["parts"] = {"tensors": len(kept.runs[-1].keys), "bytes": nbytes}
        body["bytes_written"] += nbytes
    if (index.passed_through or index.items) and not alone:
        body["warnings"] += [d.to_json() for d in stale_copies(index, composition)]
    if REQUANTIZE in request.params:
        from .encoding_anew import list_anew, loss_of

        if anew := list_anew(made):
            body["losses"].append(loss_of(anew))
            gone.append(f"what {listed(anew, 4)} were before they were encoded anew")
    if gone:
        because = [*body["downgrade"]["because"], *(f"{what} does not come back" for what in gone)]
        body["downgrade"] = {"exact": False, "because": because}
    body["question"] = request.to_json()
    body["free"] = free
    return Plan(
        body,
        composition,
        target,
        path_state.sides,
        made,
        (
            *composition.graph.checks,
            *(out.checks if out is not None and written == "torch" else ()),
        ),
        kept if folder or alone_hash else None,
        expected,
        (lambda found: described(stamp=stamp_text(with_hash(entries, kept, found))))
        if alone_hash
        else None,
        lost,
        extra,
        grid,
        with_all_tensors(reading).index.tensors,
        path_state.param_sources,
    )


@collector_paused()
def _renamed(
    source: Source, composition: Composition, out: OutputTree, stamp: str
) -> Target | None:
    """The target that keeps the source's data files, if its format can and names alone change."""
    rename = getattr(formats.get(source.format), "rename", None)
    if rename is None or composition.graph.checks or out.checks:
        return None
    origins = find_renamed(out.outputs, with_all_tensors(source).index.tensors)
    found: Target | None = None if origins is None else rename(source, origins, out.rest, stamp)
    return found


def _note_runs(source: Source, outputs: Mapping[str, Tensor], target: Target) -> list[str]:
    """The note that headers alone are new, where only names change, and how data is copied."""
    if find_renamed(outputs, source.index.tensors) is None:
        return []
    layouts = ByteLayouts()
    runs = sum(len(shared_extents(file, outputs, source, layouts)) for file in target.files)
    what = "only names change: headers are new, and the data is copied as it is"
    return [f"{what}, in {plural(runs, 'run')}"] * bool(runs)


def _refuse_empty(composition: Composition) -> NoReturn:
    """M939 for rules that leave no tensor: no format could say where those were that rules work
    on.
    """
    dropping = [rule for _, bound in composition.steps for rule in bound.dropped.values()]
    fail(
        "M939",
        "the rules leave no tensor: the output would be a checkpoint without weights",
        spans=tuple(dict.fromkeys(rule.span for rule in dropping))[:4],
        help="keep what the output needs",
    )


def _state(name: str, size: int, found: Identity | None) -> dict[str, Any]:
    """What a plan says of a file of the source, to be compared before it is run."""
    return {"name": name, "size": size, "mtime_ns": None if found is None else found.modified}


def _metadata_states(watched: Mapping[str, Identity]) -> list[dict[str, Any]]:
    """The states of the files that say where chunks lie in data files, which may all stay."""
    return [_state(name, at.size, at) for name, at in watched.items() if name.endswith(METADATA)]


def _following(outputs: Mapping[str, Tensor]) -> set[str]:
    """The keys of outputs that fall out of computing others, whole and as they are computed."""
    found = set()
    for key, tensor in outputs.items():
        if len(tensor.sources) == 1 and isinstance(value := tensor.sources[0], ComputedTensor):
            op = ops.get(value.computation.op_call.op)
            if isinstance(op, ValueOp) and op.follows(value.computation.op_call.args, value.output):
                found.add(key)
    return found


def _anew_at(request: Request) -> dict[str, Any]:
    """The arguments by which a format that cuts tensors knows which ones may be encoded anew."""
    if REQUANTIZE not in request.params:
        return {}
    from .encoding_anew import named_by

    return {"anew": named_by(request)}


def _left_behind(source: Source, written: str, folder: bool, request: Request) -> list[str]:
    """Notes on what the output has no place for, beyond a dict of tensors; M916 unless allowed."""
    index = source.index
    tensors_only = not (written in OUTPUT_FORMATS or formats.holds_trees(written))
    if index.tree is None:
        bare = tensors_only or written == OUTPUT_FORMATS[0]
        kept = {} if bare else writable_items(index)
        lost = [key for key in index.items if key not in kept]
        why = (
            f"{written} holds tensors only" if bare else "plain values only are written from memory"
        )
    elif written == "safetensors" and not folder and index.passed_through:
        lost, why = (
            [*index.passed_through, *index.items],
            "one safetensors file holds the weights only",
        )
    elif tensors_only:
        lost, why = [*index.passed_through, *index.items], f"{written} holds tensors only"
    else:
        return []
    if lost and "drop" not in request.allow:
        way = (
            "leave them out"
            if index.tree is None or tensors_only
            else "write a folder, where they lie beside the weights"
        )
        fail(
            "M916",
            f"{why}, not {list_collapsed(lost)}",
            help=f"{way}, or {option('allow', 'drop')}",
            permit="drop",
        )
    return [f"dropped, because {why}: {list_collapsed(lost)}"] * bool(lost)
