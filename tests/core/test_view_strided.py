"""Which views are one strided stretch of a leaf: against numpy on random programs."""

from __future__ import annotations

import random

import numpy as np

from migrate.core import view as views


def program(rng):
    """A view and the array that it stands for, made by the same steps from `base`."""
    shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randint(0, 4)))
    base = np.arange(int(np.prod(shape)))
    array, view = base.reshape(shape), views.stored(0, shape)
    for _ in range(rng.randint(0, 4)):
        dim = rng.randrange(array.ndim) if array.ndim else None
        step = rng.choice(["permute", "select", "slice", "merge", "flip"])
        if dim is None:
            continue
        size = array.shape[dim]
        if step == "permute":
            dims = rng.sample(range(array.ndim), array.ndim)
            view, array = views.permute(view, dims), array.transpose(dims)
        elif step == "select":
            i = rng.randrange(size)
            view, array = views.select(view, dim, i), array.take(i, axis=dim)
        elif step == "slice":
            start = rng.randrange(size)
            stop = rng.randint(start + 1, size)
            view, array = (
                views.slice_(view, dim, start, stop),
                array.take(range(start, stop), axis=dim),
            )
        elif step == "merge" and array.ndim > dim + 1:
            shape = (*array.shape[:dim], size * array.shape[dim + 1], *array.shape[dim + 2 :])
            view, array = views.reshape(view, shape), array.reshape(shape)
        elif step == "flip" and rng.random() < 0.3:
            view, array = views.flip(view, dim), np.flip(array, dim)
    return base, array, view


def test_a_strided_stretch_reads_what_the_view_is():
    rng, found = random.Random(7), 0
    for _ in range(5000):
        base, array, view = program(rng)
        place = views.strided(view)
        if place is not None:
            leaf, offset, strides = place
            assert leaf == 0
            read = np.lib.stride_tricks.as_strided(
                base[offset:], array.shape, [8 * s for s in strides]
            )
            assert np.array_equal(read, array)
            found += 1
    assert found > 4000


def test_what_is_made_of_several_filled_or_backwards_is_none():
    one, other = views.stored(0, (2, 3)), views.stored(1, (2, 3))
    assert views.strided(views.stack([one, other], 0)) is None
    assert views.strided(views.filled((2, 3), 1.0)) is None
    assert views.strided(views.flip(one, 1)) is None
    assert views.strided(views.stored(0, (0, 3))) is None
    # two axes made one that strides cannot say
    assert views.strided(views.reshape(views.permute(one, (1, 0)), (6,))) is None


def test_an_expanded_axis_has_stride_zero():
    assert views.strided(views.stored(0, (4, 3), (0, 1), 2)) == (0, 2, (0, 1))
