"""`migrate history --graph`: lineages with layouts and edges, for Mermaid or Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import plural
from .terminal import safe

FORMS = ("mermaid", "dot")
# what Mermaid reads as its own in a quoted label
_MERMAID = {ord(c): f"#{ord(c)};" for c in '#"<>&`;|[]{}()\\'}
_DOT = {ord("\\"): "\\\\", ord('"'): '\\"'}


def graph(doc: Mapping[str, Any], form: str) -> str:
    """The graph of a document of kind `history` or `lineages` whose edges are counted."""
    standing = doc.get("standing")
    lines = _mermaid if form == "mermaid" else _dot
    return "\n".join(lines([safe(lineage) for lineage in doc["lineages"]], standing))


def _marked(lineage: Mapping[str, Any], standing: Mapping[str, str] | None) -> str | None:
    """The layout that the checkpoint is in; without one the current layout."""
    if standing is not None:
        found = standing.get(lineage["name"])
        return None if found is None else safe(found)
    return next((x["name"] for x in lineage["layouts"] if x["status"] == "current"), None)


def _label(edge: Mapping[str, Any]) -> str:
    said = {True: "lossless", False: "not lossless", None: "params decide what is lost"}
    return f"{plural(edge['rules'], 'rule')}, {said[edge['lossless']]}"


def _mermaid(lineages: list[Any], standing: Mapping[str, str] | None) -> Iterator[str]:
    yield "flowchart LR"
    marked = []
    for number, lineage in enumerate(lineages):
        nodes = {x["name"]: f"n{number}_{at}" for at, x in enumerate(lineage["layouts"])}
        yield f'  subgraph g{number}["{lineage["name"].translate(_MERMAID)}"]'
        for name, node in nodes.items():
            yield f'    {node}["{name.translate(_MERMAID)}"]'
        for edge in lineage["edges"]:
            arrow = "-->" if edge["lossless"] else "-.->"
            yield f'    {nodes[edge["from"]]} {arrow}|"{_label(edge)}"| {nodes[edge["to"]]}'
        yield "  end"
        if (here := _marked(lineage, standing)) in nodes:
            marked.append(nodes[here])
    if marked:
        yield "  classDef here stroke-width:3px"
        yield f"  class {','.join(marked)} here"


def _dot(lineages: list[Any], standing: Mapping[str, str] | None) -> Iterator[str]:
    yield "digraph lineages {"
    yield "  rankdir=LR; node [shape=box];"
    for number, lineage in enumerate(lineages):
        nodes = {x["name"]: f"n{number}_{at}" for at, x in enumerate(lineage["layouts"])}
        here = _marked(lineage, standing)
        yield f"  subgraph cluster_{number} {{"
        yield f'    label="{lineage["name"].translate(_DOT)}";'
        for name, node in nodes.items():
            pen = ", penwidth=3" if name == here else ""
            yield f'    {node} [label="{name.translate(_DOT)}"{pen}];'
        for edge in lineage["edges"]:
            style = "" if edge["lossless"] else ", style=dashed"
            ends = f"{nodes[edge['from']]} -> {nodes[edge['to']]}"
            yield f'    {ends} [label="{_label(edge)}"{style}];'
        yield "  }"
    yield "}"
