"""Makes tiny checkpoints by the libraries that define number formats, and what these libraries
themselves decode them to.

    make genuine [GENUINE="NAME ..."]

writes tests/data/genuine/NAME, a folder as a user would have it, and NAME.json beside it: which
releases made it, and by which of them its tensors were decoded, each with dtype, shape and the
SHA-256 of its bytes. It needs transformers, compressed-tensors, torchao, ModelOpt, bitsandbytes and
no GPU.

What no library encodes on a CPU is said where it is made: the codes are then those of torchao, in
the parts that transformers reads and decodes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parents[1] / "data" / "genuine"
Tensors = dict[str, torch.Tensor]
# what layers keep for their inputs
INPUTS = ("input_scale", "input_global_scale")
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}
# name -> what fills the folder and returns the decoded tensors
MAKERS: dict[str, tuple[str, Callable[[Path], Tensors]]] = {}


def maker(name: str, *libraries: str) -> Callable[[Callable[[Path], Tensors]], Any]:
    """Registers what makes the checkpoint `name`; the last of the libraries decodes it."""

    def register(function: Callable[[Path], Tensors]) -> Callable[[Path], Tensors]:
        MAKERS[name] = ", ".join(libraries), function
        return function

    return register


# ---- plain models --------------------------------------------------------------------------------


def llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    said = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    return uneven(LlamaForCausalLM(LlamaConfig(**{**said, **more})))


def qwen3_moe(**more: Any) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    said = {
        "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 2,
        "num_experts_per_tok": 1, "num_hidden_layers": 1, "vocab_size": 32, "head_dim": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return uneven(Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**said, **more})))


def uneven(model: Any, seed: int = 18) -> Any:
    """The model in bfloat16 with weights of a fixed seed: norms are not all ones, some blocks are
    zero, and some have an outlier.
    """
    dice = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        made = torch.randn(weight.shape, generator=dice) * 0.05
        if weight.ndim == 1:
            made += 1.0
        elif "layers" in name:
            made[..., :32, :32] = 0
            made[..., -1, -1] = 3.0
        weight.data = made.to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    return model.to(torch.bfloat16).eval()


def save(model: Any, folder: Path) -> None:
    """What `save_pretrained` writes, without the file of generation."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def stored(folder: Path) -> Tensors:
    """All tensors of a folder."""
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def rewrite(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Replaces the tensors of a folder of one file, and adds to its configuration."""
    (file,) = folder.glob("*.safetensors")
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **config}, indent=2) + "\n")


def decoded_by_transformers(folder: Path, quantization: Any = None) -> Tensors:
    """What transformers makes of a folder, under the names that it saves."""
    more = {} if quantization is None else {"quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **more)
    model.config.__dict__.pop("quantization_config", None)
    # this one would encode them again
    plain = type(model)(model.config).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as there:
        save(plain, Path(there))
        return stored(Path(there))


# ---- transformers --------------------------------------------------------------------------------


def fp8_blocks(folder: Path, model: Any, **said: Any) -> Tensors:
    """Encodes as `from_pretrained(…, quantization_config=FineGrainedFP8Config(…))` does, which
    refuses to without a GPU and needs none for it.
    """
    from transformers import FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    refuses = FineGrainedFP8HfQuantizer.validate_environment
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    try:
        with tempfile.TemporaryDirectory() as plain:
            save(model, Path(plain))
            config = FineGrainedFP8Config(weight_block_size=(32, 32), **said)
            made = AutoModelForCausalLM.from_pretrained(
                plain, dtype=torch.bfloat16, quantization_config=config
            )
        save(made, folder)
    finally:
        FineGrainedFP8HfQuantizer.validate_environment = refuses
    return decoded_by_transformers(folder, FineGrainedFP8Config(dequantize=True))


@maker("hf-fp8-block", "transformers")
def _(folder: Path) -> Tensors:
    return fp8_blocks(folder, llama())


@maker("hf-fp8-block-ue8m0", "transformers")
def _(folder: Path) -> Tensors:
    return fp8_blocks(folder, llama(), scale_fmt="ue8m0")


@maker("hf-fp8-block-moe", "transformers")
def _(folder: Path) -> Tensors:
    """Experts each with their scale, as on the Hub: by `Fp8Quantize`, tensor by tensor."""
    from transformers import FineGrainedFP8Config

    save(qwen3_moe(), folder)
    out: Tensors = {}
    for key, tensor in stored(folder).items():
        if key.endswith("_proj.weight"):
            out[key], out[f"{key}_scale_inv"] = blocks(tensor, "float")
        else:
            out[key] = tensor
    said = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
        "weight_block_size": [32, 32],
    }  # fmt: skip
    rewrite(folder, out, quantization_config=said)
    return decoded_by_transformers(folder, FineGrainedFP8Config(dequantize=True))


@maker("hf-fp8-block-moe-saved", "transformers")
def _(folder: Path) -> Tensors:
    """The same as `save_pretrained` writes it: codes of each expert, scales of all of them in one
    tensor, which transformers itself does not read again. It decodes codes without their scales.
    """
    return fp8_blocks(folder, qwen3_moe())


def mx_codes(
    weight: torch.Tensor, form: Any, rule: str = "EVEN"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of torchao: for each 32 along the last axis one power of two."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scales, codes = to_mx(weight.contiguous(), form, 32, ScaleCalculationMode[rule])
    return codes, scales.view(torch.uint8)


@maker("gpt-oss", "torchao", "transformers")
def _(folder: Path) -> Tensors:
    """The parts of gpt-oss-20b: transformers itself encodes only with kernels for a GPU."""
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, vocab_size=32, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1,
        max_position_embeddings=64, sliding_window=16,
    )  # fmt: skip
    save(uneven(GptOssForCausalLM(config)), folder)
    out: Tensors = {}
    for key, tensor in stored(folder).items():
        if key.endswith(("gate_up_proj", "down_proj")):
            # stored as [experts, in, out], encoded along what they are multiplied with
            codes, scales = mx_codes(tensor.transpose(1, 2), torch.float4_e2m1fn_x2)
            out[f"{key}_blocks"] = codes.view(torch.uint8).reshape(*scales.shape, 16)
            out[f"{key}_scales"] = scales
        else:
            out[key] = tensor
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    rewrite(
        folder, out,
        quantization_config={"modules_to_not_convert": plain, "quant_method": "mxfp4"},
    )  # fmt: skip
    return decoded_by_transformers(folder, Mxfp4Config(dequantize=True))


@maker("deepseek-v4", "torchao", "transformers")
def _(folder: Path) -> Tensors:
    """FP4 experts, FP8 blocks with scales in one byte, all called `scale`: the names and parts of
    the release, which transformers reads.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, FineGrainedFP8Config

    config = DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, vocab_size=32, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, n_routed_experts=2, num_experts_per_tok=1,
        max_position_embeddings=64, q_lora_rank=32, o_lora_rank=32, o_groups=2, n_shared_experts=1,
        index_n_heads=2, index_head_dim=32, sliding_window=16, hc_mult=2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    )  # fmt: skip
    save(uneven(DeepseekV4ForCausalLM(config)), folder)
    out: Tensors = {}
    for key, tensor in released(stored(folder)).items():
        module = key.removesuffix(".weight")
        if ".ffn.experts." in key:
            codes, scales = mx_codes(tensor, torch.float4_e2m1fn_x2)
            out[key] = codes.view(torch.int8)
            out[f"{module}.scale"] = scales.view(torch.float8_e8m0fnu)
        elif key.endswith(EIGHT):
            out[key], out[f"{module}.scale"] = blocks(tensor, "ue8m0")
        else:
            out[key] = tensor
    said = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [32, 32],
    }  # fmt: skip
    rewrite(folder, out, quantization_config=said, expert_dtype="fp4")
    return released(decoded_by_transformers(folder, FineGrainedFP8Config(dequantize=True)))


