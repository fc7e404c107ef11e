"""Reads bytes of a tensor into a buffer, and rearranges bytes in memory.

The length of the runs decides how a tensor is read:

    whole tensor, runs of 32 KiB and more   one preadv for each run
    2 KiB to 32 KiB                         preadv with up to 1024 buffers; small gaps go to a waste
                                            buffer
    shorter                                 one preadv of the span, then a strided copy in memory
    the last axis moves                     a window of the source in memory, then transposes

The list of buffers is kept for each geometry, because making it costs as much as the copy. One
Gather belongs to one thread and one buffer; a Window may be shared by those that gather for one
file.

In memory short runs are copied as the widest integer that divides them. A moved last axis is the
one case where the choice of loops decides over a factor of three (`elements.transposes`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..core.errors import fail, option, printable
from ..elements.transposes import flip_panel
from ..source.blobs import ChunkOf, chunk_at, room
from .geometry import SHORT, STAGE_MAX, ByteLayout, ByteLayouts, Move

if TYPE_CHECKING:
    import numpy as np

    from ..planning.graph import ComputedTensor, Tensor, TensorSource
    from ..source.blobs import Blob
    from ..source.index import Source

Loops = tuple[tuple[int, int, int], ...]

_FEW = 8
# elements nearer to each other than this share cache lines, and a plain strided copy is as good
_LINE = 64
# bytes of an element of numpy
_LONGEST = (1 << 31) - 1
_OWN = threading.local()


class Sealed(NamedTuple):
    """A stretch of an output file that is made from the CRC-32s of its first `tensors` places."""

    tensors: int


class Segment(NamedTuple):
    """Bytes `start` to `stop` of a tensor, header or seal, at `at`. `last`: its place ends here."""

    content: Tensor | bytes | Sealed
    start: int
    stop: int
    at: int
    last: bool


class Batch(NamedTuple):
    """What goes through the buffer at once: `length` bytes for `offset` of the file."""

    offset: int
    length: int
    parts: list[Segment]


def copy_strided(
    dest: memoryview, dst: int, source: memoryview, src: int, run: int, loops: Loops
) -> None:
    """`dest[dst + Σ i·d] = source[src + Σ i·s]` for `run` bytes over (n, d, s), d descending."""
    loops = tuple(loop for loop in loops if loop[0] != 1)
    if not loops:
        dest[dst : dst + run] = source[src : src + run]
        return
    if run <= 8 and run in (1, 2, 4, 8):
        n, d, s = loops[-1]
        rest = loops[:-1]
        if d == run and rest and s > _LINE and s > min(abs(loop[2]) for loop in rest):
            if n <= _FEW:
                for i in range(n):
                    _strided(dest, dst + i * d, source, src + i * s, run, rest)
                return
            if prod(loop[0] for loop in rest) > _FEW:
                _transposed(dest, dst, source, src, run, (n, s), rest)
                return
    _strided(dest, dst, source, src, run, loops)


def _strided(
    dest: memoryview, dst: int, source: memoryview, src: int, run: int, loops: Loops
) -> None:
    import numpy as np

    # of integers the machine has there are loops for each stride; other runs are copied as a whole
    kind = f"u{run}" if run in (1, 2, 4, 8) else f"V{run}"
    if run > _LONGEST:
        kind, loops = "u1", (*loops, (run, 1, 1))
    shape, to, back = zip(*loops, strict=True)
    out: np.ndarray[Any, Any] = np.ndarray(shape, kind, dest, dst, to)
    out[...] = np.ndarray(shape, kind, source, src, back)


def _transposed(
    dest: memoryview,
    dst: int,
    source: memoryview,
    src: int,
    item: int,
    inner: tuple[int, int],
    rest: Loops,
) -> None:
    """The destination's rows of `inner` = (n, source stride) items are columns of the source."""
    import numpy as np

    n, stride = inner
    kind = f"u{item}"
    columns = prod(loop[0] for loop in rest)
    panel = np.ndarray(
        (n, *(m for m, _, _ in rest)), kind, source, src, (stride, *(s for _, _, s in rest))
    )
    if len(rest) > 1 or rest[0][2] != item:
        # gathered: one column for each row of the destination, in the destination's order
        gathered = np.frombuffer(_panel(n * columns * item), kind, n * columns).reshape(n, columns)
        gathered.reshape(panel.shape)[...] = panel
        panel = gathered
    if _dense(rest, n * item) and dst % item == 0:
        flip_panel(panel, np.frombuffer(dest, kind, n * columns, dst).reshape(columns, n))
        return
    rows = np.empty((columns, n), kind)
    flip_panel(panel, rows)
    compact, loops = n * item, []
    for m, d, _ in reversed(rest):
        loops.append((m, d, compact))
        compact *= m
    _strided(dest, dst, rows.reshape(-1).view("u1").data, 0, n * item, tuple(reversed(loops)))


