"""Parts of Megatron's runs through the command line: what is checked, what is left out by a word
only, and what does not come back.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commandline import done, rules, run
from cut_runs import WEIGHTS, arguments, expected, part_name, whole_model, write_run
from megatron_runs import checkpoint
from safetensors.torch import load_file, save_file

import migrate

EVEN = (((0, 1),), ((2, 3),))
RENAME = """rules:
  - {name: all, from: "{k...}.weight", to: "new.{k}.w"}
  - {name: states, from: "{m...}._extra_state", optional: true, inverse: skip,
     via: [{drop: {why: none}}]}
"""
LAST = part_name(0, 1)
KEY = "decoder.layers.0.input_layernorm.weight"


def failed(status: int, code: str, *args: object) -> str:
    found = run(*args)
    assert found.exit == status, found.err
    assert f"[{code}]" in found.err
    return found.err


def same(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(found[key], tensor), key


def test_a_grid_becomes_one_model_and_is_verified(tmp_path: Path) -> None:
    model = whole_model(4, experts=4)
    run_folder, out = tmp_path / "run", tmp_path / "out"
    write_run(run_folder, model, (((0,), (2,)), ((1,), (3,))), ep=2, args={})
    assert "grid     TP 1 x PP 2 x VPP 2 x EP 2, 4 layers" in done("inspect", run_folder).out
    plan = done("plan", run_folder, "--output-format", "safetensors").out
    assert "TP 1 x PP 2 x VPP 2 x EP 2, 4 layers: 4 parts joined" in plan
    assert "values are checked first: equal, 15×, in all parts that have them" in plan
    assert "what differs between them beside the model" in plan
    done("apply", run_folder, "-o", out, "--output-format", "safetensors", "--no-fsync")
    same(out, model)
    done("verify", out, "--source", run_folder)


def test_ranks_stay_apart(tmp_path: Path) -> None:
    model = whole_model(4)
    write_run(tmp_path / "run", model, EVEN, tp=2, args={})
    out = tmp_path / "out"
    done("apply", tmp_path / "run", "-o", out, "--output-format", "safetensors", "--no-fsync")
    keys = {row["keys"] for row in done("inspect", out, "--all", "--format", "json").json["keys"]}
    assert keys == set(expected(model, 2))


def one_bit(name: str, root: dict[str, Any]) -> None:
    if name == LAST:
        bits = root["model"][KEY].numpy().view(np.uint32)
        bits[2] ^= 1


@pytest.mark.parametrize("how", ["apply", "rules", "load"])
def test_replicas_that_differ_in_one_bit_are_named_with_both_parts(
    tmp_path: Path, how: str
) -> None:
    write_run(tmp_path / "run", whole_model(4, experts=2), ep=2, args={}, change=one_bit)
    out = tmp_path / "out"
    if how == "load":
        module = torch.nn.Module()
        module.register_parameter("w", torch.nn.Parameter(torch.zeros(4)))
        rule = rules(
            tmp_path,
            f"""rules:
  - {{name: w, from: {KEY}, to: w}}
  - {{name: others, from: "{{k...}}", via: [{{drop: {{why: only one is wanted}}}}]}}
