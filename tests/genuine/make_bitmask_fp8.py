"""Prints what test_bitmask_fp8.py holds: codes of FP8 of which only some are stored.

    PYTHONPATH=FOLDER python tests/genuine/make_bitmask_fp8.py

FOLDER is the unpacked wheel of compressed-tensors 0.12.2; releases from 0.15 on do not write it.
"""

from __future__ import annotations

import torch
from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import (
    BitmaskCompressor,
    BitmaskTensor,
)
from compressed_tensors.config import BitmaskConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams


def shown(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw.hex()


def main() -> None:
    how = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).weights
    numbers = torch.randn(5, 19, generator=torch.Generator().manual_seed(8)).bfloat16()
    numbers *= numbers.abs() > 0.7
    # a row of which nothing is stored
    numbers[2] = 0
    low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
    scale, zero = calculate_qparams(low, high, how)
    codes = quantize(numbers, scale, zero, how, dtype=torch.float8_e4m3fn)
    compressor = BitmaskCompressor(BitmaskConfig())
    parts = compressor.compress_weight("w", codes)
    held = {name.removeprefix("w."): tensor for name, tensor in parts.items()}
    dense = BitmaskTensor(
        **{
            "shape": held["shape"],
            **{name: held[name] for name in ("compressed", "bitmask", "row_offsets")},
        }
    ).decompress()
    assert torch.equal(dense.view(torch.uint8), codes.view(torch.uint8))
    for name, tensor in {**held, "weight_scale": scale}.items():
        print(f"    {name!r}: {shown(tensor)},")
    print(f"WEIGHT = {shown(dequantize(dense, scale, zero, how))}")


main()
