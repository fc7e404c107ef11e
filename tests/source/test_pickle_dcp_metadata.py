"""`.metadata` files of torch.distributed.checkpoint, genuine and older, against the objects that
torch unpickles.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from migrate.core.errors import CheckpointError
from migrate.source.pickle import dcp_metadata
from migrate.source.pickle.dcp_stream import SavedPart

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def made(
    chunks: dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]],
    **fields: Any,
) -> Metadata:
    """Metadata of float32 tensors: key -> (shape, [(offsets, sizes)]), each chunk of 100 bytes
    after the other.
    """
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for key, (shape, boxes) in chunks.items():
        held = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size(shape), held
        )
        for number, (offsets, _) in enumerate(boxes):
            storage[MetadataIndex(key, offsets, number)] = _StorageInfo(
                "__0_0.distcp", 100 * len(storage), 100
            )
    return Metadata(tensors, storage_data=storage, **fields)


def read(
    metadata: Any, sizes: dict[str, int] | None = None, protocol: int = 4
) -> dcp_metadata.Metadata:
    return dcp_metadata.read_metadata(pickle.dumps(metadata, protocol), ".metadata", sizes)


def refused(metadata: Any, sizes: dict[str, int] | None = None) -> list[str]:
    """code: message of everything that is wrong, without the file's name."""
    with pytest.raises(CheckpointError) as caught:
        read(metadata, sizes)
    return [f"{d.code}: {d.message.removeprefix('.metadata: ')}" for d in caught.value.diagnostics]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp") / "ckpt"
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dtypes = [
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.uint16,
        torch.bool,
        torch.complex64,
        torch.int64,
    ]
    state = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
        "bytes": io.BytesIO(b"x"),
        "list": [torch.ones(1), 2], "empty": torch.empty(0, 3), "scalar": torch.tensor(1.5),
        "nothing": [],
        "many": {str(dtype): torch.zeros(8, dtype=torch.uint8).view(dtype) for dtype in dtypes},
        "cl": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }  # fmt: skip
    dcp.save(state, checkpoint_id=path)
    return path


def test_a_saved_folder_is_read_as_torch_reads_it(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    expected: Metadata = pickle.loads(data)
    found = dcp_metadata.read_metadata(
        data, ".metadata", {p.name: p.stat().st_size for p in folder.glob("*.distcp")}
    )
    tensors = {
        k: v
        for k, v in expected.state_dict_metadata.items()
        if isinstance(v, TensorStorageMetadata)
    }
    assert list(found.tensors) == list(tensors)
    assert list(found.bytes) == [k for k in expected.state_dict_metadata if k not in tensors]
    for key, value in tensors.items():
        entry = found.tensors[key]
        assert (f"torch.{entry.dtype}", entry.shape) == (
            str(value.properties.dtype),
            tuple(value.size),
        )
        assert [tuple(c) for c in entry.chunks] == [
            (tuple(c.offsets), tuple(c.sizes)) for c in value.chunks
        ]
        for chunk, part in zip(entry.chunks, entry.parts, strict=True):
            info = expected.storage_data[MetadataIndex(key, chunk.offsets)]
            assert part == SavedPart(info.relative_path, info.offset, info.length, ())
    for key, held in found.bytes.items():
        info = expected.storage_data[MetadataIndex(key)]
        assert held.part == SavedPart(info.relative_path, info.offset, info.length, ())
    assert found.planner == expected.planner_data
    assert (found.version, found.megatron, found.files) == (
        getattr(expected, "version", None),
        False,
        ("__0_0.distcp",),
    )


def test_its_index_has_the_specs_of_torch_and_begins_where_the_archives_do(folder: Path) -> None:
    found = dcp_metadata.read_metadata((folder / ".metadata").read_bytes(), ".metadata")
    index = found.index()
    state: dict[str, Any] = {}
    dcp.state_dict_loader._load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    flat = {
        key: value
        for key, value in flatten_state_dict(state)[0].items()
        if isinstance(value, torch.Tensor)
    }
    assert {k: (f"torch.{s.spec.dtype}", s.spec.shape) for k, s in index.tensors.items()} == {
        k: (str(t.dtype), tuple(t.shape)) for k, t in flat.items()
    }
    assert set(index.items) == set(found.bytes)
    assert index.nbytes == sum(t.nbytes for t in flat.values())
    for stored in index.tensors.values():
        with (folder / index.files[stored.blob]).open("rb") as file:
            file.seek(stored.offset)
            assert file.read(4) == b"PK\3\4"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_says_the_same(folder: Path, protocol: int) -> None:
    data = (folder / ".metadata").read_bytes()
    assert read(pickle.loads(data), protocol=protocol) == dcp_metadata.read_metadata(
        data, ".metadata"
    )


def test_chunks_of_a_sharded_tensor_and_their_places() -> None:
    boxes = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 1))]
    found = read(made({"w": ((4, 4), boxes)}))
    assert [tuple(chunk) for chunk in found.tensors["w"].chunks] == boxes
    assert [part.offset for part in found.tensors["w"].parts] == [0, 100, 200]


