"""`int4-rows`: ModelOpt's integers of four bits, two rows of codes in one of bytes, with a scale
for each group of a row. They are only decoded.

Codes are in two's complement, those of even rows in the low halves. AWQ has divided columns by what
inputs are multiplied by, `pre_quant_scale` [K], and decoding undoes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.part_names import ACTIVATIONS, OF_INPUTS, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Integer, Text, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.groups import group_arg, group_stored
from .kit.layout import Grid, NumberLayout, Packing, signed, times
from .kit.samples import random_part


class Int4Rows(LayoutCodec):
    name = "int4-rows"
    summary = "integers of 4 bits, two rows in one of bytes, with a scale for each group"
    parts = ("weight", "scale", OF_INPUTS)
    optional = (OF_INPUTS,)
    unused = ACTIVATION_SCALES
    recodes = True
    names = (
        Convention(
            "ModelOpt",
            {
                "weight": "{w}.weight uint8 [*, N/2, K]",
                "scale": "{w}.weight_scale wide [*, N, K/group]",
            },
            beside=ACTIVATIONS,
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        group: Integer | None = group_arg()
        non_finite: Text = scales_arg()

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        weight, scale, group = specs["weight"], specs["scale"], args.group
        if group is None and weight.shape:
            group = group_stored(self.name, weight.shape[-1], scale)
        grid = Grid("scale", (1, group or 0), positive=args.non_finite != "keep")
        terms = times(grid)
        if OF_INPUTS in specs:
            terms += times(Grid(OF_INPUTS, (0, 1), False, finite=grid.positive))
        return NumberLayout(self.name, signed(4), Packing(4, axis=-2), terms, axes=2)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for rows, columns, groups in ((4, 64, 2), (3, 70, 1)):
            scale = random_part("float16", 2 * rows, groups)
            yield self.Args(), [random_part("uint8", rows, columns), scale, None]
        stack, inputs = random_part("float16", 2, 6, 3), random_part("bfloat16", 96)
        yield self.Args(32), [random_part("uint8", 2, 3, 96), stack, None]
        scale = random_part("float16", 8, 3)
        yield self.Args(non_finite="keep"), [random_part("uint8", 4, 96), scale, inputs]


CODEC = Int4Rows()
