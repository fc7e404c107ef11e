"""States that stand beside the tensors, as an `io.BytesIO` or as nothing at all, made tensors of bytes where a rule decides about them.

Transformer Engine stored its extra state so from 0.12 to 1.13. Rules see tensors, and a state that no rule asks for goes on as the
object that it was, so only keys are lifted that a rule with such an op reads.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.keys import Pattern, TwoReadings
from ..core.spec import spec
from ..formats._torchtree import record
from ..source.blobs import BytesBlob
from ..source.index import Blob, Stored
from ..source.outline import Part
from ..source.pickle.tree import Buffer, DictNode

if TYPE_CHECKING:
    from ..planning.route import Route
    from ..source.index import Source


def lift(source: Source, route: Route) -> None:
    """Puts the states that rules of the route ask for among the tensors of the source, and takes them from where they were.

    States that a file has as numbers, text or containers of tensors stay there. Calling it again changes nothing.
    """
    patterns = list(_patterns(route))
    if not patterns:
        return
    found: dict[str, bytes] = {}
    items = dict(source.index.items)
    outline = source.index.outline
    if outline is None:
        for key, value in source.index.items.items():
            if type(value) is io.BytesIO and _asked(patterns, key):
                found[key] = value.getvalue()
                del items[key]
    else:
        names = dict(outline.names)
        parts = tuple(
            _lifted(part, rank if len(outline.parts) > 1 else None, patterns, found, names, items)
            for rank, part in enumerate(outline.parts)
        )
        outline = replace(outline, parts=parts, names=names)
    if not found:
        return
    tensors = dict(source.index.tensors)
    blobs: list[Blob] = list(source.blobs)
    for key, data in found.items():
        tensors[key] = Stored(spec("uint8", (len(data),)), len(blobs), 0)
        blobs.append(BytesBlob(key, data))
    source.index = replace(source.index, tensors=tensors, items=items, outline=outline)
    source.blobs = tuple(blobs)


def _patterns(route: Route) -> Iterator[Pattern]:
    for leg in route.legs:
        for compiled, _ in leg.rules:
            if not leg.backwards and any(ops.get(step.op).kind == "decide" for step in compiled.rule.via):
                yield from (pattern for pattern in compiled.sources.values() if not pattern.params)


def _asked(patterns: list[Pattern], key: str) -> bool:
    for pattern in patterns:
        try:
            if not pattern.has_flat and pattern.match(key) is not None:
                return True
        except TwoReadings:
            return True
    return False


def _lifted(
    part: Part, rank: int | None, patterns: list[Pattern], found: dict[str, bytes], names: dict[int, str], items: dict[str, Any]
) -> Part:
    """The part with a tensor's place in its dict for each state that is asked for."""
    table = part.table
    if table is None:
        return part
    pairs: list[tuple[Any, Any]] = []
    for key, value in table.pairs:
        if type(value) is Buffer and type(key) is str and _asked(patterns, key):
            name = key if rank is None else f"{key}@{rank}"
            found[name] = value.data
            value = record(spec("uint8", (len(value.data),)))
            names[id(value)] = name
            items.pop(".".join((*(part.at or ()), key)) + ("" if rank is None else f"@{rank}"), None)
        pairs.append((key, value))
    made = DictNode(table.kind, tuple(pairs), table.node, table.attributes)
    return part._replace(root=_put(part.root, part.at or (), made))


def _put(root: Any, path: tuple[str, ...], made: DictNode) -> Any:
    """The tree with `made` at a path of text keys."""
    if not path:
        return made
    pairs = tuple((key, _put(value, path[1:], made) if key == path[0] else value) for key, value in root.pairs)
    return DictNode(root.kind, pairs, root.node, root.attributes)
