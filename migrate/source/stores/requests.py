"""How a store is read: by requests side by side, and as far as can be before it is asked for.

A request of a store takes as long as copying some megabytes, so what a run will read is told first
(`ahead`), in its order. It is fetched in pieces of 8 MiB: stretches with gaps of up to 1 MiB
between them are one, because reading through a gap costs less than another request. A piece is let
go of when all that is needed of it was taken. The pieces that are fetched or held are no more than
`limit` bytes, but for those that somebody waits for: whoever needs a piece whose turn has not come
fetches it at once, so that nothing ever waits for what nobody will take.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter
from typing import Any, Protocol, TypeVar

A = TypeVar("A")
B = TypeVar("B")
# requests at a time, the bytes of one, and the longest gap that is read through
FLIGHT, PIECE, GAP = 32, 8 << 20, 1 << 20


class FetchedBlob(Protocol):
    """What pieces are of."""

    def fetch(self, start: int, size: int) -> bytearray:
        """Bytes of it, by a request."""

    def expect_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        """Reads what lies in these pieces from them, until they are forgotten."""

    def forget_pieces(self, pieces: Sequence[FetchedPiece]) -> None:
        """Reads no longer from these pieces."""


class FetchedPiece:
    """A stretch of one blob that is fetched by one request. `needed` of its bytes will be taken."""

    __slots__ = ("_taken", "blob", "data", "needed", "start", "stop")

    def __init__(self, blob: FetchedBlob, start: int, stop: int) -> None:
        self.blob, self.start, self.stop = blob, start, stop
        self.needed = self._taken = 0
        self.data: Future[bytearray] | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def take(self, nbytes: int) -> bool:
        """Counts bytes that were taken; whether those were the last."""
        before, self._taken = self._taken, self._taken + nbytes
        return before < self.needed <= self._taken


class Requests:
    """The requests of one checkpoint, at most `FLIGHT` at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None
        self.budget = FLIGHT * PIECE
        # bytes of pieces that are fetched or held, and those whose turn comes, in a row for each
        # output that is written: each of them moves on
        self._held = 0
        self._rows: deque[deque[FetchedPiece]] = deque()

    def limit(self, nbytes: int) -> None:
        """Holds no more than `nbytes`, and no more than 32 requests need."""
        with self._lock:
            self.budget = max(PIECE, min(FLIGHT * PIECE, nbytes))

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
    def ahead(
        self, blobs: Sequence[Any], stretches: Iterable[tuple[int, int, int]]
    ) -> Iterator[None]:
        """Fetches stretches (number of the blob, start, stop), in this order, as long as the
        context is open. Those of other blobs are passed over.
        """
        row = deque(
            pieces_of(
                (blobs[number], start, stop)
                for number, start, stop in stretches
                if getattr(blobs[number], "requests", None) is self
            )
        )
        every = list(row)
        by_blob: dict[int, list[FetchedPiece]] = {}
        for piece in every:
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

    def wait(self, piece: FetchedPiece) -> bytearray:
        """The bytes of a piece, whether its turn has come or not."""
        with self._lock:
            data = self._begin(piece) if piece.data is None else piece.data
        return data.result()

    def taken(self, piece: FetchedPiece, nbytes: int) -> None:
        """So many bytes of the piece were copied; with the last that are needed it is let go of."""
        with self._lock:
            if piece.take(nbytes):
                self._let_go(piece)
                piece.blob.forget_pieces([piece])
                self._go_on()

    def _begin(self, piece: FetchedPiece) -> Future[bytearray]:
        self._held += piece.size
        data = piece.data = self.submit(piece.blob.fetch, piece.start, piece.size)
        return data

    def _let_go(self, piece: FetchedPiece) -> None:
        if piece.data is not None:
            piece.data.cancel()
            piece.data = None
            self._held -= piece.size

    def _go_on(self) -> None:
        """Begins the next piece of each row in turn, as long as there is room."""
        idle = 0
        while self._rows and idle < len(self._rows):
            row = self._rows[0]
            while row and row[0].data is not None:
                row.popleft()
            if row and self._held + row[0].size > self.budget:
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


def pieces_of(needs: Iterable[tuple[FetchedBlob, int, int]]) -> list[FetchedPiece]:
    """The pieces that have what is needed (blob, start, stop), in the order in which it is needed
    first.
    """
    by_blob: dict[int, list[tuple[int, int, int]]] = {}
    blobs: dict[int, FetchedBlob] = {}
    for turn, (blob, start, stop) in enumerate(needs):
        if start < stop:
            by_blob.setdefault(id(blob), []).append((start, stop, turn))
            blobs[id(blob)] = blob
    found: list[tuple[int, FetchedPiece]] = []
    for name, spans in by_blob.items():
        spans.sort()
        made: list[tuple[int, FetchedPiece]] = []
        for low, high in _merged(spans):
            count = -(-(high - low) // PIECE)
            edges = [low + (high - low) * i // count for i in range(count + 1)]
            made += [(1 << 62, FetchedPiece(blobs[name], a, b)) for a, b in pairwise(edges)]
        starts = [piece.start for _, piece in made]
        for start, stop, turn in spans:
            at = bisect_right(starts, start) - 1
            while at < len(made) and made[at][1].start < stop:
                first, piece = made[at]
                piece.needed += min(stop, piece.stop) - max(start, piece.start)
                made[at] = (min(first, turn), piece)
                at += 1
        found += made
    found.sort(key=itemgetter(0))
    return [piece for _, piece in found]


def _merged(spans: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """The stretches that sorted spans make, with short gaps read through."""
    low, high, _ = spans[0]
    for start, stop, _ in spans[1:]:
        if start > high + GAP:
            yield low, high
            low, high = start, stop
        else:
            high = max(high, stop)
    yield low, high
