"""Boxes of computed tensors: which box a read needs, how it is cut to fit memory, and how it is
evaluated.

A computed tensor is never whole in memory if its op says what a part of it needs. A read names a
linear range or a strided move of the tensor's packed bytes; both are turned into boxes of the
result, each box into boxes of the inputs, and those are read as every output is: through a view,
gathered. So a value of values recurses by itself, and a permute of a cast costs no more memory than
a permute.

A box that is what was asked is computed straight into the reader's buffer. Where an op has a
coarser grain, or a move takes elements apart, the box goes through a chunk of this thread, which is
kept: the next read is often the next part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.spec import Spec
from ..elements.raw import carrier
from ..planning.kinds import BLOCKS, FEW, Kind, size_of
from . import transpose
from .gather import ByteReader, Gather, halved
from .geometry import STAGE, ByteLayouts, Move

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box
    from ..planning.graph import Tensor, Value
    from ..source.index import Source
    from .device import Lane
    from .evaluator import Evaluator

# a fill of the buffer grows to this where an op's grain asks for it
GRAIN_MOST = 16 << 20
# chunks that a thread keeps for its next reads
_CHUNKS = 8


def ranges(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes of a row-major `shape` that hold elements `start` to `stop` in order, as few as there
    are.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if start // inner == (stop - 1) // inner and (start % inner or stop % inner):
        index = start // inner
        for box in ranges(shape[1:], start - index * inner, stop - index * inner):
            yield ((index, index + 1), *box)
        return
    if start % inner:
        index = first - 1
        for box in ranges(shape[1:], start - index * inner, inner):
            yield ((index, index + 1), *box)
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    if stop % inner:
        for box in ranges(shape[1:], 0, stop - last * inner):
            yield ((last, last + 1), *box)


def linear(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """The range of row-major elements that is exactly `box`, or None where it is not contiguous."""
    start = stop = 0
    # what comes after a range of several indices is full
    several = False
    for n, (a, b) in zip(shape, box, strict=True):
        if several and (a, b) != (0, n):
            return None
        several = several or b - a != 1
        start, stop = start * n + a, stop * n + b - 1
    return start, stop + 1


class Footprint(NamedTuple):
    """Where a strided move lies in a tensor: its bounding `box`, the index of its first element,
    and the step of each loop as an index. Both hold in any array over a box that holds `box`, by
    that array's strides."""

    box: Box
    start: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def footprint(shape: Sequence[int], start: int, loops: Sequence[tuple[int, int]]) -> Footprint:
    """The smallest box that holds elements start + Σ i·stride for (n, stride) in `loops`.

    Where a loop carries from one axis into the next one, the box is a range of the first axis that
    changes with all of the axes behind it.
    """
    loops = [(n, s) for n, s in loops if n > 1]
    back = sum((n - 1) * -s for n, s in loops if s < 0)
    low, steps = _digits(shape, start - back), [_digits(shape, abs(s)) for _, s in loops]
    far = [
        sum((n - 1) * step[i] for (n, _), step in zip(loops, steps, strict=True))
        for i in range(len(shape))
    ]
    if all(a + d < n for a, d, n in zip(low, far, shape, strict=True)):
        box = tuple((a, a + d + 1) for a, d in zip(low, far, strict=True))
    else:
        end = _digits(shape, start - back + sum((n - 1) * abs(s) for n, s in loops))
        axis = next(i for i, (a, b) in enumerate(zip(low, end, strict=True)) if a != b)
        box = (
            *((a, a + 1) for a in low[:axis]),
            (low[axis], end[axis] + 1),
            *((0, n) for n in shape[axis + 1 :]),
        )
    down = [(n, step) for (n, s), step in zip(loops, steps, strict=True) if s < 0]
    first = tuple(a + sum((n - 1) * step[i] for n, step in down) for i, a in enumerate(low))
    signed = tuple(
        tuple(d if s >= 0 else -d for d in step) for (_, s), step in zip(loops, steps, strict=True)
    )
    return Footprint(box, first, signed)


def _digits(shape: Sequence[int], index: int) -> list[int]:
    out = []
    for n in reversed(shape[1:]):
        index, digit = divmod(index, n)
        out.append(digit)
    out.append(index)
    return out[::-1] if shape else []


def _strides(sizes: Sequence[int]) -> list[int]:
    out, size = [], 1
    for n in reversed(sizes):
        out.append(size)
        size *= n
    return out[::-1]


class ComputedBox(NamedTuple):
    """A box of raw elements that was computed, in memory of this thread."""

    box: Box
    array: np.ndarray[Any, Any]
    memory: np.ndarray[Any, Any]


