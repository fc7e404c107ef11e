"""The text of `migrate plan --key`: one key of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import plural
from ..core.templates import collapse
from .render import SYMBOLS, capped, place, short
from .terminal import safe, size

INDENT = "     "


def key(doc: Mapping[str, Any]) -> str:
    """Where the key is, what is made of it or it of what, the steps between, and losses."""
    before, after = doc.get("before"), doc.get("after")
    where = "both" if before and after else "the source" if before else "the output"
    out = [safe(doc["key"])]
    for tensor, side in ((before, "source"), (after, "output")):
        if tensor:
            out.append(f"  in the {side}: {_spec(tensor)}")
    # with one edge its steps name the same tensors
    several = len({step["leg"] for step in doc["steps"]}) != 1
    unchanged = not doc["steps"] and where == "both"
    if unchanged:
        out.append("  no rule touches it")
    elif after:
        out += _list("made of", doc["sources"], "no tensor of the source", several)
    if before and not unchanged:
        out += _list("goes into", doc["outputs"], "nothing of the output", several)
    for step in doc["steps"]:
        out += _step(step)
    for loss in doc["losses"]:
        why = f" ({safe(loss['why'])})" if loss["why"] else ""
        out.append(f"  loss ({loss['kind']}): rule {safe(loss['rule'])}{why}")
    return "\n".join([*out, *([] if doc["losses"] else ["  losses: none"])])


def _spec(tensor: Mapping[str, Any]) -> str:
    return f"{short(safe(tensor['spec']))}, {size(tensor['bytes'])}"


def _list(what: str, tensors: Sequence[Mapping[str, Any]], nothing: str, listed: bool) -> list[str]:
    if not tensors:
        return [f"  {what}: {nothing}"]
    total = size(sum(tensor["bytes"] for tensor in tensors))
    head = f"  {what}: {plural(len(tensors), 'tensor')}, {total}"
    return [head, *(f"{INDENT}{line}" for line in _collapsed(tensors) if listed)]


def _collapsed(tensors: Sequence[Mapping[str, Any]]) -> list[str]:
    by_key = {tensor["key"]: tensor for tensor in tensors}
    lines = collapse(list(by_key), lambda key: str(by_key[key]["spec"]))
    return capped(
        [
            f"{safe(line.text)}{f'  ×{line.count:,}' if line.count > 1 else ''}  "
            f"{short(safe(by_key[line.sample]['spec']))}"
            for line in lines
        ]
    )


def _step(step: Mapping[str, Any]) -> list[str]:
    ops = " · ".join(map(safe, step["ops"])) or step["change"]
    rounds = "  (rounds)" if step["lossy"] else ""
    goes = safe(step["leg"]).replace(" -> ", " → ")
    head = f"{SYMBOLS[step['change']]:>2} {goes}: {ops}{rounds}"
    out = [head, *(f"{INDENT}{line}" for line in _collapsed(step["from"]))]
    if "to" in step:
        to = step["to"]
        out.append(f"{INDENT}→ {safe(to['key'])}  {short(safe(to['spec']))}, {size(to['bytes'])}")
    out.append(f"{INDENT}rule {safe(step['rule'])}, {place(safe(step['at'])).rpartition(':')[0]}")
    return [*out, *([f"{INDENT}{safe(step['why'])}"] if step["why"] else [])]
