"""What people write today: load_file a shard, do the layout work with torch, save_file it; one
shard after the other.

    baseline_stack.py TASK SOURCE TARGET [--fsync]

Every task is the same job as the rule file of its name in `rules/` (`pack` and `unbind` are the
shipped hf-mixtral rules up and down). A shard holds whole layers, so a shard is enough context for
each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

EXPERT = re.compile(r"(.*)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")
FUSED = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
BY_HEADS = re.compile(r".*\.(self_attn\.[qk]_proj|experts\.\d+\.w[123])\.weight")
QUANTIZED = re.compile(
    r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)\.weight"
)


def rename(tensors: Tensors) -> Tensors:
    return {
        key.replace("model.layers.", "decoder.blocks.").replace("block_sparse_moe", "moe"): t
        for key, t in tensors.items()
    }


def pack(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    experts: dict[str, dict[tuple[str, int], torch.Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if match := EXPERT.fullmatch(key):
            experts[match[1]][match[3], int(match[2])] = tensor
        else:
            out[key.replace("block_sparse_moe.gate", "mlp.gate")] = tensor
    for prefix, parts in experts.items():
        numbers = sorted({number for _, number in parts})
        gate, up, down = (torch.stack([parts[w, n] for n in numbers]) for w in ("w1", "w3", "w2"))
        out[f"{prefix}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        out[f"{prefix}.mlp.experts.down_proj"] = down
    return out


def unbind(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    for key, tensor in tensors.items():
        match = FUSED.fullmatch(key)
        if not match:
            out[key.replace("mlp.gate", "block_sparse_moe.gate")] = tensor
            continue
        for number, part in enumerate(tensor.unbind(0)):
            prefix = f"{match[1]}.block_sparse_moe.experts.{number}"
            if match[2] == "down_proj":
                out[f"{prefix}.w2.weight"] = part
            else:
                out[f"{prefix}.w1.weight"], out[f"{prefix}.w3.weight"] = part.chunk(2, dim=0)
    return out


def concat_last(tensors: Tensors) -> Tensors:
    out: Tensors = {}
    pairs: dict[str, Tensors] = defaultdict(dict)
    for key, tensor in tensors.items():
        match = EXPERT.fullmatch(key)
        if match and match[3] != "w2":
            pairs[f"{match[1]}.block_sparse_moe.experts.{match[2]}.w13.weight"][match[3]] = tensor
        else:
            out[key] = tensor
    for key, pair in pairs.items():
        out[key] = torch.cat([pair["w1"], pair["w3"]], dim=1)
    return out


def deinterleave(tensors: Tensors) -> Tensors:
    return {
        key: tensor.unflatten(0, (-1, 2)).transpose(0, 1).reshape(tensor.shape)
        if EXPERT.fullmatch(key)
        else tensor
        for key, tensor in tensors.items()
    }


def heads(tensors: Tensors) -> Tensors:
    return {
        key: tensor.unflatten(0, (-1, 64, 2)).transpose(1, 2).reshape(tensor.shape)
        if BY_HEADS.fullmatch(key)
        else tensor
        for key, tensor in tensors.items()
    }


def transpose(tensors: Tensors) -> Tensors:
    return {
        key: tensor.t().contiguous() if tensor.ndim == 2 else tensor
        for key, tensor in tensors.items()
    }


def widen(tensors: Tensors) -> Tensors:
    return {key: tensor.to(torch.float32) for key, tensor in tensors.items()}


def narrow(tensors: Tensors) -> Tensors:
    return {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}


def dequantize(tensors: Tensors) -> Tensors:
    """DeepSeek's fp8_cast_bf16 as torch: code times the scale of its 128 x 128 block, in float32,
    rounded once.
    """
    out: Tensors = {}
    for key, tensor in tensors.items():
        if key.endswith("_scale_inv"):
            continue
        scale = tensors.get(f"{key}_scale_inv")
        if scale is not None:
            rows, columns = tensor.shape
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            tensor = (tensor.to(torch.float32) * spread).to(torch.bfloat16)
        out[key] = tensor
    return out


def quantize(tensors: Tensors) -> Tensors:
    """DeepGEMM's per_block_cast_to_fp8 as torch, for the weights that such checkpoints quantize."""
    out: Tensors = {}
    for key, tensor in tensors.items():
        if not QUANTIZED.fullmatch(key):
            out[key] = tensor
            continue
        rows, columns = tensor.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=tensor.dtype)
        padded[:rows, :columns] = tensor
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = blocks.abs().float().amax((1, 3), keepdim=True).clamp(1e-4) / 448.0
        codes = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn)
        out[key] = codes.reshape(padded.shape)[:rows, :columns]
        out[f"{key}_scale_inv"] = scale[:, 0, :, 0]
    return out


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


TASKS: dict[str, Callable[[Tensors], Tensors]] = {
    "rename": rename,
    "pack": pack,
    "unbind": unbind,
    "concat-last": concat_last,
    "deinterleave": deinterleave,
    "heads": heads,
    "transpose": transpose,
    "widen": widen,
    "narrow": narrow,
    "dequantize": dequantize,
    "quantize": quantize,
    "from-pt": unchanged,
    "to-pt": unchanged,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--fsync", action="store_true")
    args = parser.parse_args()
    args.target.mkdir()
    weight_map: dict[str, str] = {}
    total = 0
    in_torch = args.task == "to-pt"
    for file in sorted([*args.source.glob("*.safetensors"), *args.source.glob("*.bin")]):
        loaded = (
            load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, weights_only=True)
        )
        out = {key: tensor.contiguous() for key, tensor in TASKS[args.task](loaded).items()}
        del loaded
        name = (
            f"pytorch_{file.stem}.bin"
            if in_torch
            else f"{file.stem.removeprefix('pytorch_')}.safetensors"
        )
        if in_torch:
            torch.save(out, args.target / name)
        else:
            save_file(out, args.target / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(out, name)
        total += sum(tensor.nbytes for tensor in out.values())
        del out
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    index_name = "pytorch_model.bin.index.json" if in_torch else "model.safetensors.index.json"
    (args.target / index_name).write_text(json.dumps(index, indent=2))
    for file in args.source.glob("*.json"):
        if not file.name.endswith(".index.json") and not file.name.startswith("migrate."):
            shutil.copyfile(file, args.target / file.name)
    if args.fsync:
        for path in [*args.target.iterdir(), args.target]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


if __name__ == "__main__":
    main()
