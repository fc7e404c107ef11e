"""Loads a `torch_dist` folder into megatron-core's model, on a CPU, and compares the logits with
those of the model of transformers.

    .venv-megatron/bin/python tests/genuine/load_megatron.py FOLDER HF FAMILY [--grid tp2]

HF is the folder `hf` of the family (tests/megatron_runs.py). Everything that the folder has must be
asked for by the model, and the other way round: `StrictHandling.RAISE_ALL`, and `strict=True` for
the modules. With `--optimizer` the moments of Adam are asked for as well, and printed as a sum. The
process exits with 1 and a text where anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from make_megatron import (
    GRIDS,
    arguments,
    build,
    compare_logits,
    random_states,
    trained,
    without_gpu,
)


def work(rank: int, said: argparse.Namespace, meeting: str) -> None:
    torch.set_num_threads(1)
    without_gpu()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.validation import StrictHandling

    tp, pp, vpp, ep = GRIDS[said.grid]
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=tp * pp * ep)
    mpu.initialize_model_parallel(
        tp, pp, vpp if vpp > 1 else None, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )  # fmt: skip
    config = json.loads((said.hf / "config.json").read_text())
    args = arguments(said.family, config, said.grid, "torch_dist", rank)
    common = dist_checkpointing.load_common_state_dict(str(said.folder))
    args.padded_vocab_size = getattr(common.get("args"), "padded_vocab_size", None) or said.rows
    models = build(args, said.grid)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state: dict[str, Any] = {
        "model" if len(models) == 1 else f"model{at}": model.sharded_state_dict(metadata=content)
        for at, model in enumerate(models)
    }
    if said.optimizer:
        state["optimizer"] = trained(models[0]).sharded_state_dict(state["model"], is_loading=True)
    if said.generators:
        ranks = tuple(map(int, said.generators.split(".")))
        for at in [(p, t) for p in range(ranks[0]) for t in range(ranks[1])]:
            state[f"rng_state{at}"] = ShardedObject("rng_state", None, ranks, at)
    read = dist_checkpointing.load(state, str(said.folder), strict=StrictHandling.RAISE_ALL)
    for at, model in enumerate(models):
        model.load_state_dict(read["model" if vpp == 1 else f"model{at}"], strict=True)
    if said.generators == "1.1":
        due = random_states(0)[0]["torch_rng_state"]
        if not torch.equal(read["rng_state(0, 0)"][0]["torch_rng_state"], due):
            sys.exit(f"{said.folder}: other generators")
    if said.optimizer:
        moments = read["optimizer"]["state"]
        print("moments", *map(str, moments))
    if tp * pp * ep == 1:
        print("logits", compare_logits(models[0], said.hf))
    elif rank == 0:
        print("loaded by", tp * pp * ep, "ranks")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folder", type=Path)
    asked.add_argument("hf", type=Path)
    asked.add_argument("family")
    asked.add_argument("--grid", default="1", choices=list(GRIDS))
    asked.add_argument("--rows", type=int, help="of the embedding, where no args say it")
    asked.add_argument("--optimizer", action="store_true")
    asked.add_argument("--generators", help="the ranks whose generators are kept, as 1.1")
    said = asked.parse_args()
    tp, pp, _, ep = GRIDS[said.grid]
    with tempfile.TemporaryDirectory() as there:
        mp.spawn(work, (said, f"file://{there}/meeting"), nprocs=tp * pp * ep)


if __name__ == "__main__":
    main()
