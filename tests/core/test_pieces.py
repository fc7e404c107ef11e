"""Cutting and joining strided copies, also those whose loops do not nest, and how much work it
is.
"""

import itertools

import numpy as np
import pytest
from view_oracle import programs

from migrate.core import view as V
from migrate.core.pieces import cut, join, normalise, refine
from migrate.core.view import Fill, Piece, TooManyPieces


def tangled(r):
    """A piece whose loops need not nest, with distinct destinations."""
    while True:
        loops = r.randint(0, 4)
        counts = tuple(r.randint(1, 5) for _ in range(loops))
        strides = tuple(r.randint(1, 40) for _ in range(loops))
        p = Piece(
            0,
            r.randint(0, 9),
            r.randint(0, 50),
            counts,
            strides,
            tuple(r.randint(-9, 9) for _ in range(loops)),
        )
        places = [d for d, _ in elements(p)]
        if len(set(places)) == len(places):
            return p


def elements(p):
    for index in itertools.product(*map(range, p.counts)):
        yield (
            p.dst + sum(map(int.__mul__, index, p.dst_strides)),
            p.src + sum(map(int.__mul__, index, p.src_strides)),
        )


@programs
def test_refined_loops_never_carry_and_copy_the_same_elements(r):
    p = tangled(r)
    borders, size = [], 1
    for _ in range(r.randint(1, 3)):
        size *= r.randint(1, 12)
        borders.insert(0, size)
    found = refine(p, borders, 10_000)
    assert sorted(e for q in found for e in elements(q)) == sorted(elements(p))
    for q, b in itertools.product(found, borders):
        assert q.dst % b + sum((n - 1) * (d % b) for n, d in zip(q.counts, q.dst_strides)) < b


def test_a_stretch_that_starts_inside_a_row_keeps_its_whole_rows():
    found = refine(Piece(0, 0, 3, (60,), (1,), (1,)), (6,), 100)
    assert sorted((p.dst, tuple(n for n in p.counts if n > 1)) for p in found) == [
        (3, (3,)),
        (6, (9, 6)),
        (60, (3,)),
    ]


@programs
def test_cut_puts_each_element_into_its_interval(r):
    p = tangled(r)
    edges = sorted(r.choices(range(260), k=r.randint(2, 6)))
    got = [(k, e) for k, q in cut(p, p.dst, p.dst_strides, edges) for e in elements(q)]
    want = [
        (k, e)
        for e in elements(p)
        for k, (a, b) in enumerate(itertools.pairwise(edges))
        if a <= e[0] < b
    ]
    assert sorted(got) == sorted(want)


@programs
def test_normalising_keeps_the_copies(r):
    p = tangled(r)
    assert sorted(elements(normalise(p))) == sorted(elements(p))
    assert normalise(normalise(p)) == normalise(p)


def test_a_long_loop_is_refined_in_periods_not_in_iterations():
    # 10**9 rows of 6 under a border of 8: the place below the border comes back after four rows
    p = Piece(0, 0, 0, (10**9, 5), (6, 1), (6, 1))
    found = refine(p, (8,), 100)
    assert len(found) <= 8
    assert sum(np.prod(q.counts, dtype=object) for q in found) == 5 * 10**9


def test_equal_pieces_whose_row_would_not_nest_stay_apart():
    ladder = [Piece(0, 0, 0, (3,), (4,), (1,)), Piece(0, 9, 6, (3,), (4,), (1,))]
    assert join(ladder) == ladder


def test_a_pair_does_not_take_the_first_of_a_longer_row():
    rows = [Piece(0, src, 10 * k, (4,), (1,), (1,)) for k, src in enumerate((90, 0, 20, 40))]
    assert join(rows) == [rows[0], Piece(0, 0, 10, (3, 4), (10, 1), (20, 1))]


def test_negative_zero_is_another_fill():
    assert Fill(0.0) == Fill(0)
    assert Fill(0.0) != Fill(-0.0)
    assert len(V.concat([V.filled((2,), 0.0), V.filled((2,), -0.0)], 0).pieces) == 2


def test_an_op_that_shreds_its_tensor_gives_up():
    # rows of two leaves, looked at in other rows that share no factor: nearly every row is cut at a
    # place of its own
    columns = V.concat([V.stored(0, (5003, 3000)), V.stored(1, (5003, 3007))], 1)
    with pytest.raises(TooManyPieces):
        V.permute(V.reshape(columns, (6007, 5003)), (1, 0))


def test_an_op_that_shreds_many_pieces_a_little_each_gives_up_too():
    widths = [37] * 19 + [51]
    columns = V.concat([V.stored(k, (503, n)) for k, n in enumerate(widths)], 1)
    with pytest.raises(TooManyPieces):
        V.permute(V.reshape(columns, (754, 503)), (1, 0))


def test_bringing_thousands_of_tensors_together_does_not():
    v = V.stack([V.stored(k, (2, 3)) for k in range(10_000)], 0)
    assert len(v.pieces) == 10_000
    assert len(V.stack([V.stored(k, (2, 3)) for k in range(10_000)], 1).pieces) == 10_000
    assert len(V.concat([V.stored(k, (2, 3)) for k in range(10_000)], 1).pieces) == 10_000
    assert V.unbind(v, 0)[77] == V.stored(77, (2, 3))


# ---- work grows with what is touched -------------------------------------------------------------


def test_a_clip_looks_only_at_pieces_near_its_tile(monkeypatch):
    wide = V.concat(
        [V.stored(0, (4000, 2)), V.stack([V.stored(k, (2,)) for k in range(1, 4001)], 0)], 1
    )
    seen = []
    monkeypatch.setattr(V, "cut", lambda piece, *rest: seen.append(piece) or cut(piece, *rest))
    for tile in range(0, 16_000, 160):
        found = V.clip(wide, tile, tile + 160)
        assert sum(n for *_, n in V.runs(found)) == 160
    assert len(wide.pieces) == 4001
    assert len(seen) < 4001 + 2 * 100 + 100


def test_unbinding_looks_at_each_piece_once(monkeypatch):
    def experts(first):
        return V.stack([V.stored(first + k, (768, 2048)) for k in range(256)], 0)

    v = V.concat([experts(0), experts(256)], 1)
    seen = []
    monkeypatch.setattr(V, "cut", lambda piece, *rest: seen.append(piece) or cut(piece, *rest))
    parts = V.unbind(v, 0)
    assert len(seen) == 512
    assert parts[3] == V.concat([V.stored(3, (768, 2048)), V.stored(259, (768, 2048))], 0)
