"""Rearranging bytes in memory: strided copies, and transposes of what has its last axis moved.

Short runs are copied as the widest integer that divides them. A moved last axis is the one case
where the choice of loops decides over a factor of three: moving 1- to 4-byte elements one by one
costs as much each as moving 8 bytes. So a block of rows is first woven into 8-byte words that hold
one column of 8, 4 or 2 rows, and the words are transposed. That is as fast as torch's blocked
kernel, whose import would cost more than a gigabyte of transposes.
"""

from __future__ import annotations

import threading
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Loops = tuple[tuple[int, int, int], ...]

# rows and columns of a block: with its words it stays in a second-level cache
_ROWS, _COLUMNS = 512, 256
_FEW = 8
# elements nearer to each other than this share cache lines, and a plain strided copy is as good
_LINE = 64
_OWN = threading.local()


def copy(dest: memoryview, dst: int, source: memoryview, src: int, run: int, loops: Loops) -> None:
    """`dest[dst + Σ i·d] = source[src + Σ i·s]` for runs of `run` bytes over (n, d, s) in `loops`,
    d descending.
    """
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

    width = next(w for w in (8, 4, 2, 1) if run % w == 0)
    shape, to, back = [n for n, _, _ in loops], [d for _, d, _ in loops], [s for _, _, s in loops]
    if run != width:
        shape, to, back = [*shape, run // width], [*to, width], [*back, width]
    out: np.ndarray[Any, Any] = np.ndarray(shape, f"u{width}", dest, dst, to)
    out[...] = np.ndarray(shape, f"u{width}", source, src, back)


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
        flip(panel, np.frombuffer(dest, kind, n * columns, dst).reshape(columns, n))
        return
    rows = np.empty((columns, n), kind)
    flip(panel, rows)
    compact, loops = n * item, []
    for m, d, _ in reversed(rest):
        loops.append((m, d, compact))
        compact *= m
    _strided(dest, dst, rows.reshape(-1).view("u1").data, 0, n * item, tuple(reversed(loops)))


def _panel(nbytes: int) -> bytearray:
    """Memory of this thread for a panel. Kept, because a thread's allocator gives it back and
    faults it in anew each time.
    """
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


def flip(panel: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Writes `panel` transposed to `out`: both 2-D, of the same unsigned integers, the last axis of
    each contiguous.
    """
    import numpy as np

    rows, columns = panel.shape
    width = 8 // panel.dtype.itemsize
    whole = rows - rows % width if width > 1 else 0
    words = np.empty((_ROWS // width, _COLUMNS), "u8")
    woven = words.view(panel.dtype).reshape(*words.shape, width)
    for i in range(0, whole, _ROWS):
        height = min(_ROWS, whole - i)
        for j in range(0, columns, _COLUMNS):
            block = out[j : j + _COLUMNS, i : i + height].view("u8")
            for n in range(width):
                woven[: height // width, : len(block), n] = panel[
                    i + n : i + height : width, j : j + _COLUMNS
                ]
            block[...] = words[: height // width, : len(block)].T
    for i in range(whole, rows, _COLUMNS):
        for j in range(0, columns, _COLUMNS):
            out[j : j + _COLUMNS, i : i + _COLUMNS] = panel[i : i + _COLUMNS, j : j + _COLUMNS].T
