"""A tensor as strided copies of leaves: the algebra of every layout op, plan, read and write.

    View(shape, pieces), each piece: out[dst + sum i*dst_strides] = leaf[src + sum i*src_strides],
    in elements

A view is kept in a normal form (pieces ordered by destination, unit loops dropped, continuing loops
and pieces joined), so that a pair of inverse ops leaves nothing behind, equal views of one stored
tensor compare equal, and cancelling needs no pass of its own. Everything is exact integer
arithmetic; no function here looks at data.

Axes are counted from 0 and are not negative: ops resolve them and say what is wrong in the author's
words. What does not fit here is a plain ValueError. Any function that looks at an axis may raise
TooManyPieces: compute that op instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from math import prod

from .pieces import (
    Fill,
    Ints,
    Leaf,
    Piece,
    SubByte,
    TooManyPieces,
    cut,
    end,
    join,
    normalise,
    refine,
)

__all__ = [
    "Fill", "Leaf", "Piece", "SubByte", "TooManyPieces", "View", "assemble", "clip", "concat",
    "covers", "filled", "flip",
    "into", "is_whole", "leaves", "linear", "mosaic", "pad", "permute", "region", "relabel",
    "reshape", "roll", "runs", "select", "slice_",
    "split", "stack", "stored", "stretch", "strided", "to_bytes", "unbind",
]  # fmt: skip

# An op may always make this many pieces, and this many times its input's: beyond, copying whole
# tensors is cheaper than bookkeeping. Views that merely join many inputs stay far below the factor.
LIMIT, GROWTH = 4096, 8
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `shape` whose elements `pieces`, ordered by destination, write once each."""

    shape: Ints
    pieces: tuple[Piece, ...]
    _spans: _Spans | None = field(default=None, init=False, repr=False, compare=False)


class _Spans:
    """Where each piece of a view begins and ends. Pieces may interleave, so ends are in no order;
    `tops` are the last of each block.
    """

    __slots__ = ("ends", "starts", "tops")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.starts = [p[2] for p in pieces]
        self.ends = [end(p) for p in pieces]
        self.tops = [max(self.ends[i : i + _BLOCK]) for i in range(0, len(pieces), _BLOCK)]

    def between(self, start: int, stop: int) -> Iterator[int]:
        """Numbers of the pieces whose span meets start..stop."""
        last = bisect_left(self.starts, stop)
        for block, top in enumerate(self.tops[: -(-last // _BLOCK)]):
            if top > start:
                for i in range(block * _BLOCK, min(last, (block + 1) * _BLOCK)):
                    if self.ends[i] > start:
                        yield i


def _strides(shape: Sequence[int]) -> Ints:
    out, size = [], 1
    for n in reversed(shape):
        out.append(size)
        size *= n
    return tuple(reversed(out))


def _key(piece: Piece) -> int:
    return piece[2]


def _view(shape: Ints, pieces: Iterable[Piece]) -> View:
    """The view in normal form."""
    found = [normalise(p) for p in pieces]
    found.sort(key=_key)
    return _joined(shape, found)


def _joined(shape: Ints, pieces: list[Piece]) -> View:
    """The view in normal form of pieces that are normalised and ordered."""
    pieces = join(pieces)
    if len(pieces) > 1:
        # pieces cover the shape, so if all of them move one leaf by one distance, the view is a
        # stretch of that leaf
        leaf, src, dst = pieces[0][:3]
        if isinstance(leaf, Fill):
            if all(p[0] == leaf for p in pieces):
                return filled(shape, leaf.value)
        elif all(p[0] == leaf and p[1] - p[2] == src - dst and p[4] == p[5] for p in pieces):
            return stored(leaf, shape, offset=src - dst)
    return View(shape, tuple(pieces))


def _limit(views: Iterable[View]) -> int:
    return max(LIMIT, GROWTH * sum(len(v.pieces) for v in views))


def _refined(v: View, borders: Sequence[int]) -> Iterator[Piece]:
    """All pieces of `v`, refined; TooManyPieces when they become too many together."""
    limit = _limit((v,))
    left = limit
    for p in v.pieces:
        found = refine(p, borders, limit)
        left -= len(found)
        if left < 0:
            raise TooManyPieces(f"more than {limit} pieces")
        yield from found


def _moved(piece: Piece, place: Callable[[int], int], base: int = 0) -> Piece:
    """`piece` with its destination sent through `place`, which is linear on it."""
    return Piece(
        piece[0],
        piece[1],
        base + place(piece[2]),
        piece[3],
        tuple([place(d) for d in piece[4]]),
        piece[5],
    )


def _axis(shape: Ints, dim: int) -> tuple[int, int, int]:
    """(product of the sizes before `dim`, size of `dim`, product of the sizes after)."""
    if not 0 <= dim < len(shape):
        raise ValueError(f"axis {dim} of a tensor with {len(shape)} axes")
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])


def stored(
    leaf: int, shape: Sequence[int], strides: Sequence[int] | None = None, offset: int = 0
) -> View:
    """The stored tensor `leaf` of `shape`; `strides` and `offset` in elements, contiguous when not
    given. A stride of 0 expands.
    """
    shape = tuple(shape)
    size = prod(shape)
    if size == 0:
        return View(shape, ())
    if strides is None:
        return View(
            shape,
            (
                Piece(leaf, offset, 0, (size,), (1,), (1,))
                if size > 1
                else Piece(leaf, offset, 0, (), (), ()),
            ),
        )
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} axes")
    return View(shape, (normalise(Piece(leaf, offset, 0, shape, _strides(shape), tuple(strides))),))


