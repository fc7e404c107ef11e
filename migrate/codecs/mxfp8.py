"""`mxfp8`: codes of 8 bits and a power of two for each 32 of a row (OCP Microscaling Formats 1.0),
as compressed-tensors, ModelOpt, torchao and Transformer Engine store weights.

A number is code * 2^(byte - 127), exact in float32 and in bfloat16; the byte 255 is NaN. A row that
is no multiple of 32 ends in a shorter block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.part_names import ACTIVATIONS, COLUMNWISE, Convention
from ..core.spec import Spec
from ..core.spec import spec as spec_of
from .base import Flag, OpError, Text, arg, dataclass
from .kit.arguments import like_arg, non_finite_arg, power_arg
from .kit.layout import NumberLayout, floats, in_squares, plain, times
from .kit.microscaling import (
    TE_2D,
    MicroscalingCodec,
    block_scales,
    scale_arg,
    swizzled_arg,
    torchao_names,
)

CODES = ("float8_e4m3fn", "float8_e5m2")
SAY = f"write `codes: {CODES[0]}` or `codes: {CODES[1]}`"


class Mxfp8(MicroscalingCodec):
    name = "mxfp8"
    summary = "e4m3 or e5m2 codes with a power of two for each 32 of a row"
    names = (
        *(
            Convention(
                who,
                {
                    "weight": "{w}.weight float8 [*, N, K]",
                    "scale": f"{{w}}.{scale} uint8|float8_e8m0fnu [*, N, K/32]",
                },
                beside=beside,
            )
            for who, scale, beside in (
                ("compressed-tensors, ModelOpt", "weight_scale", ACTIVATIONS),
                ("transformers", "weight_scale_inv", {}),
            )
        ),
        Convention(
            "Transformer Engine",
            {
                "weight": "{w}._rowwise_data uint8 [N, K]",
                "scale": "{w}._rowwise_scale_inv uint8 [N:128, K/32:4]",
            },
            beside=COLUMNWISE,
            arguments={"form": "te"},
            either={"codes": CODES, "swizzled": (False, True)},
        ),
        *torchao_names("float8 [*, N, K]"),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        codes: Text | None = arg(
            "what codes are that are stored as uint8; encoding makes these, by default "
            "float8_e4m3fn",
            words=CODES,
            default=None,
        )
        form: Text | None = arg(
            "te: Transformer Engine's, codes are bytes and scales padded to multiples of 128 rows "
            "and 4 columns",
            words=("te",),
            default=None,
        )
        swizzled: Flag = swizzled_arg()
        weight: Text | None = arg(
            "uint8: codes are stored as bytes", words=("uint8",), encoding=True, default=None
        )
        scale: Text | None = scale_arg()
        like: Text = like_arg("torchao", "compressed-tensors", "modelopt", TE_2D)
        rule: Text | None = power_arg(default=None)
        non_finite: Text = non_finite_arg()

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        if args.codes is None and (args.form or args.weight):
            raise OpError("M308", "mxfp8: codes that are stored as bytes need `codes`", help=SAY)

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        stored = specs["weight"].dtype if "weight" in specs else args.codes or CODES[0]
        if stored == "uint8" and args.codes is None:
            raise OpError(
                "M303", "mxfp8: the weight is uint8, which does not say what it holds", help=SAY
            )
        codes = stored if stored in CODES else args.codes or CODES[0]
        if args.codes not in (None, codes):
            raise OpError(
                "M303",
                f"mxfp8: the weight is {codes}, the rule says `codes: {args.codes}`",
                help="leave `codes` out, which is for bytes",
            )
        padded = (128, 4) if args.form == "te" else (1, 1)
        return NumberLayout(
            self.name,
            floats(codes),
            plain(codes, "uint8"),
            times(block_scales(args.swizzled, padded)),
            axes=2 if args.swizzled or args.form else 1,
        )

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        layout = self.layout(args, {})
        return in_squares(layout) if args.like == TE_2D else layout

    def dtypes(self, args: Any, spec: Spec) -> Mapping[str, str]:
        codes = "uint8" if args.form == "te" else args.weight or args.codes or CODES[0]
        return {"weight": codes, **({"scale": args.scale} if args.scale else {})}

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), spec_of("bfloat16", (6, 72))
        yield self.Args(CODES[1], rule="floor"), spec_of("float32", (2, 5, 64))
        yield self.Args(CODES[1], form="te"), spec_of("bfloat16", (7, 200))
        yield self.Args(CODES[0], form="te", swizzled=True), spec_of("bfloat16", (130, 200))
        yield (
            self.Args(CODES[0], weight="uint8", scale="float32", like="modelopt"),
            spec_of("float16", (33,)),
        )
        yield (
            self.Args(scale="float8_e8m0fnu", like="compressed-tensors", non_finite="saturate"),
            spec_of("float32", (7, 31)),
        )
        yield self.Args(CODES[0], form="te", like=TE_2D), spec_of("bfloat16", (70, 96))
        yield self.Args(swizzled=True, rule="even"), spec_of("bfloat16", (130, 160))


CODEC = Mxfp8()
