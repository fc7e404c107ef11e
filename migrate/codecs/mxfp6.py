"""`mxfp6`: codes of 6 bits and a power of two for each 32 of a row (OCP Microscaling Formats 1.0),
as compressed-tensors stores weights. It is decoded only.

Codes are e2m3, the one of the two types of 6 bits that compressed-tensors has: four of them in
three bytes, the first in the lowest bits. A number is code * 2^(byte - 127), exact in float32 and
in bfloat16; the byte 255 is NaN. The parts of MXFP4 are named alike, and of how many bits codes
are, their shapes tell: 24 bytes for each scale, or 16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Integer, OpError, arg, dataclass
from .kit.codec import LayoutCodec
from .kit.layout import NumberLayout, Packing, floats, times
from .kit.microscaling import GROUP, block_scales
from .kit.samples import random_part

CODES = {6: "float6_e2m3fn", 4: "float4_e2m1fn"}


class Mxfp6(LayoutCodec):
    name = "mxfp6"
    summary = "e2m3 codes with a power of two for each 32 of a row"
    parts = ("weight", "scale")
    unused = ACTIVATION_SCALES
    names = (
        Convention(
            "compressed-tensors",
            {
                "weight": "{w}.weight_packed uint8 [*, N, 3*K/4]",
                "scale": "{w}.weight_scale uint8|float8_e8m0fnu [*, N, K/32]",
            },
            beside=ACTIVATIONS,
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        bits: Integer | None = arg(
            "bits of a code, 6, or 4 in MXFP4; by default as shapes tell",
            values=tuple(CODES),
            default=None,
        )

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        bits, shapes = args.bits or 6, [spec.shape for spec in specs.values()]
        if len(shapes) == 2 and all(shapes):
            # whole blocks: of fewer than 32 numbers both could be
            held = [b for b in CODES if 8 * shapes[0][-1] == b * GROUP * shapes[1][-1]]
            if not held or args.bits not in (None, *held):
                raise OpError(
                    "M310",
                    f"mxfp6: the weight is {list(shapes[0])} and the scale {list(shapes[1])}, not "
                    f"{bits * GROUP // 8} bytes of codes for each scale",
                )
            bits = held[0]
        packing, scale = Packing(bits, dense=bits == 6), block_scales(False)
        return NumberLayout(self.name, floats(CODES[bits]), packing, times(scale), axes=1)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for dtype, shape, bits in (
            ("uint8", (6, 64), None),
            ("float8_e8m0fnu", (2, 5, 96), 6),
            ("uint8", (64,), None),
            ("uint8", (3, 96), 4),
        ):
            *lead, columns = shape
            codes = random_part("uint8", *lead, columns * (bits or 6) // 8)
            yield self.Args(bits), [codes, random_part(dtype, *lead, columns // GROUP)]


CODEC = Mxfp6()
