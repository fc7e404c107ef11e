"""What is read from .pt files: where tensors lie, which dict rules work on, what is refused and by
what name.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.source.index import Index


def index_of(path: Path, at: str | None = None) -> Index:
    source = formats.open(path, at=at)
    try:
        return source.index
    finally:
        source.close()


def write(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def refused(path: Path, at: str | None = None) -> list[Any]:
    with pytest.raises(CheckpointError) as caught:
        formats.open(path, at=at)
    return caught.value.diagnostics


@pytest.mark.parametrize("zipped", [True, False])
def test_each_tensor_is_where_torch_put_it(zipped: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    held = {
        "t": base.t(),
        "part": base[1:, ::2],
        "other": torch.arange(5, dtype=torch.int16),
        "zero": torch.tensor(7),
    }
    path = write(tmp_path / "m.pt", held, _use_new_zipfile_serialization=zipped)
    source = formats.open(path)
    try:
        assert list(source.index.tensors) == list(held)
        for key, tensor in held.items():
            at = source.index.tensors[key]
            assert (at.spec.dtype, at.spec.shape) == (
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
            )
            assert (at.strides or tensor.contiguous().stride()) == tensor.stride()
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            raw = bytearray((last + 1) * tensor.itemsize)
            source.blobs[0].readinto(at.offset, memoryview(raw))
            assert torch.equal(
                torch.frombuffer(raw, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride()),
                tensor,
            )
        assert (
            source.index.tensors["t"].storage
            == source.index.tensors["part"].storage
            != source.index.tensors["other"].storage
        )
    finally:
        source.close()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_the_pickle_inside_is_read(protocol: int, tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.pt",
        {"model": nn.Linear(2, 3).state_dict(), "epoch": 4},
        pickle_protocol=protocol,
    )
    found = index_of(path)
    assert list(found.tensors) == ["weight", "bias"]
    assert found.items == {"epoch": 4}


@pytest.mark.parametrize(
    ("value", "at"),
    [
        ({"w": torch.ones(1)}, ()),
        ({"model": {"w": torch.ones(1)}, "step": 1}, ("model",)),
        (
            {"state_dict": {"w": torch.ones(1)}, "callbacks": {"best": {"score": torch.ones(1)}}},
            ("state_dict",),
        ),
        ({"a": {"b": {"c": {"w": torch.ones(1)}}}}, ("a", "b", "c")),
        ({"x": {"w": torch.ones(1)}, "optimizer": {"state": {"w": {"m": torch.ones(1)}}}}, ("x",)),
        ({"x": {"w": torch.ones(1)}, "rng": torch.ones(1)}, ("x",)),
        ([torch.ones(1)], None),
        (torch.ones(1), None),
        ({"epoch": 3}, None),
    ],
)
def test_the_dict_that_rules_work_on_is_found(
    value: Any, at: tuple[str, ...] | None, tmp_path: Path
) -> None:
    outline = index_of(write(tmp_path / "m.pt", value)).tree
    assert outline is not None
    assert [part.at for part in outline.parts] == [at]


def test_two_dicts_of_tensors_are_a_question_that_at_answers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.pt",
        {"generator": {"w": torch.ones(1)}, "critic": {"v": torch.ones(2), "u": torch.ones(3)}},
    )
    (found,) = refused(path)
    assert found.code == "M945"
    assert "2 dicts of tensors" in found.message
    assert any("critic: 2 tensors" in note for note in found.notes)
    found_index = index_of(path, at="critic")
    assert list(found_index.tensors) == ["v", "u"]
    assert list(found_index.passed_through) == ["/generator.w"]


def test_at_may_name_keys_that_hold_dots(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.pt", {"a.b": {"c": {"w": torch.ones(1)}}, "a": {"x": {"w": torch.ones(1)}}}
    )
    assert index_of(path, at="a.b.c").tree.parts[0].at == ("a.b", "c")  # type: ignore[union-attr]
    assert refused(path, at="a.b.d")[0].code == "M945"
    assert refused(path, at="nowhere")[0].code == "M945"


def test_an_average_that_is_the_same_tensors_is_carried_and_still_the_same(tmp_path: Path) -> None:
    state = nn.Linear(2, 2).state_dict()
    found = index_of(write(tmp_path / "m.pt", {"model": state, "ema": [state["weight"]]}))
    assert found.passed_through["/ema.0"].storage == found.tensors["weight"].storage


class Config:
    """Stands for a class of somebody's program."""


