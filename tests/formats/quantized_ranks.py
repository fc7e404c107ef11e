"""Quantized tensors of which each rank holds a part, saved by stock torch.distributed.checkpoint;
and in plain numpy what they are as one tensor.

Each kind of tensor lists its components as the libraries store them: how many rows and columns of
the tensor an element stands for, whether the component lies transposed, to which multiples it is
padded, and whether it is swizzled for a GEMM. The whole has zeros where padding is, a part whatever
was in memory. Sources: `get_scale_shape` and `get_columnwise_shape` of Transformer Engine's
quantizers, `gemm_swizzled_scale_idx` of its swizzle.cuh, `__tensor_flatten__` of torchao 0.18.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any

import numpy as np
import quantized_classes as classes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import migrate

Box = tuple[tuple[int, int], ...]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Part:
    """One component: rows and columns of the tensor for an element, None for all of them. With
    `shape` it is one for the whole tensor and every part of it.
    """

    dtype: str
    rows: int | None = 1
    columns: int | None = 1
    turned: bool = False
    padded: tuple[int, int] = (1, 1)
    swizzled: bool = False
    # a quarter of the rows, and four times the columns
    folded: bool = False
    shape: tuple[int, ...] | None = None
    # for so many rows the elements are equal
    repeated: int = 1


@dataclass(frozen=True)
class Kind:
    """A class in one of its forms: `parts` by attribute, and a border between ranks at a multiple
    of `unit` rows.
    """

    cls: str
    parts: Mapping[str, Part]
    unit: int
    shape: tuple[int, ...]
    # between the columns of two ranks
    across: int | None = None
    number: str = "e4m3"
    release: tuple[int, int] = (2, 18)
    options: Mapping[str, Any] | None = None

    def options_of(self) -> dict[str, Any]:
        return dict(self.options or {})


BYTE, F32 = "uint8", "float32"
_CODES = {"_rowwise_data": Part(BYTE), "_columnwise_data": Part(BYTE)}
_TURNED = {"_rowwise_data": Part(BYTE), "_columnwise_data": Part(BYTE, turned=True)}


def _mxfp8(swizzled: bool = False) -> dict[str, Part]:
    rowwise = Part(BYTE, 1, 32, padded=(128, 4), swizzled=swizzled)
    columnwise = Part(BYTE, 32, 1, padded=(4, 128), swizzled=swizzled)
    return {**_CODES, "_rowwise_scale_inv": rowwise, "_columnwise_scale_inv": columnwise}


_BLOCK_2D = {
    **_TURNED,
    "_rowwise_scale_inv": Part(F32, 128, 128, padded=(1, 4)),
    "_columnwise_scale_inv": Part(F32, 128, 128, turned=True, padded=(1, 4)),
}
_NVFP4 = {
    "_rowwise_data": Part(BYTE, 1, 2),
    "_rowwise_scale_inv": Part(BYTE, 1, 16, padded=(128, 4), repeated=16),
    "_columnwise_data": Part(BYTE, 2, 1, turned=True),
    "_columnwise_scale_inv": Part(BYTE, 16, 1, turned=True, padded=(128, 4)),
    "_amax_rowwise": Part(F32, shape=(1,)),
    "_amax_columnwise": Part(F32, shape=(1,)),
}
_FP8, _AO_FP8 = "float8_e4m3fn", Part("float8_e4m3fn")
KINDS: dict[str, Kind] = {
    "te-float8": Kind(
        "Float8Tensor",
        {"_data": Part(BYTE), "_scale_inv": Part(F32, shape=(1,))},
        1,
        (11, 6),
        across=1,
    ),
    "te-float8-transposed": Kind(
        "Float8Tensor",
        {
            "_data": Part(BYTE),
            "_transpose": Part(BYTE, turned=True),
            "_scale_inv": Part(F32, shape=(1,)),
        },
        1,
        (11, 6),
        across=1,
        number="e5m2",
        release=(2, 20),
    ),
    "te-mxfp8": Kind("MXFP8Tensor", _mxfp8(), 32, (384, 192), across=32),
    "te-mxfp8-rowwise": Kind(
        "MXFP8Tensor",
        {name: part for name, part in _mxfp8().items() if "row" in name},
        1,
        (11, 192),
        across=32,
    ),
    "te-mxfp8-swizzled": Kind("MXFP8Tensor", _mxfp8(swizzled=True), 32, (384, 192), across=32),
    "te-block-2d": Kind(
        "Float8BlockwiseQTensor",
        _BLOCK_2D,
        128,
        (1510, 300),
        options={"_is_2D_scaled": True},
    ),
    "te-block-2d-even": Kind(
        "Float8BlockwiseQTensor", _BLOCK_2D, 128, (1536, 130), options={"_is_2D_scaled": True}
    ),
    "te-block-1d": Kind(
        "Float8BlockwiseQTensor",
        {
            **_TURNED,
            "_rowwise_scale_inv": Part(F32, 1, 128, turned=True, padded=(1, 4)),
            "_columnwise_scale_inv": Part(F32, 128, 1, padded=(1, 4)),
        },
        128,
        (1536, 302),
        options={"_is_2D_scaled": False},
    ),
    "te-block-1d-gemm-ready": Kind(
        "Float8BlockwiseQTensor",
        {
            "_rowwise_data": Part(BYTE),
            "_rowwise_scale_inv": Part(F32, 1, 128, turned=True, padded=(1, 4)),
        },
        1,
        (11, 512),
        across=128,
        release=(2, 6),
        options={"_is_2D_scaled": False, "_data_format": 0},
    ),
    "te-block-1d-compact": Kind(
        "Float8BlockwiseQTensor",
        {"_rowwise_data": Part(BYTE), "_rowwise_scale_inv": Part(F32, 1, 128)},
        1,
        (11, 512),
        across=128,
        release=(2, 6),
        options={"_is_2D_scaled": False, "_data_format": 1},
    ),
    "te-nvfp4-2d": Kind("NVFP4Tensor", _NVFP4, 16, (192, 160), across=16, number="e2m1"),
    "te-nvfp4-rows": Kind(
        "NVFP4Tensor",
        {
            "_rowwise_data": Part(BYTE, 1, 2),
            "_rowwise_scale_inv": Part(BYTE, 1, 16, padded=(128, 4)),
            "_amax_rowwise": Part(F32, 1, None),
        },
        1,
        (11, 160),
        number="e2m1",
        options={"_row_scaled_nvfp4": True},
    ),
    "te-grouped": Kind("GroupedTensor", _mxfp8(), 1, (11, 64, 32)),
    "ao-float8-tensor": Kind(
        "torchao.Float8Tensor",
        {"qdata": _AO_FP8, "scale": Part(F32, shape=(1, 1))},
        1,
        (11, 6),
        options={"block_size": [None, None]},
    ),
    "ao-float8-row": Kind(
        "torchao.Float8Tensor",
        {"qdata": _AO_FP8, "scale": Part(F32, 1, None)},
        1,
        (11, 6),
        options={"block_size": [1, None]},
    ),
    "ao-float8-block": Kind(
        "torchao.Float8Tensor",
        {"qdata": _AO_FP8, "scale": Part(F32, 128, 128)},
        128,
        (1536, 256),
        across=128,
        options={"block_size": [128, 128]},
    ),
    "ao-mx": Kind(
        "torchao.MXTensor",
        {"qdata": _AO_FP8, "scale": Part("float8_e8m0fnu", 1, 32)},
        1,
        (11, 192),
        across=32,
    ),
    "ao-mx-fp4": Kind(
        "torchao.MXTensor",
        {"qdata": Part(BYTE, 1, 2), "scale": Part("float8_e8m0fnu", 1, 32)},
        1,
        (11, 192),
        across=32,
        options={"elem_dtype": torch.float4_e2m1fn_x2},
    ),
    "ao-nvfp4": Kind(
        "torchao.NVFP4Tensor",
        {
            "qdata": Part(BYTE, 1, 2),
            "scale": Part(_FP8, 1, 16),
            "per_tensor_scale": Part(F32, shape=()),
        },
        1,
        (11, 160),
        across=16,
    ),
    "ao-nvfp4-swizzled": Kind(
        "torchao.NVFP4Tensor",
        {
            "qdata": Part(BYTE, 1, 2),
            "scale": Part(_FP8, 1, 16, padded=(128, 4), swizzled=True, folded=True),
            "per_tensor_scale": Part(F32, shape=()),
        },
        1,
        (131, 160),
        across=16,
        options={"is_swizzled_scales": True},
    ),
    "ao-int8": Kind(
        "torchao.Int8Tensor",
        {"qdata": Part("int8"), "scale": Part(F32, 1, None), "zero_point": Part("int8", 1, None)},
        1,
        (11, 6),
    ),
    "ao-int4": Kind(
        "torchao.Int4Tensor",
        {
            "qdata": Part("int8", 1, 2),
            "scale": Part("bfloat16", 1, 32, turned=True),
            "zero_point": Part("bfloat16", 1, 32, turned=True),
        },
        1,
        (11, 192),
        across=32,
    ),
}
# rows of the ranks, in twelfths
_UNEVEN = {1: (12,), 2: (6, 6), 3: (5, 4, 3), 4: (3, 3, 3, 3)}
_ITEM = {"float32": 4, "bfloat16": 2}


def boxes(kind: Kind, world: int, cut: str = "rows") -> list[Box]:
    """What each of the ranks has: along the first axis, as torch deals rows out where nothing
    speaks against it; `columns`: the last axis in two; `members`: the rows of each member in two;
    `inside`: borders inside of blocks.
    """
    whole = [(0, n) for n in kind.shape]
    if cut == "members":
        first, rows, last = kind.shape
        return [((0, first), one, (0, last)) for one in ((0, rows // 2), (rows // 2, rows))]
    if cut == "columns":
        assert kind.across is not None
        ends = (0, kind.shape[-1] // 2, kind.shape[-1])
        return [(*whole[:-1], one) for one in itertools.pairwise(ends)]
    rows = kind.shape[0]
    if kind.unit == 1:
        step = -(-rows // world)
        ends = [min(n * step, rows) for n in range(world + 1)]
    else:
        shares = itertools.accumulate(_UNEVEN[world], initial=0)
        ends = [min(n * kind.unit * -(-rows // (12 * kind.unit)), rows) for n in shares]
    if cut == "inside":
        ends[1] += kind.unit // 2
    return [(one, *whole[1:]) for one in itertools.pairwise(ends)]


def _grid(part: Part, rows: int, columns: int) -> tuple[int, int]:
    return (
        1 if part.rows is None else -(-rows // part.rows),
        1 if part.columns is None else -(-columns // part.columns),
    )


def _elements(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements as their bytes: an axis more where they are of several. Numbers are finite."""
    if dtype in ("float32", "bfloat16"):
        made = np.exp2(rng.uniform(-6, 6, (*shape, 1))).astype("<f4")
        # a bfloat16 is the upper half of a float32
        return made.view(np.uint8)[..., 4 - _ITEM[dtype] :]
    return rng.integers(0, 256, (*shape, 1), dtype=np.uint8)


