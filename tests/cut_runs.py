"""Writes runs of a small model in Megatron's legacy format, cut for any grid: which layers each
stage has is said by the test, not computed.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"
WEIGHTS = "model_optim_rng.pt"
HIDDEN, FFN, VOCAB = 4, 8, 16
# of each stage the layers of its virtual stages
Stages = Sequence[Sequence[Sequence[int]]]


def whole_model(layers: int, experts: int = 0, tied: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of the whole model, no two alike."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    for n in range(layers):
        layer = f"decoder.layers.{n}"
        shapes[f"{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{layer}.self_attention.linear_qkv.weight"] = (2 * HIDDEN, HIDDEN)
        if not experts:
            shapes[f"{layer}.mlp.linear_fc1.weight"] = (FFN, HIDDEN)
            continue
        shapes[f"{layer}.mlp.router.weight"] = (experts, HIDDEN)
        for e in range(experts):
            shapes[f"{layer}.mlp.experts.local_experts.{e}.linear_fc1.weight"] = (FFN, HIDDEN)
    shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
    if not tied:
        shapes["output_layer.weight"] = (VOCAB, HIDDEN)
    made, at = {}, 0
    for key, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[key] = torch.arange(at, at + count, dtype=torch.float32).reshape(shape)
        at += count
    return made


def is_cut(key: str) -> bool:
    """Whether tensor-parallel ranks have a part of it each: rows, in this model."""
    return "norm" not in key and "router" not in key


def arguments(**changed: Any) -> dict[str, Any]:
    """What the training script would have saved."""
    return {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "num_experts": None,
        "untie_embeddings_and_output_weights": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "seed": 1234,
        **changed,
    }


def part_name(tensor: int, stage: int | None = None, group: int | None = None) -> str:
    return "_".join(
        [
            f"mp_rank_{tensor:02}",
            *(f"{number:03}" for number in (stage, group) if number is not None),
        ]
    )


def write_run(
    run: Path,
    model: Mapping[str, torch.Tensor],
    stages: Stages = (((0, 1, 2, 3),),),
    *,
    tp: int = 1,
    ep: int = 1,
    args: Mapping[str, Any] | None = None,
    change: Callable[[str, dict[str, Any]], None] = lambda name, root: None,
    iteration: int = 10,
) -> Path:
    """The folder of the iteration. `args` are changes to what the grid says, or None for files
    without; `change` may alter the root of each part, which is given by name.
    """
    folder = run / f"iter_{iteration:07}"
    virtual = len(stages[0])
    experts = 1 + max((int(k.split(".")[6]) for k in model if ".local_experts." in k), default=-1)
    for r in range(tp):
        for p, of_stage in enumerate(stages):
            for g in range(ep):
                name = part_name(r, p if len(stages) > 1 else None, g if ep > 1 else None)
                root: dict[str, Any] = {}
                if args is not None:
                    said = arguments(
                        num_layers=1 + max(n for s in stages for v in s for n in v),
                        num_experts=experts or None,
                        untie_embeddings_and_output_weights="output_layer.weight" in model,
                        tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=len(stages),
                        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
                        expert_model_parallel_size=ep,
                    )
                    root["args"] = Namespace(**{**said, **args})
                    root["args"].rank = (p * ep + g) * tp + r
                root |= {"checkpoint_version": 3.0, "iteration": iteration}
                for v, layers in enumerate(of_stage):
                    first, last = (p, v) == (0, 0), (p, v) == (len(stages) - 1, virtual - 1)
                    cut = _cut(model, layers, first, last, (r, tp), (g, ep, experts))
                    root[f"model{v}" if virtual > 1 else "model"] = cut
                change(name, root)
                (folder / name).mkdir(parents=True)
                torch.save(root, folder / name / WEIGHTS)
    (run / TRACKER).write_text(str(iteration))
    return folder


def _cut(
    model: Mapping[str, torch.Tensor],
    layers: Sequence[int],
    first: bool,
    last: bool,
    rank: tuple[int, int],
    group: tuple[int, int, int],
) -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict()
    r, tp = rank
    g, ep, experts = group
    tied = "output_layer.weight" not in model

    def put(key: str, tensor: torch.Tensor) -> None:
        rows = tensor.shape[0] // tp
        found[key] = tensor[r * rows : (r + 1) * rows].clone() if is_cut(key) else tensor.clone()

    for key, tensor in model.items():
        words = key.split(".")
        if words[1] == "layers":
            if int(words[2]) not in layers:
                continue
            words[2] = str(layers.index(int(words[2])))
            if ".local_experts." in key:
                e = int(words[6])
                if e // (experts // ep) != g:
                    continue
                words[6] = str(e % (experts // ep))
            put(".".join(words), tensor)
            if words[-2].startswith("linear_"):
                found[".".join((*words[:-1], "_extra_state"))] = None
        elif first if key.startswith("embedding") else last:
            put(key, tensor)
    if last and tied and not first:
        put("output_layer.weight", model["embedding.word_embeddings.weight"])
    return found


def expected(model: Mapping[str, torch.Tensor], tp: int) -> dict[str, torch.Tensor]:
    """What is read of a run, whatever its stages and expert groups were."""
    made = {}
    for key, tensor in model.items():
        for r in range(tp):
            rows = tensor.shape[0] // tp
            name = key if tp == 1 else f"{key}@{r}"
            made[name] = tensor[r * rows : (r + 1) * rows] if is_cut(key) else tensor
    return made
