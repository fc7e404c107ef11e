"""Checkpoints whose tensors are long enough that a store copies them, and what a bucket holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from store_servers import S3

MIB = 1 << 20


def large(folder: Path) -> Path:
    """Two shards: tensors of 6 MiB that only move, and shorter ones between them."""
    folder.mkdir(parents=True)
    numbers, weight_map = np.random.default_rng(1), {}
    for shard in range(2):
        name = f"model-{shard + 1:05}-of-00002.safetensors"
        tensors = {
            f"layers.{shard}.w": numbers.integers(0, 255, (6 * MIB,), np.uint8),
            f"layers.{shard}.b": numbers.standard_normal(50, np.float32),
            f"head.{shard}": numbers.integers(0, 255, (7 * MIB,), np.uint8),
        }
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


def held(server: S3, prefix: str) -> dict[str, bytes]:
    """Key below the prefix -> bytes."""
    pages = server.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    keys = [one["Key"] for page in pages for one in page.get("Contents", ())]
    return {
        key[len(prefix) :]: server.client.get_object(Bucket="bucket", Key=key)["Body"].read()
        for key in keys
    }


def uploads(server: S3, prefix: str) -> list[dict[str, Any]]:
    """Unfinished uploads below the prefix."""
    found = server.client.list_multipart_uploads(Bucket="bucket", Prefix=prefix)
    return list(found.get("Uploads", ()))
