"""Parts with coordinates: whatever the grid, the same keys with the same bytes; and what is no
grid.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_runs import (
    WEIGHTS,
    Stages,
    expected,
    part_name,
    whole_model,
    write_run,
)
from megatron_runs import RUNS, checkpoint, runs

from migrate import formats
from migrate.core.errors import MigrateError
from migrate.formats._megatron import unrolled
from migrate.source.index import Source
from migrate.source.pickle import alike
from migrate.source.pickle.machine import read_pickle

EVEN = (((0, 1),), ((2, 3),))
VIRTUAL = (((0,), (2,)), ((1,), (3,)))


def held(source: Source) -> dict[str, bytes]:
    out = {}
    for key, stored in source.index.tensors.items():
        buffer = bytearray(stored.spec.nbytes)
        source.blobs[stored.blob].readinto(stored.offset, memoryview(buffer))
        out[key] = bytes(buffer)
    return out


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: tensor.contiguous().numpy().tobytes() for key, tensor in tensors.items()}


def refused(path: Path, code: str, parts: str | None = None) -> str:
    with pytest.raises(MigrateError) as caught:
        formats.open(path, parts=parts)
    found = caught.value.diagnostics
    assert {d.code for d in found} == {code}, str(caught.value)
    return "\n".join(part for d in found for part in (d.message, *d.notes, d.help or ""))


GRIDS: dict[str, tuple[Stages, dict[str, Any], str]] = {
    "one": ((((0, 1, 2, 3),),), {}, "TP 1 x PP 1 x EP 1, 4 layers"),
    "even": (EVEN, {}, "TP 1 x PP 2 x EP 1, 4 layers"),
    "virtual": (VIRTUAL, {}, "TP 1 x PP 2 x VPP 2 x EP 1, 4 layers"),
    "uneven first": (
        (((0,),), ((1, 2, 3),)),
        {"decoder_first_pipeline_num_layers": 1},
        "TP 1 x PP 2 x EP 1, 4 layers",
    ),
    "uneven last": (
        (((0, 1),), ((2, 3),), ((4,),)),
        {"num_layers_in_last_pipeline_stage": 1},
        "TP 1 x PP 3 x EP 1, 5 layers",
    ),
    "uneven, virtual": (
        (((0,), (4,)), ((1, 2), (5, 6)), ((3,), (7,))),
        {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
        "TP 1 x PP 3 x VPP 2 x EP 1, 8 layers",
    ),
    "embedding and loss are counted": (
        (((0,),), ((1, 2),), ((3, 4),), ((5,),)),
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        "TP 1 x PP 4 x EP 1, 6 layers",
    ),
    "embedding and loss are counted, virtual": (
        (((), (1,)), ((0,), ())),
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        "TP 1 x PP 2 x VPP 2 x EP 1, 2 layers",
    ),
    "a layout": (
        (((0,),), ((1, 2),), ((3,),)),
        {"pipeline_model_parallel_layout": "Et|(t)*2,|tL"},
        "TP 1 x PP 3 x EP 1, 4 layers",
    ),
    "a layout of lists, virtual": (
        (((0,), (2, 3)), ((1,), ())),
        {
            "pipeline_model_parallel_layout": [
                ["embedding", "decoder"], ["decoder"], ["decoder", " Decoder"], ["loss"],
            ]
        },
        "TP 1 x PP 2 x VPP 2 x EP 1, 4 layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_args", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", GRIDS)
def test_layers_are_numbered_over_the_whole_model(
    tmp_path: Path, name: str, tp: int, with_args: bool
) -> None:
    stages, args, said = GRIDS[name]
    model = whole_model(1 + max(n for s in stages for v in s for n in v))
    write_run(tmp_path, model, stages, tp=tp, args=args if with_args else None)
    with formats.open(tmp_path) as source:
        assert held(source) == as_bytes(expected(model, tp))
        grid = source.index.grid
        if with_args:
            assert str(grid) == said.replace("TP 1", f"TP {tp}")
        assert grid is None or not grid.replicas


@pytest.mark.parametrize("with_args", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stages", [(((0, 1, 2, 3),),), EVEN, VIRTUAL])
def test_experts_are_numbered_over_all_groups(
    tmp_path: Path, stages: Stages, tp: int, with_args: bool
) -> None:
    model = whole_model(4, experts=4)
    write_run(tmp_path, model, stages, tp=tp, ep=2, args={} if with_args else None)
    with formats.open(tmp_path) as source:
        assert held(source) == as_bytes(expected(model, tp))
        grid = source.index.grid
        assert grid is not None
        dense = {key for key in source.index.tensors if ".local_experts." not in key}
        assert grid.replicas.keys() == dense
        assert {len(found) for found in grid.replicas.values()} == {2}


def test_streams_are_read_once_however_many_parts_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def counted(*args: Any, name: str, **options: Any) -> Any:
        read.append(name)
        return read_pickle(*args, name=name, **options)

    monkeypatch.setattr(alike, "read_pickle", counted)

    def streams(ep: int) -> int:
        model = whole_model(8, experts=ep)
        write_run(tmp_path / f"{ep}", model, (((0, 1, 2, 3),), ((4, 5, 6, 7),)), tp=2, ep=ep)
        read.clear()
        with formats.open(tmp_path / f"{ep}") as source:
            assert held(source) == as_bytes(expected(model, 2))
        return len(read)

    # two stages are two forms, each read once more where it is found that parts say otherwise
    assert streams(4) == streams(16) <= 6


@pytest.mark.parametrize("tp", [1, 2])
def test_the_last_stage_has_a_copy_of_the_tied_embedding(tmp_path: Path, tp: int) -> None:
    model = whole_model(4, tied=True)
    folder = write_run(tmp_path, model, EVEN, tp=tp, args={})
    with formats.open(tmp_path) as source:
        assert held(source) == as_bytes(expected(model, tp))
        assert source.index.grid is not None
        found = source.index.grid.replicas
    keys = [f"embedding.word_embeddings.weight{m}" for m in ([""] if tp == 1 else ["@0", "@1"])]
    assert sorted(found) == keys
    assert [one.part for one in found[keys[0]]] == [
        f"{part_name(0, stage)}/{WEIGHTS}" for stage in (0, 1)
    ]
    assert folder.is_dir()


def test_a_tied_model_without_args_keeps_the_copy_as_a_key_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, whole_model(4, tied=True), EVEN, args=None)
    with formats.open(tmp_path) as source:
        assert "output_layer.weight" in source.index.tensors


def te_experts(name: str, root: dict[str, Any]) -> None:
    """The names of Transformer Engine's grouped experts."""
    for key in [key for key in root["model"] if ".local_experts." in key]:
        value = root["model"].pop(key)
        words = key.split(".")
        e = words.pop(6)
        words.pop(5)
        new = ".".join(words)
        if value is not None:
            root["model"][new + e] = value
        else:
            root["model"][new] = None


