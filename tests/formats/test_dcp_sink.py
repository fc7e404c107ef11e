"""What is written as a distributed checkpoint: torch is the reader, and the measure of what is cut,
nested and lost.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch_compare import raw, same

import migrate
from migrate import formats
from migrate.core.errors import MigrateError, RunError
from migrate.core.spec import BITS, PACKED, spec
from migrate.formats.dcp import FORMAT
from migrate.running import tiles
from migrate.running.evaluator import Evaluator
from migrate.source.pickle.dcp_metadata import Metadata, read_metadata
from migrate.source.pickle.tree import ITEMSIZE
from migrate.source.tree import object_encodings

DTYPES = sorted(one for one in ITEMSIZE if one in (*BITS, PACKED) and hasattr(torch, one))


def written(folder: Path, value: Any, **options: Any) -> Path:
    """The folder that migrate makes of a file of torch.save with this value."""
    source = folder / "in.pt"
    torch.save(value, source)
    migrate.apply(source, folder / "out", output_format="dcp", **options)
    return folder / "out"


def metadata(folder: Path) -> Metadata:
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    return read_metadata((folder / ".metadata").read_bytes(), ".metadata", sizes)


def loaded(folder: Path, target: dict[str, Any]) -> dict[str, Any]:
    """The target as stock torch fills it, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    return target


def unpacked(folder: Path) -> Any:
    """What torch's own converter makes of the folder."""
    path = folder.with_suffix(".converted")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=True)


