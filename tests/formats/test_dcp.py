"""Folders of torch.distributed.checkpoint, written by stock torch: what they hold, and where."""

from __future__ import annotations

import dataclasses
import inspect
import io
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import Box, rows, save, tensor_of
from quantized_streams import mxfp8, stand_ins
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError, QuestionError
from migrate.source.blobs import ChunkedTensor, Stored, chunks_of
from migrate.source.tree import object_encodings
from migrate.source.unread import entry_contents
from migrate.source.zip_archive import crc32

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)) * 100
    return made.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def refused(path: Path, **options: Any) -> list[str]:
    """What the folder is refused with: code and message of each diagnostic."""
    with pytest.raises(CheckpointError) as caught:
        formats.open(path, **options)
    return [f"{d.code}: {d.message}" for d in caught.value.diagnostics]


TRAINING = {
    "model": {"layers.0.w": seeded(4, 3), "layers.1.w": seeded(5, 3), "norm": seeded(3)},
    "optimizer": {
        "state": {"layers.0.w": {"step": torch.tensor(3.0), "exp_avg": seeded(4, 3)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["layers.0.w"]}],
    },
    "step": 7,
    "name": "run",
}


def test_planner_data_is_the_tree_that_was_saved(tmp_path: Path) -> None:
    with formats.open(save(tmp_path / "c", TRAINING)) as source:
        index = source.index
        assert (source.format, index.files) == ("dcp", ("__0_0.distcp",))
        assert list(index.tensors) == ["layers.0.w", "layers.1.w", "norm"]
        for key, stored in index.tensors.items():
            assert same(tensor_of(source, stored), TRAINING["model"][key])  # type: ignore[index]
        kept = index.passed_through
        state = TRAINING["optimizer"]["state"]["layers.0.w"]  # type: ignore[index]
        assert {f"/optimizer.state.layers.0.w.{name}": True for name in ("step", "exp_avg")} == {
            key: same(tensor_of(source, at), state[key.rpartition(".")[2]])
            for key, at in kept.items()
        }
        assert index.items == {
            "optimizer.param_groups.0.lr": 0.1,
            "optimizer.param_groups.0.betas.0": 0.9,
            "optimizer.param_groups.0.betas.1": 0.95,
            "optimizer.param_groups.0.params.0": "layers.0.w",
            "step": 7,
            "name": "run",
        }
        assert (index.outside, index.notes, index.side_files, index.left_out) == ((), (), (), ())
        sums = index.sums()
        assert len(sums) == 5
        for (blob, offset), (size, crc) in sums.items():
            assert crc32(_bytes(source, blob, offset, size)) == crc


def _bytes(source: Any, blob: int, offset: int, size: int) -> bytearray:
    raw = bytearray(size)
    source.blobs[blob].readinto(offset, memoryview(raw))
    return raw


def test_at_names_the_dict_that_rules_work_on(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {**TRAINING, "ema": {"layers.0.w": seeded(4, 3)}})
    with formats.open(folder, at="ema") as source:
        assert list(source.index.tensors) == ["layers.0.w"]
        assert "/model.layers.0.w" in source.index.passed_through
    assert refused(folder, at="model.x")[0].startswith("M945: ")


# as torchtitan spells it
TORCHTITAN = {
    "tok_embeddings.weight": seeded(6, 4),
    "layers.0.attention.wq.weight": seeded(4, 4),
    "optimizer": {
        "state.layers.0.attention.wq.weight.exp_avg": seeded(4, 4),
        "param_groups.layers.0.attention.wq.weight.lr": 0.1,
    },
    "lr_scheduler": {"last_epoch": 3},
    "train_state": {"step": torch.tensor(5, dtype=torch.int32), "ntokens_seen": torch.tensor(7)},
    "dataloader": {"dp_rank_0": b"\x80\x04N."},
}