def test_experts_of_transformer_engine_are_numbered_too(tmp_path: Path) -> None:
    model = whole_model(2, experts=4)
    write_run(tmp_path, model, (((0, 1),),), ep=2, args={}, change=te_experts)
    with formats.open(tmp_path) as source:
        keys = {key for key in source.index.tensors if ".experts." in key}
        assert keys == {
            f"decoder.layers.{n}.mlp.experts.linear_fc1.weight{e}"
            for n in range(2)
            for e in range(4)
        }
        found = held(source)
    for e in range(4):
        was = model[f"decoder.layers.1.mlp.experts.local_experts.{e}.linear_fc1.weight"]
        key = f"decoder.layers.1.mlp.experts.linear_fc1.weight{e}"
        assert found[key] == was.numpy().tobytes()


def test_module_versions_follow_their_layers(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        model = root["model"]
        model._metadata = {
            "decoder.layers.0.mlp": {"version": 3 if name == "mp_rank_00_000" else 4}
        }

    write_run(tmp_path, whole_model(4), EVEN, args={}, change=change)
    with formats.open(tmp_path) as source:
        assert source.index.versions == {"decoder.layers.0.mlp": 3, "decoder.layers.2.mlp": 4}


# one part alone


@pytest.mark.parametrize("file", [False, True])
def test_one_part_alone_has_the_numbers_of_the_whole_and_is_said_to_be_a_part(
    tmp_path: Path, file: bool
) -> None:
    model = whole_model(4)
    folder = write_run(tmp_path, model, VIRTUAL, tp=2, args={})
    part = folder / part_name(1, 1)
    with formats.open(part / WEIGHTS if file else part) as source:
        wanted = {
            key: tensor
            for key, tensor in expected(model, 2).items()
            if key.endswith("@1")
            and (key.split(".")[2] in "13" if ".layers." in key else "embedding" not in key)
        }
        assert held(source) == as_bytes({key[:-2]: value for key, value in wanted.items()})
        assert str(source.index.grid) == (
            "TP 2 x PP 2 x VPP 2 x EP 1, 4 layers: one part alone, TP 1, PP 1, EP 0"
        )


def test_one_stage_without_args_keeps_its_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, args=None)
    with formats.open(folder / part_name(0, 1)) as source:
        assert source.index.grid is not None
        assert source.index.grid.alone
        assert "decoder.layers.0.input_layernorm.weight" in source.index.tensors


