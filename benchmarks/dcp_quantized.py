"""Saves MXFP8 weights as 8 gloo ranks of stock torch have them, each its shard as an object of its
own: `dcp_quantized.py COUNT COLUMNS FOLDER`.

Codes and scales are random, both ways round. A rank has 1056 rows, so that its shard ends on a
border of blocks and its scales are stored with rows and columns of padding, which joining leaves
out. The class is the stand-in of the tests, of Transformer Engine's name and with its components.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("formats", "source")]
import quantized_classes  # noqa: E402 - they lie among the tests
import quantized_ranks  # noqa: E402

RANKS, ROWS, BLOCK = 8, 1056, 32


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step


def _components(columns: int) -> dict[str, tuple[int, int]]:
    """The shapes of a shard's components, as `get_scale_shape` of MXFP8Quantizer pads scales."""
    codes = (ROWS, columns)
    return {
        "_rowwise_data": codes,
        "_columnwise_data": codes,
        "_rowwise_scale_inv": (_padded(ROWS, 128), _padded(columns // BLOCK, 4)),
        "_columnwise_scale_inv": (_padded(ROWS // BLOCK, 4), _padded(columns, 128)),
    }


def _save(rank: int, store: str, count: int, columns: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh, rng = init_device_mesh("cpu", (RANKS,)), np.random.default_rng(rank)
    state: dict[str, DTensor] = {}
    with quantized_classes.installed():
        for number in range(count):
            held = {
                name: rng.integers(0, 256, (*shape, 1), dtype=np.uint8)
                for name, shape in _components(columns).items()
            }
            local = quantized_ranks.wrapped("te-mxfp8", (ROWS, columns), held)
            shape = torch.Size((RANKS * ROWS, columns))
            state[f"layers.{number}.weight"] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(columns, 1)
            )
        dcp.save({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


def main() -> None:
    count, columns, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as made:
        mp.spawn(_save, (f"{made}/store", count, columns, folder), RANKS)


if __name__ == "__main__":
    main()
