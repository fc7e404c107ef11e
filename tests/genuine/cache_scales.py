"""Scales of a KV cache put beside the tensors of a checkpoint."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path


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
