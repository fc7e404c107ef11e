"""Which elements of one tensor are elements of another, by what stands beside them.

An element of 16 bits says little by itself, so that runs are compared: some elements in a row along
any axis. Where a run stands once on either side, its elements belong together. Of large checkpoints
only some runs are taken, which are the same on both sides wherever the elements lie: those whose
first element has certain bits, which many are looked at for in an instant, and whose second one
agrees. So each side is read once, a stretch at a time, and little is kept of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.spec import Spec
from .places import row_major

if TYPE_CHECKING:
    import numpy as np

    from .compared import ComparedTensor

    Array = np.ndarray[Any, Any]

# elements of the tensors compared at once, beyond which runs are sampled
DENSE = 1 << 22
# so many runs along each axis are then taken of all of them together
SPARSE = 1 << 18
# tensors of which each run is taken all the same
SMALL = 1 << 14
LENGTHS = (8, 4)
# elements from the first to the last of a sampled run: what has to be held beyond a stretch
FARTHEST = 1 << 20
# runs that are looked at of two tensors, of which more have been sampled
ENOUGH = 1 << 11
_ODD = 0x9E3779B97F4A7C15
# the bits of an element that choose it, from the lowest: those of a mantissa, whatever the scale of
# the numbers; above those of bfloat16 in wider floats, which may come of it
_CHOOSING = {
    "bfloat16": (0, 9),
    "float16": (3, 7),
    "float32": (16, 7),
    "float64": (45, 7),
    "float8_e4m3fn": (0, 5),
    "float8_e5m2": (0, 4),
}
_OTHERS = {1: (0, 5), 2: (0, 7), 4: (0, 7), 8: (0, 7)}
_BITS = 0b101100101


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
    """The binary logarithm of how many runs one is taken of."""
    if elements <= DENSE:
        return 0
    return (elements // SPARSE).bit_length()


def runs_of(tensor: ComparedTensor, bits: int) -> Runs:
    """The runs of a tensor that are compared."""
    if not is_sampled(tensor.spec, bits):
        return _all_runs(tensor.read(), tensor.spec.dtype)
    sampler = RunSampler(tensor.spec, bits)
    for start, count, flat in tensor.stretches(sampler.beyond):
        sampler.take(start, count, flat)
    return sampler.runs()


def is_sampled(spec: Spec, bits: int) -> bool:
    """Whether not all runs of a tensor are taken."""
    return bits > 0 and spec.numel > SMALL


def _all_runs(array: Array, dtype: str) -> Runs:
    import numpy as np

    flat = _whole_numbers(np.ascontiguousarray(array).reshape(-1))
    width, salt = flat.dtype.itemsize, salt_of(dtype)
    everywhere = np.arange(flat.size)
    out: list[tuple[Array, Array, int, int]] = []
    if width >= 4:
        out.append((_mixed(flat.astype(np.uint64) ^ salt), everywhere, 0, 1))
    for length, stride in zip(array.shape, row_major(array.shape), strict=True):
        lengths = [n for n in LENGTHS if n <= length]
        if not lengths and width < 4 and 2 <= length < min(LENGTHS):
            lengths = [length]
        index = everywhere // stride % length
        for count in lengths:
            begin = everywhere[index <= length - count]
            out.append((*_hashed(flat, begin, begin, stride, count, salt), stride, count))
    return _runs(out)


class RunSampler:
    """Samples the runs of a tensor whose stretches come one after the other. `beyond` of the
    elements behind a stretch have to come with it.
    """

    def __init__(self, spec: Spec, bits: int) -> None:
        import numpy as np

        shift, most = (
            _CHOOSING.get(spec.dtype) or _OTHERS[min(8, max(1, spec.nbytes // spec.numel))]
        )
        first = min(bits, most)
        self._mask, self._wanted = ((1 << first) - 1) << shift, (_BITS & (1 << first) - 1) << shift
        self._second = np.uint64(64 - min(bits - first, 40)) if bits > first else None
        self._salt = salt_of(spec.dtype)
        self._axes = [
            (stride, length, max(n for n in LENGTHS if n <= length))
            for length, stride in zip(spec.shape, row_major(spec.shape), strict=True)
            if length >= min(LENGTHS)
        ]
        self._axes = [a for a in self._axes if a[0] * (a[2] - 1) <= FARTHEST]
        self.beyond = max((stride * (n - 1) for stride, _, n in self._axes), default=0)
        self._found: list[tuple[Array, Array, int, int]] = []
        # kept from stretch to stretch: fresh memory is slow
        self._low: Array = np.empty(0, "u1")
        self._told: Array = np.empty(0, bool)

    def take(self, start: int, count: int, flat: Array) -> None:
        """Takes what begins among the first `count` of these elements; the first is number
        `start`.
        """
        import numpy as np

        flat = _whole_numbers(flat)
        kind = flat.dtype.type
        if self._low.dtype != flat.dtype or self._low.size < count:
            self._low, self._told = np.empty(count, flat.dtype), np.empty(count, bool)
        low, told = self._low[:count], self._told[:count]
        np.bitwise_and(flat[:count], kind(self._mask), out=low)
        chosen = np.flatnonzero(np.equal(low, kind(self._wanted), out=told))
        if not chosen.size:
            return
        for stride, length, many in self._axes:
            begin = chosen[(chosen + start) // stride % length <= length - many]
            if self._second is not None:
                one, two = flat[begin].astype(np.uint64), flat[begin + stride].astype(np.uint64)
                both = _mixed((one << np.uint64(32) ^ two) * np.uint64(_ODD)) * np.uint64(_ODD)
                begin = begin[both >> self._second == 0]
            hashes, at = _hashed(flat, begin, begin + start, stride, many, self._salt)
            if hashes.size:
                self._found.append((hashes, at, stride, many))

    def runs(self) -> Runs:
        """All that were taken."""
        return _runs(self._found)


def _whole_numbers(flat: Array) -> Array:
    """Elements as integers; two halves of 64 bits as one number."""
    import numpy as np

    if flat.dtype.kind != "V":
        return flat
    halves = np.ascontiguousarray(flat).view("<u8").reshape(-1, 2)
    mixed: Array = halves[:, 0] * np.uint64(_ODD) ^ halves[:, 1]
    return mixed


def _hashed(
    flat: Array, begin: Array, places: Array, stride: int, count: int, salt: Any
) -> tuple[Array, Array]:
    """The hashes of the runs that begin there and say something, and their places."""
    import numpy as np

    elements = [flat[begin + k * stride] for k in range(count)]
    told = _differing(elements)
    value = np.full(int(told.sum()), salt ^ np.uint64(count * 0x51ED27), np.uint64)
    for one in elements:
        value = _mixed(value * np.uint64(_ODD) + one[told].astype(np.uint64))
    return value, places[told]


def _differing(elements: Sequence[Array]) -> Array:
    """Where of several elements at least three differ, or both of two."""
    import numpy as np

    first = elements[0]
    # one that is not the first, and one that is neither
    other, unlike = first.copy(), np.zeros(first.shape, bool)
    told = np.zeros(first.shape, bool)
    for one in elements[1:]:
        new = one != first
        told |= unlike & new & (one != other)
        fresh = new & ~unlike
        other[fresh] = one[fresh]
        unlike |= new
    return told if len(elements) > 2 else unlike


def _runs(found: Sequence[tuple[Array, Array, int, int]]) -> Runs:
    import numpy as np

    empty = np.empty(0, np.int64)
    if not found:
        return Runs(np.empty(0, np.uint64), empty, empty, empty)
    sizes = [len(f[1]) for f in found]
    return Runs(
        np.concatenate([f[0] for f in found]),
        np.concatenate([f[1] for f in found]),
        np.repeat(np.array([f[2] for f in found]), sizes),
        np.repeat(np.array([f[3] for f in found], np.int8), sizes),
    )


def salt_of(dtype: str) -> Any:
    """What goes into hashes of elements, so that equal bits of two dtypes are not equal."""
    import numpy as np

    x = (sum(dtype.encode()) + 257 * len(dtype)) * _ODD & (1 << 64) - 1
    return np.uint64(x ^ x >> 29)


def _mixed(x: Array) -> Array:
    import numpy as np

    x = x ^ (x >> np.uint64(31))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    mixed: Array = x ^ (x >> np.uint64(29))
    return mixed


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
        owners = np.repeat(np.arange(len(held)), [len(r.hashes) for r in held])
        self._owners = owners[order]
        self._starts = np.concatenate([r.starts for r in held] or [empty])[order]
        self._steps = np.concatenate([r.steps for r in held] or [empty])[order]

    def pairs(self, runs: Runs, sampled: bool) -> Iterator[tuple[int, Pairs]]:
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
        by_owner = np.lexsort((runs.starts[order], self._owners[at]))
        at, order = at[by_owner], order[by_owner]
        owners = self._owners[at]
        borders = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1], [True])))
        for low, high in pairwise(borders if len(at) else ()):
            here, there = at[low:high], order[low:high]
            if sampled and len(here) > ENOUGH:
                # stretches stay whole, so that neighbours remain
                kept = np.arange(len(here)).reshape(1, -1)[:, : len(here) // 64 * 64]
                kept = kept.reshape(-1, 64)[:: -(-len(here) // ENOUGH)].reshape(-1)
                here, there = here[kept], there[kept]
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
            pairs = Pairs(np.concatenate(olds), np.concatenate(news))
            yield int(owners[low]), consistent(pairs)


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
    order = np.lexsort((pairs.new, pairs.old))
    old, new = pairs.old[order], pairs.new[order]
    first = np.concatenate(([True], (old[1:] != old[:-1]) | (new[1:] != new[:-1])))
    old, new = old[first], new[first]
    single = _once(old)
    order = np.argsort(new, kind="stable")
    single[order] &= _once(new[order])
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