def test_what_is_outside_the_allow_list_is_listed_with_its_places_and_refused_by_name(
    tmp_path: Path,
) -> None:
    value = {
        "model": {"w": torch.ones(2)},
        "args": SimpleNamespace(lr=1),
        "config": {"deep": [1, Config()]},
        "epoch": 3,
    }
    path = write(tmp_path / "m.pt", value)
    found = migrate.inspect(path)
    assert {(o["name"], *o["paths"]) for o in found.to_json()["outside"]} == {
        ("types.SimpleNamespace", "args"),
        (f"{Config.__module__}.Config", "config.deep.1"),
    }
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(path, tmp_path / "out", output_format="safetensors")
    assert [d.code for d in caught.value.diagnostics] == ["M935"]
    assert not (tmp_path / "out").exists()


def test_with_permission_entries_that_hold_something_opaque_are_dropped_and_named(
    tmp_path: Path,
) -> None:
    value = {
        "model": {"w": torch.ones(2)},
        "args": SimpleNamespace(lr=1),
        "config": {"deep": [1, Config()], "lr": 2},
        "epoch": 3,
    }
    answer = migrate.apply(
        write(tmp_path / "m.pt", value),
        tmp_path / "out.pt",
        output_format="torch",
        allow=["opaque"],
    )
    assert any(
        "dropped" in note and "args" in note and "config.deep" in note
        for note in answer.to_json()["notes"]
    )
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(made) == ["model", "config", "epoch"]
    assert made["config"] == {"lr": 2}


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag],
)
def test_numbers_that_are_not_what_their_bytes_say_are_refused(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.pt", {"w": torch.ones(1), "c": tensor})
    (outside,) = migrate.inspect(path).to_json()["outside"]
    assert "pending" in outside["reason"]
    assert outside["paths"] == ["c"]


def test_shards_without_an_index_belong_together_by_their_numbers(tmp_path: Path) -> None:
    for number in (1, 2):
        write(
            tmp_path / f"pytorch_model-0000{number}-of-00002.bin",
            {f"w{number}": torch.ones(number)},
        )
    assert list(index_of(tmp_path).tensors) == ["w1", "w2"]
    (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
    assert refused(tmp_path)[0].code == "M908"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda m: m.update(w1="pytorch_model-00002-of-00002.bin"), "M915"),
        (lambda m: m.pop("w1"), "M915"),
        (lambda m: m.update(w3="pytorch_model-00001-of-00002.bin"), "M915"),
        (lambda m: m.update(w3="../x.bin"), "M907"),
        (lambda m: m.update(w3="x.bin"), "M908"),
    ],
)
def test_an_index_that_says_something_else_than_its_files_is_refused(
    change: Any, code: str, tmp_path: Path
) -> None:
    weight_map = {}
    for number in (1, 2):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        write(tmp_path / name, {f"w{number}": torch.ones(number)})
        weight_map[f"w{number}"] = name
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert list(index_of(tmp_path).tensors) == list(index_of(index).tensors) == ["w1", "w2"]
    change(weight_map)
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert code in {d.code for d in refused(tmp_path)}


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_an_index_may_not_name_what_some_file_systems_take_for_one_file(
    suffix: str, tmp_path: Path
) -> None:
    index = tmp_path / f"model{suffix}.index.json"
    names = (f"model-00001-of-00002{suffix}", f"Model-00001-of-00002{suffix}", f"other{suffix}")
    index.write_text(json.dumps({"weight_map": {name: name for name in names}}))
    for path in (tmp_path, index):
        (found,) = refused(path)
        assert found.code == "M915"
        assert "differ only in case" in found.message
        assert f"{names[1]}, {names[0]}" in found.message
        assert names[2] not in found.message