def filled(shape: Sequence[int], value: float) -> View:
    """A tensor of `shape` whose every element is `value`."""
    shape = tuple(shape)
    size = prod(shape)
    return View(shape, (normalise(Piece(Fill(value), 0, 0, (size,), (1,), (0,))),) if size else ())


def assemble(
    shape: Sequence[int],
    chunks: Iterable[tuple[int, Sequence[int], Sequence[int], Sequence[int] | None]],
) -> View:
    """A tensor of `shape` stored as boxes: chunks of (leaf, offsets, sizes, strides of the stored
    chunk or None).

    The caller has seen to it that the boxes cover the tensor exactly. Empty boxes are left out.
    """
    shape = tuple(shape)
    place = _strides(shape)
    pieces = []
    for leaf, offsets, sizes, strides in chunks:
        sizes = tuple(sizes)
        if 0 not in sizes:
            dst = sum(o * d for o, d in zip(offsets, place, strict=True))
            pieces.append(
                Piece(
                    leaf,
                    0,
                    dst,
                    sizes,
                    place,
                    _strides(sizes) if strides is None else tuple(strides),
                )
            )
    return _view(shape, pieces)


def mosaic(shape: Sequence[int], parts: Iterable[tuple[View, Sequence[int]]]) -> View:
    """A tensor of `shape` made of views, each with the index of its first element there.

    The caller has seen to it that the parts cover the tensor exactly.
    """
    shape = tuple(shape)
    place = _strides(shape)
    pieces: list[Piece] = []
    for v, start in parts:
        base = sum(o * d for o, d in zip(start, place, strict=True))
        pieces += _placed(v, place, base)
    return _view(shape, pieces)


def reshape(v: View, shape: Sequence[int]) -> View:
    """The same elements in row-major order under another `shape` of equal size."""
    shape = tuple(shape)
    if prod(shape) != prod(v.shape):
        raise ValueError(f"a tensor of shape {list(v.shape)} has not the size of {list(shape)}")
    return View(shape, v.pieces)


