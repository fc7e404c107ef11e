"""Makes tiny checkpoints of which weights are left out, by a release of compressed-tensors that
could: 0.14 and older.

    python tests/genuine/make_sparse.py [NAME ...]

writes tests/data/genuine/ct-sparse24 and the like, as `make genuine` writes the others. It needs
transformers and compressed-tensors 0.12.2; for ct-bitmask-all, which has all weights as older
releases stored them, 0.8.1. Releases from 0.15 on neither write nor read these formats.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from make_genuine import FOLDER, MAKERS, SMALL, Tensors, llama, make, maker, rewrite, save

# 36 numbers of a row take bits of five bytes
TINY = {**SMALL, "hidden_size": 36}
OLD = "0.8.1"


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """The weight without the two smallest of each four in a row."""
    fours = weight.reshape(-1, 4)
    kept = fours.abs().topk(2, 1).indices
    return torch.zeros_like(fours).scatter(1, kept, fours.gather(1, kept)).reshape(weight.shape)


def uneven(weight: torch.Tensor) -> torch.Tensor:
    """The weight without its smaller half, whose rows are of any length: the first has none."""
    kept = weight.abs() > weight.abs().median()
    kept[0] = False
    return weight * kept


def prune(model: Any, prunes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Prunes its linear layers, those of `TINY` after their blocks of zeros got weights as well."""
    dice = torch.Generator().manual_seed(24)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            if model.config.hidden_size == TINY["hidden_size"]:
                weight = (torch.randn(weight.shape, generator=dice) * 0.05).to(weight.dtype)
            module.weight.data = prunes(weight)


def calibrate(model: Any) -> None:
    """Sets the scales of rows."""
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            weight = module.weight.data
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            scale, _ = calculate_qparams(low, high, scheme.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)


def sparse(
    folder: Path,
    groups: Mapping[str, Any] = {},
    form: str = "float-quantized",
    config: Any = None,
    prunes: Callable[[torch.Tensor], torch.Tensor] = pruned,
    **shape: Any,
) -> Tensors:
    from compressed_tensors.config import Sparse24BitMaskConfig

    model = llama(**(shape or SMALL))
    prune(model, prunes)
    save(model, folder)
    said = {"targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.5}
    quantized = None
    if groups:
        quantized = QuantizationConfig(config_groups=dict(groups), ignore=["lm_head"], format=form)
        apply_quantization_config(model, quantized)
        calibrate(model)
    compressor = ModelCompressor(
        sparsity_config=(config or Sparse24BitMaskConfig)(**said), quantization_config=quantized
    )
    compressor.compress_model(model)
    rewrite(folder, dict(model.state_dict()))
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {k: v for k, v in model.state_dict().items() if not k.endswith("_scale")}


@maker("ct-sparse24", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    return sparse(folder)


@maker("ct-sparse24-fp8", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    return sparse(folder, {"group_0": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])})


@maker("ct-sparse24-int8", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    groups = {"group_0": preset_name_to_scheme("W8A8", ["Linear"])}
    return sparse(folder, groups, "int-quantized", **TINY)


@maker("ct-bitmask", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    return sparse(folder, config=BitmaskConfig, prunes=uneven, **TINY)


@maker("ct-bitmask-int8", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    """FP8 it writes in the same way, but does not read."""
    groups = {"group_0": preset_name_to_scheme("W8A8", ["Linear"])}
    return sparse(folder, groups, "int-quantized", BitmaskConfig, uneven, **TINY)


@maker("ct-bitmask-all", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    """As 0.8 stored it: embeddings and norms too."""
    model = llama(**TINY)
    prune(model, uneven)
    save(model, folder)
    compressor = ModelCompressor(sparsity_config=BitmaskConfig(global_sparsity=0.5))
    rewrite(folder, compressor.compress(model))
    compressor.update_config(folder)
    return dict(compressor.sparsity_compressor.decompress(str(folder)))


@maker("ct-marlin24", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    """Attention in four bits and the MLP in eight. It writes this and does not read it: the numbers
    are those of its `quantize` and `dequantize`, rounded once.
    """
    from compressed_tensors.quantization import dequantize, quantize

    model = llama(**{**SMALL, "intermediate_size": 64, "head_dim": 64})
    prune(model, pruned)
    save(model, folder)
    groups = {
        f"group_{bits}": {
            "targets": [f"re:.*{part}.*_proj$"],
            "weights": {"num_bits": bits, "type": "int", "strategy": "channel"},
        }
        for bits, part in ((4, "self_attn"), (8, "mlp"))
    }
    quantized = QuantizationConfig(config_groups=groups, ignore=["lm_head"], format="marlin-24")
    apply_quantization_config(model, quantized)
    calibrate(model)
    state = dict(model.state_dict())
    decoded = {key: tensor for key, tensor in state.items() if ".weight_" not in key}
    for name, module in model.named_modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            weight, scale = module.weight.data.half(), module.weight_scale.data.half()
            said = {"zero_point": torch.zeros_like(scale), "args": scheme.weights}
            # integers have no -0
            codes = quantize(x=weight, scale=scale, **said).to(torch.int8)
            exact = dequantize(x_q=codes.float(), scale=scale.float(), **said)
            decoded[f"{name}.weight"] = exact.to(torch.bfloat16)
    compressor = ModelCompressor(quantization_config=quantized)
    rewrite(folder, compressor.compress(model, state))
    compressor.update_config(folder)
    return decoded


if __name__ == "__main__":
    made = [n for n in MAKERS if n.startswith(("ct-sparse24", "ct-bitmask", "ct-marlin24"))]
    old = version("compressed-tensors") == OLD
    for name in sys.argv[1:] or [n for n in made if (n == "ct-bitmask-all") == old]:
        make(name, FOLDER)