def test_a_whole_file_beside_an_index_that_does_not_name_it_could_be_meant(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", {"w": torch.ones(1)})
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"w": "a.bin"}})
    )
    assert list(index_of(tmp_path).tensors) == ["w"]
    write(tmp_path / "pytorch_model.bin", {"w": torch.zeros(1)})
    (found,) = refused(tmp_path)
    assert (found.code, "does not name pytorch_model.bin" in found.message) == ("M915", True)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_is_wrong_with_a_file_is_said_with_its_folder(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes() + b"x")
    (found,) = refused(path)
    assert found.code == "M940"
    assert found.message.startswith(f"{path}: ")


def test_a_nested_file_cannot_be_a_shard(tmp_path: Path) -> None:
    for number in (1, 2):
        write(
            tmp_path / f"pytorch_model-0000{number}-of-00002.bin",
            {"model": {f"w{number}": torch.ones(number)}},
        )
    assert {d.code for d in refused(tmp_path)} <= {"M915", "M945"}


def shards(path: Path, *held: Any) -> Path:
    for number, value in enumerate(held, 1):
        write(path / f"pytorch_model-{number:05}-of-{len(held):05}.bin", value)
    return path


def test_a_value_that_stands_in_two_shards_is_refused(tmp_path: Path) -> None:
    (found,) = refused(
        shards(tmp_path, {"a": torch.ones(1), "epoch": 1}, {"b": torch.ones(1), "epoch": 2})
    )
    assert found.code == "M915"
    assert (
        "epoch (in pytorch_model-00001-of-00002.bin and pytorch_model-00002-of-00002.bin)"
        in found.message
    )


def test_a_value_may_not_be_called_like_a_tensor_of_another_shard(tmp_path: Path) -> None:
    (found,) = refused(shards(tmp_path, {"a": torch.ones(1), "b": 1}, {"b": torch.ones(1)}))
    assert found.code == "M915"


@pytest.mark.parametrize("value", [[torch.ones(1)], {1: 2}])
def test_a_shard_holds_no_tensors_below_its_values_and_values_of_different_shards_stay(
    value: Any, tmp_path: Path
) -> None:
    folder = shards(tmp_path, {"a": torch.ones(1), "x": value}, {"b": torch.ones(1), "step": 2})
    if isinstance(value, list):
        assert [d.code for d in refused(folder)] == ["M915"]
    else:
        assert dict(index_of(folder).items)["step"] == 2


def test_the_attributes_of_shards_are_one_or_they_are_refused(tmp_path: Path) -> None:
    first, second = nn.Linear(1, 1).state_dict(), nn.Linear(1, 1).state_dict(prefix="b.")
    second._metadata = first._metadata  # type: ignore[attr-defined]
    index_of(shards(tmp_path, first, second))
    second._metadata = {"": {"version": 7}}  # type: ignore[attr-defined]
    (found,) = refused(shards(tmp_path, first, second))
    assert (found.code, "_metadata" in found.message) == ("M915", True)


