"""Rearranging bytes in memory: strided copies, and transposes of what has its last axis moved.

Short runs are copied as the widest integer that divides them. A moved last axis is the one case where the choice of
loops decides over a factor of eight: the columns are gathered into a contiguous panel, and the panel is written
transposed. torch has a blocked kernel for exactly that (both sides contiguous); importing it costs more than
transposing a gigabyte or two without, so it is used where it is loaded already or the plan is larger than that.
"""

from __future__ import annotations

import sys
import threading
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Loops = tuple[tuple[int, int, int], ...]

# from this many bytes of transposes in one run on, importing torch pays
TORCH_PAYS = 2 << 30
_BLOCK = 128
_FEW = 8
# elements nearer to each other than this share cache lines, and a plain strided copy is as good
_LINE = 64
_OWN = threading.local()


def allow_torch(nbytes: int) -> None:
    """Imports torch if a run transposes so many bytes that it pays."""
    if nbytes >= TORCH_PAYS:
        import torch  # noqa: F401


def copy(dest: memoryview, dst: int, source: memoryview, src: int, run: int, loops: Loops) -> None:
    """`dest[dst + Σ i·d] = source[src + Σ i·s]` for runs of `run` bytes over (n, d, s) in `loops`, d descending."""
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


def _strided(dest: memoryview, dst: int, source: memoryview, src: int, run: int, loops: Loops) -> None:
    import numpy as np

    width = next(w for w in (8, 4, 2, 1) if run % w == 0)
    shape, to, back = [n for n, _, _ in loops], [d for _, d, _ in loops], [s for _, _, s in loops]
    if run != width:
        shape, to, back = [*shape, run // width], [*to, width], [*back, width]
    out: np.ndarray[Any, Any] = np.ndarray(shape, f"u{width}", dest, dst, to)
    out[...] = np.ndarray(shape, f"u{width}", source, src, back)


def _transposed(dest: memoryview, dst: int, source: memoryview, src: int, item: int, inner: tuple[int, int], rest: Loops) -> None:
    """The destination's rows of `inner` = (n, source stride) items are columns of the source."""
    import numpy as np

    n, stride = inner
    kind = f"u{item}"
    columns = prod(loop[0] for loop in rest)
    # the panel has one column for each row of the destination, in the destination's order
    panel = np.frombuffer(_panel(n * columns * item), kind, n * columns).reshape(n, columns)
    panel.reshape(n, *(m for m, _, _ in rest))[...] = np.ndarray(
        (n, *(m for m, _, _ in rest)), kind, source, src, (stride, *(s for _, _, s in rest))
    )
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
    """Memory of this thread for a panel. Kept, because a thread's allocator gives it back and faults it in anew each time."""
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
    """Writes `panel` transposed to `out`; both are contiguous, of the same unsigned integers."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "from_numpy"):
        signed = f"i{panel.dtype.itemsize}"
        torch.from_numpy(out.view(signed)).copy_(torch.from_numpy(panel.view(signed)).t())
        return
    rows, columns = panel.shape
    for i in range(0, rows, _BLOCK):
        for j in range(0, columns, _BLOCK):
            out[j : j + _BLOCK, i : i + _BLOCK] = panel[i : i + _BLOCK, j : j + _BLOCK].T
