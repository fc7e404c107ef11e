"""`sparse-bitmask`: the numbers of a tensor that are not 0, row by row, where each row begins among
them, and a bit for each number that says whether it is there, as compressed-tensors stored weights
until 0.14. It is decoded only.

Before 0.9 it stored all weights so, those of norms too: a vector is one row. Codes of FP8 or of
integers of eight bits have a scale for each row or for all. Where rows begin is read while
planning: from it follow the elements that a box of rows needs, and it must fit the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.spec import Spec
from .base import dataclass
from .kit import bit_masks as masks
from .kit.samples import random_part
from .kit.sparse_codec import SparseCodec, compressed_tensors, said_shape

if TYPE_CHECKING:
    from ..ops.base import Box


class SparseBitmask(SparseCodec):
    name = "sparse-bitmask"
    summary = "numbers or codes of 8 bits that are not 0, and a bit for each that says which"
    parts = ("mask", "weight", "shape", "offsets", "scale")
    planning = ("shape", "offsets")
    # a row has eight: those of 262,144
    most_planned = 2 << 20
    # 0.8 put the name of the weight before that of each part
    names = tuple(
        compressed_tensors("[Z]", mask, size, under, offsets=f"row_offsets int64 {rows}")
        for under in ("", ".weight")
        for mask, size, rows in (("[N, M]", "[2]", "[N]"), ("[M]", "[1]", "[]"))
    )

    @dataclass(frozen=True, slots=True)
    class Placed(SparseCodec.Args):
        """Arguments for numbers of a shape and for rows that were read."""

        size: tuple[int, ...] = ()
        offsets: masks.RowOffsets = masks.RowOffsets(b"", 0)

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        there = self.by_role(specs)
        size = said_shape(values["shape"], there["shape"])
        rows = masks.rows_stored(self.name, size, there, values["offsets"])
        return self.Placed(args.non_finite, size, rows)

    def dense(self, args: Any, specs: Mapping[str, Spec]) -> Spec:
        return Spec(specs["weight"].dtype, (*specs["mask"].shape[:-1], args.size[-1]))

    def kept(self, args: Any, specs: Mapping[str, Spec], box: Box) -> Mapping[str, Box]:
        across = (0, specs["mask"].shape[-1])
        return {"mask": (*box[:-1], across), "weight": (args.offsets.side(*masks.rows_of(box)),)}

    def decode_grain(self, args: Any, specs: Sequence[Any], dtype: str) -> tuple[int, ...]:
        return (1, max(args.size[-1], 1))[-len(args.size) :]

    def spread(self, args: Any, arrays: Mapping[str, Any], box: Box) -> Any:
        return masks.spread_rows(arrays["weight"], arrays["mask"], args.offsets, args.size[-1], box)

    def spread_plainly(self, args: Any, arrays: Mapping[str, Any]) -> Any:
        return masks.rows_plainly(arrays["weight"], arrays["mask"], args.size[-1])

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for dtype, shape, scales in (
            ("bfloat16", (7, 37), None),
            ("float16", (3, 16), None),
            ("float32", (13,), None),
            ("float8_e4m3fn", (5, 33), (5, 1)),
            ("int8", (4, 64), (1,)),
        ):
            scale = scales and random_part("float32", *scales)
            yield self.Args(), [*masks.random_rows(dtype, shape), scale]


CODEC = SparseBitmask()
