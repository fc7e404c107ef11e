"""Numbers as bits in arrays: raw elements to floats, floats to raw elements.

One text for numpy on the CPU and torch on a GPU: it speaks of integers, shifts and correctly
rounded float operations only, so that both give the same bits, whatever the release of either
library saturates, flushes or does with a NaN. numpy needs no torch for it. NaNs go through by their
bits: a payload that fits survives there and back, one that does not becomes quiet. Finite numbers
beyond the largest of a float of 8 bits or fewer become the largest; elsewhere they become infinite,
as in IEEE 754.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..core.spec import BITS
from .codes import FLOATS, INTEGERS, PARTS, Float

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Array


# what rules compute with
COMPUTED = ("float64", "float32", "float16", "bfloat16")

_NAN = 0x7FC00000
_INF = 0x7F800000
_SIGN64, _INF64 = -(1 << 63), 0x7FF << 52


def holds(wide: str, narrow: str) -> bool:
    """Whether `wide` has every value of `narrow`, signed zeros, infinities and NaNs included, so
    that nothing is lost there and back.
    """
    if wide == narrow:
        return True
    if wide in PARTS and narrow in PARTS:
        return holds(PARTS[wide], PARTS[narrow])
    if narrow in INTEGERS:
        low, high = INTEGERS[narrow]
        if wide in INTEGERS:
            return INTEGERS[wide][0] <= low and high <= INTEGERS[wide][1]
        to = FLOATS.get(wide)
        return (
            to is not None
            and to.special != "scale"
            and max(high, -1 - low).bit_length() <= to.mantissa + 1
            and high <= to.largest
        )
    if wide not in FLOATS or narrow not in FLOATS:
        return False
    to, of = FLOATS[wide], FLOATS[narrow]
    fits = of.mantissa <= to.mantissa and to.quantum <= of.quantum and of.largest <= to.largest
    # an E8M0 has no sign and no zero; it only ever is the narrow one
    signed = of.special in ("fnuz", "scale") or to.special not in ("fnuz", "scale")
    infinite = of.special != "ieee" or to.special == "ieee"
    undefined = of.special == "finite" or to.special != "finite"
    return fits and signed and infinite and undefined and to.special != "scale"


def numbers(raw: Any, dtype: str) -> Any:
    """The numbers that raw floats of a dtype stand for: float64 of float64, else float32."""
    if dtype in ("float32", "float64"):
        return view(raw, "f4" if dtype == "float32" else "f8")
    if dtype == "bfloat16":
        return view(as_kind(view(raw, "i2"), "i4") << 16, "f4")
    return look_up(dtype, raw)


@lru_cache(maxsize=32)
def decoded(dtype: str) -> Array:
    """The float32 number of each code of a float dtype of at most 16 bits. The NaN of a dtype that
    has one only is 0x7fc00000.
    """
    import numpy as np

    form = FLOATS[dtype]
    codes = np.arange(1 << BITS[dtype], dtype="<i8")
    if form.special == "scale":
        powers: Array = np.ldexp(1.0, (np.minimum(codes, 254) - 127).astype("<i4")).astype("<f4")
        powers.view("<u4")[255] = _NAN
        return powers
    mantissa, exponent = (
        codes & ((1 << form.mantissa) - 1),
        (codes >> form.mantissa) & ((1 << form.exponent) - 1),
    )
    whole = np.where(exponent > 0, mantissa + (1 << form.mantissa), mantissa).astype("<f8")
    sign = codes >> (form.exponent + form.mantissa)
    # codes beyond the top are replaced below
    exponent = np.clip(exponent, 1, form.top >> form.mantissa) - form.bias - form.mantissa
    value = np.ldexp(whole, exponent.astype("<i4")).astype("<f4")
    bits = value.view("<u4") | (sign << 31).astype("<u4")
    over = (codes & ((1 << (form.exponent + form.mantissa)) - 1)) > form.top
    special = ((sign << 31) | _INF | (mantissa << (23 - form.mantissa))).astype("<u4")
    bits = np.where(over, special, bits)
    if form.special == "fnuz":
        bits[1 << (form.exponent + form.mantissa)] = _NAN
    return bits.astype("<u4").view("<f4")


def encode(x: Any, dtype: str) -> tuple[Any, Any]:
    """(codes, refused) of float32 or float64 numbers rounded once, to the nearest and half to even,
    into a float dtype.

    Codes are int32, those of float64 int64. `refused` marks what `dtype` cannot hold: NaN and
    infinities where it has none, and for E8M0 all but powers of two; None where it holds
    everything.
    """
    if dtype == "float64":
        return view(x if kind(x) == "f8" else widened(x), "i8"), None
    if dtype == "float32":
        return view(x if kind(x) == "f4" else _narrowed(x), "i4"), None
    x = _odd(x) if kind(x) == "f8" else x
    return (
        _scale(view(x, "i4"))
        if dtype == "float8_e8m0fnu"
        else _small(view(x, "i4"), FLOATS[dtype], BITS[dtype] > 8)
    )


def same_bits(x: Any, codes: Any, dtype: str) -> Any:
    """Where `codes` of `dtype` stand for exactly the numbers `x`, a NaN's bits included."""
    back = (
        view(codes, f"f{BITS[dtype] // 8}")
        if dtype in ("float32", "float64")
        else look_up(dtype, codes)
    )
    if kind(back) != kind(x):
        back, x = (b if kind(b) == "f8" else widened(b) for b in (back, x))
    whole = "i4" if kind(x) == "f4" else "i8"
    return view(back, whole) == view(x, whole)