def saved_by_torch(folder: Path, value: dict[str, Any]) -> Metadata:
    """What torch itself says of the value where it saves it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(value, storage_writer=FileSystemWriter(folder), no_dist=True)
    return metadata(folder)


def archives(folder: Path) -> list[bytes]:
    """The archives of all entries, one for each chunk."""
    found = metadata(folder)
    parts = [part for entry in found.tensors.values() for part in entry.parts]
    parts += [entry.part for entry in found.bytes.values()]
    files = {name: (folder / name).read_bytes() for name in {part.file for part in parts}}
    return [files[p.file][p.offset : p.offset + p.length] for p in parts]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape).to(dtype)


def nested() -> dict[str, Any]:
    """A state as training scripts save it, without what a distributed checkpoint cannot hold."""
    return {
        "model": {"a.weight": numbers(10, 4), "b": numbers(5), "step": torch.tensor(3.0)},
        "optimizer": {
            "state": {"a.weight": {"exp_avg": numbers(10, 4) + 1, "step": torch.tensor(7.0)}},
            "param_groups": [
                {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.weight"]},
                {"lr": 0.2, "fused": None, "params": []},
            ],
        },
        "epoch": 3,
        "name": "größe",
        "losses": [1.5, float("inf")],
        "mixed": [numbers(2), "text", [numbers(3), 1]],
        "pair": (1, {"x": [2]}),
        "empty list": [],
        "seen": {"a": {"b": {"c": True}}},
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_reads_every_dtype(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    value = torch.arange(6 * 4 * kind.itemsize, dtype=torch.uint8)
    if dtype == "bool":
        value = value % 2
    made = {"w": value.view(kind).reshape(6, 4), "line": value[: 5 * kind.itemsize].view(kind)}
    out = written(tmp_path, made, chunks=4)
    assert [chunk.sizes for chunk in metadata(out).tensors["w"].chunks] == [(2, 4)] * 3
    target = {key: torch.empty(one.shape, dtype=kind) for key, one in made.items()}
    if dtype == PACKED:
        # torch copies no such tensor
        whole = [torch.load(io.BytesIO(a), weights_only=True) for a in archives(out)]
        assert {one.dtype for one in whole} == {kind}
        held = b"".join(map(raw, whole))
        assert held == raw(made["w"]) + raw(made["line"])
        return
    same(loaded(out, target), made)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8, 9])
def test_tensors_are_cut_as_torch_chunks_them(rows: int, chunks: int, tmp_path: Path) -> None:
    made = {"w": numbers(rows, 3), "line": numbers(rows)}
    out = written(tmp_path, made, chunks=chunks)
    found = metadata(out)
    for key, value in made.items():
        entry = found.tensors[key]
        sizes = [tuple(part.shape) for part in torch.chunk(value, chunks)]
        assert [chunk.sizes for chunk in entry.chunks] == sizes
        starts = [sum(size[0] for size in sizes[:n]) for n in range(len(sizes))]
        assert [chunk.offsets[0] for chunk in entry.chunks] == starts
        assert [part.file for part in entry.parts] == [f"__{n}_0.distcp" for n in range(len(sizes))]
    same(loaded(out, {key: torch.zeros_like(one) for key, one in made.items()}), made)
    same(unpacked(out), made)


def test_what_cannot_be_cut_is_whole_and_lies_with_rank_0(tmp_path: Path) -> None:
    made = {
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 5),
        "flat": torch.empty(3, 0, 2),
        "w": numbers(4, 2),
        "value": "text",
    }
    out = written(tmp_path, made, chunks=3)
    found = metadata(out)
    for key in ("scalar", "none", "flat"):
        (chunk,), (part,) = found.tensors[key].chunks, found.tensors[key].parts
        assert (chunk.sizes, part.file) == (tuple(made[key].shape), "__0_0.distcp")
    assert found.bytes["value"].part.file == "__0_0.distcp"
    same(unpacked(out), made)


def test_without_chunks_a_file_is_no_larger_than_asked(tmp_path: Path) -> None:
    made = {"big": numbers(100, 10), "small": numbers(3), "wide": numbers(2, 500)}
    out = written(tmp_path, made, max_shard_size=1000)
    found = metadata(out)
    assert [chunk.sizes for chunk in found.tensors["big"].chunks] == [(25, 10)] * 4
    # a row is never cut
    assert [chunk.sizes for chunk in found.tensors["wide"].chunks] == [(1, 500)] * 2
    names = [part.file for entry in found.tensors.values() for part in entry.parts]
    assert names == [f"__0_{n}.distcp" for n in (0, 1, 2, 3, 4, 5, 6)]
    assert sorted(path.name for path in out.iterdir()) == [
        ".metadata",
        *names,
        "migrate.history.json",
    ]
    same(loaded(out, {key: torch.zeros_like(one) for key, one in made.items()}), made)


def test_without_chunks_a_chunk_has_at_most_512_mib() -> None:
    specs = {
        "w": spec("bfloat16", (100_000, 8192)),
        "wide": spec("bfloat16", (3, 300_000_000)),
        "small": spec("float32", (7, 3)),
    }
    target = FORMAT.describe(specs, folder=True, max_shard_size=5 * 10**9, metadata={}, stamp=None)
    sizes = {file.name: file.size for file in target.files}
    found = read_metadata(target.small[".metadata"], "x", sizes)
    assert {key: [c.sizes for c in entry.chunks] for key, entry in found.tensors.items()} == {
        "w": [(32_768, 8192)] * 3 + [(1696, 8192)],
        # a row is never cut
        "wide": [(1, 300_000_000)] * 3,
        "small": [(7, 3)],
    }


def test_a_rank_goes_on_in_another_file(tmp_path: Path) -> None:
    made = {f"w{n}": numbers(4, 10) for n in range(3)}
    out = written(tmp_path, made, chunks=2, max_shard_size=160)
    found = metadata(out)
    files = [[part.file for part in entry.parts] for entry in found.tensors.values()]
    assert files == [
        ["__0_0.distcp", "__1_0.distcp"],
        ["__0_0.distcp", "__1_0.distcp"],
        ["__0_1.distcp", "__1_1.distcp"],
    ]
    same(unpacked(out), made)


@pytest.mark.parametrize("options", [{}, {"chunks": 3}])
def test_archives_are_sound_and_torch_maps_them(options: dict[str, Any], tmp_path: Path) -> None:
    out = written(tmp_path, nested(), **options)
    found = archives(out)
    assert len(found) > 20
    for number, data in enumerate(found):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert all(info.CRC or not info.file_size for info in archive.infolist())
        (tmp_path / f"{number}.pt").write_bytes(data)
        value = torch.load(tmp_path / f"{number}.pt", mmap=True, weights_only=True)
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() % 64 == 0
    # nothing lies between them
    assert sum(map(len, found)) == sum(path.stat().st_size for path in out.glob("*.distcp"))


def test_entries_paths_and_flags_are_those_that_torch_writes(tmp_path: Path) -> None:
    ours, theirs = (
        metadata(written(tmp_path, nested())),
        saved_by_torch(tmp_path / "torch", nested()),
    )
    assert ours.planner == theirs.planner
    assert ours.bytes.keys() == theirs.bytes.keys()
    # torch 2.8 names no version of its format yet
    assert theirs.version in (None, ours.version)
    for key, entry in theirs.tensors.items():
        mine = ours.tensors[key]
        assert (mine.dtype, mine.shape, mine.requires_grad) == (
            entry.dtype,
            entry.shape,
            entry.requires_grad,
        )
        assert mine.chunks == entry.chunks
    assert list(ours.tensors) == [key for key in ours.planner or () if key in ours.tensors]


@pytest.mark.parametrize("options", [{}, {"chunks": 2}])
def test_nested_values_come_back_as_they_were(options: dict[str, Any], tmp_path: Path) -> None:
    out = written(tmp_path, nested(), **options)
    same(unpacked(out), nested())
    target = nested()
    for value in (target["model"]["a.weight"], target["mixed"][0]):
        value.zero_()
    target["epoch"] = 0
    target["optimizer"]["param_groups"][0]["lr"] = 0.0
    same(loaded(out, target), nested())


def test_values_and_nesting_come_back_by_way_of_safetensors(tmp_path: Path) -> None:
    torch.save(nested(), tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "hub", output_format="safetensors")
    migrate.apply(tmp_path / "hub", tmp_path / "out", output_format="dcp", chunks=2)
    same(unpacked(tmp_path / "out"), nested())
    (tmp_path / "direct").mkdir()
    direct = metadata(written(tmp_path / "direct", nested(), chunks=2))
    assert metadata(tmp_path / "out").planner == direct.planner


def leaves() -> st.SearchStrategy[Any]:
    tensors = st.integers(0, 3).map(lambda rows: numbers(rows, 2))
    return tensors | st.none() | st.booleans() | st.integers() | st.text(max_size=3)


def containers(held: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # few keys, of which some are one once they are joined
    keys = st.sampled_from(["a", "b", "a.b", "", "0", 0, 1])
    return (
        st.dictionaries(keys, held, max_size=3)
        | st.lists(held, max_size=3)
        | st.lists(held, max_size=2).map(tuple)
    )


def merges(value: Any) -> bool:
    """Whether keys of one dict are one as text, which torch does not refuse."""
    if isinstance(value, dict):
        return len(set(map(str, value))) < len(value) or any(map(merges, value.values()))
    return isinstance(value, list) and any(map(merges, value))


@given(value=st.recursive(leaves(), containers, max_leaves=8))
def test_whatever_is_nested_is_taken_apart_as_torch_does(
    value: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, made = tmp_path_factory.mktemp("any"), {"model": {"w": numbers(2)}, "rest": value}
    try:
        flat, paths = flatten_state_dict(made)
    except ValueError:
        paths = None
    if paths is None or merges(value):
        with pytest.raises(MigrateError, match=r"M916.*two entries each"):
            written(folder, made, at="model")
        return
    out = written(folder, made, at="model")
    assert metadata(out).planner == paths
    back = unflatten_state_dict(flat, paths)
    # torch loads no list that has lost all its dicts
    if flatten_state_dict(back)[1] == paths:
        same(unpacked(out), back)
    assert migrate.verify(out, source=folder / "in.pt", at="model").equal


def test_a_value_that_is_shared_is_a_value_in_each_place(tmp_path: Path) -> None:
    betas = (0.9, 0.999)
    made = {
        "model": {"w": numbers(2)},
        "groups": [{"betas": betas}, {"betas": betas, "more": [betas]}],
    }
    out = written(tmp_path, made)
    same(unpacked(out), made)
    assert migrate.verify(out, source=tmp_path / "in.pt").equal
    assert migrate.diff(out, tmp_path / "in.pt").equal


def test_what_requires_grad_still_does(tmp_path: Path) -> None:
    made = {"a": numbers(3).requires_grad_(), "b": numbers(3), "c": nn.Parameter(numbers(4))}
    torch.save(made, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="dcp")
    flags = {key: entry.requires_grad for key, entry in metadata(tmp_path / "out").tensors.items()}
    assert flags == {"a": True, "b": False, "c": True}
    properties = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {key: one.properties.requires_grad for key, one in properties.items()} == flags
    assert [note for note in answer.notes if "class" in note] == [
        "a distributed checkpoint has no place for classes and attributes of tensors: c"
    ]
    # by way of a format that has no such flag, and cut anew
    migrate.apply(tmp_path / "out", tmp_path / "between", output_format="safetensors")
    migrate.apply(tmp_path / "between", tmp_path / "again", output_format="dcp", chunks=2)
    found = metadata(tmp_path / "again").tensors
    assert {key: entry.requires_grad for key, entry in found.items()} == flags


def test_tensors_in_tuples_go_with_them(tmp_path: Path) -> None:
    shared = numbers(6)
    made = {"w": numbers(4, 2), "pair": (shared, {"again": shared, "other": numbers(2, 2)}, "x")}
    out = written(tmp_path, made, chunks=2)
    found = unpacked(out)
    same(found, made)
    assert found["pair"][0].data_ptr() == found["pair"][1]["again"].data_ptr()
    assert list(metadata(out).bytes) == ["pair"]


def test_one_dict_in_two_places_is_written_in_both(tmp_path: Path) -> None:
    state = {"w": numbers(8, 2), "b": numbers(3)}
    made = {"model": state, "ema": state, "tied": state["w"]}
    torch.save(made, tmp_path / "in.pt")
    answer = migrate.apply(
        tmp_path / "in.pt", tmp_path / "out", at="model", output_format="dcp", chunks=3
    )
    same(unpacked(tmp_path / "out"), made)
    assert answer.path


RULE = """
id: demo/2/cast
title: Cast what is float32
lineage: demo
edge: ["1", "2"]
keep: [b]
rules:
  - name: cast
    from: w
    to: v
    via: [{cast: {to: bfloat16, from: float32}}]
