"""The arithmetic of e4m3 codes in blocks, in numpy and in torch for the CPU and other devices.

A grid has one entry for each block of rows and columns; a matrix may be a part of a larger one,
[top:, left:], and begin inside a block: its grid begins with that block. Matrices are worked on in
bands that fit a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import frexp
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.spec import BITS
from ..elements.raw import scratch

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..ops.base import Meter

# elements of one step: small enough for a last-level cache, so many that an op takes longer than
# the interpreter's lock to change hands, and than the barrier of torch's threads where an op is
# divided among them
CHUNK = 1 << 20


class Block(NamedTuple):
    """Rows and columns of a block."""

    rows: int
    columns: int


class Band(NamedTuple):
    """Rows of a matrix: some of one row of blocks, or all of `blocks` from row `first` on."""

    rows: slice
    first: int
    blocks: int


def bands(shape: tuple[int, ...], high: int, top: int, size: int) -> Iterator[Band]:
    """A matrix that begins at row `top`, in parts of about `size` elements and at least one row."""
    rows, columns = shape
    step = max(1, size // max(1, columns))
    if step < high:
        # equal parts of a block: a rest would cost as many calls as a whole part
        step = -(-high // -(-high // step))
    at, first = 0, top // high
    while at < rows:
        block = (top + at) // high
        over = (top + at) % high
        blocks = 1 if over else max(1, min(step, rows - at) // high)
        stop = min(at + step, rows, (block + blocks) * high - top)
        yield Band(slice(at, stop), block - first, blocks)
        at = stop


def across(grid: np.ndarray[Any, Any], wide: int, left: int, width: int) -> np.ndarray[Any, Any]:
    """The entries of rows of a grid for `width` columns from column `left` on, which lies in the
    first block.
    """
    import numpy as np

    before = left % wide
    return np.repeat(grid, min(wide, before + width), axis=-1)[..., before : before + width]


def of_rows(
    grid: np.ndarray[Any, Any],
    block: Block,
    top: int,
    left: int,
    rows: slice,
    shape: tuple[int, ...],
) -> np.ndarray[Any, Any]:
    """The entries of a grid for each element of `rows` of a matrix, which are of this shape."""
    import numpy as np

    down = (top + rows.start + rows.step * np.arange(shape[0])) // block.rows - top // block.rows
    return across(grid[down], block.columns, left, shape[1])


def amax(bits: np.ndarray[Any, Any], block: Block) -> np.ndarray[Any, Any]:
    """The largest magnitude in each block, as bits: floats of one sign are ordered as their bits
    are, infinity and NaN on top.

    No pass takes the signs off: the largest of the signed integers is the largest positive number,
    and of the unsigned ones the largest negative one, if there is any.
    """
    import numpy as np

    signed, unsigned = bits.view(f"<i{bits.itemsize}"), bits.view(f"<u{bits.itemsize}")
    found, below = (
        _largest_in_runs(_largest_in_runs(words, 0, block.rows), 1, block.columns)
        for words in (signed, unsigned)
    )
    largest: np.ndarray[Any, Any] = np.maximum(
        found, (below & ((1 << 8 * bits.itemsize - 1) - 1)).view(signed.dtype)
    )
    return largest


def _largest_in_runs(words: np.ndarray[Any, Any], axis: int, length: int) -> np.ndarray[Any, Any]:
    """The largest of each `length` neighbours along an axis; the last run may be shorter."""
    import numpy as np

    if length == 1:
        return words
    size = words.shape[axis]
    whole = size // length * length
    head, rest = np.split(words, [whole], axis) if whole < size else (words, None)
    parts = []
    if whole:
        runs = head.reshape(*words.shape[:axis], whole // length, length, *words.shape[axis + 1 :])
        parts.append(np.maximum.reduce(runs, axis + 1))
    if rest is not None:
        parts.append(np.maximum.reduce(rest, axis, keepdims=True))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


LARGEST = 448.0
# a product of a code that is beyond it becomes infinite, or nearly
MOST = {
    "float32": float.fromhex("0x1.fffffep127"),
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65504.0,
}
# DeepGEMM's floor of a block's largest magnitude
FLOOR = 1e-4
# elements that are looked at for zeros at a time
RUN = 1 << 12
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}


def widened(raw: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Raw elements of float32, bfloat16 or float16 as float32."""
    numbers = raw.astype("<u4") << 16 if dtype == "bfloat16" else raw
    found: np.ndarray[Any, Any] = numbers.view("<f2" if dtype == "float16" else "<f4").astype(
        "<f4", copy=False
    )
    return found


