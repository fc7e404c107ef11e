"""What the MX formats have in common (OCP Microscaling Formats 1.0): a power of two for each 32
numbers of a row, and whose arithmetic chooses it.

A scale is stored as a byte, 2^(byte - 127) and NaN for 255, or as a float32 that has to be a power
of two. So products with codes are exact in float32 and in bfloat16.
"""

from __future__ import annotations

from math import frexp
from typing import TYPE_CHECKING, Any

from ...core.errors import OpError
from ...core.part_names import Convention
from ...core.spec import Spec
from ..base import ACTIVATION_SCALES, arg
from .arguments import POWERS
from .encoding_codec import EncodingCodec
from .geometry import decoded
from .layout import ElementType, Grid
from .scale_rules import FLOOR, ScaleRule, mantissa_of

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = 32
# neither elements nor rule depend on what is encoded
ANY = Spec("float32", ())
SCALES = ("uint8", "float8_e8m0fnu", "float32")
# Transformer Engine's squares of 32 rows and columns
TE_2D = "te-2d"
# how each library chooses a power of two; torchao leaves the choice to the caller
POWERS_OF = {
    "torchao": POWERS,
    "compressed-tensors": ("even",),
    "modelopt": ("rceil",),
    "deepseek": ("rceil",),
    TE_2D: ("rceil",),
}


class MicroscalingCodec(EncodingCodec):
    """Base of the codecs of MX formats: they add names, arguments, `layout` and samples. Their
    arguments have `weight`, `scale`, `like` and `rule`.
    """

    parts = ("weight", "scale")
    numbers = ("float32", "bfloat16", "float16")
    unused = ACTIVATION_SCALES

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        known = POWERS_OF[args.like]
        if args.rule is not None and args.rule not in known:
            raise OpError(
                "M308",
                f"{self.name}: `rule` is {args.rule}, scales of {args.like} are {known[0]}",
                help="leave `rule` out, or write `like: torchao`",
            )

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("mx", args.like, power=args.rule or POWERS_OF[args.like][0])

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        parts = super().encoded(args, spec)
        layout = self.written(args, spec)
        shape = decoded(layout, self.by_role(parts), spec.dtype).shape
        if shape != spec.shape:
            raise OpError(
                "M304",
                f"{self.name}: rows of {spec.shape[-1]} numbers would be read again as rows of "
                f"{shape[-1]}",
                help="`pad` them before, which the way back undoes",
            )
        return parts

    def returns(self, args: Any, spec: Spec) -> str:
        elements, rule = self.written(args, spec).elements, self.rule(args, spec)
        low, high = reach(elements, rule)
        # above what a smaller scale leads to, up to where a larger one begins
        closed = rule.power in ("floor", "even")
        found = [
            f"{v:g}"
            for v in sorted(v for v in elements.values() if 0 < v < float("inf"))
            if (low <= v < high if closed else low < v <= high)
        ]
        codes = " or ".join(found) if len(found) < 3 else f"{found[0]} to {found[-1]}"
        said = f"depends on the data: blocks whose largest code is {codes}"
        if rule.like == "deepseek":
            said += f" and stands for {FLOOR:g} or more"
        if elements.bits == 4 and rule.sign != "bit":
            said += ", but for the sign of zeros"
        return said

    def bound(self, args: Any) -> str:
        elements, rule = self.written(args, ANY).elements, self.rule(args, ANY)
        low, high = reach(elements, rule)
        known = sorted(v for v in elements.values() if 0 < v < float("inf"))
        # half a step of a number, or what saturates
        part = max(2.0 ** -(mantissa_of(elements) + 1), 1 - known[-1] / high)
        return (
            f"|error| <= max(|x| * {part:.3g}, scale * {known[0] / 2:g}), scale being at most "
            f"amax of the block / {low:g}, or 2^-127"
        )


def reach(elements: ElementType, rule: ScaleRule) -> tuple[float, float]:
    """Between which quotients the largest magnitude of a block lies, divided by its scale."""
    most = max(v for v in elements.values() if v < float("inf"))
    # the power of two not above the largest number
    top = 2.0 ** (frexp(most)[1] - 1)
    kept = mantissa_of(elements) if rule.mantissa_bits is None else rule.mantissa_bits
    high = {
        "floor": 2 * top, "ceil": top, "rceil": most, "even": (2 - 2.0 ** -(kept + 1)) * top
    }[rule.power]  # fmt: skip
    return high / 2, high


def block_scales(swizzled: bool, padded: tuple[int, int] = (1, 1)) -> Grid:
    """A power of two for each 32 numbers of a row."""
    return Grid("scale", (1, GROUP), dtypes=SCALES, powers=True, swizzled=swizzled, padded=padded)


def scale_arg() -> Any:
    """`scale`: how scales are stored."""
    return arg("how scales are stored, by default uint8", words=SCALES, encoding=True, default=None)


def swizzled_arg() -> Any:
    """`swizzled`: whether scales lie as cuBLAS reads them."""
    return arg("scales lie in the tiles of 128 rows and 4 columns of cuBLAS", default=False)


def torchao_names(codes: str) -> tuple[Convention, ...]:
    """What torchao calls the parts, in safetensors and as an object in a pickle."""
    return tuple(
        Convention(
            "torchao",
            {
                "weight": f"{prefix}qdata {codes}",
                "scale": f"{prefix}scale uint8|float8_e8m0fnu {shape}",
            },
            arguments=said,
        )
        for shape, said in (
            ("[*, N, K/32]", {}),
            ("[*, 32*N/128, 16*K/128]", {"swizzled": True}),
        )
        for prefix in ("{w}._weight_", "{w}.")
    )
