"""Quantized tensors of Transformer Engine as whole tensors drawn at random, and the shards of them
that ranks would hold. What each component is at an index is written down here element by element,
from the kernels' formulas, and nothing of it is shared with the code under test.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from dcp_folders import Box, save
from quantized_streams import Made
from test_dcp import edit

KEEP = """
id: demo/2/keep
title: Keep all
why: a test
lineage: demo
edge: ["1", "2"]
keep: ["{k...}"]
"""
U8, F32 = torch.uint8, torch.float32
# of one component: shape as stored, and where element (i, j) of its grid lies in it
Place = Callable[[int, int], tuple[int, ...]]


def up(n: int, step: int) -> int:
    return -(-n // step) * step


def swizzled(i: int, j: int, columns: int) -> int:
    """`gemm_swizzled_scale_idx` of common/cast/mxfp8/swizzle.cuh."""
    tile = (i // 128) * -(-columns // 4) + j // 4
    return tile * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


@dataclass(frozen=True)
class Part:
    """One component of a tensor of M rows and K columns: an element for so many rows and columns.

    `stored(M, K)` is its shape, `place(i, j, M, K)` the index of an element in it.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    stored: Callable[[int, int], tuple[int, ...]]
    place: Callable[[int, int, int, int], tuple[int, ...]] = lambda i, j, m, k: (i, j)

    def grid(self, m: int, k: int) -> tuple[int, int]:
        return (
            -(-m // self.rows) if self.rows else 1,
            -(-k // self.columns) if self.columns else 1,
        )


def unravel(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    return at // shape[1], at % shape[1]


def _turned(i: int, j: int, m: int, k: int) -> tuple[int, int]:
    return j, i


DATA = Part(1, 1, U8, lambda m, k: (m, k))
TURNED = Part(1, 1, U8, lambda m, k: (k, m), _turned)
ONE = Part(0, 0, F32, lambda m, k: (1,), lambda i, j, m, k: (0 * i,))

MX = {
    "_rowwise_data": DATA,
    "_rowwise_scale_inv": Part(1, 32, U8, lambda m, k: (up(m, 128), up(k // 32, 4))),
    "_columnwise_data": DATA,
    "_columnwise_scale_inv": Part(32, 1, U8, lambda m, k: (up(m // 32, 4), up(k, 128))),
}
MX_SWIZZLED = {
    **MX,
    "_rowwise_scale_inv": Part(
        1,
        32,
        U8,
        MX["_rowwise_scale_inv"].stored,
        lambda i, j, m, k: unravel(swizzled(i, j, -(-k // 32)), (1, up(k // 32, 4))),
    ),
    "_columnwise_scale_inv": Part(
        32,
        1,
        U8,
        MX["_columnwise_scale_inv"].stored,
        lambda i, j, m, k: unravel(swizzled(j, i, -(-m // 32)), (1, up(k, 128))),
    ),
}
FLOAT8 = {"_data": DATA, "_transpose": TURNED, "_scale_inv": ONE}
BLOCK_2D = {
    "_rowwise_data": DATA,
    "_rowwise_scale_inv": Part(128, 128, F32, lambda m, k: (-(-m // 128), up(-(-k // 128), 4))),
    "_columnwise_data": TURNED,
    "_columnwise_scale_inv": Part(
        128, 128, F32, lambda m, k: (-(-k // 128), up(-(-m // 128), 4)), _turned
    ),
}
BLOCK_1D = {
    "_rowwise_data": DATA,
    "_rowwise_scale_inv": Part(1, 128, F32, lambda m, k: (-(-k // 128), up(m, 4)), _turned),
    "_columnwise_data": TURNED,
    "_columnwise_scale_inv": Part(128, 1, F32, lambda m, k: (-(-m // 128), up(k, 4))),
}
COMPACT = {
    "_rowwise_data": DATA,
    "_rowwise_scale_inv": Part(1, 128, F32, lambda m, k: (m, -(-k // 128))),
    "_columnwise_data": DATA,
    "_columnwise_scale_inv": Part(128, 1, F32, lambda m, k: (-(-m // 128), k)),
}
NV = {
    "_rowwise_data": Part(1, 2, U8, lambda m, k: (m, k // 2)),
    "_rowwise_scale_inv": Part(1, 16, U8, lambda m, k: (up(m, 128), up(-(-k // 16), 4))),
    "_columnwise_data": Part(2, 1, U8, lambda m, k: (k, m // 2), _turned),
    "_columnwise_scale_inv": Part(
        16, 1, U8, lambda m, k: (up(k, 128), up(-(-m // 16), 4)), _turned
    ),
    "_amax_rowwise": ONE,
    "_amax_columnwise": ONE,
}
NV_SWIZZLED = {
    **NV,
    "_rowwise_scale_inv": Part(
        1,
        16,
        U8,
        NV["_rowwise_scale_inv"].stored,
        lambda i, j, m, k: unravel(swizzled(i, j, -(-k // 16)), (1, up(-(-k // 16), 4))),
    ),
    "_columnwise_scale_inv": Part(
        16,
        1,
        U8,
        NV["_columnwise_scale_inv"].stored,
        lambda i, j, m, k: unravel(swizzled(j, i, -(-m // 16)), (1, up(-(-m // 16), 4))),
    ),
}
NV_BY_ROW = {
    "_rowwise_data": NV["_rowwise_data"],
    "_rowwise_scale_inv": NV["_rowwise_scale_inv"],
    "_amax_rowwise": Part(1, 0, F32, lambda m, k: (m,), lambda i, j, m, k: (i,)),
}


@dataclass(frozen=True)
class Class:
    """A class with its components, and the flags that the object has beside them."""

    name: str
    parts: Mapping[str, Part]
    flags: Mapping[str, Any] = field(default_factory=dict)
    quantizer: Mapping[str, Any] = field(default_factory=dict)

    def object(self, modules: dict[str, ModuleType], parts: Mapping[str, Any], shape: Any) -> Made:
        """What pickles as such an object does since 2.17 (or, with a data format, in 2.5)."""
        code = modules["constants"].DType(10 if self.name == "NVFP4Tensor" else 7)
        short, quantizer, function = _MODULES[self.name]
        made = quantizer and getattr(modules[short], quantizer)(
            rowwise_usage=True, dtype=code, **self.quantizer
        )
        said = {
            **parts,
            "code": code,
            "dtype": torch.bfloat16,
            "shape": torch.Size(shape),
            "quantizer": made,
            **self.flags,
        }
        if "data_format" in self.flags:
            said["data_format"] = modules["transformer_engine_torch"].Float8BlockScaleTensorFormat(
                self.flags["data_format"]
            )
        return Made(
            getattr(modules[short], function), tuple(said.get(n) for n in ARGUMENTS[self.name])
        )


_MODULES = {
    "Float8Tensor": ("float8_tensor", "", "_make_float8_tensor_in_reduce_ex"),
    "MXFP8Tensor": ("mxfp8_tensor", "MXFP8Quantizer", "_make_mxfp8_tensor_in_reduce_ex"),
    "Float8BlockwiseQTensor": (
        "float8_blockwise_tensor",
        "Float8BlockQuantizer",
        "_make_float8_blockwise_tensor_in_reduce_ex",
    ),
    "NVFP4Tensor": ("nvfp4_tensor", "NVFP4Quantizer", "_make_nvfp4_tensor_in_reduce_ex"),
}
_BOTH = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
ARGUMENTS = {
    "Float8Tensor": ("_data", "code", "_scale_inv", "dtype", "shape", "_transpose"),
    "MXFP8Tensor": (*_BOTH, "code", "dtype", "shape", "quantizer", "with_gemm_swizzled_scales"),
    "Float8BlockwiseQTensor": (
        "shape",
        *_BOTH,
        "code",
        "dtype",
        "quantizer",
        "is_2D_scaled",
        "data_format",
    ),
    "NVFP4Tensor": (
        "shape",
        *_BOTH,
        "_amax_rowwise",
        "_amax_columnwise",
        "code",
        "dtype",
        "quantizer",
        "with_gemm_swizzled_scales",
        "row_scaled_nvfp4",
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
    ),
}
_NV_FLAGS = {
    "with_gemm_swizzled_scales": False,
    "row_scaled_nvfp4": False,
    "nvfp4_use_4over6": False,
    "nvfp4_e4m3_max": 448,
}

CLASSES = {
    "float8": Class("Float8Tensor", FLOAT8),
    "mxfp8": Class("MXFP8Tensor", MX, {"with_gemm_swizzled_scales": False}),
    "mxfp8-swizzled": Class("MXFP8Tensor", MX_SWIZZLED, {"with_gemm_swizzled_scales": True}),
    "block-2d": Class("Float8BlockwiseQTensor", BLOCK_2D, {"is_2D_scaled": True}),
    "block-1d": Class("Float8BlockwiseQTensor", BLOCK_1D, {"is_2D_scaled": False}),
    "block-1d-ready": Class(
        "Float8BlockwiseQTensor", BLOCK_1D, {"is_2D_scaled": False, "data_format": 0}
    ),
    "block-1d-compact": Class(
        "Float8BlockwiseQTensor", COMPACT, {"is_2D_scaled": False, "data_format": 1}
    ),
    "nvfp4": Class("NVFP4Tensor", NV, _NV_FLAGS),
    "nvfp4-2d": Class("NVFP4Tensor", NV, _NV_FLAGS, {"with_2d_quantization": True}),
    "nvfp4-swizzled": Class(
        "NVFP4Tensor", NV_SWIZZLED, {**_NV_FLAGS, "with_gemm_swizzled_scales": True}
    ),
    "nvfp4-row": Class("NVFP4Tensor", NV_BY_ROW, {**_NV_FLAGS, "row_scaled_nvfp4": True}),
}


def draw(cls: Class, m: int, k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The grid of each component, [rows, columns], of a tensor of M rows and K columns."""
    torch.manual_seed(seed)
    return {name: _drawn(part.grid(m, k), part.dtype) for name, part in cls.parts.items()}


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(1, 255, tuple(shape)).to(dtype)


def stored(part: Part, grid: torch.Tensor, m: int, k: int, padding: int | None) -> torch.Tensor:
    """The component as it is stored; what fills it up is `padding`, or drawn at random."""
    shape = part.stored(m, k)
    out = (
        _drawn(shape, part.dtype) if padding is None else torch.full(shape, padding).to(part.dtype)
    )
    i, j = torch.meshgrid(*map(torch.arange, grid.shape), indexing="ij")
    at = part.place(i, j, m, k)
    places = sum(a * s for a, s in zip(at, out.stride(), strict=True))
    assert torch.bincount(places.reshape(-1)).max() == 1
    out.reshape(-1)[places] = grid
    return out


def whole(cls: Class, grids: Mapping[str, torch.Tensor], m: int, k: int) -> dict[str, torch.Tensor]:
    """The components of the whole tensor, filled up with zeros."""
    return {name: stored(part, grids[name], m, k, 0) for name, part in cls.parts.items()}


def shard(
    cls: Class, grids: Mapping[str, torch.Tensor], box: Box, padding: int | None = None
) -> dict[str, torch.Tensor]:
    """The components of a box of the tensor, filled up with anything."""
    (r, c), (m, k) = box
    out = {}
    for name, part in cls.parts.items():
        rows = slice(None)
        columns = slice(None)
        if part.rows:
            rows = slice(r // part.rows, -(-(r + m) // part.rows))
        if part.columns:
            columns = slice(c // part.columns, -(-(c + k) // part.columns))
        out[name] = stored(part, grids[name][rows, columns], m, k, padding)
    return out


def save_shards(
    folder: Path,
    shape: Sequence[int],
    boxes: Sequence[Box],
    values: Mapping[str, Sequence[Any]],
    beside: Mapping[str, Any] | None = None,
) -> None:
    """A distributed checkpoint with tensors of one shape, of which each box was saved as one of
    these values.
    """
    dense = torch.zeros(tuple(shape), dtype=torch.bfloat16)
    save(folder, {**dict.fromkeys(values, dense), **(beside or {})}, dict.fromkeys(values, boxes))
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    archives = {}
    for key, several in values.items():
        for (start, _), value in zip(boxes, several, strict=True):
            raw = io.BytesIO()
            torch.save(value, raw)
            archives[key, tuple(start)] = raw.getvalue()

    def change(metadata: Any) -> None:
        for index, place in metadata.storage_data.items():
            found = archives.get((index.fqn, tuple(index.offset or ())))
            if found is not None:
                place.offset, place.length = len(data), len(found)
                data.extend(found)

    edit(folder, change)
    path.write_bytes(bytes(data))


def keep(folder: Path) -> Path:
    """A file of rules that keeps everything."""
    path = folder / "keep.yaml"
    path.write_text(KEEP)
    return path