@pytest.mark.parametrize("at", [None, "."])
def test_a_model_at_the_root_is_found_beside_its_optimizer(tmp_path: Path, at: str | None) -> None:
    with formats.open(save(tmp_path / "c", TORCHTITAN), at=at) as source:
        assert list(source.index.tensors) == [
            "tok_embeddings.weight",
            "layers.0.attention.wq.weight",
        ]
        assert list(source.index.passed_through) == [
            "/optimizer.state.layers.0.attention.wq.weight.exp_avg",
            "/train_state.step",
            "/train_state.ntokens_seen",
        ]
        assert source.index.items == {
            "optimizer.param_groups.layers.0.attention.wq.weight.lr": 0.1,
            "lr_scheduler.last_epoch": 3,
            "dataloader.dp_rank_0": {"bytes": "gAROLg=="},
        }
    folder = save(tmp_path / "d", TORCHTITAN | {"ema": {"tok_embeddings.weight": seeded(6, 4)}})
    # another dict of weights may be meant as well
    assert refused(folder)[0].startswith("M945: ")


def test_an_average_is_not_taken_for_the_model_at_the_root(tmp_path: Path) -> None:
    weights = {"a.weight": seeded(6, 4), "b.weight": seeded(4)}
    folder = save(tmp_path / "c", weights | {"shadow": {"a.weight": seeded(6, 4)}})
    (found,) = refused(folder)
    assert found.startswith("M945: ")
    assert "at the root and at `shadow`" in found
    with formats.open(folder, at="shadow") as source:
        assert list(source.index.tensors) == ["a.weight"]
    with formats.open(folder, at=".") as source:
        assert list(source.index.tensors) == ["a.weight", "b.weight", "shadow.a.weight"]


def test_rules_that_have_no_tensors_say_where_to_look(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"a.weight": seeded(6, 4), "rng": [seeded(3)]})
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "id: demo/v2/names\ntitle: t\nwhy: w\nlineage: demo\nedge: [v1, v2]\n"
        'requires: ">=0.1"\n'
        'rules:\n  - {name: a, from: "a.{k}", to: "b.{k}"}\n'
    )
    with formats.open(folder) as source:
        assert not source.index.tensors
        (note,) = source.index.notes
    assert note.startswith("tensors stand at the root, beside rng with tensors as well")
    with pytest.raises(CheckpointError, match="M945") as refusal:
        migrate.plan(folder, rules=rules)
    assert note in str(refusal.value)
    assert "b.weight" in str(migrate.plan(folder, rules=rules, at=".").to_json())


def test_the_optimizer_at_the_side_of_a_root_model_is_named_by_at(tmp_path: Path) -> None:
    with formats.open(save(tmp_path / "c", TORCHTITAN), at="optimizer") as source:
        assert list(source.index.tensors) == ["state.layers.0.attention.wq.weight.exp_avg"]


DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.float8_e8m0fnu,
]  # fmt: skip


def test_every_dtype_and_small_shape(tmp_path: Path) -> None:
    state = {str(dtype).rpartition(".")[2]: seeded(5, 2, dtype=dtype) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(2.5), "none": torch.ones(0, 3), "one": torch.ones(1)}
    with formats.open(save(tmp_path / "c", state)) as source:
        assert source.index.tensors.keys() == state.keys()
        for key, stored in source.index.tensors.items():
            assert same(tensor_of(source, stored), state[key]), key


# a 2 by 2 mesh over rows and columns of [6, 4]
MESH: list[Box] = [([0, 0], [4, 2]), ([0, 2], [4, 2]), ([4, 0], [2, 2]), ([4, 2], [2, 2])]
CUTS = {
    "even": ((6, 4), rows((6, 4), [3, 3])),
    "uneven": ((7, 3), rows((7, 3), [3, 3, 1])),
    "columns": ((4, 6), rows((4, 6), [4, 2], dim=1)),
    "mesh": ((6, 4), MESH),
    "deep": ((2, 3, 4), rows((2, 3, 4), [1, 3], dim=2)),
    "vector": ((5,), rows((5,), [2, 2, 1])),
}


@pytest.mark.parametrize("files", [1, 3])
def test_chunks_of_every_cut(tmp_path: Path, files: int) -> None:
    state = {name: seeded(*shape) for name, (shape, _) in CUTS.items()}
    boxes = {f"m.{name}": boxes for name, (_, boxes) in CUTS.items()}
    folder = save(tmp_path / "c", {"m": state}, boxes, files=files)
    with formats.open(folder, at="m") as source:
        assert len(source.index.files) == files
        for name, (_, cut) in CUTS.items():
            stored = source.index.tensors[name]
            assert isinstance(stored, ChunkedTensor)
            assert stored.starts == tuple(sorted(tuple(offsets) for offsets, _ in cut))
            assert same(tensor_of(source, stored), state[name]), name
        sums = source.index.sums()
        every = [chunk for stored in source.index.tensors.values() for chunk in chunks_of(stored)]
        assert all((chunk.blob, chunk.offset) in sums for chunk in every)
    # what stock torch makes of the same files
    loaded = {"m": {name: torch.zeros_like(t) for name, t in state.items()}}
    dcp.load(loaded, checkpoint_id=folder)
    assert all(same(loaded["m"][name], t) for name, t in state.items())


