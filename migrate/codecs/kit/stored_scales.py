"""Scales as raw elements of the dtype that they are stored in, which holds them whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ...elements.raw import carrier
from .rounding import looked_up

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}


def as_stored(scales: Array, dtype: str) -> Array:
    """float32 scales as raw elements of `dtype`; uint8 is that of E8M0. NaN is the quiet one."""
    import numpy as np

    scales = np.asarray(scales, "<f4")
    if dtype in ("float8_e8m0fnu", "uint8"):
        return np.where(np.isnan(scales), 0xFF, scales.view("<u4") >> 23).astype("u1")
    if dtype.startswith("float8"):
        return looked_up(scales, dtype)
    if dtype == "float16":
        with np.errstate(all="ignore"):
            raw = scales.astype("<f2").view("<u2")
    else:
        raw = scales.view("<u4") >> (16 if dtype == "bfloat16" else 0)
    return np.where(np.isnan(scales), NAN[dtype], raw).astype(carrier(dtype))
