"""`sparse-24`: of each four numbers of a row the two that are kept, and a bit for each number that
says which, as compressed-tensors stored weights until 0.14 (sparse-24-bitmask). It is decoded only.

What is kept are numbers, or codes of FP8 or of integers of eight bits with a scale for each row or
for all of them; all others are 0. The mask is the first part: it is one in each of these forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Codec, OpError, Text, dataclass
from .kit.arguments import scales_arg
from .kit.geometry import decoded, geometry, matrices_of
from .kit.layout import FLOATS, Grid, NumberLayout, floats, plain, signed, times
from .kit.samples import random_part
from .kit.two_of_four import random_kept, spread, spread_plainly

if TYPE_CHECKING:
    from ..ops.base import Box, Meter

CODES = {"float8_e4m3fn": floats("float8_e4m3fn"), "int8": signed(8)}


class Sparse24(Codec):
    name = "sparse-24"
    summary = "two of each four numbers or codes of 8 bits, and a bit for each that says which"
    parts = ("mask", "weight", "shape", "scale")
    optional = ("scale",)
    planning = ("shape",)
    unused = ACTIVATION_SCALES
    names = (
        Convention(
            "compressed-tensors",
            {
                "mask": "{w}.bitmask uint8 [N, K/8]",
                "weight": "{w}.compressed [N, K/2]",
                "shape": "{w}.shape int64 [2, 1] | [2]",
                "scale": "{w}.weight_scale? wide [N, 1] | [1]",
            },
            beside=ACTIVATIONS,
        ),
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        non_finite: Text = scales_arg()

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        size = len(values["shape"]) // 2
        said = [int.from_bytes(values["shape"][i : i + size], "little") for i in (0, size)]
        ((rows, columns),) = matrices_of(self.name, {"weight": specs[1]}, ["weight"])
        if said != [rows, 2 * columns]:
            raise OpError(
                "M310",
                f"sparse-24: the shape is {said}, the weight [{rows}, {columns}] half of another",
            )
        return args

    def decoded(self, args: Any, specs: Sequence[Any], dtype: str) -> Spec:
        mask, weight, _, scale = specs
        (rows, half), (down, across) = matrices_of(
            self.name, {"weight": weight, "mask": mask}, ["weight", "mask"]
        )
        if half % 2 or (down, across) != (rows, -(-half // 4)) or mask.dtype != "uint8":
            raise OpError(
                "M310",
                f"sparse-24: the weight is {list(weight.shape)} and the mask {mask}, not two of "
                "each four numbers of a row, and a bit for each number",
            )
        if scale is not None:
            layout, there = self._dense(args, specs)
            return decoded(layout, there, dtype)
        if weight.dtype not in FLOATS or weight.dtype != dtype:
            wanted = "a scale" if weight.dtype in CODES else f"`dtype: {weight.dtype}`"
            raise OpError("M303", f"sparse-24: the weight is {weight.dtype}, which needs {wanted}")
        return Spec(dtype, (rows, 2 * half))

    def decode_needs(self, args: Any, specs: Sequence[Any], box: Box) -> Sequence[Box | None]:
        rows, (low, high) = box
        low, high = low // 8, -(-high // 8)
        needed = (rows, (low, high)), (rows, (4 * low, min(4 * high, specs[1].shape[1])))
        nothing = ((0, 0),) * len(specs[2].shape)
        if specs[3] is None:
            return [*needed, nothing, None]
        return [*needed, nothing, geometry(*self._dense(args, specs)).needs(box)["scale"]]

    def decode_grain(self, args: Any, specs: Sequence[Any], dtype: str) -> tuple[int, ...]:
        return (1, 8)

    def decode(
        self,
        args: Any,
        arrays: Sequence[Any],
        specs: Sequence[Any],
        dtype: str,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        from .kit.decoding import decode

        (top, _), (low, high) = box
        dense = spread(arrays[1], arrays[0], (top, low // 8 * 8))[:, low % 8 : high - low // 8 * 8]
        if specs[3] is None:
            out[...] = dense
            return
        layout, there = self._dense(args, specs)
        decode(layout, there, {"weight": dense, "scale": arrays[3]}, dtype, box, out, meter)

    def exact(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        return specs[3] is None

    def reference(self, args: Any, arrays: Sequence[Any], specs: Sequence[Any], dtype: str) -> Any:
        from .kit.reference import reference

        dense = spread_plainly(arrays[1], arrays[0])
        if specs[3] is None:
            return dense
        layout, there = self._dense(args, specs)
        return reference(layout, there, {"weight": dense, "scale": arrays[3]}, dtype)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for dtype, rows, columns, scales in (
            ("bfloat16", 6, 40, None),
            ("float16", 3, 12, None),
            ("float8_e4m3fn", 5, 36, (5, 1)),
            ("int8", 4, 64, (1,)),
        ):
            weight, mask, shape = random_kept(dtype, rows, columns)
            yield self.Args(), [mask, weight, shape, scales and random_part("float32", *scales)]

    def _dense(self, args: Any, specs: Sequence[Any]) -> tuple[NumberLayout, dict[str, Spec]]:
        """The layout of the codes with those that are left out, and its parts."""
        _, weight, _, scale = specs
        if weight.dtype not in CODES:
            raise OpError(
                "M303", f"sparse-24: the weight is {weight.dtype}, of which nothing has a scale"
            )
        grid = Grid("scale", (int(scale.numel > 1), 0), positive=args.non_finite != "keep")
        codes = CODES[weight.dtype]
        layout = NumberLayout(self.name, codes, plain(weight.dtype), times(grid), axes=2)
        dense = Spec(weight.dtype, (weight.shape[0], 2 * weight.shape[1]))
        return layout, {"weight": dense, "scale": scale}


CODEC = Sparse24()
