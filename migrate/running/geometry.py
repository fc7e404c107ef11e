"""Where the bytes of a tensor come from: its view in bytes, cut to a range, with the loops that a
copy needs; and boxes of tensors, [start, stop) on each axis.

A view is lowered once for all tensors that share it, and each cut of it is kept: the same expert
stack in sixty layers costs one lowering. Everything here is arithmetic; no byte is read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import view as views
from ..core.spec import BITS, coordinates, unit
from ..elements.codes import encode

if TYPE_CHECKING:
    from ..ops.base import Box

# a fill of the stage; between 1 and 4 MiB all sizes copy equally fast, below and above they do not,
# and computing has fewer calls
STAGE = 2 << 20
# the largest fill: what a permutation may take so that its source becomes one range
STAGE_MAX = 4 << 20
# shorter runs are read as a span and rearranged in memory, longer ones are read into their places
SHORT = 2048
KEPT_CUTS = 256
KEPT_PARTS = 512
# moves looked at to decide whether a layout needs a window
SAMPLES = 8


class Move:
    """One piece in bytes: `out[dst + Σ i·d] = leaf[src + Σ i·s]` over runs of `run` bytes, for (n,
    d, s) in `loops`.

    `loops` go from the largest destination stride to the smallest. `lo` and `hi` bound the source
    bytes. `pattern` is the repeated unit of a fill, else None.
    """

    __slots__ = ("dst", "hi", "leaf", "lo", "loops", "nbytes", "pattern", "run", "src")

    def __init__(
        self,
        leaf: int,
        src: int,
        dst: int,
        run: int,
        loops: tuple[tuple[int, int, int], ...],
        pattern: bytes | None = None,
    ) -> None:
        self.leaf, self.src, self.dst = leaf, src, dst
        self.run, self.loops, self.pattern = run, loops, pattern
        self.nbytes = run * prod(n for n, _, _ in loops)
        self.lo = src + sum((n - 1) * s for n, _, s in loops if s < 0)
        self.hi = src + sum((n - 1) * s for n, _, s in loops if s > 0) + run

    @property
    def end(self) -> int:
        """One past the last destination byte."""
        return self.dst + sum((n - 1) * d for n, d, _ in self.loops) + self.run

    def runs(self) -> list[tuple[int, int]]:
        """(source, destination) of each run, relative to `lo` and 0, in order of the source."""
        found = [(self.src - self.lo, self.dst)]
        for n, d, s in sorted(self.loops, key=lambda loop: -abs(loop[2])):
            steps = range(n) if s >= 0 else range(n - 1, -1, -1)
            found = [(a + i * s, b + i * d) for a, b in found for i in steps]
        return found


class ByteLayout:
    """A view in bytes. `whole` is (leaf, source offset) when the tensor is one contiguous range,
    else None.

    `step` is the length of the ranges it should be asked for: whole rows of its loops, so that cuts
    repeat. `windowed` tells that a short range of the result needs a long range of the source (the
    last axis moves). `loose` tensors move elements below a byte that share bytes: they are made
    whole in memory first, and leaf 0 is that memory.
    """

    __slots__ = (
        "_cuts",
        "_ends",
        "_starts",
        "_view",
        "loose",
        "moves",
        "nbytes",
        "step",
        "whole",
        "windowed",
    )

    def __init__(
        self, moves: Sequence[Move], nbytes: int, view: object = None, *, loose: bool = False
    ) -> None:
        self.nbytes, self.loose = nbytes, loose
        # keeps the id of a view taken as long as a table is keyed by it
        self._view = view
        self.moves = moves
        self._starts = [m.dst for m in moves]
        self._ends = list(accumulate((m.end for m in moves), max))
        self._cuts: dict[tuple[int, int], list[Move]] = {}
        self.whole: tuple[int, int] | None = None
        if (
            len(moves) == 1
            and not moves[0].loops
            and moves[0].pattern is None
            and moves[0].run == nbytes
        ):
            self.whole = (moves[0].leaf, moves[0].src)
        self.windowed = self.whole is None and self._needs_window()
        self.step = STAGE if self.whole else self._rows()

    def cut(self, start: int, stop: int) -> list[Move]:
        """The moves that make bytes `start` to `stop`; destinations are relative to the tensor."""
        found = self._cuts.get((start, stop))
        if found is None:
            found = []
            for move in self.moves[
                bisect_right(self._ends, start) : bisect_left(self._starts, stop)
            ]:
                found += _narrowed(move, start, stop)
            if len(self._cuts) >= KEPT_CUTS:
                self._cuts.clear()
            self._cuts[start, stop] = found
        return found

    def moved(self) -> int:
        """Bytes of the moves whose last axis moves: single elements from separate places."""
        return sum(m.nbytes for m in self.moves if m.pattern is None and m.run <= 8 and m.loops)

    def stretches(self, least: int) -> Iterator[tuple[int, int, int, int]]:
        """(leaf, source, destination, bytes) of contiguous copies; in loops, of `least` or more."""
        for move in () if self.loose else self.moves:
            if move.pattern is None and not move.loops:
                yield move.leaf, move.src, move.dst, move.run
            elif move.pattern is None and move.run >= least:
                for a, b in move.runs():
                    yield move.leaf, move.lo + a, b, move.run

    def _needs_window(self) -> bool:
        short = [m for m in self.moves if m.pattern is None and m.run < SHORT and m.loops]
        for move in short[:: max(1, len(short) // SAMPLES)]:
            sample = [
                m
                for m in self.cut(move.dst, min(move.dst + STAGE, self.nbytes))
                if m.pattern is None
            ]
            if sum(m.hi - m.lo for m in sample) > max(4 * sum(m.nbytes for m in sample), STAGE_MAX):
                return True
        return False

    def _rows(self) -> int:
        period = 1
        for move in self.moves:
            # a permutation reads its source in one range if a fill takes all that is permuted
            permuted = any(
                abs(a[2]) < abs(b[2]) for a, b in zip(move.loops, move.loops[1:], strict=False)
            )
            limit = STAGE_MAX if permuted else STAGE
            period = max([period, *(d for n, d, _ in move.loops if n > 1 and d <= limit)])
        # where elements move each fill reads all it permutes: the fewer fills, the less is read
        # again
        size = STAGE_MAX if self.windowed or self.moved() else STAGE
        return max(1, size // period) * period


def _narrowed(move: Move, start: int, stop: int) -> list[Move]:
    """The part of `move` whose destinations lie in the range."""
    end = move.end
    if end <= start or move.dst >= stop:
        return []
    if start <= move.dst and end <= stop:
        return [move]
    if not move.loops:
        first, last = max(start, move.dst), min(stop, end)
        return [Move(move.leaf, move.src + first - move.dst, first, last - first, (), move.pattern)]
    n, d, s = move.loops[0]
    row = end - move.dst - (n - 1) * d
    if row <= d:
        first = max(0, -(-(start - move.dst) // d))
        last = min(n, (stop - move.dst - row) // d + 1)
        before = first > 0 and move.dst + (first - 1) * d + row > start
        after = last < n and move.dst + last * d < stop
        if not before and not after:
            loops = ((last - first, d, s), *move.loops[1:])
            return (
                [
                    Move(
                        move.leaf,
                        move.src + first * s,
                        move.dst + first * d,
                        move.run,
                        loops,
                        move.pattern,
                    )
                ]
                if first < last
                else []
            )
    clipped = views.clip((_piece(move),), start, stop)
    return [_move(p, move.pattern) for p in clipped]


def _piece(move: Move) -> views.Piece:
    loops = [*move.loops, (move.run, 1, 1)]
    return views.Piece(
        move.leaf,
        move.src,
        move.dst,
        tuple(n for n, _, _ in loops),
        tuple(d for _, d, _ in loops),
        tuple(s for _, _, s in loops),
    )


def _move(piece: views.Piece, pattern: bytes | None) -> Move:
    loops = list(zip(piece.counts, piece.dst_strides, piece.src_strides, strict=True))
    run = 1
    if loops and loops[-1][1] == 1 and (loops[-1][2] == 1 or pattern is not None):
        run = loops.pop()[0]
    return Move(
        piece.leaf if isinstance(piece.leaf, int) else -1,
        piece.src,
        piece.dst,
        run,
        tuple(loops),
        pattern,
    )


def _lowered(view: views.View, dtype: str, nbytes: int) -> ByteLayout:
    elements, size = unit(dtype)
    found = views.stretch(view)
    if found is not None and elements == 1:
        return ByteLayout([Move(found[0], found[1] * size, 0, nbytes, ())], nbytes, view)
    try:
        pieces = views.to_bytes(view, elements, size).pieces
    except views.SubByte:
        return ByteLayout([Move(0, 0, 0, nbytes, ())] if nbytes else [], nbytes, view, loose=True)
    return ByteLayout(
        [
            _move(p, encode(dtype, p.leaf.value) if isinstance(p.leaf, views.Fill) else None)
            for p in pieces
        ],
        nbytes,
        view,
    )


class ByteLayouts:
    """The layouts of one run, one for each pair of view and dtype. Threads may share it.

    `sparing`: what is read for a part of a tensor keeps to the bytes that are needed, though short
    runs would sooner be read with what lies between them.
    """

    __slots__ = ("_known", "_laid", "_parts", "sparing")

    def __init__(self, sparing: bool = False) -> None:
        self.sparing = sparing
        self._known: dict[tuple[int, str], ByteLayout] = {}
        # views of boxes by the id of the view that they are of, and layouts of these, let go of
        # together: a run has as many boxes as it has shards, and views that layers share
        self._parts: dict[tuple[int, Box], tuple[views.View, views.View]] = {}
        self._laid: dict[int, dict[str, ByteLayout]] = {}

    def of(self, view: views.View, dtype: str, nbytes: int) -> ByteLayout:
        """The layout of `view` for elements of `dtype`."""
        laid = self._laid.get(id(view))
        found = self._known.get((id(view), dtype)) if laid is None else laid.get(dtype)
        if found is None:
            found = _lowered(view, dtype, nbytes)
            if laid is None:
                self._known[id(view), dtype] = found
            else:
                laid[dtype] = found
        return found

    def box(self, view: views.View, box: Box) -> views.View:
        """A box of `view`; the last are kept. TooManyPieces as `region`."""
        found = self._parts.get((id(view), box))
        if found is None:
            if len(self._parts) >= KEPT_PARTS:
                self._laid.clear()
                self._parts.clear()
            found = self._parts[id(view), box] = view, views.region(view, box)
            if found[1] is not view:
                self._laid.setdefault(id(found[1]), {})
        return found[1]

    def part(self, view: views.View, dtype: str, box: Box) -> tuple[views.View, ByteLayout]:
        """The view and layout of a box of `view`; the last are kept. TooManyPieces as `region`."""
        part = self.box(view, box)
        return part, self.of(part, dtype, (prod(part.shape) * BITS[dtype] + 7) // 8)


def ranges(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes of a row-major `shape` that hold elements `start` to `stop` in order."""
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
    low, steps = coordinates(start - back, shape), [coordinates(abs(s), shape) for _, s in loops]
    far = [
        sum((n - 1) * step[i] for (n, _), step in zip(loops, steps, strict=True))
        for i in range(len(shape))
    ]
    if all(a + d < n for a, d, n in zip(low, far, shape, strict=True)):
        box = tuple((a, a + d + 1) for a, d in zip(low, far, strict=True))
    else:
        end = coordinates(start - back + sum((n - 1) * abs(s) for n, s in loops), shape)
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


def strides_of(sizes: Sequence[int]) -> list[int]:
    out, size = [], 1
    for n in reversed(sizes):
        out.append(size)
        size *= n
    return out[::-1]


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
    """`inner` as an index into an array that holds `outer`; it picks a view of that array."""
    # without the ellipsis numpy would answer with a copy of the element where there are no axes
    return (*(slice(c - a, d - a) for (a, _), (c, d) in zip(outer, inner, strict=True)), ...)