def test_virtual_stages_without_args_need_the_other_parts(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), VIRTUAL, args=None)
    assert "2 virtual stages of mp_rank_00_001" in refused(folder / part_name(0, 1), "M924")


# what is no grid


def test_all_missing_parts_are_named_by_their_coordinates(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4, experts=2), EVEN, tp=2, ep=2, args={})
    shutil.rmtree(folder / part_name(1, 0, 1))
    shutil.rmtree(folder / part_name(1, 1, 1))
    found = refused(folder, "M920")
    assert "2 of 8 parts are missing" in found
    assert "mp_rank_01_000_001 (TP 1, PP 0, EP 1), mp_rank_01_001_001 (TP 1, PP 1, EP 1)" in found


def test_args_say_how_many_parts_there_are(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, tp=2, args={})
    shutil.rmtree(folder / part_name(1, 0))
    shutil.rmtree(folder / part_name(1, 1))
    assert "2 of 4 parts are missing" in refused(folder, "M920")
    (folder / part_name(0, 0)).rename(folder / part_name(2, 0))
    assert "args say TP 2" in refused(folder, "M924")


@pytest.mark.parametrize(("grid", "missing"), [({"tp": 2}, "stages"), ({"ep": 2}, "groups")])
def test_names_of_several_parts_tell_that_the_others_are_missing_where_args_are_silent(
    tmp_path: Path, grid: dict[str, int], missing: str
) -> None:
    stages = EVEN if missing == "stages" else (((0, 1),),)
    folder = write_run(tmp_path, whole_model(4, experts=2), stages, **grid)
    for path in folder.glob("*_001"):
        shutil.rmtree(path)
    assert f"{missing}, and there is one" in refused(folder, "M920")
    with formats.open(folder / "mp_rank_00_000") as source:
        assert "decoder.layers.1.input_layernorm.weight" in source.index.tensors


def test_a_folder_without_weights_is_a_missing_part(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, args={})
    (folder / part_name(0, 1) / WEIGHTS).unlink()
    assert "mp_rank_00_001" in refused(folder, "M920")


def test_two_names_of_one_part(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, args={})
    shutil.copytree(folder / part_name(0, 1), folder / "mp_rank_00_0001")
    found = refused(folder, "M924")
    assert "two stand for one part" in found
    assert "mp_rank_00_0001" in found


@pytest.mark.parametrize(("tp", "ep", "stages"), [(2, 1, EVEN[:1]), (1, 2, EVEN[:1]), (1, 1, EVEN)])
def test_one_part_in_two_places(tmp_path: Path, tp: int, ep: int, stages: Stages) -> None:
    model = whole_model(2 * len(stages), experts=2)
    folder = write_run(tmp_path, model, stages, tp=tp, ep=ep, args={})
    first, second = sorted(path for path in folder.iterdir())
    shutil.copy(first / WEIGHTS, second / WEIGHTS)
    found = refused(folder, "M924")
    assert f"{first.name} and {second.name} are the same part, that of rank 0" in found


def test_parts_that_one_process_wrote_differ_in_their_tensors(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path,
        whole_model(4),
        tp=2,
        args={},
        change=lambda name, root: setattr(root["args"], "rank", 0),
    )
    with formats.open(folder) as source:
        assert "decoder.layers.3.mlp.linear_fc1.weight@1" in source.index.tensors


def test_parts_of_two_kinds_of_grids(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, args={})
    write_run(tmp_path / "other", whole_model(4), args={})
    shutil.copytree(tmp_path / "other/iter_0000010/mp_rank_00", folder / "mp_rank_00")
    assert "not parts of one grid" in refused(folder, "M924")


def test_weights_beside_parts_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path, whole_model(4), EVEN, args={})
    torch.save({"w": torch.ones(1)}, folder / "model.pt")
    assert "model.pt" in refused(folder, "M915")


