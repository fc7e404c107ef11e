"""Checkpoints as people save them, written by torch itself: twenty kinds, each a function that
writes one and answers with its path.
"""

from __future__ import annotations

import collections
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Write = Callable[[Path], Path]
KINDS: dict[str, Write] = {}


def kind(write: Write) -> Write:
    KINDS[write.__name__] = write
    return write


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, 3))


def trained(
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = net()
    made = optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(made, step_size=2)
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        made.step()
        scheduler.step()
    return model, made, scheduler


def saved(value: Any, path: Path, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@kind
def state_dict_of_a_module(folder: Path) -> Path:
    return saved(net().state_dict(), folder / "model.pt")


@kind
def plain_dict(folder: Path) -> Path:
    return saved({"b": torch.arange(6).reshape(2, 3), "a": torch.ones(3)}, folder / "model.pth")


@kind
def training_with_adam(folder: Path) -> Path:
    model, optimizer, scheduler = trained(lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True))
    states = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
    }
    return saved(
        {
            **states,
            "loss": float("inf"),
            "args": {"lr": 1e-3, "name": "größe", "betas": (0.9, 0.999)},
        },
        folder / "checkpoint.pt",
    )


@kind
def training_with_momentum(folder: Path) -> Path:
    model, optimizer, scheduler = trained(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
    )
    held = {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": scheduler.state_dict(),
    }
    return saved(
        {**held, "rng": torch.get_rng_state(), "step": 12_345_678_901}, folder / "checkpoint.pt"
    )


@kind
def lightning(folder: Path) -> Path:
    model, optimizer, scheduler = trained(torch.optim.AdamW)
    state = collections.OrderedDict(
        (f"net.{key}", value) for key, value in model.state_dict().items()
    )
    return saved(
        {
            "epoch": 2,
            "global_step": 9,
            "pytorch-lightning_version": "2.4.0",
            "state_dict": state,
            "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 2, "started": 2}}}},
            "callbacks": {
                "ModelCheckpoint{'monitor': None}": {
                    "best_model_score": torch.tensor(0.5),
                    "best": {},
                    "dirpath": None,
                }
            },
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [scheduler.state_dict()],
            "hparams_name": "kwargs",
            "hyper_parameters": {"hidden": 7, "layers": [1, 2]},
        },
        folder / "last.ckpt",
    )


@kind
def huggingface_shards(folder: Path) -> Path:
    state = {
        f"model.layers.{i}.weight": torch.full((3, 4), float(i), dtype=torch.bfloat16)
        for i in range(4)
    }
    names = list(state)
    shards = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[2 * i : 2 * i + 2] for i in range(2)}
    for name, keys in shards.items():
        saved({key: state[key] for key in keys}, folder / name)
    index = {
        "metadata": {"total_size": 96},
        "weight_map": {key: name for name, keys in shards.items() for key in keys},
    }
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    saved({"lr": 0.1}, folder / "training_args.bin")
    return folder


