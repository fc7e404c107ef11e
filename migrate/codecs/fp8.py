"""`fp8`: codes of eight bits with one scale for a tensor, or one for each of its rows.

A weight [..., N, K] has a scale of shape [], [1] or [1, 1], one for each matrix of a stack, [...],
[..., 1] or [..., 1, 1], or one for each row, [..., N] or [..., N, 1]. A number is float32(code) *
float32(scale), rounded once more where the dtype is narrower. Codes are E4M3, E5M2 or AMD's `fnuz`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.part_names import ACTIVATIONS, FLOAT8, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Integers, OpError, Text, arg, dataclass
from .kit.arguments import block_arg, like_arg, non_finite_arg, rounding_bound, scale_form_arg
from .kit.encoding_codec import EncodingCodec
from .kit.granularity import granularity
from .kit.layout import NUMBERS, Grid, NumberLayout, floats, plain, times
from .kit.scale_rules import ScaleRule

CT, MODELOPT, TORCHAO = "compressed-tensors", "modelopt", "torchao"
_STACKED, _OWN = {"input_scale": "{w}_input_scale"}, {"activation_scale": "{w}.qscale_act"}

# producer, its names, what travels with them, and scales of a tensor and of each row
_NAMES: tuple[tuple[Any, ...], ...] = (
    ("ModelOpt", ".weight", ".weight_scale", ACTIVATIONS, "wide [*]", "wide [*, N]"),
    (CT, ".weight", ".weight_scale", ACTIVATIONS, "wide [*, 1]", "wide [*, N, 1]"),
    ("Mistral", ".weight", ".weight_scale_inv", ACTIVATIONS, "wide [*] | [*, 1]"),
    ("Mistral", ".weight", ".qscale_weight", _OWN, "wide [*]"),
    ("ModelOpt, stacked experts", "", "_weight_scale", _STACKED, "wide [] | [*] | [*, 1, 1]"),
    (TORCHAO, "._weight_qdata", "._weight_scale", {}, "float32 [1, 1]", "float32 [*, N, 1]"),
    (TORCHAO, ".qdata", ".scale", {}, "float32 [1, 1]", "float32 [*, N, 1]"),
)


def _conventions() -> Iterable[Convention]:
    for producer, weight, scale, beside, *shapes in _NAMES:
        for what, shape in zip(("tensor", "channel"), shapes, strict=False):
            parts = {"weight": f"{{w}}{weight} float8 [*, N, K]", "scale": f"{{w}}{scale} {shape}"}
            # a scale of each row is not that of the tensor
            accepts = (lambda sizes: bool(sizes["N"] > 1)) if what == "channel" else None
            said = {"granularity": what} | ({} if weight else {"form": MODELOPT})
            yield Convention(producer, parts, beside, said, accepts=accepts)


class Fp8(EncodingCodec):
    name = "fp8"
    summary = "e4m3 or e5m2 codes with a scale for the tensor or for each row"
    parts = ("weight", "scale")
    unused = ACTIVATION_SCALES
    names = (
        *_conventions(),
        Convention(
            "Transformer Engine",
            {"weight": "{w}._data uint8", "scale": "{w}._scale_inv float32 [1]"},
            {"transpose": "{w}._transpose"},
            {"granularity": "tensor"},
            {"codes": FLOAT8[:2]},
        ),
    )
    numbers = NUMBERS

    @dataclass(frozen=True, slots=True)
    class Args:
        granularity: Text | None = arg(
            "what has a scale: tensor (the default, or as shapes say), channel (a row) or stack",
            words=("tensor", "channel", "stack"),
            default=None,
        )
        codes: Text | None = arg(
            "what codes stand for, by default float8_e4m3fn; decoding needs it for codes in uint8",
            words=FLOAT8,
            default=None,
        )
        like: Text = like_arg(MODELOPT, CT, TORCHAO)
        block: Integers | None = block_arg(
            "rows and columns of blocks, where scales are read that are of no tensor and of no row"
        )
        form: Text | None = scale_form_arg(
            "[] and [N] (modelopt), [1] and [N, 1] (compressed-tensors, and te with codes in uint8)"
            " or [1, 1] and [N, 1] (torchao)",
            *(MODELOPT, CT, TORCHAO, "te"),
        )
        scale: Text | None = arg(
            "the dtype of scales, by default float32, of compressed-tensors that of the numbers",
            words=("float32", "bfloat16"),
            encoding=True,
            default=None,
        )
        non_finite: Text = non_finite_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        dtype = specs["weight"].dtype
        codes = args.codes or dtype
        if codes not in FLOAT8 or dtype not in (codes, "uint8"):
            wanted = args.codes or f"one of {', '.join(FLOAT8)}"
            hint = "`codes` says what codes in uint8 stand for" if codes == "uint8" else None
            raise OpError("M303", f"fp8: the weight is {dtype}, not {wanted}", help=hint)
        seen = granularity(self.name, specs, args.granularity, args.block, "fp8-block")
        of = args.granularity if seen != "stack" or args.granularity == "channel" else seen
        return self._layout(args, codes, dtype, of or seen)

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        codes, of = args.codes or FLOAT8[0], args.granularity or "tensor"
        return self._layout(args, codes, "uint8" if args.form == "te" else codes, of)

    def _layout(self, args: Any, codes: str, stored: str, granularity: str) -> NumberLayout:
        each, positive = granularity in ("channel", "block"), args.non_finite != "keep"
        block = args.block if granularity == "block" else (int(each), 0)
        scale = Grid("scale", block, granularity != "stack", positive=positive)
        return NumberLayout(self.name, floats(codes), plain(stored), times(scale), axes=2 * each)

    def dtypes(self, args: Any, spec: Spec) -> dict[str, str]:
        own = (args.form or args.like) == CT
        return {"scale": args.scale or (spec.dtype if own else "float32")}

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        weight, _ = super().encoded(args, spec)
        # the axes that have a scale each, and those of length 1
        kept = {"stack": 0, "channel": -1}.get(args.granularity, -2)
        lead = spec.shape[:kept] if kept else ()
        ones = {MODELOPT: 0, TORCHAO: len(spec.shape) - len(lead)}.get(args.form or args.like, 1)
        return [weight, Spec(self.dtypes(args, spec)["scale"], (*lead, *(1,) * ones))]

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        region: Any = "row" if args.granularity == "channel" else "tensor"
        return ScaleRule("float", args.like, self.dtypes(args, spec)["scale"], region)

    def returns(self, args: Any, spec: Spec) -> str:
        return f"codes and scales of what the same arithmetic encoded from {spec.dtype}"

    def bound(self, args: Any) -> str:
        return rounding_bound(floats(args.codes or FLOAT8[0]), of="amax of what shares a scale")

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        for dtype, shape, said in (
            ("bfloat16", (57, 200), dict[str, Any]()),
            ("float32", (3, 5, 70), {"granularity": "channel", "codes": "float8_e5m2fnuz"}),
            ("bfloat16", (2, 9, 33), {"granularity": "stack", "non_finite": "saturate"}),
            ("float16", (4, 9, 30), {"like": CT}),
            ("bfloat16", (7, 50), {"like": CT, "granularity": "channel", "non_finite": "keep"}),
            ("bfloat16", (2, 3, 17), {"like": TORCHAO, "codes": "float8_e5m2"}),
            ("float32", (40,), {"codes": "float8_e4m3fnuz", "scale": "bfloat16"}),
            ("bfloat16", (8, 24), {"form": "te", "codes": "float8_e5m2"}),
        ):
            yield self.Args(**said), Spec(dtype, shape)


CODEC = Fp8()
