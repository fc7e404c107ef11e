"""What the tests of the view algebra share: realising a view from its pieces, and random programs
run on views and numpy arrays alike.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from migrate.core import view as V
from migrate.core.pieces import normalise
from migrate.core.view import Fill

PAD = -1
randoms = st.randoms(use_true_random=False)


def programs(test):
    """The same random programs in every run."""
    return settings(derandomize=True)(given(r=randoms)(test))


def layout(piece, array, offset, strides):
    """`array` from `offset` on as the loops of `piece` walk over it."""
    return as_strided(array[offset:], piece.counts, [x * array.itemsize for x in strides])


def source(piece, data):
    if isinstance(piece.leaf, Fill):
        assert piece.src == 0
        assert set(piece.src_strides) <= {0}
        return np.array([piece.leaf.value])
    return data[piece.leaf]


def write(pieces, data, out):
    """Copies `pieces` into the flat `out`; fails when an element is written twice."""
    hits = np.zeros(out.size, np.int8)
    for p in pieces:
        layout(p, out, p.dst, p.dst_strides)[...] = layout(p, source(p, data), p.src, p.src_strides)
        layout(p, hits, p.dst, p.dst_strides)[...] += 1
    assert hits.max(initial=0) <= 1
    return hits


def realise(v, data):
    out = np.zeros(int(np.prod(v.shape)), np.int64)
    assert write(v.pieces, data, out).all(), "an element is written by no piece"
    return out.reshape(v.shape)


def check(v, want, data):
    assert v.shape == want.shape
    assert (realise(v, data) == want).all()
    assert [p.dst for p in v.pieces] == sorted(p.dst for p in v.pieces)
    for p in v.pieces:
        assert p == normalise(p)
        assert min(p.dst_strides, default=1) > 0
        assert 1 not in p.counts


def leaf(r, data, shape):
    """A stored tensor of `shape`: contiguous, transposed, with gaps, or expanded."""
    order = list(range(len(shape)))
    if r.random() < 0.3:
        r.shuffle(order)
    strides, size = [0] * len(shape), 1
    for a in reversed(order):
        strides[a] = size
        size *= shape[a] + (r.randint(0, 2) if r.random() < 0.2 else 0)
    if shape and r.random() < 0.1:
        strides[r.randrange(len(shape))] = 0
    offset = r.choice([0, 0, 0, 5])
    flat = np.arange(max(size, 1) + offset) + 10_000 * len(data)
    data.append(flat)
    array = (
        as_strided(flat[offset:], shape, [8 * s for s in strides])
        if 0 not in shape
        else np.zeros(shape, np.int64)
    )
    return V.stored(len(data) - 1, shape, strides, offset), array


def factors(r, size):
    if size == 0:
        return r.choice([(0,), (2, 0), (0, 3), (1, 0, 2)])
    out = []
    while size > 1 and len(out) < 4:
        out.append(r.choice([k for k in range(2, size + 1) if size % k == 0]))
        size //= out[-1]
    if size > 1:
        out.append(size)
    if r.random() < 0.3:
        out.insert(r.randint(0, len(out)), 1)
    r.shuffle(out)
    return tuple(out)


def bounds(r, size, parts):
    cuts = sorted(r.randint(0, size) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, size])]


OPS = [
    "roll",
    "pad",
    "flip",
    "slice",
    "select",
    "split",
    "unbind",
    *["concat", "stack"] * 2,
    *["reshape", "permute"] * 3,
]


def fits(shape, other, dim):
    return len(shape) == len(other) and all(
        a == b for k, (a, b) in enumerate(zip(shape, other, strict=True)) if k != dim
    )


def step(r, op, v, a, pool):
    """Results of one op on the view `v` and on the array `a`, as pairs."""
    if op == "reshape":
        shape = factors(r, a.size)
        return [(V.reshape(v, shape), a.reshape(shape))]
    if op == "permute":
        dims = list(range(a.ndim))
        r.shuffle(dims)
        return [(V.permute(v, dims), a.transpose(dims))]
    if op in ("concat", "stack"):
        dim = r.randint(0, max(0, a.ndim - (op == "concat")))
        same = [
            x
            for x in pool
            if x[1].shape == a.shape or (op == "concat" and fits(x[1].shape, a.shape, dim))
        ]
        parts = [(v, a), *(r.choice(same) for _ in range(r.randint(1, 3)))]
        views, arrays = zip(*parts)
        if op == "stack":
            return [(V.stack(views, dim), np.stack(arrays, dim))]
        if not a.ndim:
            return []
        return [(V.concat(views, dim), np.concatenate(arrays, dim))]
    if not a.ndim:
        return []
    dim = r.randrange(a.ndim)
    n = a.shape[dim]
    if op == "slice":
        start = r.randint(0, n)
        stop = r.randint(start, n)
        return [(V.slice_(v, dim, start, stop), a.take(range(start, stop), dim))]
    if op == "select":
        i = r.randrange(n) if n else None
        return [] if i is None else [(V.select(v, dim, i), a.take(i, dim))]
    if op == "flip":
        return [(V.flip(v, dim), np.flip(a, dim))]
    if op == "roll":
        shift = r.randint(-2 * n, 2 * n)
        return [(V.roll(v, dim, shift), np.roll(a, shift, dim))]
    if op == "pad":
        width = [(0, 0)] * a.ndim
        width[dim] = (r.randint(0, 2), r.randint(0, 2))
        return [(V.pad(v, dim, *width[dim], PAD), np.pad(a, width, constant_values=PAD))]
    if op == "unbind":
        return list(zip(V.unbind(v, dim), [a.take(i, dim) for i in range(n)], strict=True))
    sizes = bounds(r, n, r.randint(1, 4))
    return list(zip(V.split(v, dim, sizes), np.split(a, np.cumsum(sizes)[:-1], dim), strict=True))


def run(r, most=12, axis=(1, 2, 3, 4, 5, 6, 7, 8, 12), each=None):
    """A random program; every intermediate result is compared. Returns the pool and the leaves'
    data.
    """
    data, pool = [], []
    for _ in range(r.randint(1, 3)):
        shape = tuple(
            0 if r.random() < 0.02 else r.choice(axis)
            for _ in range(r.choice([0, 1, 2, 2, 2, 3, 3]))
        )
        pool += [leaf(r, data, shape) for _ in range(r.randint(1, 3))]
    for v, a in pool:
        check(v, a, data)
    for _ in range(r.randint(1, most)):
        # mostly go on with what is broken up already, or the views stay simple
        v, a = max(
            r.sample(pool, min(len(pool), r.choice([1, 3, 6]))), key=lambda x: len(x[0].pieces)
        )
        results = step(r, r.choice(OPS), v, a, pool)
        if any(x[1].size > 3000 for x in results):
            continue
        for x in results:
            check(*x, data)
            if each:
                each(*x, data)
        # parts of an unbind must not crowd out everything else
        pool += r.sample(results, min(3, len(results)))
    return pool, data