EIGHT = tuple(
    f".{module}.weight"
    for module in (
        "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b",
        "shared_experts.w1", "shared_experts.w2", "shared_experts.w3",
    )
)  # fmt: skip


def released(tensors: Tensors) -> Tensors:
    """Under the names of DeepSeek's release, which transformers reads and does not write."""
    names = {key: key.removeprefix("model.") for key in tensors}
    for one, other in (("embed_tokens", "embed"), ("lm_head", "head"), ("hc_head.hc_", "hc_head_")):
        names = {key: name.replace(one, other) for key, name in names.items()}
    return {names[key]: tensor for key, tensor in tensors.items()}


def blocks(weight: torch.Tensor, scale_fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of blocks of 32 x 32 by transformers."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    said = SimpleNamespace(weight_block_size=(32, 32), scale_fmt=scale_fmt)
    made = Fp8Quantize(SimpleNamespace(quantization_config=said)).convert({"w.weight": weight})
    return made["w.weight"], made["w.weight_scale_inv"]


# ---- compressed-tensors --------------------------------------------------------------------------


def compressed(
    folder: Path, model: Any, groups: Mapping[str, Any], ignore: tuple[str, ...]
) -> Tensors:
    """Encodes as llm-compressor does without calibration: `calculate_qparams` of the largest
    numbers, then `ModelCompressor`. Decodes by `convert_checkpoint` where it can.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import CompressedTensorsConfig

    config = QuantizationConfig(config_groups=dict(groups), ignore=list(ignore))
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            observe(module, module.quantization_scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save(model, folder)
    compressor.update_config(str(folder))
    if any(key.endswith(INPUTS) for key in model.state_dict()) or ragged(groups):
        # `convert_checkpoint` refuses what it would leave over, and cannot save ragged blocks
        return decoded_by_transformers(folder, CompressedTensorsConfig(dequantize=True))
    # without this it wants scales for all that is called weight
    return converted(
        folder, CompressedTensorsDequantizer(folder, ignore=["re:.*(embed_tokens|norm)$"])
    )


def ragged(groups: Mapping[str, Any]) -> bool:
    return any(scheme.weights.strategy == "block" for scheme in groups.values())


def observe(module: Any, scheme: Any) -> None:
    """Fills the scales of a module from its weight, and those of its inputs with what a calibration
    might have found.
    """
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    said, weight = scheme.weights, module.weight.data
    low, high = extremes(weight, said)
    whole = None
    if said.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(whole)
    scale, zero = calculate_qparams(low, high, said, global_scale=whole)
    module.weight_scale.data = scale.to(module.weight_scale.dtype).reshape(
        module.weight_scale.shape
    )
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype).reshape(
            module.weight_zero_point.shape
        )
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.fill_(2688 / 12)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.0625)


def extremes(weight: torch.Tensor, said: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number for each scale."""
    rows, columns = weight.shape
    if said.strategy == "tensor":
        return weight.min(), weight.max()
    if said.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if said.strategy == "block":
        height, width = said.block_structure
        down, across = -(-rows // height), -(-columns // width)
        # zeros change nothing: the range always holds zero
        padded = weight.new_zeros(down * height, across * width)
        padded[:rows, :columns] = weight
        tiles = padded.reshape(down, height, across, width)
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    groups = weight.reshape(rows, -1, said.group_size)
    return groups.amin(2), groups.amax(2)


def preset(name: str, *targets: str, **weights: Any) -> Any:
    """A scheme of compressed-tensors, for modules of these names."""
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(name, list(targets or ("Linear",)))
    scheme.weights = scheme.weights.model_copy(update=weights)
    return scheme


def converted(folder: Path, *converters: Any) -> Tensors:
    """What `convert_checkpoint` makes of a folder."""
    from compressed_tensors.entrypoints.convert import convert_checkpoint

    with tempfile.TemporaryDirectory() as there:
        convert_checkpoint(folder, there, list(converters), max_workers=1, device="cpu")
        return stored(Path(there))


def compressed_by(
    name: str, scheme: str, model: Mapping[str, Any] | None = None, **weights: Any
) -> None:
    @maker(name, "transformers", "compressed-tensors")
    def _(folder: Path) -> Tensors:
        group = preset(scheme, **weights)
        return compressed(folder, llama(**(model or {})), {"group_0": group}, ("lm_head",))


TWO_LAYERS = {"num_hidden_layers": 2}
SMALL = {"intermediate_size": 32, "num_attention_heads": 1, "vocab_size": 16}
compressed_by("ct-fp8-tensor", "FP8")
compressed_by("ct-fp8-channel", "FP8_DYNAMIC")
# 80 is no multiple of 32
compressed_by("ct-fp8-block", "FP8_BLOCK", {"intermediate_size": 80}, block_structure=[32, 32])
compressed_by("ct-nvfp4", "NVFP4", TWO_LAYERS)
compressed_by("ct-nvfp4a16", "NVFP4A16")
compressed_by("ct-mxfp4", "MXFP4A16")
compressed_by("ct-mxfp6", "MXFP6A16", SMALL)
compressed_by("ct-mxfp8", "MXFP8")
compressed_by("ct-w4a16", "W4A16", group_size=32)
compressed_by("ct-w4a16-asym", "W4A16_ASYM", group_size=32)
compressed_by("ct-w3a16", "W4A16", num_bits=3, group_size=32)
compressed_by("ct-w8a16", "W8A16", strategy="channel", group_size=None)
compressed_by("ct-w8a8", "W8A8")


@maker("ct-mixed", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    groups = {
        "group_0": preset("FP8_DYNAMIC", r"re:.*self_attn\.(q|k|v|o)_proj$"),
        "group_1": preset("NVFP4A16", r"re:.*mlp\.(gate|up)_proj$"),
        "group_2": preset("MXFP8A16", r"re:.*layers\.1\.mlp\.down_proj$"),
    }
    ignore = ("lm_head", "model.layers.0.mlp.down_proj")
    return compressed(folder, llama(**TWO_LAYERS), groups, ignore)


@maker("ct-mixed-int", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    groups = {
        "group_0": preset("W4A16", r"re:.*self_attn\.(q|k)_proj$", group_size=32),
        "group_1": preset("W4A16_ASYM", r"re:.*self_attn\.(v|o)_proj$", group_size=64),
        "group_2": preset("W8A8", r"re:.*mlp\.gate_proj$"),
        "group_3": preset("W8A16", r"re:.*mlp\.up_proj$", group_size=32),
        "group_4": preset("FP8_DYNAMIC", r"re:.*mlp\.down_proj$"),
    }
    return compressed(folder, llama(), groups, ("lm_head",))


@maker("kimi-k2", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    """Names and configuration of Kimi-K2-Thinking. What encoded the experts there is not public:
    here it is the largest of 32 over 7, packed by compressed-tensors.
    """
    from compressed_tensors.compressors.pack_quantized import pack_to_int32
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        vocab_size=32, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        n_shared_experts=1, num_experts_per_tok=1, n_group=1, topk_group=1, kv_lora_rank=32,
        q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1, max_position_embeddings=64,
    )  # fmt: skip
    save(uneven(DeepseekV3ForCausalLM(config)), folder)
    out: Tensors = {}
    for key, tensor in stored(folder).items():
        if ".mlp.experts." not in key:
            out[key] = tensor
            continue
        groups = tensor.reshape(tensor.shape[0], -1, 32)
        scale = groups.abs().amax(2) / 7
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = (groups / scale[..., None]).round().clamp(-7, 7).to(torch.int8)
        module = key.removesuffix(".weight")
        out[f"{module}.weight_packed"] = pack_to_int32(codes.reshape(tensor.shape), 4)
        out[f"{module}.weight_scale"] = scale
        out[f"{module}.weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int32)
    said = {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                    "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
                    "symmetric": True, "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }  # fmt: skip
    rewrite(folder, out, quantization_config=said, model_type="kimi_k2")
    return converted(
        folder,
        CompressedTensorsDequantizer(
            folder, ignore=["re:.*(embed_tokens|norm|gate|layernorm)$", "re:.*(self_attn|shared).*"]
        ),
    )


# ---- ModelOpt ------------------------------------------------------------------------------------


def modelopt(
    folder: Path,
    model: Any,
    config: Mapping[str, Any],
    calibrate: Callable[[Any], Any] = lambda m: m(torch.arange(32)[None]),
) -> Tensors:
    """Encodes as ModelOpt's `hf_ptq.py` does, calibrated with a few tokens, and decodes by its
    tensor classes.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    mtq.quantize(model, dict(config), calibrate)
    export_hf_checkpoint(model, export_dir=folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return decoded_by_modelopt(stored(folder))


def decoded_by_modelopt(tensors: Tensors) -> Tensors:
    """By the class of each format; of FP8 in float32 and then rounded, because to bfloat16 it
    rounds the scale first.
    """
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    beside = (
        "weight_scale", "weight_scale_2", "input_scale", "k_scale", "v_scale", "pre_quant_scale"
    )  # fmt: skip
    out: Tensors = {}
    for key, tensor in tensors.items():
        stem, _, leaf = key.rpartition(".")
        scale = tensors.get(f"{stem}.weight_scale")
        if leaf in beside:
            continue
        if leaf != "weight" or scale is None:
            out[key] = tensor
        elif tensor.dtype == torch.uint8:
            shape = torch.Size((*tensor.shape[:-1], 2 * tensor.shape[-1]))
            inputs = tensors.get(f"{stem}.pre_quant_scale")
            dtype = torch.bfloat16 if inputs is None else torch.float32
            made = NVFP4QTensor(shape, dtype, tensor).dequantize(
                dtype,
                scale=scale,
                double_scale=tensors[f"{stem}.weight_scale_2"],
                block_sizes={-1: 16},
            )
            if inputs is not None:
                # as its `plugins/vllm_fakequant_hf.py` folds it into a weight, but rounded once
                made = (made * inputs.float()[None]).to(torch.bfloat16)
            out[key] = made
        elif scale.dtype == torch.uint8:
            out[key] = MXFP8QTensor(tensor.shape, torch.bfloat16, tensor).dequantize(
                torch.bfloat16, scale=scale, block_sizes={-1: 32}
            )
        else:
            sizes = {}
            if scale.ndim == 2:
                sizes = {-1: 128, -2: 128}
            elif scale.ndim == 1 and scale.numel() > 1:
                scale = scale[:, None]
            wide = FP8QTensor(tensor.shape, torch.float32, tensor).dequantize(
                torch.float32, scale=scale, block_sizes=sizes
            )
            out[key] = wide.to(torch.bfloat16)
    return out


def modelopt_by(name: str, config: str, make: Callable[..., Any] = llama, **model: Any) -> None:
    @maker(name, "transformers", "nvidia-modelopt")
    def _(folder: Path) -> Tensors:
        import modelopt.torch.quantization as mtq

        return modelopt(folder, make(**model), getattr(mtq, config))


modelopt_by("modelopt-fp8", "FP8_DEFAULT_CFG")
modelopt_by("modelopt-fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN_CFG")
modelopt_by("modelopt-nvfp4", "NVFP4_DEFAULT_CFG", **TWO_LAYERS)
modelopt_by("modelopt-nvfp4-moe", "NVFP4_DEFAULT_CFG", qwen3_moe)
modelopt_by("modelopt-mxfp8", "MXFP8_DEFAULT_CFG")


@maker("modelopt-mixed", "transformers", "nvidia-modelopt")
def _(folder: Path) -> Tensors:
    """NVFP4 in MLPs, FP8 in attention with FP8 for the cache, as `hf_ptq.py` mixes them."""
    import copy

    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.NVFP4_MLP_ONLY_CFG)
    eight = {"num_bits": (4, 3), "axis": None}
    for quantizer in ("weight_quantizer", "input_quantizer"):
        config["quant_cfg"].append(
            {"quantizer_name": f"*self_attn*{quantizer}", "cfg": eight, "enable": True}
        )
    return modelopt(folder, llama(**TWO_LAYERS), config)


@maker("modelopt-nvfp4-awq", "transformers", "nvidia-modelopt")
def _(folder: Path) -> Tensors:
    """ModelOpt searches AWQ's scales on a GPU alone, so they are drawn here, and what is done with
    them (fused into norms, or left beside weights) is its export.
    """
    import modelopt.torch.quantization as mtq

    model = llama()
    torch.manual_seed(7)
    scales = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            # linears that share their input share what it is multiplied by
            group = name.rpartition(".")[0] + str(module.in_features)
            drawn = torch.rand(module.in_features) + 0.5
            scales[name] = scales.setdefault(group, drawn.to(torch.bfloat16))
            module.weight.data /= scales[name]

    def calibrate(m: Any) -> None:
        m(torch.arange(32)[None])
        for name, module in m.named_modules():
            if name in scales:
                module.input_quantizer.pre_quant_scale = scales[name]

    return modelopt(folder, model, mtq.NVFP4_DEFAULT_CFG, calibrate)


# ---- torchao -------------------------------------------------------------------------------------


def torchao_model(config: Any, **model: Any) -> Any:
    from transformers import TorchAoConfig

    with tempfile.TemporaryDirectory() as plain:
        save(llama(**model), Path(plain))
        return AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, quantization_config=TorchAoConfig(config)
        )


def torchao(folder: Path, config: Any, **model: Any) -> Tensors:
    """Encodes while transformers loads, and decodes by the tensors' `dequantize`."""
    made = torchao_model(config, **model)
    save(made, folder)
    return {key: decoded_by_torchao(tensor) for key, tensor in made.state_dict().items()}


def decoded_by_torchao(tensor: torch.Tensor) -> torch.Tensor:
    """bfloat16, which all models here are in."""
    if type(tensor) is torch.Tensor:
        return tensor
    # one class has no other dtype than its own
    said = () if type(tensor).__name__.startswith("Intx") else (torch.bfloat16,)
    return tensor.dequantize(*said)


def torchao_by(name: str, config: Callable[[], Any], **model: Any) -> None:
    @maker(name, "transformers", "torchao")
    def _(folder: Path) -> Tensors:
        return torchao(folder, config(), **model)


def ao_weights(kind: str, granularity: str, *size: int) -> Any:
    import torchao.quantization as ao

    said = {"granularity": getattr(ao, granularity)(*size)}
    if kind == "Intx":
        said |= {"weight_dtype": torch.int4, "mapping_type": ao.MappingType.ASYMMETRIC}
    return getattr(ao, f"{kind}WeightOnlyConfig")(**said)


def ao_mx(dtype: str) -> Any:
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig

    form = getattr(torch, dtype)
    return MXDynamicActivationMXWeightConfig(activation_dtype=form, weight_dtype=form)


def ao_nvfp4() -> Any:
    from torchao.prototype.mx_formats.inference_workflow import NVFP4WeightOnlyConfig

    return NVFP4WeightOnlyConfig()


TINY = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 16}
torchao_by("torchao-int8", lambda: ao_weights("Int8", "PerRow"), **TINY)
torchao_by("torchao-intx", lambda: ao_weights("Intx", "PerGroup", 32), **TINY)
torchao_by("torchao-fp8-row", lambda: ao_weights("Float8", "PerRow"))
torchao_by("torchao-fp8-tensor", lambda: ao_weights("Float8", "PerTensor"))
torchao_by("torchao-mxfp8", lambda: ao_mx("float8_e4m3fn"))
torchao_by("torchao-mxfp4", lambda: ao_mx("float4_e2m1fn_x2"))
torchao_by("torchao-nvfp4", ao_nvfp4)


# ---- bitsandbytes --------------------------------------------------------------------------------


def bitsandbytes(folder: Path, size: int, **said: Any) -> Tensors:
    """Encodes a small Llama as `from_pretrained` does, and returns what is stored."""
    from transformers import BitsAndBytesConfig

    small = {
        "hidden_size": size, "intermediate_size": size, "vocab_size": 8, "head_dim": size // 2
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as plain:
        save(llama(**small), Path(plain))
        model = AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.bfloat16, device_map="cpu",
            quantization_config=BitsAndBytesConfig(**said),
        )  # fmt: skip
    save(model, folder)
    return stored(folder)


def bnb_4bit_by(name: str, form: str, nested: bool) -> None:
    @maker(name, "transformers", "bitsandbytes")
    def _(folder: Path) -> Tensors:
        return bnb_4bit(folder, form, nested)


def bnb_4bit(folder: Path, form: str, nested: bool) -> Tensors:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # of rows that are no multiple of a block its decoding on a CPU takes other blocks' scales
    held = bitsandbytes(
        folder, 64, load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_use_double_quant=nested
    )
    keys = [key.removesuffix(".absmax") for key in held if key.endswith("weight.absmax")]
    out = {k: v for k, v in held.items() if not any(k.startswith(key) for key in keys)}
    for key in keys:
        parts = {k: v for k, v in held.items() if k.startswith(f"{key}.")}
        state = QuantState.from_dict(parts, device=torch.device("cpu"))
        assert state.dtype == torch.bfloat16
        out[key] = dequantize_4bit(held[key], state)
    return out


bnb_4bit_by("bnb-nf4", "nf4", True)
bnb_4bit_by("bnb-nf4-plain", "nf4", False)
bnb_4bit_by("bnb-fp4", "fp4", False)


@maker("bnb-int8", "transformers", "bitsandbytes")
def bnb_int8(folder: Path) -> Tensors:
    from bitsandbytes.functional import int8_vectorwise_dequant

    held = bitsandbytes(folder, 36, load_in_8bit=True)
    out = {k: v for k, v in held.items() if not k.endswith((".SCB", ".weight_format"))}
    for key, codes in out.items():
        if codes.dtype == torch.int8:
            scale = held[f"{key.removesuffix('.weight')}.SCB"]
            out[key] = int8_vectorwise_dequant(codes, scale).to(torch.bfloat16)
    return out


# ---- what is written -----------------------------------------------------------------------------


def digest(tensor: torch.Tensor) -> str:
    """dtype, shape and SHA-256 of the bytes in row-major order, as `genuine.digests` has them."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{DTYPES[tensor.dtype]} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def make(name: str, into: Path, releases: Mapping[str, str] = {}) -> None:
    """Writes one of `MAKERS`; `releases` are those of libraries that are not installed."""
    libraries, function = MAKERS[name]
    folder = into / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    decoded = function(folder)
    said = {
        "made_by": {
            one: releases.get(one) or version(one) for one in ["torch", *libraries.split(", ")]
        },
        "decoded_by": libraries.split(", ")[-1],
        "tensors": {key: digest(tensor) for key, tensor in sorted(decoded.items())},
    }
    (into / f"{name}.json").write_text(json.dumps(said, indent=1) + "\n")
    size = sum(f.stat().st_size for f in folder.rglob("*"))
    print(f"{name}: {size:,} bytes, {len(decoded)} tensors", flush=True)


def main(names: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    for name in names or MAKERS:
        make(name, FOLDER)


if __name__ == "__main__":
    main(sys.argv[1:])