def _swizzle(laid: np.ndarray, columnwise: bool) -> np.ndarray:
    """The bytes of padded scales in tiles of 128 x 4, as a GEMM reads them; those of columns count
    from the other side.
    """
    lines = laid.swapaxes(0, 1) if columnwise else laid
    rows, columns = lines.shape[:2]
    out = np.zeros((rows * columns, *lines.shape[2:]), np.uint8)
    for i, j in itertools.product(range(rows), range(columns)):
        tile = i // 128 * (columns // 4) + j // 4
        out[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = lines[i, j]
    return out.reshape(laid.shape)


def _stored(
    part: Part, name: str, found: np.ndarray, rng: np.random.Generator | None
) -> np.ndarray:
    """Elements in their places as the component of a tensor; padding is zero, or drawn."""
    laid = found.swapaxes(0, 1) if part.turned else found
    rows, columns, size = laid.shape
    full = [-(-n // step) * step for n, step in zip((rows, columns), part.padded, strict=True)]
    shape = (*full, size)
    out = np.zeros(shape, np.uint8) if rng is None else rng.integers(1, 256, shape, dtype=np.uint8)
    out[:rows, :columns] = laid
    out = _swizzle(out, "column" in name) if part.swizzled else out
    return out.reshape(full[0] // 4, full[1] * 4, size) if part.folded else out


@functools.cache
def _drawn(kind: str, tensor: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """The elements of each component in their places: of members if the tensor has them."""
    one, rng = KINDS[kind], np.random.default_rng([seed, len(kind)])
    *leading, columns = tensor if one.cls != "GroupedTensor" else tensor[1:]
    members = tensor[0] if one.cls == "GroupedTensor" else 1
    found = {}
    for name, part in one.parts.items():
        shape = part.shape
        if shape is None:
            shape = (members, *_grid(part, math.prod(leading), columns))
        made = _elements(rng, part.dtype, shape)
        if part.repeated > 1:
            made = made[:, :: part.repeated].repeat(part.repeated, 1)[:, : shape[1]]
        found[name] = made
    return found


def whole(kind: str, seed: int = 0) -> Arrays:
    """The components of the whole tensor, as bytes with an axis more than the component has."""
    one, found = KINDS[kind], {}
    for name, made in _drawn(kind, KINDS[kind].shape, seed).items():
        part = one.parts[name]
        if part.shape is not None:
            found[name] = made
            continue
        each = np.stack([_stored(part, name, member, None) for member in made])
        found[name] = _seen(one, name, each)
    return found


def _seen(kind: Kind, name: str, each: np.ndarray) -> np.ndarray:
    """A component of members as the tensor has it: one of them without its axis."""
    if kind.cls == "GroupedTensor":
        return each
    return each[0, :, 0] if name == "_amax_rowwise" else each[0]


def piece(kind: str, box: Box, seed: int = 0, *, own: bool = False, zeros: bool = False) -> Arrays:
    """The components of a part of the tensor; `own`: with a grid that begins with the part, and
    scales of its own, as a rank quantizes what it has; `zeros`: filled up with zeros.
    """
    one, rng = KINDS[kind], np.random.default_rng([seed, *box[0], *box[-1]])
    filling = None if zeros else rng
    grouped = one.cls == "GroupedTensor"
    (top, bottom), (left, right) = box[-2:]
    members = slice(*box[0]) if grouped else slice(0, 1)
    found = {}
    for name, made in _drawn(kind, KINDS[kind].shape, seed).items():
        part = one.parts[name]
        if part.shape is not None:
            found[name] = made
            continue
        if own and (part.rows, part.columns) != (1, 1):
            shape = (1, *_grid(part, bottom - top, right - left))
            taken = _elements(rng, part.dtype, shape)
        else:
            rows = _cut(part.rows, top, bottom)
            taken = made[members, rows, _cut(part.columns, left, right)]
        each = np.stack([_stored(part, name, member, filling) for member in taken])
        found[name] = _seen(one, name, each)
    return found


def _cut(each: int | None, start: int, stop: int) -> slice:
    return slice(None) if each is None else slice(start // each, -(-stop // each))


def tensors(kind: str, held: Arrays) -> dict[str, torch.Tensor]:
    """The same as torch's, with memory of their own."""
    found = {}
    for name, raw in held.items():
        dtype = getattr(torch, KINDS[kind].parts[name].dtype)
        # torch takes no empty buffer
        flat = torch.empty(0, dtype=dtype)
        if raw.size:
            flat = torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype)
        found[name] = flat.reshape(raw.shape[:-1])
    return found


_QUANTIZERS = {
    "MXFP8Tensor": ("mxfp8_tensor", {"with_2d_quantization": False}),
    "NVFP4Tensor": ("nvfp4_tensor", {}),
    "Float8BlockwiseQTensor": (
        "float8_blockwise_tensor",
        {"block_len": 128, "force_pow_2_scales": False, "amax_epsilon": 0.0},
    ),
}


def _quantizer(kind: Kind, cls: str, number: Any) -> Any:
    short, others = _QUANTIZERS[cls]
    columnwise = "_columnwise_data" in kind.parts
    fields = {
        "rowwise_usage": True,
        "columnwise_usage": columnwise,
        "internal": False,
        "optimize_for_gemm": kind.parts["_rowwise_scale_inv"].swizzled,
        "dtype": number,
        **others,
    }
    if cls == "NVFP4Tensor":
        fields["with_2d_quantization"] = not kind.options_of().get("_row_scaled_nvfp4")
    if cls == "Float8BlockwiseQTensor":
        fields["block_scaling_dim"] = 2 if kind.options_of()["_is_2D_scaled"] else 1
    module = classes.install_name(short)
    return getattr(module, classes.QUANTIZERS[short])(**fields)


def wrapped(
    kind: str, shape: tuple[int, ...], held: Arrays, dtype: torch.dtype = torch.bfloat16
) -> classes.Wrapper:
    """The tensor of these components, to be called while the stand-ins are installed."""
    one, parts = KINDS[kind], tensors(kind, held)
    if one.cls.startswith("torchao."):
        return _of_torchao(one, shape, parts, dtype)
    number = classes.code(one.number, one.release)
    if one.cls == "GroupedTensor":
        return _grouped(one, shape, parts, dtype, number)
    cls = getattr(classes, one.cls)
    if one.cls == "Float8Tensor" and one.release < (1, 11):
        cls = classes.FirstFloat8Tensor
    fields: dict[str, Any] = dict.fromkeys(cls.COMPONENTS) | parts
    fields |= {cls.CODE: number, "_quantizer": None, "fake_dtype": dtype}
    fields |= cls.spelling(one.release)
    if one.cls != "Float8Tensor":
        fields["_quantizer"] = _quantizer(one, one.cls, number)
    if one.cls in ("MXFP8Tensor", "NVFP4Tensor"):
        fields["_with_gemm_swizzled_scales"] = one.parts["_rowwise_scale_inv"].swizzled
    if one.cls == "Float8BlockwiseQTensor":
        fields["_data_format"] = None
    if one.cls == "NVFP4Tensor":
        fields |= {"_row_scaled_nvfp4": False, "_nvfp4_use_4over6": False, "_nvfp4_e4m3_max": 448}
    fields |= one.options_of()
    if fields.get("_data_format") is not None:
        fields["_data_format"] = classes.data_format(fields["_data_format"])
    return cls(shape, dtype, fields)


def _grouped(
    kind: Kind, shape: tuple[int, ...], held: dict[str, torch.Tensor], dtype: Any, number: Any
) -> classes.Wrapper:
    count, rows, columns = shape
    runs = {name.replace("_rowwise_", "").removeprefix("_"): held[name] for name in held}
    runs["rowwise_data"] = runs.pop("data")
    sizes = {name: one[0].numel() if count else 0 for name, one in runs.items()}
    offsets = {
        f"{name}_offsets": [n * sizes[name] for n in range(count + 1)]
        for name in ("scale_inv", "columnwise_scale_inv")
    }
    fields: dict[str, Any] = {
        "num_tensors": count,
        "quantizer": _quantizer(kind, "MXFP8Tensor", number),
        "tensor_shapes": [(rows, columns)] * count,
        "fake_dtype": dtype,
    }
    for name in classes.GroupedTensor.COMPONENTS:
        fields[name] = runs[name].reshape(-1) if name in runs else None
    fields |= {"scale": None, **offsets, "first_dims": None, "last_dims": None}
    fields |= {
        "tensor_offsets": None,
        "offsets": [n * rows * columns for n in range(count + 1)],
        "logical_shape": (count * rows, columns),
        "quantized_tensors": None,
        "_with_gemm_swizzled_scales": False,
        "_row_scaled_nvfp4": False,
        "_nvfp4_use_4over6": False,
        "_nvfp4_e4m3_max": 448,
    }
    return classes.GroupedTensor(shape, dtype, fields)


def _of_torchao(
    kind: Kind, shape: tuple[int, ...], held: dict[str, torch.Tensor], dtype: Any
) -> classes.Wrapper:
    name = kind.cls.partition(".")[2]
    cls, others = classes.of_torchao(name), {}
    if name == "Float8Tensor":
        others = classes.float8_fields()
    elif name == "MXTensor":
        others = {"elem_dtype": torch.float8_e4m3fn, "block_size": 32, "orig_dtype": dtype}
        others |= classes.mx_fields()
    elif name == "NVFP4Tensor":
        others = {"block_size": 16, "orig_dtype": dtype, "act_per_tensor_scale": None}
        others |= {"is_swizzled_scales": False, "use_triton_kernel": False}
        others |= {"act_quant_kwargs": None}
    elif name == "Int8Tensor":
        others = {"block_size": [1, shape[-1]], "act_quant_kwargs": None}
        others |= {"act_quant_scale": None, "act_quant_zero_point": None, "act_pre_scale": None}
    elif name == "Int4Tensor":
        others = {"block_size": [1, 32], "activation_dtype": dtype, "act_pre_scale": None}
    others |= kind.options_of()
    if isinstance(size := others["block_size"], list):
        others["block_size"] = [n or m for n, m in zip(size, shape, strict=True)]
    return cls(shape, dtype, {**held, **others})


def part_of(
    kind: str, rank: int, world: int, cut: str = "rows", seed: int = 0, **how: Any
) -> tuple[Box, classes.Wrapper] | None:
    """A rank's box and what it holds; None for one that has nothing."""
    dealt = boxes(KINDS[kind], world, cut)
    if rank >= len(dealt) or dealt[rank][0][0] == dealt[rank][0][1]:
        return None
    box = dealt[rank]
    own = cut == "inside"
    return box, wrapped(kind, sizes(box), piece(kind, box, seed, own=own), **how)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


class Rows(Shard):
    """`Shard(0)` whose ranks end at these rows: torch itself deals rows out evenly."""

    def __new__(cls, *ends: int) -> Rows:
        # a plain dataclass in torch 2.8
        plain = Shard.__new__ is object.__new__
        return object.__new__(cls) if plain else Shard.__new__(cls, 0)

    def __init__(self, *ends: int) -> None:
        super().__init__(0)
        self.ends = ends

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, self.ends

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        start, stop = (0, *self.ends)[rank : rank + 2]
        return stop - start, start


def spread(kind: str, rank: int, cut: str, local: Any) -> Any:
    """A DTensor of which this rank has `local`."""
    one, world = KINDS[kind], dist.get_world_size()
    dealt = boxes(one, world, cut)
    if cut == "columns":
        way = Shard(len(one.shape) - 1)
    elif cut == "members":
        way = Shard(1)
    else:
        even = [min((n + 1) * -(-one.shape[0] // world), one.shape[0]) for n in range(world)]
        ends = [box[0][1] for box in dealt]
        way = Shard(0) if ends == even else Rows(*ends)
    stride = tuple(math.prod(one.shape[n + 1 :]) for n in range(len(one.shape)))
    return DTensor.from_local(
        local,
        init_device_mesh("cpu", (world,)),
        [way],
        run_check=False,
        shape=torch.Size(one.shape),
        stride=stride,
    )


def parameter(made: DTensor) -> torch.nn.Parameter:
    """A parameter that is spread as `made`: under torch 2.14 it would have the even `Shard`."""
    one = torch.nn.Parameter(made, requires_grad=False)
    one._spec = made._spec
    return one


# torch 2.8 has no stager for "thread"; the last two are by a stager of ours
WAYS = tuple(
    way
    for way in ("save", "blocking", "thread", "process", "staged", "staged-process")
    if way != "thread" or hasattr(staging, "DefaultStager")
)


@contextmanager
def parent() -> Iterator[None]:
    """Lets a rank, which is a daemon, start the process that saves."""
    settings = current_process()._config  # type: ignore[attr-defined]
    daemon, settings["daemon"] = settings.get("daemon"), False
    address = os.environ.setdefault("MASTER_ADDR", "localhost")
    try:
        yield
    finally:
        settings["daemon"] = daemon
        assert address


# torch 2.8 asks the writer
HAS_STAGERS = "async_stager" in inspect.signature(dcp.async_save).parameters


def async_save(state: dict[str, Any], folder: str, ours: Any, **options: Any) -> Any:
    """`dcp.async_save` by a stager of ours, as this torch takes one."""
    if HAS_STAGERS:
        return dcp.async_save(state, checkpoint_id=folder, async_stager=ours, **options)
    writer = ours.writer(dcp.FileSystemWriter(folder))
    return dcp.async_save(state, storage_writer=writer, **options)


def write(state: dict[str, Any], folder: str, way: str) -> None:
    """Saves by stock torch, in one of `WAYS`."""
    if way == "save":
        dcp.save(state, checkpoint_id=folder)
    elif way == "blocking":
        dcp.async_save(state, checkpoint_id=folder).result()
    elif way == "thread":
        plain = staging.StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
        stager = staging.DefaultStager(plain)
        saved = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        getattr(saved, "upload_completion", saved).result()
        stager.close()
    elif way == "staged":
        saved = async_save(state, folder, migrate.Stager().for_dcp(non_blocking=HAS_STAGERS))
        getattr(saved, "upload_completion", saved).result()
    elif way == "staged-process":
        by = AsyncCheckpointerType.PROCESS
        with parent():
            ours = migrate.Stager(share_memory=True).for_dcp()
            async_save(state, folder, ours, async_checkpointer_type=by).result()
    else:
        with parent():
            dcp.async_save(
                state, checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS
            ).result()


def saves(rank: int, folder: str, kinds: list[str], way: str = "save", cut: str = "rows") -> None:
    """A checkpoint with a tensor of each kind, by its name, and what stands beside them."""
    with classes.installed():
        model: dict[str, Any] = {"norm": torch.arange(5.0)}
        for kind in kinds:
            found = part_of(kind, rank, dist.get_world_size(), cut)
            assert found is not None, f"rank {rank} has nothing of {kind}"
            model[kind] = spread(kind, rank, cut, found[1])
        write({"model": model, "step": 3}, folder, way)


def saves_wrong(rank: int, folder: str, kinds: list[str], fault: str) -> None:
    """Tensors whose parts make no whole one, because of what the last rank has: `inside` of a
    block, what all share is not the same (`shared`), a plain tensor (`dense`), another dtype
    (`code`) or another setting (`flag`) in as many bytes.
    """
    world = dist.get_world_size()
    cut = "inside" if fault == "inside" else "rows"
    with classes.installed():
        model: dict[str, Any] = {"norm": torch.arange(5.0)}
        for kind in kinds:
            found = part_of(kind, rank, world, cut)
            assert found is not None
            local: torch.Tensor = found[1]
            if rank == world - 1 and fault == "shared":
                name = next(n for n, part in KINDS[kind].parts.items() if part.shape is not None)
                found[1].held()[name].mul_(2)
            elif rank == world - 1 and fault == "code":
                found[1]._fp8_dtype = classes.code("e5m2", KINDS[kind].release)
            elif rank == world - 1 and fault == "flag":
                found[1]._with_gemm_swizzled_scales ^= True
            elif rank == world - 1 and fault == "dense":
                local = torch.ones(local.shape, dtype=local.dtype)
            model[kind] = spread(kind, rank, cut, local)
        write({"model": model}, folder, "save")
