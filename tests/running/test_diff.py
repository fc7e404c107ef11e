"""diff names what differs and measures it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from raw_files import random_raw, write_source

from migrate.core.spec import Spec
from migrate.running.comparison import Changed, diff
from migrate.source.blobs import Stored


def test_equal_checkpoints_are_equal_however_they_are_stored(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"k{i}": ("bfloat16", random_raw(rng, "bfloat16", (300, 700))) for i in range(4)}
    a, b = (
        write_source(tmp_path / "a", arrays, 2),
        write_source(tmp_path / "b", dict(reversed(arrays.items())), 1),
    )
    assert diff(a, b).equal


def test_keys_and_specs_that_differ_are_listed(tmp_path: Path) -> None:
    z = np.zeros((2, 3), "u2")
    a = write_source(
        tmp_path / "a", {"x": ("bfloat16", z), "y": ("bfloat16", z), "z": ("bfloat16", z)}
    )
    b = write_source(
        tmp_path / "b", {"y": ("bfloat16", z.T), "z": ("bfloat16", z), "w": ("bfloat16", z)}
    )
    found = diff(a, b)
    assert (found.only_a, found.only_b) == (("x",), ("w",))
    assert found.specs == (("y", Spec("bfloat16", (2, 3)), Spec("bfloat16", (3, 2))),)
    assert not found.bytes
    assert not found.equal


def test_what_differs_is_measured(tmp_path: Path) -> None:
    x = np.arange(1, 1_000_001, dtype="f4").reshape(1000, 1000)
    y = x.copy()
    y[700, 3] += 0.5
    y[900, 9] -= 2
    a, b = (
        write_source(tmp_path / n, {"x": ("float32", v.view("u4"))})
        for n, v in (("a", x), ("b", y))
    )
    (changed,) = diff(a, b).bytes
    assert (changed.key, changed.index, changed.count, changed.max_abs_error) == (
        "x",
        (700, 3),
        2,
        2.0,
    )
    error = float(((x.astype("f8") - y) ** 2).sum())
    assert changed.sqnr_db == pytest.approx(
        10 * math.log10(float((x.astype("f8") ** 2).sum()) / error), rel=1e-12
    )


def test_bits_that_differ_without_a_value_that_does_have_no_error(tmp_path: Path) -> None:
    x = np.array([0.0, np.nan, np.inf, 1], "f4").view("u4")
    y = x.copy()
    y[0] ^= 1 << 31
    y[1] ^= 1
    a, b = (write_source(tmp_path / n, {"x": ("float32", v)}) for n, v in (("a", x), ("b", y)))
    (changed,) = diff(a, b).bytes
    assert changed == Changed("x", (0,), 2, 0.0, math.inf)


def test_a_nan_against_a_number_is_not_a_small_error(tmp_path: Path) -> None:
    a, b = (
        write_source(tmp_path / n, {"x": ("float32", np.array([1, v], "f4").view("u4"))})
        for n, v in (("a", 2.0), ("b", np.nan))
    )
    (changed,) = diff(a, b).bytes
    assert changed.index == (1,)
    assert math.isnan(changed.max_abs_error or 0)
    assert math.isnan(changed.sqnr_db or 0)


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float6_e2m3fn"])
def test_elements_below_a_byte_are_counted_and_not_measured(tmp_path: Path, dtype: str) -> None:
    x = random_raw(np.random.default_rng(1), dtype, (3, 8))
    y = x.copy()
    y[1, 5] ^= 1
    a, b = (write_source(tmp_path / n, {"x": (dtype, v)}) for n, v in (("a", x), ("b", y)))
    assert diff(a, b).bytes == (Changed("x", (1, 5), 1, None, None),)


def test_strided_storage_is_compared_in_the_order_of_the_tensor(tmp_path: Path) -> None:
    x = random_raw(np.random.default_rng(2), "bfloat16", (400, 500))
    a, b = (
        write_source(tmp_path / "a", {"x": ("bfloat16", x)}),
        write_source(tmp_path / "b", {"x": ("bfloat16", np.ascontiguousarray(x.T))}),
    )
    at = b.index.tensors["x"]
    b.index.tensors["x"] = Stored(Spec("bfloat16", (400, 500)), 0, at.offset, (1, 400))
    assert diff(a, b).equal


def test_comparing_equal_bytes_imports_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, migrate.running.comparison, migrate.running.verify; print([m for m in "
        "('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n"