@kind
def huggingface_bin(folder: Path) -> Path:
    saved(net().state_dict(), folder / "pytorch_model.bin")
    saved({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    return folder


@kind
def meta_ranks(folder: Path) -> Path:
    for rank in range(2):
        part = {
            "layers.0.wq.weight": torch.full((4, 6), float(rank)),
            "norm.weight": torch.ones(6),
            "rope.freqs": torch.arange(3.0),
        }
        saved(part, folder / f"consolidated.0{rank}.pth")
    (folder / "params.json").write_text('{"dim": 6}')
    return folder


@kind
def megatron_ranks(folder: Path) -> Path:
    for rank in range(2):
        (folder / f"mp_rank_0{rank}").mkdir()
        state = {
            "decoder.final.weight": torch.ones(4),
            "decoder.linear.weight": torch.full((2, 4), 1.0 + rank),
        }
        held = {
            "model": state,
            "iteration": 10,
            "checkpoint_version": 3.0,
            "rng_state": [{"torch": torch.arange(8)}],
        }
        saved(held, folder / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    return folder


@kind
def legacy(folder: Path) -> Path:
    model, optimizer, _ = trained(torch.optim.Adam)
    held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    return saved(held, folder / "old.pt", _use_new_zipfile_serialization=False)


@kind
def strided(folder: Path) -> Path:
    base = torch.arange(60.0).reshape(3, 4, 5)
    held = {
        "t": base.permute(2, 0, 1),
        "s": base[:, 1::2, ::3],
        "e": torch.arange(4).expand(3, 4),
        "c": base[1].clone().t(),
        "whole": base,
    }
    return saved(held, folder / "model.pt")


@kind
def scalars_and_empties(folder: Path) -> Path:
    held = {
        "zero": torch.tensor(3.5),
        "none": torch.empty(0),
        "wide": torch.empty(3, 0, 2, dtype=torch.int8),
        "flag": torch.tensor(True),
    }
    return saved({**held, "one": torch.ones(1, 1)}, folder / "model.pt")


@kind
def parameters(folder: Path) -> Path:
    held = {
        "w": nn.Parameter(torch.ones(2, 3)),
        "frozen": nn.Parameter(torch.zeros(2), requires_grad=False),
        "b": nn.Buffer(torch.ones(2)),
    }
    leaf = torch.ones(3, requires_grad=True)
    return saved({**held, "leaf": leaf}, folder / "model.pt")


@kind
def tied(folder: Path) -> Path:
    weight = torch.arange(12.0).reshape(3, 4)
    return saved(
        collections.OrderedDict(
            {"embed.weight": weight, "other": weight[1:], "lm_head.weight": weight}
        ),
        folder / "model.pt",
    )


@kind
def tied_to_the_average(folder: Path) -> Path:
    model = net().state_dict()
    return saved(
        {"model": model, "ema": {"shadow": [*model.values()][:2], "decay": 0.999}, "best": model},
        folder / "model.pt",
    )


@kind
def many_dtypes(folder: Path) -> Path:
    names = [
        "float16",
        "bfloat16",
        "float64",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "complex64",
        "uint16",
        "uint32",
        "uint64",
    ]
    names += [
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    raw = torch.arange(64, dtype=torch.uint8) % 2
    held: dict[str, Any] = {name: raw.clone().view(getattr(torch, name)) for name in names}
    return saved(
        {
            **held,
            "float4": torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2),
        },
        folder / "model.pt",
    )


@kind
def protocol_five(folder: Path) -> Path:
    return saved(
        {"model": net().state_dict(), "blob": b"\x00\xff", "names": {"a", "b"}, "big": 1 << 100},
        folder / "model.pt",
        pickle_protocol=5,
    )


@kind
def odd_values(folder: Path) -> Path:
    held = {
        "weights": {"w": torch.ones(2)}, "counter": collections.Counter(a=2),
        "nested": {1: {2: [None, True, -0.0, 1e300, "x" * 300]}},
        "dtype": torch.float32, "device": torch.device("cuda:3"), "size": torch.Size([1, 2]),
        "bytes": bytearray(b"xyz"), "complex": 1 + 2j,
        ("a", 1): (1, (2, ())), "nan": float("nan"), "set": {1, 2},
        "text": "zeile\n\ud7ff\U0001f600", "shared": [[1], [1]],
    }  # fmt: skip
    held["shared"][1] = held["shared"][0]  # type: ignore[index]
    return saved(held, folder / "model.pt")


@kind
def list_of_tensors(folder: Path) -> Path:
    return saved([torch.ones(2), {"x": [torch.zeros(3), 5]}], folder / "list.pt")


@kind
def bare_tensor(folder: Path) -> Path:
    return saved(torch.arange(5), folder / "tensor.pt")


@kind
def extra_state(folder: Path) -> Path:
    """What modules with `get_extra_state` put beside the tensors of a state dict."""
    state = net().state_dict()
    state["0._extra_state"] = torch.frombuffer(bytearray(b"recipe"), dtype=torch.uint8)
    state["3._extra_state"] = {"amax": [1.0, 2.0], "version": 2}
    return saved(state, folder / "model.pt")


def loaded(path: Path) -> dict[str, Any]:
    """What torch makes of each file of a checkpoint, by the rank or the whole; shards are one
    dict.
    """
    if path.is_file():
        return {"": torch.load(path, weights_only=True)}
    ranks = sorted([*path.glob("consolidated.*.pth"), *path.rglob("mp_rank_*/*.p*t*")])
    if ranks:
        return {
            str(number): torch.load(file, weights_only=True) for number, file in enumerate(ranks)
        }
    out: dict[str, Any] = {}
    for file in sorted(path.glob("pytorch_model*.bin")):
        out.update(torch.load(file, weights_only=True))
    return {"": out}


def buffer(value: Any) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(value, out)
    return out
