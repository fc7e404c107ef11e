"""The figures of a report are those of the numbers, whatever the boxes, threads and libraries."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import whole, write_source
from value_ops import call, install

from migrate import codecs
from migrate.core import view as views
from migrate.core.spec import Spec
from migrate.ops.base import step
from migrate.planning.graph import Computation, ComputedTensor, Tensor
from migrate.running.error_statistics import Ledger, Tally
from migrate.running.evaluator import Evaluator
from migrate.running.geometry import ByteLayouts
from migrate.running.resources import CPU, Device, Lane

numbers = st.floats(-1e6, 1e6, width=32)


def measured(wanted: np.ndarray, got: np.ndarray) -> dict[str, float]:
    w, g = wanted.astype("f8"), got.astype("f8")
    return {
        "max_abs": float(np.abs(w - g).max(initial=0)),
        "error": float(((w - g) ** 2).sum()),
        "signal": float((w**2).sum()),
    }


@given(
    pairs=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_chunks_merge_to_the_figures_of_the_whole(
    pairs: list[tuple[float, float]], cuts: list[int]
) -> None:
    wanted, got = (np.array(side, "f4") for side in zip(*pairs, strict=True))
    merged = Tally()
    edges = [0, *sorted(min(c, len(pairs)) for c in cuts), len(pairs)]
    for a, b in pairwise(edges):
        part = Tally()
        part.add(wanted[a:b], got[a:b], saturated=1, underflowed=2)
        merged.merge(part)
    expected = measured(wanted, got)
    assert merged.count == len(pairs)
    assert (merged.saturated, merged.underflowed) == (len(edges) - 1, 2 * (len(edges) - 1))
    assert merged.max_abs == expected["max_abs"]
    assert merged.error == pytest.approx(expected["error"], rel=1e-12)
    assert merged.signal == pytest.approx(expected["signal"], rel=1e-12)
    assert merged.amax == np.abs(wanted).max()


def test_the_ratio_is_that_of_the_sums_in_decibels() -> None:
    tally = Tally()
    tally.add(np.full(1000, 2.0, "f4"), np.full(1000, 2.0 - 2e-3, "f4"))
    assert tally.sqnr_db == pytest.approx(60, abs=1e-3)
    assert tally.relative == pytest.approx(1e-3, rel=1e-3)
    assert not tally.exact


def test_an_error_is_related_to_the_largest_of_its_block() -> None:
    wanted = np.array([[100.0, 4.0], [1.0, 0.0]], "f4")
    got = np.array([[99.0, 4.0], [0.5, 0.0]], "f4")
    tally = Tally()
    tally.add(wanted, got, np.array([[100.0], [1.0]], "f4"))
    assert tally.relative == 0.5
    tally = Tally()
    tally.add(wanted, got)
    assert tally.relative == 0.01


@pytest.mark.parametrize(
    "shape", [(), (3,), (70_000,), (3, 40_000), (40_000, 3), (2, 3, 20_000), (0, 4)]
)
def test_a_shape_of_any_rank_is_measured_whole(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal(shape).astype("f4")
    got = (wanted + rng.standard_normal(shape).astype("f4") / 100).astype("f4")
    amax = np.ones((*shape[:-1], 1) if shape else (), "f4")
    tally = Tally()
    tally.add(wanted, got, amax)
    expected = measured(wanted, got)
    assert tally.count == wanted.size
    assert tally.max_abs == tally.max_relative == expected["max_abs"]
    assert tally.error == pytest.approx(expected["error"], rel=1e-9)


def test_what_is_not_finite_is_counted_and_in_no_figure() -> None:
    inf, nan = math.inf, math.nan
    tally = Tally()
    tally.add(
        np.array([1.0, inf, nan, 5.0, inf, 2.0], "f4"),
        np.array([1.5, inf, nan, inf, nan, 2.0], "f4"),
    )
    assert tally.non_finite == 2
    assert (tally.max_abs, tally.error, tally.signal) == (0.5, 0.25, 5.0)
    assert not tally.exact
    finite = Tally()
    # the op counts what it saturates
    finite.add(np.array([inf, 1.0], "f4"), np.array([448.0, 1.0], "f4"), saturated=1)
    assert (finite.non_finite, finite.saturated, finite.max_abs, finite.exact) == (0, 1, 0, False)
    kept = Tally()
    kept.add(np.array([inf, nan], "f4"), np.array([inf, nan], "f4"))
    assert kept.exact


def test_an_op_that_measures_a_sample_counts_all_that_is_not_finite() -> None:
    tally = Tally()
    tally.add(np.array([1.0], "f4"), np.array([math.inf], "f4"), non_finite=7, sure=False)
    tally.add(np.array([], "f4"), np.array([], "f4"), non_finite=2)
    assert (tally.count, tally.non_finite) == (1, 9)


def test_what_is_not_sure_is_not_exact_and_what_was_not_measured_has_no_figure() -> None:
    tally, other = Tally(), Tally()
    tally.add(np.ones(3), np.ones(3))
    assert tally.exact
    other.add(np.ones(0), np.ones(0), sure=False)
    assert (other.to_json()["max_abs_error"], other.to_json()["max_relative_error"]) == (None, None)
    tally.merge(other)
    assert not tally.exact
    assert tally.to_json()["max_abs_error"] == 0


def test_an_error_whose_square_vanishes_is_one() -> None:
    tally = Tally()
    tally.add(np.array([1e-200]), np.array([2e-200]))
    assert tally.error == 0
    assert not tally.exact


def test_figures_that_overflow_are_left_out_of_the_document() -> None:
    tally = Tally()
    tally.add(np.array([1e300]), np.array([0.0]), underflowed=1)
    assert tally.sqnr_db is None
    assert json.loads(json.dumps(tally.to_json(), allow_nan=False))["max_abs_error"] == 1e300


def test_tensors_of_torch_are_measured_as_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    wanted = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    got = wanted.bfloat16().float()
    one, other = Tally(), Tally()
    one.add(wanted, got, wanted.abs().amax(1, keepdim=True))
    other.add(wanted.numpy(), got.numpy(), wanted.abs().amax(1, keepdim=True).numpy())
    assert one == other
    assert 0 < one.relative <= 2**-8


def test_a_box_counts_once_and_rules_sum_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = install(monkeypatch)
    made = {
        f"o{i}": call(ops["widen"], whole(f"k{i}", "bfloat16", (4, 4)), lossy=True)[0]
        for i in range(2)
    }
    made["again"] = made["o0"]
    ledger = Ledger(made)
    values = [made[f"o{i}"].sources[0] for i in range(2)]
    one, two = np.ones(8, "f4"), np.full(8, 2.0, "f4")
    boxes: list[Any] = [((0, 2), (0, 4)), ((2, 4), (0, 4))]
    for value in values:
        for box in (*boxes, boxes[0]):
            ledger.meter(value, box).add(two, one)  # type: ignore[arg-type]
    report = ledger.report(complete=True)
    assert report is not None
    assert [(t["keys"], t["from"], t["elements_measured"]) for t in report["tensors"]] == [
        (["o0", "again"], ["k"], 16),
        (["o1"], ["k"], 16),
    ]
    (rule,) = report["rules"]
    assert (rule["op"], rule["tensors"], rule["elements_measured"]) == ("widen", 3, 32)
    assert (rule["max_abs_error"], rule["max_relative_error"]) == (1, 0.5)
    assert rule["sqnr_db"] == pytest.approx(10 * math.log10(4))


def test_what_an_earlier_run_computed_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = install(monkeypatch)
    made = {
        f"o{i}": call(ops["widen"], whole(f"k{i}", "bfloat16", (4, 4)), lossy=True)[0]
        for i in range(2)
    }
    ledger = Ledger(made)
    ledger.meter(made["o1"].sources[0], ((0, 4), (0, 4))).add(
        np.ones((4, 4), "f4"), np.zeros((4, 4), "f4")
    )  # type: ignore[arg-type]
    report = ledger.report(complete=False)
    assert report is not None
    assert [t["keys"] for t in report["tensors"]] == [["o1"]]
    assert [(r["tensors"], r["elements"]) for r in report["rules"]] == [(1, 16)]


def test_what_was_taken_over_may_have_been_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"o": call(install(monkeypatch)["widen"], whole("k", "bfloat16", (4, 4)), lossy=True)[0]}
    exact = []
    for complete in (True, False):
        ledger = Ledger(made)
        ledger.meter(made["o"].sources[0], ((0, 4), (0, 4)))  # type: ignore[arg-type]
        report = ledger.report(complete=complete)
        assert report is not None
        exact.append((report["rules"][0]["exact"], report["tensors"][0]["exact"]))
    assert exact == [(True, True), (False, False)]


def test_figures_do_not_depend_on_the_order_in_which_boxes_are_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {
        "o": call(install(monkeypatch)["widen"], whole("k", "bfloat16", (64, 4)), lossy=True)[0]
    }
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((64, 4)).astype("f4")
    reports = []
    for order in (range(64), range(63, -1, -1), rng.permutation(64)):
        ledger = Ledger(made)
        for i in map(int, order):
            ledger.meter(made["o"].sources[0], ((i, i + 1), (0, 4))).add(
                wanted[i], wanted[i] * np.float32(1.01)
            )  # type: ignore[arg-type]
        ledger.close(made["o"].sources[0].computation)  # type: ignore[union-attr]
        reports.append(ledger.report(complete=True))
    assert reports[0] == reports[1] == reports[2]


@given(data=st.data(), shape=st.lists(st.integers(1, 9), max_size=3))
def test_claims_share_no_element_and_leave_none_out(data: st.DataObject, shape: list[int]) -> None:
    ledger, value = Ledger({}), object()
    times, asked = np.zeros(shape, int), np.zeros(shape, bool)
    for _ in range(data.draw(st.integers(1, 6))):
        box = tuple(
            data.draw(
                st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda p: p[0] < p[1])
            )
            for n in shape
        )
        asked[tuple(slice(a, b) for a, b in box)] = True
        for part in ledger.claim(value, box):  # type: ignore[arg-type]
            assert all(a < b for a, b in part)
            times[tuple(slice(a, b) for a, b in part)] += 1
        assert (times == asked).all()


@pytest.mark.heavy
@pytest.mark.parametrize("lane", [None, Lane])
def test_what_boxes_share_is_measured_once(
    lane: type[Lane] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lane is not None:
        monkeypatch.setattr(Device, "lane", lambda self: lane("cpu"))
    rng = np.random.default_rng(1)
    numbers = rng.standard_normal((100, 130)).astype("f4")
    numbers[rng.random(numbers.shape) < 0.1] *= 1e-6
    raw = (numbers.view("u4") >> 16).astype("u2")
    source = write_source(tmp_path / "in", {"k": ("bfloat16", raw)})
    own = codecs.get("fp8-block").Args(block=(16, 16))
    made = step("quantize", codec="fp8-block", from_="bfloat16", codec_args=own)
    given_, codes = whole("k", "bfloat16", raw.shape), Spec("float8_e4m3fn", raw.shape)
    tensor = Tensor(
        codes,
        views.stored(0, codes.shape),
        (ComputedTensor(Computation(made, (given_,), 2, "q", ("k",), True), 0, codes),),
    )
    ledger = Ledger({"o": tensor})
    values = Evaluator(source, ByteLayouts(), [tensor], 1 << 20, device=CPU, ledger=ledger)
    whole_ = values.read(tensor, ((0, 100), (0, 130)))
    for box in (
        ((3, 4), (7, 130)),
        ((0, 40), (0, 20)),
        ((17, 90), (50, 51)),
        ((0, 100), (0, 130)),
        ((99, 100), (129, 130)),
    ):
        assert np.array_equal(values.read(tensor, box), whole_[tuple(slice(a, b) for a, b in box)])
    # and the other way round: small boxes first
    later = Ledger({"o": tensor})
    values = Evaluator(source, ByteLayouts(), [tensor], 1 << 20, device=CPU, ledger=later)
    for box in (((3, 4), (7, 130)), ((17, 90), (50, 51)), ((0, 40), (0, 20)), ((0, 100), (0, 130))):
        values.read(tensor, box)
    lost = int(((whole_ & 0x7F == 0) & (raw & 0x7FFF != 0)).sum())
    assert lost > 100
    for report in (ledger.report(complete=True), later.report(complete=True)):
        assert report is not None
        assert (report["rules"][0]["underflowed"], report["rules"][0]["elements_measured"]) == (
            lost,
            13000,
        )


def test_a_run_that_computes_nothing_has_no_report() -> None:
    assert Ledger({"o": whole("k", "bfloat16", (4,))}).report(complete=True) is None
