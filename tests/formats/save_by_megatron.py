"""A program for Megatron Core (0.16 has been run), without migrate: saves a small checkpoint of two
ranks as `megatron.core.dist_checkpointing` writes it. What came of it stands in
tests/data/megatron.

`save_by_megatron.py FOLDER`; Megatron synchronizes a CUDA device, which is left out here.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def tensors():
    """What both ranks together hold."""
    g = torch.Generator().manual_seed(11)
    return {
        "embedding.word_embeddings.weight": torch.rand(6, 4, generator=g).to(torch.bfloat16),
        "decoder.layers.self_attention.linear_proj.weight": torch.rand(2, 4, 6, generator=g),
        "decoder.final_layernorm.weight": torch.rand(4, generator=g),
    }


def save(rank, folder):
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    dist.init_process_group("gloo", init_method=f"file://{folder}.meeting", rank=rank, world_size=2)
    words, proj, norm = tensors().items()
    # vocabulary and columns by tensor parallelism, layers stacked along an axis of their own
    state = {
        "words": ShardedTensor.from_rank_offsets(
            words[0], words[1].chunk(2)[rank].contiguous(), (0, rank, 2)
        ),
        "norm": ShardedTensor.from_rank_offsets(norm[0], norm[1], replica_id=rank),
        "state": ShardedObject(
            "decoder.layers.self_attention.core_attention._extra_state",
            None, (1,), (0,), replica_id=rank,
        ),
        "iteration": 5,
    }  # fmt: skip
    for layer in range(2):
        state[f"proj.{layer}"] = ShardedTensor.from_rank_offsets(
            proj[0],
            proj[1][layer].chunk(2, dim=1)[rank].contiguous(),
            (0, layer, 2),
            (2, rank, 2),
            prepend_axis_num=1,
        )
    dist_checkpointing.save(state, str(folder))
    dist.barrier()


def main(folder):
    folder.mkdir()
    mp.spawn(save, (folder,), nprocs=2)
    Path(f"{folder}.meeting").unlink(missing_ok=True)
    hold = {key: value.float().tolist() for key, value in tensors().items()}
    (folder.parent / f"{folder.name}.json").write_text(json.dumps(hold))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
