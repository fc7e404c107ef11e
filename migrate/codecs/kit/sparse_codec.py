"""A codec of numbers, or of codes, of which only some are stored, and a part that says which; all
others are 0.

Codes have a scale for each row or for all. What a codec adds is where kept elements go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.part_names import ACTIVATIONS, Convention
from ...core.spec import Spec
from ..base import ACTIVATION_SCALES, Codec, OpError, Text, dataclass
from .arguments import scales_arg
from .geometry import decoded, geometry
from .layout import FLOATS, Grid, NumberLayout, floats, plain, signed, times

if TYPE_CHECKING:
    from ...ops.base import Box, Meter

CODES = {"float8_e4m3fn": floats("float8_e4m3fn"), "int8": signed(8)}


class SparseCodec(Codec):
    """A codec of kept elements (`weight`), maybe with a `scale`; decoded only."""

    optional: ClassVar[tuple[str, ...]] = ("scale",)
    unused = ACTIVATION_SCALES
    # rows of a matrix that parts can be cut between
    rows: ClassVar[int] = 1

    @dataclass(frozen=True, slots=True)
    class Args:
        non_finite: Text = scales_arg()

    def dense(self, args: Any, specs: Mapping[str, Spec]) -> Spec:
        """The weight with what is left out. OpError where parts do not fit each other."""
        raise NotImplementedError

    def kept(self, args: Any, specs: Mapping[str, Spec], box: Box) -> Mapping[str, Box]:
        """The boxes of parts that a box of the numbers comes from, of those that are read for it;
        the scale may be left to its layout.
        """
        raise NotImplementedError

    def spread(self, args: Any, arrays: Mapping[str, Any], box: Box) -> Any:
        """The elements of a box: kept ones, and 0."""
        raise NotImplementedError

    def entries(self, args: Any, specs: Mapping[str, Spec], scale: Any, box: Box) -> Any:
        """The entries of the scale that a box of the numbers has, as the layout wants them."""
        return scale

    def entries_plainly(self, args: Any, specs: Mapping[str, Spec], scale: Any) -> Any:
        """All entries of the scale, as the layout wants them, in numpy, written a second time."""
        return scale

    def spread_plainly(self, args: Any, arrays: Mapping[str, Any]) -> Any:
        """`spread` of whole parts in numpy, written a second time."""
        raise NotImplementedError

    def decoded(self, args: Any, specs: Sequence[Any], dtype: str) -> Spec:
        there = self.by_role(specs)
        dense = self.dense(args, there)
        if "scale" in there:
            return decoded(*self.scaled(args, there), dtype)
        if dense.dtype not in FLOATS or dense.dtype != dtype:
            wanted = "a scale" if dense.dtype in CODES else f"`dtype: {dense.dtype}`"
            raise OpError("M303", f"{self.name}: the weight is {dense.dtype}, which needs {wanted}")
        return dense

    def decode_needs(self, args: Any, specs: Sequence[Any], box: Box) -> Sequence[Box | None]:
        there = self.by_role(specs)
        needed = dict(self.kept(args, there, box))
        if "scale" in there and "scale" not in needed:
            needed["scale"] = geometry(*self.scaled(args, there)).needs(box)["scale"]
        # of a part that says something while planning nothing is read any more
        return [
            None if spec is None else needed.get(role, ((0, 0),) * len(spec.shape))
            for role, spec in zip(self.parts, specs, strict=True)
        ]

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
        from .decoding import decode

        there, held = self.by_role(specs), self.by_role(arrays)
        dense = self.spread(args, held, box)
        if "scale" not in there:
            out[...] = dense
            return
        layout, codes = self.scaled(args, there)
        entries = self.entries(args, there, held["scale"], box)
        decode(layout, codes, {"weight": dense, "scale": entries}, dtype, box, out, meter)

    def exact(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        return "scale" not in self.by_role(specs)

    def reference(self, args: Any, arrays: Sequence[Any], specs: Sequence[Any], dtype: str) -> Any:
        from .reference import reference

        there, held = self.by_role(specs), self.by_role(arrays)
        dense = self.spread_plainly(args, held)
        if "scale" not in there:
            return dense
        layout, codes = self.scaled(args, there)
        entries = self.entries_plainly(args, there, held["scale"])
        return reference(layout, codes, {"weight": dense, "scale": entries}, dtype)

    def reference_rows(self, args: Any, specs: Sequence[Any]) -> int | None:
        # a vector is one row
        return self.rows if len(self.dense(args, self.by_role(specs)).shape) > 1 else None

    def by_role(self, items: Sequence[Any]) -> dict[str, Any]:
        """role -> what there is of each part."""
        return {r: i for r, i in zip(self.parts, items, strict=True) if i is not None}

    def scaled(self, args: Any, specs: Mapping[str, Spec]) -> tuple[NumberLayout, dict[str, Spec]]:
        """The layout of the codes with those that are left out, and its parts."""
        dense, scale = self.dense(args, specs), specs["scale"]
        if dense.dtype not in CODES:
            raise OpError(
                "M303", f"{self.name}: the weight is {dense.dtype}, of which nothing has a scale"
            )
        grid = Grid("scale", (int(scale.numel > 1), 0), positive=args.non_finite != "keep")
        codes = CODES[dense.dtype]
        layout = NumberLayout(self.name, codes, plain(dense.dtype), times(grid), axes=2)
        return layout, {"weight": dense, "scale": scale}


def compressed_tensors(
    weight: str, mask: str, shape: str, under: str = "", **more: str
) -> Convention:
    """What compressed-tensors calls the parts; `under`: what stands before the names of all but the
    scale.
    """
    return Convention(
        "compressed-tensors",
        {
            "mask": f"{{w}}{under}.bitmask uint8 {mask}",
            "weight": f"{{w}}{under}.compressed {weight}",
            "shape": f"{{w}}{under}.shape int64 {shape}",
            **{role: f"{{w}}{under}.{text}" for role, text in more.items()},
            "scale": "{w}.weight_scale? wide [N, 1] | [1]",
        },
        beside=ACTIVATIONS,
    )


def said_shape(value: bytes, spec: Spec) -> tuple[int, ...]:
    """The lengths that the bytes of the part `shape` say."""
    width = max(len(value) // max(spec.numel, 1), 1)
    starts = range(0, len(value), width)
    return tuple(int.from_bytes(value[i : i + width], "little", signed=True) for i in starts)
