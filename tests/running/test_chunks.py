"""Tensors that lie in several places come out as if they lay in one, whatever is done to them."""

from __future__ import annotations

import random
import shutil
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import RawSource, describe, random_raw, read_back

from migrate import ops
from migrate.core import view as views
from migrate.core.errors import CheckpointError
from migrate.core.spec import Spec
from migrate.ops.base import OpCall
from migrate.planning.graph import Computation, ComputedTensor, ReadKey, Tensor, stored_keys
from migrate.planning.pipeline import Views
from migrate.planning.stored import initial, untouched_key
from migrate.running import eager, share, tiles
from migrate.running.checks import read_content, recorded_checksums
from migrate.running.geometry import ByteLayouts
from migrate.running.resources import RunOptions
from migrate.source import zip_archive
from migrate.source.blobs import ChunkedTensor, ChunkOf, Stored, chunk_at, read_rows, rows_of
from migrate.source.target import OutputFile, Placed, Target

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def grid(shape: tuple[int, ...], borders: list[list[int]]) -> Boxes:
    """(start, sizes) of the boxes that lie between `borders` of each axis."""
    boxes: Boxes = [((), ())]
    for n, inner in zip(shape, borders, strict=True):
        edges = [0, *sorted(inner), n]
        boxes = [
            ((*start, a), (*sizes, b - a)) for start, sizes in boxes for a, b in pairwise(edges)
        ]
    return boxes


