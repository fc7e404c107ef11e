"""The number formats of the golden vectors as layouts."""

from __future__ import annotations

import json
import struct
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from migrate.codecs import get
from migrate.codecs.gguf import DECODED
from migrate.codecs.kit.layout import (
    Grid,
    NumberLayout,
    Packing,
    Term,
    floats,
    integers,
    plain,
    signed,
    table_of,
    times,
)
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
NIBBLES = Packing(4, ("uint8", "int8", E2M1))
TENSOR, ROW = (0, 0), (1, 0)
# quotients that Python makes in float64 and float32 operations round once more
OVER_2688, OVER_1536, OVER_127 = (float(np.float32(1 / n)) for n in (2688, 1536, 127))

DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I8": "int8",
    "I32": "int32", "I64": "int64", "F8_E4M3": E4M3, "F8_E5M2": E5M2, "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
}  # fmt: skip


# every golden vector: what a library was given (`input`), what it stored (`q/NAME`) and what it
# made of that again (`dq/FUNCTION`)
GOLDENS = tuple(
    Path(__file__).resolve().parents[1] / "data" / "quant" / f"{name}.tar.xz"
    for name in ("goldens", "gguf")
)


class Case(NamedTuple):
    """One golden: what is stored, and what its library makes of it."""

    layout: NumberLayout
    # role -> name on disk
    names: Mapping[str, str]


def read(data: bytes) -> dict[str, tuple[Spec, Any]]:
    """name -> (spec, raw elements) of the bytes of a safetensors file."""
    (size,) = struct.unpack_from("<Q", data)
    out = {}
    for name, said in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        low, high = said["data_offsets"]
        spec = Spec(DTYPES[said["dtype"]], tuple(said["shape"]))
        raw = np.frombuffer(data[8 + size + low : 8 + size + high], carrier(spec.dtype))
        out[name] = spec, raw.reshape(spec.shape)
    return out


@cache
def goldens() -> dict[str, dict[str, dict[str, tuple[Spec, Any]]]]:
    """format -> case -> name -> (spec, raw elements)."""
    out: dict[str, dict[str, dict[str, tuple[Spec, Any]]]] = {}
    for path in GOLDENS:
        with tarfile.open(path) as archive:
            for member in archive:
                held = archive.extractfile(member)
                assert held is not None
                kind, case = member.name.removesuffix(".safetensors").split("/")
                out.setdefault(kind, {})[case] = read(held.read())
    return out


Found = Mapping[str, tuple[Spec, Any]]


def fp8(codes: str, scale: str, block: tuple[int, int], dtype: str = E4M3, **more: Any) -> Case:
    grid = Grid("scale", block, **more)
    return Case(
        NumberLayout("fp8", floats(dtype), plain(dtype, "uint8"), times(grid)),
        {"weight": codes, "scale": scale},
    )


def mxfp8(codes: str, scale: str, dtype: str = E4M3, **more: Any) -> Case:
    grid = Grid("scale", (1, 32), dtypes=("uint8", "float8_e8m0fnu", "float32"), **more)
    return Case(
        NumberLayout("mxfp8", floats(dtype), plain(dtype, "uint8"), times(grid)),
        {"weight": codes, "scale": scale},
    )


def mxfp4(codes: str, scale: str, run: int = 0) -> Case:
    grid = Grid("scale", (1, 32), dtypes=("uint8", "float8_e8m0fnu", "float32"))
    packing = Packing(4, NIBBLES.dtypes, run=run)
    return Case(
        NumberLayout("mxfp4", floats(E2M1), packing, times(grid)), {"weight": codes, "scale": scale}
    )


def nvfp4(
    codes: str, scale: str, whole: str | None, *more: Any, how: Any = "*", **grid: Any
) -> Case:
    scales = Grid("scale", (1, 16), dtypes=(E4M3, "uint8"), byte=E4M3, **grid)
    terms = times(scales)
    names = {"weight": codes, "scale": scale}
    if whole is not None:
        terms += (Term(how, Grid("global", TENSOR, leading=False, dtypes=("float32",))),)
        names["global"] = whole
    terms += times(*more)
    return Case(NumberLayout("nvfp4", floats(E2M1), NIBBLES, terms), names)


