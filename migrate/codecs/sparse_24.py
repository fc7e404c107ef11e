"""`sparse-24`: of each four numbers of a row the two that are kept, and a bit for each number that
says which, as compressed-tensors stored weights until 0.14 (sparse-24-bitmask). It is decoded only.

What is kept are numbers, or codes of FP8 or of integers of eight bits with a scale for each row or
for all of them; all others are 0. The mask is the first part: it is one in each of these forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.spec import Spec
from .base import OpError
from .kit.geometry import matrices_of
from .kit.samples import random_part
from .kit.sparse_codec import SparseCodec, compressed_tensors, said_shape
from .kit.two_of_four import random_kept, spread, spread_plainly

if TYPE_CHECKING:
    from ..ops.base import Box


class Sparse24(SparseCodec):
    name = "sparse-24"
    summary = "two of each four numbers or codes of 8 bits, and a bit for each that says which"
    parts = ("mask", "weight", "shape", "scale")
    planning = ("shape",)
    names = (compressed_tensors("[N, K/2]", "[N, M]", "[2, 1] | [2]"),)

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        said = [*said_shape(values["shape"], specs[2])]
        ((rows, columns),) = matrices_of(self.name, {"weight": specs[1]}, ["weight"])
        if said != [rows, 2 * columns]:
            raise OpError(
                "M310",
                f"sparse-24: the shape is {said}, the weight [{rows}, {columns}] half of another",
            )
        return args

    def dense(self, args: Any, specs: Mapping[str, Spec]) -> Spec:
        (rows, half), (down, across) = matrices_of(self.name, specs, ["weight", "mask"])
        weight, mask = specs["weight"], specs["mask"]
        if half % 2 or (down, across) != (rows, -(-half // 4)) or mask.dtype != "uint8":
            raise OpError(
                "M310",
                f"sparse-24: the weight is {list(weight.shape)} and the mask {mask}, not two of "
                "each four numbers of a row, and a bit for each number",
            )
        return Spec(weight.dtype, (rows, 2 * half))

    def kept(self, args: Any, specs: Mapping[str, Spec], box: Box) -> Mapping[str, Box]:
        rows, (low, high) = box
        low, high = low // 8, -(-high // 8)
        stop = min(4 * high, specs["weight"].shape[1])
        return {"mask": (rows, (low, high)), "weight": (rows, (4 * low, stop))}

    def decode_grain(self, args: Any, specs: Sequence[Any], dtype: str) -> tuple[int, ...]:
        return (1, 8)

    def spread(self, args: Any, arrays: Mapping[str, Any], box: Box) -> Any:
        (top, _), (low, high) = box
        dense = spread(arrays["weight"], arrays["mask"], (top, low // 8 * 8))
        return dense[:, low % 8 : high - low // 8 * 8]

    def spread_plainly(self, args: Any, arrays: Mapping[str, Any]) -> Any:
        return spread_plainly(arrays["weight"], arrays["mask"])

    def stored(self) -> Iterable[tuple[Any, list[Any]]]:
        for dtype, rows, columns, scales in (
            ("bfloat16", 6, 40, None),
            ("float16", 3, 12, None),
            ("float8_e4m3fn", 5, 36, (5, 1)),
            ("int8", 4, 64, (1,)),
        ):
            weight, mask, shape = random_kept(dtype, rows, columns)
            yield self.Args(), [mask, weight, shape, scales and random_part("float32", *scales)]


CODEC = Sparse24()