def test_an_empty_chunk_is_no_place(tmp_path: Path) -> None:
    state = {"a": seeded(4, 2), "b": seeded(3)}
    boxes = {"a": rows((4, 2), [2, 2, 0]), "b": rows((3,), [3, 0])}
    with formats.open(save(tmp_path / "c", state, boxes)) as source:
        a, b = source.index.tensors["a"], source.index.tensors["b"]
        assert isinstance(a, ChunkedTensor)
        assert a.starts == ((0, 0), (2, 0))
        # one that has elements is all of the tensor
        assert isinstance(b, Stored)
        assert same(tensor_of(source, a), state["a"])
        assert same(tensor_of(source, b), state["b"])


def test_strides_are_those_in_the_archive(tmp_path: Path) -> None:
    whole = seeded(4, 6)
    state = {"t": whole.t(), "cut": whole.t()}
    boxes = {"cut": rows((6, 4), [2, 4], dim=0)}
    with formats.open(save(tmp_path / "c", state, boxes)) as source:
        stored = source.index.tensors["t"]
        assert isinstance(stored, Stored)
        assert stored.strides == (1, 6)
        for key in state:
            assert same(tensor_of(source, source.index.tensors[key]), state[key])


def test_packed_numbers_count_as_two(tmp_path: Path) -> None:
    raw = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
    state = {"p": raw.view(torch.float4_e2m1fn_x2)}
    with formats.open(save(tmp_path / "c", state)) as source:
        (stored,) = source.index.tensors.values()
        assert isinstance(stored, Stored)
        assert (stored.spec.dtype, stored.spec.shape) == ("float4_e2m1fn", (4, 12))
        assert _bytes(source, stored.blob, stored.offset, 24) == raw.numpy().tobytes()


def test_without_planner_data_keys_are_flat(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"model.w": torch.ones(2), "step": 3}, flatten_state_dict=False)
    with formats.open(folder) as source:
        assert list(source.index.tensors) == ["model.w"]
        assert source.index.items == {"step": 3}


def test_lists_come_back_as_lists(tmp_path: Path) -> None:
    state = {"l": [torch.ones(1), {"a": torch.zeros(2)}, 5], "w": {"x": seeded(2, 2)}}
    with formats.open(save(tmp_path / "c", state), at="w") as source:
        assert list(source.index.passed_through) == ["/l.0", "/l.1.a"]
        assert source.index.items == {"l.2": 5}


def test_a_place_that_no_entry_fills_is_said(tmp_path: Path) -> None:
    # torch loses empty dicts
    state = {"l": [{}, {"a": torch.zeros(2)}], "w": {"x": seeded(2, 2)}}
    with formats.open(save(tmp_path / "c", state), at="w") as source:
        assert source.index.notes == ("lists with places that no entry fills, read as None: l",)
        assert source.index.items == {"l.0": None}


def test_requires_grad_is_that_of_metadata(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, requires_grad=True), "b": torch.ones(2)}
    with formats.open(save(tmp_path / "c", state)) as source:
        assert source.index.tree is not None
        leaves = dict(source.index.tree.parts[0].root.pairs)
        assert {key: leaf.requires_grad for key, leaf in leaves.items()} == {"a": True, "b": False}


class Setting:
    """A class that is not known."""


def test_what_is_outside_of_the_allow_list_is_left_out_and_named(tmp_path: Path) -> None:
    state = {
        "w": {"x": seeded(2, 2)},
        "plain": 1,
        "odd": Setting(),
        "pair": (torch.ones(3), Setting()),
        "list": [torch.ones(2), Setting()],
    }
    with formats.open(save(tmp_path / "c", state)) as source:
        index = source.index
        assert [(one.name, one.count) for one in index.outside] == [("test_dcp.Setting", 3)]
        assert [one.paths for one in index.outside] == [("odd", "pair.1", "list.1")]
        assert index.unread.keys() == {"odd", "pair", "list"}
        assert index.items == {"plain": 1}
        assert list(index.passed_through) == []
        assert index.notes == ("dropped, because they are outside the allow-list: odd, pair, list",)


