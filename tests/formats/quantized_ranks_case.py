"""A case for `ranks`: quantized tensors of which each rank saves its shard by stock torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_shards import CLASSES, draw, shard
from quantized_streams import Made, stand_ins
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

SHAPE = (512, 256)


class Quantized(torch.Tensor):
    """A wrapper without memory of its own, which pickles as Transformer Engine's classes do."""

    made: Made

    @staticmethod
    def wrap(made: Made, shape: tuple[int, ...]) -> Quantized:
        found: Quantized = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Quantized, shape, dtype=torch.bfloat16
        )
        found.made = made
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.made.__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        name = function.__name__.partition(".")[0]
        if name in ("detach", "clone", "alias", "view", "_to_copy"):
            return cls.wrap(arguments[0].made, tuple(arguments[0].shape))
        if name == "is_pinned":
            return False
        raise NotImplementedError(str(function))


def save(rank: int, folder: str, *names: str) -> None:
    """Saves a tensor of each of these classes, cut by rows."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    each = SHAPE[0] // world
    box = (rank * each, 0), (each, SHAPE[1])
    state: dict[str, Any] = {"b": torch.ones(2)}
    with stand_ins() as modules:
        for name in names:
            cls = CLASSES[name]
            made = cls.object(modules, shard(cls, draw(cls, *SHAPE), box), box[1])
            state[name] = DTensor.from_local(
                Quantized.wrap(made, box[1]), mesh, [Shard(0)], run_check=False
            )
        dcp.save({"model": state}, checkpoint_id=folder)
