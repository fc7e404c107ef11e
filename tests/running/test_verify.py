"""verify finds what is not what the program makes, reads without views, and keeps to its memory."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import MemoryBlob, RawBlob, RawSource, random_raw, write_source

from migrate.core.errors import RunError
from migrate.core.spec import Spec
from migrate.ops.base import step
from migrate.planning.graph import ApplyOp, Program, ReadKey
from migrate.running import eager, verify
from migrate.running import sample as samples
from migrate.running.ranks import deal
from migrate.source.blobs import Stored


def call(
    op: str, *inputs: Program, parts: int = 1, output: int = 0, dtype: str = "bfloat16", **args: Any
) -> ApplyOp:
    return ApplyOp(op, step(op, **args).args, parts, output, inputs, (dtype,) * len(inputs))


def parts_of(op: str, one: Program, count: int, **args: Any) -> list[ApplyOp]:
    first = call(op, one, parts=count, **args)
    return [first._replace(output=number) for number in range(count)]


def stack(*keys: str) -> ApplyOp:
    return call("stack", *(ReadKey(key) for key in keys), over="e")


class Counting(RawBlob):
    """Counts the bytes that are read, of all blobs together."""

    total = 0

    def readinto(self, offset: int, buffer: memoryview) -> None:
        Counting.total += buffer.nbytes
        super().readinto(offset, buffer)


@pytest.fixture(autouse=True)
def nothing_counted() -> None:
    Counting.total = 0


def pair(
    tmp_path: Path, made: dict[str, tuple[str, np.ndarray]], dtype: str = "bfloat16"
) -> tuple[RawSource, RawSource, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    arrays = [random_raw(rng, dtype, (4, 6)) for _ in range(2)]
    source = write_source(
        tmp_path / "in", {f"k{i}": (dtype, a) for i, a in enumerate(arrays)}, 1, Counting
    )
    return source, write_source(tmp_path / "out", made), arrays


@pytest.mark.parametrize("threads", [1, 2])
def test_equal_bytes_give_no_mismatch_and_a_changed_bit_is_named(
    threads: int, tmp_path: Path
) -> None:
    source, _, arrays = pair(tmp_path, {})
    right = np.stack(arrays)
    wrong = right.copy()
    wrong[1, 2, 3] ^= 1
    output = write_source(
        tmp_path / "o",
        {
            "right": ("bfloat16", right),
            "wrong": ("bfloat16", wrong),
            "flat": ("bfloat16", right.reshape(-1)),
        },
    )
    program: dict[str, Program] = {
        "right": stack("k0", "k1"),
        "wrong": stack("k0", "k1"),
        "flat": stack("k0", "k1"),
        "gone": ReadKey("k0"),
    }
    found = verify.recompute(program, source, output, threads=threads)
    assert [(m.key, m.what, m.index) for m in found] == [
        ("wrong", "bytes", (1, 2, 3)),
        ("flat", "shape", None),
        ("gone", "missing", None),
    ]
    assert "1 of 48 elements" in found[0].detail


def test_what_several_outputs_are_parts_of_is_read_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    experts = random_raw(rng, "bfloat16", (3, 4, 2))
    source = write_source(tmp_path / "in", {"k": ("bfloat16", experts)}, 1, Counting)
    halves = parts_of("split", ReadKey("k"), 2, into="w", dim=1)
    program = {
        f"e{e}.w{w}": one
        for w in range(2)
        for e, one in enumerate(parts_of("unbind", halves[w], 3, into="e"))
    }
    # in the order of a checkpoint, which goes from one call to the other and back
    program = dict(sorted(program.items()))
    output = write_source(
        tmp_path / "o",
        {
            f"e{e}.w{w}": ("bfloat16", experts[e, 2 * w : 2 * w + 2].copy())
            for e in range(3)
            for w in range(2)
        },
    )
    work = verify.Recomputation(program, source, output)
    assert work.memory(1) == experts.nbytes + 4 * verify.STRETCH
    assert work.run() == []
    assert Counting.total == experts.nbytes


def test_elements_are_looked_at_only_where_words_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    right = random_raw(rng, "bfloat16", (1000, 1000))
    wrong = right.copy()
    wrong[500, 1] ^= 1
    wrong[999, 999] ^= 1
    source = write_source(tmp_path / "in", {"k": ("bfloat16", right)})
    output = write_source(tmp_path / "o", {"k": ("bfloat16", right), "x": ("bfloat16", wrong)})
    looked: list[int] = []
    count_nonzero = np.count_nonzero
    monkeypatch.setattr(
        np, "count_nonzero", lambda array: looked.append(array.size) or count_nonzero(array)
    )
    assert verify.recompute({"k": ReadKey("k")}, source, output) == []
    assert not looked
    (found,) = verify.recompute({"x": ReadKey("k")}, source, output)
    assert (found.index, found.detail) == ((500, 1), "2 of 1000000 elements differ")
    assert 0 < sum(looked) <= 2 * verify.STRETCH


@pytest.mark.parametrize(
    "dtype", ["uint8", "bfloat16", "float32", "complex128", "float4_e2m1fn", "float6_e2m3fn"]
)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7,), (5, 16), (300, 1600)])
@pytest.mark.parametrize("at", ["first", "last", "nowhere"])
def test_one_bit_is_found_wherever_it_lies(
    dtype: str, shape: tuple[int, ...], at: str, tmp_path: Path
) -> None:
    right = random_raw(np.random.default_rng(5), dtype, shape)
    wrong = np.array(right)
    if at != "nowhere" and right.size:
        flat = wrong.reshape(-1).view("u1").reshape(wrong.size, -1)
        flat[0 if at == "first" else -1, 0] ^= 1
    source = write_source(tmp_path / "in", {"k": (dtype, right)})
    output = write_source(tmp_path / "o", {"k": (dtype, wrong)})
    twice: dict[str, Program] = {"k": ReadKey("k")}
    for program in (
        twice,
        {"k": call("cast", ReadKey("k"), dtype=dtype, to=dtype)} if dtype == "float32" else twice,
    ):
        found = verify.recompute(program, source, output)
        place = (0,) * len(shape) if at == "first" else tuple(n - 1 for n in shape)
        assert [m.index for m in found] == ([place] if at != "nowhere" and right.size else [])


def test_what_lies_in_another_order_is_compared_in_that_of_the_output(tmp_path: Path) -> None:
    right = random_raw(np.random.default_rng(6), "bfloat16", (3, 700, 900))
    source = write_source(tmp_path / "in", {"k": ("bfloat16", right)})
    turned = np.ascontiguousarray(right.swapaxes(1, 2))
    wrong = turned.copy()
    wrong[2, 899, 699] ^= 1
    output = write_source(tmp_path / "o", {"k": ("bfloat16", turned), "x": ("bfloat16", wrong)})
    program = call("transpose", ReadKey("k"), dims=(1, 2))
    (found,) = verify.recompute({"k": program, "x": program}, source, output)
    assert (found.key, found.index) == ("x", (2, 899, 699))


def test_memory_stays_below_what_is_said_and_a_lower_limit_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    arrays = [random_raw(np.random.default_rng(i), "bfloat16", (700, 800)) for i in range(4)]
    source = write_source(
        tmp_path / "in", {f"k{i}": ("bfloat16", a) for i, a in enumerate(arrays)}, 1, Counting
    )
    output = write_source(tmp_path / "o", {"s": ("bfloat16", np.stack(arrays))}, 1, Counting)
    program = {"s": stack("k0", "k1", "k2", "k3")}
    work = verify.Recomputation(program, source, output)
    assert work.announced(1, None)["largest"] == "s"
    tracemalloc.start()
    try:
        assert work.run() == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 2 * output.index.tensors["s"].spec.nbytes <= peak <= work.memory(1)
    Counting.total = 0
    with pytest.raises(RunError, match=r"M919\]: s, bfloat16 \[4, 700, 800\]") as refused:
        verify.recompute(program, source, output, max_memory=work.memory(1) - 1)
    assert f"max_memory={work.memory(1)}" in str(refused.value)
    assert Counting.total == 0
    assert verify.recompute(program, source, output, max_memory=work.memory(1)) == []


def test_threads_together_keep_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {
        f"k{i}": ("bfloat16", random_raw(np.random.default_rng(i), "bfloat16", (300, 800)))
        for i in range(8)
    }
    source, output = write_source(tmp_path / "in", arrays), write_source(tmp_path / "o", arrays)
    program = {
        key: call("rearrange", ReadKey(key), pattern="a b -> a b", axes={}) for key in arrays
    }
    work = verify.Recomputation(program, source, output)
    each = work.memory(1)
    lock, held, most = threading.Lock(), [0], [0]
    compare = verify.Recomputation._compare

    def counted(self: Any, job: Any, *others: Any) -> Any:
        with lock:
            held[0] += job.need.memory
            most[0] = max(most[0], held[0])
        try:
            return compare(self, job, *others)
        finally:
            with lock:
                held[0] -= job.need.memory

    monkeypatch.setattr(verify.Recomputation, "_compare", counted)
    assert verify.recompute(program, source, output, threads=4, max_memory=2 * each) == []
    assert each <= most[0] <= 2 * each


def test_an_error_in_one_thread_ends_the_others_and_is_raised(tmp_path: Path) -> None:
    class Failing(RawBlob):
        def readinto(self, offset: int, buffer: memoryview) -> None:
            raise RuntimeError("no more")

    arrays = {
        f"k{i}": ("bfloat16", random_raw(np.random.default_rng(i), "bfloat16", (30, 8)))
        for i in range(20)
    }
    source, output = (
        write_source(tmp_path / "in", arrays, 1, Failing),
        write_source(tmp_path / "o", arrays),
    )
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no more"):
        verify.recompute({key: ReadKey(key) for key in arrays}, source, output, threads=3)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "dtype", ["uint8", "float32", "complex128", "float4_e2m1fn", "float6_e2m3fn"]
)
def test_a_stored_tensor_is_read_element_by_element(tmp_path: Path, dtype: str) -> None:
    array = random_raw(np.random.default_rng(1), dtype, (3, 4, 5))
    for blob in (MemoryBlob, None):
        source = write_source(
            tmp_path / f"in{blob is None}", {"k": (dtype, array)}, 1, *([blob] if blob else [])
        )
        assert (eager.read_elements(source, "k") == array).all()


def test_a_strided_stored_tensor_is_read_in_its_order(tmp_path: Path) -> None:
    array = random_raw(np.random.default_rng(2), "float32", (4, 6))
    source = write_source(tmp_path / "in", {"k": ("float32", array)})
    at = source.index.tensors["k"]
    source.index.tensors["t"] = Stored(Spec("float32", (6, 2)), 0, at.offset + 4 * 6, (1, 12))
    assert (eager.read_elements(source, "t") == array[1::2].T).all()
    source.index.tensors["s"] = Stored(Spec("float32", ()), 0, at.offset, ())
    assert eager.read_elements(source, "s").shape == ()
    source.index.tensors["e"] = Stored(Spec("float32", (0, 2)), 0, at.offset)
    assert eager.read_elements(source, "e").shape == (0, 2)


# samples


def large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Program], RawSource, dict[str, tuple[str, np.ndarray]]]:
    """Four stacks of 16 tensors, a transposed tensor and some small ones, with regions of 8 KiB."""
    monkeypatch.setattr(samples, "REGION", 8 << 10)
    rng = np.random.default_rng(7)
    arrays = {
        f"k{i}.{e}": ("bfloat16", random_raw(rng, "bfloat16", (16, 64)))
        for i in range(4)
        for e in range(16)
    }
    arrays |= {f"n{i}": ("float32", random_raw(rng, "float32", (8,))) for i in range(30)}
    arrays["t"] = ("bfloat16", random_raw(rng, "bfloat16", (64, 96)))
    source = write_source(tmp_path / "in", arrays, 1, Counting)
    args = step("stack", over="e").args
    program: dict[str, Program] = {
        f"k{i}": ApplyOp(
            "stack", args, 1, 0, tuple(ReadKey(f"k{i}.{e}") for e in range(16)), ("bfloat16",) * 16
        )
        for i in range(4)
    }
    program |= {f"n{i}": ReadKey(f"n{i}") for i in range(30)}
    program["t"] = call("transpose", ReadKey("t"), dims=(0, 1))
    made = {
        f"k{i}": ("bfloat16", np.stack([arrays[f"k{i}.{e}"][1] for e in range(16)]))
        for i in range(4)
    }
    made |= {key: arrays[key] for key in program if key.startswith("n")}
    made["t"] = ("bfloat16", np.ascontiguousarray(arrays["t"][1].T))
    return program, source, made


def test_the_time_is_measured_on_a_part_and_only_where_there_is_much_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, source, made = large(tmp_path, monkeypatch)
    output = write_source(tmp_path / "o", made)
    work = verify.Recomputation(program, source, output)
    assert verify.estimate_seconds(work, 2) is None
    monkeypatch.setattr(verify, "SHORT", 0)
    Counting.total = 0
    assert (verify.estimate_seconds(work, 2) or 0) > 0
    assert Counting.total < sum(blob.size for blob in source.blobs)


def test_the_time_of_several_processes_is_that_of_the_one_with_most_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, source, made = large(tmp_path, monkeypatch)
    output = write_source(tmp_path / "o", made)
    work = verify.Recomputation(program, source, output)
    monkeypatch.setattr(verify, "SHORT", 0)
    # a second for each byte that is measured
    monkeypatch.setattr(verify, "_timed", lambda work, key, rows: float(measured(work, key, rows)))

    def measured(work: verify.Recomputation, key: str, rows: tuple[int, int]) -> int:
        spec = work.output.index.tensors[key].spec
        return spec.nbytes * (rows[1] - rows[0]) // spec.shape[0]

    total = sum(output.index.tensors[key].spec.nbytes for key in program)
    monkeypatch.setattr(verify, "SECONDS", float("inf"))
    assert verify.estimate_seconds(work, 1) == pytest.approx(total)
    sizes = work.parts()
    assert sum(sizes.values()) == total
    for world in (2, 3, 5):
        largest = max(sum(sizes[part] for part in own) for own in deal(sizes, world))
        assert total / world <= largest < total
        assert verify.estimate_seconds(work, 1, world) == pytest.approx(largest)
        assert work.announced(1, None, world)["processes"] == world
    # more than there is to do
    most = max(sizes.values())
    assert verify.estimate_seconds(work, 4, 1000) == pytest.approx(most)


def test_memory_for_reads_is_used_again() -> None:
    pool = eager.Pool()
    pool.begin([8, 16])
    first = pool.take(8)
    pool.begin([8])
    assert pool.take(8) is first
    assert pool.take(8) is not first
