"""NVFP4 checkpoints that ModelOpt and compressed-tensors wrote, decoded by the lineage `nvfp4`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cache_scales import with_cache
from commandline import contents, done, run
from genuine import checkpoint, digests

CT = ["ct-nvfp4", "ct-nvfp4a16"]
MODELOPT = ["modelopt-nvfp4", "modelopt-nvfp4-moe"]
MIXED = "modelopt-mixed"
ALLOW = ("--allow", "lossy", "--allow", "drop")


def unsigned_zeros(folder: Path) -> dict[str, str]:
    """`digests` where zeros have no sign: ModelOpt makes +0 of the code of -0."""
    out = {}
    for key, (dtype, shape, data) in contents(folder).items():
        raw = np.frombuffer(data, "<u2")
        kept = np.where(raw == 0x8000, 0, raw).astype("<u2").tobytes()
        out[key] = f"{dtype} {list(shape)} {hashlib.sha256(kept).hexdigest()}"
    return out


@pytest.mark.parametrize("name", [*CT, *MODELOPT, "modelopt-nvfp4-stacked", MIXED])
def test_what_is_decoded_is_what_its_library_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    found = digests(out) if name in CT else unsigned_zeros(out)
    assert found == genuine.tensors
    # the peer's fault is one
    assert (digests(out) == genuine.tensors) == (name in CT)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"]
    assert not (out / "hf_quant_config.json").exists()
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", [*CT, *MODELOPT])
def test_the_way_back_encodes_what_was_encoded_and_restores_the_configuration(
    name: str, tmp_path: Path
) -> None:
    genuine, out, back = checkpoint(name), tmp_path / "out", tmp_path / "back"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    done("downgrade", out, "-o", back, *ALLOW)
    one, other = contents(genuine.folder), contents(back)
    left_out = {key for key in one if key.endswith(("input_scale", "input_global_scale"))}
    assert {k: v[:2] for k, v in one.items() if k not in left_out} == {
        k: v[:2] for k, v in other.items()
    }
    # plain weights are what they were
    plain = [k for k in other if not k.endswith(("_scale", "_scale_2", "_packed"))]
    plain = [k for k in plain if one[k][0] == "BF16"]
    assert plain
    assert all(one[k] == other[k] for k in plain)
    for file in ("config.json", "hf_quant_config.json"):
        if (genuine.folder / file).exists():
            text = [json.loads((f / file).read_text()) for f in (genuine.folder, back)]
            if left_out:
                # what is said of the scales of inputs is not (test_restored_configuration)
                said = [t.get("quantization_config", t.get("quantization")) for t in text]
                for one_said in said:
                    one_said.pop("quant_algo", None)
                    for group in one_said.get("config_groups", {}).values():
                        group.pop("input_activations", None)
            assert text[0] == text[1]


@pytest.mark.parametrize(
    ("name", "layout"), [(CT[0], "compressed-tensors"), (MODELOPT[0], "modelopt"), (MIXED, MIXED)]
)
def test_the_two_layouts_are_told_apart(name: str, layout: str) -> None:
    plan = done(
        "plan", checkpoint(name).folder, "--to", "nvfp4@bf16", *ALLOW, "--format", "json"
    ).json
    assert [step["from"] for step in plan["path"]] == [layout]


def scale_of(data: bytes) -> np.float32:
    return np.float32(np.frombuffer(data, "<f4")[0])


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopts_parts_become_those_that_its_converter_makes(name: str, tmp_path: Path) -> None:
    """compressed-tensors' `ModelOptNvfp4Converter` renames, and takes 1 / x of two scales; it
    leaves them without the axis that its own files have.
    """
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@compressed-tensors", *ALLOW[:2])
    renamed = {
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
        "weight": "weight_packed",
    }
    wanted = {}
    for key, (dtype, shape, data) in contents(genuine.folder).items():
        module, _, leaf = key.rpartition(".")
        if leaf in ("weight_scale_2", "input_scale"):
            shape, data = [1], (np.float32(1) / scale_of(data)).tobytes()
        is_plain = leaf == "weight" and dtype != "U8"
        name_there = leaf if is_plain else renamed.get(leaf, leaf)
        wanted[f"{module}.{name_there}"] = (dtype, list(shape), data)
    found = {key: (d, list(s), b) for key, (d, s, b) in contents(out).items()}
    assert found == wanted
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    peer = json.loads((checkpoint(CT[0]).folder / "config.json").read_text())["quantization_config"]
    (ours,), (theirs,) = (c["config_groups"].values() for c in (config, peer))
    for which in ("weights", "input_activations"):
        assert all(theirs[which][field] == value for field, value in ours[which].items())
    assert config["format"] == peer["format"]
    assert not (out / "hf_quant_config.json").exists()
    # every number is what it was, in bfloat16
    done("apply", out, "-o", tmp_path / "plain", "--to", "nvfp4@bf16", *ALLOW)
    assert unsigned_zeros(tmp_path / "plain") == genuine.tensors


def test_the_other_way_needs_no_stamp_and_writes_modelopts_configuration(tmp_path: Path) -> None:
    genuine, out, plain = checkpoint(CT[0]), tmp_path / "out", tmp_path / "plain"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@modelopt", *ALLOW[:2])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    beside = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "NVFP4")
    assert config["ignore"] == beside["exclude_modules"] == ["lm_head", "model.embed_tokens"]
    assert beside["group_size"] == 16
    one, other = contents(genuine.folder), contents(out)
    for key, (dtype, shape, data) in one.items():
        module, _, leaf = key.rpartition(".")
        if leaf in ("weight_global_scale", "input_global_scale"):
            there = other[f"{module}.{'weight_scale_2' if leaf[0] == 'w' else 'input_scale'}"]
            assert there == ("F32", (), (np.float32(1) / scale_of(data)).tobytes())
        else:
            assert other[key.replace("weight_packed", "weight")] == (dtype, shape, data)
    done("apply", out, "-o", plain, "--to", "nvfp4@bf16", *ALLOW)
    assert digests(plain) == genuine.tensors


def test_weights_without_scales_of_inputs_are_not_made_to_look_like_those_with(
    tmp_path: Path,
) -> None:
    folder = checkpoint("ct-nvfp4a16").folder
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", "nvfp4@modelopt", *ALLOW)
    assert failed.exit == 3
    assert "M206" in failed.err
    assert "input_global_scale" in failed.err
    assert not (tmp_path / "x").exists()


AWQ = "modelopt-nvfp4-awq"
INPUTS = "model.layers.0.self_attn.o_proj.pre_quant_scale"


def test_columns_that_awq_has_divided_are_multiplied_again(tmp_path: Path) -> None:
    genuine, out = checkpoint(AWQ), tmp_path / "out"
    assert INPUTS in contents(genuine.folder)
    plan = done("plan", genuine.folder, "--to", "nvfp4@bf16", *ALLOW)
    assert "model.layers.0.self_attn.o_proj.{weight,pre_quant}_scale  (rounds)" in plan.out
    assert f"not restored: {INPUTS}" in plan.out
    failed = run("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW[2:])
    assert failed.exit == 3
    assert "--allow lossy" in failed.err
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    # by ModelOpt's own numbers in float32, multiplied and rounded once
    assert unsigned_zeros(out) == genuine.tensors
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True
    # the way back is that of weights that are not divided
    done("downgrade", out, "-o", tmp_path / "back", *ALLOW)
    assert INPUTS not in contents(tmp_path / "back")


@pytest.mark.heavy
def test_with_undo_what_inputs_are_multiplied_by_comes_back(tmp_path: Path) -> None:
    genuine, out, back = checkpoint(AWQ), tmp_path / "out", tmp_path / "back"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", "--undo", tmp_path / "u", *ALLOW)
    done("downgrade", out, "-o", back, "--undo", tmp_path / "u")
    assert digests(back) == digests(genuine.folder)


def test_what_awq_multiplies_inputs_by_is_not_left_beside_other_weights(tmp_path: Path) -> None:
    source = checkpoint(AWQ).folder
    failed = run("apply", source, "-o", tmp_path / "x", "--to", "nvfp4@compressed-tensors", *ALLOW)
    assert failed.exit == 3
    assert "error[M408]: rule 'linears'" in failed.err
    assert f"whose `pre_quant_scale` stays: {INPUTS}" in failed.err
    assert not (tmp_path / "x").exists()


@pytest.mark.heavy
def test_the_rest_of_a_weight_that_layers_add_is_not_left_beside_it(tmp_path: Path) -> None:
    """ModelOpt's SVDQuant keeps a part of the weight as a product of two small matrices."""
    import torch
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(checkpoint(AWQ).folder, tmp_path / "in")
    file, stem = source / "model.safetensors", INPUTS.removesuffix("pre_quant_scale")
    small = {
        f"{stem}svdquant_lora_{one}": torch.zeros(shape, dtype=torch.bfloat16)
        for one, shape in (("a", (4, 64)), ("b", (64, 4)))
    }
    save_file(load_file(file) | small, file)
    failed = run("apply", source, "-o", tmp_path / "x", "--to", "nvfp4@bf16", *ALLOW)
    assert failed.exit == 3
    assert "error[M408]: rule 'linears'" in failed.err
    assert f"{stem}svdquant_lora_a" in failed.err
    assert "adds a product with it" in failed.err


