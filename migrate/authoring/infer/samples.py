"""Which elements of one tensor are elements of another, by what stands beside them.

An element of 16 bits says little by itself, so that runs are compared: some elements in a row along
any axis. Where a run stands once on either side, its elements belong together. Of large checkpoints
only the runs are taken that begin with one of certain values, which are the same on both sides
wherever the elements lie, so that each side is read once and little is kept of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .places import row_major

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# elements of the tensors compared at once, beyond which runs are sampled
DENSE = 1 << 22
# tensors of which each run is taken all the same
SMALL = 1 << 14
LENGTHS = (8, 4)
_ODD = 0x9E3779B97F4A7C15
_PIECE = 1 << 20


class Runs(NamedTuple):
    """The hashes of some runs of one tensor, where each begins, and its step and length."""

    hashes: Array
    starts: Array
    steps: Array
    lengths: Array


class Pairs(NamedTuple):
    """Places in an old tensor and in a new one that belong together."""

    old: Array
    new: Array


def sampling(elements: int) -> int:
    """How many bits of an element's hash have to be 0 for a run that begins there to be taken."""
    bits = 0
    while elements >> bits > DENSE:
        bits += 1
    return bits


def runs_of(array: Array, dtype: str, bits: int) -> Runs:
    """The runs of a tensor of raw elements that are compared."""
    import numpy as np

    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "V":
        # two halves of 64 bits
        halves = flat.view("<u8").reshape(-1, 2)
        flat = halves[:, 0] * np.uint64(_ODD) ^ halves[:, 1]
    width = flat.dtype.itemsize
    salt = np.uint64(_mix_int(sum(dtype.encode()) + 257 * len(dtype)))
    chosen = _chosen(flat, bits if flat.size > SMALL else 0)
    out: list[tuple[Array, Array, int, int]] = []
    if width >= 4 and (not bits or flat.size <= SMALL):
        out.append((_mixed(flat[chosen].astype(np.uint64) ^ salt), chosen, 0, 1))
    strides = row_major(array.shape)
    for axis, length in enumerate(array.shape):
        lengths = [n for n in LENGTHS if n <= length]
        if not lengths and width < 4 and 2 <= length < min(LENGTHS) and not bits:
            lengths = [length]
        stride = strides[axis]
        for count in lengths:
            index = chosen // stride % length
            begin = chosen[index <= length - count]
            if not begin.size:
                continue
            elements = np.stack([flat[begin + k * stride] for k in range(count)], 1).astype(
                np.uint64
            )
            ordered = np.sort(elements, 1)
            differing = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
            told = differing >= min(3, count)
            begin, elements = begin[told], elements[told]
            value = np.full(len(begin), salt ^ np.uint64(count * 0x51ED27), np.uint64)
            for k in range(count):
                value = _mixed(value * np.uint64(_ODD) + elements[:, k])
            out.append((value, begin, stride, count))
    if not out:
        empty = np.empty(0, np.int64)
        return Runs(np.empty(0, np.uint64), empty, empty, empty)
    return Runs(
        np.concatenate([o[0] for o in out]),
        np.concatenate([o[1] for o in out]),
        np.concatenate([np.full(len(o[1]), o[2]) for o in out]),
        np.concatenate([np.full(len(o[1]), o[3]) for o in out]),
    )


def _chosen(flat: Array, bits: int) -> Array:
    import numpy as np

    if not bits:
        return np.arange(flat.size)
    found = []
    for start in range(0, flat.size, _PIECE):
        piece = flat[start : start + _PIECE].astype(np.uint64) * np.uint64(_ODD)
        found.append(np.flatnonzero(piece >> np.uint64(64 - bits) == 0) + start)
    return np.concatenate(found)


def _mixed(x: Array) -> Array:
    import numpy as np

    x = x ^ (x >> np.uint64(31))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    mixed: Array = x ^ (x >> np.uint64(29))
    return mixed


