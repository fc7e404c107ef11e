"""`mxfp4`: e2m1 codes and a power of two for each 32 of a row (OCP Microscaling Formats 1.0), as
gpt-oss, compressed-tensors, ModelOpt, torchao and DeepSeek-V4 store weights.

A number is code * 2^(byte - 127), exact in float32 and in bfloat16; the byte 255 is NaN. A row that
is no multiple of 32 ends in a shorter block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from ..core.spec import spec as spec_of
from .base import Flag, OpError, Text, arg, dataclass
from .kit.arguments import like_arg, non_finite_arg, power_arg
from .kit.layout import NumberLayout, Packing, floats, times
from .kit.microscaling import (
    POWERS_OF,
    MicroscalingCodec,
    block_scales,
    scale_arg,
    swizzled_arg,
    torchao_names,
)

CODES = "float4_e2m1fn"
# two codes a byte, the first in the low half, or the dtype itself
STORED = ("uint8", "int8", CODES)
# bytes of a block of 32
BYTES = 16


class Mxfp4(MicroscalingCodec):
    name = "mxfp4"
    summary = "e2m1 codes with a power of two for each 32 of a row"
    names = (
        *(
            Convention(
                f"gpt-oss, {who}",
                {
                    "weight": f"{{w}}{sep}blocks uint8 [*, N, G, 16]",
                    "scale": f"{{w}}{sep}scales uint8 [*, N, G]",
                },
                arguments={"form": "blocks"},
            )
            for who, sep in (("transformers", "_"), ("OpenAI", "."))
        ),
        *(
            Convention(
                who,
                {
                    "weight": f"{{w}}.{name} uint8 [*, N, K/2]",
                    "scale": "{w}.weight_scale uint8|float8_e8m0fnu [*, N, K/32]",
                },
                beside=ACTIVATIONS,
            )
            for who, name in (("compressed-tensors", "weight_packed"), ("ModelOpt", "weight"))
        ),
        *(
            Convention(
                "DeepSeek",
                {
                    "weight": f"{{w}}.weight {codes}",
                    "scale": f"{{w}}.{scale} float8_e8m0fnu|float32 [*, N, K/32]",
                },
            )
            for codes in ("uint8|int8 [*, N, K/2]", f"{CODES} [*, N, K]")
            for scale in ("scale", "weight_scale_inv")
        ),
        *torchao_names("uint8 [*, N, K/2]"),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text | None = arg(
            "blocks: codes are [..., N, K / 32, 16] bytes, as gpt-oss stores them, by default "
            "[..., N, K / 2]",
            words=("blocks",),
            default=None,
        )
        swizzled: Flag = swizzled_arg()
        weight: Text | None = arg(
            "how codes are stored, by default uint8", words=STORED, encoding=True, default=None
        )
        scale: Text | None = scale_arg()
        like: Text = like_arg(*POWERS_OF)
        rule: Text | None = power_arg(default=None)
        non_finite: Text = non_finite_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        run = BYTES if args.form == "blocks" else 0
        axes = [len(spec.shape) for spec in specs.values()]
        if len(axes) == 2 and axes[0] == axes[1] + 1 and not run:
            raise OpError(
                "M310",
                f"mxfp4: the weight is {list(specs['weight'].shape)} and the scale "
                f"{list(specs['scale'].shape)}, so codes lie in blocks of their own",
                help="write `form: blocks`",
            )
        dtypes = STORED[:2] if run else STORED
        return NumberLayout(
            self.name,
            floats(CODES),
            Packing(4, dtypes, run=run),
            times(block_scales(args.swizzled)),
            axes=2 if args.swizzled else 1,
        )

    def dtypes(self, args: Any, spec: Spec) -> Mapping[str, str]:
        said = {"weight": args.weight, "scale": args.scale}
        return {role: dtype for role, dtype in said.items() if dtype}

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), spec_of("bfloat16", (6, 64))
        yield self.Args("blocks", rule="even"), spec_of("bfloat16", (2, 5, 64))
        yield (
            self.Args(weight="int8", scale="float32", like="deepseek"),
            spec_of("float32", (3, 80)),
        )
        yield self.Args(scale="float8_e8m0fnu", like="modelopt"), spec_of("float16", (2, 3, 46))
        yield (
            self.Args(weight=CODES, like="compressed-tensors", non_finite="saturate"),
            spec_of("float32", (7, 34)),
        )
        yield self.Args(swizzled=True, rule="floor"), spec_of("bfloat16", (130, 160))


CODEC = Mxfp4()
