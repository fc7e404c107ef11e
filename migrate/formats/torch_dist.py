"""Megatron's `torch_dist`: a folder of torch.distributed.checkpoint with `metadata.json`, which
says how it is stored, and `common.pt`, with all values that no rank has for itself.

Entries get the keys that the model has (`_dcpmegatron`), and stand in the tree of Megatron's other
format: its arguments and counters, `model`, the state of generators.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn

from ..core.errors import MigrateError, fail, listed, printable
from ..source.index import Source
from ..source.jsontext import parse
from ..source.paths import METADATA, Place, metadata_files
from ..source.target import Target, TargetTree
from ._dcpmegatron import arrange
from ._megatron import iteration_note
from .base import SURE
from .dcp import COMMON, DATA, MARKER, EntryArrangement, open_folder, refuse_without_metadata

# of `metadata.json`; Megatron's has 119
_MOST_BYTES = 1 << 16
_BACKEND = "sharded_backend"
# what is read: each field with its values
_READ: Final[Mapping[str, tuple[Any, ...]]] = {
    _BACKEND: ("torch_dist",),
    "sharded_backend_version": (1,),
    "common_backend": ("torch",),
    "common_backend_version": (1,),
}


class TorchDist:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "torch_dist"

    def sniff(self, place: Place) -> int:
        names = place.names if place.file is None else place.folder.names()
        if MARKER not in names or (place.file is not None and place.file.name != METADATA):
            return 0
        if COMMON in names and METADATA in names:
            return SURE
        # anybody may call a file so
        try:
            said = _read_marker(place)
        except MigrateError:
            return 0
        return SURE * (type(said) is dict and _BACKEND in said)

    def open(self, place: Place) -> Source:
        """The checkpoint in a folder: M914 and M937 where it is not as Megatron leaves it, and what
        the format `dcp` refuses.
        """
        folder = place.folder
        label, names = folder.label(""), folder.names()
        said = _read_marker(place)
        if type(said) is not dict or type(said.get(_BACKEND)) is not str:
            fail(
                "M937",
                f"{folder.label(MARKER)}: does not say by `{_BACKEND}` how Megatron stored the "
                "checkpoint",
                help="fetch it again",
            )
        for field, known in _READ.items():
            value = said.get(field, known[0])
            if not any(type(value) is type(one) and value == one for one in known):
                _refuse_backend(folder.label(MARKER), field, value)
        if place.file is not None:
            place.file.close()
        if not metadata_files(names):
            if not any(name.endswith(DATA) for name in names):
                fail(
                    "M937",
                    f"{label}: Megatron's checkpoint without its `{METADATA}` and data files",
                    notes=(f"it holds {listed(names, 4)}",),
                    help="saving it was interrupted, or it was copied in part: take an earlier "
                    "checkpoint, or fetch it again",
                )
            refuse_without_metadata(place)
        if COMMON not in names:
            fail(
                "M937",
                f"{label}: Megatron's checkpoint without its `{COMMON}`, which has the arguments "
                "of the model",
                help="fetch it again, or take an earlier checkpoint",
            )
        source = open_folder(place, self.name, EntryArrangement(COMMON, (MARKER,), arrange))
        iteration = source.index.items.get("iteration")
        notes = iteration_note(folder.called, iteration) + source.index.notes
        source.index = replace(source.index, notes=notes)
        return source

    def describe(
        self,
        specs: Mapping[str, Any],
        *,
        folder: bool,
        max_shard_size: int,
        stamp: str | None,
        tree: TargetTree | None = None,
        **asked: Any,
    ) -> Target:
        from ._torchdistwrite import describe

        return describe(specs, folder=folder, max_shard_size=max_shard_size, stamp=stamp, tree=tree)


FORMAT = TorchDist()


def _read_marker(place: Place) -> Any:
    """The value in `metadata.json`; M906 and M914 unless it is JSON of a sensible size."""
    blob = place.folder.open(MARKER)
    try:
        label = place.folder.label(MARKER)
        if blob.size > _MOST_BYTES:
            fail("M914", f"{label}: has {blob.size:,} bytes, allowed are {_MOST_BYTES:,}")
        return parse(bytes(blob.read(0, blob.size)), label)
    finally:
        blob.close()


def _refuse_backend(label: str, field: str, value: Any) -> NoReturn:
    fail(
        "M937",
        f"{label}: `{field}` is {printable(repr(value), 80)}, and only "
        f"{listed(list(map(repr, _READ[field])))} is read",
        help="load the checkpoint with Megatron and save it as `torch_dist`",
    )
