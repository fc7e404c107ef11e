"""What a stamp holds of the edges of a path: the params that they were walked with, and whether
their rules have changed since.

For an edge from a layout to itself the direction is written down, which its ends do not show. What
it was asked for once is not asked for again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..core.errors import Diagnostic, option, printable
from ..rules.files import VALUES, LoadedFile
from ..rules.packs import load_edge
from ..source.grids import grid_of
from .unchanged import goes_back, standing_entries

if TYPE_CHECKING:
    from ..rules.lineage import Edge
    from .pathstate import PathStep


def remembered(
    applied: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]], step: PathStep
) -> dict[str, Any]:
    """What the stamp holds of this edge: its latest params and, if it is undone, how files were.

    `files`, `kept` and `absent` are None where no entry is undone, because then they are not known;
    `again` are the entries that are walked again, in order, this edge one of them.
    """
    own = step.memory.get("again")
    # what is walked again before it stood in the stamp that it was undone by
    there = [*applied, *(takewhile(lambda e: e is not own, again) if own is not None else ())]
    here = standing_entries(there) if there else ()
    undone = [
        e
        for e in here
        if (e["lineage"], e["from"], e["to"]) == (step.lineage, step.goal, step.start)
        and not goes_back(e)
    ]
    # what was asked for once of an edge from a layout to itself is not asked for again
    known = applied if not step.loops else undone[-1:] if step.backwards else ()
    ends, params = {step.start, step.goal}, dict[str, Any]()
    for entry in (*known, *again) if own is None else (own,):
        if entry["lineage"] == step.lineage and {entry["from"], entry["to"]} == ends:
            params.update(entry["params"])
    before = undone[-1] if undone and step.backwards else {"files": None}
    kept = undone[-1].get("kept", []) if undone else None
    left = before.get("optimizer")
    return {
        "params": params,
        "again": own,
        "files": before.get("files", {}),
        # values that the way there made, where that was the way back of the rules
        "made": _values_of(undone[-1]) if undone and not step.backwards else {},
        "ranks": before.get("ranks", ""),
        "grid": grid_of(before["grid"]) if "grid" in before else None,
        "kept": kept,
        "absent": undone[-1].get("absent") if undone else None,
        "nothing": undone[-1].get("nothing", []) if undone and step.backwards else [],
        "optimizer": left,
    }


def _values_of(entry: Mapping[str, Any]) -> dict[str, Any]:
    """How what an entry of a stamp did to the values beside the model is undone."""
    return {path: undo for path, undo in entry.get("files", {}).items() if path == VALUES}


def entry_of(step: PathStep) -> dict[str, Any]:
    """What a stamp calls the edge and its direction."""
    entry: dict[str, Any] = {"lineage": step.lineage, "from": step.start, "to": step.goal}
    return {**entry, "backwards": True} if step.loops and step.backwards else entry


def changed_rules(
    step: PathStep,
    hashes: Sequence[Mapping[str, str]],
    applied: Sequence[Mapping[str, Any]],
    again: Sequence[Mapping[str, Any]],
) -> Iterator[Diagnostic]:
    """M518 where an edge of a stamp is undone or walked again with rules that mean something else
    than those that were applied.
    """
    there, back = (step.lineage, step.start, step.goal), (step.lineage, step.goal, step.start)
    entries = [e for e in again if (e["lineage"], e["from"], e["to"]) == there]
    if step.backwards and not entries:
        entries = [
            e for e in standing_entries(applied) if (e["lineage"], e["from"], e["to"]) == back
        ]
    if not entries:
        return
    was = {rule["id"]: rule["hash"] for rule in entries[-1]["rules"]}
    now = {rule["id"]: rule["hash"] for rule in hashes}
    if was != now:
        differ = [
            f"{name} has changed since" for name in now if was.get(name, now[name]) != now[name]
        ]
        differ += [f"{name} did not exist then" for name in now.keys() - was.keys()]
        differ += [f"{name} no longer exists" for name in was.keys() - now.keys()]
        edge = " → ".join(printable(entries[-1][end], 100) for end in ("from", "to"))
        way = (
            f"migrate {printable(entries[-1]['tool'])} wrote the stamp; the rules of that release "
            "restore what was there"
        )
        if pack := entries[-1].get("pack"):
            words = [printable(pack[k], 100) for k in ("origin", "name", "version") if pack.get(k)]
            way = (
                f"those that were applied did not ship with migrate ({' '.join(words)}), and "
                f"restore what was there: name them with {option('rules')}"
            )
        yield Diagnostic(
            "M518",
            f"the stamp says that {step.lineage} {edge} was applied with other rules than are "
            "found now",
            notes=tuple(printable(line, 300) for line in sorted(differ)[:8]),
            help=way,
        )


def applied_files(
    edge: Edge, lineage: str, entries: Sequence[Mapping[str, Any]]
) -> list[LoadedFile]:
    """The rule files of an edge. Superseded ones come in the place of others only where the last of
    the stamp's entries that is of this edge was made with them.
    """
    files = load_edge(edge.files)
    ends = (lineage, edge.source, edge.target)
    made = [e for e in entries if (e["lineage"], e["from"], e["to"]) == ends]
    if not edge.superseded or not made:
        return files
    wanted = {rule["id"] for rule in made[-1]["rules"]}
    every = {file.model.id: file for file in (*files, *load_edge(edge.superseded))}
    return [every[name] for name in every if name in wanted] if wanted <= every.keys() else files


def turns(entry: Mapping[str, Any]) -> bool:
    """Whether what the entry's ends say of its direction holds."""
    return entry["from"] != entry["to"] or goes_back(entry)
