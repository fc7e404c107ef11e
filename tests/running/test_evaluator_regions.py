"""Any box of any tensor of a graph is what the whole would have there, and nothing is computed
twice.
"""

from __future__ import annotations

import gc
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import random_raw, whole, write_and_read, write_source
from value_ops import call, install

from migrate.core import view as views
from migrate.core.spec import spec
from migrate.elements.raw import pack
from migrate.planning import graph as planned
from migrate.planning.graph import Tensor
from migrate.running import evaluator, gather, geometry, tiles, workspace
from migrate.running.evaluator import Evaluator
from migrate.running.geometry import ByteLayouts

shapes = st.lists(st.integers(1, 12), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, data=st.data())
def test_boxes_of_a_range_hold_its_elements_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(shape)
    found = [
        numbers[tuple(slice(a, b) for a, b in box)] for box in geometry.ranges(shape, start, stop)
    ]
    assert np.concatenate([f.reshape(-1) for f in found] or [np.arange(0)]).tolist() == list(
        range(start, stop)
    )
    assert len(found) < 2 * len(shape)
    for box in geometry.ranges(shape, start, stop):
        span = views.linear(shape, box)
        assert span is not None
        assert numbers[tuple(slice(a, b) for a, b in box)].reshape(-1).tolist() == list(
            range(*span)
        )


@given(shape=shapes, data=st.data())
def test_a_box_is_linear_exactly_when_its_elements_are(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    box = tuple(
        data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda p: p[0] < p[1]))
        for n in shape
    )
    found = (
        np.arange(int(np.prod(shape)))
        .reshape(shape)[tuple(slice(a, b) for a, b in box)]
        .reshape(-1)
    )
    span = views.linear(shape, box)
    assert (span is not None) == bool((np.diff(found) == 1).all())
    if span is not None:
        assert span == (found[0], found[-1] + 1)