def in_part(part: str, act: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    return lambda name, root: act(root) if name == part else None


LAST = part_name(0, 1)
CHANGES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "another iteration": (
        in_part(LAST, lambda root: root.update(iteration=20)),
        ("`iteration` is 10 in mp_rank_00_000 and 20 in mp_rank_00_001",),
    ),
    "another model": (
        in_part(LAST, lambda root: setattr(root["args"], "hidden_size", 8)),
        ("`hidden_size` is 4 in mp_rank_00_000 and 8 in mp_rank_00_001",),
    ),
    "another run of the model": (
        in_part(LAST, lambda root: setattr(root["args"], "seed", 2)),
        ("`seed` is 1234 in mp_rank_00_000 and 2 in mp_rank_00_001",),
    ),
    "args in one part only": (
        in_part(LAST, lambda root: root.pop("args")),
        ("parts without args", "mp_rank_00_001"),
    ),
    "fewer layers than args say": (
        in_part(
            LAST,
            lambda root: [root["model"].pop(k) for k in [*root["model"]] if ".layers.1." in k],
        ),
        ("by args mp_rank_00_001 has 2 layers, and its keys have 1",),
    ),
    "a hole": (
        in_part(
            LAST,
            lambda root: [root["model"].pop(k) for k in [*root["model"]] if ".layers.0." in k],
        ),
        ("mp_rank_00_001 has 1 layer up to number 1, and lacks 0",),
    ),
    "a large hole": (
        in_part(
            LAST,
            lambda root: root["model"].update({"decoder.layers.9999999.w": torch.ones(1)}),
        ),
        ("mp_rank_00_001", "lacks 2, 3, 4"),
    ),
    "layers that do not divide": (
        lambda name, root: setattr(root["args"], "num_layers", 5),
        ("5 layers do not divide by 2 stages",),
    ),
    "an uneven stage that does not divide": (
        lambda name, root: setattr(root["args"], "decoder_first_pipeline_num_layers", 5),
        ("4 layers with 5 in the first",),
    ),
    "a layout of another model": (
        lambda name, root: setattr(root["args"], "pipeline_model_parallel_layout", "Ett|ttt|L"),
        ("pipeline_model_parallel_layout is not one of 4 layers in 2 stages",),
    ),
    "no pipeline in args": (
        lambda name, root: setattr(root["args"], "pipeline_model_parallel_size", 1),
        ("args say PP 1 x EP 1", "mp_rank_00_000"),
    ),
    "virtual stages in args only": (
        lambda name, root: setattr(root["args"], "virtual_pipeline_model_parallel_size", 2),
        ("args say 2 virtual stages, and mp_rank_00_000 has 1",),
    ),
    "virtual stages in one part only": (
        in_part(LAST, lambda root: root.update(model0=root["model"], model1=root.pop("model"))),
        ("mp_rank_00_000 lacks model0, model1",),
    ),
    "a whole model beside virtual stages": (
        in_part(LAST, lambda root: root.update(model1=root["model"])),
        ("mp_rank_00_001 has `model` and virtual stages beside it",),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_parts_that_do_not_agree_are_named(tmp_path: Path, case: str) -> None:
    change, said = CHANGES[case]
    write_run(tmp_path, whole_model(4), EVEN, args={}, change=change)
    found = refused(tmp_path, "M924")
    for words in said:
        assert words in found


@pytest.mark.parametrize("tied", [True, False])
def test_arguments_that_say_another_output_layer(tmp_path: Path, tied: bool) -> None:
    write_run(
        tmp_path,
        whole_model(4, tied=tied),
        args={"untie_embeddings_and_output_weights": tied},
    )
    found = refused(tmp_path, "M924")
    there = "there is no" if tied else "there is an"
    said = f"`untie_embeddings_and_output_weights` is {tied}, and {there} output_layer.weight"
    assert said in found


def test_a_folder_that_is_called_after_another_iteration_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, whole_model(4), args={}, iteration=200)
    (tmp_path / "iter_0000200").rename(tmp_path / "iter_0000100")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with formats.open(tmp_path) as source:
        notes = source.index.notes
    assert "the folder is called iter_0000100, and what is in it says `iteration` 200" in notes


def test_a_virtual_stage_that_one_part_lacks(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            del root["model1"]

    write_run(tmp_path, whole_model(4), VIRTUAL, args={}, change=change)
    assert "mp_rank_00_001 lacks model1" in refused(tmp_path, "M924")


def test_ranks_of_one_stage_have_the_same_keys(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == part_name(1, 1):
            del root["model"]["decoder.final_layernorm.weight"]

    write_run(tmp_path, whole_model(4), EVEN, tp=2, args={}, change=change)
    assert "decoder.final_layernorm.weight" in refused(tmp_path, "M924")


def grouped(root: dict[str, Any]) -> None:
    """Puts the experts of a layer into one tensor, as GroupedMLP has them."""
    for key in [key for key in root["model"] if ".local_experts." in key]:
        del root["model"][key]
    root["model"]["decoder.layers.0.mlp.experts.weight2"] = torch.ones(4, 4)


GROUPS: dict[str, tuple[Callable[..., None], str, tuple[str, ...]]] = {
    "experts that do not divide": (
        lambda name, root: setattr(root["args"], "num_experts", 5),
        "M924",
        ("args say 5 experts in 2 groups",),
    ),
    "a group with fewer experts": (
        in_part(
            LAST,
            lambda root: [root["model"].pop(k) for k in [*root["model"]] if "_experts.1." in k],
        ),
        "M924",
        ("mp_rank_00_000 has 2, mp_rank_00_001 has 1",),
    ),
    "an expert is missing": (
        in_part(
            LAST,
            lambda root: [root["model"].pop(k) for k in [*root["model"]] if "_experts.0." in k],
        ),
        "M924",
        ("mp_rank_00_001 lacks experts: 0",),
    ),
    "an expert is missing in one layer": (
        in_part(
            LAST,
            lambda root: root["model"].pop(
                "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"
            ),
        ),
        "M924",
        ("mp_rank_00_001 lacks decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight",),
    ),
    "a layer without experts in one group": (
        in_part(
            LAST,
            lambda root: [
                root["model"].pop(k) for k in [*root["model"]] if "layers.2.mlp.experts." in k
            ],
        ),
        "M924",
        ("decoder.layers.2.mlp.experts.local_experts.*.linear_fc1.weight",),
    ),
    "a dense weight that one group lacks": (
        in_part(LAST, lambda root: root["model"].pop("decoder.layers.0.mlp.router.weight")),
        "M924",
        ("decoder.layers.0.mlp.router.weight", "mp_rank_00_000 and mp_rank_00_001"),
    ),
    "a dense weight of another shape": (
        in_part(
            LAST,
            lambda root: root["model"].update(
                {"decoder.layers.0.input_layernorm.weight": torch.ones(3)}
            ),
        ),
        "M924",
        ("float32 [4] in mp_rank_00_000 and float32 [3] in mp_rank_00_001",),
    ),
    "a value that differs": (
        in_part(LAST, lambda root: root["model"].update({"decoder.value": 1})),
        "M924",
        ("decoder.value",),
    ),
    "experts with a tensor parallelism of their own": (
        lambda name, root: setattr(root["args"], "expert_tensor_parallel_size", 2),
        "M925",
        ("2 tensor-parallel ranks and the rest for 1",),
    ),
    "experts in one tensor, of another shape": (
        lambda name, root: root["model"].update(
            {"decoder.layers.0.mlp.experts.weight1": torch.ones(3, 4)}
        ),
        "M925",
        ("decoder.layers.0.mlp.experts.weight1", "float32 [3, 4] in each of 2 groups"),
    ),
    "experts in one tensor, in columns": (
        lambda name, root: root["model"].update(
            {"decoder.layers.0.mlp.experts.weight1": torch.ones(4, 4).T}
        ),
        "M925",
        ("decoder.layers.0.mlp.experts.weight1",),
    ),
    "experts in one tensor, of unlike groups": (
        lambda name, root: root["model"].update(
            {"decoder.layers.0.mlp.experts.weight2": torch.ones(4 + (name == LAST), 4)}
        ),
        "M924",
        ("float32 [4, 4] in mp_rank_00_000 and float32 [5, 4] in mp_rank_00_001",),
    ),
    "experts in one tensor that do not divide": (
        lambda name, root: (
            grouped(root),
            setattr(root["args"], "num_experts", 3),
        ),
        "M924",
        ("args say 3 experts in 2 groups",),
    ),
    "experts in one tensor with a tensor parallelism of their own": (
        lambda name, root: (
            grouped(root),
            setattr(root["args"], "expert_tensor_parallel_size", 2),
        ),
        "M925",
        ("2 tensor-parallel ranks and the rest for 1",),
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_expert_groups_that_are_not_joined(tmp_path: Path, case: str) -> None:
    change, code, said = GROUPS[case]
    write_run(tmp_path, whole_model(4, experts=4), ep=2, args={}, change=change)
    found = refused(tmp_path, code)
    for words in said:
        assert words in found


def test_layers_of_two_stacks_over_stages_are_not_joined(tmp_path: Path) -> None:
    def both(name: str, root: dict[str, Any]) -> None:
        root["model"]["vision.layers.0.weight"] = torch.ones(1)

    write_run(tmp_path / "a", whole_model(4), EVEN, args={}, change=both)
    assert "vision.layers" in refused(tmp_path / "a", "M925")

    def other(name: str, root: dict[str, Any]) -> None:
        if name == part_name(0, 0):
            root["model"] = {k.replace("decoder", "encoder"): v for k, v in root["model"].items()}

    write_run(tmp_path / "b", whole_model(4), EVEN, args={}, change=other)
    assert "decoder.layers, encoder.layers" in refused(tmp_path / "b", "M925")


def test_a_stack_of_one_stage_is_left_as_it_is(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            root["model"]["mtp.layers.0.weight"] = torch.ones(1)

    write_run(tmp_path, whole_model(4), EVEN, args={}, change=change)
    with formats.open(tmp_path) as source:
        assert "mtp.layers.0.weight" in source.index.tensors
        assert "decoder.layers.3.input_layernorm.weight" in source.index.tensors


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_an_older_checkpoint_version_is_refused(tmp_path: Path, version: float) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["checkpoint_version"] = version

    write_run(tmp_path, whole_model(4), args={}, change=change)
    assert f"checkpoint_version {version}" in refused(tmp_path, "M925")


def test_nested_dicts_of_older_releases_are_not_joined(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["model"] = {"language_model": {"encoder": dict(root["model"])}}

    write_run(tmp_path, whole_model(4), EVEN, args=None, change=change)
    assert "no flat dict `model`" in refused(tmp_path, "M925", "stages")


# the second number


def without_ends(name: str, root: dict[str, Any]) -> None:
    for key in [key for key in root["model"] if ".layers." not in key]:
        del root["model"][key]


def test_where_args_and_keys_are_silent_a_person_says_what_the_second_number_counts(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, whole_model(4), EVEN, args=None, change=without_ends)
    found = refused(tmp_path, "M924")
    assert 'params={"parts": "stages"} or params={"parts": "experts"}' in found
    with formats.open(tmp_path, parts="stages") as source:
        assert "decoder.layers.3.input_layernorm.weight" in source.index.tensors
    # as expert groups they have the same keys, and other bytes
    with formats.open(tmp_path, parts="experts") as source:
        assert "decoder.layers.3.input_layernorm.weight" not in source.index.tensors
        assert source.index.grid is not None
        assert source.index.grid.replicas
    refused(tmp_path, "M115", "layers")


def test_args_decide_before_a_person_does(tmp_path: Path) -> None:
    write_run(tmp_path, whole_model(4), EVEN, args={})
    assert "PP 2 x EP 1" in refused(tmp_path, "M924", "experts")


def test_a_second_number_that_args_do_not_have(tmp_path: Path) -> None:
    write_run(tmp_path, whole_model(4), EVEN, args={"expert_model_parallel_size": 2})
    assert "names have 3 numbers" in refused(tmp_path, "M924")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Ettt|(tt|)*29,m|L", [3, *[2] * 29, 0, 0]),
        ("Et*3|(t|)*2L", [3, 1, 1, 0]),
        ("E|t|L", [0, 1, 0]),
    ],
)
def test_layouts_areunrolled(text: str, counts: list[int]) -> None:
    found = unrolled(text)
    assert found is not None
    assert [row.count("t") for row in found.split("|")] == counts


@pytest.mark.parametrize("text", ["t" * 200_000, "(t)*999999", "(" + "t" * 1000 + ")*1000"])
def test_layouts_of_too_many_layers_are_notunrolled(text: str) -> None:
    assert unrolled(text) is None


# what megatron-core wrote


@pytest.mark.parametrize("family", RUNS)
def test_all_grids_of_a_genuine_model_are_the_same(family: str) -> None:
    whole: dict[str, tuple[list[str], dict[str, bytes]]] = {}
    seen = 0
    for name, grid in runs():
        if name != family:
            continue
        with formats.open(checkpoint(name, "legacy", grid)) as source:
            found = list(source.index.tensors), held(source)
            values = {k: v for k, v in source.index.items.items() if k.startswith("decoder.")}
            assert all(value is None for value in values.values())
        # resharded by megatron-core itself; only tensor-parallel ranks are kept apart
        assert whole.setdefault("tp2" if "tp2" in grid else "1", found) == found, grid
        seen += 1
    assert seen >= 5