def concat(views: Sequence[View], dim: int) -> View:
    """The `views`, at least one, joined along `dim`; their other sizes are equal."""
    first = views[0].shape
    outer, _, inner = _axis(first, dim)
    for v in views:
        if v.shape != first and (
            len(v.shape) != len(first)
            or v.shape[:dim] != first[:dim]
            or v.shape[dim + 1 :] != first[dim + 1 :]
        ):
            raise ValueError(f"shapes {list(first)} and {list(v.shape)} differ outside axis {dim}")
    shape = (*first[:dim], sum(v.shape[dim] for v in views), *first[dim + 1 :])
    if len(views) == 1:
        return views[0]
    return _side_by_side(views, shape, [v.shape[dim] * inner for v in views], outer)


def stack(views: Sequence[View], dim: int) -> View:
    """The `views`, all of one shape, along a new axis `dim`."""
    first = views[0].shape
    if not 0 <= dim <= len(first):
        raise ValueError(f"axis {dim} of a tensor with {len(first) + 1} axes")
    for v in views:
        if v.shape != first:
            raise ValueError(f"shapes {list(first)} and {list(v.shape)} differ")
    shape = (*first[:dim], len(views), *first[dim:])
    return _side_by_side(views, shape, [prod(first[dim:])] * len(views), prod(first[:dim]))


