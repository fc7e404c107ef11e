"""Scales of a KV cache put beside the tensors of a checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from genuine import checkpoint

# what ModelOpt writes of a cache in FP8, and what it would of another
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}, "FP8"
NVFP4 = "NVFP4", "NVFP4"
DECLARED = ("config.json", "hf_quant_config.json")


def add_scales(
    source: Path, folder: Path, keys: Iterable[str], shape: Sequence[int] = (), value: float = 0.5
) -> Path:
    """A copy of the checkpoint in which each of the keys is a float32 tensor of this value."""
    shutil.copytree(source, folder)
    raw = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    for key in keys:
        assert key not in header
        header[key] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + 4],
        }
        data += struct.pack("<f", value)
    made = json.dumps(header).encode()
    made += b" " * (-len(made) % 8)
    (folder / "model.safetensors").write_bytes(len(made).to_bytes(8, "little") + made + data)
    return folder


def with_cache(
    name: str,
    folder: Path,
    said: tuple[Any, Any] = FP8,
    places: Sequence[str] = DECLARED,
    *,
    scales: bool = True,
) -> tuple[Path, list[str]]:
    """ModelOpt's checkpoint with a KV cache as it declares one, and the keys of its scales."""
    source = checkpoint(name).folder
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"] if scales else 0
    keys = [
        f"model.layers.{n}.self_attn.{one}_proj.{one}_scale" for n in range(layers) for one in "kv"
    ]
    add_scales(source, folder, keys)
    for file, at, field, value in (
        ("config.json", "quantization_config", "kv_cache_scheme", said[0]),
        ("hf_quant_config.json", "quantization", "kv_cache_quant_algo", said[1]),
    ):
        if file in places:
            held = json.loads((folder / file).read_text())
            held[at][field] = value
            (folder / file).write_text(json.dumps(held, indent=2) + "\n")
    return folder, keys
