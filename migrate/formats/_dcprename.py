"""Names of a distributed checkpoint that change without its data: a new `.metadata` over data files
that are copied as they are.

Chunks, archives, places and properties stay. What is dropped stays in the data files without a
name, so a checkpoint of which much is dropped is written anew, and so is one from which something
that was not read shall vanish.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from struct import pack
from typing import Any

from ..core.errors import printable
from ..source.index import Source
from ..source.paths import HISTORY, METADATA
from ..source.pickle.dcp_rename import NamedEntries, NewName
from ..source.pickle.nodes import JSON_SCALARS
from ..source.pickle.tree import Composite, TensorRecord
from ..source.target import OutputFile, Placed, Target, TargetTree
from ._dcpchunks import SPILLED
from ._dcpentries import Entries, SavedEntry

# data without a name that may stay, as one part of so many
MOST_UNNAMED = 10
_TENSORS = (TensorRecord, Composite)


def rename(
    source: Source, origins: Mapping[str, str], tree: TargetTree, stamp: str | None
) -> Target | None:
    """The source's files under the names that its entries have in `tree`; `origins` says of each
    tensor's key there which key it had. None where more changes than names, nesting and drops.

    The notes of the target say how much data stays without a name.
    """
    index = source.index
    if index.tree is None or index.outside or len(index.tree.parts) != 1:
        return None
    # ranks that save without collectives leave a file each, and one describes the output; what is
    # compressed is read, and written as it is
    if METADATA not in (source.identities() or {}) or SPILLED in index.files:
        return None
    label = printable(source.path, 240)
    entries = NamedEntries(source.side_file(METADATA), f"{label}: {METADATA}")
    names = _find_names(
        entries,
        Entries(index.tree.parts[0].root).saved,
        index.tree.names,
        Entries(tree.parts[0].root).saved,
        {number: origins.get(key) for number, key in tree.names.items()},
    )
    if names is None:
        return None
    total = sum(blob.size for blob in source.blobs)
    named = sum(nbytes for key, nbytes in entries.sizes.items() if key in names)
    dropped = sum(nbytes for key, nbytes in entries.sizes.items() if key not in names)
    if dropped * MOST_UNNAMED > total:
        return None
    notes = [f"only names change: the data files are copied as they are, and {METADATA} is new"]
    if total > named:
        notes.append(
            f"{total - named:,} bytes of the data files belong to no entry; they are copied too, "
            "unless the output is written anew"
        )
    files, whole = [], {}
    for number, (name, blob) in enumerate(zip(index.files, source.blobs, strict=True)):
        files.append(OutputFile(name, b"", (Placed(name, 0, blob.size),), blob.size))
        whole[name] = number
    small = {METADATA: entries.rename(names)}
    if stamp is not None:
        small[HISTORY] = stamp.encode()
    return Target(tuple(files), True, small, notes=tuple(notes), whole=whole)


def _find_names(
    entries: NamedEntries,
    before: list[SavedEntry],
    called: Mapping[int, str],
    after: list[SavedEntry],
    origins: Mapping[int, str | None],
) -> dict[str, NewName] | None:
    """The new name of each entry that stays, by its key; None where an entry is another one."""
    tensors = {_parts(e.value, called): e.key for e in before if type(e.value) in _TENSORS}
    values = {e.key: e.value for e in before if type(e.value) not in _TENSORS}
    objects = {id(value): key for key, value in values.items() if type(value) not in JSON_SCALARS}
    found = [
        tensors.get(_parts(entry.value, origins))
        if type(entry.value) in _TENSORS
        else _find_value(entry, values, objects)
        for entry in after
    ]
    spare = _find_spare(values, set(found))
    names: dict[str, NewName] = {}
    for entry, old in zip(after, found, strict=True):
        if old is None and type(entry.value) in JSON_SCALARS:
            alike = spare.get(_bits(entry.value))
            old = alike.pop() if alike else None
        if old is None or old not in entries.sizes or old in names:
            return None
        known = entries.planner if old == entry.key else None
        path = entry.path if known is None else known.get(old, entry.path)
        names[old] = NewName(entry.key, path)
    return names


def _parts(value: Any, names: Mapping[int, str | None]) -> Any:
    """What tells one tensor from another: the key that it had, and of one that is an object, how it
    is made and the keys that its parts had.
    """
    if type(value) is TensorRecord:
        return names.get(id(value))
    return id(value.node), *(names.get(id(record)) for _, record in value.components)


def _find_value(
    entry: SavedEntry, values: Mapping[str, Any], objects: Mapping[int, str]
) -> str | None:
    """The key that a value had: by the object that it is, else its own if that has this value."""
    if id(entry.value) in objects and values[objects[id(entry.value)]] is entry.value:
        return objects[id(entry.value)]
    if type(entry.value) not in JSON_SCALARS or entry.key not in values:
        return None
    was = values[entry.key]
    return entry.key if type(was) in JSON_SCALARS and _bits(was) == _bits(entry.value) else None


def _find_spare(values: dict[str, Any], used: Container[str | None]) -> dict[Any, list[str]]:
    """The keys of the plain values that stay under no name of their own, the first of them last, by
    what they are: which of several equal ones gets a new name is the same.
    """
    spare: dict[Any, list[str]] = {}
    for key, value in reversed(values.items()):
        if type(value) in JSON_SCALARS and key not in used:
            spare.setdefault(_bits(value), []).append(key)
    return spare


def _bits(value: Any) -> tuple[type, Any]:
    """What a plain value is, to the bit."""
    return type(value), pack("<d", value) if type(value) is float else value
