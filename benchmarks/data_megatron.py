"""Runs in Megatron's legacy format on any grid, as its training script leaves them, for benchmarks
and tests; without megatron-core.

A tensor of the whole model is the same whatever grid it is cut for, so that two grids of one model
can be compared to the bit.
"""

from __future__ import annotations

import argparse
import enum
import json
import random
import sys
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ITERATION = 10
WEIGHTS = "model_optim_rng.pt"
# fields of `args` that say nothing of the model; with them it has 800, as real ones have
FIELDS = 800


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a GPT of SwiGLU, RMSNorm and RoPE; `experts` is 0 for a dense one."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    experts: int = 0

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Key, shape and how tensor-parallel ranks cut it: "" not at all, else the name of a way
        in `_piece`.
        """
        yield "embedding.word_embeddings.weight", (self.vocab, self.hidden), "rows"
        for n in range(self.layers):
            yield from self.layer(n)
        yield "decoder.final_layernorm.weight", (self.hidden,), ""
        yield "output_layer.weight", (self.vocab, self.hidden), "rows"

    def layer(self, n: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """The same of one layer."""
        at, qkv = f"decoder.layers.{n}.", (self.heads + 2 * self.groups) * self.head
        yield f"{at}input_layernorm.weight", (self.hidden,), ""
        yield f"{at}self_attention.linear_proj.weight", (self.hidden, self.hidden), "columns"
        yield f"{at}self_attention.linear_qkv.weight", (qkv, self.hidden), "rows"
        if self.experts:
            # with them, Qwen3-MoE's norms of heads
            for one in "qk":
                yield f"{at}self_attention.{one}_layernorm.weight", (self.head,), ""
        yield f"{at}pre_mlp_layernorm.weight", (self.hidden,), ""
        if self.experts:
            yield f"{at}mlp.router.weight", (self.experts, self.hidden), ""
        for e in range(self.experts or 1):
            there = f"{at}mlp.experts.local_experts.{e}." if self.experts else f"{at}mlp."
            yield f"{there}linear_fc1.weight", (2 * self.ffn, self.hidden), "halves"
            yield f"{there}linear_fc2.weight", (self.hidden, self.ffn), "columns"


# what `make` is asked for by name
MODELS = {
    "tiny": Model(layers=4, hidden=64, ffn=96, heads=8, groups=4, vocab=1024),
    "demo": Model(layers=4, hidden=1024, ffn=2816, heads=16, groups=8, vocab=8192),
    "1.2GB": Model(layers=12, hidden=2048, ffn=5632, heads=32, groups=8, vocab=16384),
    "2GB": Model(layers=20, hidden=2048, ffn=6144, heads=32, groups=8, vocab=32768),
    "4.4GB": Model(layers=22, hidden=3072, ffn=8192, heads=32, groups=8, vocab=32768),
}
# as many keys as a large model has, and hardly a byte in them
WIDE = Model(layers=64, hidden=8, ffn=16, heads=8, groups=8, vocab=1024, experts=128)


def whole(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the whole model: bfloat16 below 1 in magnitude, another for each key."""
    dice = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.rand(shape, generator=dice).sub_(0.5).to(torch.bfloat16)


def _piece(tensor: torch.Tensor, way: str, rank: int, tp: int) -> torch.Tensor:
    """What a tensor-parallel rank has of it."""
    if way == "rows":
        tensor = tensor.chunk(tp)[rank]
    elif way == "columns":
        tensor = tensor.chunk(tp, 1)[rank]
    elif way == "halves":
        tensor = torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.clone()


