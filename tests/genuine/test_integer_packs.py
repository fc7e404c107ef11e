"""Integers that compressed-tensors packed, and Kimi K2's experts, decoded by their lineages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import contents, done
from genuine import checkpoint, digests
from safetensors.torch import load_file, save_file

PACKED = ["ct-w4a16", "ct-w4a16-asym", "ct-w3a16", "ct-w8a16", "ct-w8a8", "ct-mxfp4", "ct-mxfp6"]
KIMI = checkpoint("kimi-k2")
LOSSY = ("--allow", "lossy")


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", PACKED)
def test_what_is_decoded_is_what_compressed_tensors_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--to", "compressed-tensors@bf16", *LOSSY)
    assert digests(out) == genuine.tensors
    assert "quantization_config" not in config(out)
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", PACKED)
def test_each_is_known_by_its_parts(name: str) -> None:
    found = done("inspect", checkpoint(name).folder, "--format", "json").json["layouts"]
    others = {"ct-w8a8": "int8", "ct-mxfp4": "mxfp4", "ct-mxfp6": "mxfp6"}
    layout = others.get(name, "int-pack")
    known = [f"{one['lineage']}@{one['layout']}" for one in found]
    # codes of eight bits stand under the names of Llama's weights
    assert [one for one in known if one != "meta-llama@hf"] == [f"compressed-tensors@{layout}"]


def test_what_was_kept_brings_all_bytes_back(tmp_path: Path) -> None:
    source, out, kept = checkpoint("ct-w4a16-asym").folder, tmp_path / "out", tmp_path / "kept"
    done("apply", source, "-o", out, "--to", "compressed-tensors@bf16", "--undo", kept, *LOSSY)
    done("downgrade", out, "-o", tmp_path / "back", "--undo", kept)
    assert digests(tmp_path / "back") == digests(source)
    assert config(tmp_path / "back") == config(source)


def test_kimi_k2_is_known_by_its_experts() -> None:
    found = done("inspect", KIMI.folder, "--format", "json").json["layouts"]
    assert [f"{one['lineage']}@{one['layout']}" for one in found] == ["kimi-k2@int4"]


def test_kimi_k2_becomes_what_compressed_tensors_decodes_it_to(tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    done("apply", KIMI.folder, "-o", out, "--to", "kimi-k2@bf16", *LOSSY)
    assert digests(out) == KIMI.tensors
    assert "quantization_config" not in config(out)
    done("verify", out, "--source", KIMI.folder)
    done("downgrade", out, "-o", back, *LOSSY)
    was, made = contents(KIMI.folder), contents(back)
    assert {k: v[:2] for k, v in made.items()} == {k: v[:2] for k, v in was.items()}
    # groups whose largest code is 7 come back with their codes
    same = [key for key in was if key.endswith("weight_packed") and was[key] == made[key]]
    assert same
    assert all(was[k] == made[k] for k in was if k.endswith("weight_shape"))
    assert config(back) == config(KIMI.folder)


def vision(folder: Path) -> Path:
    """The checkpoint under the names, and with the configuration, of Kimi-K2.5."""
    folder.mkdir()
    state = load_file(KIMI.folder / "model.safetensors")
    renamed = {f"language_model.{key}": tensor for key, tensor in state.items()}
    renamed["vision_tower.patch_embed.proj.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
    renamed["mm_projector.proj.0.weight"] = torch.ones(2, 2, dtype=torch.bfloat16)
    save_file(renamed, folder / "model.safetensors")
    said = {"model_type": "kimi_k25", "text_config": config(KIMI.folder)}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_the_same_below_language_model_beside_a_vision_tower(tmp_path: Path) -> None:
    source, out, back = vision(tmp_path / "a"), tmp_path / "out", tmp_path / "back"
    done("apply", source, "-o", out, "--to", "kimi-k2@bf16", *LOSSY)
    found = digests(out)
    assert {
        key.removeprefix("language_model."): text
        for key, text in found.items()
        if key.startswith("language_model.")
    } == KIMI.tensors
    assert len(found) == len(KIMI.tensors) + 2
    assert "quantization_config" not in config(out)["text_config"]
    done("downgrade", out, "-o", back, *LOSSY)
    assert contents(back).keys() == contents(source).keys()
    assert config(back) == config(source)


def test_a_model_without_a_stamp_is_encoded_and_told_so(tmp_path: Path) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    done("apply", KIMI.folder, "-o", plain, "--to", "kimi-k2@bf16", *LOSSY)
    (plain / "migrate.history.json").unlink()
    done("apply", plain, "-o", made, "--from", "kimi-k2@bf16", "--to", "kimi-k2@int4", *LOSSY)
    assert contents(made).keys() == contents(KIMI.folder).keys()
    said = config(made)["quantization_config"]
    was = config(KIMI.folder)["quantization_config"]
    assert {k: said[k] for k in ("quant_method", "format")} == {
        k: was[k] for k in ("quant_method", "format")
    }
    weights = said["config_groups"]["group_0"]["weights"]
    assert weights.items() <= was["config_groups"]["group_0"]["weights"].items()
    assert "model.layers.1.self_attn.o_proj" in said["ignore"]
    assert not any("experts.0" in module for module in said["ignore"])
