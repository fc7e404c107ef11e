"""What a test accepts: whether it would pass as well with another tensor in the place of the one
that its rules make.

The comparison is the one that runs tests, on the numbers that the test itself writes down. A number
that an op computes is not known here; it stands for what the test expects where the rules put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from math import prod
from typing import Any, NamedTuple

from ..core import elements
from ..core.pieces import Piece, end
from ..core.spec import Spec
from ..core.view import Fill, Leaf, View, clip, relabel
from ..planning.graph import Tensor
from ..rules.examples import ExpectedTensor, indexes, shape_of
from .elements import MOST_ELEMENTS, Elements, Example, numbers

# how many elements of a longer run are compared at each end of it, and in how many places between
AT_AN_END = 1 << 12


class _Stated(NamedTuple):
    """A run of elements of an output that a test states, and their codes, by their place in the
    run.
    """

    start: int
    length: int
    codes: Callable[[int], Any]


def states(example: Example, key: str) -> bool:
    """Whether the test says of some element of the output what it is, not only of what size and
    kind the tensor is.
    """
    if key not in example.expected or key not in example.bound.tensors:
        return False
    wanted, like = example.expected[key]
    if wanted.rtol is not None and wanted.rtol >= 1:
        # zeros are within such a tolerance of any number
        return False
    try:
        return any(
            run.length for run in _stated(example, wanted, like, example.bound.tensors[key].spec)
        )
    except ValueError:
        return False


def takes(example: Example, key: str, other: Tensor | None) -> bool | None:
    """Whether the test would come out the same with `other` as the output; None: it states too many
    elements to be sure.

    Of a test that fails as it is, because what it expects is wrong, the same elements are compared
    with those that the rules make.
    """
    if other is None or key not in example.expected:
        return key not in example.expected
    right = example.bound.tensors[key]
    if key not in example.passes:
        example.passes[key] = _passes(example, key, right, right) is not False
    if example.passes[key]:
        return _passes(example, key, other, right)
    return right.spec == other.spec and _alike(example, key, other, right)


def _passes(example: Example, key: str, other: Tensor, right: Tensor) -> bool | None:
    """Whether the key's part of the test passes with `other`."""
    wanted, like = example.expected[key]
    said = _shape(example, wanted, like)
    dtype = wanted.dtype or (None if like is None else example.given[like].spec.dtype)
    if said not in (None, other.spec.shape) or dtype not in (None, other.spec.dtype):
        return False
    try:
        runs = list(_stated(example, wanted, like, other.spec))
    except ValueError:
        return False
    large = any(run.length > MOST_ELEMENTS for run in runs)
    if large and right.spec == other.spec and _plain(example, right) == _plain(example, other):
        return True
    read, known = Elements(example), dict[Any, Any]()
    for run in runs:
        for n in _looked_at(run, other.view):
            code, wish = read.at(other, run.start + n), run.codes(n)
            if isinstance(code, tuple):
                known = known or _computed(example, wanted, like, right, read)
                code = known.get(code)
            if code != wish and not _close(other.spec.dtype, code, wish, wanted.rtol):
                return False
    return None if large else True


def _alike(example: Example, key: str, other: Tensor, right: Tensor) -> bool:
    """Whether two outputs of one shape have the same elements where the test states them."""
    read = Elements(example)
    try:
        runs = list(_stated(example, *example.expected[key], right.spec))
    except ValueError:
        return True
    return all(
        read.at(right, run.start + n) == read.at(other, run.start + n)
        for run in runs
        for n in _looked_at(run, other.view)
    )


def _close(dtype: str, code: Any, wish: Any, rtol: float | None) -> bool:
    if not isinstance(code, int) or not isinstance(wish, int):
        return False
    return elements.close(elements.value(dtype, code), elements.value(dtype, wish), rtol)


def _shape(example: Example, wanted: ExpectedTensor, like: str | None) -> tuple[int, ...] | None:
    if wanted.shape is not None:
        return tuple(wanted.shape)
    if wanted.values is not None:
        return shape_of(wanted.values)
    return None if like is None else example.given[like].spec.shape


def _stated(
    example: Example, wanted: ExpectedTensor, like: str | None, of: Spec
) -> Iterator[_Stated]:
    """What the test states of an output of this spec; ValueError where it states an element that
    there is not.
    """
    if like is not None:
        if example.given[like].spec.numel != of.numel:
            raise ValueError(f"{like!r} has other elements")
        yield _Stated(0, of.numel, example.codes[like])
    elif wanted.values is not None or wanted.fill is not None:
        yield _Stated(0, of.numel, numbers(of.dtype, wanted.fill, wanted.values))
    for written, values in wanted.slices.items():
        start, rest = 0, of.shape
        for position in indexes(written):
            if not rest or not -rest[0] <= position < rest[0]:
                raise ValueError(f"slice {written!r} is outside of {list(of.shape)}")
            start, rest = start + position % rest[0] * prod(rest[1:]), rest[1:]
        if isinstance(values, list) and shape_of(values) != rest:
            raise ValueError(f"slice {written!r} has the shape {list(rest)}")
        yield _Stated(
            start,
            prod(rest),
            numbers(of.dtype, *((None, values) if isinstance(values, list) else (values, None))),
        )


def _looked_at(run: _Stated, view: View) -> Iterable[int]:
    """The places in a run that are compared: of a long one its ends, and where something else
    begins in what is compared with it.
    """
    if run.length <= MOST_ELEMENTS:
        return range(run.length)
    pieces = clip(view, run.start, run.start + run.length)[:AT_AN_END]
    corners = (place - run.start for piece in pieces for place in _corners(piece))
    return chain(range(AT_AN_END), corners, range(run.length - AT_AN_END, run.length))


def _corners(piece: Piece) -> Iterator[int]:
    yield piece.dst
    yield from (piece.dst + stride for stride in piece.dst_strides)
    yield end(piece) - 1


def _computed(
    example: Example, wanted: ExpectedTensor, like: str | None, right: Tensor, read: Elements
) -> dict[Any, Any]:
    """What the test expects each computed element to be, by its token."""
    out: dict[Any, Any] = {}
    for run in _stated(example, wanted, like, right.spec):
        for n in _looked_at(run, right.view):
            out.setdefault(read.at(right, run.start + n), run.codes(n))
    return out


def _plain(example: Example, tensor: Tensor) -> View:
    """The view, over leaves that are alike where the given tensors are: equal views are equal
    tensors.
    """
    leaves: list[Leaf] = []
    for source in tensor.sources:
        given = example.tensors.get(source) if isinstance(source, str) else None
        if given is None or given.values is not None:
            # what nobody else is; a given key is the same one in both
            leaves.append(
                2 * list(example.given).index(source) + 1
                if isinstance(source, str)
                else 2 * id(source)
            )
        else:
            leaves.append(0 if given.fill == "iota" else Fill(given.fill or 0))
    return relabel(tensor.view, leaves)


__all__ = ["states", "takes"]
