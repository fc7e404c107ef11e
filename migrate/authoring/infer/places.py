"""From pairs of places to strides: the view algebra backwards.

What layout ops do to a tensor is a mixed-radix number read with other weights: an element's place
in the one tensor is written in digits, and each digit moves it by a stride in the other. Pairs of
places of which the values say that they belong together determine the digits from the innermost
outwards: the step between neighbours is the stride, and the longest aligned stretch over which it
holds is the number of values of the digit. Nothing is tried, and some of the places suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# so many pairs say all that more would say
ENOUGH = 1 << 16
# two different layouts agree in at most half of their places; where only a sample is known, so many
# places in a row would have to agree by chance
CERTAIN = 32
_STEPS = 6


class Region(NamedTuple):
    """Where a tensor lies in another: its row-major places, in `digits` of (number of values,
    stride in the other) from the outermost, begin at `offset`.
    """

    offset: int
    digits: tuple[tuple[int, int], ...]


def read_strides(at: Array, to: Array, size: int) -> Region | None:
    """The region whose place number at[k] is to[k], for all k; `at` ascends and is below `size`.

    None if there is none, or if the pairs are too few to see a digit.
    """
    import numpy as np

    if len(at) > ENOUGH:
        # stretches stay whole, so that neighbours remain
        step = -(-len(at) // ENOUGH)
        chosen = np.arange(len(at)).reshape(-1, 1)[: len(at) // 64 * 64].reshape(-1, 64)[::step]
        at, to = at[chosen.reshape(-1)], to[chosen.reshape(-1)]
    digits: list[tuple[int, int]] = []
    while size > 1:
        found = _innermost(at, to, size)
        if found is None:
            return None
        count, stride = found
        digits.append(found)
        to = to - at % count * stride
        at = at // count
        first = np.concatenate(([True], at[1:] != at[:-1]))
        at, to, size = at[first], to[first], size // count
    if len(at) != 1 or at[0] != 0:
        return None
    return Region(int(to[0]), tuple(reversed(digits)))


def _innermost(at: Array, to: Array, size: int) -> tuple[int, int] | None:
    import numpy as np

    if len(at) < 2:
        return None
    gaps, moves = np.diff(at), np.diff(to)
    whole = moves % gaps == 0
    if not whole.any():
        return None
    near = whole & (gaps <= np.partition(gaps[whole], int(whole.sum()) // 2)[int(whole.sum()) // 2])
    steps, counts = np.unique(moves[near] // gaps[near], return_counts=True)
    best: tuple[int, int] | None = None
    for number in np.argsort(-counts, kind="stable")[:_STEPS]:
        step = int(steps[number])
        count = _longest(at, to, size, step)
        if count > 1 and (best is None or count > best[0]):
            best = (count, step)
    return best


def _longest(at: Array, to: Array, size: int, step: int) -> int:
    """The largest divisor of `size` over whose aligned stretches `step` holds."""
    import numpy as np

    base = to - at * step

    def holds(count: int) -> bool:
        same = at[1:] // count == at[:-1] // count
        return bool(same.any() and np.array_equal(base[1:][same], base[:-1][same]))

    found = 1
    for prime in primes(size):
        if holds(found * prime):
            found *= prime
    return found


def primes(number: int) -> list[int]:
    """The prime factors of a number, ascending."""
    out, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            out.append(divisor)
            number //= divisor
        divisor += 1
    return [*out, number] if number > 1 else out


def places(region: Region, at: Array) -> Array:
    """Where the places `at` lie in the other tensor."""
    import numpy as np

    rest, to = at.astype(np.int64), np.full(len(at), region.offset, np.int64)
    for count, stride in reversed(region.digits):
        to += rest % count * stride
        rest //= count
    return to


def is_certain(region: Region, at: Array, size: int) -> bool:
    """Whether no other region has these places: those of which the values left no choice."""
    import numpy as np

    if size == 1:
        return len(at) == 1
    if 2 * len(at) <= size and len(at) < CERTAIN:
        return False
    counts = [prime for count, _ in region.digits for prime in reversed(primes(count))]
    chosen = at if len(at) <= 512 else at[np.linspace(0, len(at) - 1, 512).astype(int)]
    rest, columns = chosen.astype(np.int64), [np.ones(len(chosen))]
    for count in reversed(counts):
        columns.append((rest % count) / (count - 1))
        rest //= count
    table = np.stack(columns)
    return int(np.linalg.matrix_rank(table @ table.T, hermitian=True)) == len(columns)


def row_major(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    out, size = [], 1
    for length in reversed(shape):
        out.append(size)
        size *= length
    return out[::-1]