def test_what_is_not_decoded_is_compared_by_its_own_archive(tmp_path: Path) -> None:
    def state(number: float) -> dict[str, Any]:
        held = [torch.full((3,), number), Setting()]
        # the storages of both are called alike, each in an archive of its own
        return {"w": {"x": seeded(2)}, "first": (torch.ones(3), Setting()), "second": tuple(held)}

    one, two, other = (
        save(tmp_path / name, state(number)) for name, number in (("a", 2), ("b", 2), ("c", 3))
    )
    torch.save(state(2), tmp_path / "a.pt")

    def contents(path: Path) -> dict[str, Any]:
        with formats.open(path) as source:
            return entry_contents(source.index.unread, source.blobs)

    assert contents(one).keys() == {"first", "second"}
    assert contents(one) == contents(two) == contents(tmp_path / "a.pt")
    assert contents(one)["first"] == contents(other)["first"]
    assert contents(one)["second"] != contents(other)["second"]


def test_bytes_that_no_entry_names_are_counted(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.ones(2)})
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(bytes(1000))
    (folder / "__9_0.distcp").write_bytes(b"left by an earlier save")
    with formats.open(folder) as source:
        assert source.index.notes == ("1,000 bytes of the data files belong to no entry",)
        assert source.index.left_out == ("__9_0.distcp",)


