"""The stamp: what was applied to the checkpoint it stands in.

It says layouts, rules by id and semantic hash, which pack they come from unless they ship, bound
params, how changes of side files are undone, which keys stayed as they were although the way back
would take them, which optional parts tensors were without, and index hashes of source and output.
No time, host or path, so equal runs leave equal bytes. A stamp binds to the index hash of the
output it stands in: one that does not fit (the checkpoint was edited afterwards) is ignored, with a
note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..core.errors import printable
from ..core.types import FORMAT_VERSION
from ..planning.optimizers import LASTING
from ..planning.patches import is_undo
from ..planning.unchanged import are_folded_keys
from ..source.grids import WrittenGrid, grid_of
from ..source.shards import naming

NAME = "migrate.history.json"


@dataclass(frozen=True, slots=True)
class Stamp:
    """`layouts` by lineage, applied edges, oldest first, and the names of what was carried without
    being read. `ignored`: why a stamp is unused. `declared`: layouts that a person stated, each
    with the reason if signs speak against it. `grid`: that of which the parts were joined, where
    nothing else was done since.
    """

    layouts: Mapping[str, str] = field(default_factory=dict)
    applied: tuple[Mapping[str, Any], ...] = ()
    ignored: str = field(default="", compare=False)
    carried: tuple[str, ...] = ()
    declared: tuple[Mapping[str, str], ...] = ()
    grid: WrittenGrid | None = None


# where nothing was applied
NONE = Stamp()


def read_stamp(raw: bytes | None, index_hash: str) -> tuple[Stamp, list[str]]:
    """The stamp if it fits this index hash, else an empty one and the reason as a note."""
    stamp = _read(raw, index_hash) if raw is not None else Stamp()
    return stamp, [stamp.ignored] if stamp.ignored else []


def _read(raw: bytes, index_hash: str) -> Stamp:
    try:
        document = json.loads(raw)
        if (
            document["kind"] != "history"
            or document["format_version"].split(".")[0] != FORMAT_VERSION.split(".")[0]
        ):
            return Stamp(
                ignored=f"the stamp is of another version ({document['format_version']}) and is "
                "ignored"
            )
        layouts, applied, output = document["layouts"], document["applied"], document["output"]
        well_formed = (
            isinstance(layouts, dict)
            and all(map(_is_line, [*layouts, *layouts.values()]))
            and isinstance(applied, list)
            and all(_is_entry(entry) for entry in applied)
            and ("grid" not in document or grid_of(document["grid"]) is not None)
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        well_formed = False
    if not well_formed:
        return Stamp(ignored="the stamp cannot be read and is ignored")
    if output != index_hash:
        at = document.get("at")
        where = (
            f"; it is that of the dict at `{printable(at)}`, which has to be named"
            if _is_line(at)
            else ""
        )
        return Stamp(
            ignored="the stamp was made for other contents (the index hash differs) and is "
            f"ignored{where}"
        )
    carried = document.get("carried", [])
    fits = isinstance(carried, list) and all(map(_is_line, carried))
    declared = document.get("declared", [])
    stated = isinstance(declared, list) and all(map(_is_declared, declared))
    return Stamp(
        layouts,
        tuple(applied),
        carried=tuple(carried) if fits else (),
        declared=tuple(declared) if stated else (),
        grid=grid_of(document.get("grid")),
    )


def _is_declared(one: Any) -> bool:
    return isinstance(one, dict) and all(map(_is_line, chain.from_iterable(one.items())))


def _is_entry(entry: Any) -> bool:
    texts = ("lineage", "from", "to", "tool", "source")
    return (
        isinstance(entry, dict)
        and all(_is_line(entry.get(name)) for name in texts)
        and isinstance(entry.get("params"), dict)
        and _is_memory(entry.get("files", {}))
        and (
            "ranks" not in entry
            or (_is_line(entry["ranks"]) and naming([entry["ranks"]]) is not None)
        )
        and ("grid" not in entry or grid_of(entry["grid"]) is not None)
        and type(entry.get("backwards", False)) is bool
        and are_folded_keys(entry.get("kept", []))
        and are_folded_keys(entry.get("absent", []))
        and are_folded_keys(entry.get("nothing", []))
        and entry.get("optimizer", LASTING[0]) in LASTING
        and _are_names(entry.get("optimizer_names", []))
        and _are_parts(entry.get("parts"))
        and isinstance(entry.get("pack", {}), dict)
        and all(map(_is_line, chain.from_iterable(entry.get("pack", {}).items())))
        and isinstance(entry.get("rules"), list)
        and all(
            isinstance(r, dict) and _is_line(r.get("id")) and _is_line(r.get("hash"))
            for r in entry["rules"]
        )
    )


def _are_names(names: Any) -> bool:
    """Whether it has the names of optimizers' parameters."""
    return isinstance(names, list) and all(
        isinstance(one, dict)
        and _is_line(one.get("place"))
        and all(
            isinstance(one.get(side), list) and all(map(_is_line, one[side]))
            for side in ("before", "after")
        )
        for one in names
    )


def _are_parts(parts: Any) -> bool:
    """Whether it is the one hash of tensors that a single file keeps, or nothing."""
    return parts is None or (
        isinstance(parts, dict)
        and _is_line(parts.get("hash"))
        and are_folded_keys(parts.get("keys"))
    )


def _is_memory(files: Any) -> bool:
    """Whether it says how changes of side files are undone."""
    return (
        isinstance(files, dict) and all(map(_is_line, files)) and all(map(is_undo, files.values()))
    )


def _is_line(value: Any) -> bool:
    """Whether a terminal may show it: a stamp comes with the checkpoint, from its author."""
    return isinstance(value, str) and value.isprintable()


def dict_of(history: bytes | None) -> str | None:
    """The dict that the run which left the stamp worked on, if it was named."""
    if history is None:
        return None
    try:
        document = json.loads(history)
    except ValueError:
        return None
    at = document.get("at") if isinstance(document, dict) else None
    return at if _is_line(at) else None


def write_stamp(
    before: Stamp,
    layouts: Mapping[str, str],
    entries: Sequence[Mapping[str, Any]],
    output_hash: str,
    at: str | None = None,
    carried: Sequence[str] = (),
    declared: Mapping[str, str] | None = None,
    grid: WrittenGrid | None = None,
) -> str:
    """The new stamp's text: what was applied, then `entries`. `at`: the dict, if it was named;
    `carried`: names of what went along without being read; `declared`: a layout that is stated;
    `grid`: of which the parts were joined, where there are no entries to say it.
    """
    stated = [*before.declared, *([dict(declared)] if declared else [])]
    document: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "kind": "history",
        "output": output_hash,
        **({} if at is None else {"at": at}),
        **({"carried": list(carried)} if carried else {}),
        **({"declared": stated} if stated else {}),
        **({} if grid is None else {"grid": grid.to_json()}),
        "layouts": {**before.layouts, **layouts},
        "applied": [*before.applied, *entries],
    }
    # not sorted: what is restored from it has an order
    return json.dumps(document, indent=1, ensure_ascii=True) + "\n"