def write(
    folder: Path, arrays: dict[str, tuple[np.ndarray, Boxes]], seed: int = 0, turned: float = 0.3
) -> tuple[RawSource, dict[tuple[int, int], tuple[int, int]]]:
    """A source that holds each array in boxes, in two files and no order, some with their axes in
    reverse order; and the CRC-32 of each box by its place.
    """
    chance = random.Random(seed)
    folder.mkdir()
    contents, sums, tensors = [bytearray(b"head"), bytearray(b"h")], {}, dict[str, Any]()
    for key, (array, boxes) in arrays.items():
        spec = Spec(array.dtype.name, array.shape)
        chunks = []
        for start, sizes in chance.sample(boxes, len(boxes)):
            part = array[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
            order = list(range(part.ndim))
            if chance.random() < turned:
                order.reverse()
            data = np.ascontiguousarray(part.transpose(order)).tobytes()
            strides, size = [0] * part.ndim, 1
            for axis in reversed(order):
                strides[axis] = size
                size *= part.shape[axis]
            number = chance.randrange(2)
            content = contents[number]
            content += b"." * chance.randrange(9)
            place = Stored(
                Spec(spec.dtype, part.shape),
                number,
                len(content),
                None if order == sorted(order) else tuple(strides),
            )
            sums[number, len(content)] = len(data), zlib.crc32(data)
            chunks.append((start, place))
            content += data
        tensors[key] = (
            ChunkedTensor(spec, tuple(c for _, c in chunks), tuple(s for s, _ in chunks))
            if len(chunks) > 1
            else chunks[0][1]
        )
    for number, content in enumerate(contents):
        (folder / f"raw-{number}.bin").write_bytes(content)
    return RawSource(folder, tensors, ["raw-0.bin", "raw-1.bin"]), sums


CASES = [
    pytest.param((12, 8), [[3, 4], []], id="uneven rows"),
    pytest.param((12, 8), [[], [1, 5]], id="columns"),
    pytest.param((6, 10, 4), [[2], [5, 6], []], id="two axes"),
    pytest.param((6, 10, 4), [[2], [], [1]], id="first and last axis"),
    pytest.param((9,), [[1, 2, 8]], id="one axis"),
    pytest.param((2, 3), [[], []], id="one box"),
]


@pytest.mark.parametrize(("shape", "borders"), CASES)
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_layout_ops_work_on_chunks(
    tmp_path: Path, shape: tuple[int, ...], borders: list[list[int]], dtype: str
) -> None:
    rng = np.random.default_rng(len(shape))
    arrays = {
        name: (random_raw(rng, dtype, shape).view(dtype), grid(shape, borders)) for name in "ab"
    }
    source, _ = write(tmp_path / "in", arrays)
    a, b = (arrays[name][0] for name in "ab")
    given = initial(source.index.tensors, Views())
    one, other = given["a"], given["b"]

    def made(view: views.View, *tensors: Tensor) -> Tensor:
        return Tensor(Spec(dtype, view.shape), view, sum((t.sources for t in tensors), ()))

    count = len(one.sources)
    shifted = views.relabel(other.view, range(count, count + len(other.sources)))
    last = len(shape) - 1
    outputs = {
        "same": one,
        "stacked": made(views.stack([one.view, shifted], 0), one, other),
        "joined": made(views.concat([one.view, shifted], last), one, other),
        "turned": made(views.permute(one.view, range(len(shape))[::-1]), one),
        "back": made(views.flip(one.view, last), one),
    }
    expected = {
        "same": a,
        "stacked": np.stack([a, b]),
        "joined": np.concatenate([a, b], last),
        "turned": a.transpose(),
        "back": np.flip(a, last),
    }
    target = describe(outputs, files=2)
    tiles.write_target(outputs, source, target, tmp_path / "out", digest="d")
    assert read_back(tmp_path / "out", target) == {
        key: np.ascontiguousarray(array).tobytes() for key, array in expected.items()
    }
    assert stored_keys(outputs["stacked"]) == ["a", "b"]
    assert untouched_key(one, source.index.tensors) == "a"
    turned = "a" if len(shape) == 1 else None
    assert untouched_key(outputs["turned"], source.index.tensors) == turned
    assert read_content(one, source) == a.tobytes()
    # the second implementation, which knows no views
    assert np.array_equal(eager.read_elements(source, "a").view(dtype), a)
    evaluate = eager.EagerEvaluation(source, eager.Specs(source))
    for start, stop in ((0, 1), (1, shape[0]), (shape[0] // 2, shape[0])):
        rows = evaluate.rows(ReadKey("a"), start, stop)
        assert np.array_equal(np.asarray(rows).view(dtype).reshape(-1), a[start:stop].reshape(-1))


def test_rows_are_the_places_of_a_tensor_that_lies_row_by_row(tmp_path: Path) -> None:
    array = np.arange(40, dtype="uint8").reshape(10, 4)
    rows = [((3, 0), (7, 4)), ((0, 0), (3, 4))]
    source, _ = write(tmp_path / "rows", {"k": (array, rows)}, turned=0)
    found = rows_of(source.index.tensors["k"])
    assert found is not None
    assert read_rows(found, source.blobs) == array.tobytes()
    others, _ = write(tmp_path / "turned", {"k": (array, rows)}, turned=1)
    assert rows_of(others.index.tensors["k"]) is None
    columns, _ = write(tmp_path / "columns", {"k": (array, grid((10, 4), [[], [2]]))}, turned=0)
    assert rows_of(columns.index.tensors["k"]) is None


def test_a_chunk_is_named_by_key_and_number() -> None:
    spec = Spec("uint8", (4,))
    places = tuple(Stored(Spec("uint8", (2,)), 0, at) for at in (0, 9))
    tensors = {"k": ChunkedTensor(spec, places, ((0,), (2,))), "one": Stored(spec, 0, 20)}
    assert chunk_at(tensors, ChunkOf("k", 1)) == places[1]
    assert chunk_at(tensors, "one") == tensors["one"]
    with pytest.raises(KeyError, match="k lies in 2 places"):
        chunk_at(tensors, "k")


def test_records_of_chunks_are_compared_as_they_are_copied_or_before(tmp_path: Path) -> None:
    """Rows are compared where they are copied, columns are read once more before the run."""
    rng = np.random.default_rng(5)
    arrays = {
        "rows": (rng.integers(0, 256, (64, 16), "uint8"), grid((64, 16), [[5, 40], []])),
        "columns": (rng.integers(0, 256, (64, 16), "uint8"), grid((64, 16), [[], [3]])),
    }
    source, sums = write(tmp_path / "in", arrays, seed=1)
    source.index = replace(source.index, sums=lambda: sums)
    outputs = initial(source.index.tensors, Views())
    target = describe(outputs)
    tiles.write_target(outputs, source, target, tmp_path / "right", digest="d")
    for place, (size, crc) in sums.items():
        wrong = {**sums, place: (size, crc ^ 1)}
        source.index = replace(source.index, sums=lambda wrong=wrong: wrong)
        with pytest.raises(CheckpointError, match=f"recorded is {crc ^ 1:08x}"):
            tiles.write_target(outputs, source, target, tmp_path / "wrong", digest="d")
        assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_computed_tensor_may_be_cut_across_files(tmp_path: Path, threads: int) -> None:
    """Each file has rows of one cast, which is made from chunks."""

    array = np.random.default_rng(2).standard_normal((300, 70)).astype("float32")
    source, _ = write(tmp_path / "in", {"k": (array, grid((300, 70), [[111], [13]]))})
    given = initial(source.index.tensors, Views())["k"]
    call = OpCall("cast", ops.get("cast").Args(to="float64", from_="float32"))
    spec = Spec("float64", (300, 70))
    value = ComputedTensor(Computation(call, (given,), 1), 0, spec)
    outputs = {"k": Tensor(spec, views.stored(0, (300, 70)), (value,))}
    row, cuts = 70 * 8, [0, 1, 200, 300]
    files = tuple(
        OutputFile(f"f{n}", b"H", (Placed("k", 1, (b - a) * row, a * row),), 1 + (b - a) * row)
        for n, (a, b) in enumerate(pairwise(cuts))
    )
    options = RunOptions(threads=threads)
    tiles.write_target(
        outputs, source, Target(files, True), tmp_path / "out", digest="d", options=options
    )
    written = b"".join((tmp_path / "out" / f"f{n}").read_bytes()[1:] for n in range(3))
    assert written == array.astype("float64").tobytes()


def test_extents_of_chunks_go_on_where_the_source_does(tmp_path: Path) -> None:
    array = np.random.default_rng(3).integers(0, 256, (3 << 20,), "uint8")
    source, _ = write(
        tmp_path / "in", {"k": (array, [((0,), (1 << 20,)), ((1 << 20,), (2 << 20,))])}
    )
    outputs = initial(source.index.tensors, Views())
    first, rest = (1 << 20) + 5, (2 << 20) - 5
    files = (
        OutputFile("a", b"", (Placed("k", 0, first),), first),
        OutputFile("b", b"", (Placed("k", 0, rest, first),), rest),
    )
    chunks = dict(
        zip(source.index.tensors["k"].starts, source.index.tensors["k"].chunks, strict=True)
    )
    low, high = chunks[(0,)], chunks[(1 << 20,)]
    layouts = ByteLayouts()
    extents = [share.shared_extents(file, outputs, source, layouts) for file in files]
    assert extents[1] == [share.Extent(0, rest, high.blob, high.offset + 5)]
    assert [tuple(e) for e in extents[0]] == [
        (0, 1 << 20, low.blob, low.offset),
        (1 << 20, 5, high.blob, high.offset),
    ]


def test_a_record_that_several_files_hold_is_compared_where_no_place_divides_it(
    tmp_path: Path,
) -> None:
    """One file holds the tensor whole, others in parts: what lies across their border is read once
    more beforehand.
    """
    array = np.random.default_rng(6).integers(0, 256, (30,), "uint8")
    source, sums = write(tmp_path / "in", {"k": (array, grid((30,), [[10, 20]]))})
    source.index = replace(source.index, sums=lambda: sums)
    outputs = initial(source.index.tensors, Views())
    files = (
        OutputFile("whole", b"", (Placed("k", 0, 30),), 30),
        OutputFile("a", b"", (Placed("k", 0, 13),), 13),
        OutputFile("b", b"", (Placed("k", 0, 17, 13),), 17),
    )
    found = recorded_checksums(outputs, files, source, ByteLayouts())[id(outputs["k"])]
    assert [(one.start, one.stop) for one in found] == [(0, 10), (20, 30)]
    target = Target(files, True)
    tiles.write_target(outputs, source, target, tmp_path / "out", digest="d")
    assert (tmp_path / "out" / "b").read_bytes() == array[13:].tobytes()
    for place, (size, crc) in sums.items():
        wrong = {**sums, place: (size, crc ^ 1)}
        source.index = replace(source.index, sums=lambda wrong=wrong: wrong)
        with pytest.raises(CheckpointError, match=f"recorded is {crc ^ 1:08x}"):
            tiles.write_target(outputs, source, target, tmp_path / "wrong", digest="d")


def pieces_of(source: RawSource, cuts: list[int]) -> dict[str, Tensor]:
    """An output for each stretch of a tensor of one axis between these ends."""
    whole = initial(source.index.tensors, Views())["k"]
    return {
        f"{a:07}": Tensor(
            Spec(whole.spec.dtype, (b - a,)), views.slice_(whole.view, 0, a, b), whole.sources
        )
        for a, b in pairwise(cuts)
    }


def test_records_whose_pieces_go_to_several_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record is read beforehand, and one that differs is found whichever it is, in any order of
    its pieces.
    """
    size = 5 << 20
    array = np.random.default_rng(7).integers(0, 256, (size,), "uint8")
    source, sums = write(tmp_path / "in", {"k": (array, grid((size,), [[9, 3 << 20]]))})
    source.index = replace(source.index, sums=lambda: sums)
    cuts = [0, 5, (1 << 20) + 1, 2 << 20, (4 << 20) + 7, size]
    outputs = pieces_of(source, cuts)
    target = describe(outputs, files=3)

    def never(*_: object) -> None:
        raise AssertionError("read beforehand")

    monkeypatch.setattr(zip_archive, "check_record", never)
    for threads in (1, 4):
        options = RunOptions(threads=threads)
        out = tmp_path / f"out-{threads}"
        tiles.write_target(outputs, source, target, out, digest="d", options=options)
        assert b"".join(read_back(out, target)[key] for key in outputs) == array.tobytes()
        for number, (place, (length, crc)) in enumerate(sums.items()):
            wrong = {**sums, place: (length, crc ^ 1)}
            source.index = replace(source.index, sums=lambda wrong=wrong: wrong)
            to = tmp_path / f"wrong-{threads}-{number}"
            with pytest.raises(CheckpointError, match=f"recorded is {crc ^ 1:08x}"):
                tiles.write_target(outputs, source, target, to, digest="d", options=options)
            assert not to.exists()
        source.index = replace(source.index, sums=lambda: sums)


def test_pieces_that_an_earlier_run_copied_count_in_a_later_one(tmp_path: Path) -> None:
    array = np.random.default_rng(9).integers(0, 256, (1 << 20,), "uint8")
    source, sums = write(tmp_path / "in", {"k": (array, grid((1 << 20,), [[]]))})
    source.index = replace(source.index, sums=lambda: sums)
    outputs = pieces_of(source, [0, 1 << 19, 1 << 20])
    target, out = describe(outputs, files=2), tmp_path / "out"

    def stop(done: int, total: int) -> None:
        assert done < total
        raise KeyboardInterrupt

    first, again = RunOptions(threads=1, progress=stop), RunOptions(threads=1, resume=True)
    ((place, (length, crc)),) = sums.items()
    for change in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            tiles.write_target(outputs, source, target, out, digest="d", options=first)
        source.index = replace(source.index, sums=lambda said={place: (length, crc ^ change)}: said)
        if change:
            with pytest.raises(CheckpointError, match=f"recorded is {crc ^ 1:08x}"):
                tiles.write_target(outputs, source, target, out, digest="d", options=again)
            continue
        result = tiles.write_target(outputs, source, target, out, digest="d", options=again)
        assert result.bytes_written < sum(file.size for file in target.files)
        assert b"".join(read_back(out, target)[key] for key in outputs) == array.tobytes()
        shutil.rmtree(out)


@pytest.mark.parametrize(
    ("cuts", "due"),
    [([0, 4, 17], 1), ([0, 4, *range(11, 120), 120], 1), ([4, 10, 120], 1)],
    ids=["its end is left out", "too many pieces", "its begin is left out"],
)
def test_records_of_which_a_piece_is_missing_are_read_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int], due: int
) -> None:
    array = np.random.default_rng(8).integers(0, 256, (120,), "uint8")
    source, sums = write(tmp_path / "in", {"k": (array, grid((120,), [[10]]))})
    source.index = replace(source.index, sums=lambda: sums)
    outputs = pieces_of(source, cuts)
    target, read, check = describe(outputs), list[int](), zip_archive.check_record
    monkeypatch.setattr(
        zip_archive, "check_record", lambda blob, one: (read.append(one.size), check(blob, one))
    )
    tiles.write_target(outputs, source, target, tmp_path / "out", digest="d")
    assert len(read) == due
    for place, (length, crc) in sums.items():
        wrong = {**sums, place: (length, crc ^ 1)}
        source.index = replace(source.index, sums=lambda wrong=wrong: wrong)
        with pytest.raises(CheckpointError, match=f"recorded is {crc ^ 1:08x}"):
            tiles.write_target(outputs, source, target, tmp_path / "wrong", digest="d")