def test_the_stamp_and_side_files_lie_beside(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": torch.ones(2)})
    (folder / "migrate.history.json").write_text("{}")
    (folder / "config.json").write_text("{}")
    with formats.open(folder) as source:
        assert source.history == b"{}"
        assert [one.path for one in source.index.side_files] == ["config.json"]
        assert source.identities().keys() == {".metadata", "__0_0.distcp", "config.json"}


def edit(folder: Path, change: Any) -> None:
    """Changes what `.metadata` holds; tests trust the file that they have written."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def test_what_contradicts_metadata_is_refused_all_at_once(tmp_path: Path) -> None:
    state = {name: seeded(4, 2) for name in ("fine", "dtype", "shape", "swapped", "two")}
    folder = save(tmp_path / "c", state | {"pair": (torch.ones(4, 2), torch.ones(4, 2))})

    def change(metadata: Any) -> None:
        entries, places = metadata.state_dict_metadata, metadata.storage_data
        entries["dtype"].properties.dtype = torch.int32
        entries["shape"].size = torch.Size((2, 4))
        entries["shape"].chunks[0].sizes = torch.Size((2, 4))
        at = {index.fqn: index for index in places}
        places[at["two"]] = places.pop(at["pair"])
        del entries["pair"], metadata.planner_data["pair"]

    edit(folder, change)
    found = refused(folder)
    assert len(found) == 3
    for key, said in (
        ("dtype", "holds float32 of shape [4, 2], and .metadata says int32 of shape [4, 2]"),
        ("shape", "holds float32 of shape [4, 2], and .metadata says float32 of shape [2, 4]"),
        ("two", "holds a value with 2 tensors, and a chunk is one tensor by itself"),
    ):
        assert any(f": {key}: " in line and said in line for line in found), (key, found)


def test_a_truncated_missing_or_foreign_data_file_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": seeded(4, 2)})
    path = folder / "__0_0.distcp"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (found,) = refused(folder)
    assert found.startswith("M938: ")
    assert f"which has {len(whole) - 1:,}" in found
    path.write_bytes(bytes(len(whole)))
    (found,) = refused(folder)
    assert found.startswith("M940: ")
    path.unlink()
    (found,) = refused(folder)
    assert "lies in __0_0.distcp, which is missing" in found
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    (found,) = refused(folder)
    assert found.startswith("M907: ")
    with formats.open(folder, allow_links=True) as source:
        assert list(source.index.tensors) == ["w"]


def test_a_data_file_that_is_cut_short_is_said_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {name: seeded(4, 2) for name in "abc"})
    path = folder / "__0_0.distcp"
    whole = path.read_bytes()
    path.write_bytes(whole[:1])
    (found,) = refused(folder)
    assert ": a: ends at byte " in found
    assert found.endswith("which has 1; 2 more entries lie beyond its end")
    path.unlink()
    (found,) = refused(folder)
    assert found.endswith(": a: lies in __0_0.distcp, which is missing; so do 2 more entries")
    folder = save(tmp_path / "d", {name: seeded(4, 2) for name in "ab"})
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:1])
    (found,) = refused(folder)
    assert found.endswith("which has 1; one more entry lies beyond its end")
    path.unlink()
    (found,) = refused(folder)
    assert found.endswith(": a: lies in __0_0.distcp, which is missing; so does one more entry")


def test_a_data_file_of_another_checkpoint_is_said_once(tmp_path: Path) -> None:
    state = {name: seeded(4, 2) for name in "abc"} | {"step": 7}
    for count, files in enumerate((1, 2)):
        folder = save(tmp_path / f"{count}", state, files=files)
        paths = sorted(folder.glob("*.distcp"))
        assert len(paths) == files
        for path in paths:
            path.write_bytes(bytes(path.stat().st_size))
        found = refused(folder)
        assert [line.partition(": ")[0] for line in found] == ["M940"] * files
        assert all(any(f"/{path.name}: " in line for line in found) for path in paths)
        if files == 1:
            assert found[0].endswith("; 3 more archives of this file are malformed")
    # of two damaged archives the other is counted, and what is wrong otherwise is said as well
    folder = save(tmp_path / "other", state)
    path = folder / "__0_0.distcp"
    places = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    at = {index.fqn: info for index, info in places.items()}
    data = bytearray(path.read_bytes())
    for name in "ac":
        data[at[name].offset : at[name].offset + at[name].length] = bytes(at[name].length)
    path.write_bytes(data)

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["b"].properties.dtype = torch.int32

    edit(folder, change)
    found = refused(folder)
    assert sorted(line[:4] for line in found) == ["M938", "M940"]
    assert any(line.endswith("; one more archive of this file is malformed") for line in found)


def test_safetensors_beside_metadata_leave_it_unclear_what_is_meant(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": seeded(4, 2)})
    save_file({"v": seeded(3)}, folder / "model.safetensors")
    (found,) = refused(folder)
    assert found.startswith("M915: ")
    assert "holds a distributed checkpoint and model.safetensors" in found
    for name, key in ((".metadata", "w"), ("model.safetensors", "v")):
        with formats.open(folder / name) as source:
            assert list(source.index.tensors) == [key]


def test_an_output_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    folder, out = save(tmp_path / "c", {"w": seeded(4, 2)}), tmp_path / "out"
    for made in (lambda: out.mkdir(), lambda: save(out, {"v": seeded(2)})):
        made()
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        for options in ({}, {"chunks": 2}, {"rewrite": True}, {"output_format": "safetensors"}):
            with pytest.raises(QuestionError, match="M904"):
                migrate.apply(folder, out, **(options or {"output_format": "dcp"}))
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_keys_that_collide_once_nested_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"a": {"b": torch.ones(1)}, "c": torch.ones(2)})

    def change(metadata: Any) -> None:
        # a key without a path stands at the root
        metadata.planner_data["a.b"] = ("c", "b")
        del metadata.planner_data["c"]

    edit(folder, change)
    (found,) = refused(folder)
    assert "c: another entry stands at its place `c` in the nested dict" in found


def test_a_data_file_that_changed_since_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"w": seeded(4, 2)})
    with formats.open(folder) as source:
        source.check_unchanged()
        (folder / ".metadata").write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"\.metadata: changed while it was read"):
            source.check_unchanged()


class OfRank(dcp.FileSystemWriter):
    """torch's writer as one of the ranks that save without collectives."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, sync_files=False)
        self.number = number

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.number, use_collectives=False)


def save_of_ranks(folder: Path, *states: dict[str, Any]) -> Path:
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip(f"torch {torch.__version__} saves with collectives only")
    for number, state in enumerate(states):
        writer = OfRank(folder, number)
        dcp.save(state, storage_writer=writer, use_collectives=False)
    assert (folder / "__0.metadata").exists()
    return folder


