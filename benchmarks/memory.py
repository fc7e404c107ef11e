"""Keeps free memory warm, so that a run is timed and not the hypervisor behind it.

A virtual machine hands pages that nobody uses back to its host, and the next process that touches
them pays for getting them again: 1.5 to 2 s per GiB where this was measured, counted as the
process's own system time. So all free memory is held as clean page cache of a sparse file (reading
a hole needs no disk, and such pages, unlike anonymous ones, can take dirty data), and just before
each run the amount that the run needs is dropped. What the run frees is taken again at once.

Linux hands free pages back two seconds after the first of them became free (PAGE_REPORTING_DELAY in
mm/page_reporting.c). Pages freed by the run before would have that happen in the middle of the next
one, and take with them what was dropped for it; so a refill ends when that time is over.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

CHUNK = 64 << 20
RESERVE = 1 << 30  # kept free in any case
# chunks between two looks at whether anything is gained: at some point the kernel gives back what
# it takes
WINDOW = 16
PATIENCE = 60.0  # seconds that one refill may take
SETTLE = 2.5  # seconds after which the kernel has handed back what was free


def free() -> int:
    """Bytes that nobody holds (MemFree)."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemFree:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemFree")


class Holder:
    """Holds free memory in the page cache of `path`, a sparse file that it makes and removes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        # far more than memory: each chunk is read once, so that the oldest is always the first in
        # the kernel's lists too
        os.ftruncate(self._fd, 8 << 40)
        self._held: deque[int] = deque()
        self._next = 0
        self._floor = RESERVE
        self._buffer = bytearray(CHUNK)

    def refill(self) -> None:
        """Takes all free memory but the reserve and what the kernel insists on keeping free, and
        waits until the rest is handed back.
        """
        until = time.monotonic() + PATIENCE
        before, left = free(), WINDOW
        while free() > RESERVE + CHUNK and time.monotonic() < until:
            os.preadv(self._fd, [self._buffer], self._next)
            self._held.append(self._next)
            self._next += CHUNK
            left -= 1
            if not left:
                if before - free() < WINDOW * CHUNK // 4:
                    break
                before, left = free(), WINDOW
        time.sleep(SETTLE)
        self._floor = free()

    def drop(self, nbytes: int) -> None:
        """Frees until there are `nbytes` more than a refill leaves, or nothing is held any more."""
        while self._held and free() < nbytes + self._floor:
            os.posix_fadvise(self._fd, self._held.popleft(), CHUNK, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)


def read_through(folder: Path, *, anew: bool = False) -> None:
    """Brings every file of `folder` into the page cache; `anew`: out of it first.

    What a program has just written lies there in pieces of the size of its writes, and small ones
    are read at a third of the speed. So that no side of a comparison gains or loses by who wrote
    its input, all inputs are as the kernel reads them.
    """
    buffer = bytearray(8 << 20)
    for file in (
        sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else [folder]
    ):
        with file.open("rb", buffering=0) as opened:
            if anew:
                # only what is on the disk can be let go of
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while opened.readinto(buffer):
                pass