"""


@pytest.mark.parametrize("options", [{}, {"chunks": 3}, {"chunks": 3, "threads": 4}])
def test_what_is_computed_is_cut_and_done_with_once(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    done = Evaluator.done

    def noted(self: Evaluator, tensor: Any) -> None:
        ended.append(tensor)
        done(self, tensor)

    monkeypatch.setattr(Evaluator, "done", noted)
    state = {"w": torch.randn(3000, 700), "b": numbers(3)}
    torch.save({"model": state, "ema": state}, tmp_path / "in.pt")
    (tmp_path / "rule.yaml").write_text(RULE)
    answer = migrate.apply(
        tmp_path / "in.pt",
        tmp_path / "out",
        rules=tmp_path / "rule.yaml",
        allow="lossy",
        output_format="dcp",
        **options,
    )
    new = {"v": state["w"].bfloat16(), "b": state["b"]}
    same(unpacked(tmp_path / "out"), {"model": new, "ema": new})
    # the output, and the copy of it that stands in the other dict
    assert len(ended) == len(set(map(id, ended))) > 1
    assert answer.report is not None
    (tensor,) = answer.report.tensors
    assert tensor.elements == 3000 * 700


def test_a_tensor_in_a_tuple_and_beside_it_is_written_twice(tmp_path: Path) -> None:
    shared = numbers(8, 2)
    made = {"w": shared, "pair": (shared, 1)}
    same(unpacked(written(tmp_path, made, chunks=3)), made)


LOST = [
    "`_metadata`: model",
    "keys that are not text (they become text): state.0, state.1",
    "empty dicts: nothing",
    "what a Counter has beside its items: counts",
]


def test_what_is_lost_is_said_and_no_difference(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    made = {
        "model": module.state_dict(),
        "state": {0: {"m": numbers(2)}, 1: {"m": numbers(3)}},
        "nothing": {},
        "pair": (numbers(2), 1),
        "counts": Counter(a=1),
        "ordered": OrderedDict(a=1),
    }
    torch.save(made, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out", at="model", output_format="dcp")
    assert list(answer.notes) == [
        *(f"a distributed checkpoint has no place for {what}" for what in LOST),
        "values that contain tensors are written as one entry each: pair",
    ]
    assert not answer.downgrade.exact
    # what it is stands in the notes
    assert answer.downgrade.because == (
        "what has no place in a distributed checkpoint does not come back",
    )
    both = (tmp_path / "in.pt", tmp_path / "out")
    verified = migrate.verify(both[1], source=both[0], at="model")
    assert (verified.equal, [one.what for one in verified.not_compared]) == (True, LOST)
    for a, b in (both, both[::-1]):
        compared = migrate.diff(a, b, at="model")
        assert (compared.equal, [one.what for one in compared.not_compared]) == (True, LOST)
    made["counts"]["a"] = 2
    torch.save(made, tmp_path / "other.pt")
    compared = migrate.diff(tmp_path / "other.pt", tmp_path / "out", at="model")
    assert list(compared.others) == ["value counts.a differs"]


def test_metadata_is_plain_data_of_classes_that_torch_has_had_since_2_3(tmp_path: Path) -> None:
    data = (written(tmp_path, nested(), chunks=2) / ".metadata").read_bytes()
    names: set[tuple[str, str]] = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            names.add((module, name))
            return super().find_class(module, name)

    found = Listing(io.BytesIO(data)).load()
    assert data[:2] == b"\x80\x04"
    inside = "torch.distributed.checkpoint.metadata"
    assert names == {
        *((inside, f"{word}StorageMetadata") for word in ("Tensor", "Chunk", "Bytes")),
        *((inside, word) for word in ("Metadata", "MetadataIndex", "TensorProperties")),
        (inside, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
    }
    assert found.storage_meta is None
    assert [index.index for index in found.storage_data if index.fqn == "model.b"] == [0, 1]


def test_the_stamp_lies_beside(tmp_path: Path) -> None:
    out = written(tmp_path, {"w": numbers(2)})
    assert migrate.history(tmp_path / "in.pt").to_json()["applied"] == []
    assert (out / "migrate.history.json").read_bytes().startswith(b"{")


def test_a_state_dict_in_memory_is_written(tmp_path: Path) -> None:
    made = {"w": numbers(5, 2), "epoch": 3}
    migrate.apply(made, tmp_path / "out", output_format="dcp", chunks=2)
    same(unpacked(tmp_path / "out"), made)
    migrate.save(nn.Linear(2, 3), tmp_path / "module", output_format="dcp")
    assert metadata(tmp_path / "module").tensors.keys() == {"weight", "bias"}


def test_a_module_is_written_for_as_many_ranks_as_are_asked_for(tmp_path: Path) -> None:
    module, out = nn.Linear(4, 6), tmp_path / "out"
    migrate.save(module, out, output_format="dcp", chunks=4)
    for key, value in module.state_dict().items():
        entry = metadata(out).tensors[key]
        sizes = [tuple(part.shape) for part in torch.chunk(value, 4)]
        assert [chunk.sizes for chunk in entry.chunks] == sizes
        assert [part.file for part in entry.parts] == [
            "__0_0.distcp",
            "__1_0.distcp",
            "__2_0.distcp",
        ]
    same(
        loaded(out, {k: torch.zeros_like(one) for k, one in module.state_dict().items()}),
        {key: value.detach() for key, value in module.state_dict().items()},
    )
    with pytest.raises(MigrateError, match=r"M115.*safetensors has whole tensors"):
        migrate.save(module, tmp_path / "again", chunks=4)


RENAMED = (
    'id: t\ntitle: t\nlineage: t\nedge: ["1", "2"]\n'
    "keep: [b]\nrules:\n  - {name: r, from: w, to: v}\n"
)
BESIDE: dict[str, Any] = {
    "flags": {True: numbers(2), None: numbers(3), 0.5: numbers(4), 7: numbers(5)},
    "more": {False: 1, None: "text", 1.5: [numbers(2), 2]},
}


def test_what_stands_under_keys_that_are_not_text_is_compared(tmp_path: Path) -> None:
    made = {"model": {"w": numbers(4, 2)}, **BESIDE}
    torch.save(made, tmp_path / "in.pt")
    out = written(tmp_path, made)
    found = unpacked(out)
    assert found["flags"].keys() == {"True", "None", "0.5", "7"}
    for key, value in BESIDE["flags"].items():
        same(found["flags"][str(key)], value)
    assert migrate.verify(out, source=tmp_path / "in.pt").equal
    for a, b in ((tmp_path / "in.pt", out), (out, tmp_path / "in.pt")):
        assert migrate.diff(a, b).equal
    # and a difference is one
    wrong = {**made, "flags": {**BESIDE["flags"], None: numbers(3) + 1}}
    torch.save(wrong, tmp_path / "wrong.pt")
    compared = migrate.diff(tmp_path / "wrong.pt", out)
    assert [one.key for one in compared.bytes_differ] == ["/flags.None"]
    verified = migrate.verify(out, source=tmp_path / "wrong.pt")
    assert [one.key for one in verified.differences] == ["/flags.None"]


@pytest.mark.parametrize("ruled", [False, True], ids=["as it is", "by a rule"])
def test_a_dict_that_stands_in_two_places_is_compared_in_both(ruled: bool, tmp_path: Path) -> None:
    state = {"w": numbers(8, 2), "b": numbers(3)}
    # a tuple is one entry, and has its tensors for itself
    made = {"model": state, "ema": state, "one": (state["b"],), "other": [(state["b"], 1)]}
    torch.save(made, tmp_path / "in.pt")
    (tmp_path / "rule.yaml").write_text(RENAMED)
    options: dict[str, Any] = {"rules": tmp_path / "rule.yaml"} if ruled else {}
    answer = migrate.apply(
        tmp_path / "in.pt", tmp_path / "out", at="model", output_format="dcp", **options
    )
    several = "tensors that stand in several places are written for each: "
    name = "v" if ruled else "w"
    assert f"{several}/one.0, {name}, b" in answer.notes
    new = {name: state["w"], "b": state["b"]}
    same(unpacked(tmp_path / "out"), {**made, "model": new, "ema": new})
    options["at"] = "model"
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt", **options).equal
    if not ruled:
        for a, b in (
            (tmp_path / "in.pt", tmp_path / "out"),
            (tmp_path / "out", tmp_path / "in.pt"),
        ):
            assert migrate.diff(a, b, at="model").equal
    # the bytes of each place are looked at
    places: dict[str, Callable[[Any], Any]] = {
        "b": lambda held: held["model"],
        "/ema.b": lambda held: held["ema"],
        "/one.0": lambda held: held["one"],
        "/other.0.0": lambda held: held["other"][0],
    }
    for number, (key, place) in enumerate(places.items()):
        held = unpacked(tmp_path / "out")
        part = place(held)
        part["b" if isinstance(part, dict) else 0][1] = 7
        wrong = tmp_path / f"wrong{number}"
        saved_by_torch(wrong, held)
        shutil.copy(tmp_path / "out" / "migrate.history.json", wrong)
        report = migrate.verify(wrong, source=tmp_path / "in.pt", **options)
        assert [one.key for one in report.differences] == [key]


def test_a_tensor_that_nothing_makes_is_a_difference_beside_the_model_too(tmp_path: Path) -> None:
    made = {"model": {"w": numbers(4, 2)}, "ema": {"w": numbers(3)}}
    out = written(tmp_path, made, at="model")
    more = tmp_path / "more"
    saved_by_torch(more, {**made, "other": {"w": numbers(5)}})
    shutil.copy(out / "migrate.history.json", more)
    report = migrate.verify(more, source=tmp_path / "in.pt", at="model")
    assert [(one.key, one.what) for one in report.differences] == [
        ("/other.w", "is in the output and nothing makes it")
    ]


OBJECTS = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    "name",
    [
        "te/tensors/mxfp8_96x160",
        "te/tensors/grouped_mxfp8_single",
        "te/tensors/nvfp4_2d_weight",
        "torchao/float8_row",
        "torchao/int4",
    ],
)
def test_tensors_that_are_objects_stay_objects(name: str, tmp_path: Path) -> None:
    source = OBJECTS / f"{name}.pt"
    migrate.apply(source, tmp_path / "out", output_format="dcp")
    found = metadata(tmp_path / "out")
    with formats.open(source) as opened:
        encodings = object_encodings(opened.index.tree)
        held = opened.index.tensors
    assert encodings
    # one entry as the object says, whatever it is made of
    for key, encoding in encodings.items():
        entry = found.tensors[key]
        assert (entry.dtype, entry.shape) == (encoding.dtype, encoding.shape)
        assert [part.file for part in entry.parts] == ["__0_0.distcp"]
    assert len(found.tensors) < len(held)
    assert migrate.verify(tmp_path / "out", source=source).equal
    migrate.apply(tmp_path / "out", tmp_path / "back.pt")
    assert migrate.diff(source, tmp_path / "back.pt").equal


def test_tied_tensors_are_each_written(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

    made = dict(Tied().state_dict())
    torch.save(made, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="dcp", chunks=2)
    same(unpacked(tmp_path / "out"), made)
    assert list(answer.notes) == ["1 tensor shares memory with another one; each is written"]
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt").equal


def test_ties_beside_the_model_are_said_and_each_is_written(tmp_path: Path) -> None:
    shared = numbers(4, 2)
    held = {"twice": shared, "again": shared, "view": shared[:]}
    made = {"model": {"w": numbers(3)}, "ema": held}
    torch.save(made, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out", at="model", output_format="dcp")
    assert list(answer.notes) == [
        "1 tensor shares memory with another one; each is written",
        "tensors that stand in several places are written for each: /ema.twice",
    ]
    same(unpacked(tmp_path / "out"), made)
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt", at="model").equal
    # each place is one of the tensors that are compared
    found = migrate.diff(tmp_path / "in.pt", tmp_path / "out", at="model")
    assert (found.equal, found.tensors, found.only_a, found.only_b) == (True, 4, (), ())


@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_run_that_stopped_goes_on_to_the_same_bytes(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({f"w{n}": numbers(3000, 700) + n for n in range(3)}, tmp_path / "in.safetensors")
    options: dict[str, Any] = {"output_format": "dcp", "chunks": 2, "threads": 1}
    migrate.apply(tmp_path / "in.safetensors", tmp_path / "whole", **options)
    claimed, claim = [], tiles.Partial.claim

    def failing(self: Any, *arguments: Any) -> None:
        if len(claimed) == stop:
            raise OSError(5, "Input/output error")
        claimed.append(arguments)
        claim(self, *arguments)

    monkeypatch.setattr(tiles.Partial, "claim", failing)
    with pytest.raises(RunError):
        migrate.apply(tmp_path / "in.safetensors", tmp_path / "out", **options)
    monkeypatch.setattr(tiles.Partial, "claim", claim)
    answer = migrate.apply(tmp_path / "in.safetensors", tmp_path / "out", resume=True, **options)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
    files = sum(len(data) for name, data in whole.items() if name.endswith(".distcp"))
    assert (answer.bytes_written < files) == (stop > 0)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_bytes_do_not_depend_on_threads(threads: int, tmp_path: Path) -> None:
    save_file({f"w{n}": numbers(600, 1000) + n for n in range(4)}, tmp_path / "in.safetensors")
    for name, count in (("one", 2), ("other", threads)):
        migrate.apply(
            tmp_path / "in.safetensors",
            tmp_path / name,
            output_format="dcp",
            chunks=3,
            threads=count,
        )
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == 5
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def plan(path: Path, **options: Any) -> dict[str, Any]:
    return migrate.plan(path, **options).document


def test_a_plan_names_chunks_where_they_are_asked_for(tmp_path: Path) -> None:
    save_file({"w": numbers(8, 2)}, tmp_path / "in.safetensors")
    whole, cut = (
        plan(tmp_path / "in.safetensors", output_format="dcp", **options)
        for options in ({}, {"chunks": 4})
    )
    assert (cut["options"]["chunks"], cut["question"]["chunks"]) == (4, 4)
    assert "chunks" not in whole["options"]
    assert "chunks" not in whole["question"]
    assert whole["digest"] != cut["digest"]
    assert len(cut["target"]["files"]) == 4


def test_a_saved_plan_is_cut_as_it_was_planned(tmp_path: Path) -> None:
    save_file({"w": numbers(8, 2)}, tmp_path / "in.safetensors")
    made = migrate.plan(tmp_path / "in.safetensors", output_format="dcp", chunks=4)
    (tmp_path / "plan.json").write_text(made.to_json())
    migrate.apply(tmp_path / "plan.json", tmp_path / "out")
    assert len(metadata(tmp_path / "out").tensors["w"].chunks) == 4
    with pytest.raises(MigrateError, match="a saved plan is run as it is"):
        migrate.apply(tmp_path / "plan.json", tmp_path / "again", chunks=2)


@pytest.mark.parametrize("chunks", [0, -1, 2.0, True, "4", 65_537])
def test_chunks_are_a_number_of_ranks(chunks: Any, tmp_path: Path) -> None:
    save_file({"w": numbers(2)}, tmp_path / "in.safetensors")
    with pytest.raises(MigrateError, match=r"M115.*number of ranks"):
        migrate.plan(tmp_path / "in.safetensors", output_format="dcp", chunks=chunks)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunks": 4}, "safetensors has whole tensors"),
        ({"chunks": 4, "output_format": "torch"}, "torch has whole tensors"),
        ({"output_format": "dcp", "single_file": True}, "a distributed checkpoint is a folder"),
    ],
)
def test_what_is_not_cut_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    save_file({"w": numbers(2)}, tmp_path / "in.safetensors")
    with pytest.raises(MigrateError, match=f"M115.*{says}"):
        migrate.plan(tmp_path / "in.safetensors", **options)


def test_a_file_is_no_distributed_checkpoint(tmp_path: Path) -> None:
    save_file({"w": numbers(2)}, tmp_path / "in.safetensors")
    with pytest.raises(MigrateError, match="M115"):
        migrate.apply(tmp_path / "in.safetensors", tmp_path / "out.pt", output_format="dcp")
    with pytest.raises(MigrateError, match=r"M916.*is a folder"):
        FORMAT.describe(
            {"w": spec("float32", (2,))}, folder=False, max_shard_size=9, metadata={}, stamp=None
        )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": {"b.c": 1, "w": torch.ones(1)}, "a.b": {"c": 2}}, "two entries each: a.b.c"),
        ({"a": {1: 1, "1": 2, "w": torch.ones(1)}}, "two entries each: a.1"),
        ([torch.ones(2)], "holds a dict"),
    ],
)
def test_what_has_no_flat_keys_is_refused(value: Any, says: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "in.pt")
    with pytest.raises(MigrateError, match=f"M916.*{says}"):
        migrate.plan(tmp_path / "in.pt", output_format="dcp", single_file=False)


def test_parts_of_ranks_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for rank in range(2):
        torch.save({"w": numbers(2)}, tmp_path / "in" / f"consolidated.0{rank}.pth")
    with pytest.raises(MigrateError, match=r"M916.*w@0, w@1"):
        migrate.plan(tmp_path / "in", output_format="dcp")
