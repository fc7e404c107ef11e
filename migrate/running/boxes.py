"""Boxes of tensors, [start, stop) on each axis: as linear ranges, of strided moves, cut, joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.spec import coordinates

if TYPE_CHECKING:
    from ..ops.base import Box


def ranges(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes of a row-major `shape` that hold elements `start` to `stop` in order, as few as there
    are.
    """
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


def linear(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """The range of row-major elements that is exactly `box`, or None where it is not contiguous."""
    start = stop = 0
    # what comes after a range of several indices is full
    several = False
    for n, (a, b) in zip(shape, box, strict=True):
        if several and (a, b) != (0, n):
            return None
        several = several or b - a != 1
        start, stop = start * n + a, stop * n + b - 1
    return start, stop + 1


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
    """`inner` as an index into an array that holds `outer`; what it picks is a view of that
    array.
    """
    # without the ellipsis numpy would answer with a copy of the element where there are no axes
    return (*(slice(c - a, d - a) for (a, _), (c, d) in zip(outer, inner, strict=True)), ...)