@pytest.mark.parametrize("indexed", [False, True])
def test_extra_states_that_are_dicts_stand_in_shards_as_in_one_file(
    indexed: bool, tmp_path: Path
) -> None:
    def state(number: float) -> dict[str, Any]:
        return {"scale_fwd": torch.full((3,), number), "extra_fp8_variables": {"fp8_max_fwd": 448}}

    folder, out = tmp_path / "in", tmp_path / "out.pt"
    folder.mkdir()
    shards(
        folder,
        {"a.weight": torch.ones(2), "a._extra_state": state(2.0)},
        {"b.weight": torch.ones(2), "b._extra_state": state(3.0)},
    )
    if indexed:
        names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        weight_map = {
            f"{m}.{last}": name
            for m, name in zip("ab", names, strict=True)
            for last in ("weight", "_extra_state")
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    migrate.apply(folder, out, output_format="torch")
    migrate.verify(out, source=folder)
    made = torch.load(out, weights_only=True)
    for module, number in (("a", 2.0), ("b", 3.0)):
        assert torch.equal(made[f"{module}._extra_state"]["scale_fwd"], torch.full((3,), number))
        assert made[f"{module}._extra_state"]["extra_fp8_variables"] == {"fp8_max_fwd": 448}


def test_safetensors_is_taken_where_a_folder_holds_both(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"s": torch.ones(1)}, tmp_path / "model.safetensors")
    write(tmp_path / "pytorch_model.bin", {"t": torch.ones(1)})
    assert list(index_of(tmp_path).tensors) == ["s"]
    assert list(index_of(tmp_path / "pytorch_model.bin").tensors) == ["t"]


def test_what_only_looks_like_a_file_of_torch_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (found,) = refused(tmp_path / "m.pt")
    assert found.code == "M941"
    assert "git-lfs" in found.message


def test_a_file_without_checksums_says_so(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = write(tmp_path / "m.pt", {"w": torch.ones(4)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert any("have no checksum" in note for note in migrate.inspect(path).to_json()["notes"])


class Named:
    """Stands for a class that is a key of a dict, an attribute of a tensor, or both."""


def test_nothing_opaque_goes_out_again_as_a_key_or_as_an_attribute(tmp_path: Path) -> None:
    marked = torch.ones(2)
    marked.owner = Named()  # type: ignore[attr-defined]
    inner = torch.ones(2)
    inner.twin = torch.zeros(1)  # type: ignore[attr-defined]
    kept = torch.ones(3)
    kept.note = "kept"  # type: ignore[attr-defined]
    value = {"w": kept, "x": {Named: 1, (1, Named): 2, "y": 3}, "marked": marked, "inner": inner}
    path = write(tmp_path / "m.pt", value)
    migrate.apply(path, tmp_path / "out.pt", output_format="torch", allow=["opaque"])
    raw = (tmp_path / "out.pt").read_bytes()
    assert b"Named" not in raw
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(made) == ["w", "x"]
    assert made["x"] == {"y": 3}
    assert made["w"].note == "kept"


def test_tensors_that_the_index_does_not_name_are_refused_with_their_shard(tmp_path: Path) -> None:
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": one, "b": two}}))

    def found(**more: Any) -> str:
        write(tmp_path / one, {"a": torch.ones(1), **more})
        write(tmp_path / two, {"b": torch.ones(1)})
        (problem,) = refused(tmp_path)
        assert problem.code == "M915"
        return problem.message

    assert found(x=torch.ones(2)).endswith(f"keys that it does not name: x (in {one})")
    # the state of a module may be a dict, and hold tensors
    state = {"m._extra_state": {"scale": torch.ones(2)}}
    assert found(**state).endswith(f"keys that it does not name: m._extra_state.scale (in {one})")
    index.write_text(json.dumps({"weight_map": {"a": one, "b": two, "m._extra_state": one}}))
    assert list(index_of(tmp_path).tensors) == ["a", "b"]


def test_an_index_of_one_nested_file_names_all_its_tensors_or_none_are_read(tmp_path: Path) -> None:
    write(
        tmp_path / "pytorch_model.bin",
        {"model": {"a": torch.ones(1)}, "ema": {"shadow": torch.ones(1)}},
    )
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"a": "pytorch_model.bin"}})
    )
    (found,) = refused(tmp_path)
    assert found.message.endswith("keys that it does not name: ema.shadow (in pytorch_model.bin)")
