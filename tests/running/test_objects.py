"""Quantized tensors that are objects, through whole runs: rules name their components, and they
come out as objects again.

`grouped_mxfp8_single.pt` and `_multi.pt` hold the same three tensors; Python code of Transformer
Engine 2.20 wrote both.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from inert_unpickler import load_stand_ins
from quantized_streams import Made, mxfp8, stand_ins

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.source.tree import object_encodings

DATA = Path(__file__).parents[1] / "data"
GENUINE = sorted([*(DATA / "te" / "tensors").glob("*.pt"), *(DATA / "torchao").glob("*.pt")])
HEAD = "id: demo/2/x\ntitle: x\nlineage: demo\nedge: ['1', '2']\n"


@pytest.fixture
def te() -> Iterator[dict[str, ModuleType]]:
    with stand_ins() as modules:
        yield modules


def held(path: Path) -> dict[str, tuple[str, bytes]]:
    """The tensors of a checkpoint as rules see them: dtype and shape, and the bytes in row-major
    order.
    """
    out = {}
    source = formats.open(path)
    try:
        for key, at in source.index.tensors.items():
            buffer = bytearray(at.spec.nbytes)
            source.blobs[at.blob].readinto(at.offset, memoryview(buffer))
            out[key] = (str(at.spec), bytes(buffer))
    finally:
        source.close()
    return out


def told(path: Path) -> dict[str, Any]:
    source = formats.open(path)
    source.close()
    return object_encodings(source.index.tree)


def rule(folder: Path, text: str) -> Path:
    file = folder / "x.yaml"
    file.write_text(HEAD + text)
    return file


def names_in(path: Path) -> set[str]:
    import pickletools

    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("data.pkl")]
        return {
            str(arg) for op, arg, _ in pickletools.genops(archive.read(name)) if op.name == "GLOBAL"
        }


@pytest.mark.parametrize("file", GENUINE, ids=lambda f: f.stem)
def test_what_no_rule_touches_is_the_same_object_with_the_same_bytes(
    file: Path, tmp_path: Path
) -> None:
    migrate.apply(file, tmp_path / "out.pt", output_format="torch")
    assert held(tmp_path / "out.pt") == held(file)
    assert told(tmp_path / "out.pt") == told(file)
    # a group's members are views of itself, which the class makes again
    assert names_in(tmp_path / "out.pt") <= names_in(file)
    assert names_in(tmp_path / "out.pt") == names_in(file) or "grouped" in file.stem


@pytest.mark.parametrize("file", GENUINE, ids=lambda f: f.stem)
def test_safetensors_holds_the_components_and_gives_the_objects_back(
    file: Path, tmp_path: Path
) -> None:
    migrate.apply(file, tmp_path / "folder", output_format="safetensors")
    assert held(tmp_path / "folder") == held(file)
    migrate.apply(tmp_path / "folder", tmp_path / "back.pt", output_format="torch")
    assert held(tmp_path / "back.pt") == held(file)
    assert told(tmp_path / "back.pt") == told(file)


def test_a_renamed_object_is_the_object_under_its_new_key(te: Any, tmp_path: Path) -> None:
    torch.save({"a.weight": mxfp8(te, 1), "a.bias": torch.ones(3)}, tmp_path / "in.pt")
    file = rule(tmp_path, 'rules:\n  - {name: r, from: "a.{k...}", to: "b.{k}"}\n')
    migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=[file])
    found = load_stand_ins(tmp_path / "out.pt")
    assert list(found) == ["b.weight", "b.bias"]
    made, genuine = found["b.weight"], mxfp8(te, 1)
    assert made.function is genuine.function
    assert all(
        torch.equal(a, b) if type(a) is torch.Tensor else a == b
        for a, b in zip(made.arguments, genuine.arguments, strict=True)
    )


def test_an_object_of_before_2_16_is_written_with_the_class_method_that_it_was_read_with(
    te: Any, tmp_path: Path
) -> None:
    method = te["float8_tensor"].Float8Tensor._make_in_reduce_ex
    code = te["transformer_engine_torch"].DType(6)
    data = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    for key in ("a", "b"):
        made = Made(method, (data, code, torch.ones(1), torch.bfloat16, torch.Size((2, 3))))
        torch.save({key: made, "again": made}, tmp_path / f"{key}.pt")
    migrate.apply(tmp_path / "a.pt", tmp_path / "out.pt", output_format="torch")
    found = load_stand_ins(tmp_path / "out.pt")["a"]
    assert found.function == method
    assert torch.equal(found.arguments[0], data)
    assert found.arguments[1] == code


SINGLE = (
    'rules:\n  - {name: s, from: "m.weight{e:int}.{k}", to: "m.weight.{k}", via: [{stack: '
    "{over: e}}]}\n"
)
MULTI = (
    'rules:\n  - {name: s, from: "m.weight.{k}", to: "m.weight{e:int}.{k}", via: [{unbind: '
    "{into: e}}]}\n"
)


def test_quantized_members_go_into_a_group_and_come_out_with_the_same_bytes(
    te: Any, tmp_path: Path
) -> None:
    members = {f"m.weight{i}": mxfp8(te, i) for i in range(3)}
    torch.save(members, tmp_path / "multi.pt")
    migrate.apply(tmp_path / "multi.pt", tmp_path / "single.pt", rules=[rule(tmp_path, SINGLE)])
    single = load_stand_ins(tmp_path / "single.pt")
    assert list(single) == ["m.weight"]
    group = single["m.weight"]
    assert type(group) is te["grouped_tensor"].GroupedTensor
    assert (tuple(group.shape), group.dtype, group.num_tensors) == ((3, 64, 32), torch.bfloat16, 3)
    for at, run in enumerate(
        ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
    ):
        assert torch.equal(
            getattr(group, run), torch.cat([m.arguments[at].reshape(-1) for m in members.values()])
        )
    assert (group.tensor_shapes, group.offsets, group.scale_inv_offsets) == (
        [(64, 32)] * 3,
        [0, 2048, 4096, 6144],
        [0, 512, 1024, 1536],
    )
    assert group.quantizer == members["m.weight0"].arguments[7]
    migrate.apply(
        tmp_path / "single.pt",
        tmp_path / "again.pt",
        rules=[rule(tmp_path, MULTI.replace("'1', '2'", "'2', '3'"))],
    )
    again = load_stand_ins(tmp_path / "again.pt")
    assert sorted(again) == sorted(members)
    for key, member in members.items():
        assert again[key].function is member.function
        pairs = zip(again[key].arguments, member.arguments, strict=True)
        assert all(torch.equal(a, b) if type(a) is torch.Tensor else a == b for a, b in pairs)


def test_the_librarys_own_group_and_the_librarys_own_members_become_each_other(
    tmp_path: Path,
) -> None:
    multi, single = (
        DATA / "te" / "tensors" / f"grouped_mxfp8_{layout}.pt" for layout in ("multi", "single")
    )
    migrate.apply(multi, tmp_path / "single.pt", rules=[rule(tmp_path, SINGLE)])
    assert held(tmp_path / "single.pt") == held(single)
    found, genuine = (
        told(tmp_path / "single.pt")["m.weight"].described(),
        told(single)["m.weight"].described(),
    )
    assert found == genuine
    migrate.apply(single, tmp_path / "multi.pt", rules=[rule(tmp_path, MULTI)])
    assert held(tmp_path / "multi.pt") == held(multi)
    assert told(tmp_path / "multi.pt") == told(multi)
    assert names_in(tmp_path / "multi.pt") == names_in(multi)


def test_an_unquantized_group_comes_apart_into_plain_members(tmp_path: Path) -> None:
    apart = [
        '  - {name: K, from: K, to: "K{e:int}", via: [{unbind: {into: e}}]}\n'.replace("K", key)
        for key in ("weight", "bias")
    ]
    file = rule(tmp_path, 'keep: ["_extra_state"]\nrules:\n' + "".join(apart))
    source = DATA / "te" / "tensors" / "grouped_linear_single.pt"
    migrate.apply(source, tmp_path / "out.pt", rules=[file])
    assert (
        held(tmp_path / "out.pt").keys()
        == held(DATA / "te" / "tensors" / "grouped_linear_multi.pt").keys()
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    run = held(source)["weight"][1]
    assert b"".join(found[f"weight{i}"].numpy().tobytes() for i in range(3)) == run


def test_components_that_part_are_plain_tensors_and_that_is_said(te: Any, tmp_path: Path) -> None:
    torch.save({"w": mxfp8(te, 1)}, tmp_path / "in.pt")
    file = rule(
        tmp_path,
        'keep: ["w._row{k}"]\nrules:\n  - {name: d, from: "w._col{k}", via: [{drop: {why: '
        "derived}}]}\n",
    )
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=[file], allow={"drop"})
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == [
        "w._rowwise_data",
        "w._rowwise_scale_inv",
    ]
    assert any(
        "no longer parts of an object: w._rowwise_data" in note
        for note in answer.to_json()["notes"]
    )


def test_members_that_are_not_alike_are_not_made_a_group(te: Any, tmp_path: Path) -> None:
    other = mxfp8(te, 1)
    swizzled = Made(other.function, (*other.arguments[:8], True))
    torch.save({"m.weight0": mxfp8(te, 0), "m.weight1": swizzled}, tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=[rule(tmp_path, SINGLE)])
    assert "m.weight._rowwise_data" in torch.load(tmp_path / "out.pt", weights_only=True)


def test_a_tensor_called_like_a_component_is_refused(te: Any, tmp_path: Path) -> None:
    torch.save({"w": mxfp8(te, 1), "w._rowwise_data": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(CheckpointError, match="M956"):
        formats.open(tmp_path / "in.pt")


def test_an_object_in_an_optimizers_state_is_carried_whole(te: Any, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"exp_avg": mxfp8(te, 3)}}}}
    torch.save(state, tmp_path / "in.pt")
    file = rule(tmp_path, "rules:\n  - {name: r, from: w, to: v}\n")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out.pt", rules=[file])
    found = load_stand_ins(tmp_path / "out.pt")
    carried = found["optimizer"]["state"][0]["exp_avg"]
    assert list(found["model"]) == ["v"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(carried.arguments[:4], mxfp8(te, 3).arguments[:4], strict=True)
    )


def test_a_sharded_checkpoint_with_objects_is_read_by_its_index(te: Any, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    torch.save({"a": mxfp8(te, 1)}, folder / names[0])
    torch.save({"b": mxfp8(te, 2)}, folder / names[1])
    (folder / "pytorch_model.bin.index.json").write_text(
        f'{{"weight_map": {{"a": "{names[0]}", "b": "{names[1]}"}}}}'
    )
    assert set(held(folder)) == {
        f"{key}._{way}wise_{part}"
        for key in "ab"
        for way in ("row", "column")
        for part in ("data", "scale_inv")
    }
    migrate.apply(folder, tmp_path / "out", max_shard_size=4096, output_format="torch")
    assert held(tmp_path / "out") == held(folder)
    # each object in one file, and the index names the object
    assert json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())[
        "weight_map"
    ] == {"a": names[0], "b": names[1]}
    assert told(tmp_path / "out") == told(folder)
