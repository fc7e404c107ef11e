"""Computed outputs of a run: once, side by side, under the memory limit, and refused before
anything is written.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import describe, random_raw, read_back, whole, write_and_read, write_source
from value_ops import Widen, call, install

from migrate.core import view as views
from migrate.core.errors import CheckpointError, RunError
from migrate.core.spec import spec
from migrate.planning import graph
from migrate.planning.graph import CHUNK, MEMOS, Tensor
from migrate.planning.plan import peak_memory
from migrate.running import geometry, tiles
from migrate.running.buffers import fill_buffers
from migrate.running.evaluator import Evaluator
from migrate.running.geometry import ByteLayouts
from migrate.running.resources import RunOptions

ROWS, COLUMNS = 2000, 1024


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return install(monkeypatch)


@pytest.fixture(scope="module")
def stored() -> np.ndarray:
    return random_raw(np.random.default_rng(0), "bfloat16", (ROWS, COLUMNS))


def elements(seen: Counter[Any]) -> int:
    return sum(int(np.prod([b - a for a, b in box])) * times for box, times in seen.items())


def parts(tensor: Tensor, dim: int, count: int) -> list[Tensor]:
    size = tensor.view.shape[dim] // count
    return [
        Tensor(spec("float32", v.shape), v, tensor.sources)
        for v in views.split(tensor.view, dim, [size] * count)
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(("dim", "count"), [(0, 1), (0, 5), (1, 2), (1, 8)])
def test_disjoint_parts_of_a_value_compute_each_element_once(
    tmp_path: Path,
    made: dict[str, Any],
    stored: np.ndarray,
    threads: int,
    files: int,
    dim: int,
    count: int,
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = {
        f"o{i}": t
        for i, t in enumerate(
            parts(call(made["widen"], whole("a", "bfloat16", stored.shape))[0], dim, count)
        )
    }
    got = write_and_read(outputs, source, tmp_path / "out", files=files, threads=threads)
    for i, part in enumerate(np.split(stored.astype("u4") << 16, count, dim)):
        assert got[f"o{i}"] == part.tobytes()
    assert elements(made["widen"].seen) == stored.size
    assert made["widen"].largest <= CHUNK


def test_a_transposed_value_is_computed_once(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    value = call(made["widen"], whole("a", "bfloat16", stored.shape))[0]
    turned = views.permute(value.view, (1, 0))
    outputs = {"o": Tensor(spec("float32", turned.shape), turned, value.sources)}
    got = write_and_read(outputs, source, tmp_path / "out")
    assert got["o"] == np.ascontiguousarray(stored.T.astype("u4") << 16).tobytes()
    assert elements(made["widen"].seen) == stored.size


def test_what_is_asked_is_computed_straight_into_the_buffer(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    buffer = memoryview(bytearray(stored.size * 4))
    fill_buffers(
        {"o": call(made["widen"], whole("a", "bfloat16", stored.shape))[0]}, source, {"o": buffer}
    )
    assert bytes(buffer) == (stored.astype("u4") << 16).tobytes()
    first = np.frombuffer(buffer, "u1").__array_interface__["data"][0]
    assert all(first <= place < first + len(buffer) for place in made["widen"].places)
    assert len(made["widen"].places) == -(-stored.size * 4 // geometry.STAGE_MAX)


def test_a_grain_is_met_by_the_fills_so_that_threads_share_no_block(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    shape = (16, 70_000)
    array = random_raw(np.random.default_rng(1), "float32", shape)
    asked: list[Any] = []
    compute = made["blocks"].compute
    made["blocks"].compute = lambda args, arrays, specs, output, box, out, meter=None: (
        asked.append(box),
        compute(args, arrays, specs, output, box, out, meter),
    )[1]
    source = write_source(tmp_path / "in", {"a": ("float32", array)})
    outputs = {"o": call(made["blocks"], whole("a", "float32", shape))[0]}
    got = write_and_read(outputs, source, tmp_path / "out")
    assert got["o"] == made["blocks"].eager(None, [array])[0].tobytes()
    assert sum((b - a) * (d - c) for (a, b), (c, d) in asked) == array.size


def test_a_block_that_several_fills_read_is_computed_once_by_a_thread(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    arrays = {
        k: random_raw(np.random.default_rng(n), "float32", (64, 20_000)) for n, k in enumerate("ab")
    }
    count: Counter[Any] = Counter()
    compute = made["blocks"].compute
    made["blocks"].compute = lambda args, given, specs, output, box, out, meter=None: (
        count.update([tuple(box)]),
        compute(args, given, specs, output, box, out, meter),
    )[1]
    source = write_source(tmp_path / "in", {k: ("float32", a) for k, a in arrays.items()})
    one, other = (call(made["blocks"], whole(k, "float32", a.shape))[0] for k, a in arrays.items())
    side = views.concat([one.view, views.relabel(other.view, [1])], 1)
    outputs = {"o": Tensor(spec("float32", side.shape), side, (*one.sources, *other.sources))}
    got = write_and_read(outputs, source, tmp_path / "out", threads=1)
    wanted = np.concatenate([made["blocks"].eager(None, [a])[0] for a in arrays.values()], 1)
    assert got["o"] == wanted.tobytes()
    # a fill takes rows that are no multiple of four
    assert any(a % 4 == 0 and b % 4 == 0 for ((a, b), _) in count)
    assert elements(count) == 2 * 64 * 20_000


def test_a_small_result_that_is_read_again_and_again_is_kept(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    small = random_raw(np.random.default_rng(2), "bfloat16", (1, COLUMNS))
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored), "s": ("bfloat16", small)})
    wide, scale = (
        call(made["widen"], whole(k, "bfloat16", a.shape))[0]
        for k, a in (("a", stored), ("s", small))
    )
    spread = views.concat([scale.view] * 1, 0)
    again = Tensor(
        spec("float32", (ROWS, COLUMNS)), views.concat([spread] * ROWS, 0), scale.sources
    )
    outputs = {"o": call(made["xor"], wide, again)[0]}
    got = write_and_read(outputs, source, tmp_path / "out")
    assert got["o"] == ((stored.astype("u4") << 16) ^ (small.astype("u4") << 16)).tobytes()
    assert elements(made["widen"].seen) == stored.size + small.size


def test_an_op_that_needs_everything_is_computed_whole_and_once(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    total = call(made["total"], call(made["widen"], whole("a", "bfloat16", stored.shape))[0])[0]
    outputs = {f"o{i}": t for i, t in enumerate(parts(total, 0, 4))}
    got = write_and_read(outputs, source, tmp_path / "out", files=2)
    wide = stored.astype("u4") << 16
    assert b"".join(got[f"o{i}"] for i in range(4)) == (wide + wide.sum(dtype="u4")).tobytes()
    assert len(made["total"].places) == 1
    assert elements(made["widen"].seen) == stored.size


def test_threads_compute_side_by_side(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    barrier, met = threading.Barrier(2), []
    compute = made["widen"].compute

    def waits(*arguments: Any, **named: Any) -> None:
        if len(met) < 2:
            # passed by nobody if only one thread at a time may be here
            barrier.wait(20)
            met.append(1)
        compute(*arguments, **named)

    made["widen"].compute = waits
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = {"o": call(made["widen"], whole("a", "bfloat16", stored.shape))[0]}
    tiles.write_target(
        outputs,
        source,
        describe(outputs),
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False, threads=2),
    )
    assert len(met) >= 2


@pytest.mark.parametrize("op", ["total", "blocks"])
def test_a_node_that_does_not_fit_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, made: dict[str, Any], op: str
) -> None:
    shape = (8, 250_000)
    if op == "blocks":
        # a block as wide as the tensor is the smallest box
        made[op].grain = lambda args, specs, output: specs[0].shape
        made[op].needs = lambda args, specs, output, box: [tuple((0, n) for n in specs[0].shape)]
    source = write_source(tmp_path / "in", {"a": ("float32", np.zeros(shape, "u4"))})
    outputs = {"o": call(made[op], whole("a", "float32", shape))[0]}
    with pytest.raises(RunError) as caught:
        tiles.write_target(
            outputs,
            source,
            describe(outputs),
            tmp_path / "out",
            digest="d",
            options=RunOptions(fsync=False, max_memory=32 << 20),
        )
    (found,) = caught.value.diagnostics
    least = 2 * 2 * 8_000_000
    assert found.code == "M919"
    assert found.message.startswith(
        f"rule {op} (rules.yaml:1): `{op}` of k takes {least} bytes at once, the limit is "
        f"{24 << 20},"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    enough = int("".join(filter(str.isdigit, found.help)))
    tiles.write_target(
        outputs,
        source,
        describe(outputs),
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False, max_memory=enough),
    )


def test_boxes_get_smaller_with_the_limit(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = {"o": call(made["widen"], whole("a", "bfloat16", stored.shape))[0]}
    got = write_and_read(outputs, source, tmp_path / "out", max_memory=1 << 20)
    assert got["o"] == (stored.astype("u4") << 16).tobytes()
    assert made["widen"].largest <= 64 << 10


def test_values_that_an_op_refuses_name_rule_and_keys_and_publish_nothing(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    array = np.zeros((3000, 1000), "<u2")
    array[2500, 7] = 0x7FC0
    made["widen"].refuse = 0x7FC0
    source = write_source(tmp_path / "in", {"a": ("bfloat16", array)})
    outputs = {"o": call(made["widen"], whole("a", "bfloat16", array.shape))[0]}
    with pytest.raises(CheckpointError) as caught:
        tiles.write_target(
            outputs,
            source,
            describe(outputs),
            tmp_path / "out",
            digest="d",
            options=RunOptions(fsync=False),
        )
    (found,) = caught.value.diagnostics
    assert (
        found.message == "rule widen (rules.yaml:1): `widen` of k: element [2500, 7] is not wanted"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_resumed_run_ends_in_the_same_bytes_and_says_that_its_report_is_partial(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = {"o": call(made["widen"], whole("a", "bfloat16", stored.shape), lossy=True)[0]}
    target = describe(outputs)
    compute = made["widen"].compute
    left = [1]

    def fails(*arguments: Any, **named: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "broken")
        compute(*arguments, **named)

    made["widen"].compute = fails
    with pytest.raises(RunError):
        tiles.write_target(
            outputs,
            source,
            target,
            tmp_path / "out",
            digest="d",
            options=RunOptions(fsync=False, threads=1),
        )
    made["widen"].compute = compute
    made["widen"].seen.clear()
    result = tiles.write_target(
        outputs,
        source,
        target,
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False, threads=1, resume=True),
    )
    assert read_back(tmp_path / "out", target)["o"] == (stored.astype("u4") << 16).tobytes()
    assert 0 < elements(made["widen"].seen) < stored.size
    assert result.report is not None
    assert result.report["complete"] is False


def test_a_value_is_let_go_after_its_last_use(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = parts(
        call(made["total"], call(made["widen"], whole("a", "bfloat16", stored.shape))[0])[0], 0, 2
    )
    values = Evaluator(source, ByteLayouts(), outputs)
    values.leaf(outputs[0].sources[0])  # type: ignore[arg-type]
    assert values._live == stored.size * 4
    values.done(outputs[0])
    assert values._live == stored.size * 4
    values.done(outputs[1])
    assert values._live == 0


@pytest.mark.parametrize(
    ("nbytes", "given"), [(0, "never"), (3000, "one at a time"), (100_000, "never")]
)
def test_what_calls_remember_has_a_bound_and_is_given_back(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray, nbytes: int, given: str
) -> None:
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = [call(made["widen"], whole("a", "bfloat16", stored.shape))[0] for _ in range(2)]
    values, seen, compute = (
        Evaluator(source, ByteLayouts(), outputs, 4 * 4096 * MEMOS // 3),
        list[Any](),
        made["widen"].compute,
    )
    made["widen"].remembers = lambda args, specs: nbytes
    made["widen"].compute = lambda *arguments, memo=None: (seen.append(memo), compute(*arguments))
    box = ((0, 1), (0, 8))
    for tensor in (outputs[0], outputs[0], outputs[1]):
        values.read(tensor, box)
    values.done(outputs[0])
    values.read(outputs[1], box)
    values.read(outputs[0], box)
    if given == "never":
        assert seen == [None] * 5
    else:
        assert seen[0] is seen[1] is not None
        assert (seen[2], seen[4]) == (None, None)
        assert seen[3] is not seen[0]
        assert seen[3] == {}


def test_what_a_box_needs_is_asked_once_for_tensors_that_are_alike(
    tmp_path: Path, made: dict[str, Any], stored: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "KEPT", 2)
    source = write_source(tmp_path / "in", {"a": ("bfloat16", stored)})
    outputs = [call(made["widen"], whole("a", "bfloat16", stored.shape))[0] for _ in range(2)]
    values, asked, needs = Evaluator(source, ByteLayouts(), outputs), list[Any](), Widen.needs
    made["widen"].needs = lambda *given: (asked.append(given[-1]), needs(made["widen"], *given))[1]
    box = ((0, 1), (0, 8))
    for tensor in (*outputs, *outputs):
        values.read(tensor, box)
    assert asked.count(box) == 1
    # what is kept has a bound
    for row in range(1, 4):
        values.read(outputs[0], ((row, row + 1), (0, 8)))
    values.read(outputs[1], box)
    assert asked.count(box) == 2


def test_the_plan_counts_what_calls_may_remember(made: dict[str, Any]) -> None:
    tensors = [call(made["widen"], whole("a", "bfloat16", (64, 64)))[0] for _ in range(2)]
    outputs = {"o": tensors[0], "p": tensors[1], "again": tensors[1]}
    least = peak_memory(outputs)
    made["widen"].remembers = lambda args, specs: 5 << 20
    assert peak_memory(outputs) - least == 10 << 20
    made["widen"].remembers = lambda args, specs: 1 << 40
    assert peak_memory(outputs) - least == 10**9 * 3 // 4 // MEMOS


def test_the_plan_counts_torch_only_where_an_op_needs_it(made: dict[str, Any]) -> None:
    outputs = {"o": call(made["widen"], whole("a", "bfloat16", (4096, 4096)))[0]}
    with_torch = peak_memory(outputs)
    made["widen"].torch = lambda args, specs: False
    assert with_torch - peak_memory(outputs) == 160 << 20
    assert isinstance(made["widen"], Widen)
    assert peak_memory(outputs) < 64 << 20
