"""The checkpoints of `rule_sets`: written as every form of file, and read again, without anything
of migrate.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from naive_ops import Tensor, unsigned
from naive_rules import bare
from rule_parts import RuleSet

SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}


class Plainly(yaml.SafeDumper):
    """YAML without anchors, which rule files may not have."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write_rules(path: Path, file: Mapping[str, Any]) -> Path:
    path.write_text(
        yaml.dump(dict(file), Dumper=Plainly, width=10**6, sort_keys=False, allow_unicode=True)
    )
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    header, offset, data = {}, 0, []
    for key, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor.bits).tobytes()
        header[key] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *data]))


def read_safetensors(path: Path) -> dict[str, Tensor]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    names = {theirs: ours for ours, theirs in SAFETENSORS.items()}
    out = {}
    for key, entry in header.items():
        start, stop = (8 + length + at for at in entry["data_offsets"])
        dtype = names[entry["dtype"]]
        out[key] = Tensor(
            dtype, np.frombuffer(raw[start:stop], unsigned(dtype)).reshape(entry["shape"])
        )
    return out


def write_torch(path: Path, tensors: Mapping[str, Tensor], *, nested: bool = False) -> None:
    import torch

    state = {}
    for key, tensor in tensors.items():
        dtype = getattr(torch, tensor.dtype)
        raw = bytearray(np.ascontiguousarray(tensor.bits).tobytes())
        state[key] = (
            torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        ).reshape(tensor.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state, "epoch": 3} if nested else state, path)


def read_torch(path: Path) -> dict[str, Tensor]:
    import torch

    state = torch.load(path, weights_only=True)
    state = state.get("model", state) if isinstance(state.get("model"), dict) else state
    out = {}
    for key, tensor in state.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raw = (
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
        out[key] = Tensor(dtype, np.frombuffer(raw, unsigned(dtype)).reshape(tuple(tensor.shape)))
    return out


def store(folder: Path, made: RuleSet) -> Path:
    """Writes the checkpoint of a set below the folder, and returns its path."""
    if made.form == "safetensors":
        write_safetensors(folder / "old.safetensors", made.tensors)
        return folder / "old.safetensors"
    if made.form in ("pt", "nested pt"):
        write_torch(folder / "old.pt", made.tensors, nested=made.form != "pt")
        return folder / "old.pt"
    where = folder / "old"
    if made.form == "shards":
        keys = sorted(made.tensors)
        names = {
            key: f"model-{i % made.shards + 1:05}-of-{made.shards:05}.safetensors"
            for i, key in enumerate(keys)
        }
        for name in sorted(
            f"model-{i + 1:05}-of-{made.shards:05}.safetensors" for i in range(made.shards)
        ):
            write_safetensors(
                where / name, {key: made.tensors[key] for key in keys if names[key] == name}
            )
        (where / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": names})
        )
        return where
    ranks: dict[int, dict[str, Tensor]] = {}
    for key, tensor in made.tensors.items():
        name, rank = bare(key)
        ranks.setdefault(rank or 0, {})[name] = tensor
    for rank in range(max(ranks, default=0) + 1):
        held = ranks.get(rank, {})
        if made.form == "consolidated.safetensors":
            write_safetensors(where / f"consolidated.{rank:02}.safetensors", held)
        elif made.form == "consolidated.pth":
            write_torch(where / f"consolidated.{rank:02}.pth", held)
        elif made.form == "mp_rank.safetensors":
            write_safetensors(where / f"mp_rank_{rank:02}" / "model.safetensors", held)
        else:
            write_torch(where / f"mp_rank_{rank:02}" / "model_optim_rng.pt", held, nested=True)
    return where


def stored(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by key and rank, `key@0` where there are no ranks."""
    files = (
        [path]
        if path.is_file()
        else sorted(
            p for p in path.rglob("*") if p.suffix in (".safetensors", ".pt", ".pth", ".bin")
        )
    )
    out: dict[str, Tensor] = {}
    for file in files:
        inside = str(file.relative_to(path.parent))
        rank = next(
            (
                int(found)
                for word in ("consolidated.", "mp_rank_")
                if word in inside and (found := inside.split(word)[1][:2]).isdigit()
            ),
            0,
        )
        for key, tensor in (
            read_safetensors(file) if file.suffix == ".safetensors" else read_torch(file)
        ).items():
            name = f"{key}@{rank}"
            assert name not in out, f"{name} stands in several files"
            out[name] = tensor
    return out
