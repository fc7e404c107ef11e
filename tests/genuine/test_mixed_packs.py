"""Checkpoints with modules in several formats: what compressed-tensors mixed, and what
configurations say of modules one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import folder
from commandline import done, run
from genuine import checkpoint, digest, digests, names
from safetensors.torch import load_file, save_file

ALLOW = ("--allow", "lossy", "--allow", "drop")
TO = ("--to", "compressed-tensors@bf16", *ALLOW)
MIXED = ["ct-mixed", "ct-mixed-int"]
# those of one format; what is one of several lineages' is asked for in theirs
KNOWN = {
    "ct-bitmask": "compressed-tensors@sparse-bitmask",
    "ct-bitmask-all": "compressed-tensors@sparse-bitmask",
    "ct-bitmask-int8": "compressed-tensors@sparse-bitmask",
    "ct-fp8-block": "fp8@compressed-tensors",
    "ct-fp8-channel": "fp8@compressed-tensors",
    "ct-fp8-tensor": "fp8@compressed-tensors",
    "ct-marlin24": "compressed-tensors@marlin-24",
    "ct-mixed": "compressed-tensors@mixed",
    "ct-mixed-int": "compressed-tensors@mixed",
    "ct-mxfp4": "compressed-tensors@mxfp4",
    "ct-mxfp6": "compressed-tensors@mxfp6",
    "ct-mxfp8": "mxfp8@mxfp8",
    "ct-nvfp4": "nvfp4@compressed-tensors",
    "ct-nvfp4a16": "nvfp4@compressed-tensors",
    "ct-sparse24": "compressed-tensors@sparse-24",
    "ct-sparse24-fp8": "compressed-tensors@sparse-24",
    "ct-sparse24-int8": "compressed-tensors@sparse-24",
    "ct-w3a16": "compressed-tensors@int-pack",
    "ct-w4a16": "compressed-tensors@int-pack",
    "ct-w4a16-asym": "compressed-tensors@int-pack",
    "ct-w567a16": "compressed-tensors@int-pack",
    "ct-w8a16": "compressed-tensors@int-pack",
    "ct-w8a8": "compressed-tensors@int8",
}
PRUNED = [name for name in KNOWN if "sparse" in KNOWN[name] or "marlin" in KNOWN[name]]


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def made(folder: Path, tensors: Mapping[str, Any], said: Any) -> Path:
    """A folder of these tensors and this configuration."""
    folder.mkdir()
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def stored(name: str) -> dict[str, Any]:
    return load_file(checkpoint(name).folder / "model.safetensors")


def test_all_that_compressed_tensors_made_is_here() -> None:
    assert {name for name in names() if name.startswith("ct-")} == KNOWN.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_each_is_in_one_layout_of_one_lineage(name: str) -> None:
    found = done("inspect", checkpoint(name).folder, "--format", "json").json["layouts"]
    known = [f"{one['lineage']}@{one['layout']}" for one in found]
    # codes of eight bits stand under the names of Llama's weights
    assert [one for one in known if one != "meta-llama@hf"] == [KNOWN[name]]


@pytest.mark.parametrize("name", MIXED)
def test_what_is_decoded_is_what_compressed_tensors_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, *TO)
    assert digests(out) == genuine.tensors
    before = config(genuine.folder)
    del before["quantization_config"]
    assert config(out) == before
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", PRUNED)
def test_what_is_pruned_is_decoded_as_a_release_that_could_did(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, *TO)
    assert digests(out) == genuine.tensors
    assert "quantization_config" not in config(out)
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in (*MIXED, *PRUNED)])
def test_the_rules_of_mixed_ones_decode_those_of_one_format_too(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--from", "compressed-tensors@mixed", *TO)
    assert digests(out) == genuine.tensors


@pytest.mark.parametrize(
    ("name", "goal"), [("ct-fp8-channel", "fp8@bf16"), ("ct-w8a8", "compressed-tensors@bf16")]
)
def test_the_general_name_of_a_format_changes_nothing(name: str, goal: str, tmp_path: Path) -> None:
    """FP8 of weights alone is called naive-quantized."""
    said = config(checkpoint(name).folder)
    said["quantization_config"]["format"] = "naive-quantized"
    for group in said["quantization_config"]["config_groups"].values():
        group |= {"format": "naive-quantized", "input_activations": None}
    folder = made(tmp_path / "in", stored(name), said)
    done("apply", folder, "-o", tmp_path / "out", "--to", goal, *ALLOW)
    assert digests(tmp_path / "out") == checkpoint(name).tensors


def test_what_was_kept_brings_all_bytes_back(tmp_path: Path) -> None:
    source, out, kept = checkpoint("ct-mixed").folder, tmp_path / "out", tmp_path / "kept"
    done("apply", source, "-o", out, *TO, "--undo", kept)
    done("downgrade", out, "-o", tmp_path / "back", "--undo", kept)
    assert digests(tmp_path / "back") == digests(source)
    assert config(tmp_path / "back") == config(source)


def strategies(folder: Path) -> tuple[Path, dict[str, str]]:
    """Attention with a scale for each row and MLPs with one for each block, which share a format,
    and what compressed-tensors decodes them to.
    """
    rows, blocks = "ct-fp8-channel", "ct-fp8-block"
    tensors = {k: t for k, t in stored(rows).items() if ".mlp." not in k}
    tensors |= {k: t for k, t in stored(blocks).items() if ".mlp." in k}
    said, other = (config(checkpoint(name).folder) for name in (rows, blocks))
    groups = said["quantization_config"]["config_groups"]
    groups["group_1"] = other["quantization_config"]["config_groups"]["group_0"]
    groups["group_0"]["targets"] = [r"re:.*self_attn\.(q|k|v|o)_proj$"]
    groups["group_1"]["targets"] = [r"re:.*mlp\.(gate|up|down)_proj$"]
    said["intermediate_size"] = other["intermediate_size"]
    wanted = {k: t for k, t in checkpoint(rows).tensors.items() if ".mlp." not in k}
    wanted |= {k: t for k, t in checkpoint(blocks).tensors.items() if ".mlp." in k}
    return made(folder, tensors, said), wanted


def test_one_format_in_several_strategies(tmp_path: Path) -> None:
    folder, wanted = strategies(tmp_path / "in")
    failed = run("apply", folder, "-o", tmp_path / "out", "--to", "fp8@bf16", *ALLOW)
    assert failed.exit == 3
    assert "mlp" in failed.err
    done("apply", folder, "-o", tmp_path / "out", "--from", "compressed-tensors@mixed", *TO)
    assert digests(tmp_path / "out") == wanted


def test_mxfp6_beside_mxfp4_is_told_by_the_shapes(tmp_path: Path) -> None:
    """Their parts have the same names and dtypes."""
    fours, sixes = checkpoint("ct-mxfp4"), checkpoint("ct-mxfp6")
    tensors = {k: t for k, t in stored("ct-mxfp6").items() if ".mlp." not in k}
    tensors |= {k: t for k, t in stored("ct-mxfp4").items() if ".mlp." in k}
    said, other = config(sixes.folder), config(fours.folder)
    groups = said["quantization_config"]["config_groups"]
    groups["group_1"] = other["quantization_config"]["config_groups"]["group_0"]
    groups["group_0"]["targets"] = [r"re:.*self_attn\.(q|k|v|o)_proj$"]
    groups["group_1"]["targets"] = [r"re:.*mlp\.(gate|up|down)_proj$"]
    said["quantization_config"]["format"] = "mixed-precision"
    folder = made(tmp_path / "in", tensors, said)
    done("apply", folder, "-o", tmp_path / "out", *TO)
    wanted = {k: t for k, t in sixes.tensors.items() if ".mlp." not in k}
    assert digests(tmp_path / "out") == wanted | {
        k: t for k, t in fours.tensors.items() if ".mlp." in k
    }


def test_blocks_of_two_sizes_are_refused_by_both(tmp_path: Path) -> None:
    folder, _ = strategies(tmp_path / "in")
    said = config(folder)
    groups = said["quantization_config"]["config_groups"]
    groups["group_2"] = json.loads(json.dumps(groups["group_1"]))
    groups["group_2"]["weights"]["block_structure"] = [16, 16]
    groups["group_2"]["targets"] = ["lm_head"]
    (folder / "config.json").write_text(json.dumps(said))
    failed = run("apply", folder, "-o", tmp_path / "x", "--from", "compressed-tensors@mixed", *TO)
    assert failed.exit == 2
    assert "M510" in failed.err
    assert "config_groups.group_1.weights.block_structure" in failed.err
    assert "config_groups.group_2.weights.block_structure" in failed.err


@pytest.mark.parametrize(
    ("name", "group", "weights", "words"),
    [
        ("ct-mixed-int", "group_0", {"group_size": 64}, ("k_proj", "groups of 32", "groups of 64")),
        ("ct-mixed-int", "group_3", {"num_bits": 4}, ("up_proj", "8 bits", "4 bits")),
        ("ct-mixed-int", "group_2", {"type": "float"}, ("gate_proj", "int8", "fp8")),
        ("ct-mixed", "group_1", {"group_size": 32}, ("gate_proj", "nvfp4", "mxfp4")),
        ("ct-mixed", "group_2", {"num_bits": 6}, ("down_proj", "mxfp8", "mxfp6")),
    ],
)
def test_a_configuration_that_says_something_else_of_some_modules_is_refused(
    name: str, group: str, weights: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    said = config(checkpoint(name).folder)
    said["quantization_config"]["config_groups"][group]["weights"] |= weights
    folder = made(tmp_path / "in", stored(name), said)
    failed = run("apply", folder, "-o", tmp_path / "x", *TO)
    assert failed.exit == 3
    assert "error[M315" in failed.err
    assert all(word in failed.err for word in words)
    assert not (tmp_path / "x").exists()


def test_codes_that_the_configuration_calls_plain_are_decoded_with_a_warning(
    tmp_path: Path,
) -> None:
    said = config(checkpoint("ct-mixed").folder)
    said["quantization_config"]["ignore"].append("model.layers.1.mlp.down_proj")
    folder = made(tmp_path / "in", stored("ct-mixed"), said)
    warned = done("apply", folder, "-o", tmp_path / "out", *TO)
    assert digests(tmp_path / "out") == checkpoint("ct-mixed").tensors
    assert "M519" in warned.err
    assert "model.layers.1.mlp.down_proj" in warned.err


@pytest.mark.parametrize(
    ("key", "lacks"),
    [
        ("model.layers.0.mlp.gate_proj.weight_scale", "mlp.gate_proj.weight_scale"),
        ("model.layers.0.mlp.gate_proj.weight_global_scale", "gate_proj.weight_global_scale"),
        ("model.layers.0.self_attn.q_proj.weight", "self_attn.q_proj.weight"),
        ("model.layers.0.self_attn.q_proj.weight_scale", "self_attn.q_proj.weight_scale"),
    ],
)
def test_a_part_that_is_missing_is_named(key: str, lacks: str, tmp_path: Path) -> None:
    tensors = stored("ct-mixed")
    del tensors[key]
    folder = made(tmp_path / "in", tensors, config(checkpoint("ct-mixed").folder))
    failed = run("apply", folder, "-o", tmp_path / "x", *TO)
    assert failed.exit == 3
    assert "M207" in failed.err
    assert lacks in failed.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("compressed-tensors@mixed", "compressed-tensors@bf16"),
        ("fp8@hf", "fp8@bf16"),
        ("nvfp4@modelopt", "nvfp4@bf16"),
    ],
)
@pytest.mark.parametrize("name", [None, "gptq-v1"])
def test_a_checkpoint_of_which_the_rules_decode_nothing_is_refused(
    name: str | None, source: str, to: str, tmp_path: Path
) -> None:
    plain = {"l.q_proj.weight": torch.ones(2, 16), "l.norm.weight": torch.ones(2)}
    folder = (
        checkpoint(name).folder
        if name is not None
        else made(tmp_path / "in", plain, config(checkpoint("ct-mixed").folder))
    )
    question = ("--from", source, "--to", to, "--allow", "lossy", "--allow", "drop")
    failed = run("apply", folder, "-o", tmp_path / "x", *question)
    assert failed.exit == 3
    # of several rules, or of the one that is left where no experts are stacked
    said = ("error[M206]: no key is decoded or encoded: rules ", "error[M206]: rule 'linears' ")
    assert failed.err.startswith(said)
    assert not (tmp_path / "x").exists()


def test_scales_of_the_cache_are_said_and_dropped(tmp_path: Path) -> None:
    beside = {
        f"model.layers.0.self_attn.{name}": torch.tensor([0.5])
        for name in ("k_scale", "v_scale", "q_scale")
    }
    beside |= {f"model.layers.0.self_attn.{w}_proj.output_scale": torch.tensor([2.0]) for w in "kv"}
    said = config(checkpoint("ct-mixed").folder)
    said["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    folder = made(tmp_path / "in", stored("ct-mixed") | beside, said)
    plan = done("plan", folder, *TO)
    assert all(key.rpartition(".")[2] in plan.out for key in beside)
    assert "it scales what attention keeps" in plan.out
    failed = run("apply", folder, "-o", tmp_path / "out", *TO[:4])
    assert failed.exit == 3
    assert "--allow drop" in failed.err
    done("apply", folder, "-o", tmp_path / "out", *TO)
    assert digests(tmp_path / "out") == checkpoint("ct-mixed").tensors


def test_experts_of_kimi_k2_beside_attention_in_fp8(tmp_path: Path) -> None:
    """As quantized copies of it are published: another lineage than that of the release."""
    kimi, plain = checkpoint("kimi-k2"), tmp_path / "plain"
    done("apply", kimi.folder, "-o", plain, "--to", "kimi-k2@bf16", *ALLOW)
    numbers = load_file(plain / "model.safetensors")
    # of rows of 32 four words may be of three bits as well
    tensors = {k: t for k, t in stored("kimi-k2").items() if ".down_proj.weight_" not in k}
    tensors |= {k: t for k, t in numbers.items() if k.endswith(".down_proj.weight")}
    wanted = dict(kimi.tensors)
    for key in [key for key in tensors if key.endswith("self_attn.o_proj.weight")]:
        scale = (tensors[key].abs().amax(1, keepdim=True) / 448).clamp(min=1e-4)
        codes = (tensors[key] / scale).to(torch.float8_e4m3fn)
        decoded = (codes.float() * scale.float()).to(torch.bfloat16)
        tensors |= {key: codes, f"{key}_scale": scale}
        raw = decoded.view(torch.int16).numpy().tobytes()
        wanted[key] = digest("BF16", tuple(decoded.shape), raw)
    said = config(kimi.folder)
    groups = said["quantization_config"]["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = {
        "targets": [r"re:.*self_attn\.o_proj$"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    said["quantization_config"] |= {
        "format": "mixed-precision",
        "ignore": [
            item for item in said["quantization_config"]["ignore"] if "self_attn" not in item
        ]
        + [r"re:.*self_attn\.(q|kv)_.*"],
    }
    folder = made(tmp_path / "in", tensors, said)
    found = done("inspect", folder, "--format", "json").json["layouts"]
    assert [f"{one['lineage']}@{one['layout']}" for one in found] == ["compressed-tensors@mixed"]
    done("apply", folder, "-o", tmp_path / "out", *TO)
    assert digests(tmp_path / "out") == wanted


def test_what_is_not_decoded_is_refused_by_its_name(tmp_path: Path) -> None:
    parts = {
        "l.q_proj.weight_packed": torch.ones(4, 8, dtype=torch.int64),
        "l.q_proj.scale_packed": torch.ones(1, 8, dtype=torch.float16),
    }
    said = {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-48"}}
    folder = made(tmp_path / "in", parts, said)
    failed = run("apply", folder, "-o", tmp_path / "x", *TO)
    assert failed.exit == 2
    assert "M504" in failed.err
    assert 'quantization_config.format = "marlin-48"' in failed.err


def test_layers_that_modelopt_lists_one_by_one_are_held_against_their_tensors(
    tmp_path: Path,
) -> None:
    said = config(checkpoint("modelopt-mixed").folder)
    layers = said["quantization_config"]["quantized_layers"]
    layers["model.layers.0.self_attn.q_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    folder = made(tmp_path / "in", stored("modelopt-mixed"), said)
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", "nvfp4@bf16", *ALLOW)
    assert failed.exit == 3
    assert "error[M315" in failed.err
    assert "model.layers.0.self_attn.q_proj is fp8" in failed.err
    assert "nvfp4" in failed.err


def test_bits_that_gptq_says_of_some_modules_are_held_against_their_tensors(
    tmp_path: Path,
) -> None:
    said = config(checkpoint("gptq-v2-dynamic").folder)
    for name, how in said["quantization_config"]["dynamic"].items():
        if name.startswith(("+", ".")) and "bits" in how:
            how["bits"] = 2
    folder = made(tmp_path / "in", stored("gptq-v2-dynamic"), said)
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", "gptq@fp16", *ALLOW)
    assert failed.exit == 3
    assert "error[M315" in failed.err
    assert "2 bits" in failed.err


@pytest.mark.parametrize("layout", ["mixed", "int-pack", "int8", "mxfp4", "mxfp6"])
def test_plain_weights_are_not_copied_as_what_nothing_encodes(layout: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {"l.q_proj.weight": ("BF16", [32, 64])}, config={})
    asked = ("--from", "compressed-tensors@bf16", "--to", f"compressed-tensors@{layout}")
    failed = done("plan", source, *asked, "--allow", "lossy", "--format", "json", exit=3).json
    (found,) = failed["diagnostics"]
    assert found["code"] == "M405"
    assert f"nothing makes compressed-tensors@{layout} of plain numbers" in found["message"]
    assert "fp8, nvfp4 or mxfp8" in found["help"]
