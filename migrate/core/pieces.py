"""Strided copies, and the few exact ways to cut and join them; `view` builds layout ops of them.

A destination is one number, the row-major linear index of the result, and never a tuple of
coordinates. Reshape then costs nothing, and the whole difficulty of layouts sits in one place: an
op that looks at an axis needs pieces whose loops do not carry across that axis' border (`refine`).

Two decisions:
* No loop is assumed to nest inside another. Spans are sums over all loops, so every function is
  right for any piece with positive destination strides; nested loops are merely the fast case.
* Joining goes per leaf, not per neighbour in the destination, so that rows made of two leaves each
  become two pieces again when they are stacked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import copysign, gcd
from typing import NamedTuple, TypeAlias


class TooManyPieces(Exception):  # noqa: N818 - a signal to materialise the op, not an error of the user
    """An op would cut its tensor into too many pieces; compute the op on whole tensors instead."""


class SubByte(ValueError):  # noqa: N818
    """A view of a dtype below one byte moves elements that are not whole bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A leaf whose elements all equal `value`. 0.0 and -0.0 are different fills: their bits are."""

    value: float | int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fill):
            return NotImplemented
        return self.value == other.value and (
            self.value != 0 or copysign(1, self.value) == copysign(1, other.value)
        )

    def __hash__(self) -> int:
        return hash((Fill, self.value))


# an int is a position in the owning tensor's `sources`
Leaf: TypeAlias = int | Fill
Ints: TypeAlias = tuple[int, ...]


class Piece(NamedTuple):
    """For all i: out[dst + sum i*dst_strides] = leaf[src + sum i*src_strides], with 0 <= i <
    counts, in elements.

    `src` counts in the leaf's storage, `dst` is the row-major linear index in the result.
    Destination strides are positive. A Fill's `src` and `src_strides` are 0. No loops: one element.
    """

    leaf: Leaf
    src: int
    dst: int
    counts: Ints
    dst_strides: Ints
    src_strides: Ints


def end(piece: Piece) -> int:
    """One past the last destination index of `piece`."""
    last = piece[2]
    for n, d in zip(piece[3], piece[4], strict=True):
        last += (n - 1) * d
    return last + 1


def normalise(piece: Piece) -> Piece:
    """The same copy without unit loops, by falling destination stride, continuing loops fused."""
    leaf, src, dst, counts, dst_strides, src_strides = piece
    if len(counts) < 2:
        return piece if counts != (1,) else Piece(leaf, src, dst, (), (), ())
    loops: list[tuple[int, int, int]] = []
    for loop in sorted(zip(dst_strides, counts, src_strides, strict=True), reverse=True):
        d, n, s = loop
        if n == 1:
            continue
        if loops and loops[-1][0] == n * d and loops[-1][2] == n * s:
            loops[-1] = (d, loops[-1][1] * n, s)
        else:
            loops.append(loop)
    if not loops:
        return Piece(leaf, src, dst, (), (), ())
    dst_strides, counts, src_strides = zip(*loops, strict=True)
    return Piece(leaf, src, dst, counts, dst_strides, src_strides)


def iterations(piece: Piece, loop: int, start: int, stop: int) -> Piece:
    """`piece` with its `loop` restricted to iterations start..stop."""
    leaf, src, dst, counts, dst_strides, src_strides = piece
    counts = (*counts[:loop], stop - start, *counts[loop + 1 :])
    return Piece(
        leaf,
        src + start * src_strides[loop],
        dst + start * dst_strides[loop],
        counts,
        dst_strides,
        src_strides,
    )


def _periodic(piece: Piece, loop: int, period: int) -> Piece:
    """`piece` with its `loop`, a multiple of `period`, as two: over periods and inside one."""
    leaf, src, dst, counts, dst_strides, src_strides = piece
    d, s = dst_strides[loop], src_strides[loop]
    return Piece(
        leaf,
        src,
        dst,
        (*counts[:loop], counts[loop] // period, period, *counts[loop + 1 :]),
        (*dst_strides[:loop], d * period, d, *dst_strides[loop + 1 :]),
        (*src_strides[:loop], s * period, s, *src_strides[loop + 1 :]),
    )


def refine(piece: Piece, borders: Iterable[int], limit: int) -> list[Piece]:
    """Pieces that together equal `piece`, in each of which index // B and index % B are linear in
    the loops for all borders B.

    That is: (dst % B) + sum (count-1) * (stride % B) < B, no loop alone or with others carries
    across a multiple of B. Then the digits of the index in the mixed radix of the borders add up
    loop by loop, if each border divides the one before. A stride may move several digits at once (a
    diagonal). The result is not normalised. Raises TooManyPieces beyond `limit`.
    """
    found = [piece]
    for border in borders:
        if border > 1:
            found = [q for p in found for q in _within(p, border, limit)]
    return found


def _within(piece: Piece, border: int, limit: int) -> list[Piece]:
    todo, done = [piece], []
    while todo:
        piece = todo.pop()
        low = piece[2] % border
        top, loop, widest = low, -1, 0
        for k, (n, d) in enumerate(zip(piece[3], piece[4], strict=True)):
            if n > 1 and d % border:
                top += (n - 1) * (d % border)
                if d > widest:
                    loop, widest = k, d
        if top < border:
            done.append(piece)
            continue
        if len(todo) + len(done) >= limit:
            raise TooManyPieces(f"more than {limit} pieces")
        n, step = piece[3][loop], widest % border
        rest = top - low - (n - 1) * step  # what the other loops add in each iteration
        period = border // gcd(
            step, border
        )  # after so many iterations the index stands at the same place below the border
        if n > period and low < step:
            whole = n // period * period
            if whole < n:
                todo.append(iterations(piece, loop, whole, n))
                piece = iterations(piece, loop, 0, whole)
            todo.append(_periodic(piece, loop, period))
            continue
        # as far as no iteration carries; one that carries by itself goes alone, and its other loops
        # are cut next
        at = max(1, (border - 1 - rest - low) // step + 1)
        todo += [iterations(piece, loop, at, n), iterations(piece, loop, 0, at)]
    return done


def cut(
    piece: Piece, at: int, steps: Sequence[int], bounds: Sequence[int]
) -> Iterator[tuple[int, Piece]]:
    """(k, part of `piece` in bounds[k] <= c < bounds[k+1]) for the coordinate c = at + sum i*steps.

    `bounds` ascend, equal ones enclose nothing; steps are not negative. What lies outside all
    bounds is left out. Iterations of the outermost loop that lie inside one interval stay together;
    only those that a bound divides are looked into. Not normalised.
    """
    top, loop, widest = at, -1, 0
    for k, (n, step) in enumerate(zip(piece[3], steps, strict=True)):
        top += (n - 1) * step
        if n > 1 and step > widest:
            loop, widest = k, step
    if top < bounds[0] or at >= bounds[-1]:
        return
    k = bisect_right(bounds, at) - 1
    if k >= 0 and top < bounds[k + 1]:
        yield k, piece
        return
    n = piece[3][loop]
    rest = top - at - (n - 1) * widest
    i = 0
    while i < n:
        here = at + i * widest
        if here >= bounds[-1]:
            return
        k = bisect_right(bounds, here) - 1
        fit = (bounds[k + 1] - 1 - rest - here) // widest + 1
        if fit < 1:
            yield from cut(iterations(piece, loop, i, i + 1), here, steps, bounds)
            i += 1
            continue
        if k >= 0:
            yield k, iterations(piece, loop, i, min(n, i + fit))
        i += fit


def join(pieces: list[Piece]) -> list[Piece]:
    """The same copies in as few pieces as the rules below find, ordered by destination.

    `pieces` are normalised and ordered. Pieces of one leaf are joined when the second continues a
    loop of the first in source and destination, or several equal ones at equal distances.
    """
    if len(pieces) < 2 or len({p[0] for p in pieces}) == len(pieces):
        return pieces
    groups: dict[Leaf, list[Piece]] = {}
    for p in pieces:
        groups.setdefault(p[0], []).append(p)
    out: list[Piece] = []
    for group in groups.values():
        size = len(group) + 1
        while 1 < len(group) < size:
            size = len(group)
            group = _progressions(_continuations(group))
        out += group
    out.sort(key=_by_dst)
    return out


def _by_dst(piece: Piece) -> int:
    return piece[2]


def _continuations(group: list[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for p in group:
        while out and (joined := _continued(out[-1], p)):
            out.pop()
            p = joined
        out.append(p)
    return out


def _continued(a: Piece, b: Piece) -> Piece | None:
    """One piece for both if `b` goes on where a loop of `a` ends, else None. A loop of one
    iteration is not written down.
    """
    dd, ds = b[2] - a[2], b[1] - a[1]
    more = len(a[3]) - len(b[3])
    if more == 0:
        if a[4] != b[4] or a[5] != b[5]:
            return None
        differ = [j for j, (n, m) in enumerate(zip(a[3], b[3], strict=True)) if n != m]
        if len(differ) > 1:
            return None
        for j in differ or range(len(a[3])):
            n = a[3][j]
            if dd == n * a[4][j] and ds == n * a[5][j]:
                return normalise(a._replace(counts=(*a[3][:j], n + b[3][j], *a[3][j + 1 :])))
        if not differ and dd == 1 and ds == (0 if isinstance(a[0], Fill) else 1):
            return normalise(Piece(a[0], a[1], a[2], (*a[3], 2), (*a[4], 1), (*a[5], ds)))
        return None
    if abs(more) > 1:
        return None
    long, short = (a, b) if more > 0 else (b, a)
    for j, n in enumerate(long[3]):
        if (
            dd == (n if more > 0 else 1) * long[4][j]
            and ds == (n if more > 0 else 1) * long[5][j]
            and _without(long, j) == short[3:]
        ):
            counts = (*long[3][:j], n + 1, *long[3][j + 1 :])
            return normalise(Piece(a[0], a[1], a[2], counts, long[4], long[5]))
    return None


def _without(piece: Piece, loop: int) -> tuple[Ints, Ints, Ints]:
    n, d, s = piece[3:]
    return n[:loop] + n[loop + 1 :], d[:loop] + d[loop + 1 :], s[:loop] + s[loop + 1 :]


def _progressions(group: list[Piece]) -> list[Piece]:
    alike: dict[tuple[Ints, Ints, Ints], list[Piece]] = {}
    for p in group:
        alike.setdefault(p[3:], []).append(p)
    if len(alike) == len(group):
        return group
    out: list[Piece] = []
    for same in alike.values():
        i = 0
        while i < len(same):
            length = _equidistant(same, i)
            # a pair whose second opens a longer row is no pair
            if length == 2 and _equidistant(same, i + 1) > 2:
                length = 1
            out += _row(same[i : i + length])
            i += length
    out.sort(key=_by_dst)
    return out


def _equidistant(pieces: list[Piece], i: int) -> int:
    """How many pieces from number `i` stand at equal distances in source and destination."""
    if i + 1 >= len(pieces):
        return len(pieces) - i
    ds, dd = pieces[i + 1][1] - pieces[i][1], pieces[i + 1][2] - pieces[i][2]
    j = i + 2
    while (
        j < len(pieces)
        and pieces[j][1] - pieces[j - 1][1] == ds
        and pieces[j][2] - pieces[j - 1][2] == dd
    ):
        j += 1
    return j - i


def _row(pieces: list[Piece]) -> list[Piece]:
    """One piece with a new loop over `pieces`; themselves if that loop would not nest."""
    if len(pieces) < 2:
        return pieces
    first, second = pieces[0], pieces[1]
    dd, ds = second[2] - first[2], second[1] - first[1]
    joined = normalise(
        Piece(
            first[0], first[1], first[2], (len(pieces), *first[3]), (dd, *first[4]), (ds, *first[5])
        )
    )
    span = 1
    for n, d in zip(reversed(joined[3]), reversed(joined[4]), strict=True):
        if d < span:
            return pieces
        span += (n - 1) * d
    return [joined]