def _panel(nbytes: int) -> bytearray:
    """This thread's memory for a panel, kept: an allocator would fault it in anew each time."""
    kept: bytearray | None = getattr(_OWN, "panel", None)
    if kept is None or len(kept) < nbytes:
        kept = _OWN.panel = bytearray(nbytes)
    return kept


def _dense(loops: Loops, row: int) -> bool:
    for n, d, _ in reversed(loops):
        if d != row:
            return False
        row *= n
    return True


# from this run length on a system call for each run costs nothing
LONG = 32 << 10
# a gap of the source that is cheaper to read than to skip
GAP = 16 << 10
# runs that lie near to each other are read into their places from this length on: it is as fast as
# to copy them out of a span, and does not import numpy
CLOSE = 1024
# the most that is read of a span of short runs, as a multiple of what is needed of it, where bytes
# are to be spared
SPARING = 2
_IOVECS = 1024
_KEPT_BUFFERS = 16384
_SPAN = 256 << 10
# source bytes held at a time for a transpose
WINDOW = 64 << 20


# the packed bytes of a computed value, or of a tensor whose elements below a byte move one by one
Compute: TypeAlias = "Callable[[ComputedTensor | Tensor], ByteReader]"


class ByteReader:
    """Bytes that moves read: a blob from byte `base` on, memory, or what a subclass makes."""

    __slots__ = ("base", "blob", "fd", "file", "memory")

    def __init__(self, blob: Blob | None, base: int, memory: memoryview | None = None) -> None:
        self.blob, self.base, self.memory = blob, base, memory
        self.fd = blob.fileno() if blob is not None else None
        # a file that does not stay open
        self.file = (
            blob if blob is not None and self.fd is None and blob.identity is not None else None
        )

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; CheckpointError M905 past the end, RunError M913."""
        if self.memory is not None:
            buffer[:] = self.memory[offset : offset + len(buffer)]
        elif self.blob is not None:
            try:
                if self._preadv((buffer,), offset) != len(buffer):
                    self.blob.readinto(self.base + offset, buffer)
            except OSError as error:
                unreadable(self.blob, error)

    def _preadv(self, buffers: Sequence[memoryview], offset: int) -> int:
        """The bytes read by one system call; -1 where there is no file to read."""
        if self.fd is not None:
            return os.preadv(self.fd, buffers, self.base + offset)
        if self.file is None:
            return -1
        with self.file.hold() as descriptor:
            return -1 if descriptor is None else os.preadv(descriptor, buffers, self.base + offset)

    def move(self, move: Move, out: memoryview, base: int) -> bool:
        """Does a strided move in its own way, if it has one; `base` is added to its destination."""
        return False

    def scatter(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        """Fills the buffers, one after the other, from `offset`."""
        try:
            if self._preadv(buffers, offset) == nbytes:
                return
        except OSError as error:
            if self.blob is not None:
                unreadable(self.blob, error)
        for buffer in buffers:
            self.read(offset, buffer)
            offset += len(buffer)


def unreadable(blob: Blob, error: OSError) -> None:
    """RunError M913 for a source that cannot be read."""
    fail(
        "M913",
        f"cannot read {printable(blob.name)}: {error.strerror}",
        help=f"repair the storage, then run it again with {option('resume', True)}",
    )


def stored_reader(source: Source, name: str | ChunkOf) -> ByteReader:
    """The leaf of a stored tensor, or of one of its chunks."""
    at = chunk_at(source.index.tensors, name)
    return ByteReader(source.blobs[at.blob], at.offset)


class Shown(NamedTuple):
    """A stretch of a tensor, laid out as `of`, that the window holds: its layout over `leaves`."""

    tensor: Tensor
    of: ByteLayout
    start: int
    stop: int
    layout: ByteLayout
    leaves: list[ByteReader]


class Window:
    """Source bytes of a stretch of one tensor, in memory; the threads that gather for one file
    share it.

    It moves on when it is not in use any more.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._shown: Shown | None = None
        self._lookers = 0
        self._changed = threading.Condition()

    @contextmanager
    def showing(
        self, tensor: Tensor, of: ByteLayout, start: int, stop: int, load: Callable[[], Shown]
    ) -> Iterator[Shown]:
        """The window over bytes `start` to `stop` of the tensor, loaded by `load` if it is not."""
        with self._changed:
            while not (
                (shown := self._shown)
                and shown.tensor is tensor
                and shown.of is of
                and shown.start <= start < stop <= shown.stop
            ):
                if not self._lookers:
                    self._shown = None
                    shown = self._shown = load()
                    break
                self._changed.wait()
            self._lookers += 1
        try:
            yield shown
        finally:
            with self._changed:
                self._lookers -= 1
                self._changed.notify_all()

    def room(self, nbytes: int) -> memoryview:
        """Memory for a stretch of `nbytes`; what was shown before is lost."""
        if len(self._memory) < nbytes:
            self._memory = memoryview(b"")
            self._memory = room(nbytes)
        return self._memory


