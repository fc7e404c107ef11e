"""Cases for `ranks`, and tensors: what torchao 0.18 itself quantizes, cuts and lets torch save.

Of its classes Int8Tensor and Int4Tensor know no `view`, and no DTensor can be made of them; none
knows `new_empty`, and so `dcp.async_save` saves none of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import migrate

# torchao cuts swizzled scales at borders of their tiles alone
SHAPE = (256, 384)
MADE = (
    "float8-tensor", "float8-row", "float8-block", "int8-tensor", "int8-row", "int4", "mxfp8",
    "mxfp8-swizzled", "mxfp4", "mxfp4-swizzled", "nvfp4", "nvfp4-swizzled",
)  # fmt: skip
SAVED_BY_RANKS = ("float8-tensor", "float8-row", "mxfp8", "mxfp4", "nvfp4")


def tensor(name: str) -> Any:
    """The same numbers in every process, quantized by torchao; of Int4Tensor, whose kernels need a
    GPU, parts that were drawn.
    """
    generator = torch.Generator().manual_seed(len(name))
    dense = torch.randn(SHAPE, generator=generator).bfloat16()
    cls, _, how = name.partition("-")
    if cls in ("float8", "int8"):
        import torchao.quantization as ao
        from torchao.quantization.granularity import PerBlock, PerRow, PerTensor

        by: Any = {"tensor": PerTensor(), "row": PerRow(), "block": PerBlock([128, 64])}[how]
        made = ao.Float8Tensor if cls == "float8" else ao.Int8Tensor
        return made.from_hp(dense, granularity=by)
    if cls == "int4":
        from torchao.quantization import Int4Tensor

        (m, k), each = SHAPE, (SHAPE[1] // 32, SHAPE[0])
        packed = torch.randint(-128, 128, (m, k // 2), generator=generator, dtype=torch.int8)
        scale, zero = (torch.randn(each, generator=generator).bfloat16() for _ in range(2))
        return Int4Tensor(packed, scale, zero, [1, 32], torch.Size(SHAPE))
    if cls == "nvfp4":
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

        return NVFP4Tensor.to_nvfp4(
            dense, per_tensor_scale=torch.tensor(0.5), is_swizzled_scales=how == "swizzled"
        )
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    number = torch.float8_e4m3fn if cls == "mxfp8" else torch.float4_e2m1fn_x2
    return MXTensor.to_mx(dense, number, 32, is_swizzled_scales=how == "swizzled")


def components(whole: Any) -> dict[str, torch.Tensor]:
    """The tensors that an object is made of."""
    return {key: one for key, one in vars(whole).items() if isinstance(one, torch.Tensor)}


def saves(rank: int, folder: str) -> None:
    """Each tensor that torch can save so, dealt out by rows as torch deals them out."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    step = -(-SHAPE[0] // world)
    state = {}
    for name in SAVED_BY_RANKS:
        local = tensor(name)[rank * step : min((rank + 1) * step, SHAPE[0])]
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1)
        )
    dcp.save({"model": state}, checkpoint_id=folder)


def loads(rank: int, source: str) -> None:
    """Parts of torchao's own classes take their bytes from a file, by each way of loading."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    step = -(-SHAPE[0] // world)
    for name in SAVED_BY_RANKS:
        for way in ("load", "reader", "meta"):
            local = tensor(name)[rank * step : min((rank + 1) * step, SHAPE[0])]
            due = {key: bits(one) for key, one in components(local).items()}
            for one in components(local).values():
                one.copy_(torch.full(one.shape, 8.0).to(one.dtype))
            assert any(bits(one) != due[key] for key, one in components(local).items())
            made = DTensor.from_local(
                local.to("meta") if way == "meta" else local,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size(SHAPE),
                stride=(SHAPE[1], 1),
            )
            module = torch.nn.Module()
            module.register_parameter(name, torch.nn.Parameter(made, requires_grad=False))
            before = getattr(module, name)
            if way == "reader":
                state = {"model": {name: before}}
                dcp.load(state, storage_reader=migrate.dcp.MigratingReader(source))
            else:
                report = migrate.load(module, source, at="model", strict=False)
                assert report.left_on_meta == ()
            after = getattr(module, name)
            assert way == "meta" or after is before
            assert type(after._local_tensor) is type(local)
            held = components(after._local_tensor)
            assert {key: bits(one) for key, one in held.items()} == due, (name, way)


def bits(one: torch.Tensor) -> list[int]:
    found: list[int] = one.contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def shards(rank: int) -> None:
    """`fully_shard` takes none of torchao's classes: they have no `split`, or no `new_zeros`."""
    for name in MADE:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(tensor(name), requires_grad=False)
        try:
            fully_shard(module)
        except (NotImplementedError, AssertionError):
            continue
        raise AssertionError(f"{name} is taken: say so in docs/distributed.md, and load it")
