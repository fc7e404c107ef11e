"""The number formats that are timed in memory: one matrix of 4096 x 4096 in each, as stored parts
to decode, and how numbers are encoded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data_fp8
import numpy as np

from migrate.codecs import get
from migrate.codecs.kit.layout import (
    Grid,
    NumberLayout,
    Packing,
    floats,
    plain,
    signed,
    table_of,
    times,
)
from migrate.codecs.kit.quant_state import TABLES
from migrate.codecs.kit.samples import random_records
from migrate.codecs.kit.scale_rules import ScaleRule
from migrate.core.spec import Spec

SIDE = 4096
E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
NUMBERS = Spec("bfloat16", (SIDE, SIDE))
Case = tuple[NumberLayout, dict[str, tuple[str, Any]], str]


def cases() -> dict[str, Callable[[], Case]]:
    """name -> what makes (layout, role -> (dtype, raw elements), dtype of the numbers)."""
    rng = np.random.default_rng(0)

    def codes(*shape: int) -> Any:
        # no NaN among e4m3
        made = rng.integers(0, 256, shape).astype("u1")
        made[(made & 0x7F) == 0x7F] = 0x7E
        return made

    def weights(*shape: int) -> Any:
        # e4m3 as frequent as in weights: subnormals take some processors twenty times as long
        block = rng.choice(256, SIDE * SIDE // 16, p=data_fp8.shares()).astype("u1")
        return np.resize(block, shape)

    def words(*shape: int) -> Any:
        return rng.integers(0, 1 << 32, shape).astype("<u4")

    def singles(*shape: int) -> Any:
        return (rng.random(shape) * 0.01 + 0.001).astype("<f4").view("<u4")

    def halves(*shape: int) -> Any:
        return (rng.random(shape) * 0.01 + 0.001).astype("<f2").view("<u2")

    def fp8(block: tuple[int, int], *shape: int) -> Case:
        layout = NumberLayout("fp8", floats(E4M3), plain(E4M3), times(Grid("scale", block)))
        return (
            layout,
            {"weight": (E4M3, weights(SIDE, SIDE)), "scale": ("float32", singles(*shape))},
            "bfloat16",
        )

    def mx(bits: int) -> Case:
        dtype, packing = (E4M3, plain(E4M3)) if bits == 8 else (E2M1, Packing(4))
        layout = NumberLayout(
            "mx", floats(dtype), packing, times(Grid("scale", (1, 32), dtypes=("uint8",)))
        )
        stored = weights(SIDE, SIDE) if bits == 8 else codes(SIDE, SIDE * bits // 8)
        scale = rng.integers(115, 126, (SIDE, SIDE // 32)).astype("u1")
        kind = E4M3 if bits == 8 else "uint8"
        return layout, {"weight": (kind, stored), "scale": ("uint8", scale)}, "bfloat16"

    def nvfp4() -> Case:
        grids = Grid("scale", (1, 16), dtypes=(E4M3,)), Grid("global", (0, 0))
        layout = NumberLayout("nvfp4", floats(E2M1), Packing(4), times(*grids))
        parts = {
            "weight": ("uint8", codes(SIDE, SIDE // 2)),
            "scale": (E4M3, codes(SIDE, SIDE // 16) & 0x7E),
            "global": ("float32", singles()),
        }
        return layout, parts, "bfloat16"

    def in_words(codec: str, parts: dict[str, tuple[str, Any]], dtype: str, **said: Any) -> Case:
        """Parts as the codec reads them, with what it refuses by default."""
        made: Any = get(codec)
        specs = {role: Spec(kind, array.shape) for role, (kind, array) in parts.items()}
        return made.layout(made.Args(**said), specs), parts, dtype

    def int_pack(zero: bool) -> Case:
        parts = {
            "weight": ("int32", words(SIDE, SIDE // 8)),
            "scale": ("bfloat16", (singles(SIDE, SIDE // 128) >> 16).astype("<u2")),
        }
        if zero:
            parts["zero"] = ("int32", words(SIDE // 8, SIDE // 128))
        return in_words("int-pack", parts, "bfloat16", bits=4, group=128)

    def gptq(in_turn: bool) -> Case:
        group = (np.arange(SIDE) // 128).astype("<i4").view("<u4")
        parts = {
            "weight": ("int32", words(SIDE // 8, SIDE)),
            "scale": ("float16", halves(SIDE // 128, SIDE)),
            "zero": ("int32", words(SIDE // 128, SIDE // 8)),
            "group": ("int32", group if in_turn else rng.permutation(group)),
        }
        # words of any bits hold zeros that may be 0 or 16
        return in_words("gptq", parts, "float16", form="v1", zeros="words")

    def awq() -> Case:
        parts = {
            "weight": ("int32", words(SIDE, SIDE // 8)),
            "scale": ("float16", halves(SIDE // 128, SIDE)),
            "zero": ("int32", words(SIDE // 128, SIDE // 8)),
        }
        return in_words("awq", parts, "float16")

    def nf4() -> Case:
        layout = NumberLayout(
            "nf4",
            table_of("map", 4),
            Packing(4, order=(1, 0)),
            times(Grid("absmax", (0, 64))),
            flat=True,
            shape=(SIDE, SIDE),
        )
        parts = {
            "weight": ("uint8", codes(SIDE * SIDE // 2, 1)),
            "absmax": ("float32", singles(SIDE * SIDE // 64)),
            # what bitsandbytes takes, whatever it is given
            "map": ("float32", np.array(TABLES["nf4"], "<f4").view("<u4")),
        }
        return layout, parts, "bfloat16"

    def int8() -> Case:
        layout = NumberLayout("int8", signed(8), plain("int8"), times(Grid("scale", (1, 0))))
        parts = {"weight": ("int8", codes(SIDE, SIDE)), "scale": ("float32", singles(SIDE, 1))}
        return layout, parts, "bfloat16"

    def gguf(kind: str) -> Case:
        codec: Any = get("gguf")
        layout = codec.layout(codec.Args(kind), {})
        spec, raw = random_records(layout, SIDE, SIDE // layout.record.codes)
        return layout, {"data": (spec.dtype, raw)}, "bfloat16"

    return {
        "fp8 tensor": lambda: fp8((0, 0)),
        "fp8 row": lambda: fp8((1, 0), SIDE, 1),
        "fp8-block": lambda: fp8((128, 128), SIDE // 128, SIDE // 128),
        "mxfp8": lambda: mx(8),
        "mxfp4": lambda: mx(4),
        "nvfp4": nvfp4,
        "int-pack sym": lambda: int_pack(False),
        "int-pack asym": lambda: int_pack(True),
        "gptq": lambda: gptq(True),
        "gptq, columns out of order": lambda: gptq(False),
        "awq": awq,
        "nf4": nf4,
        "int8": int8,
        "Q8_0": lambda: gguf("q8_0"),
        "Q4_K": lambda: gguf("q4_k"),
    }


def _fp8(block: tuple[int, int], scale: Spec, rule: ScaleRule, leading: bool = True) -> Any:
    grid = Grid("scale", block, leading=leading, dtypes=(scale.dtype,))
    parts = {"weight": Spec(E4M3, (SIDE, SIDE)), "scale": scale}
    return NumberLayout("fp8", floats(E4M3), plain(E4M3), times(grid)), parts, rule


def _fp4(name: str, block: int, dtype: str, rule: ScaleRule) -> Any:
    grids = [Grid("scale", (1, block), dtypes=(dtype,))]
    parts = {
        "weight": Spec("uint8", (SIDE, SIDE // 2)),
        "scale": Spec(dtype, (SIDE, SIDE // block)),
    }
    if name == "nvfp4":
        grids.append(Grid("global", (0, 0), leading=False))
        parts["global"] = Spec("float32", ())
    return NumberLayout(name, floats(E2M1), Packing(4), times(*grids)), parts, rule


def _fp8_block() -> Any:
    """What the codec makes of bfloat16, as DeepSeek does."""
    codec: Any = get("fp8-block")
    encoding = codec.encoding(codec.Args(block=(128, 128), like="deepseek"), NUMBERS)
    return encoding.layout, encoding.parts, encoding.rule


def _nf4() -> tuple[NumberLayout, dict[str, Spec], ScaleRule]:
    codec = get("bnb-4bit")
    args = codec.Args()
    made = dict(zip(codec.parts, codec.encoded(args, NUMBERS), strict=True))
    parts = {role: made[role] for role in ("weight", "absmax")}
    return codec.written(args, NUMBERS), parts, codec.rule(args, NUMBERS)


# name -> the layout, the specs of its parts, and whose arithmetic encodes
ENCODED = {
    "fp8 tensor": _fp8((0, 0), Spec("float32", ()), ScaleRule("float", "hf"), False),
    "fp8 row": _fp8(
        (1, 0), Spec("float32", (SIDE, 1)), ScaleRule("float", "torchao", region="row")
    ),
    "mxfp8": _fp8((1, 32), Spec("uint8", (SIDE, SIDE // 32)), ScaleRule("mx", "torchao")),
    "mxfp4": _fp4("mxfp4", 32, "uint8", ScaleRule("mx", "torchao")),
    "nvfp4": _fp4("nvfp4", 16, E4M3, ScaleRule("nvfp4", "torchao")),
    "fp8-block": _fp8_block(),
    "nf4": _nf4(),
}
