"""The `.metadata` that is written: torch unpickles it, and it reads as what it was made of."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch.distributed.checkpoint.metadata as torch_metadata

from migrate.core.errors import MigrateError
from migrate.source.pickle.dcp_emit import VERSION, emit_metadata
from migrate.source.pickle.dcp_metadata import (
    BytesEntry,
    Metadata,
    SavedChunk,
    SavedPart,
    TensorEntry,
    read_metadata,
)
from migrate.source.pickle.dcp_stream import read_stream


def entry(name: str, count: int, *, at: int, requires_grad: bool = False) -> TensorEntry:
    """A tensor of `count` chunks of one row each, which lie in a file of its own."""
    chunks = tuple(SavedChunk((n, 0), (1, 7)) for n in range(count))
    parts = tuple(SavedPart(f"__{at}_0.distcp", 900 * n, 900, ()) for n in range(count))
    return TensorEntry("bfloat16", (count, 7), requires_grad, None, chunks, parts)


def metadata(tensors: int, chunks: int = 1, values: int = 0, **changes: Any) -> Metadata:
    found = {
        f"t.{n}": entry(f"t.{n}", chunks, at=n, requires_grad=n % 2 == 0) for n in range(tensors)
    }
    others = {
        f"v.{n}": BytesEntry(SavedPart(f"__0_{n + 1}.distcp", 0, 400, ())) for n in range(values)
    }
    paths: dict[str, tuple[str | int, ...]] = {key: tuple(key.split(".")) for key in found}
    paths.update({key: ("v", number) for number, key in enumerate(others)})
    files = [part.file for one in found.values() for part in one.parts]
    files += [one.part.file for one in others.values()]
    made = {"planner": paths, "files": tuple(dict.fromkeys(files)), **changes}
    return Metadata(found, others, version=VERSION, megatron=False, **made)


def parts(made: Metadata) -> list[tuple[SavedPart, ...]]:
    return [
        *(one.parts for one in made.tensors.values()),
        *((b.part,) for b in made.bytes.values()),
    ]


@pytest.mark.parametrize(
    "made",
    [
        metadata(1),
        metadata(2, 3, 2),
        metadata(2500, 1, 1500),
        metadata(1000),
        metadata(4000, 2),
        metadata(1, 2500),
        metadata(3, planner=None),
        metadata(0, 1, 1),
        metadata(0),
    ],
    ids=lambda made: f"{len(made.tensors)}-{len(made.bytes)}",
)
def test_what_is_written_reads_as_it_was(made: Metadata) -> None:
    data = emit_metadata(made)
    assert read_metadata(data, "x") == made
    # by the reader that takes nothing but the pickler's own spelling, and leaves dicts of one pair
    # to the other
    single = 1 in (len(made.tensors) + len(made.bytes), sum(map(len, parts(made))))
    assert (read_stream(data) is None) == single
    found = pickle.load(io.BytesIO(data))
    assert type(found) is torch_metadata.Metadata
    assert found.planner_data == made.planner
    for key, one in made.tensors.items():
        theirs = found.state_dict_metadata[key]
        assert tuple(theirs.size) == one.shape
        assert theirs.properties.requires_grad == one.requires_grad
        assert [(tuple(c.offsets), tuple(c.sizes)) for c in theirs.chunks] == [*one.chunks]
        for chunk, part in zip(theirs.chunks, one.parts, strict=True):
            place = found.storage_data[torch_metadata.MetadataIndex(key, chunk.offsets)]
            assert (place.relative_path, place.offset, place.length) == part[:3]
    for key, value in made.bytes.items():
        assert type(found.state_dict_metadata[key]) is torch_metadata.BytesStorageMetadata
        place = found.storage_data[torch_metadata.MetadataIndex(key)]
        assert (place.relative_path, place.offset, place.length) == value.part[:3]


def test_entries_stand_in_the_order_of_their_paths() -> None:
    made = metadata(2, 1, 1)
    paths = {key: (made.planner or {})[key] for key in ("v.0", "t.1", "t.0")}
    data = emit_metadata(metadata(2, 1, 1, planner=paths))
    found = pickle.load(io.BytesIO(data))
    assert list(found.state_dict_metadata) == list(found.planner_data) == ["v.0", "t.1", "t.0"]


def test_scalars_transforms_and_large_files() -> None:
    part = SavedPart("__0_0.distcp", 5 << 40, 1 << 33, ("stream.zstd/1",))
    scalar = TensorEntry("float32", (), False, None, (SavedChunk((), ()),), (part,))
    made = Metadata({"größe": scalar}, {}, {"größe": ("größe",)}, ("__0_0.distcp",), VERSION, False)
    assert read_metadata(emit_metadata(made), "x") == made
    (place,) = pickle.load(io.BytesIO(emit_metadata(made))).storage_data.values()
    assert place.transform_descriptors == ["stream.zstd/1"]


def test_a_name_beyond_what_is_read_again_is_refused() -> None:
    key = "k" * ((1 << 20) + 1)
    with pytest.raises(MigrateError, match="M933"):
        emit_metadata(metadata(1, planner={"t.0": (key,)}))
