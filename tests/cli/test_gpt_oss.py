"""gpt-oss between MXFP4 and bfloat16, in transformers' names and in OpenAI's, against what
transformers 5.23 itself loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import DATA, contents, done, fingerprint, run
from safetensors.torch import load_file, save_file

PAIR = DATA / "mxfp4_dequant_gpt_oss"
HUB = PAIR / "hub"
# what OpenAI's config.json says otherwise than transformers'
OPENAI = {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"}
NAMES = {
    "input_layernorm.weight": "attn.norm.scale",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "self_attn.sinks": "attn.sinks",
    "self_attn.o_proj.weight": "attn.out.weight",
    "self_attn.o_proj.bias": "attn.out.bias",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.bias": "mlp.gate.bias",
    "mlp.experts.gate_up_proj_blocks": "mlp.mlp1_weight.blocks",
    "mlp.experts.gate_up_proj_scales": "mlp.mlp1_weight.scales",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_blocks": "mlp.mlp2_weight.blocks",
    "mlp.experts.down_proj_scales": "mlp.mlp2_weight.scales",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
}
ENDS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "unembedding.weight",
}


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def plain_config() -> Any:
    config = config_of(HUB)
    del config["quantization_config"]
    return config


def assert_equal(made: Path, wanted: Path) -> None:
    one, other = contents(made), contents(wanted)
    assert one.keys() == other.keys()
    for key in other:
        assert one[key] == other[key], key


def original(path: Path) -> Path:
    """The checkpoint with OpenAI's names and configuration: the mapping of transformers'
    convert_gpt_oss_weights_to_hf.py, the other way round.
    """
    held, made = load_file(HUB / "model.safetensors"), dict[str, torch.Tensor]()
    for key, name in ENDS.items():
        made[name] = held.pop(key)
    for n in range(2):
        at = f"model.layers.{n}."
        for key, name in NAMES.items():
            made[f"block.{n}.{name}"] = held.pop(at + key)
        for leaf in ("weight", "bias"):
            made[f"block.{n}.attn.qkv.{leaf}"] = torch.cat(
                [held.pop(f"{at}self_attn.{w}_proj.{leaf}") for w in "qkv"]
            )
    assert not held
    path.mkdir()
    save_file(made, path / "model.safetensors")
    known = plain_config()
    names = (
        "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "swiglu_limit",
        "head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window",
    )  # fmt: skip
    config = {name: known[name] for name in names}
    config |= {name: known[key] for key, name in OPENAI.items()}
    config |= {
        "initial_context_length": 4096, "rope_theta": 150000, "rope_scaling_factor": 32.0,
        "rope_ntk_alpha": 1, "rope_ntk_beta": 32,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_one_command_makes_what_transformers_loads_and_allows_nothing(
    tmp_path: Path, device: str
) -> None:
    before = fingerprint(HUB)
    done("apply", HUB, "-o", tmp_path / "new", "--to", "gpt-oss@bf16", "--device", device)
    assert_equal(tmp_path / "new", PAIR / "v5")
    assert config_of(tmp_path / "new") == plain_config()
    verified = done("verify", tmp_path / "new", "--source", HUB, "--format", "json").json
    assert verified["equal"] is True
    assert fingerprint(HUB) == before


def test_the_way_back_brings_the_codes_the_scales_and_the_configuration(
    tmp_path: Path, device: str
) -> None:
    done("apply", HUB, "-o", tmp_path / "new", "--to", "gpt-oss@bf16")
    undo = ["downgrade", tmp_path / "new", "-o", tmp_path / "back", "--allow", "lossy"]
    done(*undo, "--device", device)
    # these were encoded so that the largest code of each block is 4 or 6
    assert_equal(tmp_path / "back", HUB)
    assert (tmp_path / "back" / "config.json").read_bytes() == (HUB / "config.json").read_bytes()


def test_blocks_of_small_codes_come_back_as_other_codes_of_the_same_numbers(tmp_path: Path) -> None:
    held = load_file(HUB / "model.safetensors")
    source = tmp_path / "old"
    shutil.copytree(HUB, source)
    key = "model.layers.1.mlp.experts.down_proj"
    # the largest number of every block becomes 3
    held[f"{key}_blocks"] = held[f"{key}_blocks"] & 0x33
    held[f"{key}_blocks"][..., 0] |= 0x05
    held[f"{key}_blocks"][..., 0] &= 0xF5
    save_file(held, source / "model.safetensors")
    done("apply", source, "-o", tmp_path / "new", "--to", "gpt-oss@bf16")
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--allow", "lossy")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert (back[f"{key}_scales"] == held[f"{key}_scales"] - 1).all()
    done("apply", tmp_path / "back", "-o", tmp_path / "again", "--to", "gpt-oss@bf16")
    assert_equal(tmp_path / "again", tmp_path / "new")


def test_a_model_that_was_trained_in_bfloat16_is_encoded_with_its_configuration(
    tmp_path: Path,
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(PAIR / "v5", plain)
    (plain / "config.json").write_text(json.dumps(plain_config()))
    done("apply", plain, "-o", tmp_path / "new", "--to", "gpt-oss@mxfp4", "--allow", "lossy")
    assert_equal(tmp_path / "new", HUB)
    assert config_of(tmp_path / "new") == config_of(HUB)


def test_the_names_of_openai_become_those_of_transformers_and_return(tmp_path: Path) -> None:
    source = original(tmp_path / "original")
    done("apply", source, "-o", tmp_path / "hf", "--to", "gpt-oss@mxfp4")
    assert_equal(tmp_path / "hf", HUB)
    done("downgrade", tmp_path / "hf", "-o", tmp_path / "back")
    assert_equal(tmp_path / "back", source)
    assert config_of(tmp_path / "back") == config_of(source)
    # both edges in one run
    done("apply", source, "-o", tmp_path / "plain", "--to", "gpt-oss@bf16")
    assert_equal(tmp_path / "plain", PAIR / "v5")
    assert "quantization_config" not in config_of(tmp_path / "plain")


def test_inspect_names_the_layout_and_the_format(tmp_path: Path) -> None:
    source = original(tmp_path / "original")
    for folder, layout in ((HUB, "mxfp4"), (source, "original")):
        found = done("inspect", folder, "--format", "json").json
        (there,) = found["layouts"]
        assert (there["lineage"], there["layout"]) == ("gpt-oss", layout)
        (group,) = found["number_formats"]
        assert group["readings"][0]["format"] == "mxfp4"
        assert group["readings"][0]["arguments"] == {"form": "blocks"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda h, k: h.pop(f"{k}_scales"), "M207"),
        (lambda h, k: h.update({f"{k}_scales": h[f"{k}_scales"][:, :-1].clone()}), "M310"),
        (lambda h, k: h.update({f"{k}_scales": h[f"{k}_scales"].bfloat16()}), "M303"),
        (lambda h, k: h.update({f"{k}_blocks": h[f"{k}_blocks"].flatten(2)}), "M310"),
    ],
    ids=["missing", "cut", "dtype", "packed"],
)
def test_scales_that_do_not_fit_are_refused_while_planning(
    change: Any, code: str, tmp_path: Path
) -> None:
    held = load_file(HUB / "model.safetensors")
    change(held, "model.layers.0.mlp.experts.down_proj")
    source = tmp_path / "old"
    source.mkdir()
    shutil.copy(HUB / "config.json", source)
    save_file(held, source / "model.safetensors")
    question = ["--from", "gpt-oss@mxfp4", "--to", "gpt-oss@bf16", "--format", "json"]
    refused = run("plan", source, *question)
    assert refused.exit in (2, 3)
    assert code in refused.codes


def test_a_scale_of_nan_is_nan_and_one_beyond_bfloat16_is_refused(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.down_proj"
    for scale, code in ((255, None), (254, "M406")):
        held = load_file(HUB / "model.safetensors")
        held[f"{key}_scales"][1, 2, 0] = scale
        source, out = tmp_path / f"old{scale}", tmp_path / f"new{scale}"
        source.mkdir()
        shutil.copy(HUB / "config.json", source)
        save_file(held, source / "model.safetensors")
        if code:
            question = ["--to", "gpt-oss@bf16", "--format", "json"]
            refused = run("apply", source, "-o", out, *question)
            assert refused.codes == [code]
            assert not out.exists()
            continue
        done("apply", source, "-o", out, "--to", "gpt-oss@bf16")
        nan = load_file(out / "model.safetensors")[key].isnan()
        assert nan[1, :, 2].all()
        assert int(nan.sum()) == 32


@pytest.mark.libraries
@pytest.mark.parametrize("names", ["transformers", "OpenAI"])
def test_transformers_loads_the_result_and_its_logits_are_equal(names: str, tmp_path: Path) -> None:
    from transformers import GptOssForCausalLM, Mxfp4Config

    source = HUB if names == "transformers" else original(tmp_path / "original")
    done("apply", source, "-o", tmp_path / "new", "--to", "gpt-oss@bf16")
    settings: dict[str, Any] = {
        "dtype": torch.bfloat16, "output_loading_info": True, "attn_implementation": "eager",
    }  # fmt: skip
    wanted, _ = GptOssForCausalLM.from_pretrained(
        HUB, quantization_config=Mxfp4Config(dequantize=True), **settings
    )
    model, info = GptOssForCausalLM.from_pretrained(tmp_path / "new", **settings)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(24).reshape(2, 12) % 40
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted(tokens).logits)
    if names == "OpenAI":
        said, known = model.config.to_dict(), wanted.config.to_dict()
        for name in ("rope_parameters", "num_local_experts", "num_experts_per_tok", "layer_types"):
            assert said[name] == known[name], name
