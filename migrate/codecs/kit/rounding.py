"""Numbers to codes: the nearest of an element type, ties to even where its producer's do.

Three ways, each exact. A float of 8 bits is torch's own cast, after a clamp: what torch does beyond
the largest code changed with 2.12. A few codes (e2m1, the tables of bitsandbytes) are counted: the
code of a number is how many borders between codes it has passed. Integers are rounded.

The borders of codes c and c + 1 lie halfway, in float32 as their producer has them; a number on one
goes to c + 1 where the border is closed (`>=`), as it is below an even code.

A function takes `Lanes`, in which numpy arrays and torch tensors of any device answer to the same
names; the same bits come out. Codes come one a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from ...elements.raw import scratch, typed
from .layout import ElementType, floats

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# which numbers get the sign of a code: those with a sign, zero too; those below zero; those that
# are not above it; those whose code is not zero
SIGNS = ("bit", "negative", "not positive", "not zero")
# torch's own number types by their names here
_BYTES = {"bool": "bool", "u1": "uint8", "f4": "float32", "i4": "int32", "u2": "uint16"}


class Lanes:
    """numpy, or torch on a device, by one set of names."""

    __slots__ = ("device", "xp")

    def __init__(self, device: Any = None) -> None:
        """`device`: torch's, of tensors; None for numpy arrays."""
        from importlib import import_module

        self.device = device
        self.xp: Any = import_module("numpy" if device is None else "torch")

    @property
    def on_cpu(self) -> bool:
        """Whether tensors are in the memory that numpy sees."""
        return self.device is None or self.device.type == "cpu"

    def take(self, name: str, shape: tuple[int, ...], kind: str) -> Any:
        """A contiguous array of numpy's `kind` (f4, u1): on the CPU this thread's memory of that
        name, which the next call gives again.
        """
        size = {"f4": 4, "i4": 4, "u2": 2}.get(kind, 1)
        nbytes = size
        for n in shape:
            nbytes *= n
        if self.device is None:
            return scratch(f"codes {name}", nbytes).view(kind).reshape(shape)
        dtype = getattr(self.xp, _BYTES[kind])
        if self.on_cpu:
            return self.xp.from_numpy(scratch(f"codes {name}", nbytes)).view(dtype).view(shape)
        return self.xp.empty(shape, dtype=dtype, device=self.device)

    def of(self, array: Array) -> Any:
        """A small numpy array where these arrays are."""
        if self.device is None:
            return array
        return self.xp.from_numpy(array).to(self.device)

    def bytes(self, mask: Any) -> Any:
        """An array of booleans as 0 and 1, the same memory."""
        return mask.view("u1" if self.device is None else self.xp.uint8)

    def count(self, mask: Any) -> int:
        """How many are true."""
        return int(self.xp.count_nonzero(mask))

    def widen(self, raw: Any, dtype: str, out: Any) -> Any:
        """Raw elements of `dtype` as float32 in `out`, which is contiguous."""
        if self.device is not None:
            out.copy_(typed(raw, dtype))
        elif dtype == "bfloat16":
            words = out.view("<u4")
            words[...] = raw
            words <<= 16
        else:
            out[...] = raw.view("<f2" if dtype == "float16" else "<f4")
        return out

    def narrow(self, floats: Any, dtype: str) -> None:
        """Rounds float32 numbers to `dtype` in place, ties to even; they stay float32."""
        if dtype == "float32":
            return
        if self.device is not None:
            floats.copy_(floats.to(getattr(self.xp, dtype)))
        elif dtype == "float16":
            floats[...] = floats.astype("<f2")
        else:
            words = floats.view("<i4")
            odd = self.xp.right_shift(words, 16)
            odd &= 1
            odd += 0x7FFF
            # the sum of a NaN would overflow into the sign; what infinity becomes is infinity
            words += self.xp.where(self.xp.isnan(floats), 0, odd)
            words &= -0x10000


def lanes_of(array: Any) -> Lanes:
    """The lanes that an array of numpy or torch is in."""
    return Lanes(getattr(array, "device", None) if hasattr(array, "numel") else None)


@cache
def largest_of(elements: ElementType) -> float:
    """The largest finite magnitude that a code stands for."""
    return max(abs(v) for v in elements.values() if v - v == 0)


@cache
def order_of(elements: ElementType) -> tuple[int, ...]:
    """The codes of a table in the order of their numbers, of equal ones the lower code first; () of
    codes that are in this order.
    """
    known = elements.numbers
    found = tuple(sorted(range(len(known)), key=known.__getitem__))
    return () if found == tuple(range(len(known))) else found


