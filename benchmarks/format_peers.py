"""What others do with the same bytes: the functions of transformers, compressed-tensors, ModelOpt,
torchao, gguf-py and bitsandbytes, where they are installed (`make peers`), and the arithmetic of
released scripts.

A function takes the stored parts as torch's own tensors and answers with numbers, or takes numbers
and answers with codes and scales. They allocate what they make, as their users see it.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
Decoder = Callable[[Parts], torch.Tensor]
Encoder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
BLOCK = 128
LIBRARIES = ("transformers", "compressed_tensors", "modelopt", "torchao", "gguf", "bitsandbytes")


def missing() -> list[str]:
    """The libraries that are not installed."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]


# -- released scripts ----------------------------------------------------------------------------


def repeated(parts: Parts) -> torch.Tensor:
    """Scales repeated to the size of the weight: DeepSeek's kernel without Triton."""
    wide = parts["scale"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (parts["weight"].to(torch.float32) * wide).to(torch.bfloat16)


def block_by_block(parts: Parts) -> torch.Tensor:
    """torch.distributed.checkpoint's QuantizedHuggingFaceStorageReader."""
    out, scale = parts["weight"].to(torch.float32), parts["scale"]
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scale[i, j]
    return out.to(torch.bfloat16)


def deepgemm(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """deep_gemm.utils.math.per_block_cast_to_fp8."""
    m, n = numbers.shape
    view = numbers.view(-1, BLOCK, n // BLOCK, BLOCK)
    scale = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    return (view * (1.0 / scale)).to(torch.float8_e4m3fn).view(m, n), scale.view(
        m // BLOCK, n // BLOCK
    )


def torch_linear(parts: Parts) -> torch.Tensor:
    """GPTQModel's TorchLinear.dequantize_weight, which needs zeros without the 1 that v1 takes off,
    and the copy in rows that its `dequantize_model` makes: as it is written, without the
    compilation that a layer has before it runs.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    zeros = parts["zero"] + 0x11111111
    zeros = zeros.unsqueeze(2).expand(-1, -1, 8).bitwise_right_shift(shifts).to(torch.int8)
    zeros = zeros.bitwise_and(15).reshape(zeros.shape[0], -1)
    codes = parts["weight"].unsqueeze(1).expand(-1, 8, -1)
    codes = codes.bitwise_right_shift(shifts.unsqueeze(-1)).to(torch.int8).bitwise_and(15)
    codes = codes.reshape(-1, codes.shape[2])
    group = parts["group"].long()
    return (parts["scale"][group] * (codes - zeros[group])).T.contiguous()


def dequantize_gemm(parts: Parts) -> torch.Tensor:
    """AutoAWQ's dequantize_gemm, and a copy in rows."""
    shifts = torch.arange(0, 32, 4)

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        found = words[:, :, None].bitwise_right_shift(shifts).to(torch.int8)
        found = found.view(found.shape[0], -1)
        order = torch.arange(found.shape[-1], dtype=torch.int32).view(-1, 8)
        return found[:, order[:, [0, 4, 1, 5, 2, 6, 3, 7]].view(-1)].bitwise_and(15)

    codes, zeros = unpacked(parts["weight"]), unpacked(parts["zero"])
    scales, zeros = (grid.repeat_interleave(128, 0) for grid in (parts["scale"], zeros))
    return ((codes - zeros) * scales).T.contiguous()


# -- libraries -----------------------------------------------------------------------------------


def _transformers() -> dict[str, Decoder]:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    blocks = Fp8Dequantize(None)

    def mxfp4(parts: Parts) -> torch.Tensor:
        rows, groups = parts["scale"].shape
        packed = parts["weight"].view(1, rows, groups, -1)
        # of experts, whose matrices come transposed
        return _convert_moe_packed_tensors(packed, parts["scale"].view(1, rows, groups))[0].T

    return {
        "fp8-block": lambda p: blocks._dequantize_one(p["weight"], p["scale"], torch.bfloat16),
        "mxfp4": mxfp4,
    }


def _compressed_tensors() -> dict[str, Decoder]:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    def by(kind: Any, preset: str, **names: str) -> Decoder:
        scheme = preset_name_to_scheme(preset, ["Linear"])

        def run(parts: Parts) -> torch.Tensor:
            state = {names[role]: tensor for role, tensor in parts.items()}
            if "global" in parts:
                # it divides by it
                state["weight_global_scale"] = 1 / parts["global"]
            if kind is PackedQuantizationCompressor:
                rows, words = parts["weight"].shape
                state["weight_shape"] = torch.tensor([rows, words * 8])
            return kind.decompress(state, scheme)["weight"].to(torch.bfloat16)

        return run

    packed = {"weight": "weight_packed", "scale": "weight_scale", "global": "weight_global_scale"}
    plain = {"weight": "weight", "scale": "weight_scale"}
    zero = {"zero": "weight_zero_point"}
    return {
        "int-pack sym": by(PackedQuantizationCompressor, "W4A16", **packed),
        "int-pack asym": by(PackedQuantizationCompressor, "W4A16_ASYM", **packed, **zero),
        "fp8 tensor": by(NaiveQuantizationCompressor, "FP8", **plain),
        "fp8 row": by(NaiveQuantizationCompressor, "FP8_DYNAMIC", **plain),
        "fp8-block": by(NaiveQuantizationCompressor, "FP8_BLOCK", **plain),
        "mxfp8": by(MXFP8QuantizationCompressor, "MXFP8", **plain),
        "mxfp4": by(MXFP4PackedCompressor, "MXFP4A16", **packed),
        "nvfp4": by(NVFP4PackedCompressor, "NVFP4A16", **packed),
    }


def _modelopt() -> tuple[dict[str, Decoder], dict[str, Encoder]]:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor

    def by(kind: Any, blocks: dict[int, int], wide: int = 1) -> Decoder:
        def run(parts: Parts) -> torch.Tensor:
            weight, scale = parts["weight"], parts["scale"]
            shape = torch.Size((weight.shape[0], weight.shape[1] * wide))
            more = {"double_scale": parts["global"]} if "global" in parts else {}
            held = kind(shape, torch.bfloat16, weight)
            return held.dequantize(torch.bfloat16, scale=scale, block_sizes=blocks, **more)

        return run

    def made(kind: Any, *sizes: Any, **more: Any) -> Encoder:
        def run(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held, scale, *_ = kind.quantize(numbers, *sizes, **more)
            return held._quantized_data, scale

        return run

    decoders = {
        "fp8 tensor": by(FP8QTensor, {}),
        "fp8 row": by(FP8QTensor, {}),
        "fp8-block": by(FP8QTensor, {-1: 128, -2: 128}),
        "mxfp8": by(MXFP8QTensor, {-1: 32}),
        "mxfp4": by(MXFP4QTensor, {-1: 32}, 2),
        "nvfp4": by(NVFP4QTensor, {-1: 16}, 2),
    }
    encoders = {
        "fp8 tensor": made(FP8QTensor),
        "fp8 row": made(FP8QTensor, axis=0),
        "fp8-block": made(FP8QTensor, block_sizes={-1: 128, -2: 128}),
        "mxfp8": made(MXFP8QTensor),
        "mxfp4": made(MXFP4QTensor, 32),
        "nvfp4": made(NVFP4QTensor, 16),
    }
    return decoders, encoders


def _torchao() -> tuple[dict[str, Decoder], dict[str, Encoder]]:
    from torchao.prototype.mx_formats import nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.quantization import PerRow, PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    def mx(kind: torch.dtype) -> tuple[Decoder, Encoder]:
        def decode(parts: Parts) -> torch.Tensor:
            scale = parts["scale"].view(torch.float8_e8m0fnu)
            return to_dtype(parts["weight"], scale, kind, 32, torch.bfloat16)

        def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scale, codes = to_mx(numbers, kind, 32, ScaleCalculationMode.RCEIL)
            return codes, scale

        return decode, encode

    def nvfp4(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = nvfp4_tensor.per_tensor_amax_to_scale(numbers.abs().amax())
        made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(numbers, per_tensor_scale=whole)
        return made.qdata, made.scale

    def fp8(granularity: Any) -> Encoder:
        def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = Float8Tensor.from_hp(numbers, granularity=granularity())
            return made.qdata, made.scale

        return encode

    kinds = {"mxfp8": mx(torch.float8_e4m3fn), "mxfp4": mx(torch.float4_e2m1fn_x2)}
    encoders = {name: encode for name, (_, encode) in kinds.items()}
    encoders |= {"nvfp4": nvfp4, "fp8 row": fp8(PerRow), "fp8 tensor": fp8(PerTensor)}
    return {name: decode for name, (decode, _) in kinds.items()}, encoders


def _gguf() -> dict[str, Decoder]:
    """To float32, as gguf-py decodes everything."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    def by(kind: str) -> Decoder:
        number = GGMLQuantizationType[kind]
        return lambda parts: torch.from_numpy(dequantize(parts["data"].numpy(), number))

    return {kind: by(kind) for kind in ("Q8_0", "Q4_K")}


def _bitsandbytes() -> tuple[dict[str, Decoder], dict[str, Encoder]]:
    from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit

    def decode(parts: Parts) -> torch.Tensor:
        count = parts["weight"].numel() * 2
        side = math.isqrt(count)
        state = QuantState(
            parts["absmax"], torch.Size((side, count // side)), parts["map"], 64, "nf4",
            torch.bfloat16,
        )  # fmt: skip
        return dequantize_4bit(parts["weight"], state)

    def encode(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, state = quantize_4bit(numbers, quant_type="nf4")
        return codes, state.absmax

    return {"nf4": decode}, {"nf4": encode}


def peers() -> SimpleNamespace:
    """`decoders` and `encoders`: format -> name of the peer -> function, of those installed."""
    warnings.filterwarnings("ignore")
    found = SimpleNamespace(decoders={}, encoders={})

    def enter(who: str, decoders: dict[str, Decoder], encoders: dict[str, Encoder]) -> None:
        for kind, given in (("decoders", decoders), ("encoders", encoders)):
            for name, function in given.items():
                getattr(found, kind).setdefault(name, {})[who] = function

    enter("scales repeated", {"fp8-block": repeated}, {})
    enter("block by block", {"fp8-block": block_by_block}, {})
    enter("DeepGEMM in torch", {}, {"fp8-block": deepgemm})
    order = ("gptq", "gptq, columns out of order")
    enter("GPTQModel in torch", dict.fromkeys(order, torch_linear), {})
    enter("AutoAWQ in torch", {"awq": dequantize_gemm}, {})
    there = [name for name in LIBRARIES if name not in missing()]
    if "transformers" in there:
        enter("transformers", _transformers(), {})
    if "compressed_tensors" in there:
        enter("compressed-tensors", _compressed_tensors(), {})
    if "modelopt" in there:
        enter("ModelOpt", *_modelopt())
    if "torchao" in there:
        enter("torchao", *_torchao())
    if "gguf" in there:
        enter("gguf-py", _gguf(), {})
    if "bitsandbytes" in there:
        enter("bitsandbytes", *_bitsandbytes())
    return found
