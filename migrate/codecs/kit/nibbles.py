"""Codes of four and eight bits from words to words, several at a time and without unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from ...elements.raw import scratch
from .layout import Packing

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# keys, and words, that are worked on at a time
KEYS = 1 << 14
WORDS = 1 << 19
# words between rows, which begin at other places in a cache then
PADDING = 8
# of codes, pairs and fours of them, every other one
MASKS = {4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}


def turned(words: Array, order: Sequence[int], out: Array) -> None:
    """Fills `out` (u4 [8 * J, K / 8]) with words of eight codes in turn along K, of `words`
    (u4 [K, J]) whose codes lie along the other axis, code number i in field order[i].

    Eight words are a matrix of 8 x 8 codes, which is transposed by exchanging the corners of 2 x 2:
    halves of words, bytes, codes (Warren, Hacker's Delight, 7-3).
    """
    import numpy as np

    columns, across = words.shape
    numbers = [order.index(field) for field in range(8)] if order else range(8)
    made = out.reshape(across, 8, columns // 8)
    step = min(across, max(1, WORDS // max(1, columns)))
    size = columns // 8 * (step + PADDING)
    *rows, spare = scratch("kit turned", 36 * size).view("<u4").reshape(9, columns // 8, -1)
    for first in range(0, across, step):
        part = words[:, first : first + step]
        width = part.shape[1]
        for i, row in enumerate(rows):
            row[:, :width] = part[i::8]
        for far, shift in ((4, 16), (2, 8), (1, 4)):
            for i in range(8):
                if i & far:
                    continue
                one, other = rows[i], rows[i + far]
                np.right_shift(one, np.uint32(shift), out=spare)
                spare ^= other
                spare &= np.uint32(MASKS[shift])
                other ^= spare
                spare <<= np.uint32(shift)
                one ^= spare
        for number, row in zip(numbers, rows, strict=True):
            made[first : first + step, number] = row[:, :width].T


def in_turn(packing: Packing) -> bool:
    """Whether bytes hold one or two codes each, in turn along rows."""
    return (
        packing.bits in (4, 8)
        and packing.axis == -1
        and packing.order == tuple(range(len(packing.order)))
        and not (packing.dense or packing.transposed or packing.plus or packing.run)
    )


def put_rows(rows: Array, out: Array) -> None:
    """Fills rows of bytes (u1 [n, k]) of `out`, each contiguous as those of `rows` are: one move a
    row, where numpy would make one a byte.
    """
    size = f"V{rows.shape[1]}"
    out.view(size)[...] = rows.view(size)


def halves_in_turn(halves: Array) -> Array:
    """Codes in turn, two a byte (u1 [n, k]), of bytes (u1 [n, k]) of which byte j has code j in its
    lower half and code k + j in the upper one; k is even.
    """
    import numpy as np

    count, size = halves.shape
    out = np.empty((count, 2, size // 2), "u1")
    step = max(1, 2 * KEYS // size)
    raw = np.empty((min(step, count), size), "u1")
    made = np.empty((len(raw), size // 2), "u1")
    for first in range(0, count, step):
        some = min(step, count - first)
        put_rows(halves[first : first + some], raw[:some])
        words = raw[:some].view("<u2")
        for half in (0, 1):
            codes = (words >> np.uint16(4 * half)) & np.uint16(0x0F0F)
            codes |= codes >> np.uint16(4)
            np.copyto(made[:some], codes, casting="unsafe")
            put_rows(made[:some], out[first : first + some, half])
    return out.reshape(count, size)


def halves_of_turn(turn: Array, out: Array) -> None:
    """Fills `out` (u1 [n, k]) such that `halves_in_turn` makes `turn` (u1 [n, k]) of it."""
    import numpy as np

    count, size = turn.shape
    step = max(1, 2 * KEYS // size)
    upper = np.empty((min(step, count), size), "u1")
    made = np.empty_like(upper)
    for first in range(0, count, step):
        words = turn[first : first + step].astype("<u2")
        words |= words << np.uint16(4)
        words &= np.uint16(0x0F0F)
        both, some = words.view("u1"), len(words)
        put_rows(both[:, size:], upper[:some])
        put_rows(both[:, :size], made[:some])
        high = upper[:some].view("<u2")
        high <<= np.uint16(4)
        low = made[:some].view("<u2")
        low |= high
        put_rows(made[:some], out[first : first + some])


@lru_cache(maxsize=16)
def _table(codes: tuple[int, ...], bits: tuple[int, int]) -> tuple[Array, Array]:
    """What all codes in two bytes become, as one element, and whether one has none."""
    import numpy as np

    (was, now), every = bits, np.arange(1 << 16)
    known = np.array(codes, "i8")
    found, lost = np.zeros(1 << 16, "u8"), np.zeros(1 << 16, "?")
    for i in range(16 // was):
        made = known[every >> (i * was) & ((1 << was) - 1)]
        lost |= made < 0
        found |= np.maximum(made, 0).astype("u8") << np.uint64(i * now)
    size = 16 // was * now // 8
    return found.astype(f"<u{size}"), lost


def looked_up(raw: Array, codes: tuple[int, ...], bits: tuple[int, int], out: Array) -> bool:
    """Fills `out` (u1) with the codes in turn that those in bytes (u1), which are even in number,
    become; False at one without any. `bits` are those of either.
    """
    import numpy as np

    table, lost = _table(codes, bits)
    doubtful = -1 in codes
    keys, target = raw.reshape(-1).view("<u2"), out.reshape(-1).view(table.dtype)
    for first in range(0, len(keys), KEYS):
        part = keys[first : first + KEYS].astype("i8")
        if doubtful and lost.take(part, mode="clip").any():
            return False
        np.take(table, part, out=target[first : first + KEYS], mode="clip")
    return True
