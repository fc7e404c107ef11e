"""The layouts of real migrations: how many pieces and runs they take, and that inverses cancel."""

import itertools

import pytest

from migrate.core import view as V

# ---- real migrations -----------------------------------------------------------------------------


def counted(shape):
    counter = itertools.count()
    return lambda *other: V.stored(next(counter), other or shape)


def gate_up():
    s = counted((14336, 4096))
    return V.concat([V.stack([s() for _ in range(16)], 0), V.stack([s() for _ in range(16)], 0)], 1)


def unfuse():
    return V.select(V.slice_(V.stored(0, (16, 28672, 4096)), 1, 14336, 28672), 0, 3)


def identity():
    return V.select(V.slice_(gate_up(), 1, 0, 14336), 0, 3)


def restack():
    return V.stack(V.unbind(V.stored(0, (16, 14336, 4096)), 0), 0)


def gqa():
    s = counted(())
    q, k, w = (
        V.reshape(s(4096, 4096), (8, 4, 128, 4096)),
        V.reshape(s(1024, 4096), (8, 1, 128, 4096)),
        V.reshape(s(1024, 4096), (8, 1, 128, 4096)),
    )
    return V.reshape(V.concat([q, k, w], 1), (6144, 4096))


def gqa_back():
    return V.reshape(
        V.slice_(V.reshape(V.stored(0, (6144, 4096)), (8, 6, 128, 4096)), 1, 0, 4), (4096, 4096)
    )


def rope():
    return V.reshape(
        V.permute(V.reshape(V.stored(0, (4096, 4096)), (32, 2, 64, 4096)), (0, 2, 1, 3)),
        (4096, 4096),
    )


def glu():
    s = counted((14336, 4096))
    return V.reshape(
        V.permute(V.reshape(V.concat([s(), s()], 0), (2, 448, 32, 4096)), (1, 0, 2, 3)),
        (28672, 4096),
    )


def deinterleave():
    return V.reshape(
        V.permute(V.reshape(V.stored(0, (16, 2880, 64)), (16, 1440, 2, 64)), (0, 2, 1, 3)),
        (16, 2880, 64),
    )


def tensor_parallel():
    s = counted((4096, 512))
    return V.concat([s() for _ in range(8)], 1)


def tensor_parallel_glu():
    shards = [V.stored(k, (3584, 4096)) for k in range(8)]
    return V.concat(
        [V.concat([V.split(s, 0, (1792, 1792))[half] for s in shards], 0) for half in (0, 1)], 0
    )


GOLDEN = {
    gate_up: (32, 32), unfuse: (1, 1), identity: (1, 1), restack: (1, 1), gqa: (3, 24),
    gqa_back: (1, 8), rope: (1, 4096),
    glu: (2, 896), deinterleave: (1, 46080), tensor_parallel: (8, 32768),
    tensor_parallel_glu: (8, 16),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN, ids=lambda f: f.__name__)
def test_a_real_migration_takes_this_many_pieces_and_runs(case):
    v = case()
    assert (len(v.pieces), sum(1 for _ in V.runs(v.pieces))) == GOLDEN[case]


def test_inverse_migrations_cancel():
    assert identity() == V.stored(3, (14336, 4096))
    assert restack() == V.stored(0, (16, 14336, 4096))
    q = V.reshape(V.slice_(V.reshape(gqa(), (8, 6, 128, 4096)), 1, 0, 4), (4096, 4096))
    assert V.is_whole(q)
    back = V.reshape(V.permute(V.reshape(rope(), (32, 64, 2, 4096)), (0, 2, 1, 3)), (4096, 4096))
    assert V.is_whole(back)
    halves = V.split(
        V.reshape(V.permute(V.reshape(glu(), (448, 2, 32, 4096)), (1, 0, 2, 3)), (28672, 4096)),
        0,
        (14336, 14336),
    )
    assert halves == [V.stored(0, (14336, 4096)), V.stored(1, (14336, 4096))]
