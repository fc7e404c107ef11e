"""How fast the kernel copies a file of the page cache into memory, and memory into a file, by how
far the target lies behind the source modulo a page.

    python benchmarks/buffer_places.py [FOLDER]

Prints GB/s, the best of several passes over 256 MiB in calls of 2 MiB. On processors of AMD that
copy by `rep movsb`, targets 8 to 24 bytes behind are several times as slow as all others: that is
why `migrate.source.blobs.room` gives no memory that lies like malloc's large blocks.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable

SIZE, CALL, PASSES = 256 << 20, 2 << 20, 4
PAGE = mmap.PAGESIZE
BEHIND = (0, 8, 16, 24, 32, 64, 128, 512, 1024, 2048, PAGE - 16)


def best(call: Callable[[int], int]) -> float:
    """GB/s of calls at all multiples of their length."""
    found = 0.0
    for _ in range(PASSES):
        start = time.perf_counter()
        moved = sum(call(offset) for offset in range(0, SIZE, CALL))
        found = max(found, moved / (time.perf_counter() - start) / 1e9)
    return found


def main() -> None:
    memory = memoryview(mmap.mmap(-1, CALL + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    memory[:] = bytes(len(memory))
    with tempfile.TemporaryFile(dir=sys.argv[1] if len(sys.argv) > 1 else None) as file:
        descriptor = file.fileno()
        for offset in range(0, SIZE, CALL):
            os.pwrite(descriptor, memory[:CALL], offset)
        os.fsync(descriptor)
        print("behind   read  write")
        for behind in BEHIND:
            into, out_of = (memory[at : at + CALL] for at in (behind, -behind % PAGE))
            read = best(lambda offset, into=into: os.preadv(descriptor, [into], offset))
            write = best(lambda offset, out_of=out_of: os.pwrite(descriptor, out_of, offset))
            print(f"{behind:6} {read:6.1f} {write:6.1f}")


if __name__ == "__main__":
    main()
