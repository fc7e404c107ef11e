"""A question put to an opened checkpoint: route, graph, target and plan, from headers alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .. import __version__, formats
from ..core.diagnostics import Report, fail, listed
from ..formats._ranks import Naming, by_rank, check_names, naming
from ..planning.compose import Composition, compose
from ..planning.plan import Plan, document
from ..planning.question import Question
from ..planning.route import Route, find_route
from ..planning.sides import SideFiles
from ..planning.walk import Walk
from ..source.index import Source, specs_hash
from . import history as stamps
from .share import origins

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..planning.graph import Tensor


def stamp_of(source: Source) -> tuple[stamps.Stamp, list[str]]:
    return stamps.read(source.history, source.index.hash())


def side_reader(source: Source) -> Callable[[str], bytes | None]:
    present = {f.path for f in source.index.side_files}
    return lambda name: source.side_file(name) if name in present else None


def is_folder(source: Source, single_file: bool | None) -> bool:
    """Whether the output is a folder."""
    return not single_file if single_file is not None else os.path.isdir(source.path) or source.path.endswith(".index.json")


def walk_for(source: Source, route: Route, folder: bool) -> Walk:
    """The walk along the route; where source and output are folders, side files go with it."""
    sides = SideFiles(side_reader(source), frozenset(source.index.left_out))
    return Walk(route.given, sides, carried=folder and is_folder(source, None))


def compose_for(source: Source, route: Route, question: Question, walk: Walk, *, programs: bool = False, prove: bool = True) -> Composition:
    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        from .checks import equal

        return equal(present, made, source)

    report = Report()
    prove = prove and bool(route.legs)
    composition = compose(source.index.tensors, route.legs, question.allow, same_bytes, report, programs=programs, prove=prove, walk=walk)
    report.check()
    return composition


def plan_for(source: Source, question: Question, folder: bool, max_shard_size: int) -> Plan:
    index_hash = source.index.hash()
    if source.format != "memory":
        check_names(source.index, source.path)
    stamp, notes = stamps.read(source.history, index_hash)
    route = find_route(source.index, side_reader(source), stamp, question)
    walk = walk_for(source, route, folder)
    composition = compose_for(source, route, question, walk)
    specs = {key: t.spec for key, t in composition.graph.outputs.items()}
    report = Report()
    route.check_output(composition.graph.outputs, walk.sides.read, report)
    report.check()
    known = zip(route.entries, walk.remembered, strict=True)
    entries = [{**entry, **memory, "tool": __version__, "source": index_hash} for entry, memory in known]
    was = naming(source.index.files) if os.path.isdir(source.path) else None
    if was is not None and entries:
        entries[0]["ranks"] = was.name(0, os.path.splitext(source.index.files[0])[1])
    ranks = _naming(was, specs, route, stamp) if folder else None
    # a rule file applied by hand belongs to no lineage: what layouts the stamp named may not hold any more
    before = stamps.Stamp({}, stamp.applied) if question.files else stamp
    text = stamps.write(before, route.layouts, entries, specs_hash(specs))
    notes += _unheld(source, question)
    if ranks is not None:
        notes.append("each rank has one file, of any size: --max-shard-size does not apply")
    outputs = composition.graph.outputs
    target = formats.get("safetensors").describe(
        specs,
        folder=folder,
        max_shard_size=max_shard_size,
        metadata=source.index.metadata,
        stamp=text,
        origins=origins(outputs, source),
        ranks=ranks,
    )
    body = document(
        tool=__version__,
        source={
            "path": os.path.abspath(source.path),
            "format": source.format,
            "index_hash": index_hash,
            "tensors": len(source.index.tensors),
            "bytes": source.index.nbytes,
            "files": list(source.index.files),
        },
        stored=source.index.tensors,
        composition=composition,
        rules=route.rules,
        params=walk.params,
        allow=question.allow,
        target=target,
        options={"max_shard_size": max_shard_size, "folder": folder},
        side_files=[{"path": path, "size": size} for path, size in walk.side_files(source.index.side_files)],
        left_out=source.index.left_out if folder else (),
        patched=walk.changes,
        layouts=route.layouts,
        warnings=[d.to_json() for d in (*route.warnings, *walk.warnings)],
    )
    body["notes"] += [*walk.notes, *notes]
    body["question"] = question.to_json()
    body["free"] = shutil.disk_usage(os.path.dirname(os.path.abspath(source.path)) or ".").free
    return Plan(body, composition, target, walk.sides)


def _naming(was: Naming | None, specs: Mapping[str, Spec], route: Route, stamp: stamps.Stamp) -> Naming | None:
    """How the files of ranks are called: as they were before the edge that is undone, else as the source's, else as a stamp says.

    None where the output has a single rank and nothing was called by its rank before: then it is a checkpoint like others.
    """
    if route.legs and (before := naming([route.legs[-1].memory.get("ranks", "")])):
        return before
    if len(by_rank(key for key in specs if "@" in key)) < 2:
        return None
    return was or next((naming([e["ranks"]]) for e in reversed(stamp.applied) if "ranks" in e), None) or Naming()


def _unheld(source: Source, question: Question) -> list[str]:
    """Notes on what the target cannot hold: ties are written each, values that are no tensors need leave to go."""
    items = list(source.index.items)
    if items and "drop" not in question.allow:
        fail("M916", f"safetensors holds tensors only, not {listed(items)}", help="leave them out, or --allow drop")
    storages = [stored.storage for stored in source.index.tensors.values() if stored.storage is not None]
    ties = len(storages) - len(set(storages))
    return [f"dropped, because safetensors holds tensors only: {listed(items)}"] * bool(items) + [
        f"{ties} tensors share memory with another one; each is written"
    ] * bool(ties)