def _small(bits: Any, form: Float, infinite: bool) -> tuple[Any, Any]:
    where = module(bits).where
    m, width = form.mantissa, form.exponent + form.mantissa
    drop = 23 - m
    magnitude = bits & 0x7FFFFFFF
    # NaNs overflow here and are replaced below
    code = ((magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop) - (
        (127 - form.bias) << m
    )
    if form.bias != 127:
        # below the smallest normal number: adding a power of two whose last place is the quantum
        # rounds
        least, magic = (128 - form.bias) << 23, (1 - form.bias - m + 23 + 127) << 23
        kept = where(magnitude < least, magnitude, least)
        code = where(
            magnitude < least,
            view(view(kept, "f4") + 2.0 ** ((magic >> 23) - 127), "i4") - magic,
            code,
        )
    sign = (bits >> 31) & 1
    if is_numpy(bits) and magnitude.max(initial=0) < _INF and code.max(initial=0) <= form.top:
        # nothing overflows, so nothing is infinite or undefined: half of the passes are saved
        if form.special == "fnuz":
            sign[code == 0] = 0
        return code | (sign << width), None
    code = where(code > form.top, form.top + 1 if infinite else form.top, code)
    nan, beyond = magnitude > _INF, magnitude >= _INF
    refused = None
    if form.special == "ieee":
        payload = ((magnitude & 0x7FFFFF) >> drop) | (
            as_kind((magnitude & ((1 << drop) - 1)) != 0, "i4") << (m - 1)
        )
        code = where(beyond, where(nan, payload, 0) | (form.top + 1), code)
    elif form.special == "finite":
        refused = beyond
    else:
        refused = magnitude == _INF
        code = where(nan, form.top + 1, code)
    if form.special == "fnuz":
        # the code of -0 is the NaN's
        sign = where(nan | (code == 0), 0, sign)
    return code | (sign << width), refused


def _scale(bits: Any) -> tuple[Any, Any]:
    where = module(bits).where
    nan, lowest = (bits & 0x7FFFFFFF) > _INF, bits == 0x00400000
    power = ((bits & 0x7FFFFF) == 0) & (bits > 0) & (bits < _INF)
    return where(nan, 255, where(lowest, 0, (bits >> 23) & 0xFF)), ~(nan | lowest | power)


def _odd(x: Any) -> Any:
    """float64 as float32 whose last bit is set where it was cut: rounding again rounds once."""
    near = as_kind(x, "f4")
    back, bits = as_kind(near, "f8"), view(near, "i4")
    bits = (bits - as_kind(abs(back) > abs(x), "i4")) | as_kind(back != x, "i4")
    return _of_nans(
        view(bits, "f4"), x, lambda wide: _cut(wide) | as_kind((wide & 0x1FFFFFFF) != 0, "i8")
    )


def _narrowed(x: Any) -> Any:
    return _of_nans(
        as_kind(x, "f4"),
        x,
        lambda wide: _cut(wide) | (as_kind((wide & 0x1FFFFFFF) != 0, "i8") << 22),
    )


def _cut(wide: Any) -> Any:
    return ((wide >> 32) & -(1 << 31)) | _INF | ((wide >> 29) & 0x7FFFFF)


def _of_nans(made: Any, x: Any, bits: Any) -> Any:
    """`made`, float32 of `x`, with the bits of NaNs computed from those of `x` as int64."""
    nan = x != x
    if is_numpy(x) and not nan.any():
        return made
    return view(module(x).where(nan, as_kind(bits(view(x, "i8")), "i4"), view(made, "i4")), "f4")


def widened(x: Any) -> Any:
    """float64 of float32, the bits of NaNs kept."""
    made, nan = as_kind(x, "f8"), x != x
    if is_numpy(x) and not nan.any():
        return made
    bits = as_kind(view(x, "i4"), "i8")
    return view(
        module(x).where(
            nan, (bits & _SIGN64) | _INF64 | ((bits & 0x7FFFFF) << 29), view(made, "i8")
        ),
        "f8",
    )


# numpy and torch, in the few words that differ


def is_numpy(x: Any) -> bool:
    import numpy as np

    return isinstance(x, (np.ndarray, np.generic))


def module(x: Any) -> Any:
    """numpy or torch, whichever made `x`."""
    if is_numpy(x):
        import numpy

        return numpy
    import torch

    return torch


def _torch_kind(name: str) -> Any:
    import torch

    return getattr(torch, {"f": "float", "i": "int", "u": "uint"}[name[0]] + str(8 * int(name[1:])))


def kind(x: Any) -> str:
    """The element type as numpy writes it: "f4", "i8"."""
    if is_numpy(x):
        return str(x.dtype.str[1:])
    name = str(x.dtype).partition(".")[2]
    return f"{name[0]}{x.element_size()}"


def view(x: Any, name: str) -> Any:
    """The same bits as elements of another type of that width."""
    return x.view(name if is_numpy(x) else _torch_kind(name))


def as_kind(x: Any, name: str) -> Any:
    """The same values as elements of another type; integers wrap."""
    return x.astype(name) if is_numpy(x) else x.to(_torch_kind(name))


def look_up(dtype: str, codes: Any) -> Any:
    """The numbers (`decoded`) of codes, or of raw elements, of a dtype of at most 16 bits."""
    if is_numpy(codes):
        return decoded(dtype).take(codes, mode="clip")
    # torch computes little with unsigned integers wider than a byte
    index = codes if kind(codes) in ("u1", "i4") else view(codes, "i2")
    return _decoded_on(dtype, str(codes.device)).index_select(
        0, as_kind(index, "i4") & ((1 << BITS[dtype]) - 1)
    )


@lru_cache(maxsize=32)
def _decoded_on(dtype: str, device: str) -> Any:
    import torch

    return torch.from_numpy(decoded(dtype)).to(device)


def put(codes: Any, out: Any) -> None:
    """Writes codes into raw elements, which are unsigned."""
    if is_numpy(codes):
        import numpy as np

        np.copyto(out, codes, casting="unsafe")
    else:
        width = out.element_size()
        (out if width == 1 else view(out, f"i{width}")).copy_(codes)


def widen_bfloat16(raw: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """float32 elements of bfloat16 elements, raw both; every bit pattern comes back."""
    import numpy as np

    # two passes over a chunk in cache are faster than one that converts and shifts
    np.copyto(out, raw)
    np.left_shift(out, np.uint32(16), out=out)


def narrow_bfloat16(raw: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
    """bfloat16 of float32, raw and contiguous, as `encode`; whether all low halves are zero."""
    import numpy as np

    from .raw import scratch

    if not np.bitwise_or.reduce(raw) & np.uint32(0xFFFF):
        _high_halves(raw, out)
        return True
    if np.isnan(np.maximum.reduce(raw.view("<f4"))):
        put(encode(raw.view("<f4"), "bfloat16")[0], out)
        return False
    work = scratch("narrow", raw.nbytes).view("<u4")
    np.right_shift(raw, np.uint32(16), out=work)
    np.bitwise_and(work, np.uint32(1), out=work)
    np.add(work, np.uint32(0x7FFF), out=work)
    np.add(work, raw, out=work)
    _high_halves(work, out)
    return False


# elements that a second-level cache holds with what is made of them
_STEP = 1 << 16


def narrow_float16(floats: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Fills `out` with float16 of contiguous float32 without NaN, `out` raw, rounded as `encode`.

    Times 2^-112 a number has the exponent of a float16, and what is below its normal numbers is
    subnormal as it is there. numpy's own conversion, of one number at a time, takes several times
    as long; it takes the few that are so small that they would be rounded twice, or too large.
    """
    import numpy as np

    from .raw import scratch

    given, made = floats.reshape(-1), out.reshape(-1) if out.flags.c_contiguous else None
    if made is None:
        made = np.empty(given.size, "<u2")
    room = scratch("narrow", 4 * _STEP)
    beside = scratch("narrow beside", 4 * _STEP)
    for start in range(0, given.size, _STEP):
        part, to = given[start : start + _STEP], made[start : start + _STEP]
        small = room[: part.nbytes].view("<f4")
        again = beside[: part.nbytes].view("<f4")
        np.multiply(part, np.float32(2.0**-112), out=small)
        np.multiply(small, np.float32(2.0**112), out=again)
        others = again != part
        if np.abs(small, out=again).max() >= 2.0**-96:
            others |= again >= 2.0**-96
        those = np.flatnonzero(others)
        words, odd = small.view("<i4"), again.view("<i4")
        np.right_shift(words, 13, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(odd, 0xFFF, out=odd)
        np.add(words, odd, out=words)
        np.right_shift(words, 13, out=words)
        # three bits of the exponent are gone, so that the sign is three bits too high
        np.right_shift(words, 3, out=odd)
        np.bitwise_and(odd, 0x8000, out=odd)
        np.bitwise_xor(words, odd, out=words)
        np.copyto(to, words, casting="unsafe")
        if those.size:
            with np.errstate(over="ignore", under="ignore"):
                to[those] = part[those].astype("<f2").view("<u2")
    if not out.flags.c_contiguous:
        out[...] = made.reshape(out.shape)


def _high_halves(words: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Fills `out` with the upper 16 bits of uint32 elements, contiguous both and not empty."""
    import numpy as np

    # a word that begins two bytes later has them as its lower ones, and cutting words off is one
    # pass of vectors: a shift would be two, and a copy of every second half goes one by one
    later: np.ndarray[Any, Any] = np.ndarray(words.size - 1, "<u4", words, 2)
    np.copyto(out[:-1], later, casting="unsafe")
    out[-1] = words[-1] >> np.uint32(16)
