"""Prints, as JSON, how fast extra state is decoded, and what ten thousand of them add to a plan.

extra_state_speed.py [STATES]

Decoding is given in MB/s of opcodes (the state of one module, as a release wrote it) and in GB/s of
numbers (one state with a long history). Plans are in seconds: of a checkpoint of TransformerLayers
whose modules have no state at all ("lacking"), of one with a tensor of the same name that is merely
renamed ("without"), and of the same one with states that hold a recipe, and with states of delayed
scaling, no two alike. Times are those of the processor, the best of five rounds.
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
  - {name: move, from: "layers.{i:int}.{k...}", to: "blocks.{i}.{k}"}
  - name: state
    from: "layers.{i:int}.{m...}._extra_state"
    to: "blocks.{i}.{m}._extra_state"
    optional: true
"""
# a TransformerLayer of Transformer Engine, as it names them
_NORM = ("layer_norm_weight", "layer_norm_bias")
MODULES = (
    ("self_attention.layernorm_qkv", (*_NORM, "weight", "bias")),
    ("self_attention.core_attention", ()),
    ("self_attention.proj", ("weight", "bias")),
    ("layernorm_mlp", (*_NORM, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")),
)  # fmt: skip
DECIDES = "    via: [{extra_state: {stateless: keep, delayed_scaling: pickle-2.x}}]\n"


def best(run: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def checkpoint(path: Path, state: Callable[[int], bytes] | None, count: int) -> Path:
    """A checkpoint of TransformerLayers: four modules with a state each, and twelve parameters."""
    header: dict[str, Any] = {}
    data = []
    at = 0
    for i in range(count):
        module, parameters = MODULES[i % 4]
        own = [] if state is None else [("_extra_state", "U8", state(i))]
        for name, dtype, raw in (*((p, "F32", bytes(256)) for p in parameters), *own):
            shape = [len(raw) // (4 if dtype == "F32" else 1)]
            header[f"layers.{i // 4}.{module}.{name}"] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [at, at + len(raw)],
            }
            data.append(raw)
            at += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))
    return path


def delayed(payload: bytes) -> Callable[[int], bytes]:
    """The state of each module: the payload with other scales."""
    state = decode(payload, "x").states[""]
    scales = bytes(state.tensors["scale_fwd"].data) if state is not None else b""
    return lambda i: payload.replace(scales, struct.pack("<3f", i + 1, i + 1.5, i + 2))


def plans(folder: Path, count: int) -> dict[str, float]:
    payload = (VECTORS / "HEAD_linear_DelayedScaling.pkl").read_bytes()
    recipe = (VECTORS / "v2.17_linear_MXFP8BlockScaling.pkl").read_bytes()
    plain, decides = folder / "plain.yaml", folder / "decides.yaml"
    plain.write_text(RULES)
    decides.write_text(RULES + DECIDES)
    cases: list[tuple[str, Path, Callable[[int], bytes] | None]] = [
        ("lacking", plain, None),
        ("without", plain, lambda i: b""),
        ("stateless", decides, lambda i: recipe),
        ("delayed", decides, delayed(payload)),
    ]
    paths = {
        name: checkpoint(folder / f"{name}.safetensors", state, count) for name, _, state in cases
    }
    out = dict.fromkeys(paths, float("inf"))
    # a round has all of them, so that what else the machine does meets all of them
    for _ in range(5):
        for name, rules, _ in cases:
            path = paths[name]
            took = best(
                lambda path=path, rules=rules: migrate.plan(
                    path, rules=[rules], allow={"delayed-scaling"}
                ),
                1,
            )  # type: ignore[misc]
            out[name] = min(out[name], took)
    return out


def main(count: int) -> None:
    import torch

    out: dict[str, Any] = {"opcodes, MB/s": {}}
    for name in (
        "HEAD_linear_DelayedScaling.pkl",
        "v0.8_linear_DelayedScaling.pkl",
        "v2.17_linear_NVFP4BlockScaling.pkl",
    ):
        payload = (VECTORS / name).read_bytes()
        out["opcodes, MB/s"][name] = round(
            len(payload)
            * 1000
            / best(lambda p=payload: [decode(p, "x") for _ in range(1000)])
            / 1e6,
            1,
        )  # type: ignore[misc]
    long = pickle.dumps({"amax_history_fwd": torch.ones(1 << 20, 3)})
    out["numbers, GB/s"] = round(len(long) / best(lambda: decode(long, "x")) / 1e9, 1)
    with tempfile.TemporaryDirectory() as folder:
        times = plans(Path(folder), count)
    out["plan, s"] = {name: round(seconds, 2) for name, seconds in times.items()}
    for one in ("lacking", "without"):
        out[f"plan, times that {one}"] = {
            name: round(times[name] / times[one], 2) for name in ("stateless", "delayed")
        }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
