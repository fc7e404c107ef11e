"""Which lineages and layouts are known, which a request names, and which a checkpoint is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import fail, option, printable
from ..core.types import PACK
from ..extra_state.states import States
from ..rules.families import families, suiting
from ..rules.files import LoadedFile
from ..rules.lineage import Lineage, Matcher, config_of, detect, nearest, resolve_goal
from ..rules.packs import load_edge
from ..source.index import Index
from .edge_counts import counts_of
from .path import find_packs_of, lineages_asked_for, load_given_files, refuse_start_elsewhere
from .request import Request
from .sides import ReadSide


def _folders(rules: Sequence[str]) -> list[str]:
    """The folders of lineages, where only such can be meant; M115 for anything else."""
    for given in rules:
        if not (given.startswith(PACK) or Path(given).is_dir()):
            what = "is a file" if Path(given).exists() else "does not exist"
            fail(
                "M115",
                f"{option('rules', printable(given, 300))} {what}, and a folder of lineages is "
                "expected",
            )
    return list(rules)


def known_lineages(
    rules: Sequence[str], only: str | None, *, counts: bool = False
) -> list[dict[str, Any]]:
    """All known lineages with layouts and edges, for people and machines; `only` one of them.
    `counts`: the rules of each edge are read and counted.
    """
    packs = find_packs_of(_folders(rules))
    shipped = families()
    names = [only] if only is not None else list(packs.lineages()[0])
    out = []
    for name in names:
        lineage = packs.load_lineage(name)
        out.append(
            {
                "name": name,
                "title": lineage.title,
                "ordered": lineage.ordered,
                "aliases": list(lineage.aliases),
                "model_types": lineage.model_types,
                "family": lineage.name in shipped,
                "layouts": [
                    {"name": x.name, "title": x.title, "status": x.status, "note": x.note}
                    for x in lineage.layouts
                ],
                "edges": [
                    {
                        "from": e.source,
                        "to": e.target,
                        "files": [str(f) for f in e.files],
                        **(counts_of(e.files) if counts else {}),
                    }
                    for e in lineage.edges
                ],
            }
        )
    return out


def layouts_of(
    index: Index,
    read_side: ReadSide,
    rules: Sequence[str],
    stamped: Mapping[str, str],
    states: States | None = None,
    match: Matcher | None = None,
) -> list[dict[str, Any]]:
    """The layouts that a checkpoint is in, of all known lineages: by its stamp, or by detection
    with evidence. `match` serves those who ask for the nearest layouts as well.
    """
    out = []
    match = match or Matcher(index, states)
    suits = suiting(config_of(read_side), names=[*stamped])
    for name, lineage in find_packs_of(_folders(rules)).lineages(suits)[0].items():
        if name in stamped:
            out.append(
                {
                    "lineage": name,
                    "layout": stamped[name],
                    "evidence": ["its stamp says so"],
                    "note": "",
                }
            )
            continue
        for finding in detect(lineage, index, read_side, match=match, states=states):
            if finding.holds:
                note = lineage.layout(finding.layout).note
                out.append(
                    {
                        "lineage": name,
                        "layout": finding.layout,
                        "evidence": finding.evidence,
                        "note": note,
                    }
                )
    return out


def nearest_to(
    index: Index,
    read_side: ReadSide,
    rules: Sequence[str],
    states: States | None = None,
    match: Matcher | None = None,
) -> list[dict[str, Any]]:
    """The layouts that a checkpoint comes nearest to, of all known lineages, with what was found
    and what keeps them away.
    """
    match = match or Matcher(index, states)
    suits = suiting(config_of(read_side), match.has)
    known = find_packs_of(_folders(rules)).lineages(suits)[0].values()
    return [
        {
            "lineage": near.lineage,
            "layout": near.layout,
            "found": near.evidence,
            "against": near.against,
        }
        for near in nearest(known, index, read_side, states, match)
    ]


def apart(request: Request) -> list[Request]:
    """The request once for each layout that it leads to, with what it says of that layout's
    lineage; itself if it names none.

    Raises M5xx for unknown lineages and layouts, M115 for a start in a lineage without a goal.
    """
    if not request.to:
        return [request]
    lineages = lineages_asked_for(find_packs_of(request.folders), request)
    home = {
        text: resolve_goal(text, lineages, {}).lineage for text in (*request.to, *request.from_)
    }
    goals = {home[text] for text in request.to}
    for name in sorted({home[text] for text in request.from_} - goals):
        refuse_start_elsewhere(name)
    return [
        replace(request, to=(goal,), from_=tuple(t for t in request.from_ if home[t] == home[goal]))
        for goal in request.to
    ]


def lineages_of(request: Request) -> list[Lineage]:
    """The lineages in which the layouts lie that the request leads to."""
    lineages = lineages_asked_for(find_packs_of(request.folders), request)
    return [
        lineages[name]
        for name in dict.fromkeys(resolve_goal(text, lineages, {}).lineage for text in request.to)
    ]


def files_of(request: Request) -> list[LoadedFile]:
    """The rule files that the request may lead through: those given, or all of its lineages."""
    if request.files:
        return load_given_files(request)
    return [
        file
        for lineage in lineages_of(request)
        for edge in lineage.edges
        for file in load_edge(edge.files)
    ]
