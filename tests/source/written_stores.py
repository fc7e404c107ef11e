"""Checkpoints whose tensors are long enough that a store copies them, and what a bucket holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from commandline import DATA
from safetensors.numpy import save_file
from store_servers import S3

import migrate

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


def mixtral(folder: Path) -> Path:
    """A Mixtral of one layer, of which the experts' matrices are long enough to be copied."""
    folder.mkdir(parents=True)
    numbers, layer, width, inner = np.random.default_rng(1), "model.layers.0", 1024, 1400
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.block_sparse_moe.gate.weight": (2, width),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        f"{layer}.self_attn.q_proj.weight": (width, width),
        f"{layer}.self_attn.k_proj.weight": (width // 2, width),
        f"{layer}.self_attn.v_proj.weight": (width // 2, width),
        f"{layer}.self_attn.o_proj.weight": (width, width),
        "lm_head.weight": (40, width),
        "model.embed_tokens.weight": (40, width),
        "model.norm.weight": (width,),
    }
    for expert in range(2):
        at = f"{layer}.block_sparse_moe.experts.{expert}"
        shapes |= {f"{at}.w1.weight": (inner, width), f"{at}.w3.weight": (inner, width)}
        shapes[f"{at}.w2.weight"] = (width, inner)
    tensors = {name: numbers.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((DATA / "mixtral__v4" / "hub" / "config.json").read_text())
    config |= {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 1}
    config |= {"num_local_experts": 2, "num_experts": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def through_a_released_lineage(server: S3, folder: Path, copy: str) -> None:
    """A Mixtral goes from bucket to bucket, compares equal to the local run, and comes back."""
    local = mixtral(folder / "mixtral")
    source, out = server.put(local, f"{folder.name}/old"), f"s3://bucket/{folder.name}/new"
    migrate.apply(local, folder / "v5", to="hf-mixtral@v5")
    report = migrate.apply(source, out, to="hf-mixtral@v5", copy=copy)
    # six matrices of 5.5 MiB, less what the short stretches before them borrow
    assert (report.store.copied > 20 * MIB) == (copy == "auto")
    assert (report.store.copied == 0) == (copy == "never")
    assert held(server, f"{folder.name}/new/") == {
        file.name: file.read_bytes() for file in (folder / "v5").iterdir()
    }
    assert migrate.diff(out, folder / "v5").equal
    assert migrate.verify(out, source=source).equal
    migrate.downgrade(out, f"{out}-back", copy=copy)
    assert migrate.diff(f"{out}-back", local).tensors_equal
    assert not uploads(server, folder.name)


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


def listed(server: S3, upload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts that an unfinished upload has."""
    named = {"Bucket": "bucket", "Key": upload["Key"], "UploadId": upload["UploadId"]}
    return list(server.client.list_parts(**named).get("Parts", ()))


def replace_a_part(server: S3, prefix: str) -> str:
    """Uploads other bytes in the place of a part that an unfinished upload has; its key."""
    key, upload, one = next(
        (begun["Key"], begun["UploadId"], part)
        for begun in uploads(server, prefix)
        for part in listed(server, begun)
    )
    server.client.upload_part(
        Bucket="bucket",
        Key=key,
        UploadId=upload,
        PartNumber=one["PartNumber"],
        Body=b"\1" * one["Size"],
        ChecksumAlgorithm="CRC64NVME",
    )
    return str(key)
