"""The view algebra against numpy: every view here is realised from its pieces and compared element
for element.
"""

import itertools

import numpy as np
import pytest
from view_oracle import (
    PAD,
    bounds,
    check,
    factors,
    layout,
    leaf,
    programs,
    realise,
    run,
    source,
    step,
    write,
)

from migrate.core import view as V
from migrate.core.view import Fill, Piece, View


@programs
def test_a_random_program_makes_what_numpy_makes(r):
    run(r)


@programs
def test_a_region_of_any_view_is_that_region_of_the_array(r):
    def each(v, a, data):
        box = []
        for n in a.shape:
            start = r.randint(0, n)
            box.append((start, r.randint(start, n)))
        check(V.region(v, box), a[tuple(slice(*b) for b in box)], data)

    run(r, 6, each=each)


@programs
def test_clips_of_successive_tiles_put_the_tensor_together(r):
    def each(v, a, data):
        out = np.full(a.size, -7, np.int64)
        cuts = sorted({0, a.size, *(r.randint(0, a.size) for _ in range(r.randint(0, 6)))})
        for start, stop in itertools.pairwise(cuts):
            for given_as in (v, list(v.pieces)):
                found = V.clip(given_as, start, stop)
                assert [p.dst for p in found] == sorted(p.dst for p in found)
                hits = write(found, data, out)
                assert hits[start:stop].all()
                assert hits.sum() == stop - start
        assert (out.reshape(a.shape) == a).all()
        assert V.clip(v, a.size, a.size + 5) == V.clip(v, 0, 0) == []

    run(r, 6, each=each)


@programs
def test_runs_are_the_same_copies_one_contiguous_stretch_at_a_time(r):
    def each(v, a, data):
        out = np.full(a.size, -7, np.int64)
        for leaf_, src, dst, length in V.runs(v.pieces):
            assert length > 0
            out[dst : dst + length] = (
                leaf_.value if isinstance(leaf_, Fill) else data[leaf_][src : src + length]
            )
        assert (out.reshape(a.shape) == a).all()
        assert V.covers(v)

    run(r, 6, each=each)


