"""How a store is read: by requests side by side, and as far as can be before it is asked for.

A request of a store takes as long as copying some megabytes, so what a run will read is told first
(`ahead`), in its order. It is fetched in pieces of 8 MiB: stretches with gaps of up to 1 MiB
between them are one, because reading through a gap costs less than another request. A piece is let
go of when all that is needed of it was taken, or when what needs it is done, where it is read in
strides, so that the number of reads is unknown. The pieces that are fetched or held are no more
than `limit` bytes, but for those that a reader waits for: a reader that needs a piece before its
turn fetches it at once, so that nothing ever waits for a piece that is not read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from operator import attrgetter
from typing import Any, Final, Protocol, TypeVar

from ..blobs import Stretch

_OWN: Final = MAP_PRIVATE | MAP_ANONYMOUS
A = TypeVar("A")
B = TypeVar("B")
# requests at a time, the bytes of one, and the longest gap that is read through
FLIGHT, PIECE, GAP = 32, 8 << 20, 1 << 20
# bytes of memory that is kept for pieces to come, beyond the limit
SPARE = 2 * PIECE
# turns that an output may fall back behind its latest, when several threads read for it
BEHIND = 64


class FetchedBlob(Protocol):
    """What pieces are of."""

    def load(self, start: int, buffer: memoryview) -> None:
        """Fills the buffer from `start` on, by a request."""

    def expect_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        """Reads what lies in these pieces from them, until they are forgotten."""

    def forget_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        """Reads no longer from these pieces."""


class FetchedPiece:
    """A stretch of one blob that is fetched by one request, for the turns `first` to `last`.

    Of its bytes `needed` will be taken, each once; or, if it is read `again`, it is unknown how
    often.
    """

    __slots__ = (
        "_taken",
        "again",
        "blob",
        "data",
        "first",
        "last",
        "needed",
        "readers",
        "row",
        "start",
        "stop",
    )

    def __init__(self, blob: FetchedBlob, start: int, stop: int) -> None:
        self.blob, self.start, self.stop = blob, start, stop
        self.needed = self._taken = self.readers = self.last = 0
        self.first, self.again = 1 << 62, False
        self.data: Future[memoryview] | None = None
        self.row: Row | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def take(self, nbytes: int) -> bool:
        """Counts bytes that were taken; whether those were the last."""
        before, self._taken = self._taken, self._taken + nbytes
        return before < self.needed <= self._taken


class Row:
    """The pieces that one output needs, in their order, and the turn that it has come to."""

    __slots__ = ("at", "waiting")

    def __init__(self, pieces: Iterable[FetchedPiece]) -> None:
        self.waiting, self.at = deque(pieces), 0


class Requests:
    """The requests of one checkpoint, at most `FLIGHT` at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None
        self.budget = FLIGHT * PIECE
        # bytes of pieces that are fetched or held, and those whose turn comes, in a row for each
        # output that is written: each of them moves on
        self._held = 0
        self._rows: deque[Row] = deque()
        # pieces that are read again, the one that was read last at the end
        self._again: OrderedDict[int, FetchedPiece] = OrderedDict()
        # memory that was a piece; pages that are new to a process cost more than their copy
        self._free: list[mmap] = []

    def limit(self, nbytes: int) -> None:
        """Holds no more than `nbytes`, and no more than 32 requests need."""
        with self._lock:
            self.budget = max(1, min(FLIGHT, nbytes // PIECE)) * PIECE

    def submit(self, work: Callable[..., B], *arguments: Any) -> Future[B]:
        """The answer of `work`, which a thread of its own computes."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(FLIGHT, "migrate-store")
            return self._pool.submit(work, *arguments)

    def each(self, work: Callable[[A], B], items: Iterable[A]) -> list[B]:
        """The answers of `work` for all items, in their order; raises the first error."""
        return [one.result() for one in [self.submit(work, item) for item in items]]

    @contextmanager
    def ahead(self, blobs: Sequence[Any], stretches: Iterable[Stretch]) -> Iterator[None]:
        """Fetches stretches in this order, as long as the context is open. Those of other blobs are
        passed over.
        """
        every = pieces_of(
            (blobs[one.blob], one)
            for one in stretches
            if getattr(blobs[one.blob], "requests", None) is self
        )
        row = Row(every)
        by_blob: dict[int, list[FetchedPiece]] = {}
        for piece in every:
            piece.row = row
            by_blob.setdefault(id(piece.blob), []).append(piece)
        for found in by_blob.values():
            found[0].blob.expect_pieces(found)
        with self._lock:
            self._rows.append(row)
            self._go_on()
        try:
            yield
        finally:
            with self._lock:
                self._rows = deque(other for other in self._rows if other is not row)
                for piece in every:
                    self._let_go(piece)
            for found in by_blob.values():
                found[0].blob.forget_pieces(found)

    @contextmanager
    def reading(self, piece: FetchedPiece) -> Iterator[memoryview]:
        """The bytes of a piece, whether its turn has come or not."""
        with self._lock:
            data = self._begin(piece) if piece.data is None else piece.data
            piece.readers += 1
            if piece.again:
                self._again[id(piece)] = piece
                self._again.move_to_end(id(piece))
        try:
            yield data.result()
        finally:
            with self._lock:
                piece.readers -= 1

    def taken(self, piece: FetchedPiece, nbytes: int) -> None:
        """So many bytes of the piece were copied; what nobody needs any more is let go of."""
        with self._lock:
            row = piece.row
            if row is not None and piece.first > row.at:
                row.at = piece.first
                for other in [one for one in self._again.values() if one.row is row]:
                    if other.last < row.at - BEHIND and not other.readers:
                        self._let_go(other)
                self._go_on()
            if not piece.again and piece.take(nbytes):
                self._let_go(piece)
                piece.blob.forget_pieces([piece])
                self._go_on()

    def _begin(self, piece: FetchedPiece) -> Future[memoryview]:
        for other in list(self._again.values()):
            if self._held + _capacity(piece.size) <= self.budget:
                break
            if not other.readers and other is not piece:
                self._let_go(other)
        taken = _capacity(piece.size)
        self._held += taken
        memory = self._free.pop() if self._free and taken == PIECE else None
        while self._free and self._held + len(self._free) * PIECE > self.budget + SPARE:
            self._free.pop()
        data = piece.data = self.submit(_load, piece, memory)
        return data

    def _let_go(self, piece: FetchedPiece) -> None:
        self._again.pop(id(piece), None)
        data, piece.data = piece.data, None
        if data is None:
            return
        taken = _capacity(piece.size)
        self._held -= taken
        if data.cancel() or not data.done() or piece.readers or data.exception() is not None:
            return
        if taken == PIECE and self._held + len(self._free) * PIECE < self.budget + SPARE:
            self._free.append(data.result().obj)  # type: ignore[arg-type]

    def _go_on(self) -> None:
        """Begins the next piece of each row in turn, as long as there is room."""
        idle = 0
        while self._rows and idle < len(self._rows):
            row = self._rows[0].waiting
            while row and row[0].data is not None:
                row.popleft()
            if row and self._held + _capacity(row[0].size) > self.budget:
                return
            idle = 0 if row else idle + 1
            if row:
                self._begin(row.popleft())
            self._rows.rotate(-1)

    def close(self) -> None:
        """Begins no further request."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._rows.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


def _load(piece: FetchedPiece, memory: mmap | None) -> memoryview:
    # not of the heap, which keeps a part for each thread
    view = memoryview(mmap(-1, _capacity(piece.size), _OWN) if memory is None else memory)
    piece.blob.load(piece.start, view[: piece.size])
    return view[: piece.size]


def _capacity(size: int) -> int:
    """Bytes of memory for a piece: most have room for any, so that the next one can take it."""
    return PIECE if size > PIECE // 8 else size


def pieces_of(needs: Iterable[tuple[FetchedBlob, Stretch]]) -> list[FetchedPiece]:
    """The pieces that have what is needed, in the order in which it is needed first."""
    by_blob: dict[int, list[tuple[int, int, int, bool]]] = {}
    blobs: dict[int, FetchedBlob] = {}
    for turn, (blob, one) in enumerate(needs):
        if one.start < one.stop:
            by_blob.setdefault(id(blob), []).append((one.start, one.stop, turn, one.again))
            blobs[id(blob)] = blob
    found: list[FetchedPiece] = []
    for name, spans in by_blob.items():
        spans.sort()
        made: list[FetchedPiece] = []
        for low, high in _merged(spans):
            count = -(-(high - low) // PIECE)
            edges = [low + (high - low) * i // count for i in range(count + 1)]
            made += [FetchedPiece(blobs[name], a, b) for a, b in pairwise(edges)]
        starts = [piece.start for piece in made]
        for start, stop, turn, again in spans:
            at = bisect_right(starts, start) - 1
            while at < len(made) and made[at].start < stop:
                piece = made[at]
                piece.needed += min(stop, piece.stop) - max(start, piece.start)
                piece.first, piece.last = min(piece.first, turn), max(piece.last, turn)
                piece.again |= again
                at += 1
        found += made
    found.sort(key=attrgetter("first"))
    return found


def _merged(spans: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
    """The stretches that sorted spans make, with short gaps read through."""
    low, high, *_ = spans[0]
    for start, stop, *_ in spans[1:]:
        if start > high + GAP:
            yield low, high
            low, high = start, stop
        else:
            high = max(high, stop)
    yield low, high
