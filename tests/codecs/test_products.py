"""Codes of e4m3 times scales in numpy alone, against float64 rounded with integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from migrate.codecs.kit import products
from migrate.codecs.kit.layout import floats
from migrate.codecs.kit.products import fill_products

VALUES = np.array(floats("float8_e4m3fn").values())


def wanted(codes: Any, scales: Any, each: tuple[int, int], skip: tuple[int, int]) -> Any:
    """Products rounded to float32 and then to bfloat16, ties to even."""
    index = [
        (np.arange(n) + s) // e if e else np.zeros(n, int)
        for n, e, s in zip(codes.shape, each, skip, strict=True)
    ]
    entries = scales.astype("f8")[index[0]][:, index[1]]
    bits = (VALUES[codes] * entries).astype("<f4").view("<u4").astype("<u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def every_code(rows: int, columns: int) -> Any:
    """All codes that are not NaN, in turn, at another place in each row."""
    finite = np.flatnonzero(np.isfinite(VALUES)).astype("u1")
    return finite[(np.arange(rows)[:, None] * 37 + np.arange(columns)) % finite.size]


def scales_of(kind: str, shape: tuple[int, int]) -> Any:
    rng = np.random.default_rng(shape)
    if kind == "powers":
        return np.ldexp(1.0, rng.integers(-100, 6, shape)).astype("<f4")
    some = (rng.random(shape) * 0.02 - 0.01).astype("<f4")
    if kind == "bfloat16":
        return (some.view("<u4") & 0xFFFF0000).view("<f4")
    some.reshape(-1)[0] = 0
    return some


@pytest.mark.parametrize("kind", ["any", "bfloat16", "powers"])
@pytest.mark.parametrize(
    ("shape", "each", "skip"),
    [
        ((300, 520), (1, 0), (0, 0)),
        ((300, 520), (0, 0), (0, 0)),
        ((300, 520), (128, 128), (0, 0)),
        ((300, 520), (128, 128), (100, 70)),
        ((300, 544), (1, 32), (0, 0)),
        ((300, 520), (1, 32), (0, 8)),
        ((300, 520), (1, 8), (0, 0)),
        ((70, 41), (0, 1), (0, 0)),
    ],
)
def test_products_are_rounded_once(
    kind: str, shape: Any, each: Any, skip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "STEP", 1 << 12)
    cells = [-(-(n + s) // e) if e else 1 for n, e, s in zip(shape, each, skip, strict=True)]
    scales = scales_of(kind, (cells[0], cells[1]))
    codes, out = every_code(*shape), np.zeros((shape[0], shape[1] + 3), "<u2")[:, 3:]
    assert fill_products(codes, scales, each, skip, out)
    np.testing.assert_array_equal(out, wanted(codes, scales, each, skip))


def test_scales_that_make_ties_are_known() -> None:
    # the last bit of a bfloat16 is 2**-7 of a number from 1 to 2
    rows = [[1, 0.5], [1.25, 1 + 2**-20], [1, 1 + 2**-8], [-1, 0]]
    assert [*products._with_ties(np.array(rows, "<f4"))] == [False, False, True, False]
    # 1.125 times it has the tie
    assert [*products._with_ties(np.array([[1 + 2**-5]], "<f4"))] == [True]
    assert [*products._with_ties(np.array([[0.5], [0]], "<f4"))] == [False, False]


@pytest.mark.parametrize("shape", [(3, 1030), (70, 2048)])
def test_the_buffer_of_numpy_is_what_it_was(shape: tuple[int, int]) -> None:
    before, codes = np.getbufsize(), every_code(*shape)
    out, scales = np.zeros(shape, "<u2"), scales_of("any", (shape[0], 1))
    assert fill_products(codes, scales, (1, 0), (0, 0), out)
    np.testing.assert_array_equal(out, wanted(codes, scales, (1, 0), (0, 0)))
    assert np.getbufsize() == before


@pytest.mark.parametrize("scale", [64.0, 2.0**-118, float("inf"), float("nan")])
def test_what_needs_more_than_a_product_is_left_to_others(scale: float) -> None:
    codes, out = every_code(4, 64), np.zeros((4, 64), "<u2")
    assert not fill_products(codes, np.array([[scale]], "<f4"), (0, 0), (0, 0), out)
    codes[3, 5] = 0xFF
    assert not fill_products(codes, np.array([[1]], "<f4"), (0, 0), (0, 0), out)
    assert not out.any()
