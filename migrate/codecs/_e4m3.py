"""The arithmetic of e4m3 codes in blocks in numpy: scales, what is reported of errors, and code by
code.
"""

from __future__ import annotations

from functools import cache
from math import frexp
from typing import TYPE_CHECKING, Any

from ..elements.raw import scratch
from . import _blocks
from ._blocks import Block

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Meter

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
    """How many of `magnitudes` are zero where the numbers of `given`, integers whose highest bit is
    a sign, are not.
    """
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
    told: slice,
    saturated: int,
    underflowed: int,
    non_finite: int,
) -> None:
    """Tells `meter` the error of the rows `told` of a matrix, of which `numbers` (raw `dtype`) and
    `codes` are these rows, and how many elements of all rows saturated, became zero, and came back
    infinite or undefined."""
    import numpy as np

    wanted = widened(numbers, dtype)
    with np.errstate(all="ignore"):
        got = _table()[codes] * _blocks.of_rows(scale, block, top, left, told, wanted.shape)
    largest = _blocks.of_rows(amax, block, top, left, told, wanted.shape)
    meter.add(
        wanted,
        got,
        largest,
        saturated=saturated,
        underflowed=underflowed,
        non_finite=non_finite,
        sure=told.step == 1,
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
    """The codes nearest to float numbers, ties to the even code; beyond the largest they saturate,
    NaN is 0x7F.
    """
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
    """As `nearest`, of float32: looked up by their upper 16 bits, the last of which is set where
    any below it is.

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
