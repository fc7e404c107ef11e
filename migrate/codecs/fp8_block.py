"""`fp8-block`: e4m3 codes with one scale for each block of rows and columns, as DeepSeek-V3 stores
weights and others after it.

A weight [..., N, K] has a grid of scales [..., ceil(N/b0), ceil(K/b1)]; the last blocks are smaller
where a side is no multiple of the block. A number is float32(code) * float32(scale), rounded once
more where the dtype is narrower.

The block has to be said, not derived from the two shapes: 576 rows with five scales are blocks of
128, not of 115.2, and where a division comes out even it may still be the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from ..core.spec import spec as spec_of
from .base import NON_FINITE, Integers, OpError, Text, arg, dataclass
from .kit.encoding_codec import EncodingCodec
from .kit.layout import Grid, NumberLayout, floats, plain, times
from .kit.scale_rules import ScaleRule

CODES = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float8_e8m0fnu")
NUMBERS = ("float32", "bfloat16", "float16")
LIKE = ("deepseek", "hf")
# how a scale is stored: as it comes, rounded to bfloat16, or as the power of two above it in four
# bytes or in one; or its dtype
STORED = {
    "f32": "float32",
    "bf16": "bfloat16",
    "pow2": "float32",
    "ue8m0": "float8_e8m0fnu",
    **{name: name for name in SCALES},
}
# what configurations call the power of two above it, in whatever dtype, and what transformers calls
# a scale as it comes
POWER, FORMATS = "ue8m0", ("ue8m0", "float")


def _has_tiles(arguments: Mapping[str, Any]) -> bool:
    """Whether these are blocks at all, and not a scale for each row or for 32 elements of one."""
    return arguments.get("rows") != 1 or arguments.get("columns", 32) != 32


class Fp8Block(EncodingCodec):
    name = "fp8-block"
    summary = "e4m3 codes with a scale for each block of rows and columns"
    reference_width = 0
    parts = ("weight", "scale")
    names = (
        *(
            Convention(
                producer,
                {
                    "weight": f"{weight} float8_e4m3fn [*, N, K]",
                    "scale": f"{scale} wide|float8_e8m0fnu [*, N/rows, K/columns]",
                },
                beside=beside,
                accepts=_has_tiles,
            )
            for producer, weight, scale, beside in (
                ("DeepSeek, transformers", "{w}.weight", "{w}.weight_scale_inv", ACTIVATIONS),
                ("transformers 5, stacked experts", "{w}", "{w}_scale_inv", {}),
                ("DeepSeek-V4", "{w}.weight", "{w}.scale", {}),
                ("compressed-tensors, ModelOpt", "{w}.weight", "{w}.weight_scale", ACTIVATIONS),
            )
        ),
    )

    numbers = NUMBERS

    @dataclass(frozen=True, slots=True)
    class Args:
        block: Integers | None = arg(
            "rows and columns that share a scale, by default 128 and 128",
            least=1,
            length=2,
            default=None,
        )
        like: Text | None = arg(
            "whose arithmetic encodes, by default deepseek", words=LIKE, encoding=True, default=None
        )
        scale: Text | None = arg(
            "how scales are stored: float32 (f32, the default), bfloat16 (bf16), float8_e8m0fnu "
            "(ue8m0), or pow2",
            words=tuple(STORED),
            encoding=True,
            default=None,
        )
        scale_fmt: Text | None = arg(
            "ue8m0: scales are rounded up to powers of two, whatever their dtype; float: not",
            words=FORMATS,
            encoding=True,
            default=None,
        )
        non_finite: Text = arg(
            "refuse, saturate or keep infinities and NaN",
            words=NON_FINITE,
            encoding=True,
            default="refuse",
        )

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        _has_blocks("dequantize", specs["weight"])
        block = _block(args)
        scale = Grid("scale", (block.rows, block.columns), dtypes=SCALES)
        return NumberLayout(self.name, floats(CODES), plain(CODES), times(scale))

    def encoded(self, args: Any, spec: Spec) -> list[Spec]:
        if spec.dtype not in NUMBERS:
            raise OpError(
                "M303",
                f"fp8-block encodes {', '.join(NUMBERS)}, not {spec.dtype}",
                help="write a `cast` before it",
            )
        _has_blocks("quantize", spec)
        return [
            spec_of(CODES, spec.shape),
            spec_of(_stored(args), _grid(spec.shape, _block(args))),
        ]

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("float", args.like or LIKE[0], rounding=_rounding(args))

    def returns(self, args: Any, spec: Spec) -> str:
        _, scale = self.encoded(args, spec)
        if args.scale_fmt == "ue8m0" or args.scale == "pow2" or scale.dtype == "float8_e8m0fnu":
            # a largest code of 224 or less is encoded again with a smaller power
            return "depends on the data: blocks whose largest code is above 224"
        return (
            "codes and scales of what the same arithmetic encoded"
            if spec.dtype == "float32"
            else "codes, not scales, of what the same arithmetic encoded"
        )

    def bound(self, args: Any) -> str:
        least = " (amax at least 1e-4)" if (args.like or LIKE[0]) == "deepseek" else ""
        twice = "2 * " if _rounding(args) == "pow2" else ""
        return (
            f"|error| <= max(|x| / 16, {twice}amax / 448 / 1024), amax of the block{least}: "
            "half a step of e4m3 and of its subnormals"
        )

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), spec_of("bfloat16", (576, 200))
        yield self.Args(block=(1, 128), scale="pow2"), spec_of("float32", (5, 300))
        yield (
            self.Args(block=(4, 4), like="hf", non_finite="saturate"),
            spec_of("float16", (3, 12, 10)),
        )
        yield self.Args(block=(3, 5), scale="ue8m0"), spec_of("bfloat16", (2, 2, 7, 11))
        yield (
            self.Args(block=(8, 1), like="hf", scale="ue8m0", non_finite="keep"),
            spec_of("float32", (30, 7)),
        )
        yield self.Args(block=(64, 64), scale="bf16"), spec_of("bfloat16", (1, 130))
        yield (
            self.Args(block=(2, 2), scale="bfloat16", scale_fmt="ue8m0"),
            spec_of("float32", (5, 6)),
        )


class Block(NamedTuple):
    """Rows and columns of a block."""

    rows: int
    columns: int


def _block(args: Fp8Block.Args) -> Block:
    return Block(*(args.block or (128, 128)))


def _stored(args: Fp8Block.Args) -> str:
    return STORED[args.scale or "f32"]


def _rounding(args: Fp8Block.Args) -> str:
    """What becomes of a scale before it is stored: nothing (f32), bf16 or pow2."""
    if args.scale_fmt == POWER or args.scale == "pow2" or _stored(args) == "float8_e8m0fnu":
        return "pow2"
    return {"float32": "f32", "bfloat16": "bf16"}[_stored(args)]


def _has_blocks(verb: str, spec: Spec) -> None:
    if len(spec.shape) < 2:
        raise OpError(
            "M304",
            f"{verb}: fp8-block has blocks of rows and columns, {spec} has "
            f"{len(spec.shape) or 'no'} axes",
        )


def _grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))


CODEC = Fp8Block()
