"""The `__{rank}.metadata` of a checkpoint that was saved without collectives, as one `.metadata`.

Each rank then describes what it wrote, and no file describes all of it
(torch/distributed/checkpoint/filesystem.py, `use_collectives`). The chunks of all ranks together
are the tensors. What several ranks wrote, as they do what is replicated, is in each of their files;
the first is taken, and the others have to hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.errors import printable
from .dcp_stream import MetadataContents, SavedCopy
from .decoding import StreamProblems


def merge_contents(
    files: Mapping[str, MetadataContents], problems: StreamProblems
) -> tuple[MetadataContents, tuple[SavedCopy, ...]]:
    """What the files of all ranks say together, by their names, and what several ranks wrote.

    Adds an M938 for each key of which two of them say different things.
    """
    merged = MetadataContents({}, [], {}, {}, None)
    tensors: dict[str, Any] = {}
    others: dict[str, None] = {}
    planner: dict[str, tuple[str | int, ...]] = {}
    storage = merged.storage
    copies: list[SavedCopy] = []
    whose: dict[Any, str] = {}

    def differ(key: str, name: str, what: str) -> None:
        first = printable(whose[key])
        problems.add("M938", f"{printable(key)}: {what} in {first} and in {printable(name)}")

    for name, contents in files.items():
        for key, (*kind, chunks) in contents.tensors.items():
            whose.setdefault(key, name)
            known = tensors.setdefault(key, (*kind, []))
            if key in others:
                differ(key, name, "is a tensor and another value")
            elif list(known[:4]) != kind:
                differ(key, name, "has another dtype, shape, requires_grad or strides")
            known[4].extend(chunk for chunk in chunks if chunk not in known[4])
        for key in contents.others:
            whose.setdefault(key, name)
            others[key] = None
            if key in tensors:
                differ(key, name, "is a tensor and another value")
        for where, part in contents.storage.items():
            if where in storage:
                copies.append(SavedCopy(*where, storage[where], part))
            else:
                storage[where] = part
        for key, path in (contents.planner or {}).items():
            whose.setdefault(key, name)
            if planner.setdefault(key, path) != path:
                differ(key, name, "has another path in planner_data")
    made = merged._replace(
        tensors=tensors,
        others=list(others),
        planner=planner if any(one.planner is not None for one in files.values()) else None,
        megatron=any(one.megatron for one in files.values()),
        reformed=tuple(key for one in files.values() for key in one.reformed),
        version=next((one.version for one in files.values() if one.version is not None), None),
    )
    return made, tuple(copies)