def _side_by_side(views: Sequence[View], shape: Ints, widths: Sequence[int], outer: int) -> View:
    """`outer` rows, each made of `widths[k]` elements of view k in turn."""
    row, base = sum(widths), 0
    limit = _limit(views)
    out: list[Piece] = []
    for v, width in zip(views, widths, strict=True):
        if outer == 1:
            out += [Piece(p[0], p[1], p[2] + base, p[3], p[4], p[5]) for p in v.pieces]
        elif v.pieces:
            for p in v.pieces:
                for q in refine(p, (width,), limit):
                    dsts = tuple([d // width * row + d % width for d in q[4]])
                    out.append(
                        Piece(
                            q[0], q[1], q[2] // width * row + q[2] % width + base, q[3], dsts, q[5]
                        )
                    )
            if len(out) > limit:
                raise TooManyPieces(f"more than {limit} pieces")
        base += width
    return _joined(shape, out) if outer == 1 else _view(shape, out)


def _parts(v: View, dim: int, bounds: Sequence[int]) -> list[list[Piece]]:
    """The pieces of v between successive `bounds` on axis `dim`, each list within its own part."""
    outer, size, inner = _axis(v.shape, dim)
    width = size * inner
    edges = [b * inner for b in bounds]
    parts: list[list[Piece]] = [[] for _ in bounds[1:]]
    if not width or not outer:
        return parts
    limit = _limit((v,))
    for p in v.pieces if outer == 1 else _refined(v, (width,)):
        for k, q in cut(p, p[2] % width, [d % width for d in p[4]], edges):
            start = edges[k]
            if outer == 1:
                q = Piece(q[0], q[1], q[2] - start, q[3], q[4], q[5])
            else:
                row = edges[k + 1] - start
                dsts = tuple([d // width * row + d % width for d in q[4]])
                q = Piece(q[0], q[1], q[2] // width * row + q[2] % width - start, q[3], dsts, q[5])
            parts[k].append(q)
            if len(parts[k]) > limit:
                raise TooManyPieces(f"more than {limit} pieces")
    return parts


def slice_(v: View, dim: int, start: int, stop: int) -> View:
    """Indices start..stop of axis `dim`; 0 <= start <= stop <= its size."""
    _, size, _ = _axis(v.shape, dim)
    if not 0 <= start <= stop <= size:
        raise ValueError(f"slice {start}:{stop} of an axis of {size}")
    if stop - start == size:
        return v
    shape = (*v.shape[:dim], stop - start, *v.shape[dim + 1 :])
    return _view(shape, _parts(v, dim, (start, stop))[0]) if stop > start else View(shape, ())


def select(v: View, dim: int, i: int) -> View:
    """Index `i` of axis `dim`, which is dropped."""
    part = slice_(v, dim, i, i + 1)
    return View(v.shape[:dim] + v.shape[dim + 1 :], part.pieces)


def split(v: View, dim: int, sizes: Sequence[int]) -> list[View]:
    """Consecutive parts of `sizes` along `dim`; they add up to its size. Work grows with pieces and
    parts, not their product.
    """
    _, size, _ = _axis(v.shape, dim)
    if sum(sizes) != size or any(n < 0 for n in sizes):
        raise ValueError(f"parts of {list(sizes)} along an axis of {size}")
    shapes = [(*v.shape[:dim], n, *v.shape[dim + 1 :]) for n in sizes]
    if len(sizes) == 1:
        return [v]
    return [
        _view(shape, part)
        for shape, part in zip(shapes, _parts(v, dim, [0, *accumulate(sizes)]), strict=True)
    ]


def unbind(v: View, dim: int) -> list[View]:
    """One view for each index of axis `dim`, which is dropped."""
    _, size, _ = _axis(v.shape, dim)
    shape = v.shape[:dim] + v.shape[dim + 1 :]
    return [_view(shape, part) for part in _parts(v, dim, range(size + 1))]


def permute(v: View, dims: Sequence[int]) -> View:
    """Axis k of the result is axis dims[k] of `v`."""
    if sorted(dims) != list(range(len(v.shape))):
        raise ValueError(f"{list(dims)} is not an order of {len(v.shape)} axes")
    shape = tuple(v.shape[a] for a in dims)
    target = [0] * len(dims)
    for a, stride in zip(dims, _strides(shape), strict=True):
        target[a] = stride
    return _view(shape, _placed(v, target))


def _placed(v: View, target: Sequence[int], base: int = 0) -> Iterator[Piece]:
    """The pieces of `v` with index (x_0, x_1, ...) sent to base + sum x*target."""
    here = _strides(v.shape)
    axes: list[int] = []
    # axes that stay neighbours need no border between them; the inner one stands for both
    for a in (a for a, n in enumerate(v.shape) if n != 1):
        if axes and target[axes[-1]] == target[a] * v.shape[a]:
            axes[-1] = a
        else:
            axes.append(a)
    digits = [(here[a], target[a]) for a in axes]

    def place(x: int) -> int:
        y = 0
        for stride, to in digits:
            y += x // stride * to
            x %= stride
        return y

    for p in _refined(v, [stride for stride, _ in digits]):
        yield _moved(p, place, base)


def flip(v: View, dim: int) -> View:
    """`v` with axis `dim` in reverse order."""
    outer, size, inner = _axis(v.shape, dim)
    if size < 2 or not outer or not inner:
        return v
    width = size * inner

    def place(x: int) -> int:
        low = x % width
        return x - low + low % inner - low // inner * inner

    out = []
    for p in _refined(v, (width, inner)):
        leaf, src, dst, counts, dsts, srcs = _moved(p, place, width - inner)
        # a loop that now runs down is read from its other end
        for n, d, s in zip(counts, dsts, srcs, strict=True):
            if d < 0:
                src, dst = src + (n - 1) * s, dst + (n - 1) * d
        srcs = tuple([s if d > 0 else -s for d, s in zip(dsts, srcs, strict=True)])
        out.append(Piece(leaf, src, dst, counts, tuple([abs(d) for d in dsts]), srcs))
    return _view(v.shape, out)


def roll(v: View, dim: int, shift: int) -> View:
    """`v` moved along `dim` by `shift` places, wrapping around at its ends, as numpy.roll does."""
    _, size, _ = _axis(v.shape, dim)
    shift = shift % size if size else 0
    if not shift:
        return v
    head, tail = split(v, dim, (size - shift, shift))
    return concat((tail, head), dim)


def pad(v: View, dim: int, before: int, after: int, value: float) -> View:
    """`v` with `before` and `after` indices of `value` added at the ends of axis `dim`."""
    _axis(v.shape, dim)
    if before < 0 or after < 0:
        raise ValueError(f"padding of {before} and {after}")
    ends = [filled((*v.shape[:dim], n, *v.shape[dim + 1 :]), value) for n in (before, after)]
    return concat((ends[0], v, ends[1]), dim)


def region(v: View, box: Sequence[tuple[int, int]]) -> View:
    """The part of `v` inside `box`, one (start, stop) for each axis."""
    if len(box) != len(v.shape):
        raise ValueError(f"a box of {len(box)} axes in a tensor of {len(v.shape)}")
    found, span = stretch(v), linear(v.shape, box)
    if (
        found is not None
        and span is not None
        and all(0 <= a < b <= n for n, (a, b) in zip(v.shape, box, strict=True))
    ):
        # of a tensor in one stretch, as most are, ranks mostly want a stretch
        shape = tuple([b - a for a, b in box])
        return v if shape == v.shape else stored(found[0], shape, offset=found[1] + span[0])
    for dim, (start, stop) in enumerate(box):
        v = slice_(v, dim, start, stop)
    return v


def linear(shape: Sequence[int], box: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
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


def into(v: View, target_strides: Sequence[int], target_offset: int = 0) -> Iterator[Piece]:
    """Copies that write `v` into a strided target; `dst` and `dst_strides` count its elements.

    Axis a of `v` moves by target_strides[a] there. Not a view: destinations may run backwards.
    """
    if len(target_strides) != len(v.shape):
        raise ValueError(f"{len(target_strides)} strides for {len(v.shape)} axes")
    return _placed(v, target_strides, target_offset)


def clip(v: View | Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces inside the linear destination range start..stop, in order; their `dst` still
    counts from the tensor's first element.

    Given a View, the time goes with the pieces that meet the range and 1/64 of all others; a plain
    sequence is looked through.
    """
    if isinstance(v, View):
        spans = v._spans
        if spans is None:
            spans = _Spans(v.pieces)
            object.__setattr__(v, "_spans", spans)
        near: Iterable[Piece] = [v.pieces[i] for i in spans.between(start, stop)]
    else:
        near = v
    bounds = (start, stop)
    out: list[Piece] = []
    if start >= stop:
        return out
    for p in near:
        for _, q in cut(p, p[2], p[4], bounds):
            out.append(q if q is p else normalise(q))
    out.sort(key=_key)
    return out


def leaves(v: View) -> set[int]:
    """The leaves of `v` that are not fills."""
    return {p[0] for p in v.pieces if isinstance(p[0], int)}


def relabel(v: View, mapping: Sequence[Leaf]) -> View:
    """`v` with each leaf i replaced by mapping[i]: the same lowering for other sources."""
    old = {p[0] for p in v.pieces}
    new = {leaf: mapping[leaf] if isinstance(leaf, int) else leaf for leaf in old}
    pieces = [p._replace(leaf=new[p[0]]) for p in v.pieces]
    if any(isinstance(leaf, Fill) for i, leaf in new.items() if isinstance(i, int)):
        pieces = [
            p._replace(src=0, src_strides=(0,) * len(p[3])) if isinstance(p[0], Fill) else p
            for p in pieces
        ]
    elif len(set(new.values())) == len(old):
        return View(v.shape, tuple(pieces))
    return _view(v.shape, pieces)


def to_bytes(v: View, elements: int, size: int) -> View:
    """`v` in bytes, of shape [nbytes], for a dtype with `elements` in `size` bytes (`spec.unit`).

    A piece of a Fill keeps the Fill as leaf, with `src` and `src_strides` 0, and says only where
    bytes go: byte x of the result is byte x % size of what `elements.codes.encode` makes. That also
    holds after `clip`. Raises SubByte when some piece does not move whole groups of `elements`.
    """
    total = prod(v.shape)
    if total % elements:
        raise SubByte(f"{total} elements are not a multiple of {elements}")
    shape = (total // elements * size,)
    if elements == 1 and size == 1:
        return View(shape, v.pieces)
    out = []
    for leaf, src, dst, counts, dsts, srcs in v.pieces:
        fill = isinstance(leaf, Fill)
        if elements > 1:
            if not counts or dsts[-1] != 1 or not (fill or srcs[-1] == 1):
                raise SubByte(f"single elements move, {elements} of them share {size} bytes")
            if any(x % elements for x in (src, dst, counts[-1], *dsts[:-1], *srcs[:-1])):
                raise SubByte(f"elements move in groups that are not a multiple of {elements}")
            counts, dsts, srcs = (
                (*counts[:-1], counts[-1] // elements),
                (*dsts[:-1], elements),
                (*srcs[:-1], 0 if fill else elements),
            )
        dsts = (*[d // elements * size for d in dsts], 1)
        srcs = (*[s // elements * size for s in srcs], 0 if fill else 1)
        out.append(
            normalise(
                Piece(
                    leaf,
                    src // elements * size,
                    dst // elements * size,
                    (*counts, size),
                    dsts,
                    srcs,
                )
            )
        )
    return View(shape, tuple(out))


def runs(pieces: Iterable[Piece]) -> Iterator[tuple[Leaf, int, int, int]]:
    """(leaf, src, dst, length) of each run that is contiguous in source and destination; a Fill's
    only in the destination.
    """
    for leaf, src, dst, counts, dsts, srcs in pieces:
        length = 1
        if counts and dsts[-1] == 1 and (srcs[-1] == 1 or isinstance(leaf, Fill)):
            length, counts, dsts, srcs = counts[-1], counts[:-1], dsts[:-1], srcs[:-1]
        if not counts:
            yield leaf, src, dst, length
            continue
        n, d, s = counts[-1], dsts[-1], srcs[-1]
        for index in product(*map(range, counts[:-1])):
            to, at = dst, src
            for i, x, y in zip(index, dsts, srcs, strict=False):
                to += i * x
                at += i * y
            for i in range(n):
                yield leaf, at + i * s, to + i * d, length


def strided(v: View) -> tuple[int, int, Ints] | None:
    """(leaf, offset, strides in elements) if `v` is one strided stretch, as frameworks' views are.

    None if it is made of several, filled, empty, or runs backwards, which frameworks have no views
    for.
    """
    if len(v.pieces) != 1 or isinstance(v.pieces[0][0], Fill):
        return None
    here = _strides(v.shape)
    try:
        (piece,) = refine(v.pieces[0], [d for d, n in zip(here, v.shape, strict=True) if n > 1], 1)
    except TooManyPieces:
        return None
    loops = {d: (n, s) for n, d, s in zip(*piece[3:], strict=True) if n > 1}
    strides = []
    for d, n in zip(here, v.shape, strict=True):
        count, s = loops.get(d, (1, 0)) if n > 1 else (1, 1)
        if count != n or s < 0:
            return None
        strides.append(s)
    return v.pieces[0][0], piece[1], tuple(strides)


def is_whole(v: View, leaf: int = 0) -> bool:
    """Whether `v` is the contiguous storage of `leaf` from its start; True for an empty tensor."""
    size = prod(v.shape)
    if size < 2:
        return size == 0 or v.pieces == ((leaf, 0, 0, (), (), ()),)
    return v.pieces == ((leaf, 0, 0, (size,), (1,), (1,)),)


def stretch(v: View) -> tuple[int, int] | None:
    """The leaf and the first element of it, where `v` is one stretch of a leaf in order; None for
    any other view and for one without elements.
    """
    if len(v.pieces) != 1:
        return None
    leaf, src, _, _, dst_strides, src_strides = v.pieces[0]
    if isinstance(leaf, Fill) or dst_strides != src_strides or dst_strides not in ((), (1,)):
        return None
    return leaf, src


def covers(v: View) -> bool:
    """Whether the pieces write each element exactly once. Looks at every element: for tests."""
    hits = bytearray(prod(v.shape))
    for _, _, dst, length in runs(v.pieces):
        if dst < 0 or dst + length > len(hits) or any(hits[dst : dst + length]):
            return False
        hits[dst : dst + length] = b"\1" * length
    return all(hits)
