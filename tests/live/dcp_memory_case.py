"""Cases for `ranks`: what a load takes beside the model, by the kernel's own count of its most."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from migrate.dcp import MigratingReader

MB = 1_000_000
EXPERTS, ROWS, COLUMNS = 4, 4096, 2048
# key -> (shape, dimension that is cut, dtype of the target)
HELD = {
    "up": ((EXPERTS, ROWS, COLUMNS), 1, torch.float32),
    "wide": ((2 * ROWS, 2 * COLUMNS), 0, torch.float64),
    "turned": ((2 * COLUMNS, 4 * ROWS), 0, torch.float32),
    "dense": ((4 * ROWS, COLUMNS), 1, torch.bfloat16),
}
RULES = """\
id: toy/v2/large
title: A stack, a cast, a transpose, and blocks of FP8
why: each takes another way through the reader
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
keep: [wide]
rules:
  - {name: up, from: "e.{n:int}", to: "up", via: [{stack: {over: n}}]}
  - {name: turned, from: "t", to: "turned", via: [{transpose: {dims: [0, 1]}}]}
  - name: dense
    from: {weight: "q.weight", scale: "q.weight_scale_inv"}
    to: "dense"
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128]}}]
"""


def saved() -> dict[str, torch.Tensor]:
    """The old layout: a stack of four that has 134 MB, and tensors of 134, 268 and 34 MB."""
    held = {f"e.{n}": torch.full((ROWS, COLUMNS), n + 1.0) for n in range(EXPERTS)}
    held["wide"] = torch.full((2 * ROWS, 2 * COLUMNS), 3.0)
    held["t"] = torch.full((4 * ROWS, 2 * COLUMNS), 5.0)
    held["q.weight"] = torch.full((4 * ROWS, COLUMNS), 2.0).to(torch.float8_e4m3fn)
    held["q.weight_scale_inv"] = torch.full((4 * ROWS // 128, COLUMNS // 128), 0.5)
    return held


def kilobytes(name: str) -> int:
    """A line of what the kernel knows of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def takes_little(rank: int, source: str, rules: str) -> None:
    """Each tensor by itself, whose shard is larger than what may be held beside it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    small = {"one": torch.ones(1)}
    dcp.load(small, storage_reader=MigratingReader({"one": torch.ones(1)}))
    for key, (shape, dim, dtype) in HELD.items():
        part = list(shape)
        part[dim] //= dist.get_world_size()
        # written, or the memory would be counted as it is filled
        local = torch.full(part, 7, dtype=dtype)
        state: dict[str, Any] = {key: DTensor.from_local(local, mesh, [Shard(dim)])}
        Path("/proc/self/clear_refs").write_text("5")
        before = kilobytes("VmRSS")
        reader = MigratingReader(source, rules=[rules], allow={"lossy"})
        dcp.load(state, storage_reader=reader)
        taken = 1024 * (kilobytes("VmHWM") - before)
        if key == "up":
            assert all(bool((one == n + 1).all()) for n, one in enumerate(local))
        else:
            assert bool((local == {"wide": 3, "turned": 5, "dense": 1}[key]).all()), key
        assert taken <= 120 * MB, (key, taken / MB)
        assert taken < local.nbytes, (key, taken / MB)
        del state, local
