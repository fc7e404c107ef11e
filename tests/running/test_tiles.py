"""What a run writes, against numpy on the same elements."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import thorough
from raw_files import (
    KINDS,
    MemoryBlob,
    RawBlob,
    describe,
    random_raw,
    read_back,
    whole,
    write_source,
)
from work import HANG

from migrate.core import view as views
from migrate.core.spec import Spec, spec
from migrate.elements.codes import encode
from migrate.elements.raw import pack, unpack
from migrate.planning.graph import Computation, ComputedTensor, Tensor
from migrate.running import gather, geometry, tiles
from migrate.running.evaluator import Evaluator
from migrate.running.resources import RunOptions
from migrate.source.target import OutputFile, Placed, Target


def produce(
    tmp_path: Path,
    arrays: dict[str, tuple[str, np.ndarray]],
    made: dict[str, tuple[str, views.View, tuple[Any, ...]]],
    **options: Any,
):
    files = options.pop("files", 1)
    source = write_source(
        tmp_path / "in", arrays, min(2, len(arrays)), options.pop("blob", RawBlob)
    )
    outputs = {k: Tensor(spec(d, v.shape), v, keys) for k, (d, v, keys) in made.items()}
    target = describe(outputs, files=files)
    result = tiles.write_target(
        outputs,
        source,
        target,
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False, **options),
    )
    source.close()
    assert not (tmp_path / "out.migrate-partial").exists()
    return read_back(tmp_path / "out", target), result


class Made(NamedTuple):
    view: views.View
    array: np.ndarray


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, list[np.ndarray], list[Made]]:
    dtype = draw(st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex128"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    arrays = [random_raw(rng, dtype, shape) for _ in range(3)]
    pool = [Made(views.stored(i, shape), a) for i, a in enumerate(arrays)]
    zero = np.frombuffer(encode(dtype, 1), KINDS[dtype])[0]
    for _ in range(draw(st.integers(1, 6))):
        one = draw(st.sampled_from(pool))
        dims = one.array.ndim
        if not dims:
            continue
        dim = draw(st.integers(0, dims - 1))
        match draw(
            st.sampled_from(["permute", "concat", "stack", "slice", "flip", "pad", "merge"])
        ):
            case "permute":
                order = draw(st.permutations(range(dims)))
                pool.append(Made(views.permute(one.view, order), one.array.transpose(order)))
            case "concat":
                other = draw(st.sampled_from([p for p in pool if p.array.shape == one.array.shape]))
                pool.append(
                    Made(
                        views.concat([one.view, other.view], dim),
                        np.concatenate([one.array, other.array], dim),
                    )
                )
            case "stack":
                other = draw(st.sampled_from([p for p in pool if p.array.shape == one.array.shape]))
                pool.append(
                    Made(
                        views.stack([one.view, other.view], dim),
                        np.stack([one.array, other.array], dim),
                    )
                )
            case "slice":
                stop = draw(st.integers(0, one.array.shape[dim]))
                start = draw(st.integers(0, stop))
                pool.append(
                    Made(
                        views.slice_(one.view, dim, start, stop),
                        np.take(one.array, range(start, stop), dim),
                    )
                )
            case "flip":
                pool.append(Made(views.flip(one.view, dim), np.flip(one.array, dim)))
            case "pad":
                edge = np.full((*one.array.shape[:dim], 2, *one.array.shape[dim + 1 :]), zero)
                pool.append(
                    Made(views.pad(one.view, dim, 2, 0, 1), np.concatenate([edge, one.array], dim))
                )
            case "merge":
                pool.append(Made(views.reshape(one.view, (one.array.size,)), one.array.reshape(-1)))
    return dtype, arrays, [p for p in pool if p.array.size < 200_000]


@given(
    program=programs(),
    small=st.booleans(),
    memory=st.booleans(),
    threads=st.integers(1, 3),
    files=st.integers(1, 3),
)
def test_random_views_are_written_as_numpy_makes_them(
    tmp_path_factory, program, small, memory, threads, files
) -> None:
    dtype, arrays, made = program
    patch = pytest.MonkeyPatch()
    if small:
        # sizes at which tiny tensors take every way of gathering
        for name, value in {"STAGE": 512, "STAGE_MAX": 1024, "SHORT": 16}.items():
            for module in (geometry, gather, tiles):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        for name, value in {
            "LONG": 64,
            "GAP": 48,
            "_SPAN": 64,
            "_IOVECS": 4,
            "_KEPT_BUFFERS": 20,
        }.items():
            patch.setattr(gather, name, value)
        patch.setattr(tiles, "TILE", 1000)
        patch.setattr(geometry, "KEPT_CUTS", 3)
    try:
        got, result = produce(
            tmp_path_factory.mktemp("run"),
            {f"k{i}": (dtype, a) for i, a in enumerate(arrays)},
            {f"o{i}": (dtype, m.view, ("k0", "k1", "k2")) for i, m in enumerate(made)},
            files=files,
            threads=threads,
            blob=MemoryBlob if memory else RawBlob,
        )
    finally:
        patch.undo()
    for i, m in enumerate(made):
        assert got[f"o{i}"] == np.ascontiguousarray(m.array).tobytes(), m.view
    assert result.bytes_written == sum(f["size"] for f in result.files.values())


PERMUTES = [
    ((2100, 1300), (1, 0)),
    ((5, 700, 900), (0, 2, 1)),
    ((5, 700, 900), (2, 0, 1)),
    ((300, 400, 3, 3), (2, 3, 1, 0)),
    ((300, 400, 3, 3), (2, 3, 0, 1)),
    ((1_500_000, 2), (1, 0)),
    ((2, 1_500_000), (1, 0)),
    ((40, 5, 70, 200), (3, 1, 2, 0)),
    ((3, 1_100_000), (1, 0)),
]


@pytest.mark.parametrize(("shape", "order"), PERMUTES)
@pytest.mark.parametrize(
    "dtype", thorough(["bfloat16", "uint8", "float32", "float64", "complex128"])
)
def test_a_moved_last_axis_is_written_exactly(tmp_path: Path, shape, order, dtype) -> None:
    if dtype in ("float64", "complex128"):
        shape = (max(1, shape[0] // 3), *shape[1:])
    array = random_raw(np.random.default_rng(1), dtype, shape)
    view = views.permute(views.stored(0, shape), order)
    got, _ = produce(
        tmp_path, {"k": (dtype, array)}, {"o": (dtype, view, ("k",))}, max_memory=64 << 20
    )
    assert got["o"] == np.ascontiguousarray(array.transpose(order)).tobytes()


def test_transposes_side_by_side_and_flipped_are_written_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    a, b = random_raw(rng, "bfloat16", (1500, 1100)), random_raw(rng, "bfloat16", (900, 1100))
    va, vb = views.stored(0, a.shape), views.flip(views.stored(1, b.shape), 0)
    both = views.concat([views.permute(va, (1, 0)), views.permute(vb, (1, 0))], 1)
    padded = views.pad(views.permute(va, (1, 0)), 1, 0, 7, 2)
    got, _ = produce(
        tmp_path,
        {"a": ("bfloat16", a), "b": ("bfloat16", b)},
        {"both": ("bfloat16", both, ("a", "b")), "padded": ("bfloat16", padded, ("a",))},
    )
    assert got["both"] == np.ascontiguousarray(np.concatenate([a.T, b[::-1].T], 1)).tobytes()
    assert got["padded"] == np.pad(a.T, ((0, 0), (0, 7)), constant_values=0x4000).tobytes()


def test_without_torch_and_with_torch_a_transpose_is_the_same() -> None:
    torch = pytest.importorskip("torch")
    from migrate.elements import transposes

    panel = random_raw(np.random.default_rng(3), "bfloat16", (700, 300))
    with_torch, without = np.empty((300, 700), "u2"), np.empty((300, 700), "u2")
    transposes.flip_panel(panel, with_torch)
    hidden = sys.modules.pop("torch")
    try:
        transposes.flip_panel(panel, without)
    finally:
        sys.modules["torch"] = hidden
    assert hidden is torch
    assert (with_torch == panel.T).all()
    assert (without == panel.T).all()


@pytest.mark.parametrize("run", [600, 3000, 40_000])
def test_every_run_length_is_gathered_exactly(tmp_path: Path, run: int) -> None:
    rng = np.random.default_rng(4)
    rows = 6_000_000 // run
    a, b = (random_raw(rng, "uint8", (rows, run)) for _ in range(2))
    va, vb = views.stored(0, a.shape), views.stored(1, b.shape)
    even = rows // 2 * 2
    pairs = views.permute(
        views.reshape(views.slice_(va, 0, 0, even), (even // 2, 2, run)), (1, 0, 2)
    )
    made = {
        "concat": (np.concatenate([a, b, a], 1), views.concat([va, vb, va], 1)),
        "split": (a[:, run // 3 : run // 2], views.slice_(va, 1, run // 3, run // 2)),
        "pairs": (a[:even].reshape(even // 2, 2, run).transpose(1, 0, 2), pairs),
        "sparse": (b[:, -7:], views.slice_(vb, 1, run - 7, run)),
    }
    got, _ = produce(
        tmp_path,
        {"a": ("uint8", a), "b": ("uint8", b)},
        {k: ("uint8", v, ("a", "b")) for k, (_, v) in made.items()},
        files=2,
    )
    for key, (array, _) in made.items():
        assert got[key] == np.ascontiguousarray(array).tobytes(), key


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0])
def test_fills_repeat_their_element_whatever_the_cut(tmp_path: Path, value: float) -> None:
    a = random_raw(np.random.default_rng(5), "float32", (1001, 333))
    view = views.pad(views.pad(views.stored(0, a.shape), 0, 700, 3, value), 1, 5, 301, value)
    got, _ = produce(tmp_path, {"a": ("float32", a)}, {"o": ("float32", view, ("a",))})
    unit = int.from_bytes(encode("float32", value), "little")
    assert got["o"] == np.pad(a, ((700, 3), (5, 301)), constant_values=unit).tobytes()


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float6_e2m3fn"])
def test_elements_below_a_byte_move_packed_and_one_by_one(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(6)
    a, b = random_raw(rng, dtype, (6, 20)), random_raw(rng, dtype, (6, 20))
    va, vb = views.stored(0, a.shape), views.stored(1, b.shape)
    made = {
        "packed": (np.concatenate([a, b], 1), views.concat([va, vb], 1)),
        "turned": (a.T, views.permute(va, (1, 0))),
        "odd": (b[2:, 1:16], views.slice_(views.slice_(vb, 1, 1, 16), 0, 2, 6)),
        "padded": (np.pad(a, ((0, 0), (1, 3))), views.pad(va, 1, 1, 3, 0)),
    }
    got, _ = produce(
        tmp_path,
        {"a": (dtype, a), "b": (dtype, b)},
        {k: (dtype, v, ("a", "b")) for k, (_, v) in made.items()},
    )
    for key, (array, _) in made.items():
        assert got[key] == bytes(pack(array, dtype)), key


def test_packing_and_unpacking_restore_all_codes() -> None:
    for dtype, count in (("float4_e2m1fn", 16), ("float6_e2m3fn", 64), ("bfloat16", 65536)):
        codes = np.arange(count).astype("u1" if count < 256 else "u2")
        assert (unpack(pack(codes, dtype), Spec(dtype, (count,))) == codes).all()
    assert bytes(pack(np.array([1, 2, 3], "u1"), "float4_e2m1fn")) == b"\x21\x03"


def test_empty_tensors_and_scalars_are_written(tmp_path: Path) -> None:
    a, s = np.zeros((0, 4), "u4"), np.array(7, "u4")
    got, _ = produce(
        tmp_path,
        {"a": ("float32", a), "s": ("float32", s)},
        {
            "e": ("float32", views.stored(0, (0, 4)), ("a",)),
            "s": ("float32", views.stored(0, ()), ("s",)),
        },
    )
    assert got == {"e": b"", "s": s.tobytes()}


def test_a_value_is_computed_once_for_all_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate import ops
    from migrate.ops.base import OpCall

    calls = []

    class Halves:
        def eager(self, args, arrays, parts, dtype):
            calls.append((args, parts, dtype))
            return list(np.split(arrays[0][:, ::-1], parts, 0))

        def infer(self, args, specs, parts):
            return None

    monkeypatch.setattr(ops, "get", lambda name: Halves())
    a = random_raw(np.random.default_rng(7), "bfloat16", (8, 5))
    call = Computation(OpCall("halves", None), (whole("a", "bfloat16", (8, 5)),), 2)
    halves = [ComputedTensor(call, i, spec("bfloat16", (4, 5))) for i in range(2)]
    again = ComputedTensor(
        Computation(
            OpCall("halves", None),
            (Tensor(spec("bfloat16", (4, 5)), views.stored(0, (4, 5)), (halves[1],)),),
            1,
        ),
        0,
        spec("bfloat16", (4, 5)),
    )
    view = views.permute(views.stored(0, (4, 5)), (1, 0))
    made = {
        "first": ("bfloat16", views.stored(0, (4, 5)), (halves[0],)),
        "second": ("bfloat16", view, (halves[1],)),
        "back": ("bfloat16", views.stored(0, (4, 5)), (again,)),
    }
    got, _ = produce(tmp_path, {"a": ("bfloat16", a)}, made, files=2)
    assert got["first"] == np.ascontiguousarray(a[:4, ::-1]).tobytes()
    assert got["second"] == np.ascontiguousarray(a[4:, ::-1].T).tobytes()
    assert got["back"] == np.ascontiguousarray(a[4:]).tobytes()
    assert calls == [(None, 2, ["bfloat16"]), (None, 1, ["bfloat16"])]


def test_a_value_beyond_the_memory_limit_is_refused_by_number(tmp_path: Path) -> None:
    from migrate.core.errors import RunError
    from migrate.ops.base import OpCall

    source = write_source(tmp_path / "in", {"a": ("float32", np.zeros((100, 100), "u4"))})
    call = Computation(
        OpCall("flip", None), (whole("a", "float32", (100, 100)),), 1, "turn (r.yaml:3)", ("a",)
    )
    value = ComputedTensor(call, 0, spec("float32", (100, 100)))
    with pytest.raises(
        RunError,
        match=r"rule turn .r.yaml:3.: `flip` of a takes 160000 bytes at once, the limit is 750, .*",
    ) as caught:
        Evaluator(source, geometry.ByteLayouts(), (), 1000).bytes(value)
    assert caught.value.diagnostics[0].code == "M919"
    assert "max_memory=213334" in (caught.value.diagnostics[0].help or "")


def test_tiles_cover_the_file_without_a_gap_and_do_not_depend_on_threads(tmp_path: Path) -> None:
    outputs = {
        f"k{i}": whole(f"k{i}", "uint8", (n,))
        for i, n in enumerate([0, 5, 900, 2_000_000, 1_048_576, 7, 9_000_000])
    }
    target = describe(outputs)
    found = list(tiles.tiles(target.files[0], outputs, geometry.ByteLayouts()))
    at = 0
    for number, tile in enumerate(found):
        assert tile.number == number
        assert tile.offset == at
        assert sum(f.length for f in tile.fills) == tile.length
        assert all(f.length <= 2 * geometry.STAGE for f in tile.fills)
        at += tile.length
    assert at == target.files[0].size
    assert found == list(tiles.tiles(target.files[0], outputs, geometry.ByteLayouts()))


def test_a_target_that_does_not_fit_the_outputs_is_refused(tmp_path: Path) -> None:
    outputs = {"k": whole("k", "uint8", (5,))}
    target = describe(outputs)
    with pytest.raises(ValueError, match="has 6 bytes, its places have 5"):
        tiles.check_places({"k": whole("k", "uint8", (6,))}, target)


@pytest.mark.parametrize(
    ("stretches", "refused"),
    [
        ([[(0, 5)]], None),
        ([[(0, 2), (2, 1)], [(3, 2)]], None),
        ([[(0, 5)], [(0, 2), (2, 3)]], None),
        ([[(0, 5)], [(0, 2)]], "has 5 bytes, its places have 2"),
        ([[(0, 2)], [(3, 2)]], "from byte 3 on, not from 2"),
        ([[(0, 3), (2, 3)]], "from byte 2 on, not from 3"),
        ([[(2, 3)], [(0, 2)]], "from byte 2 on, not from 0"),
        ([[(0, 2), (2, 2)]], "has 5 bytes, its places have 4"),
    ],
)
def test_the_places_of_a_tensor_cover_it_once(
    stretches: list[list[tuple[int, int]]], refused: str | None
) -> None:
    files = tuple(
        OutputFile(f"f{n}", b"", tuple(Placed("k", 0, size, at) for at, size in one), 9)
        for n, one in enumerate(stretches)
    )
    outputs = {"k": whole("k", "uint8", (5,))}
    if refused is None:
        tiles.check_places(outputs, Target(files, True))
    else:
        with pytest.raises(ValueError, match=refused):
            tiles.check_places(outputs, Target(files, True))


def test_the_file_checksum_is_that_of_its_bytes(tmp_path: Path) -> None:
    import xxhash

    a = random_raw(np.random.default_rng(8), "uint8", (3_000_000,))
    _, result = produce(
        tmp_path, {"a": ("uint8", a)}, {"o": ("uint8", views.stored(0, a.shape), ("a",))}
    )
    content = (tmp_path / "out" / "out-0.bin").read_bytes()
    assert result.files == {
        "out-0.bin": {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    }


def test_who_waits_for_the_writing_of_a_file_goes_on_filling(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Two threads and one file: while the first write, of the header, hangs, the other thread fills
    a buffer more than its own.
    """
    filled, write, begun = threading.Semaphore(0), tiles.write_at, threading.Event()

    class Counted(gather.Gather):
        def fill(self, *arguments: Any) -> Any:
            super().fill(*arguments)
            filled.release()

    went_on = []

    def hanging(*arguments: Any) -> None:
        if not begun.is_set():
            begun.set()
            went_on.append(all(filled.acquire(timeout=HANG) for _ in range(2)))
        write(*arguments)

    monkeypatch.setattr(tiles, "Gather", Counted)
    monkeypatch.setattr(tiles, "write_at", hanging)
    a = random_raw(np.random.default_rng(10), "uint8", (40_000_000,))
    got, _ = produce(
        tmp_path, {"a": ("uint8", a)}, {"o": ("uint8", views.stored(0, a.shape), ("a",))}, threads=2
    )
    assert went_on == [True]
    assert got["o"] == a.tobytes()


