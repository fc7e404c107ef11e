"""Block FP8 weights and their scales become bfloat16 and the same codes again, against the
published kernel's arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import migrate

CASE = Path(__file__).parents[1] / "data" / "cases" / "c14-fp8.yaml"
FP8 = torch.float8_e4m3fn
LINEARS = [f"self_attn.{n}_proj" for n in ("q_a", "q_b", "kv_b", "o")] + [
    "self_attn.kv_a_proj_with_mqa"
]
LINEARS += [f"mlp.{n}_proj" for n in ("gate", "up", "down")] + ["mlp.experts.10.gate_proj"]
BLOCK = (4, 3)


def pair(seed):
    """An [11, 8] weight and its [3, 3] scales, ragged on both sides.

    Every block has the largest code, 448, and the scales are powers of two: a quantizer then finds
    the same scales and codes again.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(11, 8, generator=generator).to(FP8)
    codes[:: BLOCK[0], :: BLOCK[1]] = 448.0
    return codes, 2.0 ** torch.arange(seed % 3, 9 + seed % 3, dtype=torch.float32).view(3, 3)


def dequantized(codes, scales):
    """deepseek-ai DeepSeek-V3 inference/kernel.py::weight_dequant: each element times the scale of
    its block, then rounded.
    """
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            out[i, j] = codes[i, j].float() * scales[i // BLOCK[0], j // BLOCK[1]]
    return out


def checkpoint():
    source, target = (
        {
            "model.norm.weight": torch.ones(3),
            "lm_head.weight": torch.ones(2, 3, dtype=torch.bfloat16),
        },
        {},
    )
    target |= source
    for n, name in enumerate(LINEARS):
        codes, scales = pair(n)
        at = f"model.layers.0.{name}.weight"
        source |= {at: codes, f"{at}_scale_inv": scales}
        target[at] = dequantized(codes, scales)
    return source, target


def bits(state):
    return {
        key: (t.dtype, t.shape, t.contiguous().flatten().view(torch.uint8).tolist())
        for key, t in state.items()
    }


def options(rule=CASE):
    return {"rules": [rule], "params": {"block": list(BLOCK)}, "allow": ["lossy"]}


def test_every_element_is_its_code_times_the_scale_of_its_block():
    source, target = checkpoint()
    assert bits(migrate.apply(source, **options())) == bits(target)


def test_a_downgrade_finds_the_codes_and_the_scales_again(tmp_path):
    source, target = checkpoint()
    heads = {key: target.pop(key) for key in ("lm_head.weight", "model.norm.weight")}
    migrate.downgrade(target, tmp_path / "back.safetensors", **options())
    assert bits(load_file(tmp_path / "back.safetensors") | heads) == bits(source)


@pytest.mark.parametrize(
    "mistake",
    [
        ("|up_proj", ""),
        ("block: $block", "block: [5, 3]"),
        ("dtype: bfloat16", "dtype: float32"),
        ("|kv_b_proj", ""),
    ],
)
def test_a_mistake_in_the_rule_is_seen(tmp_path, mistake):
    source, target = checkpoint()
    text = CASE.read_text()
    assert mistake[0] in text
    (tmp_path / "rule.yaml").write_text(text.replace(*mistake))
    assert bits(migrate.apply(source, **options(tmp_path / "rule.yaml"))) != bits(target)