@pytest.mark.heavy
def test_scales_of_the_cache_go_with_the_configuration_that_declares_it(tmp_path: Path) -> None:
    source, keys = with_cache(MODELOPT[0], tmp_path / "in")
    to = ("--to", "nvfp4@bf16", *ALLOW)
    plan = done("plan", source, *to)
    assert all(key in plan.out for key in keys)
    assert "it scales what attention keeps" in plan.out
    assert "M519" not in plan.out + plan.err
    failed = run("apply", source, "-o", tmp_path / "out", *to[:4])
    assert failed.exit == 3
    assert "--allow drop" in failed.err
    done("apply", source, "-o", tmp_path / "out", *to, "--undo", tmp_path / "undo")
    assert unsigned_zeros(tmp_path / "out") == checkpoint(MODELOPT[0]).tensors
    done("downgrade", tmp_path / "out", "-o", tmp_path / "back", "--undo", tmp_path / "undo")
    assert contents(tmp_path / "back") == contents(source)


def test_modules_in_other_formats_are_not_left_behind(tmp_path: Path) -> None:
    failed = run(
        "apply", checkpoint("ct-mixed").folder, "-o", tmp_path / "x", "--to", "nvfp4@bf16", *ALLOW
    )
    assert "M504" in failed.err
    assert "is float8_e4m3fn: signs of something else" in failed.err


