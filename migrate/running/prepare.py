"""A question put to an opened checkpoint: route, graph, target and plan, from headers alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import __version__, formats
from ..core.diagnostics import Report, fail, listed
from ..planning.compose import Composition, compose
from ..planning.plan import Plan, document
from ..planning.question import Question
from ..planning.route import Route, find_route
from ..source.index import Source, specs_hash
from . import history as stamps
from .share import origins

if TYPE_CHECKING:
    from ..planning.graph import Tensor


def stamp_of(source: Source) -> tuple[stamps.Stamp, list[str]]:
    return stamps.read(source.history, source.index.hash())


def side_reader(source: Source) -> Callable[[str], bytes | None]:
    present = {f.path for f in source.index.side_files}
    return lambda name: source.side_file(name) if name in present else None


def is_folder(source: Source, single_file: bool | None) -> bool:
    """Whether the output is a folder."""
    return not single_file if single_file is not None else os.path.isdir(source.path) or source.path.endswith(".index.json")


def compose_for(source: Source, route: Route, question: Question, *, programs: bool = False, prove: bool = True) -> Composition:
    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        from .checks import equal

        return equal(present, made, source)

    report = Report()
    composition = compose(
        source.index.tensors, route.legs, question.allow, same_bytes, report, programs=programs, prove=prove and bool(route.legs)
    )
    report.check()
    return composition


def plan_for(source: Source, question: Question, folder: bool, max_shard_size: int) -> Plan:
    index_hash = source.index.hash()
    stamp, notes = stamps.read(source.history, index_hash)
    route = find_route(source.index, side_reader(source), stamp, question)
    composition = compose_for(source, route, question)
    specs = {key: t.spec for key, t in composition.graph.outputs.items()}
    report = Report()
    route.check_output(composition.graph.outputs, side_reader(source), report)
    report.check()
    entries = [{**entry, "tool": __version__, "source": index_hash} for entry in route.entries]
    # a rule file applied by hand belongs to no lineage: what layouts the stamp named may not hold any more
    before = stamps.Stamp({}, stamp.applied) if question.files else stamp
    text = stamps.write(before, route.layouts, entries, specs_hash(specs))
    notes += _unheld(source, question)
    outputs = composition.graph.outputs
    target = formats.get("safetensors").describe(
        specs,
        folder=folder,
        max_shard_size=max_shard_size,
        metadata=source.index.metadata,
        stamp=text,
        origins=origins(outputs, source),
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
        params=route.params,
        allow=question.allow,
        target=target,
        options={"max_shard_size": max_shard_size, "folder": folder},
        side_files=[{"path": f.path, "size": f.size} for f in source.index.side_files] if folder else [],
        layouts=route.layouts,
        warnings=[d.to_json() for d in route.warnings],
    )
    body["notes"] += notes
    body["question"] = question.to_json()
    body["free"] = shutil.disk_usage(os.path.dirname(os.path.abspath(source.path)) or ".").free
    return Plan(body, composition, target)


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