@cache
def code_of_zero(elements: ElementType) -> int:
    """The code that a table has for 0."""
    passed = sum(border < 0 for border, _ in borders(elements, "even"))
    return (order_of(elements) or range(len(elements.numbers)))[passed]


@cache
def borders(elements: ElementType, ties: str) -> tuple[tuple[float, bool], ...]:
    """(border, closed) between neighbouring codes: of a signed table between all, in the order of
    their numbers, else between those without a sign. `ties`: even, or zero (toward the smaller
    code).
    """
    known: Sequence[float] = elements.values()
    known = known[: len(known) // 2] if elements.dtype else sorted(known)
    # closed below an even code; the borders of a table are those of `bucketize`, never closed
    return tuple(
        ((low + high) / 2, bool(elements.dtype) and ties == "even" and code % 2 == 1)
        for code, (low, high) in enumerate(pairwise(known))
    )


def counted(
    lanes: Lanes, numbers: Any, elements: ElementType, ties: str, sign: str, out: Any
) -> None:
    """Fills `out` (u1) with the codes of float32 `numbers`; NaN gets that of zero, or the lowest of
    a table.
    """
    xp, steps = lanes.xp, borders(elements, ties)
    mask = lanes.take("mask", tuple(numbers.shape), "bool")
    ones = lanes.bytes(mask)
    given = numbers
    if elements.dtype:
        given = xp.abs(numbers, out=lanes.take("magnitudes", tuple(numbers.shape), "f4"))
    first = lanes.bytes(out) if out.dtype == mask.dtype else out
    for number, (border, closed) in enumerate(steps):
        (xp.greater_equal if closed else xp.greater)(given, border, out=mask)
        if number:
            xp.add(first, ones, out=first)
        else:
            first[...] = ones
    if not elements.dtype:
        if order := order_of(elements):
            import numpy as np

            codes = lanes.of(np.array(order, "u1"))
            first[...] = codes[first if lanes.device is None else first.long()]
        return
    if sign == "bit":
        xp.signbit(numbers, out=mask)
    elif sign == "not positive":
        xp.less_equal(numbers, 0, out=mask)
    else:
        xp.less(numbers, 0, out=mask)
    if sign == "not zero":
        xp.logical_and(mask, first != 0, out=mask)
    xp.multiply(ones, 1 << (elements.bits - 1), out=ones)
    xp.add(first, ones, out=first)


def integers(lanes: Lanes, numbers: Any, elements: ElementType, low: int, out: Any) -> None:
    """Fills `out` (u1) with the codes of float32 `numbers`, which are rounded in place; the least
    integer is `low`. NaN gets that of zero.
    """
    xp, bits = lanes.xp, elements.bits
    top = (1 << (bits - 1)) - 1
    xp.round(numbers, out=numbers)
    xp.clip(numbers, low, top, out=numbers)
    if lanes.device is None:
        xp.nan_to_num(numbers, copy=False)
        whole = numbers.astype("i1").view("u1")
    else:
        whole = xp.nan_to_num(numbers).to(xp.int8).view(xp.uint8)
    if elements.negative:
        xp.bitwise_and(whole, (1 << bits) - 1, out=out)
    else:
        # as unsigned integers wrap, adding the offset is exact
        xp.add(whole, 1 << (bits - 1), out=out)
        if bits < 8:
            xp.bitwise_and(out, (1 << bits) - 1, out=out)


@cache
def nearest_below(elements: ElementType) -> float:
    """The magnitude below which each number has a nearest code."""
    if elements.whole:
        return (1 << (elements.bits - 1)) - 0.5
    known = sorted({v for v in elements.values() if v - v == 0})
    return known[-1] + (known[-1] - known[-2]) / 2


def beyond(lanes: Lanes, numbers: Any, elements: ElementType) -> Any:
    """Which float32 `numbers` would round beyond the largest or below the least code."""
    if elements.whole:
        least = -nearest_below(elements) - 1
        return (numbers >= nearest_below(elements)) | (numbers < least)
    return lanes.xp.abs(numbers) >= nearest_below(elements)


def clamp(numbers: Any, elements: ElementType) -> None:
    """Makes numbers beyond the largest of a float type of 8 bits that, in place; NaN stays."""
    most = largest_of(elements)
    numbers.clamp_(-most, most)


def cast(lanes: Lanes, numbers: Any, elements: ElementType, out: Any) -> None:
    """Fills `out` (u1) with the codes of a float type of 8 bits; of tensors no number may round
    beyond the largest (`clamp`).
    """
    if lanes.device is None:
        out[...] = looked_up(numbers, elements.dtype)
        return
    out.view(getattr(lanes.xp, elements.dtype)).copy_(numbers)


# by table


@cache
def _codes_by_upper(dtype: str, ties: str) -> Any:
    """The code of every float32 whose lower 16 bits are zero; too large numbers saturate."""
    import numpy as np

    elements = floats(dtype)
    values = np.array(elements.values(), "f8")
    codes = np.flatnonzero(np.isfinite(values) & ~np.signbit(values))
    known = values[codes]
    between = (known[1:] + known[:-1]) / 2
    with np.errstate(all="ignore"):
        numbers = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4").astype("f8")
    magnitude = np.abs(numbers)
    low, high = (np.searchsorted(between, magnitude, side) for side in ("left", "right"))
    even = ties == "even"
    code = codes[np.where((low != high) & (low % 2 == 1) & even, high, low)].astype("u1")
    half = 1 << (elements.bits - 1)
    signed = np.signbit(numbers)
    if dtype.endswith("uz"):
        # there is no zero below zero: its code is NaN
        signed &= code != 0
    code |= np.where(signed, half, 0).astype("u1")
    nan = np.flatnonzero(np.isnan(values))
    if nan.size:
        code[np.isnan(numbers)] = nan[0]
    return code


def looked_up(numbers: Array, dtype: str, ties: str = "even") -> Array:
    """The codes of float32 numbers, looked up by their upper 16 bits, the last set if any below is.

    That is rounding to odd. It keeps 8 bits, of which a code has at most 4, so that rounding again
    is rounding once (Boldo and Melquiond 2008).
    """
    import numpy as np

    bits = np.ascontiguousarray(numbers, "<f4").view("<u4")
    upper = (bits >> 16).astype("<u2")
    upper |= (bits & 0xFFFF) != 0
    found: Array = _codes_by_upper(dtype, ties).take(upper)
    return found


@cache
def numbers_of(elements: ElementType) -> Any:
    """The number of each code, as float32."""
    import numpy as np

    return np.array(elements.values(), "f4")


def nearest(dtype: str, numbers: Array) -> tuple[Array, Array]:
    """(codes, float32 numbers) of `dtype` nearest to these; too large ones saturate."""
    codes = looked_up(numbers, dtype)
    return codes, numbers_of(floats(dtype)).take(codes)


# packing


def pack(
    lanes: Lanes, codes: Any, bits: int, word: int, order: tuple[int, ...], dense: bool
) -> Any:
    """Codes (u1, [..., n]) as words of `word` bits along the last axis, the first code in the
    lowest bits or in the field that `order` says; what is over in the last word is zero.
    """
    if bits == word:
        return codes
    if bits == 4 and word == 8 and codes.shape[-1] % 2 == 0:
        if order != (1, 0) and lanes.device is None and codes.flags.c_contiguous:
            # both codes of a word at once
            pairs = codes.view("<u2")
            return (pairs | pairs >> 4).astype("u1")
        low, high = codes[..., 0::2], codes[..., 1::2]
        if order == (1, 0):
            low, high = high, low
        return low | (high << 4)
    if bits in (4, 8) and not order and codes.shape[-1] * bits % word == 0:
        # the first byte of a word holds its lowest bits
        packed = pack(lanes, codes, bits, 8, order, dense)
        if lanes.device is None:
            return _contiguous(packed).view(f"<u{word // 8}")
        return packed.contiguous().view(getattr(lanes.xp, f"int{word}"))
    return _pack_any(lanes, codes, bits, word, order, dense)


def _contiguous(array: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(array)


def _pack_any(
    lanes: Lanes, codes: Any, bits: int, word: int, order: tuple[int, ...], dense: bool
) -> Any:
    import numpy as np

    if lanes.device is not None:
        packed = _pack_any(Lanes(), codes.cpu().numpy(), bits, word, order, dense)
        return lanes.xp.from_numpy(packed.view(f"<i{word // 8}")).to(lanes.device)
    count = codes.shape[-1]
    if not dense:
        per = word // bits
        words = -(-count // per)
        padded = np.zeros((*codes.shape[:-1], words * per), f"<u{word // 8}")
        padded[..., :count] = codes
        fields = padded.reshape(*codes.shape[:-1], words, per)
        out = np.zeros(fields.shape[:-1], f"<u{word // 8}")
        for i in range(per):
            out |= fields[..., i] << np.array(bits * (order[i] if order else i), out.dtype)
        return out
    words = -(-count * bits // word)
    stream = (codes[..., None] >> np.arange(bits, dtype="u1")) & 1
    padded = np.zeros((*codes.shape[:-1], words * word), "u1")
    padded[..., : count * bits] = stream.reshape(*codes.shape[:-1], -1)
    return np.packbits(padded, axis=-1, bitorder="little").view(f"<u{word // 8}")
