"""Conversions for eager twins: whole tensors, by another way than `numbers`, which they check.

Values are rounded by scaling with powers of two in float64 instead of by shifting bits, torch does
what it does right, and NaNs, which are few, are converted one pattern at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.errors import OpError
from ..core.spec import BITS
from .codes import FLOATS, INTEGERS, PARTS
from .raw import carrier, typed

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Array


# elements that are converted at a time: their float64 stays in the processor's cache
_PART = 1 << 16


def converted(raw: Array, source: str, to: str) -> Array:
    """Raw elements of `source` as those of `to`. OpError M406, without a place, where it cannot."""
    import numpy as np

    flat: Array = np.ascontiguousarray(raw).reshape(-1)
    if flat.size <= _PART:
        whole: Array = _converted(flat, source, to).reshape(raw.shape)
        return whole
    made: Array = np.empty(flat.size, carrier(to))
    for start in range(0, flat.size, _PART):
        made[start : start + _PART] = _converted(flat[start : start + _PART], source, to)
    parts: Array = made.reshape(raw.shape)
    return parts


def _converted(raw: Array, source: str, to: str) -> Any:
    if source == to:
        return raw.copy()
    if source in PARTS:
        size = BITS[to] // 8
        flat = _converted(raw.view(f"<u{raw.dtype.itemsize // 2}"), PARTS[source], PARTS[to])
        return flat.view("V16" if size == 16 else f"<u{size}")
    if source in INTEGERS:
        whole = raw.view(raw.dtype.str.replace("u", "i")) if INTEGERS[source][0] < 0 else raw
        if source == "bool" and (raw > 1).any():
            raise OpError("M406", "cast: a byte of the bool tensor is neither 0 nor 1")
        return _of_integers(whole, to)
    if to in INTEGERS:
        return _to_integers(reference_values(raw, source), to)
    if (source, to) in (("bfloat16", "float32"), ("float32", "bfloat16")):
        import torch

        made = (
            typed(raw, source)
            .to(getattr(torch, to))
            .view(getattr(torch, f"uint{BITS[to]}"))
            .numpy()
        )
        return made if to == "float32" else _with_nans(made, raw, source, to)
    return _with_nans(rounded(reference_values(raw, source), to), raw, source, to)


def reference_values(raw: Array, dtype: str) -> Any:
    """The numbers of raw elements of a float dtype, as float64; a NaN is any NaN."""
    import numpy as np

    if BITS[dtype] < 8:
        known = _every(dtype)
        sign = 1 << (BITS[dtype] - 1)
        return np.where(raw & sign, -1.0, 1.0) * known[raw & (sign - 1)]
    with np.errstate(invalid="ignore"):
        if dtype in ("float16", "float32", "float64"):
            return raw.view(f"<f{raw.dtype.itemsize}").astype("<f8")
        flat = typed(np.ascontiguousarray(raw).reshape(-1), dtype)
        return flat.float().numpy().astype("<f8").reshape(raw.shape)


def spacing(x: Any, dtype: str) -> Any:
    """The distance of neighbouring numbers of the dtype at the float64 numbers `x`, in float64; NaN
    where `x` is no finite number.
    """
    import numpy as np

    form = FLOATS[dtype]
    with np.errstate(invalid="ignore"):
        least = 1 - form.bias
        exponent = np.where(x == 0, least, np.maximum(np.frexp(x)[1] - 1, least)) - form.mantissa
        return np.where(np.isfinite(x), np.ldexp(1.0, exponent), np.nan)


def rounded(x: Array, dtype: str) -> Array:
    """Raw elements of float64, rounded once, half to even; the bits of a NaN are any."""
    made: Array = _rounded(x.astype("<f8").reshape(-1), dtype).reshape(x.shape)
    return made


def _rounded(x: Array, dtype: str) -> Any:
    import numpy as np

    if dtype == "float64":
        return x.view("<u8")
    if dtype == "float8_e8m0fnu":
        return _powers(x)
    form = FLOATS[dtype]
    nan, endless = np.isnan(x), np.isinf(x)
    if (endless.any() and form.special != "ieee") or (nan.any() and form.special == "finite"):
        raise OpError(
            "M406",
            f"{dtype} holds no infinities" + (" and no NaN" if form.special == "finite" else ""),
        )
    plain = np.where(nan | endless, 0.0, x)
    exponent = np.maximum(np.frexp(plain)[1] - 1, 1 - form.bias) - form.mantissa
    with np.errstate(over="ignore"):
        made = np.ldexp(np.rint(np.ldexp(plain, -exponent)), exponent)
    over = np.abs(made) > form.largest
    if over.any():
        made[over] = np.copysign(form.largest if BITS[dtype] <= 8 else np.inf, x[over])
    made = np.where(nan | endless, x, made)
    with np.errstate(invalid="ignore"):
        if dtype in ("float32", "float16"):
            return made.astype(f"<f{BITS[dtype] // 8}").view(carrier(dtype))
        if dtype == "bfloat16":
            return (made.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    known = _every(dtype)
    code = np.searchsorted(known, np.abs(np.where(nan, 0.0, made)))
    if form.special == "ieee":
        code = np.where(np.isinf(made), form.top + 1, code)
    sign = np.signbit(x) & ~nan if form.special != "fnuz" else (made < 0)
    code = np.where(nan, form.top + 1, code) | (sign.astype("u1") << (BITS[dtype] - 1))
    return code.astype("u1")


@lru_cache(maxsize=16)
def _every(dtype: str) -> Array:
    """The numbers of the codes from 0 to the largest, in order."""
    import numpy as np

    form = FLOATS[dtype]
    made = []
    for code in range(form.top + 1):
        exponent, mantissa = divmod(code, 1 << form.mantissa)
        made.append(
            (mantissa + (1 << form.mantissa if exponent else 0))
            * 2.0 ** (max(exponent, 1) - form.bias - form.mantissa)
        )
    return np.array(made)


def _powers(x: Array) -> Array:
    import numpy as np

    fraction, exponent = np.frexp(x)
    if not (np.isnan(x) | ((fraction == 0.5) & (exponent >= -126) & (exponent <= 128))).all():
        raise OpError("M406", "float8_e8m0fnu holds powers of two only")
    return np.where(np.isnan(x), 255, exponent + 126).astype("u1")


def _with_nans(made: Array, raw: Array, source: str, to: str) -> Array:
    import numpy as np

    odd = np.isnan(reference_values(raw, source))
    if odd.any():
        patterns, index = np.unique(raw[odd], return_inverse=True)
        found = [nan(int(p), source, to) for p in patterns]
        made[odd] = np.array(found, made.dtype)[index]
    return made


def nan(pattern: int, source: str, to: str) -> int:
    """The bits in `to` of a NaN of `source`: the top of its payload, made quiet if it is cut."""
    a, b = FLOATS[source], FLOATS[to]
    sign, payload = pattern >> (a.exponent + a.mantissa), pattern & ((1 << a.mantissa) - 1)
    if a.special in ("fnuz", "scale"):
        sign, payload = 0, 1 << (a.mantissa - 1) if a.mantissa else 0
    if b.special in ("fnuz", "scale"):
        return b.top + 1
    if b.special == "fn":
        return sign << (b.exponent + b.mantissa) | (b.top + 1)
    if a.special == "scale":
        kept, lost = 1 << (b.mantissa - 1), 0
    elif a.mantissa <= b.mantissa:
        kept, lost = payload << (b.mantissa - a.mantissa), 0
    else:
        kept, lost = divmod(payload, 1 << (a.mantissa - b.mantissa))
    if lost:
        kept |= 1 << (b.mantissa - 1)
    return sign << (b.exponent + b.mantissa) | (b.top + 1) | kept


def quiet(dtype: str) -> int:
    """The bits of the NaN that invalid operations are said to make."""
    return nan(0x7FC00000, "float32", dtype)


def _of_integers(whole: Array, to: str) -> Any:
    import numpy as np

    if to not in INTEGERS:
        if to in ("float32", "float64"):
            return whole.astype(f"<f{BITS[to] // 8}").view(carrier(to))
        # Python's integers have no width to be cut to
        return _each(whole, lambda v: int(rounded(np.array([_sticky(v)]), to)[0])).astype(
            carrier(to)
        )
    low, high = INTEGERS[to]
    if not _each(whole, lambda v: int(low <= v <= high)).all():
        raise OpError("M406", f"cast: a number does not fit {to}")
    return whole.astype(carrier(to))


def _sticky(value: int) -> float:
    """An integer as a float64 that rounds to few bits as the integer does."""
    cut = max(value.bit_length() - 53, 0)
    size = abs(value) >> cut
    if abs(value) != size << cut:
        size |= 1
    return float(size << cut) * (-1 if value < 0 else 1)


def _to_integers(x: Array, to: str) -> Any:
    low, high = INTEGERS[to]

    def whole(value: float) -> int:
        if not (
            value == value
            and abs(value) != float("inf")
            and value == int(value)
            and low <= int(value) <= high
        ):
            raise OpError("M406", f"cast: {to} cannot hold {value}")
        return int(value) & ((1 << BITS[to]) - 1)

    return _each(x, whole).astype(carrier(to))


def _each(array: Array, do: Callable[[Any], int]) -> np.ndarray[Any, Any]:
    import numpy as np

    flat, index = np.unique(array, return_inverse=True)
    made = (
        np.array([do(v) for v in flat.tolist()], dtype="<u8") if flat.size else np.zeros(0, "<u8")
    )
    out: np.ndarray[Any, Any] = (
        made[index].reshape(array.shape) if prod(array.shape) else np.zeros(array.shape, "<u8")
    )
    return out
