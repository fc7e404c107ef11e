"""The `.metadata` of torch.distributed.checkpoint with other names for its entries: chunks, places,
properties and all else stay as they were written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.errors import fail
from ..jsontext import collector_paused
from .emit import emit
from .machine import read_pickle
from .nodes import METADATA, Call, Dict

_ENTRIES, _PATHS, _PLACES = "state_dict_metadata", "planner_data", "storage_data"


class NewName(NamedTuple):
    """What an entry is called from now on: its flat key, and its path in the nested dict."""

    key: str
    path: tuple[str | int, ...]


def rename_entries(data: bytes, label: str, names: Mapping[str, NewName]) -> bytes:
    """The file with each entry under its new name, in the order of `names`; the other entries are
    left out. `names` are the new names by flat key.

    `data` has been read by `read_metadata` before: what does not look like it is M938.
    """
    root = read_pickle(data, METADATA, name=label)
    with collector_paused():
        state: Any = root.state if type(root) is Call else None
        fields = dict(state.pairs) if type(state) is Dict else {}
        entries, paths, places = (fields.get(name) for name in (_ENTRIES, _PATHS, _PLACES))
        if (
            type(entries) is not Dict
            or type(places) is not Dict
            or type(paths) not in (Dict, type(None))
        ):
            fail("M938", f"{label}: not the metadata of a checkpoint")
        held = dict(entries.pairs)
        entries.pairs = [(new.key, held[old]) for old, new in names.items()]
        places.pairs = [pair for pair in places.pairs if _rename_place(pair[0], names)]
        # without paths every key is its own path, and a reader needs none
        if paths is not None or any(new.path != (new.key,) for new in names.values()):
            made = Dict([(new.key, new.path) for new in names.values()])
            state.pairs = [(name, made if name == _PATHS else value) for name, value in state.pairs]
            if _PATHS not in fields:
                state.pairs.append((_PATHS, made))
    return emit(root, name=label, limits=METADATA)


def _rename_place(index: Any, names: Mapping[str, NewName]) -> bool:
    """Gives a MetadataIndex the new key of its entry; whether there is one."""
    fields: Sequence[tuple[Any, Any]] = index.state.pairs
    new = names.get(next(value for name, value in fields if name == "fqn"))
    if new is not None:
        index.state.pairs = [(name, new.key if name == "fqn" else value) for name, value in fields]
    return new is not None
