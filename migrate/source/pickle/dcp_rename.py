"""The `.metadata` of torch.distributed.checkpoint with other names for its entries: chunks, places,
properties and all else stay as they were written.

A file that is spelled as Python's pickler spells it is read once more by `dcp_stream`, this time
with what nothing else has a use for, and written by `dcp_emit`. Any other goes through the machine,
which takes ten times as long, and the general writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...core.errors import fail
from ..jsontext import collector_paused
from .dcp_emit import stream_of
from .dcp_metadata import read_metadata
from .dcp_stream import read_whole_stream
from .emit import emit
from .machine import read_pickle
from .nodes import METADATA, Call, Dict

_ENTRIES, _PATHS, _PLACES = "state_dict_metadata", "planner_data", "storage_data"


class NewName(NamedTuple):
    """What an entry is called from now on: its flat key, and its path in the nested dict."""

    key: str
    path: tuple[str | int, ...]


class NamedEntries:
    """The entries of a `.metadata` file that `read_metadata` has read before, to be renamed.

    `planner` are the paths of their keys, None without any. `sizes` are the bytes of each entry, by
    its key.
    """

    def __init__(self, data: bytes, label: str) -> None:
        self._data, self._label = data, label
        self.sizes: dict[str, int] = {}
        with collector_paused():
            self._whole = read_whole_stream(data)
            if self._whole is not None:
                contents, _ = self._whole
                self.planner = contents.planner
                for (key, _), part in contents.storage.items():
                    self.sizes[key] = self.sizes.get(key, 0) + part.length
            else:
                metadata = read_metadata(data, label)
                self.planner = metadata.planner
                for key, entry in metadata.tensors.items():
                    self.sizes[key] = sum(part.length for part in entry.parts)
                for key, value in metadata.bytes.items():
                    self.sizes[key] = value.part.length

    def rename(self, names: Mapping[str, NewName]) -> bytes:
        """The file with each entry under its new name, in the order of `names`; the other entries
        are left out. `names` are the new names by flat key.

        What does not look like the file of a checkpoint is M938.
        """
        # without paths every key is its own path, and a reader needs none
        planner: dict[str, tuple[str | int, ...]] | None = None
        if self.planner is not None or any(new.path != (new.key,) for new in names.values()):
            planner = dict(names.values())
        if self._whole is None:
            return _rename_nodes(self._data, self._label, names, planner)
        contents, rest = self._whole
        keys = {old: new.key for old, new in names.items()}
        return stream_of(lambda writer: writer.write_contents(contents, rest, keys, planner))


def _rename_nodes(
    data: bytes,
    label: str,
    names: Mapping[str, NewName],
    planner: Mapping[str, tuple[str | int, ...]] | None,
) -> bytes:
    """The same for a file that is spelled in any way."""
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
        if planner is not None:
            made = Dict([*planner.items()])
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
