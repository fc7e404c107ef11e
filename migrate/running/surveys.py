"""What some calls have to know of all their numbers before the first box is computed: the largest
magnitude of a tensor, say, from which its scale follows.

A survey reads the first input once, box by box, and keeps no more than what the op makes of it, so
that memory follows boxes however large the tensor is. It is made once for a call, whatever outputs
and boxes there are, by the thread that first needs it; others wait. Processes that compute for one
run tell each other (`fillers.py`); those of several ranks make their own, and as boxes are taken in
row-major order, all find the same.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..core.spec import BITS
from .geometry import ranges

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..ops.base import Box
    from ..planning.graph import Computation, Kind

# bytes of raw elements that are read at a time
STEP = 4 << 20


class Surveys:
    """The surveys of a run's calls, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # the call keeps its id taken
        self._found: dict[int, tuple[Computation, Any]] = {}
        self._making: dict[int, threading.RLock] = {}

    def of(self, call: Computation, kind: Kind, read: Callable[[Box], Any]) -> Any:
        """What the op of `call` found in all boxes of its first input, which `read` reads.

        OpError for numbers that the op refuses.
        """
        with self._lock:
            known = self._found.get(id(call))
            if known is not None:
                return known[1]
            lock = self._making.setdefault(id(call), threading.RLock())
        with lock:
            with self._lock:
                known = self._found.get(id(call))
            if known is not None:
                return known[1]
            found = None
            for box in boxes(kind.specs[0]):
                found = kind.op.survey(kind.args, kind.specs, box, read(box), found)
            with self._lock:
                self._found[id(call)] = call, found
        return found

    def enter(self, call: Computation, result: Any) -> None:
        """Takes what another process found for `call`."""
        with self._lock:
            self._found[id(call)] = call, result

    def drop(self, call: Computation) -> None:
        """Forgets what was found for `call`, which is not computed any more."""
        with self._lock:
            self._found.pop(id(call), None)
            self._making.pop(id(call), None)


def shared_memos(
    calls: Iterable[tuple[Computation, Kind]], most: int
) -> dict[int, tuple[Computation, dict[str, Any], int]]:
    """By its id each call that remembers something between its boxes, the argument `memo` of its
    op, and bytes, together no more than `most`; `room` in it is memory that forked processes share.
    """
    wanted: dict[int, tuple[Computation, int]] = {}
    total = 0
    for call, kind in calls:
        # words begin at multiples of their size
        nbytes = -(-kind.op.remembers(kind.args, kind.specs) // 8) * 8
        if nbytes and id(call) not in wanted and total + nbytes <= most:
            wanted[id(call)] = call, nbytes
            total += nbytes
    # nothing is taken of it before it is written
    room, at = memoryview(mmap.mmap(-1, total) if total else b""), 0
    made = {}
    for name, (call, nbytes) in wanted.items():
        made[name] = call, {"room": room[at : at + nbytes]}, nbytes
        at += nbytes
    return made


def boxes(spec: Spec) -> Iterator[Box]:
    """A tensor in boxes of at most `STEP` bytes of raw elements, in row-major order; whole rows of
    its last axis where these are shorter.
    """
    step = STEP * 8 // max(8, BITS[spec.dtype])
    if spec.shape and 0 < spec.shape[-1] <= step:
        step -= step % spec.shape[-1]
    for start in range(0, spec.numel, step):
        yield from ranges(spec.shape, start, min(start + step, spec.numel))
