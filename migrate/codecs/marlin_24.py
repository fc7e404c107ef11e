"""`marlin-24`: integers of four or eight bits, of each four numbers of a row the two that are kept,
in the order of vLLM's kernel Marlin, as compressed-tensors stored weights until 0.14, without a
way to read them. It is decoded only.

A number is (code - middle) * scale of its row, or of its group of 128 columns. How many bits a code
has and how many columns share a scale follows from the shapes (`kit.marlin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from .kit import marlin
from .kit.geometry import geometry
from .kit.layout import Grid, NumberLayout, plain, signed, times
from .kit.sparse_codec import SparseCodec

if TYPE_CHECKING:
    from ..ops.base import Box

PARTS = {
    "weight": "{w}.weight_packed int32 [K/32, N*bits/2]",
    "scale": "{w}.scale_packed wide [K/group, N]",
    "meta": "{w}.meta int16 [K/32, 2*N]",
}


class Marlin24(SparseCodec):
    name = "marlin-24"
    summary = "two of each four integers of 4 or 8 bits in the order of the kernel Marlin"
    parts = tuple(PARTS)
    optional = ()
    rows = marlin.ROWS
    names = (Convention("compressed-tensors", PARTS, beside=ACTIVATIONS),)

    def dense(self, args: Any, specs: Mapping[str, Spec]) -> Spec:
        return Spec("int8", marlin.size_stored(self.name, specs))

    def scaled(self, args: Any, specs: Mapping[str, Spec]) -> tuple[NumberLayout, dict[str, Spec]]:
        dense, scale = self.dense(args, specs), specs["scale"]
        group = marlin.group_of(scale.shape[0], dense.shape[1])
        grid = Grid("scale", (1, group), transposed=True, positive=args.non_finite != "keep")
        layout = NumberLayout(self.name, signed(8), plain("int8"), times(grid), axes=2)
        return layout, {"weight": dense, "scale": scale}

    def kept(self, args: Any, specs: Mapping[str, Spec], box: Box) -> Mapping[str, Box]:
        (top, bottom), down = marlin.tiles_of(box)
        words = specs["weight"].shape[1] // specs["scale"].shape[1]
        groups, _ = geometry(*self.scaled(args, specs)).needs(box)["scale"]
        return {
            "weight": (down, (top * words, bottom * words)),
            "scale": (groups, (top, bottom)),
            "meta": (down, (2 * top, 2 * bottom)),
        }

    def decode_grain(self, args: Any, specs: Any, dtype: str) -> tuple[int, ...]:
        return (marlin.ROWS, marlin.NUMBERS)

    def spread(self, args: Any, arrays: Mapping[str, Any], box: Box) -> Any:
        return marlin.spread(arrays["weight"], arrays["meta"], box)

    def spread_plainly(self, args: Any, arrays: Mapping[str, Any]) -> Any:
        return marlin.spread_plainly(arrays["weight"], arrays["meta"])

    def entries(self, args: Any, specs: Mapping[str, Spec], scale: Any, box: Box) -> Any:
        low, high = (row - box[0][0] // marlin.ROWS * marlin.ROWS for row in box[0])
        return marlin.in_turn(scale, specs["scale"])[:, low:high]

    def entries_plainly(self, args: Any, specs: Mapping[str, Spec], scale: Any) -> Any:
        return marlin.in_turn_plainly(scale)

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for shape in ((4, 64, 384, 3), (4, 128, 96, 1), (8, 128, 256, 2), (8, 64, 512, 4)):
            yield self.Args(), marlin.random_tiles(*shape)


CODEC = Marlin24()
