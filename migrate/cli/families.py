"""`migrate history`: the lineages of families of models, which are many, as one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import plural
from . import render
from .terminal import safe


def table(doc: Mapping[str, Any]) -> str:
    """The lineages that are for model types, one in a line, with their layouts."""
    rows = [["lineage", "layouts", "model types"]]
    for lineage in doc["lineages"]:
        if lineage["model_types"]:
            layouts = " → ".join(layout["name"] for layout in lineage["layouts"])
            rows.append([lineage["name"], layouts, ", ".join(lineage["model_types"])])
    return "\n".join(render.columns([[safe(cell) for cell in row] for row in rows], indent=""))


def listing(doc: Mapping[str, Any]) -> str:
    """All lineages with their layouts and edges, but for families, which are counted."""
    others = [lineage for lineage in doc["lineages"] if not lineage["family"]]
    families = len(doc["lineages"]) - len(others)
    out = render.history({**doc, "lineages": others})
    if families:
        out += f"\nand {plural(families, 'lineage')} for model types: migrate history --families"
    return out