@given(shape=shapes, data=st.data())
def test_a_footprint_holds_its_move_and_says_where_each_element_is(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    size = int(np.prod(shape))
    low, room, loops = data.draw(st.integers(0, size - 1)), 0, []
    for _ in range(data.draw(st.integers(0, 3))):
        stride = data.draw(st.integers(0, 6) | st.integers(0, size))
        count = data.draw(st.integers(1, 5))
        if low + room + (count - 1) * stride < size:
            loops.append((count, stride * data.draw(st.sampled_from([1, -1]))))
            room += (count - 1) * stride
    start = low + sum((n - 1) * -s for n, s in loops if s < 0)
    found = geometry.footprint(shape, start, loops)
    inside = np.arange(size).reshape(shape)[tuple(slice(a, b) for a, b in found.box)]
    assert inside.ndim == len(shape)
    strides = [int(np.prod(inside.shape[i + 1 :])) for i in range(inside.ndim)]
    walked = [loop for loop in loops if loop[0] > 1]
    for index in product(*(range(n) for n, _ in walked)):
        digits = [
            a
            + sum(i * step[axis] for i, step in zip(index, found.steps, strict=True))
            - found.box[axis][0]
            for axis, a in enumerate(found.start)
        ]
        at = sum(d * w for d, w in zip(digits, strides, strict=True))
        assert inside.reshape(-1)[at] == start + sum(
            i * s for i, (_, s) in zip(index, walked, strict=True)
        )


def programs(
    draw: st.DrawFn, ops: dict[str, Any]
) -> tuple[dict[str, np.ndarray], Tensor, np.ndarray]:
    """Stored arrays, a tensor of moves and values over them, and the elements that it has."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple))
    arrays = {f"k{i}": random_raw(rng, "bfloat16", shape) for i in range(2)}
    pool = []
    for key, array in arrays.items():
        tensor = whole(key, "bfloat16", shape)
        pool.append((call(ops["widen"], tensor)[0], ops["widen"].eager(None, [array])[0]))
    for _ in range(draw(st.integers(0, 5))):
        tensor, array = draw(st.sampled_from(pool))
        dims = array.ndim
        what = draw(
            st.sampled_from(
                [
                    "permute",
                    "slice",
                    "flip",
                    "pad",
                    "concat",
                    "blocks",
                    "xor",
                    "total",
                    "nibbles",
                    "merge",
                ]
            )
        )
        dim = draw(st.integers(0, dims - 1))
        if what in ("permute", "slice", "flip", "pad", "merge"):
            view, sources = tensor.view, tensor.sources
            if what == "permute":
                order = draw(st.permutations(range(dims)))
                view, array = views.permute(view, order), array.transpose(order)
            elif what == "slice":
                start = draw(st.integers(0, array.shape[dim] - 1))
                stop = draw(st.integers(start + 1, array.shape[dim]))
                view, array = (
                    views.slice_(view, dim, start, stop),
                    np.take(array, range(start, stop), dim),
                )
            elif what == "flip":
                view, array = views.flip(view, dim), np.flip(array, dim)
            elif what == "pad":
                zeros = np.zeros((*array.shape[:dim], 3, *array.shape[dim + 1 :]), array.dtype)
                view, array = views.pad(view, dim, 3, 0, 0), np.concatenate([zeros, array], dim)
            else:
                view, array = views.reshape(view, (array.size,)), array.reshape(-1)
            pool.append((Tensor(spec("float32", view.shape), view, sources), array))
        elif what == "concat":
            other, more = draw(st.sampled_from([p for p in pool if p[1].shape == array.shape]))
            count = len(tensor.sources)
            right = views.relabel(other.view, range(count, count + len(other.sources)))
            view = views.concat([tensor.view, right], dim)
            pool.append(
                (
                    Tensor(spec("float32", view.shape), view, (*tensor.sources, *other.sources)),
                    np.concatenate([array, more], dim),
                )
            )
        elif what == "xor":
            other, more = draw(st.sampled_from([p for p in pool if p[1].shape == array.shape]))
            number = draw(st.integers(0, 1))
            pool.append(
                (
                    call(ops["xor"], tensor, other)[number],
                    ops["xor"].eager(None, [array, more])[number],
                )
            )
        elif what == "nibbles":
            low = call(ops["nibbles"], tensor)[0]
            codes = ops["nibbles"].eager(None, [array])[0]
            if draw(st.booleans()) and dims > 1:
                turned = views.permute(low.view, [*range(1, dims), 0])
                low, codes = (
                    Tensor(spec("float4_e2m1fn", turned.shape), turned, low.sources),
                    codes.transpose([*range(1, dims), 0]),
                )
            pool.append((call(ops["spread"], low)[0], ops["spread"].eager(None, [codes])[0]))
        else:
            pool.append(
                (
                    call(ops[what], tensor)[0],
                    ops[what].eager(None, [np.ascontiguousarray(array)])[0],
                )
            )
    tensor, array = pool[-1]
    return arrays, tensor, array


@given(data=st.data(), tiny=st.booleans())
def test_a_box_of_any_tensor_is_that_of_the_whole(
    tmp_path_factory: Any, data: st.DataObject, tiny: bool
) -> None:
    patch = pytest.MonkeyPatch()
    try:
        ops = install(patch)
        if tiny:
            for module, name, value in (
                (evaluator, "CHUNK", 64),
                (planned, "FEW", 32),
                (workspace, "FEW", 32),
                (workspace, "_CHUNKS", 1),
                (geometry, "KEPT_PARTS", 3),
                (geometry, "STAGE", 64),
                (gather, "LONG", 64),
                (gather, "GAP", 48),
            ):
                patch.setattr(module, name, value)
        arrays, tensor, array = data.draw(st.composite(programs)(ops))
        source = write_source(
            tmp_path_factory.mktemp("in"), {k: ("bfloat16", a) for k, a in arrays.items()}
        )
        values = Evaluator(source, ByteLayouts(), [tensor])
        for _ in range(3):
            box = tuple(
                data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple))
                for n in array.shape
            )
            wanted = array[tuple(slice(a, b) for a, b in box)]
            anew = Evaluator(source, ByteLayouts(), ()).read(tensor, box)
            for found in (values.read(tensor, box), anew):
                assert found.shape == wanted.shape
                assert found.tobytes() == np.ascontiguousarray(wanted).tobytes()
        source.close()
    finally:
        patch.undo()


@given(data=st.data(), threads=st.integers(1, 3), files=st.integers(1, 2))
def test_computed_outputs_are_written_as_numpy_makes_them(
    tmp_path_factory: Any, data: st.DataObject, threads: int, files: int
) -> None:
    patch = pytest.MonkeyPatch()
    try:
        ops = install(patch)
        for module, name, value in (
            (evaluator, "CHUNK", 256),
            (planned, "FEW", 64),
            (workspace, "FEW", 64),
            (geometry, "STAGE", 128),
            (tiles, "STAGE", 128),
            (evaluator, "STAGE", 128),
            (tiles, "TILE", 500),
            (gather, "LONG", 64),
            (gather, "GAP", 48),
            (evaluator, "GRAIN_MOST", 1024),
        ):
            patch.setattr(module, name, value)
        arrays, tensor, array = data.draw(st.composite(programs)(ops))
        folder = tmp_path_factory.mktemp("run")
        source = write_source(folder / "in", {k: ("bfloat16", a) for k, a in arrays.items()})
        nibbles = call(ops["nibbles"], tensor)[0]
        outputs = {
            "odd": whole("k0", "bfloat16", arrays["k0"].shape),
            "made": tensor,
            "nibbles": nibbles,
        }
        got = write_and_read(outputs, source, folder / "out", files=files, threads=threads)
        assert got["made"] == np.ascontiguousarray(array).tobytes()
        assert got["nibbles"] == bytes(pack((array & 15).astype("u1"), "float4_e2m1fn"))
        source.close()
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("op", "dtype"), [("nibbles", "float4_e2m1fn"), ("sixes", "float6_e2m3fn")]
)
def test_a_box_may_begin_within_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, dtype: str
) -> None:
    ops = install(monkeypatch)
    codes = random_raw(np.random.default_rng(0), dtype, (3, 8))
    source = write_source(tmp_path, {"k": (dtype, codes)})
    found = Evaluator(source, ByteLayouts()).read(whole("k", dtype, (3, 8)), ((1, 2), (3, 7)))
    assert found.tolist() == codes[1:2, 3:7].tolist()
    made = call(ops[op], call(ops["spread"], whole("k", dtype, (3, 8)))[0])[0]
    assert (
        Evaluator(source, ByteLayouts()).read(made, ((1, 2), (3, 7))).tolist()
        == codes[1:2, 3:7].tolist()
    )


def test_consecutive_reads_compute_a_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = install(monkeypatch)
    array = random_raw(np.random.default_rng(0), "float32", (2, 8, 6000))
    read: list[int] = []
    compute = ops["blocks"].compute
    ops["blocks"].compute = lambda args, given, *rest: (
        read.append(given[0].size),
        compute(args, given, *rest),
    )
    source = write_source(tmp_path, {"k": ("float32", array)})
    leaf = Evaluator(source, ByteLayouts()).leaf(
        call(ops["blocks"], whole("k", "float32", array.shape))[0].sources[0]
    )  # type: ignore[arg-type]
    wanted, found = ops["blocks"].eager(None, [array])[0].tobytes(), b""
    while len(found) < len(wanted):
        buffer = memoryview(bytearray(min(50_000, len(wanted) - len(found))))
        leaf.read(len(found), buffer)
        found += buffer
    assert found == wanted
    assert sum(read) == array.size


@given(shape=shapes, data=st.data(), op=st.sampled_from(["widen", "nibbles", "sixes"]))
def test_any_bytes_of_a_packed_value_can_be_read(
    tmp_path_factory: Any, shape: tuple[int, ...], data: st.DataObject, op: str
) -> None:
    patch = pytest.MonkeyPatch()
    try:
        ops = install(patch)
        patch.setattr(evaluator, "CHUNK", 48)
        array = random_raw(np.random.default_rng(0), "bfloat16", shape)
        source = write_source(tmp_path_factory.mktemp("in"), {"k": ("bfloat16", array)})
        wide = array.astype("u4") << 16
        tensor = call(ops["widen"], whole("k", "bfloat16", shape))[0]
        dtype = "float32"
        if op != "widen":
            tensor, dtype = (
                call(ops[op], tensor)[0],
                {"nibbles": "float4_e2m1fn", "sixes": "float6_e2m3fn"}[op],
            )
            wide = ops[op].eager(None, [wide])[0]
        packed = bytes(pack(wide, dtype))
        leaf = Evaluator(source, ByteLayouts()).leaf(tensor.sources[0])  # type: ignore[arg-type]
        for _ in range(3):
            start = data.draw(st.integers(0, len(packed)))
            stop = data.draw(st.integers(start, len(packed)))
            buffer = memoryview(bytearray(stop - start))
            leaf.read(start, buffer)
            assert bytes(buffer) == packed[start:stop]
        box = tuple(
            data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple))
            for n in shape
        )
        found = Evaluator(source, ByteLayouts()).read(tensor, box)
        assert found.tobytes() == wide[tuple(slice(a, b) for a, b in box)].tobytes()
        source.close()
    finally:
        patch.undo()


def test_of_many_boxes_some_layouts_are_kept() -> None:
    layouts, view = ByteLayouts(), views.stored(0, (5000, 8))

    def kept() -> int:
        gc.collect()
        return sum(type(one) is geometry.ByteLayout for one in gc.get_objects())

    before = kept()
    for row in range(5000):
        part, layout = layouts.part(view, "uint8", ((row, row + 1), (2, 4)))
        assert layouts.of(part, "uint8", 2) is layout
        assert layout.whole == (0, 8 * row + 2)
    assert kept() - before <= geometry.KEPT_PARTS