def scales_of(
    amax: np.ndarray[Any, Any], like: str, stored: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(what is stored, in float32; what numbers are multiplied by) for blocks of these largest
    magnitudes (float32).

    deepseek: deep_gemm.utils.math.per_block_cast_to_fp8 (DeepGEMM 54e2261). hf: Fp8Quantize of
    transformers 5.23, but for its power of two, which it takes from a rounded logarithm and this
    from the exponent.
    """
    import numpy as np

    one, largest = np.float32(1), np.float32(LARGEST)
    with np.errstate(all="ignore"):
        if like == "deepseek":
            scale = np.maximum(amax, np.float32(FLOOR)) / largest
        else:
            # 448.0 / amax, as torch divides a number of Python's: rounded twice
            factor = np.where(amax > 0, one / amax * largest, one)
            scale = one / factor
        if stored == "f32":
            return scale, (one / scale if like == "deepseek" else factor)
        bits = scale.view("<i4")
        if stored == "bf16":
            # to the nearest, ties to even; NaN stays as it is
            scale = np.where(
                np.isnan(scale), scale, (bits + (0x7FFF + (bits >> 16 & 1)) & -0x10000).view("<f4")
            )
        else:
            exponents = (bits >> 23) + (bits & 0x7FFFFF != 0)
            powers = (exponents.clip(1, 254) << 23).view("<f4")
            scale = (
                powers
                if like == "deepseek"
                else np.where(np.isfinite(scale), powers, np.float32(np.nan))
            )
        return scale, one / scale


def vanished(magnitudes: np.ndarray[Any, Any], given: np.ndarray[Any, Any]) -> int:
    """How many of `magnitudes` are zero where `given`, integers that begin with a sign, are not."""
    import numpy as np

    made, numbers = magnitudes.reshape(-1), given.reshape(-1)
    # zeros are rare among weights, so that few runs need a second look
    whole = made.size // RUN * RUN
    runs, of = made[:whole].reshape(-1, RUN), numbers[:whole].reshape(-1, RUN)
    at = np.flatnonzero(np.minimum.reduce(runs, 1) == 0)
    rest = _both(made[whole:], numbers[whole:]) if whole < made.size else 0
    if not at.size:
        return rest
    return rest + (_both(runs[at], of[at]) if at.size < len(runs) // 4 else _both(runs, of))


def _both(made: np.ndarray[Any, Any], given: np.ndarray[Any, Any]) -> int:
    """`vanished`, in every element."""
    import numpy as np

    zero = np.equal(made, 0, out=scratch("e4m3 zero", made.size).view("?").reshape(made.shape))
    some = np.not_equal(
        signless("given", given),
        0,
        out=scratch("e4m3 some", made.size).view("?").reshape(made.shape),
    )
    return int(np.count_nonzero(np.logical_and(zero, some, out=some)))


def signless(name: str, raw: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Integers without their highest bit, in this thread's memory of that name."""
    import numpy as np

    # numpy shifts small integers without vectors, but masks with them
    out = scratch(f"e4m3 signless {name}", raw.nbytes).view(raw.dtype).reshape(raw.shape)
    found: np.ndarray[Any, Any] = np.bitwise_and(raw, (1 << 8 * raw.itemsize - 1) - 1, out=out)
    return found


def tell(
    meter: Meter,
    numbers: np.ndarray[Any, Any],
    dtype: str,
    codes: np.ndarray[Any, Any],
    scale: np.ndarray[Any, Any],
    amax: np.ndarray[Any, Any],
    block: Block,
    top: int,
    left: int,
    sampled: slice,
    saturated: int,
    underflowed: int,
    non_finite: int,
) -> None:
    """Tells `meter` the error of the rows `sampled` of a matrix, which `numbers` (raw `dtype`) and
    `codes` are, and how many elements of all rows saturated, became zero, and came back
    infinite or undefined."""
    import numpy as np

    wanted = widened(numbers, dtype)
    with np.errstate(all="ignore"):
        got = _table()[codes] * of_rows(scale, block, top, left, sampled, wanted.shape)
    largest = of_rows(amax, block, top, left, sampled, wanted.shape)
    meter.add(
        wanted,
        got,
        largest,
        saturated=saturated,
        underflowed=underflowed,
        non_finite=non_finite,
        sure=sampled.step == 1,
    )


@cache
def _table() -> np.ndarray[Any, Any]:
    """The numbers of all codes, as float32."""
    import numpy as np

    return values(np.arange(256, dtype="u1")).astype("<f4")


# code by code


def values(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers of e4m3 codes as float64: (-1)^s * 2^(e - 7) * (1 + m / 8), below the smallest
    exponent 2^-6 * m / 8 (OCP OFP8).
    """
    import numpy as np

    exponent, mantissa = (codes >> 3 & 15).astype("i8"), (codes & 7).astype("f8")
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude)


def nearest(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The codes nearest to floats, ties to even; too large ones saturate, NaN is 0x7F."""
    import numpy as np

    known = values(np.arange(0x7F, dtype="u1"))
    magnitude = np.abs(numbers.astype("f8"))
    between = (known[1:] + known[:-1]) / 2
    low, high = (
        np.searchsorted(between, magnitude, "left"),
        np.searchsorted(between, magnitude, "right"),
    )
    # they differ only on a tie, between `low` and the code above
    code: np.ndarray[Any, Any] = np.where((low != high) & (low % 2 == 1), high, low).astype("u1")
    code |= np.signbit(numbers).astype("u1") << 7
    code[np.isnan(numbers)] = 0x7F
    return code


def looked_up(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """As `nearest`, of float32: looked up by the upper 16 bits, the last set if any below is.

    That is rounding to odd. It keeps 8 bits, of which a code has 4, so that rounding again is
    rounding once (Boldo and Melquiond 2008).
    """
    import numpy as np

    bits = np.ascontiguousarray(numbers, "<f4").view("<u4")
    upper = (bits >> 16).astype("<u2")
    upper |= (bits & 0xFFFF) != 0
    found: np.ndarray[Any, Any] = _nearest_by_upper().take(upper)
    return found


@cache
def _nearest_by_upper() -> np.ndarray[Any, Any]:
    """The code of every float32 whose lower 16 bits are zero."""
    import numpy as np

    return nearest((np.arange(1 << 16, dtype="<u4") << 16).view("<f4"))


def power_above(scale: float) -> float:
    """The least power of two that is not below `scale`, within the normal floats."""
    # frexp gives zero the exponent of 1/2
    mantissa, exponent = frexp(max(scale, 2.0**-126))
    return float(2.0 ** min(max(exponent - (mantissa == 0.5), -126), 127))


# what would round beyond the largest code
OVERFLOW = 464.0
CHUNK_OF_DEVICE = 1 << 25
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def _on_cpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def signed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The elements of a tensor of `dtype` as signed integers."""
    import torch

    return tensor.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[BITS[dtype]])


def _vanished(made: torch.Tensor, given: torch.Tensor) -> int:
    """How many of `made` are zero where `given` are not; integers that begin with a sign."""
    if _on_cpu(made):
        return vanished(signless("made", made.numpy()), given.numpy())
    return int(
        (made & ((1 << 8 * made.element_size() - 1) - 1) == 0).logical_and_(given << 1).sum()
    )


def block_amax(bits: torch.Tensor, block: Block, infinity: int | None) -> np.ndarray[Any, Any]:
    """`amax` of signed integers on any device; `infinity` and the bits above it count as zero."""
    import torch

    rows, columns = bits.shape
    out = bits.new_zeros(-(-rows // block.rows), -(-columns // block.columns))
    mask = torch.iinfo(bits.dtype).max
    buffer = _Buffer("magnitudes", str(bits.dtype).removeprefix("torch."), bits)
    for band in _bands(bits, block.rows, 0):
        part = bits[band.rows]
        magnitudes = torch.bitwise_and(part, mask, out=buffer.like(part))
        if infinity is not None:
            magnitudes.masked_fill_(magnitudes >= infinity, 0)
        found = _amax_in_runs(_amax_in_runs(magnitudes, 0, block.rows), 1, block.columns)
        target = out[band.first : band.first + band.blocks]
        torch.maximum(target, found, out=target)
    largest: np.ndarray[Any, Any] = out.cpu().numpy()
    return largest


def _amax_in_runs(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    import torch

    whole = tensor.shape[dim] // length
    parts = []
    if whole:
        parts.append(
            tensor.narrow(dim, 0, whole * length).unflatten(dim, (whole, length)).amax(dim + 1)
        )
    if rest := tensor.shape[dim] - whole * length:
        parts.append(tensor.narrow(dim, whole * length, rest).amax(dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def encode(
    numbers: torch.Tensor,
    scale: np.ndarray[Any, Any],
    factor: np.ndarray[Any, Any],
    block: Block,
    top: int,
    left: int,
    out: torch.Tensor,
    wild: bool,
    count: bool,
    metered: bool,
) -> tuple[int, int, int]:
    """Fills `out` (uint8) with the codes nearest to `numbers * factor`, ties to even.

    `metered`: how many elements saturated, how many became zero, and with `count` how many decode
    to infinity or NaN and were neither; else 0. `numbers` is the part [top:, left:] of the blocks
    that the grids `scale` and `factor` are of; `wild`: a number or a factor may not be finite, and
    only then can anything saturate. NaN becomes 0x7F, or 0xFF where it comes of infinity times
    zero, as x86 makes it.
    """
    import torch

    spread, back = (
        _Spread(torch.from_numpy(grid).to(numbers.device), block, top, left)
        for grid in (factor, scale)
    )
    buffer, coded = _Buffer("floats", "float32", numbers), out.view(torch.float8_e4m3fn)
    given = signed(numbers, str(numbers.dtype).removeprefix("torch."))
    saturated = underflowed = non_finite = 0
    for band in _bands(numbers, block.rows, top):
        part, target = numbers[band.rows], coded[band.rows]
        floats = buffer.like(part)
        floats.copy_(part)
        spread.multiply(floats, band)
        over = None
        if wild:
            over = floats.abs() >= OVERFLOW if metered else None
            floats.clamp_(-LARGEST, LARGEST)
        target.copy_(floats)
        if wild:
            nan = torch.where(part.isnan() | spread.over(part, band).isnan(), 0x7F, 0xFF).to(
                torch.uint8
            )
            out[band.rows] = torch.where(floats.isnan(), nan, out[band.rows])
        if count:
            floats.copy_(target)
            back.multiply(floats, band)
            if over is not None:
                # an infinity may come back as one
                over.logical_and_(part != floats)
            non_finite += int(
                floats.isfinite()
                .logical_not_()
                .logical_and_(part != floats)
                .logical_and_(~part.isnan())
                .sum()
            )
        if over is not None:
            saturated += int(over.sum())
        if metered:
            underflowed += _vanished(
                floats.view(torch.int32) if count else out[band.rows], given[band.rows]
            )
    return saturated, underflowed, non_finite


def _bands(matrix: torch.Tensor, high: int, top: int) -> Iterator[Band]:
    return bands(matrix.shape, high, top, CHUNK if _on_cpu(matrix) else CHUNK_OF_DEVICE)


def _across(grid: torch.Tensor, wide: int, left: int, width: int) -> torch.Tensor:
    import torch

    if _on_cpu(grid):
        return torch.from_numpy(across(grid.numpy(), wide, left, width))
    before = left % wide
    # a gather of single entries takes ten times as long as copies of one
    return (
        grid.unsqueeze(-1)
        .expand(*grid.shape, min(wide, before + width))
        .flatten(-2)[..., before : before + width]
    )


class _Spread:
    """A grid's entries for the elements of a matrix that begins at row `top`, column `left`, where
    the grid begins with its block.
    """

    __slots__ = ("_grid", "_high", "_kept", "_left", "_wide")

    def __init__(self, grid: torch.Tensor, block: Block, top: int, left: int) -> None:
        self._grid, self._high, self._wide, self._left = grid, block.rows, block.columns, left
        self._kept: tuple[int, int, torch.Tensor] | None = None

    def multiply(self, matrix: torch.Tensor, band: Band) -> None:
        """Multiplies the rows `band` of the matrix, contiguous, by their entries."""
        entries = self._entries(matrix, band)
        if band.blocks == 1:
            matrix.mul_(entries)
        else:
            matrix.view(band.blocks, self._high, -1).mul_(entries.unsqueeze(1))

    def over(self, matrix: torch.Tensor, band: Band) -> torch.Tensor:
        """The entries in the shape of `matrix`."""
        entries = self._entries(matrix, band)
        return (
            entries.repeat_interleave(self._high, 0)
            if band.blocks > 1
            else entries.expand(matrix.shape)
        )

    def _entries(self, matrix: torch.Tensor, band: Band) -> torch.Tensor:
        if self._kept is not None and self._kept[:2] == band[1:]:
            return self._kept[2]
        found = _across(
            self._grid[band.first : band.first + band.blocks],
            self._wide,
            self._left,
            matrix.shape[1],
        )
        self._kept = band.first, band.blocks, found
        return found


class _Buffer:
    """Memory for parts of a matrix, reused on the CPU; `words` is the last as 64-bit words."""

    __slots__ = ("_device", "_dtype", "_name", "_part", "_shape", "words")

    def __init__(self, name: str, dtype: str, matrix: torch.Tensor) -> None:
        self._name, self._dtype, self._device = f"e4m3 {name}", dtype, matrix.device
        self._shape: torch.Size | None = None

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """A contiguous part of the shape of `part`; the same memory each time."""
        import torch

        if part.shape != self._shape:
            nbytes = -(-part.numel() * BITS[self._dtype] // 64) * 8
            on_cpu = self._device.type == "cpu"
            flat = (
                torch.from_numpy(scratch(self._name, nbytes))
                if on_cpu
                else torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            )
            self._shape, self.words = part.shape, flat.view(torch.int64)
            self._part = flat.view(getattr(torch, self._dtype))[: part.numel()].view(part.shape)
        return self._part