def halve(folder: Path) -> None:
    """Makes `w` of rank 0 the first rows and `w` of rank 1 the last rows of one tensor."""
    for rank in range(2):
        path = folder / f"__{rank}.metadata"
        found = pickle.loads(path.read_bytes())
        entry = found.state_dict_metadata["m.w"]
        size = entry.size
        entry.size = torch.Size((2 * size[0], *size[1:]))
        entry.chunks[0].offsets = torch.Size((rank * size[0], *[0] * (len(size) - 1)))
        (index,) = (i for i in found.storage_data if i.fqn == "m.w")
        place = found.storage_data.pop(index)
        found.storage_data[type(index)("m.w", entry.chunks[0].offsets, rank)] = place
        path.write_bytes(pickle.dumps(found))


def test_files_of_ranks_are_one_checkpoint(tmp_path: Path) -> None:
    common = {"step": 7, "scale": torch.tensor(2.0)}
    whole = seeded(6, 3)
    folder = save_of_ranks(
        tmp_path / "c",
        {"m": {"w": whole[:3]}, "own0": {"x": seeded(2)}, **common},
        {"m": {"w": whole[3:]}, "own1": {"x": seeded(3)}, **common},
    )
    halve(folder)
    for path in (folder, folder / "__0_0.distcp"):
        if path.is_file():
            assert refused(path)[0].startswith("M937: ")
            continue
        with formats.open(path, at="m") as source:
            index = source.index
            assert set(index.files) == {"__0_0.distcp", "__1_0.distcp"}
            (stored,) = index.tensors.values()
            assert isinstance(stored, ChunkedTensor)
            assert same(tensor_of(source, stored), whole)
            assert list(index.passed_through) == ["/own0.x", "/scale", "/own1.x"]
            assert index.items == {"step": 7}
            assert (index.notes, index.left_out) == ((), ())
            assert {"__0.metadata", "__1.metadata"} < source.identities().keys()


def test_ranks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    folder = save_of_ranks(
        tmp_path / "c",
        {"a": torch.ones(2), "b": torch.ones(2), "c": 3, "d": torch.ones(1)},
        {"a": torch.zeros(2), "b": torch.ones(2), "c": 4, "d": torch.ones(1)},
    )
    found = refused(folder)
    assert len(found) == 2
    assert all("hold different values, and nothing says which is meant" in one for one in found)
    assert {one.split(": ")[1] for one in found} == {"a", "c"}
    for name in ("__1.metadata", "__1_0.distcp"):
        (folder / name).unlink()
    with formats.open(folder) as source:
        assert source.index.tensors.keys() == {"a", "b", "d"}
    folder = save_of_ranks(tmp_path / "d", {"a": torch.ones(2), "b": 1}, {"a": torch.ones(3)})
    what = "a: has another dtype, shape, requires_grad or strides in __0.metadata and in"
    assert any(what in one for one in refused(folder))
    folder = save_of_ranks(tmp_path / "e", {"a": torch.ones(2)}, {"b": {"x": 1}, "a": 1})
    assert any("is a tensor and another value" in one for one in refused(folder))


def test_a_rank_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    folder = save_of_ranks(tmp_path / "c", *({f"w{n}": torch.ones(2)} for n in range(3)))
    (folder / "__1.metadata").unlink()
    (found,) = refused(folder)
    assert "2 ranks left `__{rank}.metadata`, and __1.metadata is missing" in found
    # of the last one, only its data files tell
    folder = save_of_ranks(tmp_path / "d", *({f"w{n}": torch.ones(2)} for n in range(3)))
    (folder / "__2.metadata").unlink()
    (found,) = refused(folder)
    assert "2 ranks left `__{rank}.metadata`, and __2.metadata is missing" in found


def test_one_file_of_a_rank_is_no_checkpoint(tmp_path: Path) -> None:
    folder = save_of_ranks(tmp_path / "c", {"w": seeded(4, 2)}, {"w": seeded(4, 2)})
    for name in ("__0.metadata", "__1.metadata", "__0_0.distcp"):
        (found,) = refused(folder / name)
        assert found.startswith("M937: ")
        assert f"{name}: a part of the distributed checkpoint in " in found
    save_file({"v": seeded(3)}, folder / "model.safetensors")
    (found,) = refused(folder)
    assert found.startswith("M915: ")
    with formats.open(folder / "model.safetensors") as source:
        assert list(source.index.tensors) == ["v"]


class MCoreMetadata(Metadata):
    """Megatron's root of `.metadata`, pickled under its own name."""


