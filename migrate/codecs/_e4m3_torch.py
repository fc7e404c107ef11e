"""The arithmetic of e4m3 codes in blocks in torch, for the CPU and other devices.

Decoding on the CPU never calls torch's e4m3 cast, which takes one code at a time: a code shifted
left by seven is the float16 with the same bits and 2^-8 of its value, subnormals included, so that
integer ops and the processor's float16 conversion decode it, and the missing 2^8 goes into the
scale. NaN codes have no such twin, and some scales no 2^8 to spare; what holds them takes a longer
way. Work goes in chunks through buffers that are kept.

NaN comes out as one quiet NaN: which sign and payload a product would have depends on the
processor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..core.spec import BITS
from ..elements.raw import scratch, typed
from . import _blocks
from ._blocks import Band, Block
from ._e4m3 import LARGEST, NAN, signless, vanished

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ..ops.base import Meter

# what would round beyond the largest code
OVERFLOW = 464.0
CHUNK_OF_DEVICE = 1 << 25
# the least number, below which a product may become zero
LEAST = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}
# the least number that a code but those of zero stands for
STEP = 2.0**-9
# scales below it can take the 2^8 that a shifted code lacks
ORDINARY = 2.0**119
# four shifted codes without what sign extension and their neighbours left beside them
_SHIFTED = 0xBF80BF80BF80BF80 - (1 << 64)
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def _on_cpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.device.type == "cpu")


def signed(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """The elements of a tensor of `dtype` as signed integers."""
    import torch

    return tensor.view({8: torch.int8, 16: torch.int16, 32: torch.int32}[BITS[dtype]])


def as_float(scale: Any, dtype: str) -> torch.Tensor:
    """Raw elements of float32, bfloat16 or e8m0 as float32; a byte of e8m0 is the exponent of a
    power of two, 255 is NaN.
    """
    import torch

    if dtype == "float32":
        return typed(scale, dtype)
    if dtype == "bfloat16":
        return (typed(scale, "int16").to(torch.int32) << 16).view(torch.float32)
    exponents = typed(scale, "uint8").to(torch.int32)
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
    return torch.where(exponents == 255, NAN["float32"], bits).view(torch.float32)


def least(scales: torch.Tensor) -> float:
    """The smallest magnitude that is neither zero nor NaN; infinity where there is none."""
    magnitude = scales.abs()
    return float(magnitude.where(magnitude > 0, float("inf")).amin())


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    top: int,
    left: int,
    out: torch.Tensor,
    ordinary: bool,
    count: bool = False,
    vanish: bool = False,
) -> tuple[int, int]:
    """Fills `out` with float32(code) * float32(scale), rounded to its dtype.

    How many finite products became infinite, with `count`, and how many that are not 0 became it,
    with `vanish`; else 0.

    `codes` (uint8) is the part [top:, left:] of a weight, `scales` the grid from the block that
    holds its first element on; `ordinary`: all scales are finite and below `ORDINARY`.
    """
    import torch

    on_cpu = _on_cpu(codes)
    spread = _Spread(scales * 256 if on_cpu and ordinary else scales, block, top, left)
    own = None if out.dtype is torch.float32 else _Buffer("floats", "float32", codes)
    halves = _Buffer("halves", "int16", codes)
    lost = zeros = 0
    idle = vanish and bool((scales == 0).any())
    has_nan = not on_cpu or _has_nan(codes)
    for band in _bands(codes, block.rows, top):
        part, target = codes[band.rows], out[band.rows]
        floats = target if own is None else own.like(part)
        if on_cpu:
            shifted = halves.like(part)
            shifted.copy_(part.view(torch.int8))
            halves.words.bitwise_left_shift_(7)
            halves.words.bitwise_and_(_SHIFTED)
            floats.copy_(halves.floats)
            if has_nan:
                floats.masked_fill_(floats.abs() == 480 / 256, float("nan"))
            if not ordinary:
                floats.mul_(256)
        else:
            floats.copy_(part.view(torch.float8_e4m3fn))
        spread.multiply(floats, band)
        if own is not None:
            target.copy_(floats)
        if has_nan or not ordinary:
            name = str(out.dtype).removeprefix("torch.")
            signed(target, name).masked_fill_(floats.isnan(), NAN[name])
        if count:
            lost += int(spread.over(part, band).isfinite().logical_and_(target.isinf()).sum())
        if vanish:
            made = signed(target, str(out.dtype).removeprefix("torch."))
            zeros += _vanished(made, part.where(spread.over(part, band) != 0, 0) if idle else part)
    return lost, zeros


def _vanished(made: torch.Tensor, given: torch.Tensor) -> int:
    """How many elements of `made` are zero where those of `given` are not; both integers whose
    highest bit is a sign.
    """
    if _on_cpu(made):
        return vanished(signless("made", made.numpy()), given.numpy())
    return int(
        (made & ((1 << 8 * made.element_size() - 1) - 1) == 0).logical_and_(given << 1).sum()
    )


def _has_nan(codes: torch.Tensor) -> bool:
    """Whether one of the codes is 0x7F, the largest of the signed ones, or 0xFF, the largest of the
    unsigned ones.
    """
    import torch

    return int(codes.amax()) == 0xFF or int(codes.view(torch.int8).amax()) == 0x7F


def block_amax(bits: torch.Tensor, block: Block, infinity: int | None) -> np.ndarray[Any, Any]:
    """`_blocks.amax` of signed integers on any device; with `infinity`, those bits and what lies
    above count as zero.
    """
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


def measure(
    codes: torch.Tensor,
    scales: torch.Tensor,
    block: Block,
    top: int,
    left: int,
    made: torch.Tensor,
    told: slice,
    lost: int,
    zeros: int,
    meter: Meter,
) -> None:
    """Tells `meter` what rounding did to the rows `told`, and how many elements of all rows became
    infinite and zero.
    """
    import numpy as np
    import torch

    numbers, got = (
        rows.float().cpu().numpy() for rows in (codes[told].view(torch.float8_e4m3fn), made[told])
    )
    factor = _blocks.of_rows(scales.cpu().numpy(), block, top, left, told, numbers.shape).astype(
        "f8"
    )
    with np.errstate(all="ignore"):
        wanted = numbers * factor
    meter.add(
        wanted,
        got,
        np.abs(factor) * LARGEST,
        saturated=lost,
        underflowed=zeros,
        non_finite=lost,
        sure=told.step == 1,
    )


def _bands(matrix: torch.Tensor, high: int, top: int) -> Iterator[Band]:
    return _blocks.bands(
        matrix.shape, high, top, _blocks.CHUNK if _on_cpu(matrix) else CHUNK_OF_DEVICE
    )


def _across(grid: torch.Tensor, wide: int, left: int, width: int) -> torch.Tensor:
    import torch

    if _on_cpu(grid):
        return torch.from_numpy(_blocks.across(grid.numpy(), wide, left, width))
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
    """Memory for parts of a matrix, reused on the CPU from call to call; `words` is the last one as
    64-bit words, rounded up.
    """

    __slots__ = ("_device", "_dtype", "_name", "_part", "_shape", "floats", "words")

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
            if self._dtype == "int16":
                self.floats = self._part.view(torch.float16)
        return self._part
