"""`lora_merge`: base + alpha / rank * (b @ a), a low-rank adapter made part of its weight.

Decisions: sums and products are taken in float64 and the result is rounded once, so that it is the
correctly rounded one but for sums within r * 2^-53 * sum |b||a| of half way; merging in the dtype
of the weights, as training libraries do, rounds up to r times. Libraries add in different orders,
so a GPU is not promised the CPU's bits. On one machine the bits do not depend on the boxes that are
asked for: products are made on a fixed grid of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.spec import Spec, spec
from ..elements.numbers import as_kind, encode, is_numpy, module, numbers, put
from ._elementwise import bounded, only_floats, tell
from .base import (
    Array,
    Box,
    Integer,
    Loss,
    Meter,
    Number,
    OneWay,
    OpError,
    Shape,
    ValueOp,
    arg,
    dataclass,
    format_shape,
)

ROWS, COLUMNS = 64, 1024


class LoraMerge(ValueOp):
    kind = "join"
    summary = "adds alpha / rank * (b @ a) to `base`; without `a` and `b`, `base` stays as it is"
    same_bits = False

    @dataclass(frozen=True, slots=True)
    class Args:
        alpha: Number = arg("the adapter's scale, before it is divided by `rank`", finite=True)
        rank: Integer = arg("the adapter's rank: the rows of `a` and the columns of `b`", least=1)

    def roles(self, codec: str = "") -> tuple[str, ...]:
        return ("base", "a", "b")

    def passes(self, args: Args, specs: Sequence[Spec]) -> bool:
        return len(specs) == 1

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        self.validate(args)
        base = specs[0]
        if len(specs) == 2:
            raise OpError(
                "M207",
                f"lora_merge: role {_missing(args, specs)} is missing: beside base, {base}, there "
                f"is only {specs[1]}",
                help="an adapter is both `a` and `b`; a weight without an adapter has neither",
            )
        only_floats("lora_merge", specs)
        if len(specs) == 1:
            return [base]
        a, b = specs[1:]
        said = (
            f"base is {format_shape(base.shape)}, a is {format_shape(a.shape)}, "
            f"b is {format_shape(b.shape)}"
        )
        if any(len(s.shape) != 2 for s in specs):
            raise OpError(
                "M304",
                f"lora_merge: {said}; each must have two axes",
                help="`rearrange` or `reshape` before it",
            )
        if (b.shape[0], a.shape[1]) != base.shape or a.shape[0] != b.shape[1]:
            raise OpError(
                "M301", f"lora_merge: {said}; they must be [out, in], [r, in] and [out, r]"
            )
        if a.shape[0] != args.rank:
            raise OpError(
                "M301", f"lora_merge: {said}: the rank is {a.shape[0]}, `rank` says {args.rank}"
            )
        return [spec(base.dtype, base.shape)]

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def loss_on(self, args: Args, specs: Sequence[Spec]) -> Loss:
        return Loss.LOSSLESS if len(specs) == 1 else Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OneWay:
        return OneWay(
            "a merged adapter cannot be separated from its weight",
            "keep the adapter beside the merged weights",
        )

    def needs(self, args: Args, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        if len(specs) == 1:
            return [box]
        (start, stop), rank = box[0], specs[1].shape[0]
        rows = (start // ROWS * ROWS, min(-(-stop // ROWS) * ROWS, specs[0].shape[0]))
        return [box, ((0, rank), (0, specs[1].shape[1])), (rows, (0, rank))]

    def grain(self, args: Args, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        return (ROWS, COLUMNS)

    def compute(
        self,
        args: Any,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        if len(specs) == 1:
            out[...] = arrays[0]
            return
        import numpy as np

        with np.errstate(all="ignore"):
            self._tiles(args, arrays, specs, box, out, meter)

    def _tiles(
        self,
        args: Args,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        box: Box,
        out: Any,
        meter: Meter | None,
    ) -> None:
        base, a, b = arrays
        (top, bottom), (left, right) = box
        dtype, first = specs[0].dtype, top // ROWS * ROWS
        wide_a, wide_b = _wide(a, specs[1].dtype), _wide(b, specs[2].dtype)
        for start, stop in _grid(top, bottom, ROWS):
            upper, lower = max(start, top), min(stop, bottom)
            for low, high in _grid(left, right, COLUMNS):
                product = wide_b[start - first : stop - first] @ wide_a[:, low:high]
                near, far = max(low, left), min(high, right)
                place = slice(upper - top, lower - top), slice(near - left, far - left)
                delta = product[upper - start : lower - start, near - low : far - low] * (
                    args.alpha / args.rank
                )
                wide = _wide(base[place], dtype)
                y = _put(wide + delta, dtype, out[place])
                if meter is not None:
                    of_b, of_a = wide_b[upper - first : lower - first], wide_a[:, near:far]
                    finite = module(y).isfinite
                    if not finite(y).all():
                        y = bounded(
                            y, finite(wide) & finite(of_b).all(1)[:, None] & finite(of_a).all(0)
                        )
                    sure = not (args.alpha and bool(of_b.any()) and bool(of_a.any()))
                    tell(meter, y, _wide(out[place], dtype), dtype, sure)

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        from ..elements.reference import quiet, reference_values, rounded

        if len(arrays) == 1:
            return [arrays[0]]
        base, a, b = (reference_values(x, d) for x, d in zip(arrays, dtypes, strict=True))
        with np.errstate(all="ignore"):
            total = np.zeros(base.shape)
            for k in range(args.rank):
                # each product of floats of at most 32 bits is exact in float64
                total += b[:, k, None] * a[k]
            y = base + total * (args.alpha / args.rank)
            return [
                np.where(np.isnan(y), arrays[0].dtype.type(quiet(dtypes[0])), rounded(y, dtypes[0]))
            ]

    def slack(self, args: Args, arrays: Sequence[Array], dtypes: Sequence[str] = ()) -> list[Array]:
        """What sums of r + 2 float64 numbers may differ by when they are added in two orders, and
        one unit in the last place.
        """
        import numpy as np

        from ..elements.reference import reference_values, spacing

        if len(arrays) == 1:
            return [np.zeros(arrays[0].shape)]
        base, a, b = (np.abs(reference_values(x, d)) for x, d in zip(arrays, dtypes, strict=True))
        with np.errstate(all="ignore"):
            most = base + abs(args.alpha / args.rank) * (b @ a)
            made = np.abs(reference_values(self.eager(args, arrays, dtypes=dtypes)[0], dtypes[0]))
            between = 2 * (args.rank + 2) * 2.0**-53 * most
            return [between + spacing(made + between, dtypes[0])]

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"alpha": 16, "rank": 4}, [(6, 5), (4, 5), (6, 4)]
        yield {"alpha": 1, "rank": 3}, [(70, 1030), (3, 1030), (70, 3)]
        yield {"alpha": 8, "rank": 2}, [(3, 4)]


def _missing(args: Any, specs: Sequence[Spec]) -> str:
    """Which of a and b the one that is there is not; both names where its shape fits either."""
    shape, base = specs[1].shape, specs[0].shape
    is_a, is_b = (shape == pair for pair in ((args.rank, *base[1:]), (*base[:1], args.rank)))
    return "b" if is_a and not is_b else "a" if is_b and not is_a else "a or b"


def _grid(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """The tiles of the grid that the range touches."""
    for at in range(start // size * size, stop, size):
        yield at, at + size


def _wide(raw: Any, dtype: str) -> Any:
    return as_kind(numbers(_plain(raw), dtype), "f8").reshape(raw.shape)


def _plain(raw: Any) -> Any:
    return (raw if is_numpy(raw) else raw.contiguous()).reshape(-1)


def _put(y: Any, dtype: str, out: Any) -> Any:
    """Rounds float64 numbers into `out`; the numbers."""
    y = module(y).where(y != y, float("nan"), y)
    put(encode(y.reshape(-1), dtype)[0].reshape(out.shape), out)
    return y


OP = LoraMerge()
