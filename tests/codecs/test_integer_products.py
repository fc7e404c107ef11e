"""Integers less zeros times scales in numpy alone, against products in float64 rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from migrate.codecs import get
from migrate.codecs.kit import box_decoding, integer_products
from migrate.codecs.kit.integer_products import (
    GroupEntries,
    fill_integers,
    integers_of_bytes,
    integers_of_codes,
    integers_of_words,
)
from migrate.codecs.kit.layout import Packing, integers, signed
from migrate.core.spec import Spec
from migrate.elements.numbers import narrow_float16


@pytest.fixture(autouse=True)
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_products.tables, "imported", lambda: None)


def rounded(products: Any, dtype: str) -> Any:
    """float64 that float32 can hold, as raw elements of `dtype`, ties to even."""
    if dtype == "float16":
        return products.astype("<f2").view("<u2")
    bits = products.astype("<f4").view("<u4").astype("<u8")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def spread(entries: GroupEntries, shape: tuple[int, int]) -> Any:
    each = shape[1] if entries.values.shape[1] == 1 else entries.each
    return np.broadcast_to(np.repeat(entries.values.astype("f8"), each, 1), shape)


def scales_of(dtype: str) -> Any:
    """Every number of a dtype that is taken for products of that dtype."""
    if dtype == "float16":
        found = np.arange(1, 0x7C00, dtype="<u2").view("<f2").astype("<f4")
        return found[found * 128 <= 65504]
    found = (np.arange(1 << 15, dtype="<u4") << 16).view("<f4")
    return found[(found >= 2.0**-90) & (found <= 2.0**90)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_scale_times_every_integer_is_rounded_once(dtype: str) -> None:
    scales = scales_of(dtype)[:, None]
    every = np.arange(-128, 128).astype("i1")
    codes = np.broadcast_to(every, (len(scales), 256)).copy()
    out = np.zeros(codes.shape, "<u2")
    assert len(scales) > 22_000
    assert fill_integers(codes, None, GroupEntries(scales, 0), dtype, out)
    np.testing.assert_array_equal(out, rounded(scales.astype("f8") * every, dtype))


def test_float16_is_what_rounds_other_numbers_makes_of_them() -> None:
    scales = scales_of("float16")[:, None]
    codes = np.broadcast_to(np.arange(16).astype("i1"), (len(scales), 16)).copy()
    zeros = GroupEntries(np.arange(len(scales), dtype="i1")[:, None] % 17, 0)
    wanted, out = np.zeros(codes.shape, "<u2"), np.zeros(codes.shape, "<u2")
    narrow_float16((codes - zeros.values).astype("<f4") * scales, wanted)
    assert fill_integers(codes, zeros, GroupEntries(scales, 0), "float16", out)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("scale", "zero"), [((1, 0), (1, 0)), ((0, 0), (0, 128)), ((1, 64), (1, 16)), ((1, 1), (0, 8))]
)
def test_entries_are_spread(
    dtype: str, scale: tuple[int, int], zero: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integer_products, "STEP", 1 << 12)
    rng = np.random.default_rng(scale)
    shape = (70, 256)
    # 0 is all rows, or columns
    cells = [
        (shape[0] if high else 1, shape[1] // wide if wide else 1) for high, wide in (scale, zero)
    ]
    scales = GroupEntries(rng.random(cells[0]).astype("<f2").astype("<f4") + 2**-10, scale[1])
    zeros = GroupEntries(rng.integers(0, 17, cells[1]).astype("i1"), zero[1])
    codes = rng.integers(0, 16, shape).astype("i1")
    wanted = (codes - spread(zeros, shape)) * spread(scales, shape)
    out = np.zeros((shape[0], shape[1] + 3), "<u2")[:, 3:]
    assert fill_integers(codes, zeros, scales, dtype, out)
    np.testing.assert_array_equal(out, rounded(wanted, dtype))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_that_are_not_finite_are_left_to_others(bad: float, dtype: str) -> None:
    codes, scales = np.full((2, 32), 3, "i1"), np.full((2, 1), 0.5, "<f4")
    scales[1] = bad
    out = np.full((2, 32), 7, "<u2")
    assert not fill_integers(codes, None, GroupEntries(scales, 0), dtype, out)
    assert (out == 7).all()
    assert (codes == 3).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("other", [0.0, -1.5, 511.75, 512.0, 65504.0, -65504.0, 2.0**-24])
def test_zeros_have_signs_and_what_is_too_large_is_infinite(dtype: str, other: float) -> None:
    scales = np.array([[0.5], [other]], "<f4")
    codes = np.broadcast_to(np.arange(-128, 128).astype("i1"), (2, 256)).copy()
    out = np.zeros((2, 256), "<u2")
    with np.errstate(over="ignore"):
        wanted = rounded(scales.astype("f8") * codes, dtype)
    assert fill_integers(codes, None, GroupEntries(scales, 0), dtype, out)
    np.testing.assert_array_equal(out, wanted)


def test_nibbles_are_spread_and_moved() -> None:
    codes = np.arange(256, dtype="u1").reshape(4, 64)
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(4, 128).astype("i1")
    for elements, wanted in (
        (integers(4), pairs), (integers(4, 8), pairs - 8), (signed(4), pairs - 16 * (pairs > 7)),
    ):  # fmt: skip
        np.testing.assert_array_equal(integers_of_bytes(codes, elements), wanted)
    assert (integers_of_codes(codes & 31, integers(5, 16)) == (codes & 31).view("i1") - 16).all()
    np.testing.assert_array_equal(integers_of_bytes(codes, signed(8)), codes.view("i1"))
    whole = codes.astype("i2") - 128
    np.testing.assert_array_equal(integers_of_bytes(codes, integers(8, 128)), whole)
    assert integers_of_bytes(codes, integers(8)) is None


@pytest.mark.parametrize("order", [(), (0, 4, 1, 5, 2, 6, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0)])
def test_words_become_eight_rows(order: tuple[int, ...]) -> None:
    rng = np.random.default_rng(8)
    words = rng.integers(0, 1 << 32, (3, 5), "<u4")
    found = integers_of_words(words, Packing(4, ("int32",), axis=-2, order=order), integers(4))
    wanted = [words[i // 8] >> 4 * (order or range(8))[i % 8] & 15 for i in range(24)]
    np.testing.assert_array_equal(found, np.array(wanted))


ROWS, COLUMNS = 264, 384
PARTS: dict[str, dict[str, Spec]] = {
    "gptq": {
        "weight": Spec("int32", (COLUMNS // 8, ROWS)), "zero": Spec("int32", (3, ROWS // 8)),
        "scale": Spec("float16", (3, ROWS)), "group": Spec("int32", (COLUMNS,)),
    },
    "awq": {
        "weight": Spec("int32", (COLUMNS, ROWS // 8)), "zero": Spec("int32", (3, ROWS // 8)),
        "scale": Spec("float16", (3, ROWS)),
    },
    "int-pack": {
        "weight": Spec("int32", (ROWS, COLUMNS // 8)), "scale": Spec("bfloat16", (ROWS, 12)),
        "shape": Spec("int64", (2,)),
    },
    "q8_0": {"data": Spec("uint8", (ROWS, COLUMNS // 32 * 34))},
    "q5_0": {"data": Spec("uint8", (ROWS, COLUMNS // 32 * 22))},
    "q4_0": {"data": Spec("uint8", (ROWS, COLUMNS // 32 * 18))},
}  # fmt: skip


def raw_of(role: str, spec: Spec, rng: Any) -> Any:
    if role == "group":
        return (np.arange(COLUMNS) // 128).astype("<u4")
    if role == "shape":
        return np.array([ROWS, COLUMNS], "<u8")
    if role == "data":
        records = rng.integers(0, 256, (ROWS, COLUMNS // 32, spec.shape[1] * 32 // COLUMNS), "u1")
        # scales of both signs, all of them finite
        records[..., 1] &= 0xBF
        return records.reshape(spec.shape)
    if spec.dtype == "float16":
        return (rng.random(spec.shape) * 0.01 + 1e-6).astype("<f2").view("<u2")
    if spec.dtype == "bfloat16":
        return rng.integers(0x3000, 0x4000, spec.shape, "<u2")
    return rng.integers(0, 1 << 32, spec.shape, "<u4")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("gptq", "float16"), ("gptq", "bfloat16"), ("awq", "float16"), ("int-pack", "bfloat16"),
        ("q8_0", "bfloat16"), ("q5_0", "float16"), ("q4_0", "float16"),
    ],
)  # fmt: skip
def test_codecs_decode_so(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix in several chunks, against the reference of all of it."""
    monkeypatch.setattr(box_decoding, "CHUNK", 1 << 14)
    monkeypatch.setattr(integer_products, "STEP", 1 << 12)
    made: list[bool] = []

    def filled(*given: Any) -> bool:
        made.append(fill_integers(*given))
        return made[-1]

    monkeypatch.setattr(box_decoding, "fill_integers", filled)
    codec, rng = get("gguf" if "data" in PARTS[kind] else kind), np.random.default_rng(3)
    specs = [PARTS[kind].get(role) for role in codec.parts]
    arrays = [
        None if spec is None else raw_of(role, spec, rng)
        for role, spec in zip(codec.parts, specs, strict=True)
    ]
    said: dict[str, Any] = {"gptq": {"form": "v1", "zeros": "words"}}.get(kind, {})
    args = codec.Args(**said, **({"type": kind} if codec.name == "gguf" else {}))
    if kind == "int-pack":
        there = dict(zip(codec.parts, arrays, strict=True))
        args = codec.settle(args, specs, {role: there[role].tobytes() for role in codec.planning})
    box = ((8, ROWS), (0, COLUMNS))
    parts = [
        None if array is None else array[tuple(slice(*side) for side in need)]
        for array, need in zip(arrays, codec.decode_needs(args, specs, box), strict=True)
    ]
    out = np.zeros((ROWS - 8, COLUMNS), "<u2")
    codec.decode(args, parts, specs, dtype, box, out)
    np.testing.assert_array_equal(out, codec.reference(args, arrays, specs, dtype)[8:])
    assert all(made)
    assert len(made) > 1