def test_which_modules_were_in_fp8_only_what_was_kept_for_the_way_back_tells(
    tmp_path: Path,
) -> None:
    source, out, undo = checkpoint(MIXED).folder, tmp_path / "out", tmp_path / "undo"
    done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW, "--undo", undo)
    failed = run("downgrade", out, "-o", tmp_path / "x", *ALLOW)
    assert "M405" in failed.err
    assert not (tmp_path / "x").exists()
    done("downgrade", out, "-o", tmp_path / "back", "--undo", undo)
    assert contents(tmp_path / "back") == contents(source)


def with_configuration(folder: Path, **change: object) -> Path:
    """ModelOpt's checkpoint with something else in its configuration, which is all of it."""
    shutil.copytree(checkpoint(MODELOPT[0]).folder, folder)
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("to", ["bf16", "compressed-tensors"])
def test_a_configuration_of_another_format_is_refused_with_both_readings(
    to: str, tmp_path: Path
) -> None:
    folder = with_configuration(tmp_path / "in", quant_algo="FP8")
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", f"nvfp4@{to}", *ALLOW)
    assert "M315" in failed.err
    assert "is nvfp4, groups of 16, modelopt by its tensors" in failed.err
    assert "fp8, 8 bits, a scale for each tensor" in failed.err
    assert not (tmp_path / "x").exists()


def test_a_module_that_is_encoded_and_plain_by_the_configuration_is_decoded_with_a_warning(
    tmp_path: Path,
) -> None:
    folder = with_configuration(tmp_path / "in", ignore=["model.layers.0.*"])
    made = done("apply", folder, "-o", tmp_path / "x", "--to", "nvfp4@bf16", *ALLOW)
    assert "groups of 16, modelopt by its tensors, and plain by the configuration" in made.err
    assert unsigned_zeros(tmp_path / "x") == checkpoint(MODELOPT[0]).tensors


def test_a_model_that_was_trained_is_encoded_but_for_what_loaders_keep_plain(
    tmp_path: Path,
) -> None:
    trained, out = tmp_path / "trained", tmp_path / "out"
    done("apply", checkpoint(MODELOPT[1]).folder, "-o", trained, "--to", "nvfp4@bf16", *ALLOW)
    (trained / "migrate.history.json").unlink()
    wanted = {k for k in contents(checkpoint(MODELOPT[1]).folder) if not k.endswith("input_scale")}
    done("apply", trained, "-o", out, "--from", "nvfp4@bf16", "--to", "nvfp4@modelopt", *ALLOW)
    encoded = [k for k in contents(out) if k.endswith("weight_scale_2")]
    assert {k for k in wanted if k.endswith("weight_scale_2")} <= set(encoded)
    assert not [k for k in encoded if k.split(".")[-2] in ("embed_tokens", "lm_head", "gate")]
    said = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["quant_algo"]) == ("modelopt", "W4A16_NVFP4")
    assert {"lm_head", "model.embed_tokens"} <= set(said["ignore"])
