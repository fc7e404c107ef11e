"""`bnb-int8`: integers of eight bits with the largest magnitude of each row, as bitsandbytes stores
LLM.int8() weights. It is decoded only.

A number is (code * scale) * (1 / 127), each step in float32, `scale` being `SCB`. Codes in
the order of a kernel, which the part `format` tells of, are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.spec import Spec
from .base import Convention, OpError, Text, dataclass
from .kit.arguments import scales_arg
from .kit.codec import LayoutCodec
from .kit.geometry import matrices_of
from .kit.layout import Grid, NumberLayout, plain, signed, times
from .kit.samples import bytes_part, random_part

# 1 / 127 in float32
OVER_127 = float.fromhex("0x1.020408p-7")


class BnbInt8(LayoutCodec):
    name = "bnb-int8"
    summary = "integers of 8 bits with the largest magnitude of each row"
    parts = ("weight", "scale", "format")
    optional = ("format",)
    planning = ("format",)
    names = (
        Convention(
            "bitsandbytes",
            {
                "weight": "{w}.weight int8 [N, K]",
                "scale": "{w}.SCB float32 [N]",
                "format": "{w}.weight_format? uint8 [] | [1]",
            },
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        non_finite: Text = scales_arg(zeros=True)

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        found = values.get("format", b"\0")
        if found != b"\0":
            raise OpError(
                "M310",
                f"bnb-int8: the format is {list(found[:4])}, codes are read of [0] alone: in rows",
                help="these are in the order of a kernel; bitsandbytes 0.50 refuses them too",
            )
        return args

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        matrices_of(self.name, specs, ["weight"])
        checked = args.non_finite != "keep"
        scale = Grid("scale", (1, 0), dtypes=("float32",), positive=checked, zeros=True)
        codes = plain("int8")
        return NumberLayout(self.name, signed(8), codes, times(scale), after=OVER_127, axes=2)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for shape, form in (((6, 96), bytes_part(b"\0")), ((5, 33), None)):
            yield self.Args(), [random_part("int8", *shape), random_part("float32", shape[0]), form]


CODEC = BnbInt8()
