"""Cases for `ranks`: the Python code of Transformer Engine itself, whose compiled parts are stubs,
so that its tensors are made and saved and none is computed with.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from types import ModuleType
from typing import Any

import quantized_classes as classes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from quantized_ranks import KINDS, part_of, piece, spread, tensors, whole, wrapped, write
from quantized_streams import FUNCTIONS, QUANTIZERS, TE
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard

import migrate

# those whose reconstructors take what those of 2.18 took
SAVED = ("te-float8", "te-mxfp8", "te-mxfp8-rowwise", "te-block-2d", "te-block-1d", "te-nvfp4-2d")


class DType(enum.IntEnum):
    """The compiled enum."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class Numbers(type):
    """A compiled class whose members are all 0."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class Compiled(ModuleType):
    """The compiled module: whatever is asked for is a class."""

    DType = DType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Numbers(name, (), {}))
        return getattr(self, name)


def prepare(folder: str) -> None:
    """Makes the modules of tensors importable from the unpacked wheel, for good."""
    sys.modules["transformer_engine_torch"] = Compiled("transformer_engine_torch")
    packages = {"transformer_engine": {}, TE: {}}
    packages["transformer_engine.common"] = {"decode_cudnn_version": lambda _: (9, 12, 0)}
    packages[f"{TE}.tensor"] = {}
    for name, members in packages.items():
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        vars(module).update(members)
    debug = ModuleType("transformer_engine.debug.pytorch.debug_quantization")
    debug.DebugQuantizedTensor = type("DebugQuantizedTensor", (), {})
    sys.modules[debug.__name__] = debug
    importlib.import_module(f"{TE}.tensor.storage")
    for short in ("float8_tensor", *QUANTIZERS):
        importlib.import_module(f"{TE}.tensor.{short}")

    # where a quantizer of NVFP4 makes a matrix
    torch.cuda.current_device = lambda: "cpu"


def quantizer(kind: str) -> Any:
    """The genuine quantizer of a kind, or None."""
    cls = KINDS[kind].cls
    short = FUNCTIONS[cls][0]
    if short not in QUANTIZERS:
        return None
    module = sys.modules[f"{TE}.tensor.{short}"]
    number = sys.modules[f"{TE}.constants"].DType(10 if cls == "NVFP4Tensor" else 7)
    usage = {"rowwise": True, "columnwise": "_columnwise_data" in KINDS[kind].parts}
    made = getattr(module, QUANTIZERS[short])
    if cls == "Float8BlockwiseQTensor":
        return made(number, **usage, block_scaling_dim=2 if kind.endswith("2d") else 1)
    return made(number, **usage)


def genuine(kind: str, stand_in: classes.OfEngine) -> Any:
    """The genuine tensor with the components of a stand-in."""
    module = sys.modules[f"{TE}.tensor.{FUNCTIONS[KINDS[kind].cls][0]}"]
    number = getattr(stand_in, stand_in.CODE)
    others = {id(number): sys.modules[f"{TE}.constants"].DType(number.value)}
    if stand_in._quantizer is not None:
        others[id(stand_in._quantizer)] = quantizer(kind)
    arguments = [others.get(id(one), one) for one in stand_in.arguments()]
    return getattr(module, FUNCTIONS[KINDS[kind].cls][1])(*arguments)


def saves(rank: int, folder: str, wheel: str) -> None:
    """`quantized_ranks.saves` with genuine tensors; their quantizers have the same shapes of scales
    as the reference.
    """
    prepare(wheel)
    world, model = dist.get_world_size(), {}
    for kind in SAVED:
        with classes.installed():
            found = part_of(kind, rank, world)
            assert found is not None
            held = found[1]
            assert isinstance(held, classes.OfEngine)
        made = genuine(kind, held)
        assert type(made).__module__ == f"{TE}.tensor.{FUNCTIONS[KINDS[kind].cls][0]}"
        assert type(made) is not type(held)
        has_shapes(kind, made)
        model[kind] = spread(kind, rank, "rows", made)
    write({"model": model}, folder, "save")


# shards of the other classes are plain tensors: only these cut themselves into rows
SHARDED = ("te-float8", "te-float8-transposed", "te-mxfp8")
# FSDP2 asks for rows whose scales need no padding
KINDS_SHARDED = {"te-mxfp8": (512, 256)}


def loads(rank: int, folder: str, wheel: str) -> None:
    """Shards that `fully_shard` itself makes of genuine parameters take their bytes by each way."""
    prepare(wheel)
    for kind, shape in KINDS_SHARDED.items():
        KINDS[kind] = dataclasses.replace(KINDS[kind], shape=shape)
    for kind in SHARDED:
        (rows, columns), world = KINDS[kind].shape, dist.get_world_size()
        step = -(-rows // world)
        box = ((rank * step, min(rows, (rank + 1) * step)), (0, columns))
        due = tensors(kind, piece(kind, box, zeros=True))
        for way in ("load", "reader", "meta"):
            with classes.installed():
                other = wrapped(kind, KINDS[kind].shape, whole(kind, seed=1))
                assert isinstance(other, classes.OfEngine)
            made = genuine(kind, other)
            if kind == "te-mxfp8":
                # FSDP2 flattens what it gathers, which this class does by a kernel
                type(made).dequantize = plain
            module = torch.nn.Module()
            module.register_parameter(kind, torch.nn.Parameter(made, requires_grad=False))
            module = module.to("meta") if way == "meta" else module
            fully_shard(module)
            (before,) = module.parameters()
            assert type(before._local_tensor) is type(made)
            source = f"{folder}/{kind}.pt"
            if way == "reader":
                state = {"model": get_model_state_dict(module)}
                dcp.load(state, storage_reader=migrate.dcp.MigratingReader(source))
            else:
                report = migrate.load(module, source, at="model")
                assert report.left_on_meta == ()
            (after,) = module.parameters()
            assert way == "meta" or after is before
            local = after._local_tensor
            assert type(local) is type(made)
            for name, one in due.items():
                held = getattr(local, name)
                assert torch.equal(held.view(torch.uint8), one.view(torch.uint8)), (kind, way, name)


def plain(one: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(one.shape, dtype=one.dtype, device=one.device)


def has_shapes(kind: str, made: Any) -> None:
    """Asserts that scales have the shapes that the genuine quantizer gives them."""
    own = quantizer(kind)
    if own is None:
        return
    for name, columnwise in (("_rowwise_scale_inv", False), ("_columnwise_scale_inv", True)):
        held = getattr(made, name)
        if held is not None:
            assert tuple(own.get_scale_shape(tuple(made.shape), columnwise)) == tuple(held.shape)
