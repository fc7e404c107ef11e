"""The largest magnitudes of tiles of numbers, as float32, by their bits.

Floats of one sign are ordered as their bits are, infinity and NaN on top, so that no number has to
be made a float, and the largest is NaN where any number is. A tile has rows and columns; the last
ones of a matrix may be smaller. Arrays are of raw elements, numpy or torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.spec import BITS
from ...elements.raw import scratch, typed

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# runs up to this length are compared side by side
SHORT = 64
# numbers that are looked at a second time while a cache holds them, and tiles of so many that this
# is cheaper than to write them without their signs
STEP, LARGE = 1 << 18, 1 << 10
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def widened(raw: Array, dtype: str) -> Array:
    """Raw elements of float32, bfloat16 or float16 as float32."""
    numbers = raw.astype("<u4") << 16 if dtype == "bfloat16" else raw
    found: Array = numbers.view("<f2" if dtype == "float16" else "<f4").astype("<f4", copy=False)
    return found


def amax(matrix: Any, dtype: str, tile: tuple[int, int], finite: bool = False) -> Array:
    """The largest magnitude in each tile of a matrix of raw elements, a grid of float32.

    `finite`: infinities and NaN count as zero.
    """
    import numpy as np

    if not isinstance(matrix, np.ndarray):
        return widened(_of_tensor(matrix, dtype, tile, finite), dtype)
    (rows, columns), (high, wide) = matrix.shape, tile
    whole = high >= rows and wide >= columns
    step = max(1, STEP // max(1, columns)) if whole else max(1, STEP // columns // high) * high
    if step < rows:
        parts = [amax(matrix[i : i + step], dtype, tile, finite) for i in range(0, rows, step)]
        return np.maximum.reduce(parts) if whole else np.concatenate(parts)
    if whole and matrix.flags.c_contiguous:
        # in one stretch
        matrix, tile = matrix.reshape(1, -1), (1, matrix.size)
    if finite or tile[0] * tile[1] < LARGE:
        found = _of_magnitudes(matrix, dtype, tile, finite)
    else:
        # no pass takes the signs off: the largest of the signed integers is the largest positive
        # number, and of the unsigned ones the largest negative one, if there is any
        signed, unsigned = matrix.view(f"<i{matrix.itemsize}"), matrix.view(f"<u{matrix.itemsize}")
        over, under = (_in_runs(_in_runs(w, 0, tile[0]), 1, tile[1]) for w in (signed, unsigned))
        mask = (1 << 8 * matrix.itemsize - 1) - 1
        found = np.maximum(over, (under & mask).view(signed.dtype))
    return widened(found.view(f"<u{matrix.itemsize}"), dtype)


def _of_magnitudes(matrix: Array, dtype: str, tile: tuple[int, int], finite: bool) -> Array:
    import numpy as np

    out = scratch("magnitudes", matrix.nbytes).view(matrix.dtype).reshape(matrix.shape)
    np.bitwise_and(matrix, (1 << BITS[dtype] - 1) - 1, out=out)
    if finite:
        out[out >= INFINITY[dtype]] = 0
    return _in_runs(_in_runs(out, 0, tile[0]), 1, tile[1])


def _in_runs(words: Array, axis: int, length: int) -> Array:
    """The largest of each `length` neighbours along an axis; the last run may be shorter."""
    import numpy as np

    if length == 1:
        return words
    size = words.shape[axis]
    lanes = 8 // words.itemsize
    short = axis == 1 and length <= SHORT and size % length == length % lanes == 0
    if short and words.flags.c_contiguous and words.dtype.kind == "u":
        return _in_short_runs(words, length)
    whole = size // length * length
    head, rest = np.split(words, [whole], axis) if whole < size else (words, None)
    parts = []
    if whole:
        runs = head.reshape(*words.shape[:axis], whole // length, length, *words.shape[axis + 1 :])
        parts.append(np.maximum.reduce(runs, axis + 1))
    if rest is not None:
        parts.append(np.maximum.reduce(rest, axis, keepdims=True))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis)


def _in_short_runs(words: Array, length: int) -> Array:
    """`_in_runs` along the last axis of a contiguous matrix, the work of which would be less than
    that of beginning a loop for each run: 8 bytes at a time of all runs, side by side.
    """
    import numpy as np

    lanes, kind = 8 // words.itemsize, words.dtype
    beside = np.ascontiguousarray(words.view("<u8").reshape(-1, length // lanes).T)
    found = np.maximum.reduce(beside.view(kind), 0)
    shift = 32
    while shift >= 8 * words.itemsize:
        # the upper lanes of each word onto the lower
        upper = found.view("<u8") >> np.uint64(shift)
        np.maximum(found, upper.view(kind), out=found)
        shift //= 2
    return np.ascontiguousarray(found[::lanes]).reshape(len(words), -1)


def _of_tensor(matrix: Any, dtype: str, tile: tuple[int, int], finite: bool) -> Array:
    import torch

    kind = {16: torch.int16, 32: torch.int32}[BITS[dtype]]
    bits = typed(matrix, dtype).view(kind) & torch.iinfo(kind).max
    if finite:
        bits.masked_fill_(bits >= INFINITY[dtype], 0)
    largest = _tensor_runs(_tensor_runs(bits, 0, tile[0]), 1, tile[1])
    found: Array = largest.cpu().numpy().view(f"<u{BITS[dtype] // 8}")
    return found


def _tensor_runs(tensor: Any, dim: int, length: int) -> Any:
    import torch

    length = min(length, max(1, tensor.shape[dim]))
    whole = tensor.shape[dim] // length
    parts = []
    if whole:
        runs = tensor.narrow(dim, 0, whole * length).unflatten(dim, (whole, length))
        parts.append(runs.amax(dim + 1))
    if rest := tensor.shape[dim] - whole * length:
        parts.append(tensor.narrow(dim, whole * length, rest).amax(dim, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def extremes(matrix: Any, dtype: str, tile: tuple[int, int]) -> tuple[Array, Array]:
    """The least and the largest number of each tile of a matrix, and zero, as float32; NaN where
    any is.
    """
    import numpy as np

    raw = matrix if isinstance(matrix, np.ndarray) else matrix.cpu().numpy()
    numbers = widened(raw.view(f"<u{BITS[dtype] // 8}"), dtype)
    high = np.maximum(_in_runs(_in_runs(numbers, 0, tile[0]), 1, tile[1]), np.float32(0))
    low = -np.maximum(_in_runs(_in_runs(-numbers, 0, tile[0]), 1, tile[1]), np.float32(0))
    return low, high