def chunked(r, data, shape):
    array = np.arange(int(np.prod(shape))).reshape(shape) + 10_000 * len(data)
    grids = []
    for n in shape:
        edges = [0, *sorted(r.sample(range(1, n), min(n - 1, r.randint(0, 2)))), n]
        grids.append(list(itertools.pairwise(edges)))
    chunks = []
    for box in itertools.product(*grids):
        part = array[tuple(slice(*b) for b in box)]
        order = list(range(part.ndim))
        if r.random() < 0.3:
            r.shuffle(order)
        memory = np.ascontiguousarray(part.transpose(order))
        strides = [memory.strides[order.index(a)] // 8 for a in range(part.ndim)]
        chunks.append(
            (
                len(data),
                [b[0] for b in box],
                part.shape,
                None if order == sorted(order) else strides,
            )
        )
        data.append(memory.reshape(-1))
    r.shuffle(chunks)
    return V.assemble(shape, chunks), array


@programs
def test_a_region_of_chunked_tensors_is_written_into_a_strided_target(r):
    data = []
    shape = tuple(r.choice([1, 2, 3, 4, 6]) for _ in range(r.randint(1, 3)))
    views, arrays = zip(*(chunked(r, data, shape) for _ in range(r.randint(1, 3))))
    for pair in zip(views, arrays):
        check(*pair, data)
    dim = r.randint(0, len(shape))
    v, a = V.stack(views, dim), np.stack(arrays, dim)
    for _ in range(r.randint(0, 3)):
        v, a = (
            step(r, r.choice(["permute", "reshape", "flip", "roll", "split"]), v, a, []) or [(v, a)]
        )[0]
    box = []
    for n in a.shape:
        start = r.randint(0, n)
        box.append((start, r.randint(start, n)))
    v, a = V.region(v, box), a[tuple(slice(*b) for b in box)]
    order = list(range(a.ndim))
    r.shuffle(order)
    gap, start = r.choice([1, 2]), r.choice([0, 7])
    memory = np.full(start + int(np.prod([n * gap for n in a.shape])), -1)
    base = memory[start:].reshape([a.shape[i] * gap for i in order])
    target = base[
        tuple(slice(None, None, -gap if r.random() < 0.2 else gap) for _ in order)
    ].transpose(np.argsort(order))
    offset = (target.__array_interface__["data"][0] - memory.__array_interface__["data"][0]) // 8
    written = 0
    for p in V.into(v, [x // 8 for x in target.strides], offset):
        to = layout(p, memory, p.dst, p.dst_strides)
        to[...] = layout(p, source(p, data), p.src, p.src_strides)
        written += to.size
    assert written == a.size
    assert (target == a).all()


# ---- laws ----------------------------------------------------------------------------------------


@programs
def test_taking_a_stored_tensor_apart_and_putting_it_together_leaves_one_piece(r):
    data = []
    shape = tuple(r.randint(1, 6) for _ in range(r.randint(1, 4)))
    v, _ = leaf(r, data, shape)
    dim = r.randrange(len(shape))
    assert V.stack(V.unbind(v, dim), dim) == v
    assert V.concat(V.split(v, dim, bounds(r, shape[dim], r.randint(1, 4))), dim) == v
    assert V.flip(V.flip(v, dim), dim) == v
    shift = r.randint(0, 9)
    assert V.roll(V.roll(v, dim, shift), dim, -shift) == v
    dims = list(range(len(shape)))
    r.shuffle(dims)
    assert V.permute(V.permute(v, dims), [dims.index(a) for a in range(len(dims))]) == v
    assert V.slice_(V.pad(v, dim, 2, 1, 0), dim, 2, 2 + shape[dim]) == v


def there_and_back(r, shape):
    """(forth, back): one op on views of `shape` and the op that undoes it."""
    op = (
        r.choice(["reshape", "permute", "flip", "roll", "pad", "split", "unbind"])
        if shape
        else "reshape"
    )
    if op == "reshape":
        other = factors(r, int(np.prod(shape)))
        return lambda v: V.reshape(v, other), lambda v: V.reshape(v, shape)
    if op == "permute":
        dims = r.sample(range(len(shape)), len(shape))
        return lambda v: V.permute(v, dims), lambda v: V.permute(v, np.argsort(dims).tolist())
    dim = r.randrange(len(shape))
    if op == "flip":
        return lambda v: V.flip(v, dim), lambda v: V.flip(v, dim)
    if op == "roll":
        shift = r.randint(-9, 9)
        return lambda v: V.roll(v, dim, shift), lambda v: V.roll(v, dim, -shift)
    if op == "pad":
        return lambda v: V.pad(v, dim, 1, 2, PAD), lambda v: V.slice_(v, dim, 1, 1 + shape[dim])
    sizes = bounds(r, shape[dim], 3) if op == "split" else [1] * shape[dim]
    order = r.sample(range(len(sizes)), len(sizes))
    shuffled, back = [sizes[k] for k in order], np.argsort(order).tolist()
    if op == "split":
        return (
            lambda v: V.concat([V.split(v, dim, sizes)[k] for k in order], dim),
            lambda v: V.concat([V.split(v, dim, shuffled)[k] for k in back], dim),
        )
    to = r.randrange(len(shape))
    return (
        lambda v: V.stack([V.unbind(v, dim)[k] for k in order], to),
        lambda v: V.stack([V.unbind(v, to)[k] for k in back], dim),
    )


@programs
def test_what_is_done_and_undone_leaves_the_whole_tensor(r):
    v = V.stored(0, tuple(r.choice([1, 2, 3, 4, 6]) for _ in range(r.randint(1, 3))))
    undo = []
    for _ in range(r.randint(1, 6)):
        forth, back = there_and_back(r, v.shape)
        v = forth(v)
        undo.append(back)
    for back in reversed(undo):
        v = back(v)
    assert V.is_whole(v)


def test_a_fill_runs_as_far_as_its_destination():
    assert list(V.runs(V.filled((2, 3), 1).pieces)) == [(Fill(1), 0, 0, 6)]


def test_fills_side_by_side_are_one_fill():
    parts = V.concat([V.filled((2, 3), 1), V.filled((2, 1), 1), V.filled((2, 5), 1)], 1)
    assert parts == V.filled((2, 9), 1)


@programs
def test_parts_come_back_as_they_were_put_together(r):
    data = []
    shape = tuple(r.randint(1, 5) for _ in range(r.randint(1, 3)))
    parts = [V.stored(k, shape) for k in range(r.randint(1, 5))]
    dim = r.randint(0, len(shape))
    assert V.unbind(V.stack(parts, dim), dim) == parts
    both = [V.concat([leaf(r, data, shape)[0], leaf(r, data, shape)[0]], 0) for _ in range(3)]
    assert V.unbind(V.stack(both, dim), dim) == both
    dim = r.randrange(len(shape))
    assert V.split(V.concat(parts, dim), dim, [shape[dim]] * len(parts)) == parts
    assert V.split(V.concat(both, dim), dim, [both[0].shape[dim]] * 3) == both


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_of_two_leaves_become_two_pieces_again(dim):
    fused = V.concat([V.stored(0, (4, 6, 5)), V.stored(1, (4, 6, 5))], 1)
    again = V.stack(V.unbind(fused, dim), dim)
    assert again == fused
    assert len(again.pieces) == 2


def test_irregular_rows_of_one_leaf_keep_their_long_runs():
    rows = V.unbind(V.stored(0, (9, 4)), 0)
    v = V.stack([rows[8], rows[0], rows[1], rows[2]], 0)
    assert [(run[1], run[3]) for run in V.runs(v.pieces)] == [(32, 4), (0, 12)]


# ---- relabelling ---------------------------------------------------------------------------------


@programs
def test_relabelling_reads_the_other_leaves(r):
    pool, data = run(r, 5)
    other = (
        [r.randrange(len(data)) for _ in data]
        if r.random() < 0.5
        else r.sample(range(len(data)), len(data))
    )
    longest = max(x.size for x in data)
    alike = [np.resize(x, longest) for x in data]
    for v, _ in pool:
        if not any(any(s < 0 for s in p.src_strides) for p in v.pieces):
            want = realise(v, [alike[k] for k in other])
            check(V.relabel(v, other), want, alike)


def test_leaves_that_become_one_are_joined():
    halves = V.concat([V.stored(0, (3, 4)), V.stored(1, (3, 4), offset=12)], 0)
    assert len(halves.pieces) == 2
    assert V.relabel(halves, [5, 5]) == V.stored(5, (6, 4))
    assert V.relabel(halves, [7, 5]) == View(
        (6, 4), tuple(p._replace(leaf=[7, 5][p.leaf]) for p in halves.pieces)
    )


def test_a_leaf_may_become_a_fill():
    v = V.relabel(V.concat([V.stored(0, (3, 4)), V.stored(1, (3, 4))], 1), [Fill(2), Fill(2)])
    assert v == V.filled((3, 8), 2)


def test_leaves_are_those_that_are_read():
    assert V.leaves(V.pad(V.concat([V.stored(3, (2,)), V.stored(5, (1,))], 0), 0, 1, 0, 9)) == {
        3,
        5,
    }


# ---- empty tensors and scalars -------------------------------------------------------------------


def test_a_scalar_is_one_piece_without_loops():
    v = V.stored(0, ())
    assert v.pieces == (Piece(0, 0, 0, (), (), ()),)
    assert V.is_whole(v)
    assert V.permute(v, ()) == V.region(v, ()) == V.reshape(V.reshape(v, (1, 1)), ()) == v
    assert V.unbind(V.stack([v, V.stored(1, ())], 0), 0) == [v, V.stored(1, ())]
    assert list(V.into(v, (), 4)) == [Piece(0, 0, 4, (), (), ())]
    assert V.to_bytes(v, 1, 4).pieces == (Piece(0, 0, 0, (4,), (1,), (1,)),)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 3)])
