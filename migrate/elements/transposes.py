"""Matrices of small elements transposed in memory.

Moving elements of 1 to 4 bytes one by one costs as much each as moving 8 bytes. So a block of rows
is first woven into 8-byte words that hold one column of 8, 4 or 2 rows, and the words are
transposed. That is as fast as torch's blocked kernel, whose import would cost more than a gigabyte
of transposes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .raw import scratch

if TYPE_CHECKING:
    import numpy as np

# rows and columns of a block: with its words it stays in a second-level cache, and an operation on
# it takes much longer than waking a thread that waits for the interpreter
_ROWS, _COLUMNS = 1024, 384
# words between the rows of a block: a column of rows a power of two apart would share few lines of
# a cache
_APART = 8


def flip_panel(panel: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    """Writes `panel` transposed to `out`: 2-D, equal unsigned integers, last axes contiguous."""
    rows, columns = panel.shape
    width = 8 // panel.dtype.itemsize
    whole = rows - rows % width if width > 1 else 0
    high, pitch = min(_ROWS, whole) // width, _COLUMNS + _APART
    words = scratch("woven", high * pitch * 8).view("u8").reshape(high, pitch)
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


def is_turned(out: np.ndarray[Any, Any]) -> bool:
    """Whether the columns of a matrix are contiguous, and its rows are not."""
    return out.ndim > 1 and out.strides[-2] < out.strides[-1]