MCoreMetadata.__module__ = "megatron.core.dist_checkpointing.strategies.torch"


def by_megatron(folder: Path, monkeypatch: pytest.MonkeyPatch, **notes: Any) -> Path:
    """The folder with the `.metadata` that Megatron leaves; what it notes of some tensors."""
    name = MCoreMetadata.__module__
    for end in (*(n for n, letter in enumerate(name) if letter == "."), len(name)):
        monkeypatch.setitem(sys.modules, name[:end], types.ModuleType(name[:end]))
    monkeypatch.setattr(sys.modules[name], "MCoreMetadata", MCoreMetadata, raising=False)
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(Metadata)}
    root = MCoreMetadata(**fields)
    root.mcore_data = notes  # type: ignore[attr-defined]
    path.write_bytes(pickle.dumps(root))
    return folder


def test_a_torch_dist_folder_of_megatron_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"decoder.layers.w": seeded(4, 3), "rng_state/shard_0.0_1.1": (1, 2)}
    folder = save(tmp_path / "c", state, {"decoder.layers.w": rows((4, 3), [2, 2])})
    torch.save({"iteration": 3}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    same_shape = {"nd_reformulated_orig_global_shape": torch.Size((4, 3))}
    by_megatron(folder, monkeypatch, **{"decoder.layers.w": same_shape})
    with formats.open(folder) as source:
        assert source.format == "torch_dist"
        assert list(source.index.tensors) == [f"decoder.layers.{n}.w" for n in range(4)]
        found = [tensor_of(source, stored) for stored in source.index.tensors.values()]
        assert same(torch.stack(found), state["decoder.layers.w"])  # type: ignore[arg-type]
    other = {"nd_reformulated_orig_global_shape": (2, 6)}
    by_megatron(folder, monkeypatch, **{"decoder.layers.w": other})
    (found,) = refused(folder)
    assert found.startswith("M937: ")
    assert "Megatron saved 1 tensor in another shape than they have: decoder.layers.w" in found


def replace_archives(folder: Path, key: str, value: Any) -> None:
    """Puts what torch.save makes of `value` in place of every archive of `key`."""
    raw = io.BytesIO()
    torch.save(value, raw)
    path = folder / "__0_0.distcp"
    data = path.read_bytes()

    def change(metadata: Any) -> None:
        at = len(data)
        for index, place in metadata.storage_data.items():
            if index.fqn == key:
                place.offset, place.length = at, len(raw.getvalue())
                at += place.length

    edit(folder, change)
    count = len(pickle.loads((folder / ".metadata").read_bytes()).state_dict_metadata[key].chunks)
    path.write_bytes(data + count * raw.getvalue())


def test_a_quantized_tensor_is_read_as_its_components(tmp_path: Path) -> None:
    plain = torch.zeros(64, 32, dtype=torch.bfloat16)
    folder = save(tmp_path / "c", {"m": {"w": plain, "b": torch.ones(2)}})
    with stand_ins() as modules:
        replace_archives(folder, "m.w", mxfp8(modules, 1))
        torch.save({"w": mxfp8(modules, 1), "b": torch.ones(2)}, tmp_path / "in.pt")
    with formats.open(folder) as source, formats.open(tmp_path / "in.pt") as other:
        keys = ["rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"]
        assert list(source.index.tensors) == [*(f"w._{key}" for key in keys), "b"]
        for key, stored in source.index.tensors.items():
            assert same(tensor_of(source, stored), tensor_of(other, other.index.tensors[key]))
        assert object_encodings(source.index.tree) == object_encodings(other.index.tree)


def test_a_tensor_that_no_output_can_hold_is_named_and_left_out(tmp_path: Path) -> None:
    state = {"m": {"w": torch.ones(2), "c": torch.ones(2, dtype=torch.complex64)}}
    folder = save(tmp_path / "c", state, {"m.c": rows((2,), [1, 1])})
    # torch resolves the conjugation before it saves
    replace_archives(folder, "m.c", torch.ones(1, dtype=torch.complex64).conj())
    with formats.open(folder) as source:
        (outside,) = source.index.outside
        assert (outside.name, outside.paths) == ("torch.complex64", ("m.c",))
        assert "pending conjugation" in outside.reason
        assert list(source.index.tensors) == ["w"]
        # one for each chunk
        assert list(source.index.unread) == ["m.c", "m.c#2"]