def test_an_empty_tensor_goes_through_every_op(shape):
    v, a = V.stored(0, shape), np.zeros(shape, np.int64)
    assert v.pieces == ()
    assert V.is_whole(v)
    assert V.covers(v)
    for dim, n in enumerate(shape):
        assert [x.shape for x in V.unbind(v, dim)] == [x.shape for x in np.moveaxis(a, dim, 0)]
        assert [x.shape for x in V.split(v, dim, (0, n, 0))] == [
            x.shape for x in np.split(a, (0, n), dim)
        ]
        width = [(0, 0)] * len(shape)
        width[dim] = (1, 2)
        check(V.pad(v, dim, 1, 2, PAD), np.pad(a, width, constant_values=PAD), [])
        assert V.flip(v, dim) == V.roll(v, dim, 3) == v
        assert V.concat([v, v], dim).shape == np.concatenate([a, a], dim).shape
    assert V.stack([v, v], 1).shape == np.stack([a, a], 1).shape
    assert V.permute(v, range(len(shape))[::-1]).shape == shape[::-1]
    assert V.reshape(v, (0, 7)).shape == (0, 7)
    assert V.to_bytes(v, 2, 1).shape == (0,)
    assert V.clip(v, 0, 10) == list(V.into(v, [1] * len(shape))) == list(V.runs(v.pieces)) == []


