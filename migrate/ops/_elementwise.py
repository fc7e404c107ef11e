"""What the ops share that compute each element from one element: boxes, chunks, refusals and the
account of errors.

A box is worked on in chunks that stay in a core's cache, so that memory is passed once; on a GPU it
is one chunk, and what is refused is asked for once a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.spec import BITS, Spec
from ..elements.codes import FLOATS, INTEGERS, PARTS
from ..elements.numbers import COMPUTED, is_numpy, module, numbers
from .base import Box, Meter, OpError, ValueOp

if TYPE_CHECKING:
    from .base import Shape

# elements: in cache with its temporaries, and so many that a call takes longer than the
# interpreter's lock to change hands
CHUNK = 1 << 18


class Elementwise(ValueOp):
    """One input, one output of its shape, each element from the element at its place."""

    def needs(self, args: Any, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        return [box]

    def torch(self, args: Any, specs: Sequence[Spec]) -> bool:
        return False

    def chunk(self, args: Any, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        """Fills `out` from `raw`, both contiguous and of rank 1; marks what is refused (None:
        nothing can be).
        """
        raise NotImplementedError

    def refusal(self, args: Any, spec: Spec, value: str, at: str) -> OpError:
        """Why the element `value` at `at`, which may be empty, is refused."""
        raise NotImplementedError

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
        array, spec = arrays[0], specs[0]
        if not is_numpy(array):
            self._whole(args, array, spec, box, out, meter)
            return
        import numpy as np

        with np.errstate(all="ignore"):
            for first, given, made in chunks(array, out):
                refused = self.chunk(args, given, spec, made, meter)
                if refused is not None and refused.any():
                    at = int(refused.argmax())
                    raise self.refusal(
                        args,
                        spec,
                        format_value(given[at : at + 1], spec.dtype),
                        place(first + at, box),
                    )

    def _whole(
        self, args: Any, array: Any, spec: Spec, box: Box, out: Any, meter: Meter | None
    ) -> None:
        given = array.contiguous().reshape(-1)
        made = (
            out.reshape(-1)
            if out.is_contiguous()
            else module(out).empty(out.numel(), dtype=out.dtype, device=out.device)
        )
        refused = self.chunk(args, given, spec, made, meter)
        if refused is not None and bool(refused.any()):
            at = int(refused.nonzero()[0])
            value = given[at : at + 1].cpu().numpy()
            raise self.refusal(args, spec, format_value(value, spec.dtype), place(at, box))
        if not out.is_contiguous():
            out.copy_(made.reshape(out.shape))


def chunks(array: Any, out: Any) -> Iterator[tuple[int, Any, Any]]:
    """(number of the first element, elements, room for results) over a box; rank 1, contiguous."""
    import numpy as np

    if array.flags.c_contiguous and out.flags.c_contiguous:
        flat, room = array.reshape(-1), out.reshape(-1)
        for start in range(0, flat.size, CHUNK):
            yield start, flat[start : start + CHUNK], room[start : start + CHUNK]
        return
    first = 0
    for at in _cuts(array.shape):
        part, target = array[at], out[at]
        made = np.empty(part.size, out.dtype)
        yield first, np.ascontiguousarray(part).reshape(-1), made
        target[...] = made.reshape(part.shape)
        first += part.size


def _cuts(shape: Shape) -> Iterator[tuple[Any, ...]]:
    """Indices that cut `shape` into runs of at most CHUNK, in order; each picks a view."""
    if prod(shape) <= CHUNK:
        yield (...,)
        return
    rows = CHUNK // prod(shape[1:])
    if rows:
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows), ...)
        return
    for row in range(shape[0]):
        for rest in _cuts(shape[1:]):
            yield (slice(row, row + 1), *rest)


def place(number: int, box: Box) -> str:
    """The index of element `number` of `box` as messages say it: " at [3, 0]", "" for a scalar."""
    at = []
    for start, stop in reversed(box):
        number, rest = divmod(number, stop - start)
        at.append(start + rest)
    return f" at [{', '.join(map(str, reversed(at)))}]" if at else ""


def format_value(raw: Any, dtype: str) -> str:
    """One raw element, an array of one, as messages print its value."""
    if dtype in PARTS:
        real, imaginary = numbers(raw.reshape(-1).view(f"<u{BITS[dtype] // 16}"), PARTS[dtype])
        return f"{real} + {imaginary}j"
    if dtype in FLOATS:
        return repr(float(numbers(raw, dtype)[0]))
    if dtype == "bool":
        return f"byte {int(raw[0])}"
    return str(int(raw.view(f"<{'i' if INTEGERS[dtype][0] < 0 else 'u'}{raw.dtype.itemsize}")[0]))


def only_floats(op: str, specs: Sequence[Spec]) -> None:
    """OpError M309 unless all dtypes are among those that rules compute with."""
    for spec in specs:
        if spec.dtype not in COMPUTED:
            raise OpError(
                "M309",
                f"{op} computes with {', '.join(COMPUTED)}, not with {spec}",
                help="write `cast` before it, or `dequantize` where the numbers are stored in "
                "parts",
            )


def tell(meter: Meter | None, wanted: Any, got: Any, dtype: str, sure: bool = True) -> None:
    """Tells `meter`, if there is one, what became of the numbers `wanted` in `dtype`. `sure`: they
    are not rounded themselves.

    Rounded to float64 they are no measure of float64: overflows are counted, that is all.
    """
    if meter is None:
        return
    if dtype == "float64" and not sure:
        lost = int((~module(got).isfinite(got) & module(wanted).isfinite(wanted)).sum())
        meter.add(wanted[:0], got[:0], saturated=lost, non_finite=lost, sure=False)
        return
    saturated = underflowed = 0
    if dtype in FLOATS:
        size = abs(wanted)
        over = size > FLOATS[dtype].largest
        saturated = int((over & (size < float("inf"))).sum()) if over.any() else 0
    zero = got == 0
    if zero.any():
        underflowed = int((zero & (wanted != 0)).sum())
    meter.add(wanted, got, saturated=saturated, underflowed=underflowed, sure=sure)


def measured_slices(x: Any) -> Iterator[slice]:
    """The parts that a meter has float64 images of: they fit a core's cache. On a GPU it is all."""
    step = CHUNK // 8 if is_numpy(x) else max(1, x.shape[0])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def differ(wanted: Any, got: Any) -> bool:
    """Whether some of the numbers are not those that were wanted. A NaN is any other."""
    for w, g in ((wanted[:256], got[:256]), (wanted, got)):
        other = w != g
        if bool(other.any()) and bool((other & ((w == w) | (g == g))).any()):
            return True
    return False


def bounded(y: Any, where: Any) -> Any:
    """float64 results; overflows of numbers that were finite at `where` are the largest number."""
    m, largest = module(y), FLOATS["float64"].largest
    return m.where(where, m.nan_to_num(y, nan=largest, posinf=largest, neginf=-largest), y)
