"""Folders of number formats that become 1 GB of bfloat16 or float16: the linear layers of a model
in each format, under the names of its library, a file for each layer.

Codes are random, scales lie within a few powers of two. Tensors of one shape and format hold the
same bytes, which takes nothing from what reading, computing and writing cost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import data
import data_fp8
import numpy as np

Part = tuple[str, Any]
Parts = dict[str, Part]
# the dtypes of safetensors by those of arrays
PLAIN = {"u1": "U8", "i1": "I8", "i4": "I32", "i8": "I64", "f2": "F16", "f4": "F32"}


class Sizes(NamedTuple):
    """Layers, and the two widths of their matrices; experts of what has experts."""

    layers: int
    hidden: int
    inner: int
    experts: int


SIZES = {
    "tiny": Sizes(1, 256, 512, 2),
    "demo": Sizes(2, 1024, 2048, 2),
    "": Sizes(10, 2048, 5632, 8),
}


class Pack(NamedTuple):
    """A folder of a format: `linear` makes the parts of a matrix by what their names add to its
    own, `layer` the names and shapes of those of a layer and what is plain beside them.
    """

    config: dict[str, Any]
    linear: Callable[[Any, int, int], Parts]
    layer: Callable[[int, Sizes], Iterator[tuple[str, tuple[int, ...] | None, Any]]]


def part(array: Any, dtype: str = "") -> Part:
    return dtype or PLAIN[array.dtype.str[1:]], array


def e4m3(rng: Any, *shape: int) -> Part:
    """Codes of e4m3, as frequent as in normally distributed weights: of random codes a sixteenth is
    subnormal, and some processors take twenty times as long for these.
    """
    block = rng.choice(256, data.BLOCK, p=data_fp8.shares()).astype("u1")
    return part(np.resize(block, shape), "F8_E4M3")


def words(rng: Any, *shape: int) -> Part:
    return part(rng.integers(-(1 << 31), 1 << 31, shape, "<i4"))


def bfloat16(rng: Any, *shape: int) -> Part:
    """Positive numbers between 2^-9 and 2^-7."""
    return part(rng.integers(0x3B00, 0x3C00, shape, "<u2"), "BF16")


def singles(rng: Any, *shape: int) -> Part:
    return part((rng.random(shape) * 0.01 + 0.001).astype("<f4"))


def powers(rng: Any, *shape: int) -> Any:
    """E8M0 between 2^-10 and 2^-3."""
    return rng.integers(117, 125, shape, "u1")


# -- formats -------------------------------------------------------------------------------------


def fp8_rows(rng: Any, rows: int, columns: int) -> Parts:
    return {".weight": e4m3(rng, rows, columns), ".weight_scale": bfloat16(rng, rows, 1)}


def fp8_tensor(rng: Any, rows: int, columns: int) -> Parts:
    return {".weight": e4m3(rng, rows, columns), ".weight_scale": part(np.full((), 2e-3, "<f4"))}


def mistral(rng: Any, rows: int, columns: int) -> Parts:
    scales = {f".{w}": bfloat16(rng) for w in ("weight_scale_inv", "activation_scale")}
    return {".weight": e4m3(rng, rows, columns), **scales}


def torchao(rng: Any, rows: int, columns: int) -> Parts:
    return {"._weight_qdata": e4m3(rng, rows, columns), "._weight_scale": singles(rng, rows, 1)}


def mxfp8(rng: Any, rows: int, columns: int) -> Parts:
    return {
        ".weight": e4m3(rng, rows, columns),
        ".weight_scale": part(powers(rng, rows, columns // 32)),
    }


def nvfp4(rng: Any, rows: int, columns: int) -> Parts:
    # a power of two, whose reciprocal is exact
    return {
        ".weight": part(rng.integers(0, 256, (rows, columns // 2), "u1")),
        ".weight_scale": part(rng.integers(0x40, 0x7F, (rows, columns // 16), "u1"), "F8_E4M3"),
        ".weight_scale_2": part(np.full((), 2.0**-13, "<f4")),
        ".input_scale": part(np.full((), 2.0**-7, "<f4")),
    }


def nvfp4_divided(rng: Any, rows: int, columns: int) -> Parts:
    """compressed-tensors': by the scale of all is divided."""
    made = nvfp4(rng, rows, columns)
    return {
        ".weight_packed": made[".weight"],
        ".weight_scale": made[".weight_scale"],
        ".weight_global_scale": part(np.full(1, 2.0**13, "<f4")),
    }


