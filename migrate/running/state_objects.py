"""Extra states that are objects, made tensors where a rule decides about them.

Transformer Engine stored its extra state as an object until 1.13; a state that no rule reads stays
the object that it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.keys import Pattern, TwoReadings
from ..core.spec import spec
from ..extra_state.record import Object
from ..extra_state.states import objects
from ..source.blobs import Blob, BytesBlob, Stored
from ..source.pickle.tree import DictNode
from ..source.target import output_record
from ..source.tree import CheckpointTree, FileTree, replace_dict, tensor_records

if TYPE_CHECKING:
    from ..planning.path import MigrationPath
    from ..source.index import Source


def lift_states(source: Source, migration_path: MigrationPath) -> None:
    """Puts the states that rules of the path ask for among the tensors of the source, and takes
    them from where they were.

    Calling it again changes nothing. M950 for a state that is made of what no extra state is made
    of.
    """
    patterns = list(_patterns(migration_path))
    found = list(objects(source.index, lambda key: _asked(patterns, key))) if patterns else []
    if not found:
        return
    from ..extra_state.write import content

    index = source.index
    tensors = dict(index.tensors)
    blobs: list[Blob] = list(source.blobs)
    for one in found:
        data = content(one, index, source.blobs)
        tensors[one.name] = Stored(spec("uint8", (len(data),)), len(blobs), 0)
        blobs.append(BytesBlob(one.name, data))
    if index.tree is None:
        items = {key: value for key, value in index.items.items() if key not in tensors}
        source.index = replace(index, tensors=tensors, items=items)
    else:
        specs = {one.name: tensors[one.name].spec for one in found}
        paths = {_path(one, index.tree) for one in found}
        items = {
            path: value
            for path, value in index.items.items()
            if not _below(path, paths, len(index.tree.parts) > 1)
        }
        source.index = replace(
            index, tensors=tensors, items=items, tree=_without(index.tree, found, specs)
        )
    source.blobs = tuple(blobs)


def _patterns(migration_path: MigrationPath) -> Iterator[Pattern]:
    for step in migration_path.steps:
        for compiled, _ in step.rules:
            if not step.backwards and any(
                ops.get(step.op).kind == "decide" for step in compiled.rule.via
            ):
                yield from (pattern for pattern in compiled.sources.values() if not pattern.params)


def _asked(patterns: list[Pattern], key: str) -> bool:
    for pattern in patterns:
        try:
            if not pattern.has_flat and pattern.match(key) is not None:
                return True
        except TwoReadings:
            return True
    return False


def _without(
    outline: CheckpointTree, found: list[Object], specs: Mapping[str, Any]
) -> CheckpointTree:
    """The trees with a tensor's place for each state, without tensors that were in states only."""
    names = dict(outline.names)
    parts: list[FileTree] = []
    for rank, part in enumerate(outline.parts):
        here = {one.key: one.name for one in found if one.rank == rank}
        table = part.table
        if table is None or not here:
            parts.append(part)
            continue
        pairs: list[tuple[Any, Any]] = []
        for key, value in table.pairs:
            if type(key) is str and key in here:
                value = output_record(specs[here[key]])
                names[id(value)] = here[key]
            pairs.append((key, value))
        parts.append(
            part._replace(
                root=replace_dict(
                    part.root,
                    table,
                    DictNode(table.kind, tuple(pairs), table.node, table.attributes),
                )
            )
        )
    left = {id(leaf) for leaf in tensor_records([part.root for part in parts])}
    names = {number: name for number, name in names.items() if number in left}
    kept = set(names.values())
    carried = {key: stored for key, stored in outline.passed_through.items() if key in kept}
    gone = outline.passed_through.keys() - carried.keys()
    ties = {key: first for key, first in outline.ties.items() if gone.isdisjoint((key, first))}
    return replace(outline, parts=tuple(parts), names=names, passed_through=carried, ties=ties)


def _path(one: Object, outline: CheckpointTree) -> str:
    rank = f"@{one.rank}" if len(outline.parts) > 1 else ""
    return ".".join((*(outline.parts[one.rank].at or ()), one.key)) + rank


def _below(path: str, states: set[str], several: bool) -> bool:
    """Whether the value at a path is one of these states, or inside of one."""
    short, at, rank = path.rpartition("@") if several else (path, "", "")
    ends = [n for n, letter in enumerate(short) if letter == "."] if "." in short else []
    return any(short[:end] + at + rank in states for end in (*ends, len(short)))
