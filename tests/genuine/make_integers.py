"""Makes a folder of ModelOpt's integers of four bits (`W4A16_AWQ`), as its `hf_ptq.py` does.

    python tests/genuine/make_integers.py FOLDER

Beside it, in FOLDER.safetensors, are what the layers of the quantized model compute with, which are
what is stored but for the rounding of its scales. The environment is that of `make genuine`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from make_genuine import llama
from modelopt.torch.export import export_hf_checkpoint
from safetensors.torch import save_file


def main(folder: Path) -> None:
    # groups are of 128 columns
    model = llama(hidden_size=256, intermediate_size=384, num_attention_heads=8)
    mtq.quantize(model, mtq.INT4_AWQ_CFG, lambda m: m(torch.arange(32).reshape(2, 16)))
    used = {}
    for name, layer in model.named_modules():
        if getattr(getattr(layer, "weight_quantizer", None), "is_enabled", False):
            weight = layer.weight_quantizer(layer.weight.float())
            inputs = getattr(layer.input_quantizer, "pre_quant_scale", None)
            if inputs is not None:
                weight = weight * inputs.float()
            used[f"{name}.weight"] = weight.detach().contiguous()
    save_file(used, f"{folder}.safetensors")
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
