"""What stock torch does with distributed checkpoints, each in a process of its own or in several.

dcp_torch.py save RANKS DIM SAFETENSORS FOLDER   each tensor Shard(DIM) on so many gloo ranks
dcp_torch.py convert FOLDER FILE.pt              dcp_to_torch_save
dcp_torch.py load RANKS FOLDER KEY ROWS COLUMNS  one tensor, Shard(0), by dcp.load; prints seconds
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros


def _begin(rank: int, ranks: int, store: str) -> Any:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (ranks,))


def _save(rank: int, ranks: int, store: str, dim: int, source: str, folder: str) -> None:
    from safetensors import safe_open

    mesh = _begin(rank, ranks, store)
    state: dict[str, DTensor] = {}
    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                whole = file.get_tensor(key)
                placement = Shard(dim) if whole.ndim > dim else Replicate()
                # each rank reads the file: nothing is sent
                state[key] = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    dcp.save({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


def _load(rank: int, ranks: int, store: str, folder: str, key: str, shape: list[int]) -> None:
    mesh = _begin(rank, ranks, store)
    times = []
    for _ in range(3):
        target = {key: zeros(*shape, dtype=torch.bfloat16, device_mesh=mesh, placements=[Shard(0)])}
        dist.barrier()
        started = time.perf_counter()
        dcp.load(target, checkpoint_id=folder)
        dist.barrier()
        times.append(time.perf_counter() - started)
    if not rank:
        print(min(times))
    dist.destroy_process_group()


def main() -> None:
    what, *rest = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        if what == "save":
            ranks, dim = int(rest[0]), int(rest[1])
            mp.spawn(_save, (ranks, store, dim, *rest[2:]), ranks)
        elif what == "convert":
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            dcp_to_torch_save(*rest)
        else:
            ranks, shape = int(rest[0]), [int(n) for n in rest[3:]]
            mp.spawn(_load, (ranks, store, *rest[1:3], shape), ranks)


if __name__ == "__main__":
    main()