@contextmanager
def module(name: str, **held: Any) -> Iterator[None]:
    """A module by this name, with classes that say they come from it."""
    parents = [name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1)]
    before = {word: sys.modules.get(word) for word in (name, *parents)}
    for word in parents:
        sys.modules.setdefault(word, types.ModuleType(word))
    stub = types.ModuleType(name)
    for word, value in held.items():
        value.__module__, value.__qualname__, value.__name__ = name, word, word
        setattr(stub, word, value)
    sys.modules[name] = stub
    try:
        yield
    finally:
        for word, old in before.items():
            del sys.modules[word]
            if old is not None:
                sys.modules[word] = old


class Formats(enum.Enum):
    """The encoding of memory formats as torch has it."""

    CONTIGUOUS = 0
    CHANNELS_LAST = 1


class Properties:
    """TensorProperties whose state is whatever the test wants."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_old_names_of_torch_2_0_to_2_2_are_read(protocol: int) -> None:
    name = "torch.distributed._shard.sharded_tensor.metadata"
    metadata = made({"w": ((2,), [((0,), (2,))])})
    with module(name, TensorProperties=Properties, MEM_FORMAT_ENCODING=Formats):
        metadata.state_dict_metadata["w"].properties = Properties(
            torch.float16, torch.strided, True, Formats.CHANNELS_LAST, False
        )
        for field in ("storage_meta", "version"):
            metadata.__dict__.pop(field, None)
        data = pickle.dumps(metadata, protocol)
    found = dcp_metadata.read_metadata(data, "x")
    assert (found.tensors["w"].dtype, found.tensors["w"].requires_grad, found.version) == (
        "float16",
        True,
        None,
    )


def test_six_fields_of_torch_2_15_hold_the_strides() -> None:
    name = "torch.distributed.checkpoint.metadata"
    metadata = made({"w": ((2, 3), [((0, 0), (2, 3))]), "v": ((2, 3), [((0, 0), (2, 3))])})
    with module(
        name, TensorProperties=Properties, _MEM_FORMAT_ENCODING=Formats, **metadata_classes()
    ):
        for key, strides in (("w", (1, 2)), ("v", None)):
            fields = (torch.float32, torch.strided, False, Formats.CONTIGUOUS, False, strides)
            metadata.state_dict_metadata[key].properties = Properties(*fields)
        data = pickle.dumps(metadata, 4)
    found = dcp_metadata.read_metadata(data, "x")
    assert found.tensors["w"].strides == (1, 2)
    assert found.tensors["v"].strides is None


def metadata_classes() -> dict[str, type]:
    held = (
        Metadata,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        BytesStorageMetadata,
        MetadataIndex,
        StorageMeta,
    )
    return {cls.__name__: cls for cls in held}


def test_megatrons_root_and_the_plans_it_leaves_are_read() -> None:
    name = "megatron.core.dist_checkpointing.strategies.torch"

    class Root(Metadata):
        """MCoreMetadata."""

    metadata = made({"w": ((2,), [((0,), (2,))])})
    with module(name, MCoreMetadata=Root):
        root = Root(metadata.state_dict_metadata, storage_data=metadata.storage_data)
        root.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 1)}}  # type: ignore[attr-defined]
        root.all_local_plans = [[MetadataIndex("w")]]  # type: ignore[attr-defined]
        data = pickle.dumps(root, 4)
        root.mcore_data["w"] = os.mkdir  # type: ignore[attr-defined]
        hostile = pickle.dumps(root, 4)
    assert dcp_metadata.read_metadata(data, "x").megatron
    with pytest.raises(CheckpointError, match=r"M935.*posix\.mkdir"):
        dcp_metadata.read_metadata(hostile, "x")


@pytest.mark.parametrize("path", [Path("/home/me/ckpt"), PurePosixPath("a"), "s3://x", None])
def test_the_path_of_the_writer_is_read_over(path: Any) -> None:
    written = made({"w": ((2,), [((0,), (2,))])}, storage_meta=StorageMeta(path, "save"))
    # a field that torch 2.8 lacks
    written.__dict__["version"] = "1.0.0"
    found = read(written)
    assert "ckpt" not in str(found)
    assert found.version == "1.0.0"


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("never-made",)


def evil(place: str) -> Metadata:
    metadata = made(
        {"w": ((2,), [((0,), (2,))])}, planner_data={"w": ("w",)}, storage_meta=StorageMeta("x")
    )
    entry, info = metadata.state_dict_metadata["w"], next(iter(metadata.storage_data.values()))
    if place == "a value":
        metadata.state_dict_metadata["e"] = Evil()  # type: ignore[assignment]
    elif place == "planner":
        metadata.planner_data = {"w": ("w", Evil())}
    elif place == "the planner itself":
        metadata.planner_data = Evil()
    elif place == "storage meta":
        metadata.storage_meta = StorageMeta(Evil())  # type: ignore[arg-type]
    elif place == "modules":
        metadata.storage_meta = StorageMeta("x", modules=[Evil()])  # type: ignore[list-item]
    elif place == "size":
        entry.size = Evil()  # type: ignore[assignment]
    elif place == "a chunk":
        entry.chunks.append(Evil())
    elif place == "storage":
        metadata.storage_data[MetadataIndex("v")] = Evil()
    elif place == "a path":
        info.relative_path = Evil()
    elif place == "properties":
        entry.properties = Evil()  # type: ignore[assignment]
    elif place == "version":
        metadata.version = Evil()  # type: ignore[assignment]
    elif place == "a new field":
        metadata.extra = Evil()  # type: ignore[attr-defined]
    return metadata


PLACES = [
    "a value",
    "planner",
    "the planner itself",
    "storage meta",
    "modules",
    "size",
    "a chunk",
    "storage",
    "a path",
    "properties",
    "version",
    "a new field",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_call_in_any_place_is_refused_by_name(place: str) -> None:
    messages = refused(evil(place))
    assert any("posix.mkdir" in message for message in messages), messages
    assert not Path("never-made").exists()


def test_other_roots_are_refused() -> None:
    assert (
        refused(Evil())[0]
        == "M935: a name outside the allow-list: posix.mkdir; nothing was executed"
    )
    assert refused({"w": 1}) == ["M938: the root: a dict where Metadata belongs"]
    assert "where something else belongs" in refused(StorageMeta())[0]
    for data, code in (
        (b"", "M930"),
        (pickle.dumps(made({}), 0), "M930"),
        (pickle.dumps(made({}), 4)[:-1], "M930"),
    ):
        with pytest.raises(CheckpointError, match=code):
            dcp_metadata.read_metadata(data, "x")


def changed(**fields: Any) -> Metadata:
    """A good file with other fields of its one _StorageInfo."""
    metadata = made({"w": ((2,), [((0,), (2,))])})
    next(iter(metadata.storage_data.values())).__dict__.update(fields)
    return metadata


@pytest.mark.parametrize(
    "name",
    [
        "../x.distcp",
        "/etc/x.distcp",
        "a/b.distcp",
        "..",
        "",
        "x.bin",
        "a\\b.distcp",
        ".distcp",
        "~x.distcp",
        "a\n.distcp",
    ],
)
def test_a_name_that_is_no_plain_data_file_is_refused(name: str) -> None:
    (message,) = refused(changed(relative_path=name))
    assert message.startswith("M907: w: lies in ")


def test_places_outside_of_the_data_files_are_refused() -> None:
    sizes = {"__0_0.distcp": 100}
    assert read(changed(), sizes).tensors["w"].parts[0].length == 100
    assert refused(changed(length=101), sizes) == [
        "M938: w: ends at byte 101 of __0_0.distcp, which has 100"
    ]
    assert refused(changed(offset=-1)) == ["M938: w: lies at byte -1 with 100 bytes"]
    assert refused(changed(length=2**100)) == [
        "M938: w: lies at byte 0 with a number of more than 30 digits bytes"
    ]
    assert refused(changed(), {}) == ["M938: w: lies in __0_0.distcp, which is missing"]
    assert "does not say in which file" in refused(changed(offset="0"))[0]
    assert read(changed(transform_descriptors=["stream.zstd/1"])).tensors["w"].parts[
        0
    ].transforms == ("stream.zstd/1",)


def test_entries_that_share_bytes_are_refused() -> None:
    metadata = made({"a": ((2,), [((0,), (2,))]), "b": ((2,), [((0,), (2,))])})
    metadata.storage_data[MetadataIndex("b", (0,))].offset = 99
    assert refused(metadata) == ["M938: b: shares bytes of __0_0.distcp with a"]


def test_entries_without_a_partner_are_refused() -> None:
    metadata = made({"a": ((2,), [((0,), (2,))]), "b": ((2,), [((0,), (2,))])})
    del metadata.storage_data[MetadataIndex("a", (0,))]
    metadata.storage_data[MetadataIndex("c", (0,))] = _StorageInfo("__0_0.distcp", 900, 1)
    metadata.state_dict_metadata["d"] = BytesStorageMetadata()
    assert refused(metadata) == [
        "M938: a: nothing says where its chunk at [0] lies",
        "M938: d: nothing says where its bytes lie",
        (
            "M938: c: storage_data says where the chunk at [0] of this key lies, and no such entry "
            "exists"
        ),
    ]


def test_two_entries_for_one_chunk_are_refused() -> None:
    metadata = made({"a": ((2,), [((0,), (2,))])})
    index = MetadataIndex("a", (1,))
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 500, 1)
    # a dict does not notice when its key changes
    object.__setattr__(index, "offset", torch.Size([0]))
    assert refused(metadata) == ["M938: a: storage_data has two entries for the same chunk"]


def test_paths_of_the_nested_dict_that_collide_are_refused() -> None:
    keys = {"a": ("x", "a"), "b": ("x", "b")}
    chunks: Any = {key: ((2,), [((0,), (2,))]) for key in keys}

    def planned(**paths: Any) -> list[str]:
        return refused(made(chunks, planner_data={**keys, **paths}))

    assert read(made(chunks, planner_data=keys)).planner == keys
    assert planned(b=("x", "a")) == ["M938: b: planner_data gives it the path of a"]
    assert planned(b=("x", "a", "c")) == ["M938: a: planner_data puts other keys below it"]
    assert planned(b=("x", 0)) == [
        "M938: b: planner_data makes its parent a dict and a list at once"
    ]
    assert planned(b=("y", 10**9)) == [
        "M938: b: planner_data puts it at a place of a list beyond the 2 entries that there are"
    ]
    # what was empty is lost, and its place in a list is none
    assert read(made(chunks, planner_data={**keys, "b": ("y", 900)})).planner == {
        **keys,
        "b": ("y", 900),
    }
    assert planned(b=("y", -1)) == [
        "M938: b: planner_data puts it at a place of a list beyond the 2 entries that there are"
    ]
    assert planned(b=("y",) * 65) == [
        "M938: b: planner_data has a path of 65 parts; at most 64 are allowed"
    ]
    assert planned(c=("y",)) == ["M938: c: planner_data has a path for a key that does not exist"]
    assert planned(b=()) == ["M938: b: planner_data has no path of names and numbers for it"]
    assert planned(b=("y", True)) == [
        "M938: b: planner_data has no path of names and numbers for it"
    ]


def test_lists_that_hold_almost_nothing_are_refused() -> None:
    """Each place is within the number of entries, and all lists together would have 4,000,000."""
    count = 2000
    chunks: Any = {f"k{n}": ((2,), [((0,), (2,))]) for n in range(count)}
    sparse = {key: (key, count - 1) for key in chunks}
    (problem,) = refused(made(chunks, planner_data=sparse))
    assert problem == (
        "M938: k0: planner_data puts it at a place of a list beyond the 2,000 entries that there "
        "are"
    )
    dense = {key: ("y", n // 10, n % 10) for n, key in enumerate(chunks)}
    assert read(made(chunks, planner_data=dense)).planner == dense


def test_sizes_that_are_none_are_refused() -> None:
    def sized(size: Any) -> str:
        metadata = made({"w": ((2,), [((0,), (2,))])})
        metadata.state_dict_metadata["w"].size = size
        return refused(metadata)[0]

    assert "negative" in sized((-2,))
    assert "too large" in sized((2**63,))
    assert "at most 64" in sized((1,) * 65)
    assert "where a torch.Size" in sized("2")
    assert "at most 2^50" in sized((2**51,))


def test_everything_wrong_is_said_at_once_and_counted() -> None:
    metadata = made({f"k{i}": ((4,), [((0,), (2,))]) for i in range(60)})
    messages = refused(metadata)
    assert len(messages) == 21
    assert messages[0] == "M938: k0: its chunks hold 2 of 4 elements: there is a hole"
    assert messages[-1] == "M938: 40 more contradictions like these"
