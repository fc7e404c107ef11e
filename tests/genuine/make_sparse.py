"""Makes tiny checkpoints of which two of four weights are left out, by a release of
compressed-tensors that could: 0.14 and older.

    python tests/genuine/make_sparse.py

writes tests/data/genuine/ct-sparse24 and ct-sparse24-fp8, as `make genuine` writes the others. It
needs compressed-tensors 0.12.2 and transformers; releases from 0.15 on neither write nor read the
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import Sparse24BitMaskConfig
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from make_genuine import FOLDER, SMALL, Tensors, llama, make, maker, rewrite, save


def pruned(weight: torch.Tensor) -> torch.Tensor:
    """The weight without the two smallest of each four in a row."""
    fours = weight.reshape(-1, 4)
    kept = fours.abs().topk(2, 1).indices
    return torch.zeros_like(fours).scatter(1, kept, fours.gather(1, kept)).reshape(weight.shape)


def sparse(folder: Path, groups: Mapping[str, Any]) -> Tensors:
    model = llama(**SMALL)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = pruned(module.weight.data)
    save(model, folder)
    said = {"targets": ["Linear"], "ignore": ["lm_head"], "global_sparsity": 0.5}
    quantized = None
    if groups:
        quantized = QuantizationConfig(
            config_groups=dict(groups), ignore=["lm_head"], format="float-quantized"
        )
        apply_quantization_config(model, quantized)
        for module in model.modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                weight = module.weight.data
                low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
                scale, _ = calculate_qparams(low, high, scheme.weights)
                module.weight_scale.data = scale.to(module.weight_scale.dtype)
    compressor = ModelCompressor(
        sparsity_config=Sparse24BitMaskConfig(**said), quantization_config=quantized
    )
    compressor.compress_model(model)
    rewrite(folder, dict(model.state_dict()))
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {k: v for k, v in model.state_dict().items() if not k.endswith("_scale")}


@maker("ct-sparse24", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    return sparse(folder, {})


@maker("ct-sparse24-fp8", "transformers", "compressed-tensors")
def _(folder: Path) -> Tensors:
    return sparse(folder, {"group_0": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])})


if __name__ == "__main__":
    for name in ("ct-sparse24", "ct-sparse24-fp8"):
        make(name, FOLDER)