class Gather:
    """Fills ranges of `buffer`. `compute` gives the bytes of computed tensors."""

    __slots__ = (
        "_compute",
        "_gap",
        "_kept",
        "_layouts",
        "_leaves",
        "_scratch",
        "_source",
        "_vectors",
        "_waste",
        "_window",
        "_windowed",
        "budget",
        "buffer",
    )

    def __init__(
        self,
        source: Source,
        layouts: ByteLayouts,
        buffer: memoryview,
        compute: Compute | None,
        budget: int = WINDOW,
        window: Window | None = None,
    ) -> None:
        self._source, self._layouts, self.buffer, self._compute = source, layouts, buffer, compute
        self.budget = max(budget, 2 * STAGE_MAX)
        self._gap = 0 if layouts.sparing else GAP
        self._scratch = memoryview(b"")
        self._waste = memoryview(bytearray(GAP))
        self._vectors: dict[
            tuple[int, tuple[tuple[int, int, int], ...], int],
            list[tuple[int, list[memoryview], int]],
        ] = {}
        self._kept = 0
        self._leaves: tuple[Tensor, list[ByteReader]] | None = None
        self._window = window if window is not None else Window()

    def fill(
        self, tensor: Tensor, start: int, stop: int, at: int, layout: ByteLayout | None = None
    ) -> None:
        """Puts bytes `start` to `stop` of a tensor, or of its part `layout`, at `at`."""
        if layout is None:
            layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        if self._leaves is None or self._leaves[0] is not tensor:
            made = [self._leaf(tensor)] if layout.loose else [self._leaf(s) for s in tensor.sources]
            self._leaves = (tensor, made)
        leaves = self._leaves[1]
        if layout.whole is not None:
            leaf, offset = layout.whole
            leaves[leaf].read(offset + start, self.buffer[at : at + stop - start])
            return
        if layout.windowed:
            with self._window.showing(
                tensor, layout, start, stop, lambda: self._load(tensor, layout, leaves, start, stop)
            ) as view:
                for move in view.layout.cut(start - view.start, stop - view.start):
                    self._move(move, view.leaves, self.buffer, at - (start - view.start), True)
            return
        for move in layout.cut(start, stop):
            self._move(move, leaves, self.buffer, at - start, True)

    def take(self, batch: Batch) -> None:
        """Puts all of a batch into the buffer, but for what is sealed later."""
        for content, start, stop, at, last in batch.parts:
            if isinstance(content, bytes):
                self.buffer[at : at + stop - start] = content[start:stop]
            elif not isinstance(content, Sealed):
                self.fill(content, start, stop, at)
                if last:
                    self.release()

    def release(self) -> None:
        """Lets go of the tensor last read, so that computed values can be freed."""
        self._leaves = None

    def _leaf(self, source: TensorSource | Tensor) -> ByteReader:
        if isinstance(source, (str, ChunkOf)):
            return stored_reader(self._source, source)
        if self._compute is None:
            raise ValueError("nothing computes here")
        return self._compute(source)

    def _move(
        self, move: Move, leaves: Sequence[ByteReader], out: memoryview, base: int, keep: bool
    ) -> None:
        at = move.dst + base
        if move.pattern is not None:
            _fill(out, at, move, move.pattern)
            return
        leaf = leaves[move.leaf]
        if not move.loops:
            leaf.read(move.src, out[at : at + move.run])
        elif leaf.move(move, out, base):
            return
        elif leaf.memory is not None:
            copy_strided(out, at, leaf.memory, move.src, move.run, move.loops)
        elif move.run >= LONG:
            for a, b in move.runs():
                leaf.read(move.lo + a, out[base + b : base + b + move.run])
        elif move.run >= SHORT or (keep and leaf.fd is not None and self._close(move)):
            for a, buffers, nbytes in self._scattered(move, out, base, keep):
                leaf.scatter(move.lo + a, buffers, nbytes)
        else:
            self._span(move, leaf, out, base)

    def _close(self, move: Move) -> bool:
        """Whether its runs lie so near that one call reads them into their places, with what lies
        between them, as fast as they would be copied there out of a span.
        """
        step = move.loops[-1][2]
        return CLOSE <= move.run <= step <= min(4 * move.run, move.run + self._gap)

    def _scattered(
        self, move: Move, out: memoryview, base: int, keep: bool
    ) -> list[tuple[int, list[memoryview], int]]:
        """(offset from `move.lo`, buffers, bytes) of each system call."""
        key = (move.run, move.loops, move.dst + base)
        found = self._vectors.get(key) if keep else None
        if found is not None:
            return found
        found, run, end = [], move.run, -1
        buffers: list[memoryview] = []
        for a, b in move.runs():
            gap = a - end
            if not found or not 0 <= gap <= self._gap or len(buffers) > _IOVECS - 2:
                buffers = []
                found.append((a, buffers, 0))
            elif gap:
                buffers.append(self._waste[:gap])
            buffers.append(out[base + b : base + b + run])
            end = a + run
            found[-1] = (found[-1][0], buffers, end - found[-1][0])
        if keep:
            count = sum(len(b) for _, b, _ in found)
            if self._kept + count > _KEPT_BUFFERS:
                self._vectors.clear()
                self._kept = 0
            self._vectors[key] = found
            self._kept += count
        return found

    def _span(self, move: Move, leaf: ByteReader, out: memoryview, base: int) -> None:
        span = move.hi - move.lo
        most = SPARING * move.nbytes if self._layouts.sparing else max(_SPAN, 4 * move.nbytes)
        if span <= STAGE_MAX and span <= most:
            if len(self._scratch) < span:
                self._scratch = room(min(STAGE_MAX, max(span, 1 << 20)))
            leaf.read(move.lo, self._scratch[:span])
            copy_strided(
                out, move.dst + base, self._scratch, move.src - move.lo, move.run, move.loops
            )
            return
        # too sparse to be read in one
        halves = halved(move)
        if not halves:
            leaf.read(move.src, out[move.dst + base : move.dst + base + move.run])
        for half in halves:
            self._span(half, leaf, out, base)

    def _load(
        self, tensor: Tensor, layout: ByteLayout, leaves: list[ByteReader], start: int, stop: int
    ) -> Shown:
        """What the tensor's next `budget` bytes need, read into the window in source order."""
        rows = max(stop - start, self.budget // layout.step * layout.step)
        stop = min(layout.nbytes, start + rows)
        memory = self._window.room(stop - start)
        used, here = 0, []
        for move in layout.cut(start, stop):
            if move.pattern is not None or leaves[move.leaf].memory is not None:
                here.append(
                    Move(move.leaf, move.src, move.dst - start, move.run, move.loops, move.pattern)
                )
                continue
            packed = _packed(move)
            self._move(
                Move(move.leaf, move.src, packed[0], move.run, packed[1]),
                leaves,
                memory,
                used,
                False,
            )
            loops = tuple((n, d, p[1]) for (n, d, _), p in zip(move.loops, packed[1], strict=True))
            here.append(Move(len(leaves), used + packed[0], move.dst - start, move.run, loops))
            used += move.nbytes
        here.sort(key=lambda m: m.dst)
        return Shown(
            tensor,
            layout,
            start,
            stop,
            ByteLayout(here, stop - start),
            [*leaves, ByteReader(None, 0, memory)],
        )


def halved(move: Move) -> list[Move]:
    """The move as two, cut in the loop of the longest source stride; empty without loops."""
    j = max(
        (i for i, loop in enumerate(move.loops) if loop[0] > 1),
        key=lambda i: abs(move.loops[i][2]),
        default=None,
    )
    if j is None:
        return []
    n, d, s = move.loops[j]
    return [
        Move(
            move.leaf,
            move.src + i * s,
            move.dst + i * d,
            move.run,
            (*move.loops[:j], (count, d, s), *move.loops[j + 1 :]),
        )
        for i, count in ((0, n // 2), (n // 2, n - n // 2))
    ]


def _packed(move: Move) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """The move's first run in a compact copy in source order, and loops (n, place, source)."""
    size, strides, first = move.run, [0] * len(move.loops), 0
    for i in sorted(range(len(move.loops)), key=lambda i: abs(move.loops[i][2])):
        n, _, s = move.loops[i]
        if s:
            strides[i] = size if s > 0 else -size
            first += (n - 1) * size if s < 0 else 0
            size *= n
    return first, tuple((n, strides[i], s) for i, (n, _, s) in enumerate(move.loops))


def _fill(out: memoryview, at: int, move: Move, unit: bytes) -> None:
    shift = move.dst % len(unit)
    turned = unit[shift:] + unit[:shift]
    run = (turned * (move.run // len(unit) + 1))[: move.run]
    if not move.loops:
        out[at : at + move.run] = run
    else:
        copy_strided(
            out, at, memoryview(run), 0, move.run, tuple((n, d, 0) for n, d, _ in move.loops)
        )
