"""Random programs of ops: what the views say against what numpy does, step by step and undone
again.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from migrate import ops
from migrate.core.view import TooManyPieces, View, stored
from migrate.ops.base import OneWay
from migrate.testing import opkit

SIZES = st.sampled_from([1, 1, 2, 2, 3, 4, 6])


def factors(draw, numel: int) -> tuple[int, ...]:
    out = []
    while numel > 1 and len(out) < 3:
        n = draw(st.sampled_from([k for k in range(2, numel + 1) if numel % k == 0]))
        out.append(n)
        numel //= n
    return tuple(draw(st.permutations([*out, numel] if numel != 1 else out)))


def written(draw, name: str, shape: tuple[int, ...]) -> tuple[dict, int] | None:
    """Arguments that fit `shape`, and the number of parts; None where the op needs another rank."""
    rank = len(shape)
    over = {"join": "over", "part": "into"}.get(ops.get(name).kind)
    made: dict = {over: "x"} if over else {}
    if name in ("stack", "unsqueeze"):
        return {**made, "dim": draw(st.integers(-rank - 1, rank))}, 1
    if name == "reshape":
        return {"to": list(factors(draw, int(np.prod(shape)))), "from": list(shape)}, 1
    if name in ("same", "copy", "tie"):
        parts = draw(st.integers(1, 3))
        return {**made, "count": parts}, parts
    if rank == 0:
        return None
    dim = draw(st.integers(-rank, rank - 1))
    size = shape[dim]
    if name in ("flip", "concat"):
        return {**made, "dim": dim}, 1
    if name == "unbind":
        return ({**made, "dim": dim}, size) if size else None
    if name == "roll":
        return {"dim": dim, "shift": draw(st.integers(-7, 7))}, 1
    if name == "squeeze":
        return ({"dim": dim}, 1) if size == 1 else None
    if name == "transpose":
        return {"dims": [dim, draw(st.integers(-rank, rank - 1))]}, 1
    if name == "permute":
        return {
            "dims": [
                d - draw(st.sampled_from([0, rank])) for d in draw(st.permutations(range(rank)))
            ]
        }, 1
    if name == "split":
        if draw(st.booleans()):
            parts = draw(st.sampled_from([k for k in range(1, max(size, 3) + 1) if size % k == 0]))
            return {**made, "dim": dim, "count": parts}, parts
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
        return {**made, "dim": dim, "sizes": sizes}, len(sizes)
    if name == "slice":
        start = draw(st.integers(0, size))
        return {"dim": dim, "start": start, "stop": draw(st.integers(start, size)), "of": size}, 1
    if name == "pad":
        start = draw(st.integers(0, 2))
        if draw(st.booleans()):
            return {
                "dim": dim,
                "start": start,
                "multiple_of": draw(st.integers(1, 4)),
                "of": size,
                "value": 7,
            }, 1
        return {
            "dim": dim,
            "start": start,
            "size": size + start + draw(st.integers(0, 2)),
            "of": size,
            "value": 7,
        }, 1
    if name == "rearrange":
        names = [chr(97 + i) for i in range(rank)]
        k = draw(st.sampled_from([k for k in range(1, max(shape[0], 3) + 1) if shape[0] % k == 0]))
        inner = draw(st.permutations(["x", "y", *names[1:]]))
        return {"pattern": f"(x y) {' '.join(names[1:])} -> {' '.join(inner)}", "axes": {"x": k}}, 1
    raise AssertionError(name)


NAMES = [
    "concat",
    "copy",
    "flip",
    "pad",
    "permute",
    "rearrange",
    "reshape",
    "roll",
    "same",
    "slice",
    "split",
    "squeeze",
    "stack",
    "tie",
    "transpose",
    "unbind",
    "unsqueeze",
]


@given(st.data())
def test_a_program_of_ops_is_what_numpy_makes(data):
    draw = data.draw
    sources: list[np.ndarray] = []
    pool: list[tuple[View, np.ndarray]] = []
    for _ in range(draw(st.integers(1, 2))):
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
        for _ in range(draw(st.integers(1, 2))):
            array = opkit.elements(shape, "int64", 1000 * len(sources))
            pool.append((stored(len(sources), shape), array))
            sources.append(array)
    for _ in range(draw(st.integers(1, 7))):
        op = ops.get(draw(st.sampled_from(NAMES)))
        view, array = draw(st.sampled_from(pool))
        found = written(draw, op.name, array.shape)
        if found is None:
            continue
        args, parts = opkit.arguments(op, found[0]), found[1]
        inputs = [(view, array)]
        if op.kind == "join":
            alike = [x for x in pool if x[1].shape == array.shape]
            inputs += [
                draw(st.sampled_from(alike))
                for _ in range((parts if op.name == "same" else draw(st.integers(1, 3))) - 1)
            ]
        views, arrays = [list(x) for x in zip(*inputs, strict=True)]
        if sum(a.size for a in arrays) > 2000:
            continue
        assert op.kind != "part" or op.parts(args, array.shape, None) == parts
        try:
            traced = op.trace(args, views, parts)
        except TooManyPieces:
            continue
        twins = op.eager(args, arrays, parts, ["int64"] * len(arrays))
        assert len(traced) == len(twins)
        for made, twin in zip(traced, twins, strict=True):
            np.testing.assert_array_equal(opkit.realise(made, sources), twin, strict=True)
        undo = op.invert(args, enumerated=True)
        if not isinstance(undo, OneWay) and op.name != "same":
            back = ops.get(undo.op).trace(undo.args, traced, len(views))
            for made, before in zip(back, arrays, strict=True):
                np.testing.assert_array_equal(opkit.realise(made, sources), before, strict=True)
        pool += zip(traced, twins, strict=True)


@given(st.sampled_from(NAMES), st.data())
def test_every_op_can_be_drawn(name, data):
    # a generator that silently never draws an op would test nothing
    assert written(data.draw, name, (1,)) is not None