def test_empty_parts_of_a_split_are_empty_views():
    parts = V.split(V.stored(0, (4, 2)), 0, (0, 1, 0, 3, 0))
    assert [p.shape for p in parts] == [(0, 2), (1, 2), (0, 2), (3, 2), (0, 2)]
    assert V.concat(parts, 0) == V.stored(0, (4, 2))


# ---- wholeness -----------------------------------------------------------------------------------


def test_a_stretch_is_one_run_of_a_leaf_in_order():
    whole = V.stored(1, (4, 6), offset=3)
    assert V.stretch(whole) == (1, 3)
    assert V.stretch(V.region(whole, [(1, 3), (0, 6)])) == (1, 9)
    assert V.stretch(V.region(whole, [(2, 3), (4, 6)])) == (1, 19)
    assert V.stretch(V.region(whole, [(2, 3), (5, 6)])) == (1, 20)
    assert V.region(whole, [(0, 4), (0, 6)]) is whole
    no_stretches = (
        V.region(whole, [(0, 2), (0, 5)]),
        V.region(whole, [(1, 1), (0, 6)]),
        V.permute(whole, (1, 0)),
        V.flip(V.stored(0, (6,)), 0),
        V.filled((4,), 1.0),
        V.stored(0, (4,), (0,)),
        V.stored(0, (4,), (2,)),
        V.concat((V.stored(0, (4,)), V.stored(1, (4,))), 0),
    )
    assert [V.stretch(v) for v in no_stretches] == [None] * len(no_stretches)


def test_only_the_untouched_tensor_is_whole():
    v = V.stored(0, (3, 4))
    assert V.is_whole(V.reshape(v, (12,)))
    assert V.is_whole(V.stored(2, (3, 4)), 2)
    assert not V.is_whole(v, 1)
    assert not V.is_whole(V.permute(v, (1, 0)))
    assert not V.is_whole(V.stored(0, (3, 4), offset=1))
    assert not V.is_whole(V.slice_(v, 0, 1, 3))
    assert not V.is_whole(V.filled((3,), 0))


def test_covers_sees_holes_and_overlaps():
    piece = Piece(0, 0, 0, (4,), (1,), (1,))
    assert V.covers(View((4,), (piece,)))
    assert not V.covers(View((5,), (piece,)))
    assert not V.covers(View((3,), (piece,)))
    assert not V.covers(View((4,), (piece, Piece(0, 0, 3, (), (), ()))))


# ---- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda v: V.reshape(v, (5, 5)),
        lambda v: V.concat([v, V.stored(1, (4, 4))], 1),
        lambda v: V.concat([v, V.stored(1, (3,))], 0),
        lambda v: V.concat([v, v], 2),
        lambda v: V.stack([v, V.stored(1, (4, 4))], 0),
        lambda v: V.stack([v], 3),
        lambda v: V.slice_(v, 0, 2, 4),
        lambda v: V.slice_(v, 0, 2, 1),
        lambda v: V.slice_(v, -1, 0, 1),
        lambda v: V.select(v, 1, 4),
        lambda v: V.permute(v, (0, 0)),
        lambda v: V.split(v, 0, (1, 1)),
        lambda v: V.split(v, 0, (4, -1)),
        lambda v: V.pad(v, 0, -1, 0, 0),
        lambda v: V.region(v, [(0, 1)]),
        lambda v: list(V.into(v, (1,))),
        lambda v: V.stored(0, (2, 2), (1,)),
    ],
)
def test_what_does_not_fit_is_a_value_error(call):
    with pytest.raises(ValueError):
        call(V.stored(0, (3, 4)))
