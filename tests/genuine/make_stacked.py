"""Makes tiny mixtures of experts whose experts ModelOpt exports stacked in one tensor, as it does
for Llama 4 and gpt-oss.

    python tests/genuine/make_stacked.py [NAME ...]

writes tests/data/genuine/NAME and NAME.json beside it. It needs transformers and ModelOpt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from make_genuine import FOLDER, Tensors, decoded_by_modelopt, make, maker, modelopt, stored, uneven

STACKS = ("gate_up_proj", "down_proj")
PARTS = ("weight_scale", "weight_scale_2", "input_scale")


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        hidden_size=48, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=1,
        vocab_size=32, head_dim=16, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64, pad_token_id=None,
        interleave_moe_layer_step=1,
    )  # fmt: skip
    return uneven(transformers.Llama4ForCausalLM(config))


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        hidden_size=40, intermediate_size=24, num_hidden_layers=1, vocab_size=32, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=64, sliding_window=16, pad_token_id=None,
    )  # fmt: skip
    return uneven(transformers.GptOssForCausalLM(config))


def decoded(tensors: Tensors) -> Tensors:
    """By ModelOpt's classes; of a stack each expert, turned as it was encoded: along what it is
    multiplied with.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    stacks = {k: t for k, t in tensors.items() if k.endswith(STACKS)}
    parts = {f"{key}_{part}" for key in stacks for part in PARTS}
    out = decoded_by_modelopt({k: t for k, t in tensors.items() if k not in parts | stacks.keys()})
    for key, codes in stacks.items():
        scale, made = tensors[f"{key}_weight_scale"], []
        for number, expert in enumerate(codes):
            if codes.dtype != torch.uint8:
                wide = FP8QTensor(expert.shape, torch.float32, expert).dequantize(
                    torch.float32, scale=scale, block_sizes={}
                )
                made.append(wide.to(torch.bfloat16))
                continue
            turned = expert.T.contiguous()
            shape = torch.Size((len(turned), 2 * turned.shape[1]))
            numbers = NVFP4QTensor(shape, torch.bfloat16, turned).dequantize(
                torch.bfloat16,
                scale=scale[number].T.contiguous(),
                double_scale=tensors[f"{key}_weight_scale_2"],
                block_sizes={-1: 16},
            )
            made.append(numbers.T)
        out[key] = torch.stack(made)
    return out


def stacked_by(name: str, config: str, model: Any) -> None:
    @maker(name, "transformers", "nvidia-modelopt")
    def _(folder: Path) -> Tensors:
        import modelopt.torch.quantization as mtq

        modelopt(folder, model(), getattr(mtq, config))
        return decoded(stored(folder))


stacked_by("modelopt-nvfp4-stacked", "NVFP4_DEFAULT_CFG", llama4)
stacked_by("modelopt-fp8-stacked", "FP8_DEFAULT_CFG", gpt_oss)


def main(names: list[str]) -> None:
    for name in names or ("modelopt-nvfp4-stacked", "modelopt-fp8-stacked"):
        make(name, FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
