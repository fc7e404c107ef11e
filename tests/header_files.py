"""Safetensors files whose tensors are holes: names, dtypes and shapes as a producer writes them,
at the size of a real model, and no byte on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

# torch's name -> safetensors' name, bits
NAMES = {
    "float32": ("F32", 32), "bfloat16": ("BF16", 16), "float16": ("F16", 16), "uint8": ("U8", 8),
    "int8": ("I8", 8), "int32": ("I32", 32), "int64": ("I64", 64), "float8_e4m3fn": ("F8_E4M3", 8),
    "float8_e5m2": ("F8_E5M2", 8), "float8_e8m0fnu": ("F8_E8M0", 8), "float4_e2m1fn": ("F4", 4),
}  # fmt: skip


def write_headers(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, object] | None = None,
) -> Path:
    """A folder with one file of these tensors, key -> (dtype, shape), and a `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        name, bits = NAMES[dtype]
        start, end = end, end + prod(shape) * bits // 8
        header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file.fileno(), 8 + len(text) + end)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
