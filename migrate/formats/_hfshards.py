"""The files that ranks leave where torch's HuggingFaceStorageWriter saves a part on each of them
(`save_distributed=True`) and does not put them together.

They are called `shard-00001-model-00001-of-00002.safetensors`, where the first number is the
rank's, from 1 on. A tensor has the same key in the file of every rank that holds a part of it, and
the metadata of each file has where its parts begin: `DCP_SHARDING_INFO` is JSON, {key:
{"saved_offsets": [...]}} (torch/distributed/checkpoint/filesystem.py, _hf_utils.py). What shape the
tensor has is written nowhere: it is what its parts reach together, as torch's reader has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import Report, fail, listed, plural, printable
from ..core.spec import spec
from ..source.blobs import ChunkedTensor, Stored, StoredTensor
from ..source.jsontext import parse
from ..source.paths import Folder, Place
from ..source.pickle.dcp_metadata import uncovered
from ..source.pickle.dcp_stream import SavedChunk
from ._header import SHARDING, Header

PREFIX = "shard-"
_NAME = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors", re.ASCII)
_NOTE = (
    "tensors are put together from {} of ranks, which do not record the whole shapes: each tensor "
    "is as large as its parts reach"
)


def are_shards(names: Sequence[str]) -> bool:
    """Whether all files are those of ranks."""
    return bool(names) and all(_NAME.fullmatch(name) for name in names)


def refuse_lone(place: Place, header: Header, label: str) -> None:
    """M915 for one file of a rank that is not all of the checkpoint."""
    others = [
        name
        for name in place.folder.names()
        if _NAME.fullmatch(name) and place.file is not None and name != place.file.name
    ]
    if (others and label.rpartition("/")[2].startswith(PREFIX)) or any(
        any(start) for start in _starts(header, label).values()
    ):
        fail(
            "M915",
            f"{label}: holds the parts of tensors that one rank had",
            notes=(f"there is {listed(others, 4)} beside it",) if others else (),
            help="give the path of the folder",
        )


def join_shards(
    folder: Folder, names: Sequence[str], headers: Sequence[Header]
) -> tuple[dict[str, StoredTensor], str]:
    """The tensors that the files of all ranks hold together, and a note. M915 naming those of which
    the parts do not fit.
    """
    report = Report()
    parts: dict[str, list[tuple[tuple[int, ...], Stored]]] = {}
    for name, header in zip(names, headers, strict=True):
        starts = _starts(header, folder.label(name))
        for key, stored in header.tensors.items():
            start = starts.get(key)
            if start is None or len(start) != len(stored.spec.shape):
                report.add(
                    "M915",
                    f"{folder.label(name)}: {SHARDING} does not say where its part of "
                    f"{printable(key)} begins",
                )
            else:
                parts.setdefault(key, []).append((start, stored))
    joined: dict[str, StoredTensor] = {}
    label = folder.label("")
    for key, held in parts.items():
        first = held[0][1].spec
        if any(
            stored.spec.dtype != first.dtype or len(start) != len(first.shape)
            for start, stored in held
        ):
            report.add("M915", f"{label}: {printable(key)}: its parts have different dtypes")
            continue
        chunks = [SavedChunk(start, stored.spec.shape) for start, stored in held]
        shape = tuple(
            max(start[dim] + stored.spec.shape[dim] for start, stored in held)
            for dim in range(len(first.shape))
        )
        if wrong := uncovered(shape, chunks):
            report.add("M915", f"{label}: {printable(key)}: {wrong}")
            continue
        held.sort(key=lambda one: one[0])
        full = [one for one in held if 0 not in one[1].spec.shape] or held[:1]
        if len(full) == 1:
            joined[key] = full[0][1]._replace(spec=spec(first.dtype, shape))
        else:
            joined[key] = ChunkedTensor(
                spec(first.dtype, shape),
                tuple(stored for _, stored in full),
                tuple(start for start, _ in full),
            )
    report.check()
    return joined, _NOTE.format(plural(len(names), "file"))


def _starts(header: Header, label: str) -> Mapping[str, tuple[int, ...]]:
    """Where the parts in a file begin, by key; M915 for anything else in its metadata."""
    text = header.metadata.get(SHARDING)
    found: dict[str, tuple[int, ...]] = {}
    if text is None:
        return found
    said: Any = parse(text.encode("utf-8", "surrogatepass"), f"{label}: {SHARDING}")
    for key, one in said.items() if type(said) is dict else ():
        start = one.get("saved_offsets") if type(one) is dict else None
        if type(start) is not list or any(type(n) is not int or not 0 <= n < 2**63 for n in start):
            fail("M915", f"{label}: {SHARDING} does not say where parts begin")
        found[key] = tuple(start)
    return found