""",
        )
        with pytest.raises(migrate.MigrateError) as caught:
            migrate.load(module, tmp_path / "run", rules=rule, allow="drop")
        assert {d.code for d in caught.value.diagnostics} == {"M923"}
        found = str(caught.value)
        assert not module.w.any()
    else:
        options: list[Any] = ["--output-format", "safetensors"]
        options += ["--rules", rules(tmp_path, RENAME), "--allow", "drop"] * (how == "rules")
        found = failed(3, "M923", "apply", tmp_path / "run", "-o", out, "--no-fsync", *options)
    assert f"{KEY} of mp_rank_00_000/{WEIGHTS} and {KEY} of {LAST}/{WEIGHTS}" in found
    assert "differ first at [2]" in found
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("how", ["diff", "verify"])
def test_a_grid_of_unlike_copies_is_not_said_to_be_equal(tmp_path: Path, how: str) -> None:
    source, out = tmp_path / "run", tmp_path / "out"
    model = whole_model(4, experts=2)
    write_run(source, model, ep=2, args={})
    migrate.apply(source, out, output_format="safetensors", allow={"drop"})
    shutil.rmtree(source)
    write_run(source, model, ep=2, args={}, change=one_bit)
    args = ("diff", source, source) if how == "diff" else ("verify", out, "--source", source)
    assert KEY in failed(3, "M923", *args)


def test_a_tied_copy_that_differs_is_named(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        if name == LAST:
            root["model"]["output_layer.weight"][3, 1] += 1

    write_run(tmp_path / "run", whole_model(4, tied=True), EVEN, args={}, change=change)
    args = ("apply", tmp_path / "run", "-o", tmp_path / "out", "--output-format", "safetensors")
    found = failed(3, "M923", *args)
    assert (
        f"embedding.word_embeddings.weight of mp_rank_00_000/{WEIGHTS} and output_layer.weight of "
        f"{LAST}/{WEIGHTS}"
    ) in found
    assert "differ first at [3, 1]" in found


def rng_state(name: str, root: dict[str, Any]) -> None:
    root["rng_state"] = [{"torch": torch.tensor([1, 2], dtype=torch.uint8)}]


def test_what_differs_beside_the_model_is_kept_by_part(tmp_path: Path) -> None:
    run_folder, out = tmp_path / "run", tmp_path / "out"
    write_run(run_folder, whole_model(4), EVEN, args={}, change=rng_state)
    done("apply", run_folder, "-o", out, "--output-format", "safetensors", "--no-fsync")
    done("verify", out, "--source", run_folder)
    found = done("inspect", out, "--values").out
    assert "kept by part at `parts`, for 2 parts: args.rank, rng_state" in found
    assert "parts." not in found
    beside = load_file(out / "migrate.items.safetensors")
    assert sorted(beside) == ["/parts.mp_rank_00_001.rng_state.0.torch", "/rng_state.0.torch"]
    # what one part alone says stands in no other
    assert "args.rank = 0" in found


def test_a_part_with_a_value_of_the_name_of_what_is_kept_is_not_joined(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["parts"] = 7

    write_run(tmp_path / "run", whole_model(4), EVEN, args={}, change=change)
    assert "has a value `parts` of its own" in failed(3, "M925", "inspect", tmp_path / "run")


def optimizer(name: str, root: dict[str, Any]) -> None:
    moments = {"step": 1, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    root["optimizer"] = {"state": {0: moments}, "param_groups": [{"params": [0], "lr": 0.1}]}


def beside(folder: Path) -> None:
    for part in folder.glob("mp_rank_*"):
        torch.save({"buckets": [torch.ones(2)]}, part / "distrib_optim.pt")


@pytest.mark.parametrize("where", ["in the parts", "beside one stage", "beside stages"])
@pytest.mark.parametrize("how", ["convert", "rules"])
def test_optimizer_state_is_left_out_by_a_word_only(tmp_path: Path, where: str, how: str) -> None:
    stages = (((0, 1, 2, 3),),) if where == "beside one stage" else EVEN
    inside = where == "in the parts"
    folder = write_run(
        tmp_path / "run",
        whole_model(4),
        stages,
        args={},
        change=optimizer if inside else lambda name, root: None,
    )
    if not inside:
        beside(folder)
    args: list[Any] = ["apply", folder, "-o", tmp_path / "out", "--output-format", "safetensors"]
    args += ["--rules", rules(tmp_path, RENAME)] if how == "rules" else []
    place = f"{WEIGHTS}: optimizer" if inside else "distrib_optim.pt"
    assert place in failed(3, "M410", *args, "--allow", "lossy")
    assert place in failed(3, "M410", *args, "--allow", "stale-optimizer", "--allow", "drop")
    assert place in failed(3, "M402", *args, "--set", "optimizer=drop")
    done(*args, "--set", "optimizer=drop", "--allow", "drop", "--no-fsync")
    found = done("inspect", tmp_path / "out", "--format", "json").json
    assert found["tensors"] == len(whole_model(4))
    assert not any("optim" in item["path"] for item in found["items"] if "args" not in item["path"])
    assert found["carried"]["tensors"] == 0


ADAM = {
    "state": {0: {"step": 1, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
    "param_groups": [{"params": [0], "lr": 0.1}],
}
FLIP = RENAME.replace('w"}', 'w", via: [{flip: {dim: 0}}]}')


@pytest.mark.parametrize(
    "held",
    [
        {"optimizer": ADAM, "fp32_from_fp16_params": [[torch.ones(2)]], "grad_scaler": {}},
        [ADAM, ADAM],
        {"fp32_from_fp16_params": [[torch.ones(2)]]},
        {"param_state": {0: {"exp_avg": torch.ones(2)}}},
        {"distributed.dp_group_idx_0.gbuf_idx_0.param": torch.ones(2)},
    ],
    ids=["of 16 bits", "several", "masters alone", "state alone", "buckets"],
)
@pytest.mark.parametrize("stages", [(((0, 1, 2, 3),),), EVEN], ids=["one part", "two"])
def test_no_spelling_of_optimizer_state_goes_stale_in_silence(
    tmp_path: Path, held: Any, stages: Any
) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["optimizer"] = held

    write_run(tmp_path / "run", whole_model(4), stages, args={}, change=change)
    args: list[Any] = ["apply", tmp_path / "run", "-o", tmp_path / "out", "--no-fsync"]
    args += ["--output-format", "safetensors", "--rules", rules(tmp_path, FLIP), "--allow", "drop"]
    assert "optimizer" in failed(3, "M410", *args)
    done(*args, "--set", "optimizer=drop")
    found = done("inspect", tmp_path / "out", "--format", "json").json
    assert found["carried"]["tensors"] == 0
    assert not any("optim" in item["path"] for item in found["items"])


def loaded(path: Path) -> Any:
    with torch.serialization.safe_globals([Namespace]):
        return torch.load(path, weights_only=True)


def test_the_way_back_leads_to_the_grid_that_was_read(tmp_path: Path) -> None:
    model = whole_model(4)
    folder = write_run(tmp_path / "run", model, EVEN, tp=2, args={})
    rule = rules(tmp_path, RENAME)
    out, back = tmp_path / "out", tmp_path / "back"
    options = ("--rules", rule, "--allow", "drop", "--no-fsync")
    done("apply", tmp_path / "run", "-o", out, "--output-format", "safetensors", *options)
    said = done("downgrade", out, "-o", back, *options).out
    assert "written as TP 2 x PP 2 x EP 1, 4 layers: 4 parts in iter_0000010" in said
    for r in range(2):
        for p in range(2):
            name = Path(part_name(r, p)) / WEIGHTS
            made = loaded(back / folder.name / name)["model"]
            was = loaded(folder / name)["model"]
            assert list(made) == [key for key, value in was.items() if value is not None]
            assert all(torch.equal(made[key], was[key]) for key in made)
    done("verify", back, "--source", out, "--rules", rule)
    whole = ("-o", tmp_path / "whole", "--output-format", "safetensors", *options)
    found = done("downgrade", out, *whole).out
    assert "the grid was TP 2 x PP 2 x EP 1, 4 layers; all layers and experts stand" in found


def test_one_part_alone_is_migrated_and_said_to_be_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", whole_model(4), EVEN, args={})
    out = tmp_path / "out"
    assert "one part alone, TP 0, PP 1, EP 0" in done("inspect", folder / LAST).out
    found = done("plan", folder / LAST, "--output-format", "safetensors").out
    assert "one part alone, TP 0, PP 1, EP 0; the tensors of the other parts are not here" in found
    done("apply", folder / LAST, "-o", out, "--output-format", "safetensors", "--no-fsync")
    assert "decoder.layers.2.mlp.linear_fc1.weight" in load_file(out / "model.safetensors")


def test_the_second_number_is_said_on_the_command_line(tmp_path: Path) -> None:
    def change(name: str, root: dict[str, Any]) -> None:
        root["model"] = {k: v for k, v in root["model"].items() if ".layers." in k}

    write_run(tmp_path / "run", whole_model(4), EVEN, args=None, change=change)
    found = failed(3, "M924", "inspect", tmp_path / "run")
    assert "--set parts=stages or --set parts=experts" in found
    found = done("inspect", tmp_path / "run", "--set", "parts=stages").out
    assert "grid     TP 1 x PP 2 x EP 1, 4 layers" in found
    out = ("-o", tmp_path / "out", "--output-format", "safetensors", "--set", "parts=stages")
    done("apply", tmp_path / "run", *out, "--no-fsync")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 12


def test_what_stands_beside_the_model_does_not_say_the_grid_twice() -> None:
    """`args` of the cutter are those that the reader asks for."""
    from migrate.formats._megatron import SIZES

    assert set(SIZES.values()) <= arguments().keys()


def test_what_is_kept_by_part_is_verified(tmp_path: Path) -> None:
    run_folder, out = checkpoint("llama", "legacy", "tp2-pp2"), tmp_path / "out"
    to = ("--to", "megatron-gpt@llama", "--output-format", "safetensors")
    done("apply", run_folder, "-o", out, *to, "--no-fsync")
    done("verify", out, "--source", run_folder)
    beside = out / "migrate.items.safetensors"
    kept = load_file(beside)
    assert kept
    beside.unlink()
    key = next(key for key, tensor in kept.items() if tensor.numel())
    save_file(kept | {key: kept[key] + 1}, beside)
    assert run("verify", out, "--source", run_folder).exit == 1