def test_progress_ends_at_the_size_of_all_files(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    a = random_raw(np.random.default_rng(9), "uint8", (9_000_000,))
    produce(
        tmp_path,
        {"a": ("uint8", a)},
        {"o": ("uint8", views.stored(0, a.shape), ("a",))},
        progress=lambda d, t: seen.append((d, t)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (9_000_008, 9_000_008)


def test_plain_runs_import_neither_torch_nor_numpy(tmp_path: Path) -> None:
    a = random_raw(np.random.default_rng(10), "uint8", (600, 4096))
    write_source(tmp_path / "in", {"a": ("uint8", a)}).close()
    program = f"""
import os, sys
from migrate.core import view as views
from migrate.core.spec import spec
from migrate.planning.graph import Tensor
from migrate.running.tiles import write_target
from migrate.source.blobs import Stored
from migrate.source.index import Index
from migrate.source.target import OutputFile, Placed, Target
class B:
    name, size, fd = "b", 0, os.open({str(tmp_path / "in" / "raw-0.bin")!r}, os.O_RDONLY)
    identity = None
    def fileno(self): return self.fd
class S:
    path, format, blobs = {str(tmp_path / "in")!r}, "raw", [B()]
    index = Index({{"a": Stored(spec("uint8", (600, 4096)), 0, 4)}}, ("raw-0.bin",))
    def identities(self): pass
    def check_unchanged(self): pass
v = views.stored(0, (600, 4096))
v = views.concat([v, v], 1)
t = Tensor(spec("uint8", v.shape), v, ("a",))
n = t.spec.nbytes
write_target({{"o": t}}, S(), Target((OutputFile("o.bin", b"H", (Placed("o", 1, n),), n + 1),), False), {str(tmp_path / "out")!r}, digest="d")
print(sorted(m for m in ("torch", "numpy") if m in sys.modules))
"""  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n"
    assert (tmp_path / "out").read_bytes() == b"H" + np.concatenate([a, a], 1).tobytes()


@pytest.mark.parametrize("threads", [0, -1])
def test_no_threads_are_refused_and_leave_nothing(tmp_path: Path, threads: int) -> None:
    with pytest.raises(ValueError, match="threads write nothing"):
        produce(
            tmp_path,
            {"k": ("uint8", np.zeros(4, np.uint8))},
            {"o": ("uint8", views.stored(0, (4,)), ("k",))},
            threads=threads,
        )
    assert not list(tmp_path.rglob("*.migrate-partial"))


@pytest.mark.parametrize("after", [0, 1])
def test_the_unforeseen_keeps_the_partial_only_if_something_is_written(
    tmp_path: Path, monkeypatch: Any, after: int
) -> None:
    class Breaks(gather.Gather):
        filled = 0

        def fill(self, *arguments: Any) -> Any:
            Breaks.filled += 1
            if Breaks.filled > after * 4:
                raise IndexError("unforeseen")
            return super().fill(*arguments)

    monkeypatch.setattr(tiles, "Gather", Breaks)
    big = np.zeros(3 * tiles.TILE, np.uint8)
    with pytest.raises(IndexError, match="unforeseen"):
        produce(
            tmp_path,
            {"k": ("uint8", big)},
            {"o": ("uint8", views.stored(0, big.shape), ("k",))},
            threads=1,
        )
    assert len(list(tmp_path.rglob("*.migrate-partial"))) == after
