"""What becomes of the scales of a KV cache and of what declares it: dropped beside plain weights,
carried over from one library's configuration to the other's.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cache_scales import DECLARED, FP8, NVFP4, add_scales, with_cache
from checkpoints import files, refusal, side
from commandline import contents, done, run
from genuine import checkpoint, digests

from migrate.rules.files import files_below, shipped_files, shipped_folder

DECODED = {
    "ct-mxfp8": "mxfp8@bf16",
    "modelopt-mxfp8": "mxfp8@bf16",
    "kimi-k2": "kimi-k2@bf16",
    "torchao-fp8-row": "fp8@bf16",
    "torchao-int8": "torchao@bf16",
    "awq-gemm": "awq@bf16",
    "gptq-sym": "gptq@fp16",
    "gpt-oss": "gpt-oss@bf16",
    "deepseek-v4": "deepseek-v4@bf16",
    "bnb-nf4": "bnb@bf16",
    "bnb-int8": "bnb@bf16",
}
SCALES = [f"model.layers.0.self_attn.{what}" for what in ("k_scale", "v_scale", "k_zero_point")]


@pytest.mark.heavy
@pytest.mark.parametrize("name", DECODED)
def test_scales_of_the_cache_go_with_the_configuration(name: str, tmp_path: Path) -> None:
    source = add_scales(checkpoint(name).folder, tmp_path / "in", SCALES, [1])
    to = ("--to", DECODED[name], "--allow", "lossy")
    failed = run("apply", source, "-o", tmp_path / "x", *to)
    assert failed.exit == 3
    assert "--allow drop" in failed.err
    assert not (tmp_path / "x").exists()
    plan = done("plan", source, *to, "--allow", "drop")
    assert " - model.layers.0.self_attn." in plan.out
    assert "it scales what attention keeps" in plan.out
    assert ", 3 dropped" in plan.out
    done("apply", source, "-o", tmp_path / "plain", *to, "--allow", "drop")
    done("apply", checkpoint(name).folder, "-o", tmp_path / "without", *to)
    assert digests(tmp_path / "plain") == digests(tmp_path / "without")


def test_all_packs_that_leave_plain_weights_drop_them() -> None:
    home = shipped_folder()
    left = set()
    for lineage in sorted(path for path in home.iterdir() if path.is_dir()):
        for file in shipped_files(files_below(lineage)) or ():
            patch = file.model.files.get("config.json")
            if not isinstance(patch, dict) or patch.get("quantization_config", "") is not None:
                continue
            names = [rule.name for rule in file.model.rules]
            if "the cache of keys and values" not in names:
                left.add(file.model.id)
    # stamps of it hold the hash of what its rules mean
    assert left == {"deepseek-v3/bf16/dequantize"}


# in ModelOpt's layout, and the same format in that of compressed-tensors
PAIRS = {
    "modelopt-nvfp4": "ct-nvfp4",
    "modelopt-fp8": "ct-fp8-tensor",
    "modelopt-fp8-channel": "ct-fp8-channel",
}
SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False
}  # fmt: skip
HALF = struct.pack("<f", 0.5)


def lineage(name: str) -> str:
    return "nvfp4" if "nvfp4" in name else "fp8"


def said(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = side(folder)["quantization_config"]
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("places", [DECLARED, DECLARED[:1], DECLARED[1:]])
def test_a_cache_of_modelopts_is_declared_to_compressed_tensors(
    name: str, places: Sequence[str], tmp_path: Path
) -> None:
    source, keys = with_cache(name, tmp_path / "in", places=places)
    goal = f"{lineage(name)}@compressed-tensors"
    to = ("--to", goal, "--allow", "lossy")
    plan = done("plan", source, *to, "--format", "json").json
    assert not [w for w in plan["warnings"] if w["code"] == "M519"]
    out, back, without = tmp_path / "out", tmp_path / "back", tmp_path / "without"
    done("apply", source, "-o", out, *to)
    done("apply", checkpoint(name).folder, "-o", without, *to)
    # beside the cache nothing is other than without one
    there = {re.sub(r"[kv]_proj\.", "", key): ("F32", (1,), HALF) for key in keys}
    assert contents(out) == contents(without) | there
    assert said(out) == {**said(without), "kv_cache_scheme": SCHEME}
    assert "kv_cache_scheme" not in said(without)
    peer = said(checkpoint(PAIRS[name]).folder)
    (ours,), (theirs,) = (c["config_groups"].values() for c in (said(out), peer))
    for which in ("weights", "input_activations"):
        assert all(theirs[which][field] == value for field, value in ours[which].items())
    assert said(out)["format"] == peer["format"]
    done("downgrade", out, "-o", back, "--allow", "lossy")
    assert files(back) == files(source)
    assert {key: contents(back)[key] for key in keys} == dict.fromkeys(keys, ("F32", (), HALF))


@pytest.mark.heavy
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("cache", [True, False])
def test_a_cache_of_compressed_tensors_is_declared_as_modelopt_does(
    name: str, cache: bool, tmp_path: Path
) -> None:
    peer, goal = PAIRS[name], f"{lineage(name)}@modelopt"
    keys = [f"model.layers.0.self_attn.{one}_scale" for one in "kv"] if cache else []
    source = add_scales(checkpoint(peer).folder, tmp_path / "in", keys, [1])
    config = side(source)
    more = {"group_size": None, "observer": "static_minmax"}
    config["quantization_config"]["kv_cache_scheme"] = {**SCHEME, **more} if cache else None
    (source / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    done("apply", source, "-o", out, "--to", goal, "--allow", "lossy")
    # as ModelOpt itself declares this format
    theirs, beside = (side(checkpoint(name).folder, f) for f in ("config", "hf_quant_config"))
    assert said(out)["quant_algo"] == theirs["quantization_config"]["quant_algo"]
    assert said(out).get("kv_cache_scheme") == (FP8[0] if cache else None)
    wanted = beside["quantization"] | {"kv_cache_quant_algo": "FP8" if cache else None}
    assert side(out, "hf_quant_config")["quantization"] == wanted
    made = contents(out)
    for one, key in zip("kv", keys, strict=False):
        there = key.replace(f".{one}_scale", f".{one}_proj.{one}_scale")
        assert made[there] == ("F32", (), HALF)
        assert key not in made
    shapes = contents(checkpoint(name).folder)
    assert {k: v[1] for k, v in made.items() if "_proj.weight_scale" in k} == {
        k: v[1] for k, v in shapes.items() if "_proj.weight_scale" in k
    }


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "modelopt-fp8"])
@pytest.mark.parametrize("scales", [True, False])
def test_a_cache_in_another_format_is_not_declared_and_that_is_said(
    name: str, scales: bool, tmp_path: Path
) -> None:
    source, keys = with_cache(name, tmp_path / "in", NVFP4, scales=scales)
    to = ("--to", f"{lineage(name)}@compressed-tensors", "--allow", "lossy")
    plan = done("plan", source, *to, "--format", "json").json
    (warning,) = (w for w in plan["warnings"] if "KV cache" in w["message"])
    assert warning["code"] == "M519"
    for words in (
        'config.json#quantization_config.kv_cache_scheme is "NVFP4"',
        'hf_quant_config.json#quantization.kv_cache_quant_algo is "NVFP4"',
        "; config.json#quantization_config, which this run writes, does not say",
    ):
        assert words in warning["message"]
    stay = f"; {len(keys)} scales of the cache stay (model.layers.0.self_attn.k_scale, "
    assert (stay in warning["message"]) == scales
    assert "kv_cache_dtype" in warning["help"]
    made = done("apply", source, "-o", tmp_path / "out", *to)
    assert "kv_cache_quant_algo" in made.err
    assert "kv_cache_scheme" not in said(tmp_path / "out")
    back = done("downgrade", tmp_path / "out", "-o", tmp_path / "back", "--allow", "lossy")
    assert "KV cache" not in back.out + back.err
    assert said(tmp_path / "back")["kv_cache_scheme"] == "NVFP4"


def test_inputs_of_compressed_tensors_that_modelopt_has_no_word_for_are_refused(
    tmp_path: Path,
) -> None:
    source = add_scales(checkpoint("ct-fp8-channel").folder, tmp_path / "in", ())
    config = side(source)
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (source / "config.json").write_text(json.dumps(config))
    found = refusal("plan", source, "--to", "fp8@modelopt", exit=2)
    assert found["code"] == "M509"
    assert "algorithm" in found["message"]


def test_experts_that_modelopt_stacks_are_not_left_under_the_other_configuration() -> None:
    source = checkpoint("modelopt-fp8-stacked").folder
    found = refusal("plan", source, "--to", "fp8@compressed-tensors", exit=3)
    assert found["code"] == "M315"
    assert "experts.down_proj is fp8, a scale for each tensor, modelopt by its" in found["message"]
    assert "take a path that decodes them" in found["help"]


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PAIRS)
def test_transformers_reads_the_scales_that_compressed_tensors_declares(
    name: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    import torch

    source, _ = with_cache(name, tmp_path / "in")
    to = ("--to", f"{lineage(name)}@compressed-tensors", "--allow", "lossy")
    done("apply", source, "-o", tmp_path / "out", *to)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    attention = model.model.layers[0].self_attn
    assert attention.k_scale.tolist() == attention.v_scale.tolist() == [0.5]
    scheme = model.config.quantization_config.quantization_config.kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy) == (8, "float", "tensor")
