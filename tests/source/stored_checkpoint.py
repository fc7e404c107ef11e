"""A small checkpoint of shards, and what is done with it where it lies in a store."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RULE = """\
id: places/one
title: A rename and a stack
lineage: places
edge: [a, b]
requires: ">=0.1"
keep: ["{k...}"]
rules:
  - name: stack
    from: "layers.{i:int}.w"
    to: "stacked.w"
    via: [{stack: {over: i, dim: 0}}]
  - name: rename
    from: "layers.{i:int}.b"
    to: "model.layers.{i}.b"
"""


def shards(folder: Path, count: int = 3, rows: int = 600, seed: int = 0) -> Path:
    """A checkpoint of `count` shards with an index, a configuration and a tokenizer."""
    folder.mkdir(parents=True)
    numbers, weight_map = np.random.default_rng(seed), {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        tensors = {
            f"layers.{shard}.w": numbers.standard_normal((rows, 500), np.float32),
            f"layers.{shard}.b": numbers.standard_normal(50, np.float32),
        }
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n" * 1000)
    return folder


def rule(folder: Path) -> Path:
    place = folder / "rule.yaml"
    place.write_text(RULE)
    return place
