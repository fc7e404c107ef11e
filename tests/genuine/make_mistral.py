"""Makes a tiny Ministral in FP8 as Mistral stores it, and what transformers decodes it to.

    python tests/genuine/make_mistral.py [NAME ...]

writes tests/data/genuine/NAME and NAME.json beside it: `mistral-fp8` has the names of transformers,
`mistral-fp8-consolidated` those of Mistral's own files, consolidated.safetensors and params.json.
It needs transformers.

Codes are those of transformers' `Fp8Quantize` without blocks. The first folder is saved by
transformers from a model in which it has replaced linear layers by its own, as its conversion of
Ministral does (convert_ministral3_weights_to_hf.py). Nothing that is installed writes the other: it
is the first one with the names and the rows of q and k put back, by the table of that conversion,
which is also that of vLLM (`mistral_mapping`). Both have one scale in bfloat16 without axes for
each weight and for the inputs of each layer, as the released files have.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from make_genuine import (
    FOLDER,
    MAKERS,
    Tensors,
    decoded_by_transformers,
    make,
    maker,
    save,
    stored,
    uneven,
)
from safetensors.torch import save_file

HEADS = {"wq": 2, "wk": 1}
WIDTH = 40
PLAIN = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
# a segment of a key in transformers' names -> in Mistral's; `model` in front goes
NAMES = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn": "attention",
    "mlp": "feed_forward", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv",
    "o_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
    "weight_scale_inv": "qscale_weight", "activation_scale": "qscale_act",
}  # fmt: skip
# what stands in params.json beside the sizes, and what transformers makes of it
YARN = {
    "original_max_position_embeddings": 16, "factor": 4, "apply_scale": False, "beta": 32,
    "alpha": 1,
}  # fmt: skip
ROPE = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "mscale": 1.0,
    "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def ministral(**more: Any) -> Any:
    return transformers.Ministral3Config(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, vocab_size=32,
        num_attention_heads=HEADS["wq"], num_key_value_heads=HEADS["wk"], head_dim=20,
        max_position_embeddings=64, tie_word_embeddings=False, rope_parameters=dict(ROPE),
        pad_token_id=None, **more,
    )  # fmt: skip


def largest_inputs(model: Any) -> dict[str, torch.Tensor]:
    """module -> the largest of its inputs for a few tokens, as a calibration finds it."""
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(
                lambda _, given, __, name=name: found.update({name: given[0].abs().max()})
            )
    with torch.no_grad():
        model(torch.arange(32)[None])
    return found


def encoded() -> Tensors:
    """The parts of the model, under transformers' names."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = uneven(transformers.Ministral3ForCausalLM(ministral()))
    inputs = largest_inputs(model)
    said = SimpleNamespace(weight_block_size=None, scale_fmt="float")
    encode = Fp8Quantize(SimpleNamespace(quantization_config=said))
    out: Tensors = {}
    for key, tensor in model.state_dict().items():
        module = key.removesuffix(".weight")
        if not module.endswith("_proj"):
            out[key] = tensor
            continue
        made = encode.convert({key: tensor})
        scale = made[f"{key}_scale_inv"]
        out[key] = made[key]
        out[f"{key}_scale_inv"] = scale.reshape(()).to(torch.bfloat16)
        out[f"{module}.activation_scale"] = (inputs[module].float() / 448).to(torch.bfloat16)
    return out


@maker("mistral-fp8", "transformers")
def transformers_names(folder: Path) -> Tensors:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    said = FineGrainedFP8Config(
        activation_scheme="static", modules_to_not_convert=PLAIN, weight_block_size=None
    )
    with torch.device("meta"):
        model = transformers.Ministral3ForCausalLM(ministral(quantization_config=said))
        model = replace_with_fp8_linear(model, PLAIN, said)
    model.load_state_dict(encoded(), strict=True, assign=True)
    model.config.architectures = ["Ministral3ForCausalLM"]
    model.config.dtype = torch.bfloat16
    save(model, folder)
    return decoded_by_transformers(folder)


def mistral_name(key: str) -> str:
    return ".".join(NAMES.get(part, part) for part in key.removeprefix("model.").split("."))


def by_neighbours(key: str, weight: torch.Tensor) -> torch.Tensor:
    """Mistral's own code rotates rows of q and k that are neighbours, transformers those that are
    half a head apart.
    """
    heads = HEADS.get(key.split(".")[-2])
    if heads is None or weight.ndim != 2:
        return weight
    halves = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    pairs = halves.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2)
    return pairs.reshape(weight.shape).contiguous().view(weight.dtype)


def consolidated(tensors: Tensors) -> Tensors:
    """Tensors of transformers under the names of Mistral and with its order of rows."""
    named = {mistral_name(key): tensor for key, tensor in tensors.items()}
    return {key: by_neighbours(key, tensor) for key, tensor in named.items()}


@maker("mistral-fp8-consolidated", "transformers")
def mistral_names(folder: Path) -> Tensors:
    there = folder / "transformers"
    there.mkdir()
    decoded = transformers_names(there)
    save_file(consolidated(stored(there)), folder / "consolidated.safetensors")
    for file in there.iterdir():
        file.unlink()
    there.rmdir()
    said = {
        "dim": WIDTH, "n_layers": 1, "head_dim": 20, "hidden_dim": WIDTH, "n_heads": HEADS["wq"],
        "n_kv_heads": HEADS["wk"], "rope_theta": 1000000.0, "norm_eps": 1e-05, "vocab_size": 32,
        "tied_embeddings": False, "max_position_embeddings": 64,
        "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
        "yarn": YARN, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(said, indent=4) + "\n")
    return consolidated(decoded)


def main(names: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    for name in names or ("mistral-fp8", "mistral-fp8-consolidated"):
        make(name, FOLDER)


if __name__ == "__main__":
    assert "mistral-fp8" in MAKERS
    main(sys.argv[1:])