def _mix_int(x: int) -> int:
    x = x * _ODD & (1 << 64) - 1
    return x ^ x >> 29


class KnownRuns:
    """The runs of all old tensors, of which those that stand once can be found."""

    def __init__(self, runs: Iterable[Runs]) -> None:
        import numpy as np

        held = list(runs)
        empty = np.empty(0, np.int64)
        hashes = np.concatenate([r.hashes for r in held] or [np.empty(0, np.uint64)])
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        once = _once(hashes)
        self._hashes, order = hashes[once], order[once]
        owners = np.concatenate([np.full(len(r.hashes), i) for i, r in enumerate(held)] or [empty])
        self._owners = owners[order]
        self._starts = np.concatenate([r.starts for r in held] or [empty])[order]
        self._steps = np.concatenate([r.steps for r in held] or [empty])[order]

    def pairs(self, runs: Runs) -> Iterator[tuple[int, Pairs]]:
        """The old tensors, by number, of which runs stand in this new one, and what belongs
        together.
        """
        import numpy as np

        order = np.argsort(runs.hashes, kind="stable")
        order = order[_once(runs.hashes[order])]
        if not len(order) or not len(self._hashes):
            return
        hashes = runs.hashes[order]
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        same = self._hashes[at] == hashes
        at, order = at[same], order[same]
        for owner in np.unique(self._owners[at]):
            mine = self._owners[at] == owner
            here, there = at[mine], order[mine]
            olds, news = [], []
            lengths = runs.lengths[there]
            for count in np.unique(lengths):
                some = lengths == count
                k = np.arange(count)
                olds.append(
                    (self._starts[here[some], None] + k * self._steps[here[some], None]).reshape(-1)
                )
                news.append(
                    (runs.starts[there[some], None] + k * runs.steps[there[some], None]).reshape(-1)
                )
            yield int(owner), consistent(Pairs(np.concatenate(olds), np.concatenate(news)))


def _once(ordered: Array) -> Array:
    """Which of these, in order, occur once."""
    import numpy as np

    differ = ordered[1:] != ordered[:-1]
    return (
        np.concatenate(([True], differ)) & np.concatenate((differ, [True]))
        if len(ordered)
        else np.empty(0, bool)
    )


def consistent(pairs: Pairs) -> Pairs:
    """Each pair once, without places that belong to several."""
    import numpy as np

    if not len(pairs.old):
        return pairs
    width = int(pairs.new.max()) + 1
    old, new = np.divmod(np.unique(pairs.old * width + pairs.new), width)
    single = np.ones(len(old), bool)
    for column in (old, new):
        values, counts = np.unique(column, return_counts=True)
        single &= counts[np.searchsorted(values, column)] == 1
    return Pairs(old[single], new[single])


def single_elements(olds: list[Array], new: Array) -> list[Pairs]:
    """The elements that occur once among the old tensors and once in the new one, by old tensor."""
    import numpy as np

    flat = np.concatenate([o.reshape(-1) for o in olds])
    borders = np.cumsum([0, *(o.size for o in olds)])
    if flat.dtype.kind == "V":
        return [Pairs(np.empty(0, np.int64), np.empty(0, np.int64)) for _ in olds]
    order = np.argsort(flat, kind="stable")
    order = order[_once(flat[order])]
    there = np.argsort(new.reshape(-1), kind="stable")
    there = there[_once(new.reshape(-1)[there])]
    values = new.reshape(-1)[there]
    if not len(order):
        return [Pairs(np.empty(0, np.int64), np.empty(0, np.int64)) for _ in olds]
    at = np.minimum(np.searchsorted(flat[order], values), len(order) - 1)
    same = flat[order][at] == values
    old, to = order[at[same]], there[same]
    out = []
    for low, high in pairwise(borders):
        mine = (old >= low) & (old < high)
        out.append(Pairs(old[mine] - low, to[mine]))
    return out
