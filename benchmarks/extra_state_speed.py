"""Prints, as JSON, how fast extra state is decoded, and what ten thousand of them add to a plan.

extra_state_speed.py [STATES]

Decoding is given in MB/s of opcodes (the state of one module, as a release wrote it) and in GB/s of numbers (one state with a long
history). Plans are in seconds: of a checkpoint whose modules have no state but a tensor of the same name, and of the same one with states
that hold a recipe, and with states of delayed scaling, no two alike. Every time is the best of five.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import migrate
from migrate.extra_state.decode import decode

VECTORS = Path(__file__).resolve().parents[1] / "tests" / "data" / "te"
RULES = """
id: demo/v2/x
title: Renames modules
lineage: demo
edge: [v1, v2]
rules:
  - {name: move, from: "layers.{i:int}.{m}.{p:weight|bias}", to: "blocks.{i}.{m}.{p}"}
  - name: state
    from: "layers.{i:int}.{m}._extra_state"
    to: "blocks.{i}.{m}._extra_state"
"""
DECIDES = "    via: [{extra_state: {stateless: keep, delayed_scaling: pickle-2.x}}]\n"


def best(run: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def checkpoint(path: Path, state: Callable[[int], bytes], count: int) -> Path:
    header: dict[str, Any] = {}
    data = []
    at = 0
    for i in range(count):
        for name, dtype, raw in (("weight", "F32", bytes(8)), ("bias", "F32", bytes(8)), ("_extra_state", "U8", state(i))):
            shape = [len(raw) // (4 if dtype == "F32" else 1)]
            header[f"layers.{i // 4}.m{i % 4}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
            data.append(raw)
            at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    return path


def delayed(payload: bytes) -> Callable[[int], bytes]:
    """The state of each module: the payload with other scales."""
    state = decode(payload, "x").states[""]
    scales = bytes(state.tensors["scale_fwd"].data) if state is not None else b""
    return lambda i: payload.replace(scales, struct.pack("<3f", i, i + 0.5, -i))


def plans(folder: Path, count: int) -> dict[str, float]:
    payload = (VECTORS / "HEAD_linear_DelayedScaling.pkl").read_bytes()
    recipe = (VECTORS / "v2.17_linear_MXFP8BlockScaling.pkl").read_bytes()
    plain, decides = folder / "plain.yaml", folder / "decides.yaml"
    plain.write_text(RULES)
    decides.write_text(RULES + DECIDES)
    out = {}
    for name, rules, state in (
        ("without", plain, lambda i: b""),
        ("stateless", decides, lambda i: recipe),
        ("delayed", decides, delayed(payload)),
    ):
        path = checkpoint(folder / f"{name}.safetensors", state, count)
        out[name] = best(lambda path=path, rules=rules: migrate.plan(path, rules=[rules], allow={"delayed-scaling"}))  # type: ignore[misc]
    return out


def main(count: int) -> None:
    import torch

    out: dict[str, Any] = {"opcodes, MB/s": {}}
    for name in ("HEAD_linear_DelayedScaling.pkl", "v0.8_linear_DelayedScaling.pkl", "v2.17_linear_NVFP4BlockScaling.pkl"):
        payload = (VECTORS / name).read_bytes()
        out["opcodes, MB/s"][name] = round(len(payload) * 1000 / best(lambda p=payload: [decode(p, "x") for _ in range(1000)]) / 1e6, 1)  # type: ignore[misc]
    long = pickle.dumps({"amax_history_fwd": torch.ones(1 << 20, 3)})
    out["numbers, GB/s"] = round(len(long) / best(lambda: decode(long, "x")) / 1e9, 1)
    with tempfile.TemporaryDirectory() as folder:
        times = plans(Path(folder), count)
    out["plan, s"] = {name: round(seconds, 2) for name, seconds in times.items()}
    out["plan, times that without"] = {name: round(times[name] / times["without"], 2) for name in ("stateless", "delayed")}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
