"""`fp8-block`: e4m3 codes with one scale for each block of rows and columns, as DeepSeek-V3 has it.

A weight [..., N, K] has a grid of scales [..., ceil(N/b0), ceil(K/b1)]; blocks at its ends may be
smaller. A number is float32(code) * float32(scale), rounded once more where the dtype is narrower.

The block is said, not derived from shapes: 576 rows with five scales are blocks of 128, not 115.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.part_names import ACTIVATIONS, COLUMNWISE, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Integers, Text, arg, dataclass
from .kit.arguments import block_arg, like_arg, non_finite_arg, rounding_bound
from .kit.encoding_codec import EncodingCodec
from .kit.layout import NUMBERS, Grid, NumberLayout, floats, plain, times
from .kit.scale_rules import ScaleRule

CODES, POWERS = "float8_e4m3fn", "float8_e8m0fnu"
ELEMENTS, BLOCK = floats(CODES), (128, 128)
SCALES = ("float32", "bfloat16", POWERS, "uint8")
LIKE = ("deepseek", "hf", "compressed-tensors", "modelopt")
# scales as they come, rounded to bfloat16, the power of two above in four bytes or one; or a dtype
STORED = {"f32": "float32", "bf16": "bfloat16", "pow2": "float32", "ue8m0": POWERS}
STORED |= {name: name for name in SCALES}
ROUNDING = {"float32": "f32", "bfloat16": "bf16", POWERS: "pow2", "uint8": "pow2"}
_NAMES: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("DeepSeek, transformers", "{w}.weight", "{w}.weight_scale_inv", ACTIVATIONS),
    ("transformers 5, stacked experts", "{w}", "{w}_scale_inv", {}),
    ("DeepSeek-V4", "{w}.weight", "{w}.scale", {}),
    ("compressed-tensors, ModelOpt", "{w}.weight", "{w}.weight_scale", ACTIVATIONS),
)


def _has_tiles(arguments: Mapping[str, Any]) -> bool:
    """Whether these are blocks at all, and not a scale for each row or for 32 elements of one."""
    return arguments.get("rows") != 1 or arguments.get("columns", 32) != 32


def _conventions() -> Iterable[Convention]:
    shape = "wide|float8_e8m0fnu [*, N/rows, K/columns]"
    for producer, weight, scale, beside in _NAMES:
        parts = {"weight": f"{weight} float8_e4m3fn [*, N, K]", "scale": f"{scale} {shape}"}
        yield Convention(producer, parts, beside, accepts=_has_tiles)
    several, blocks = (lambda n: max(n["N"], n["K"]) > 128), {"rows": 128, "columns": 128}
    for at in ("{w}._weight_", "{w}."):
        scale = f"{at}scale float32 [*, N/128, K/128]"
        parts = {"weight": f"{at}qdata float8_e4m3fn [*, N, K]", "scale": scale}
        yield Convention("torchao", parts, {}, blocks, accepts=several)
    for rows, shape in ((128, "[N/128, K/128:4]"), (1, "[K/128, N:4]")):
        scale, said = f"{{w}}._rowwise_scale_inv float32 {shape}", {"rows": rows, "columns": 128}
        parts = {"weight": "{w}._rowwise_data uint8 [N, K]", "scale": scale}
        yield Convention("Transformer Engine", parts, COLUMNWISE, {**said, "form": "te"})


class Fp8Block(EncodingCodec):
    name = "fp8-block"
    summary = "e4m3 codes with a scale for each block of rows and columns"
    reference_width = 0
    parts = ("weight", "scale")
    unused = ACTIVATION_SCALES
    names = tuple(_conventions())
    numbers = NUMBERS

    @dataclass(frozen=True, slots=True)
    class Args:
        block: Integers | None = block_arg(
            "rows and columns that share a scale, by default 128 and 128"
        )
        like: Text | None = like_arg(*LIKE, default=None)
        scale: Text | None = arg(
            "how scales are stored: float32 (f32, the default), bfloat16 (bf16), float8_e8m0fnu "
            "(ue8m0), its bytes (uint8), or pow2",
            words=tuple(STORED),
            encoding=True,
            default=None,
        )
        scale_fmt: Text | None = arg(
            "ue8m0: scales are rounded up to powers of two, whatever their dtype; float: not",
            words=("ue8m0", "float"),
            encoding=True,
            default=None,
        )
        form: Text | None = arg(
            "te: codes in uint8, rows of scales padded to multiples of 4, and transposed where a "
            "block is of one row",
            words=("te",),
            default=None,
        )
        non_finite: Text = non_finite_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        block, te = args.block or BLOCK, args.form == "te"
        scale = Grid(
            "scale",
            block,
            dtypes=SCALES,
            transposed=te and block[0] == 1,
            padded=(1, 4 if te else 1),
            positive=args.non_finite != "keep",
        )
        codes = plain("uint8" if te else CODES)
        return NumberLayout(self.name, ELEMENTS, codes, times(scale), axes=2)

    def dtypes(self, args: Any, spec: Spec) -> dict[str, str]:
        return {"scale": STORED[args.scale or "f32"]}

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("float", args.like or LIKE[0], rounding=_rounding(args))

    def returns(self, args: Any, spec: Spec) -> str:
        if _rounding(args) == "pow2":
            # a largest code of 224 or less is encoded again with a smaller power
            return "depends on the data: blocks whose largest code is above 224"
        held = "codes and scales" if spec.dtype == "float32" else "codes, not scales,"
        return f"{held} of what the same arithmetic encoded"

    def bound(self, args: Any) -> str:
        least = " (amax at least 1e-4)" if (args.like or LIKE[0]) == "deepseek" else ""
        amax = "2 * amax" if _rounding(args) == "pow2" else "amax"
        return rounding_bound(ELEMENTS, amax, f"amax of the block{least}")

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        for dtype, shape, said in (
            ("bfloat16", (576, 200), {}),
            ("float32", (5, 300), {"block": (1, 128), "scale": "pow2"}),
            ("float16", (3, 12, 10), {"block": (4, 4), "like": "hf", "non_finite": "saturate"}),
            ("bfloat16", (2, 2, 7, 11), {"block": (3, 5), "scale": "ue8m0"}),
            ("float32", (30, 7), {"block": (8, 1), "scale": "uint8", "non_finite": "keep"}),
            ("bfloat16", (1, 130), {"block": (64, 64), "scale": "bf16"}),
            ("float32", (5, 6), {"block": (2, 2), "scale": "bfloat16", "scale_fmt": "ue8m0"}),
            ("bfloat16", (9, 300), {"block": (1, 128), "form": "te", "like": "modelopt"}),
            ("bfloat16", (9, 30), {"block": (4, 4), "form": "te", "like": "compressed-tensors"}),
        ):
            yield self.Args(**said), Spec(dtype, shape)


def _rounding(args: Fp8Block.Args) -> str:
    """What becomes of a scale before it is stored: nothing (f32), bf16 or pow2."""
    powers = "ue8m0" in (args.scale_fmt, args.scale) or args.scale == "pow2"
    return "pow2" if powers else ROUNDING[STORED[args.scale or "f32"]]


CODEC = Fp8Block()
