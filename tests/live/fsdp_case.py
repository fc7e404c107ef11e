"""A case for `ranks`: a model with FSDP2, of which each rank loads its part of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import migrate
from migrate.core.errors import MigrateError


class Block(nn.Module):
    """7 rows for two processes: the parts are not equal."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x)) * self.scale.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b[1](self.head(self.b[0](x)))


def sharded(device: str) -> Model:
    with torch.device(device):
        model = Model()
    for block in model.b:
        fully_shard(block)
    fully_shard(model)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: one.full_tensor() if isinstance(one, DTensor) else one
        for key, one in model.state_dict().items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def refused(call: object, *arguments: object) -> str:
    try:
        call(*arguments)  # type: ignore[operator]
    except MigrateError as error:
        return str(error)
    return ""


def written(folder: Path) -> None:
    """A checkpoint for the model in an older layout."""
    generator = torch.Generator().manual_seed(0)
    made = {
        key: torch.randn(one.shape, generator=generator)
        for key, one in Model().state_dict().items()
    }
    save_file(
        {
            key.replace("b.", "blocks.", 1) if key.startswith("b.") else key: one
            for key, one in made.items()
        },
        folder / "old.safetensors",
    )


def loads_its_part(rank: int, place: str) -> None:
    """`place` holds what `written` wrote, and a rule.yaml."""
    folder = Path(place)
    old, rule = load_file(folder / "old.safetensors"), folder / "rule.yaml"
    new = {key.replace("blocks.", "b."): one for key, one in old.items()}
    reference = Model()
    reference.load_state_dict(new)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    for device in ("cpu", "meta"):
        for source in (folder / "old.safetensors", old):
            model, seen = sharded(device), []
            answer = migrate.load(
                model,
                source,
                rules=rule,
                progress=lambda done, total, seen=seen: seen.append((done, total)),
            )
            assert all(isinstance(one, DTensor) for one in model.parameters())
            assert same(whole(model), new)
            held = sum(one.to_local().nbytes for one in model.parameters()) + sum(
                one.nbytes for one in model.buffers()
            )
            assert answer["bytes_written"] == held
            assert seen[-1][0] == seen[-1][1]
            assert torch.equal(model(x), reference(x))
            # after a forward the root's parameters are still whole
            assert not isinstance(model.head.weight, DTensor)
            migrate.load(model, {key: one + 1 for key, one in old.items()}, rules=rule)
            assert same(whole(model), {key: one + 1 for key, one in new.items()})
            model(x)
            handle = migrate.attach(model, rules=rule)
            model.load_state_dict(old)
            handle.remove()
            assert same(whole(model), new)
    other = sharded("meta")
    migrate.convert_module(model, other)
    assert same(whole(other), new)
    assert "other processes hold parts" in refused(migrate.convert_module, model, Model())
    assert "other processes hold parts" in refused(
        migrate.save, model, folder / "refused.safetensors"
    )
    state = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        migrate.downgrade(state, folder / "back.safetensors", rules=rule)
        assert same(load_file(folder / "back.safetensors"), old)