def packed(bits: int, dense: bool = False, zero: bool = False) -> Callable[[Found], Case]:
    def make(found: Found) -> Case:
        shape = tuple(int(n) for n in found["q/weight_shape"][1].view("<i8"))
        groups = found["q/weight_scale"][0].shape[-1]
        block = (1, -(-shape[1] // groups))
        names = {"weight": "weight_packed", "scale": "weight_scale"}
        offset, zeros = 1 << (bits - 1), None
        if zero:
            offset = 0
            zeros = Grid(
                "zero", block, elements=integers(bits), packing=Packing(bits, ("int32",), axis=-2)
            )
            names["zero"] = "weight_zero_point"
        return Case(
            NumberLayout(
                "int-pack",
                integers(bits, offset),
                Packing(bits, ("int32",), dense=dense),
                times(Grid("scale", block)),
                zero=zeros,
                shape=shape,
            ),
            names,
        )

    return make


def gptq(bits: int, first: bool) -> Callable[[Found], Case]:
    def make(found: Found) -> Case:
        dense = 32 % bits != 0
        index = "group"
        scale = Grid("scale", (1, 1), transposed=True, index=index)
        zero = Grid(
            "zero",
            (1, 1),
            elements=integers(bits),
            packing=Packing(bits, ("int32",), axis=-2, dense=dense, plus=int(first)),
            transposed=True,
            index=index,
        )
        shape = (found["q/scales"][0].shape[1], found["q/g_idx"][0].shape[0])
        return Case(
            NumberLayout(
                "gptq",
                integers(bits),
                Packing(bits, ("int32",), dense=dense, transposed=True),
                times(scale),
                zero=zero,
                shape=shape,
            ),
            {
                "weight": "qweight",
                "scale": "scales",
                "zero": "qzeros(gptq v1)" if first else "qzeros(gptq_v2)",
                "group": "g_idx",
            },
        )

    return make


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(group: int) -> Case:
    packing = Packing(4, ("int32",), axis=-2, order=AWQ, transposed=True)
    return Case(
        NumberLayout(
            "awq",
            integers(4),
            packing,
            times(Grid("scale", (1, group), transposed=True)),
            zero=Grid(
                "zero",
                (1, group),
                elements=integers(4),
                packing=Packing(4, ("int32",), axis=-2, order=AWQ),
                transposed=True,
            ),
        ),
        {"weight": "qweight", "scale": "scales", "zero": "qzeros"},
    )


def gemv(group: int) -> Case:
    words = {128: 1, 64: 2, 32: 4}[group]
    return Case(
        NumberLayout(
            "awq",
            integers(4),
            Packing(4, ("int32",)),
            times(Grid("scale", (1, group), padded=(1, 8 * words))),
            zero=Grid(
                "zero",
                (1, group),
                elements=integers(4),
                packing=Packing(4, ("int32",)),
                padded=(1, 8 * words),
            ),
        ),
        {"weight": "qweight", "scale": "scales", "zero": "qzeros"},
    )


def bnb4(kind: str) -> Callable[[Found], Case]:
    def make(found: Found) -> Case:
        name = f"weight.quant_state.bitsandbytes__{kind}"
        said = json.loads(bytes(found[f"q/{name}"][1]))
        names = {"weight": "weight", "absmax": "weight.absmax", "map": "weight.quant_map"}
        block = (0, said["blocksize"])
        if "nested_offset" in said:
            scale = (
                *times(
                    Grid("absmax", block, dtypes=("uint8",), elements=table_of("nested_map", 8)),
                    Grid("nested_absmax", (0, block[1] * said["nested_blocksize"])),
                ),
                Term("+", float(np.float32(said["nested_offset"]))),
            )
            names |= {
                "nested_map": "weight.nested_quant_map", "nested_absmax": "weight.nested_absmax"
            }  # fmt: skip
        else:
            scale = times(Grid("absmax", block))
        return Case(
            NumberLayout(
                "bnb-4bit",
                table_of("map", 4),
                Packing(4, order=(1, 0)),
                scale,
                flat=True,
                shape=tuple(said["shape"]),
            ),
            names,
        )

    return make


def by_rows(found: Found) -> Case:
    columns, groups = (found[f"q/{n}"][0].shape[1] for n in ("weight", "weight_scale"))
    return Case(
        NumberLayout(
            "int4-rows",
            signed(4),
            Packing(4, axis=-2),
            times(Grid("scale", (1, columns // groups))),
        ),
        {"weight": "weight", "scale": "weight_scale"},
    )


def gguf(name: str) -> Callable[[Found], Case]:
    def make(found: Found) -> Case:
        codec: Any = get("gguf")
        args = codec.Args(name, non_finite="keep")
        return Case(codec.layout(args, {"data": found["q/data"][0]}), {"data": "data"})

    return make


GPTQ = (
    "4bit_g128_sym", "4bit_g32_asym", "4bit_g128_actorder", "8bit_channel_sym", "3bit_g128_sym"
)  # fmt: skip
Make = Callable[[Found], Case] | Case

FORMATS: dict[str, Make] = {
    "ct_fp8_tensor": fp8("weight", "weight_scale", TENSOR),
    "ct_fp8_channel": fp8("weight", "weight_scale", ROW),
    "modelopt_fp8_tensor": fp8("weight", "weight_scale", TENSOR, leading=False),
    "modelopt_fp8_channel": fp8("weight", "weight_scale", ROW),
    "te_fp8_e4m3_current": fp8("_data", "_scale_inv", TENSOR),
    "te_fp8_e4m3_current_pow2": fp8("_data", "_scale_inv", TENSOR),
    "te_fp8_e5m2_current": fp8("_data", "_scale_inv", TENSOR, E5M2),
    "te_fp8_e5m2_current_pow2": fp8("_data", "_scale_inv", TENSOR, E5M2),
    "ao_float8_tensor": fp8("qdata", "scale", TENSOR),
    "ao_float8_row": fp8("qdata", "scale", ROW),
    "ao_float8_e5m2_row": fp8("qdata", "scale", ROW, E5M2),
    "ct_fp8_block": fp8("weight", "weight_scale", (128, 128)),
    "modelopt_fp8_block": fp8("weight", "weight_scale", (128, 128)),
    "hf_fp8_block": fp8("weight", "weight_scale_inv", (128, 128)),
    "hf_fp8_block_ue8m0": fp8(
        "weight", "weight_scale_inv", (128, 128), dtypes=("float8_e8m0fnu", "float32", "uint8")
    ),
    "deepgemm_fp8_block": fp8("weight", "weight_scale_inv", (128, 128)),
    "deepgemm_fp8_block_ue8m0": fp8("weight", "weight_scale_inv", (128, 128)),
    "te_fp8_block_2d_fp32scale": fp8(
        "_rowwise_data", "_rowwise_scale_inv", (128, 128), padded=(1, 4)
    ),
    "te_fp8_block_1d": fp8(
        "_rowwise_data", "_rowwise_scale_inv", (1, 128), transposed=True, padded=(1, 4)
    ),
    "ct_mxfp8": mxfp8("weight", "weight_scale"),
    "modelopt_mxfp8": mxfp8("weight", "weight_scale"),
    **{f"ao_mxfp8_e4m3_{r}": mxfp8("qdata", "scale") for r in ("floor", "ceil", "rceil", "even")},
    "ao_mxfp8_e5m2_rceil": mxfp8("qdata", "scale", E5M2),
    "ao_mxfp8_e4m3_rceil_swizzled": mxfp8("qdata", "scale", swizzled=True),
    "ct_mxfp4": mxfp4("weight_packed", "weight_scale"),
    "modelopt_mxfp4": mxfp4("weight", "weight_scale"),
    **{f"ao_mxfp4_{r}": mxfp4("qdata", "scale") for r in ("floor", "ceil", "rceil", "even")},
    "deepgemm_fp4_ue8m0": mxfp4("weight", "scale_f32"),
    "mxfp4_to_nvfp4_exact mxfp4": mxfp4("blocks", "scales", run=16),
    "gptoss_mxfp4": mxfp4("w_blocks", "w_scales", run=16),
    "mxfp4_to_nvfp4_exact nvfp4": nvfp4(
        "nvfp4.weight", "nvfp4.weight_scale", "nvfp4.weight_scale_2"
    ),
    "modelopt_nvfp4": nvfp4("weight", "weight_scale", "weight_scale_2"),
    "ao_nvfp4_two_level": nvfp4("qdata", "scale", "per_tensor_scale"),
    "ao_nvfp4_two_level_swizzled": nvfp4("qdata", "scale", "per_tensor_scale", swizzled=True),
    "ao_nvfp4_single_level": nvfp4("qdata", "scale", None),
    "ct_nvfp4": nvfp4("weight_packed", "weight_scale", "weight_global_scale", how="/"),
    "te_nvfp4_1x16": nvfp4(
        "_rowwise_data", "_rowwise_scale_inv(unpadded)", "_amax_rowwise", OVER_2688
    ),
    "te_nvfp4_16x16": nvfp4(
        "_rowwise_data", "_rowwise_scale_inv(unpadded)", "_amax_rowwise", OVER_2688,
        padded=(16, 1),
    ),
    "te_nvfp4_4over6": nvfp4(
        "_rowwise_data", "_rowwise_scale_inv(unpadded)", "_amax_rowwise", OVER_1536
    ),
    "ct_int8_channel": Case(
        NumberLayout("int8", signed(8), plain("int8"), times(Grid("scale", ROW))),
        {"weight": "weight", "scale": "weight_scale"},
    ),
    "modelopt_int8_wo": Case(
        NumberLayout("int8", signed(8), plain("int8"), times(Grid("scale", ROW))),
        {"weight": "weight", "scale": "weight_scale"},
    ),
    "ao_int8_row": Case(
        NumberLayout("int8", signed(8), plain("int8"), times(Grid("scale", ROW))),
        {"weight": "qdata", "scale": "scale"},
    ),
    "bnb_int8": Case(
        NumberLayout(
            "bnb-int8", signed(8), plain("int8"), times(Grid("scale", ROW)), after=OVER_127
        ),
        {"weight": "weight", "scale": "SCB"},
    ),
    "ao_int4_tinygemm": Case(
        NumberLayout(
            "tinygemm",
            integers(8, 8),
            plain("uint8"),
            times(Grid("scale", (1, 32))),
            less=(*times(Grid("zero", (1, 32))), Term("*", -1.0)),
        ),
        {"weight": "int_data", "scale": "scale", "zero": "zero_point"},
    ),
    "modelopt_int4_awq": by_rows,
    "ct_w8a16_pack": packed(8),
    "ct_w4a16_g128_sym": packed(4),
    "ct_w4a16_g128_asym": packed(4, zero=True),
    "ct_w3a16_dense": packed(3, dense=True),
    **{
        f"gptq_{name} v{v}": gptq(int(name[0]), v == 1)
        for name in GPTQ
        for v in (1, 2)
    },
    "awq_gemm_g128": awq(128),
    "awq_gemm_g32": awq(32),
    "awq_gemv_g128": gemv(128),
    "bnb_nf4": bnb4("nf4"),
    "bnb_nf4_double": bnb4("nf4"),
    "bnb_fp4": bnb4("fp4"),
    **{f"gguf_{name}": gguf(name) for name in DECODED},
}  # fmt: skip