class Workspace:
    """One thread's memory for computing: input boxes by depth and number, the last chunks, and what
    a move unpacks into.
    """

    __slots__ = ("_chunks", "_slots", "_values", "depth", "lane")

    def __init__(self, values: Evaluator, lane: Lane | None) -> None:
        self._values, self.lane = values, lane
        self.depth = 0
        # the Value is kept beside its chunk: an id means nothing after its object is gone
        self._chunks: OrderedDict[int, tuple[Value, ComputedBox]] = OrderedDict()
        self._slots: dict[tuple[int, int], tuple[memoryview, Gather]] = {}

    def input(self, number: int, tensor: Tensor, box: Box) -> np.ndarray[Any, Any]:
        """The raw elements of a box of input `number`, good until this depth reads that input
        again.
        """
        from .evaluator import unpack

        spec = Spec(tensor.spec.dtype, tuple(b - a for a, b in box))
        nbytes = spec.nbytes
        found = self._slots.get((self.depth, number))
        if found is None or len(found[0]) < nbytes:
            memory = memoryview(bytearray(-(-nbytes // FEW) * FEW))
            found = self._slots[self.depth, number] = memory, self._values.gather(memory)
        memory, gather = found
        self.depth += 1
        try:
            if not self._values.fill(gather, tensor, box):
                return self._values.loose(tensor, box)
        finally:
            self.depth -= 1
        return unpack(memory[:nbytes], spec)

    def settle(self) -> None:
        """Waits until what was given to the device is where it belongs."""
        if self.lane is not None:
            self.lane.drain()

    def has(self, value: Value, box: Box) -> bool:
        """Whether a chunk with `box` is there already."""
        kept = self._chunks.get(id(value))
        return kept is not None and holds(kept[1].box, box)

    def chunk(self, value: Value, kind: Kind, box: Box) -> ComputedBox:
        """A chunk that holds `box`: the last one of this value if it does, else computed now on the
        op's grain.
        """
        import numpy as np

        kept = self._chunks.get(id(value))
        if kept is not None and holds(kept[1].box, box):
            self._chunks.move_to_end(id(value))
            return kept[1]
        box = kind.rounded(box)
        sizes, dtype = tuple(b - a for a, b in box), carrier(kind.spec.dtype)
        nbytes = prod(sizes) * np.dtype(dtype).itemsize
        if kept is not None:
            memory = self._chunks.pop(id(value))[1].memory
        else:
            memory = np.empty(0, "u1")
            while self._chunks and (
                len(self._chunks) >= _CHUNKS
                or nbytes + sum(c.memory.size for _, c in self._chunks.values())
                > self._values.share // 2
            ):
                memory = self._chunks.popitem(last=False)[1][1].memory
        if memory.size < nbytes:
            memory = np.empty(nbytes, "u1")
        array = memory[:nbytes].view(dtype).reshape(sizes)
        self._values.compute(self, value, kind, box, array)
        made = ComputedBox(box, array, memory)
        self._chunks[id(value)] = value, made
        return made


def holds(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` is in `outer`."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def outside(box: Box, other: Box) -> list[Box]:
    """The elements of `box` that are not in `other`, as boxes that share none."""
    if any(b <= c or d <= a for (a, b), (c, d) in zip(box, other, strict=True)):
        return [box]
    found = []
    for axis, ((a, b), (c, d)) in enumerate(zip(box, other, strict=True)):
        found += [
            (*box[:axis], side, *box[axis + 1 :]) for side in ((a, c), (d, b)) if side[0] < side[1]
        ]
        box = (*box[:axis], (max(a, c), min(b, d)), *box[axis + 1 :])
    return found


def joined(one: Box, other: Box) -> Box | None:
    """Both boxes as one, where they lie side by side."""
    apart = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(apart) != 1:
        return None
    (a, b), (c, d) = one[apart[0]], other[apart[0]]
    if b != c and d != a:
        return None
    return (*one[: apart[0]], (min(a, c), max(b, d)), *one[apart[0] + 1 :])


def within(outer: Box, inner: Box) -> tuple[Any, ...]:
    """`inner` as an index into an array that holds `outer`; what it picks is a view of that
    array.
    """
    # without the ellipsis numpy would answer with a copy of the element where there are no axes
    return (*(slice(c - a, d - a) for (a, _), (c, d) in zip(outer, inner, strict=True)), ...)


class ComputedReader(ByteReader):
    """The packed bytes of a computed tensor, none of which is there before it is read."""

    __slots__ = ("_kind", "_value", "_values")

    def __init__(self, values: Evaluator, value: Value, kind: Kind) -> None:
        super().__init__(None, 0)
        self._values, self._value, self._kind = values, value, kind

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the packed tensor."""
        size = self._kind.unit[1]
        before, after = offset % size, -(offset + len(buffer)) % size
        if before or after:
            # a fill may end within a group of elements that share bytes
            wider = memoryview(bytearray(before + len(buffer) + after))
            self.read(offset - before, wider)
            buffer[:] = wider[before : before + len(buffer)]
            return
        at = 0
        for box in ranges(self._kind.shape, offset // size, (offset + len(buffer)) // size):
            nbytes = size_of(box) * size
            self._values.into(
                self._value, self._kind, self._elements(box), buffer[at : at + nbytes]
            )
            at += nbytes

    def move(self, move: Move, out: memoryview, base: int) -> bool:
        """Does one strided move of these bytes: computes its bounding box, and copies from that."""
        size = self._kind.unit[1]
        if any(x % size for x in (move.run, move.src, *(s for _, _, s in move.loops))):
            for a, b in move.runs():
                self.read(move.lo + a, out[base + b : base + b + move.run])
            return True
        loops = [loop for loop in move.loops if loop[0] > 1]
        if not loops:
            self.read(move.src, out[move.dst + base : move.dst + base + move.run])
            return True
        steps = [(n, s // size) for n, _, s in loops]
        found = footprint(self._kind.shape, move.src // size, [*steps, (move.run // size, 1)])
        box = self._elements(found.box)
        if self._kind.cost(box) > self._values.limit:
            for half in halved(move):
                self.move(half, out, base)
            return True
        packed, outer = self._values.packed(self._value, self._kind, box)
        outer = self._units(outer)
        places = [w * size for w in _strides([b - a for a, b in outer])]
        src = sum((i - a) * w for i, (a, _), w in zip(found.start, outer, places, strict=True))
        turned = tuple(
            (n, d, sum(i * w for i, w in zip(step, places, strict=True)))
            for (n, d, _), step in zip(loops, found.steps, strict=False)
        )
        transpose.copy(out, move.dst + base, packed, src, move.run, turned)
        return True

    def scatter(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        for buffer in buffers:
            self.read(offset, buffer)
            offset += len(buffer)

    def _elements(self, box: Box) -> Box:
        per = self._kind.unit[0]
        return box if per == 1 else (*box[:-1], (box[-1][0] * per, box[-1][1] * per))

    def _units(self, box: Box) -> Box:
        per = self._kind.unit[0]
        return box if per == 1 else (*box[:-1], (box[-1][0] // per, box[-1][1] // per))


def step(tensor: Tensor, layouts: ByteLayouts, values: Evaluator | None) -> int:
    """The length of the ranges that a tensor should be asked for: as its layout says, and of
    computed tensors whole boxes on their op's grain, so that no two ranges compute the same
    block."""
    layout = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
    if (
        values is None
        or layout.loose
        or layout.windowed
        or all(isinstance(s, str) for s in tensor.sources)
    ):
        return layout.step
    read = {n: values.kind(s) for n, s in enumerate(tensor.sources) if not isinstance(s, str)}
    # the kinds are kept by `values`, the layout by `layouts`
    key = (id(layout), *[(n, id(kind)) for n, kind in read.items()])
    found = values.steps.get(key)
    if found is None:
        periods = [
            _period(move, read[move.leaf])
            for move in layout.moves
            if move.leaf in read and read[move.leaf].regional
        ]
        period = max(periods, default=1)
        found = layout.step
        if period <= GRAIN_MOST:
            found = (
                max(1, (BLOCKS if layout.whole and period > 1 else layout.step) // period) * period
            )
        values.steps[key] = found
    return found


def _period(move: Move, kind: Kind) -> int:
    """The bytes of a result after which a move begins a new row of the grain of what it reads."""
    shape, (elements, size) = kind.shape, kind.unit
    grain = (*kind.grain[:-1], kind.grain[-1] // elements)
    if move.loops:
        _, width, stride = move.loops[0]
        axes = [i for i, d in enumerate(_digits(shape, abs(stride) // size)) if d]
        return width * grain[axes[0]] if len(axes) == 1 else width
    periods = []
    for axis, n in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * size
        if axis == 0 or n % grain[axis] == 0:
            periods.append(min(grain[axis], n) * inner)
        if grain[axis] > 1:
            break
        periods.append(inner)
    return max((p for p in periods if p <= STAGE), default=min(periods))


def longest_step(tensors: Iterable[Tensor], layouts: ByteLayouts, values: Evaluator) -> int:
    """The longest `step` of these tensors; 1 if there are none."""
    kinds: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        of = [
            (n, id(values.kind(s))) for n, s in enumerate(tensor.sources) if not isinstance(s, str)
        ]
        kinds.setdefault((id(tensor.view), tensor.spec.dtype, *of), tensor)
    return max((step(t, layouts, values) for t in kinds.values()), default=1)


def read_box(
    tensor: Tensor, box: Box, source: Source, *, max_memory: int = 1 << 30
) -> np.ndarray[Any, Any]:
    """The raw elements of a box of any tensor of a graph: stored, moved or computed. Who reads
    often keeps a `Evaluator`.
    """
    from .evaluator import Evaluator

    return Evaluator(source, ByteLayouts(), (), max_memory).read(tensor, box)
