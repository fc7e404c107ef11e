"""The nested dict that the entries of a DCP folder came from, made again from `planner_data`.

torch flattens a state dict before it saves it: dicts, and lists that hold tensors or dicts, become
one flat dict, and `planner_data` has the path of each key: text for a dict's key, a number for a
place in a list (torch/distributed/checkpoint/_nested_dict.py, _traverse.py). What stood empty is
lost there. Where a list has no entry for a place, torch reads None, and so does this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import Report, listed, printable
from ..source.pickle.tree import DictNode, ListNode, joined


class _Inner(dict[Any, Any]):
    """A dict or a list that is being filled; no leaf is of this class."""


def build_tree(
    leaves: Mapping[str, Any],
    paths: Mapping[str, tuple[str | int, ...]] | None,
    label: str,
    report: Report,
) -> tuple[DictNode, list[str]]:
    """The tree with each leaf at its path, in the order of the paths, and the lists in which places
    are empty, by path. A key without a path stands at the root under its own name.

    Keys that collide once nested are M938 in `report`.
    """
    root = _Inner()
    paths = paths or {}
    for key in [*(key for key in paths if key in leaves), *(k for k in leaves if k not in paths)]:
        path = paths.get(key, (key,))
        here: Any = root
        for name in path[:-1]:
            below = here.get(name)
            if below is None:
                below = here[name] = _Inner()
            if type(below) is not _Inner:
                break
            here = below
        else:
            if path[-1] not in here:
                here[path[-1]] = leaves[key]
                continue
        report.add(
            "M938",
            f"{label}: {printable(key)}: another entry stands at its place "
            f"`{printable(joined(path, 200))}` in the nested dict",
        )
    gaps: list[str] = []
    made = _node(root, (), gaps)
    pairs = made.pairs if type(made) is DictNode else tuple(root.items())
    return DictNode("dict", tuple(pairs), None), gaps


def _node(value: Any, path: tuple[Any, ...], gaps: list[str]) -> Any:
    """The node of what was filled; paths are less than a hundred names long."""
    if type(value) is not _Inner:
        return value
    if path and all(type(name) is int for name in value):
        count = max(value) + 1
        if count > len(value):
            gaps.append(joined(path, 200))
        return ListNode(
            "list",
            tuple(
                _node(value[place], (*path, place), gaps) if place in value else None
                for place in range(count)
            ),
            None,
        )
    return DictNode(
        "dict",
        tuple((name, _node(held, (*path, name), gaps)) for name, held in value.items()),
        None,
    )


def gaps_note(gaps: list[str]) -> str:
    """The note on lists with places that no entry fills."""
    return f"lists with places that no entry fills, read as None: {listed(gaps, 4)}"