def mxfp4_packed(rng: Any, rows: int, columns: int) -> Parts:
    return {
        ".weight_packed": part(rng.integers(0, 256, (rows, columns // 2), "u1")),
        ".weight_scale": part(powers(rng, rows, columns // 32)),
    }


def int8_rows(rng: Any, rows: int, columns: int) -> Parts:
    codes = part(rng.integers(-128, 128, (rows, columns), "i1"))
    return {".weight": codes, ".weight_scale": bfloat16(rng, rows, 1)}


def bnb_int8(rng: Any, rows: int, columns: int) -> Parts:
    return {
        ".weight": part(rng.integers(-127, 128, (rows, columns), "i1")),
        ".SCB": singles(rng, rows),
        ".weight_format": part(np.zeros((), "u1")),
    }


def mxfp4(rng: Any, rows: int, columns: int) -> Parts:
    """DeepSeek-V4's experts."""
    return {
        ".weight": part(rng.integers(-128, 128, (rows, columns // 2), "i1")),
        ".scale": part(powers(rng, rows, columns // 32), "F8_E8M0"),
    }


def int_pack(group: int) -> Callable[[Any, int, int], Parts]:
    def made(rng: Any, rows: int, columns: int) -> Parts:
        return {
            ".weight_packed": words(rng, rows, columns // 8),
            ".weight_scale": bfloat16(rng, rows, columns // group),
            ".weight_shape": part(np.array([rows, columns], "<i4" if group == 32 else "<i8")),
        }

    return made


def halves(rng: Any, *shape: int) -> Part:
    return part((rng.random(shape) * 0.01 + 0.001).astype("<f2"))


def awq(rng: Any, rows: int, columns: int) -> Parts:
    return {
        ".qweight": words(rng, columns, rows // 8),
        ".qzeros": words(rng, columns // 128, rows // 8),
        ".scales": halves(rng, columns // 128, rows),
    }


def gptq(rng: Any, rows: int, columns: int) -> Parts:
    return {
        ".qweight": words(rng, columns // 8, rows),
        # less 1, and none of them the largest code
        ".qzeros": part(np.full((columns // 128, rows // 8), 0x77777777, "<i4")),
        ".scales": halves(rng, columns // 128, rows),
        ".g_idx": part((np.arange(columns) // 128).astype("<i4")),
    }


def nf4(rng: Any, rows: int, columns: int) -> Parts:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        ".weight": part(rng.integers(0, 256, (rows * columns // 2, 1), "u1")),
        ".weight.absmax": singles(rng, rows * columns // 64),
        ".weight.quant_map": part(np.linspace(-1, 1, 16, dtype="<f4")),
        ".weight.quant_state.bitsandbytes__nf4": part(
            np.frombuffer(json.dumps(state).encode(), "u1")
        ),
    }


def blocks_of_experts(rng: Any, rows: int, columns: int) -> Parts:
    """gpt-oss: all experts of a layer."""
    return {
        "_blocks": part(rng.integers(0, 256, (rows, columns // 32, 16), "u1")),
        "_scales": part(powers(rng, rows, columns // 32)),
        "_bias": bfloat16(rng, rows),
    }


# -- models --------------------------------------------------------------------------------------


def llama(number: int, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
    at, (_, h, i, _) = f"model.layers.{number}.", sizes
    for w in "qkvo":
        yield f"{at}self_attn.{w}_proj", (h, h), None
    for w, shape in (("gate", (i, h)), ("up", (i, h)), ("down", (h, i))):
        yield f"{at}mlp.{w}_proj", shape, None
    for w in ("input", "post_attention"):
        yield f"{at}{w}_layernorm.weight", None, (h,)


def mixed(number: int, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
    """Attention in FP8, the MLP in what the folder is of."""
    for key, shape, more in llama(number, sizes):
        yield key, shape, fp8_rows if ".self_attn." in key else more


def kimi(number: int, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
    at, (_, h, _, e) = f"model.layers.{number}.", sizes
    for expert in range(e // 2):
        for w in ("gate", "up", "down"):
            yield f"{at}mlp.experts.{expert}.{w}_proj", (h, h), None
    yield f"{at}self_attn.kv_a_proj_with_mqa.weight", None, (576, h)


def deepseek_v4(number: int, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
    at, (_, h, _, e) = f"layers.{number}.", sizes
    for expert in range(e // 2):
        for w in ("w1", "w2", "w3"):
            yield f"{at}ffn.experts.{expert}.{w}", (h, h), None
    for w in ("attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_b", *(
        f"ffn.shared_experts.w{n}" for n in (1, 2, 3)
    )):  # fmt: skip
        yield f"{at}{w}", (256, h), fp8_blocks


def fp8_blocks(rng: Any, rows: int, columns: int) -> Parts:
    scale = part(powers(rng, rows // 128, columns // 128), "F8_E8M0")
    return {".weight": e4m3(rng, rows, columns), ".scale": scale}


def gpt_oss(number: int, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...] | None, Any]]:
    at, (_, h, _, e) = f"model.layers.{number}.", sizes
    for w, out in (("gate_up", h), ("down", h // 2)):
        yield f"{at}mlp.experts.{w}_proj", (e, out, h), None
    for w in "qkvo":
        yield f"{at}self_attn.{w}_proj.weight", None, (64, h)
    yield f"{at}self_attn.sinks", None, (64,)
    yield f"{at}mlp.router.weight", None, (e, h)


def _group(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": _weights(bits, kind, **more)}}


def _weights(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, **more}


_MIXED = {
    "group_0": {
        "targets": ["re:.*self_attn\\.(q|k|v|o)_proj$"], "format": "float-quantized",
        "weights": _weights(8, "float", strategy="channel"),
    },
    "group_1": {
        "targets": ["re:.*mlp\\.(gate|up|down)_proj$"], "format": "nvfp4-pack-quantized",
        "weights": _weights(4, "float", strategy="tensor_group", group_size=16),
    },
}  # fmt: skip


_EACH_32 = {"group_size": 32}


def _config(model: str, method: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model, "quantization_config": {"quant_method": method, **more}}


def _compressed(model: str, form: str, groups: dict[str, Any]) -> dict[str, Any]:
    return _config(
        model, "compressed-tensors", format=form, quantization_status="compressed",
        config_groups=groups, ignore=["lm_head"],
    )  # fmt: skip


PACKS = {
    "fp8-rows": Pack(
        _compressed("llama", "float-quantized", _group(8, "float", strategy="channel")),
        fp8_rows, llama,
    ),
    "fp8-tensor": Pack(_config("llama", "modelopt", quant_algo="FP8"), fp8_tensor, llama),
    "mxfp8": Pack(
        _compressed("llama", "mxfp8-quantized", _group(8, "float", strategy="group", **_EACH_32)),
        mxfp8, llama,
    ),
    "nvfp4": Pack(
        _config(
            "llama", "modelopt", quant_algo="NVFP4",
            config_groups=_group(4, "float", group_size=16), ignore=["lm_head"],
        ),
        nvfp4, llama,
    ),
    "gpt-oss": Pack(_config("gpt_oss", "mxfp4"), blocks_of_experts, gpt_oss),
    "deepseek-v4": Pack(
        {
            "expert_dtype": "fp4",
            **_config("deepseek_v4", "fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]),
        },
        mxfp4, deepseek_v4,
    ),
    "deepseek-v4-fp8": Pack(
        {
            "expert_dtype": "fp8",
            **_config("deepseek_v4", "fp8", scale_fmt="ue8m0", weight_block_size=[128, 128]),
        },
        fp8_blocks, deepseek_v4,
    ),
    "fp8-mistral": Pack(
        _config(
            "ministral3", "fp8", activation_scheme="static", weight_block_size=None,
            modules_to_not_convert=["lm_head"],
        ),
        mistral, llama,
    ),
    "fp8-torchao": Pack(
        _config(
            "llama", "torchao",
            quant_type={"default": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}}},
        ),
        torchao, llama,
    ),
    "int8": Pack(
        # compressed-tensors takes the format from what is said of inputs: of weights alone, words
        _compressed("llama", "int-quantized", {"group_0": {
            **_group(8, "int", strategy="channel")["group_0"],
            "input_activations": {**_weights(8, "int", strategy="token"), "dynamic": True},
        }}),
        int8_rows, llama,
    ),
    "mxfp4": Pack(
        _compressed(
            "llama", "mxfp4-pack-quantized", _group(4, "float", strategy="group", **_EACH_32)
        ),
        mxfp4_packed, llama,
    ),
    "mixed": Pack(_compressed("llama", "mixed-precision", _MIXED), nvfp4_divided, mixed),
    "kimi-k2": Pack(
        _compressed("kimi_k2", "pack-quantized", _group(4, "int", strategy="group", group_size=32)),
        int_pack(32), kimi,
    ),
    "int-pack": Pack(
        _compressed("llama", "pack-quantized", _group(4, "int", strategy="group", group_size=128)),
        int_pack(128), llama,
    ),
    "awq": Pack(
        _config("llama", "awq", bits=4, group_size=128, zero_point=True, version="gemm"),
        awq, llama,
    ),
    "gptq": Pack(
        _config(
            "llama", "gptq", bits=4, group_size=128, checkpoint_format="gptq", desc_act=False,
            sym=True,
        ),
        gptq, llama,
    ),
    "nf4": Pack(
        _config("llama", "bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"), nf4, llama
    ),
    "bnb-int8": Pack(_config("llama", "bitsandbytes", load_in_8bit=True), bnb_int8, llama),
}  # fmt: skip


def make(folder: Path, name: str, size: str, layers: int = 0) -> None:
    """Writes the folder of a pack: 1 GB of numbers, or few (`tiny`, `demo`). Of the first, `layers`
    says how many there are.
    """
    pack, sizes, rng = PACKS[name], SIZES.get(size, SIZES[""]), np.random.default_rng(0)
    if layers and size not in SIZES:
        sizes = sizes._replace(layers=layers)
    folder.mkdir(parents=True)
    kept: dict[Any, Parts] = {}
    weight_map, total = {}, 0
    for number in range(sizes.layers):
        tensors: dict[str, Part] = {}
        for key, shape, more in pack.layer(number, sizes):
            if shape is None:
                tensors[key] = bfloat16(rng, *more)
                continue
            linear = more or pack.linear
            rows = shape[0] if len(shape) == 2 else shape[0] * shape[1]
            if (shape, linear) not in kept:
                kept[shape, linear] = linear(rng, rows, shape[-1])
            for suffix, (dtype, array) in kept[shape, linear].items():
                if len(shape) > 2:
                    array = array.reshape(*shape[:-1], *array.shape[1:])
                tensors[key + suffix] = dtype, array
        if not number:
            plain = "" if name.startswith("deepseek-v4") else "model."
            for key in (f"{plain}embed_tokens", "lm_head"):
                tensors[f"{key}.weight"] = bfloat16(rng, 512, sizes.hidden)
            tensors[f"{plain}norm.weight"] = bfloat16(rng, sizes.hidden)
        file = f"model-{number + 1:05d}-of-{sizes.layers:05d}.safetensors"
        total += _write(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(pack.config, indent=2) + "\n")


def _write(path: Path, tensors: dict[str, Part]) -> int:
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    # the wide ones first, so that all begin at multiples of their width
    ordered = sorted(tensors.items(), key=lambda item: -item[1][1].itemsize)
    for key, (dtype, array) in ordered:
        head[key] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]
        }  # fmt: skip
        at += array.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, (_, array) in ordered:
            rest = memoryview(np.ascontiguousarray(array).reshape(-1).view("u1").data)
            while rest:
                rest = rest[file.write(rest[: data.BLOCK]) :]
    return at
