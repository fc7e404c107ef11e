"""Floats of eight bits from numbers of 16 bits that share one scale: the code of a number follows
from its bits, so that a table of the codes of all 65,536 takes the place of arithmetic, in one call
and in numpy alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from .magnitudes import widened
from .rounding import looked_up
from .scale_rules import Scales, rounded_to

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# numbers of one scale that take longer to be encoded than a table
LARGE = 1 << 16
# numbers that are looked up at a time, for each of which numpy makes an index of eight bytes: with
# it they stay in a second-level cache
STEP = 1 << 16


def fill_codes(raw: Array, dtype: str, scales: Scales, to: str, out: Array, count: int) -> None:
    """Fills `out` (u1) with the codes of raw numbers of `dtype`, of 16 bits and finite, over or
    times the one factor of `scales`, in the float `to` of eight bits; too large ones saturate. The
    scale is that of `count` numbers.
    """
    import numpy as np

    factor = float(scales.factor.reshape(()))
    how = dtype, factor, scales.divides, scales.dtype, to
    if count < LARGE:
        out[...] = _codes(raw, *how)
    elif out.flags.c_contiguous:
        table, step = _table(*how), max(1, STEP // max(1, raw.shape[-1]))
        for row in range(0, len(raw), step):
            # no index lies outside the table, which `clip` need not check beforehand
            np.take(table, raw[row : row + step], out=out[row : row + step], mode="clip")
    else:
        out[...] = _table(*how).take(raw)


# 64 KiB each: a thread takes some calls for each of the tensors it is at
@lru_cache(maxsize=32)
def _table(dtype: str, factor: float, divides: bool, narrow: str, to: str) -> Array:
    """The codes of all numbers of 16 bits, in the order of these."""
    import numpy as np

    return _codes(np.arange(1 << 16, dtype="<u2"), dtype, factor, divides, narrow, to)


def _codes(raw: Array, dtype: str, factor: float, divides: bool, narrow: str, to: str) -> Array:
    import numpy as np

    numbers = widened(raw, dtype)
    with np.errstate(all="ignore"):
        scaled = numbers / np.float32(factor) if divides else numbers * np.float32(factor)
        return looked_up(rounded_to(scaled, narrow), to)
