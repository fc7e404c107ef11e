"""CRC-32 as zip archives record it, and the CRC of parts put together.

ISA-L folds 128 bits at a time and is several times faster than the zlib of most systems, which
stands in where it cannot be loaded. A CRC is the remainder of the data, read as a polynomial over
GF(2), so the CRC of two parts in a row follows from the CRC and length of each: tiles may be hashed
by different threads, in any order, or by a run that was killed and resumed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

_POLYNOMIAL = 0xEDB88320  # bit 31 is the coefficient of x^0, as everywhere in this file
_ONE = 0x80000000
_X8 = 0x00800000


@cache
def library() -> tuple[str, Callable[..., int]]:
    """Whose CRC-32 it is, and the function; loaded when the first is asked for."""
    try:
        from isal import isal_zlib
    except ImportError:
        return "zlib", zlib.crc32
    return "isal", isal_zlib.crc32


def crc32(data: Any, value: int = 0) -> int:
    """The CRC-32 of a buffer, going on from `value`."""
    return library()[1](data, value)


def _times(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """x^(8 * length): what appending so many bytes multiplies a remainder with."""
    out, power = _ONE, _X8
    while length:
        if length & 1:
            out = _times(power, out)
        power = _times(power, power)
        length >>= 1
    return out


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two parts in a row, from the CRC-32 of each and the `length` of the second in
    bytes.

    Microseconds for a length that was met before, some hundred for a new one. The formula is that
    of zlib's `crc32_combine`.
    """
    return _times(_shift(length), first) ^ second


def zeros(length: int) -> int:
    """The CRC-32 of `length` zero bytes, without making them."""
    # before and after, a CRC is inverted; a part of zeros only shifts the remainder
    return _times(_shift(length), 0xFFFFFFFF) ^ 0xFFFFFFFF