def arguments(model: Model, tp: int, pp: int, ep: int, rank: int, fields: int) -> Namespace:
    """The namespace of a training script, with as many fields."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    said: dict[str, Any] = {
        "num_layers": model.layers,
        "encoder_num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "attention_backend": AttnBackend.auto,
        "kv_channels": model.head,
        "group_query_attention": True,
        "num_query_groups": model.groups,
        "max_position_embeddings": 4096,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rotary_percent": 1.0,
        "use_rope_scaling": False,
        "make_vocab_size_divisible_by": 128,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "untie_embeddings_and_output_weights": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": bool(model.experts),
        "num_experts": model.experts or None,
        "moe_ffn_hidden_size": model.ffn if model.experts else None,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "moe_grouped_gemm": False,
        "multi_latent_attention": False,
        "mtp_num_layers": None,
        "transformer_impl": "local",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "model_type": ModelType.encoder_or_decoder,
        "params_dtype": torch.bfloat16,
        "padded_vocab_size": model.vocab,
        "vocab_size": None,
        "world_size": tp * pp * ep,
        "iteration": ITERATION,
        "rank": rank,
        "local_rank": rank % 8,
    }
    values = (None, True, False, 0, 1, 1.0, 0.0001, "cosine", ["data/text_document"])
    for number in range(fields - len(said)):
        said[f"other_option_{number}"] = values[number % len(values)]
    return Namespace(**said)


def random_states(rank: int) -> list[dict[str, Any]]:
    """What the training script keeps of its generators."""
    import numpy

    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    cuda = torch.tensor([rank % 256, *range(1, 16)], dtype=torch.uint8)
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": cuda,
            "rng_tracker_states": {"model-parallel-rng": cuda + 1},
        }
    ]


def enums() -> None:
    """Modules with the enums that args hold, where megatron-core is not installed."""
    try:
        import megatron.core.enums
        import megatron.core.transformer.enums  # noqa: F401
    except ImportError:
        pass
    else:
        return
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        sys.modules[name] = ModuleType(name)
    for name, called, members in (
        ("megatron.core.enums", "ModelType", ["encoder_or_decoder", "retro_encoder"]),
        (
            "megatron.core.transformer.enums",
            "AttnBackend",
            ["flash", "fused", "unfused", "local", "auto"],
        ),
    ):
        made = sys.modules[name] = ModuleType(name)
        listed = [(member, number) for number, member in enumerate(members, 1)]
        setattr(made, called, enum.Enum(called, listed, module=name))


def write_run(
    run: Path,
    model: Model,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    fields: int = FIELDS,
    random: bool = True,
) -> Path:
    """A run folder of this model and grid; returns it. `random` is whether states of generators
    are among what the parts hold.
    """
    enums()
    per = model.layers // pp
    group = model.experts // ep
    folder = run / f"iter_{ITERATION:07d}"
    ends = {key: (shape, way) for key, shape, way in model.shapes() if ".layers." not in key}
    for stage in range(pp):
        # a stage at a time, so that no more of the model is in memory
        held: list[tuple[str, torch.Tensor, str, int | None]] = []
        for key, (shape, way) in ends.items():
            if (stage == 0) if key.startswith("embedding") else (stage == pp - 1):
                held.append((key, whole(key, shape), way, None))
        for n in range(per):
            there = f"decoder.layers.{n}."
            for key, shape, way in model.layer(stage * per + n):
                name = there + key.split(".", 3)[3]
                owner = None
                if ".local_experts." in key:
                    before, _, behind = name.partition("local_experts.")
                    number, _, leaf = behind.partition(".")
                    owner = int(number) // group
                    name = f"{before}local_experts.{int(number) % group}.{leaf}"
                held.append((name, whole(key, shape), way, owner))
        held.sort(key=lambda one: not one[0].startswith("embedding"))
        for rank in range(tp):
            cut = [(name, _piece(t, way, rank, tp), owner) for name, t, way, owner in held]
            for g in range(ep):
                tensors: OrderedDict[str, Any] = OrderedDict()
                for name, tensor, owner in cut:
                    if owner in (None, g):
                        tensors[name] = tensor
                        if "linear" in name or name.startswith("output"):
                            tensors[name.removesuffix("weight") + "_extra_state"] = None
                number = (stage * ep + g) * tp + rank
                root: dict[str, Any] = {
                    "args": arguments(model, tp, pp, ep, number, fields),
                    "checkpoint_version": 3.0,
                    "iteration": ITERATION,
                    "model": tensors,
                }
                if random:
                    root["rng_state"] = random_states(number)
                root["num_floating_point_operations_so_far"] = 123456789
                called = f"mp_rank_{rank:02}"
                called += f"_{stage:03}" if pp > 1 else ""
                called += f"_{g:03}" if ep > 1 else ""
                (folder / called).mkdir(parents=True)
                torch.save(root, folder / called / WEIGHTS)
    (run / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return run


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("run", type=Path)
    asked.add_argument("model", help="a name, or the sizes as JSON")
    for axis in ("tp", "pp", "ep"):
        asked.add_argument(f"--{axis}", type=int, default=1)
    asked.add_argument("--fields", type=int, default=FIELDS)
    said = asked.parse_args()
    torch.set_num_threads(1)
    known = {**MODELS, "wide": WIDE}
    model = known.get(said.model) or Model(**json.loads(said.model))
    write_run(said.run, model, tp=said.tp, pp=said.pp, ep=said.ep, fields=said.fields)


if __name__ == "__main__":
    main()
