"""Where parts lie in a whole, as the ops that join or cut them.

The axes of the whole are cut where a part has a step, so that each part becomes a box. Boxes side
by side along an axis are a `concat` or a `split`, boxes of one index each a `stack` or an `unbind`;
what brings a part into the form of its box is a `rearrange`, and what is left around the boxes a
`pad` or a `slice`. Parts that lie interleaved, by element or by group, are boxes like any others
once the axes are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from .places import Region, row_major

Shape = tuple[int, ...]
OpText = dict[str, dict[str, Any]]
_NAMES = "abcdefghijklmnopqrstuvwxyz"


class NoLayout(Exception):  # noqa: N818 - what is asked for does not exist, which is no error
    """The parts are no boxes of the whole, or do not lie in a grid."""


@dataclass(frozen=True, slots=True)
class _Digit:
    """`count` values along an axis of the part: steps of `step` along one of the whole."""

    count: int
    part_axis: int
    axis: int
    step: int


class _Box(NamedTuple):
    """A part in the axes of the cut whole. `groups`: for each of these the part's digits."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    digits: tuple[_Digit, ...]
    groups: tuple[tuple[int, ...], ...]


class PartLayout(NamedTuple):
    """The `order` in which the parts are taken, and the ops that join them to the whole. `cut` are
    those that make the parts of it. `rest` has a box of the whole that no part covers.
    """

    order: tuple[int, ...]
    join: tuple[OpText, ...]
    cut: tuple[OpText, ...]
    outside: int | None


def lay_out(
    shapes: Sequence[Shape], regions: Sequence[Region], whole: Shape, value: float | None = 0
) -> PartLayout:
    """How the parts with these shapes lie in a tensor of shape `whole`; NoLayout if ops do not say
    it. `value` is what surrounds them, None where that is not one value.
    """
    digits = [_by_axes(shape, region, whole) for shape, region in zip(shapes, regions, strict=True)]
    cuts = [
        _cuts(whole[a], [[d for d in part if d.axis == a] for part in digits])
        for a in range(len(whole))
    ]
    axes = [(a, place, length) for a, found in enumerate(cuts) for place, length in found]
    boxes = [
        _box(part, region.offset, whole, axes) for part, region in zip(digits, regions, strict=True)
    ]
    sizes = tuple(length for _, _, length in axes)
    vary = [x for x in range(len(axes)) if len({b.starts[x] for b in boxes}) > 1]
    stacked = _stacked(vary, boxes, min(len(s) for s in shapes), len(axes))
    along = stacked + [x for x in vary if x not in stacked]
    order = sorted(range(len(boxes)), key=lambda k: [boxes[k].starts[x] for x in reversed(along)])
    intervals = _grid(boxes, along)
    join: list[OpText] = []
    cut: list[OpText] = []

    def add(forwards: OpText, backwards: OpText) -> None:
        join.append(forwards)
        cut.insert(0, backwards)

    present = [x for x in range(len(axes)) if x not in stacked]
    _arrange_parts(shapes, boxes, order, present, add)
    for x in along:
        parts = intervals[x]
        if x in stacked:
            present = sorted([*present, x])
            given: dict[str, Any] = {"dim": present.index(x), "count": len(parts)}
            add({"stack": given}, {"unbind": given})
        else:
            lengths = [length for _, length in parts]
            given = {"dim": present.index(x)}
            given |= {"sizes": lengths} if len(set(lengths)) > 1 else {"count": len(lengths)}
            add({"concat": given}, {"split": given})
    outside = None
    for x in range(len(axes)):
        low = min(b.starts[x] for b in boxes)
        high = max(b.starts[x] + b.lengths[x] for b in boxes)
        if (low, high) != (0, sizes[x]):
            axis, place, _ = axes[x]
            outside = 0 if low else high * place * row_major(whole)[axis]
            start = {"start": low} if low else {}
            held = {} if value is None else {"of": sizes[x], "value": value}
            add(
                {
                    "pad": {
                        "dim": x,
                        **start,
                        "size": sizes[x],
                        "of": high - low,
                        "value": value or 0,
                    }
                },
                {"slice": {"dim": x, **start, "stop": high, **held}},
            )
    if len(axes) != len(whole):
        names = _NAMES[: len(axes)]
        merged = [
            tuple(names[x] for x in range(len(axes)) if axes[x][0] == a) for a in range(len(whole))
        ]
        lengths_of = dict(zip(names, sizes, strict=True))
        here = [(n,) for n in names]
        # parts that lie interleaved by element are few, and their number is the same for all sizes
        outer = not any(x in stacked for x in range(len(axes)) if axes[x][1] == 1)
        add(rearrange(here, merged, lengths_of, outer), rearrange(merged, here, lengths_of, outer))
    return PartLayout(tuple(order), tuple(join), tuple(cut), outside)


