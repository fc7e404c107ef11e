"""DeepSeek-like checkpoints of FP8 blocks: e4m3 weights with one float32 scale for each 128 x 128
block, a shard for each layer.

Codes are those of normally distributed weights, as training leaves them: some 8 in a million are
zero, and four in ten blocks reach the largest code. Scales lie between 2**-12 and 2**-11;
`kv_a_proj_with_mqa` has 576 rows, so that its last row of blocks is ragged. Standard library only,
as `data.py`.
"""

from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import data

BLOCK = 128
# of weights in units of a block's scale, whose largest is 448
SIGMA = 104.0


def shares() -> list[float]:
    """The share of each code among normally distributed numbers: of a magnitude, what lies between
    the middles to its neighbours.
    """
    magnitudes = [
        (8 + code % 8) * 2.0 ** (code // 8 - 10) if code > 7 else code * 2.0**-9
        for code in range(0x7F)
    ]
    middles = [0.0, *((a + b) / 2 for a, b in pairwise(magnitudes)), math.inf]
    below = [NormalDist(0, SIGMA).cdf(x) for x in middles]
    half = [*(b - a for a, b in pairwise(below)), 0.0]
    return half + half


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a DeepSeek-like model; the first layer is dense."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    vocab: int

    def linears(self, layer: int) -> dict[str, tuple[int, int]]:
        """Key without `.weight` -> shape of each quantized weight of a layer."""
        p, h, i = f"model.layers.{layer}.", self.hidden, self.intermediate
        found = {
            f"{p}self_attn.q_a_proj": (1536, h),
            f"{p}self_attn.q_b_proj": (h, 1536),
            f"{p}self_attn.kv_a_proj_with_mqa": (576, h),
            f"{p}self_attn.kv_b_proj": (2 * h, 512),
            f"{p}self_attn.o_proj": (h, h),
        }
        modules = (
            ["mlp."]
            if layer == 0
            else [f"{p}mlp.experts.{e}." for e in range(self.experts)] + [f"{p}mlp.shared_experts."]
        )
        for module in modules:
            name = module if module.startswith(p) else p + module
            found |= {
                f"{name}gate_proj": (i, h),
                f"{name}up_proj": (i, h),
                f"{name}down_proj": (h, i),
            }
        return found

    def others(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Key -> shape of the bf16 tensors of a layer."""
        p = f"model.layers.{layer}."
        found: dict[str, tuple[int, ...]] = {
            f"{p}{n}_layernorm.weight": (self.hidden,) for n in ("input", "post_attention")
        }
        found |= {
            f"{p}self_attn.q_a_layernorm.weight": (1536,),
            f"{p}self_attn.kv_a_layernorm.weight": (512,),
        }
        return found if layer == 0 else found | {f"{p}mlp.gate.weight": (self.experts, self.hidden)}


PRESETS = {
    "tiny": Shape(layers=2, experts=2, hidden=256, intermediate=256, vocab=32),
    "demo": Shape(layers=2, experts=8, hidden=1024, intermediate=768, vocab=1024),
    # matrices as large as DeepSeek-V3's experts
    "1.2GB-large": Shape(layers=5, experts=3, hidden=7168, intermediate=2048, vocab=1024),
    # of which 1 GB of NVFP4 is made
    "1.2GB-more": Shape(layers=8, experts=3, hidden=7168, intermediate=2048, vocab=1024),
    "2GB-large": Shape(layers=6, experts=5, hidden=7168, intermediate=2048, vocab=1024),
    "4.4GB-large": Shape(layers=9, experts=9, hidden=7168, intermediate=2048, vocab=1024),
    # and as small as DeepSeek-V2-Lite's
    "1.2GB-lite": Shape(layers=9, experts=14, hidden=2048, intermediate=1408, vocab=4096),
    "2GB-lite": Shape(layers=13, experts=16, hidden=2048, intermediate=1408, vocab=4096),
    "4.4GB-lite": Shape(layers=17, experts=28, hidden=2048, intermediate=1408, vocab=4096),
}


def shape(preset: str, variant: str = "") -> Shape:
    """The sizes of a preset in a variant, as `-large`; the small presets have but one, and those
    that have none are as large as 1.2GB."""
    return PRESETS.get(preset + variant) or PRESETS.get(preset) or PRESETS["1.2GB" + variant]


def make(folder: Path, sizes: Shape, seed: int = 0) -> None:
    """Writes the checkpoint into `folder`, one file for each layer."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    codes = memoryview(bytes(rng.choices(range(256), shares(), k=data.BLOCK)) * 2)
    noise = data.Noise(seed)
    weight_map: dict[str, str] = {}
    total = 0
    for layer in range(sizes.layers):
        name = f"model-{layer + 1:05d}-of-{sizes.layers:05d}.safetensors"
        plain = sizes.others(layer)
        if layer == 0:
            plain |= {
                "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
                "lm_head.weight": (sizes.vocab, sizes.hidden),
            }
            plain["model.norm.weight"] = (sizes.hidden,)
        linears = sizes.linears(layer)
        entries: list[tuple[str, str, tuple[int, ...], int]] = []
        for key, (rows, columns) in linears.items():
            grid = (-(-rows // BLOCK), -(-columns // BLOCK))
            entries.append((f"{key}.weight_scale_inv", "F32", grid, 4 * grid[0] * grid[1]))
        for key, dims in plain.items():
            count = 2
            for n in dims:
                count *= n
            entries.append((key, "BF16", dims, count))
        entries += [
            (f"{key}.weight", "F8_E4M3", dims, dims[0] * dims[1]) for key, dims in linears.items()
        ]
        head: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for key, dtype, dims, nbytes in entries:
            head[key] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("xb", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, dtype, _, nbytes in entries:
                if dtype == "F32":
                    file.write(
                        struct.pack(
                            f"<{nbytes // 4}f",
                            *(2.0**-12 * (1 + rng.random()) for _ in range(nbytes // 4)),
                        )
                    )
                elif dtype == "BF16":
                    for buffer in noise.take(nbytes):
                        file.write(buffer)
                else:
                    while nbytes:
                        start, size = rng.randrange(data.BLOCK), min(nbytes, data.BLOCK)
                        file.write(codes[start : start + size])
                        nbytes -= size
        weight_map |= dict.fromkeys((key for key, *_ in entries), name)
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": sizes.hidden,
        "model_type": "deepseek_v3",
        "n_routed_experts": sizes.experts,
        "num_hidden_layers": sizes.layers,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "vocab_size": sizes.vocab,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