def _by_axes(shape: Shape, region: Region, whole: Shape) -> list[_Digit]:
    """The digits of a region, from the outermost, each within one axis of either side."""
    strides = row_major(whole)
    out: list[_Digit] = []
    axis, left = len(shape) - 1, list(shape)
    waiting = [list(d) for d in region.digits]
    while waiting:
        count, stride = waiting[-1]
        while axis >= 0 and left[axis] == 1:
            axis -= 1
        if axis < 0:
            raise NoLayout
        taken = min(count, left[axis])
        if count % taken or left[axis] % taken:
            raise NoLayout
        if stride <= 0:
            raise NoLayout
        there = max(
            (a for a in range(len(whole)) if whole[a] > 1 and strides[a] <= stride),
            key=lambda a: strides[a],
            default=None,
        )
        if there is None or stride % strides[there]:
            raise NoLayout
        step = stride // strides[there]
        if (taken - 1) * step >= whole[there]:
            # it runs on along the next axis outwards
            inner = whole[there] // step
            if whole[there] % step or inner < 2 or taken % inner:
                raise NoLayout
            taken = inner
        out.append(_Digit(taken, axis, there, step))
        left[axis] //= taken
        waiting[-1] = [count // taken, stride * taken]
        if waiting[-1][0] == 1:
            waiting.pop()
    return out[::-1]


def _blocks(digits: Sequence[_Digit]) -> list[tuple[int, int]]:
    """(step, length) of the stretches that the digits of a part on one axis make, ascending."""
    out: list[tuple[int, int]] = []
    for digit in sorted(digits, key=lambda d: d.step):
        if out and out[-1][0] * out[-1][1] == digit.step:
            out[-1] = (out[-1][0], out[-1][1] * digit.count)
        else:
            out.append((digit.step, digit.count))
    return out


def _cuts(length: int, parts: Sequence[Sequence[_Digit]]) -> list[tuple[int, int]]:
    """(place value, length) of what an axis is cut into, from the outermost."""
    steps = sorted({1} | {step for digits in parts for step, _ in _blocks(digits)})
    tops = [*steps[1:], length]
    if any(top % step for step, top in zip(steps, tops, strict=True)):
        raise NoLayout
    return [(step, top // step) for step, top in zip(steps, tops, strict=True)][::-1]


def _box(
    digits: Sequence[_Digit], offset: int, whole: Shape, axes: Sequence[tuple[int, int, int]]
) -> _Box:
    strides = row_major(whole)
    cut: list[_Digit] = []
    for digit in digits:
        # a digit may span several of the cuts: all of the inner ones, and some of the outermost
        rest, pieces = digit, []
        for axis, place, length in reversed(axes):
            if axis != rest.axis or not place <= rest.step < place * length:
                continue
            room = place * length // rest.step
            if (place * length) % rest.step:
                raise NoLayout
            if rest.count <= room:
                break
            if rest.count % room:
                raise NoLayout
            pieces.append(replace(rest, count=room))
            rest = replace(rest, count=rest.count // room, step=rest.step * room)
        cut += [d for d in (rest, *reversed(pieces)) if d.count > 1]
    starts, lengths, groups = [], [], []
    for axis, place, length in axes:
        mine = [i for i, d in enumerate(cut) if d.axis == axis and place <= d.step < place * length]
        mine.sort(key=lambda i: -cut[i].step)
        expected = place
        for i in reversed(mine):
            if cut[i].step != expected:
                raise NoLayout
            expected *= cut[i].count
        starts.append(offset // strides[axis] % whole[axis] // place % length)
        lengths.append(prod(cut[i].count for i in mine))
        groups.append(tuple(mine))
        if starts[-1] + lengths[-1] > length:
            raise NoLayout
    return _Box(tuple(starts), tuple(lengths), tuple(cut), tuple(groups))


def _stacked(vary: Sequence[int], boxes: Sequence[_Box], rank: int, axes: int) -> list[int]:
    """The axes that are new: parts have one index there, and fewer axes than the whole."""
    single = [x for x in vary if all(b.lengths[x] == 1 for b in boxes)]
    return single[: max(0, axes - rank)]


def _grid(boxes: Sequence[_Box], along: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """(start, length) of the intervals along each axis on which boxes differ; NoLayout if the boxes
    are not all of their combinations.
    """
    out = {}
    for x in along:
        found = sorted({(b.starts[x], b.lengths[x]) for b in boxes})
        if any(a + n != b for (a, n), (b, _) in pairwise(found)):
            raise NoLayout
        out[x] = found
    if prod(map(len, out.values())) != len(boxes):
        raise NoLayout
    if len({tuple(b.starts[x] for x in along) for b in boxes}) != len(boxes):
        raise NoLayout
    for x in range(len(boxes[0].starts)):
        if x not in out and len({(b.starts[x], b.lengths[x]) for b in boxes}) > 1:
            raise NoLayout
    return out


def _arrange_parts(
    shapes: Sequence[Shape],
    boxes: Sequence[_Box],
    order: Sequence[int],
    present: Sequence[int],
    add: Any,
) -> None:
    """The ops that bring the parts into the form of their boxes; equal ones are one op."""
    ways: dict[str, tuple[OpText, OpText, list[int]]] = {}
    for position, k in enumerate(order):
        box = boxes[k]
        left: list[tuple[int, ...]] = [
            tuple(i for i, d in enumerate(box.digits) if d.part_axis == a)
            for a in range(len(shapes[k]))
        ]
        right = [box.groups[x] for x in present]
        lengths = {i: d.count for i, d in enumerate(box.digits)}
        pair = between(left, right, lengths, shapes[k], tuple(box.lengths[x] for x in present))
        if pair is not None:
            ways.setdefault(repr(pair), (*pair, []))[2].append(position)
    for forwards, backwards, positions in ways.values():
        if len(positions) != len(order):
            ((a, given),) = forwards.items()
            ((b, taken),) = backwards.items()
            forwards, backwards = (
                {a: {**given, "only": positions}},
                {b: {**taken, "only": positions}},
            )
        add(forwards, backwards)


def between(
    left: Sequence[tuple[int, ...]],
    right: Sequence[tuple[int, ...]],
    lengths: Mapping[int, int],
    before: Shape,
    after: Shape,
) -> tuple[OpText, OpText] | None:
    """The op from axes of the digits `left` to those of `right`, and its inverse; None if nothing
    moves.
    """
    left, right = list(left), list(right)
    if left == right:
        return None
    full_left, full_right = [g for g in left if g], [g for g in right if g]
    if full_left == full_right:
        return reshaped(before, after)
    if len(left) == len(right) and sorted(left) == sorted(right):
        free = [a for a, g in enumerate(left) if not g]
        dims = [left.index(g) if g else free.pop(0) for g in right]
        moved = [a for a, d in enumerate(dims) if a != d]
        if len(moved) == 2:
            return {"transpose": {"dims": moved}}, {"transpose": {"dims": moved}}
        back = [dims.index(a) for a in range(len(dims))]
        return {"permute": {"dims": dims}}, {"permute": {"dims": back}}
    named = {i: _NAMES[n] for n, i in enumerate(sorted(lengths))}
    sizes = {named[i]: n for i, n in lengths.items()}
    one = [tuple(named[i] for i in g) for g in left]
    other = [tuple(named[i] for i in g) for g in right]
    return rearrange(one, other, sizes), rearrange(other, one, sizes)


def reshaped(before: Shape, after: Shape) -> tuple[OpText, OpText]:
    """The op that changes a shape and moves nothing."""
    for short, long, forwards in ((before, after, True), (after, before, False)):
        if len(long) == len(short) + 1:
            # of several axes that could be the new one, the first
            dim = next(
                (a for a in range(len(long)) if long[a] == 1 and long[:a] + long[a + 1 :] == short),
                None,
            )
            if dim is not None:
                pair: tuple[OpText, OpText] = {"unsqueeze": {"dim": dim}}, {"squeeze": {"dim": dim}}
                return pair if forwards else (pair[1], pair[0])
    return (
        {"reshape": {"to": list(after), "from": list(before)}},
        {"reshape": {"to": list(before), "from": list(after)}},
    )


def rearrange(
    left: Sequence[tuple[str, ...]],
    right: Sequence[tuple[str, ...]],
    lengths: Mapping[str, int],
    outer: bool = True,
) -> OpText:
    """The op in einops' notation, with the lengths that it needs in either direction: where an axis
    is only cut or joined those of the `outer` axes, which parts of several sizes agree in.
    """
    left, right = list(left), list(right)
    rest = 0
    while left and right and left[-1] == right[-1] and len(left[-1]) == 1:
        left.pop()
        right.pop()
        rest += 1
    called = dict(zip((n for g in left for n in g), _NAMES, strict=False))
    lengths = {called[n]: length for n, length in lengths.items() if n in called}
    left, right = ([tuple(called[n] for n in g) for g in side] for side in (left, right))
    given: dict[str, int] = {}
    simple = all(len(g) < 2 for g in left) or all(len(g) < 2 for g in right)
    for group in [*left, *right]:
        unknown = [n for n in group if n not in given]
        for name in unknown[:-1] if simple and outer else unknown[1:]:
            given[name] = lengths[name]

    def side(groups: Sequence[tuple[str, ...]]) -> str:
        written = ["1" if not g else g[0] if len(g) == 1 else f"({' '.join(g)})" for g in groups]
        return " ".join([*written, "..."] if rest else written)

    op: dict[str, Any] = {"pattern": f"{side(left)} -> {side(right)}"}
    if given:
        op["axes"] = given
    return {"rearrange": op}
