"""Floats of eight bits made in numpy alone: torch's cast of the same results, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from migrate.codecs import get
from migrate.codecs.kit import encoding
from migrate.codecs.kit.encoding import _KeptEntries
from migrate.codecs.kit.float8_codes import fill_codes, too_large
from migrate.codecs.kit.layout import floats
from migrate.codecs.kit.magnitudes import amax
from migrate.codecs.kit.rounding import largest_of, nearest_below
from migrate.codecs.kit.scale_rules import Scales
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

CODES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# rows and columns of a matrix, and of a tile
FORMS = (
    ((40, 4096), (1, 4096)), ((16, 256), (1, 32)), ((256, 512), (128, 128)),
    ((130, 1000), (128, 128)), ((5, 97), (3, 50)), ((70, 1500), (70, 1500)), ((3, 4100), (1, 2050)),
)  # fmt: skip


def raw_of(numbers: torch.Tensor) -> Any:
    size = numbers.element_size()
    return numbers.view({2: torch.int16, 4: torch.int32}[size]).numpy().view(f"<u{size}")


def cast_by_torch(
    numbers: torch.Tensor, factor: Any, divides: bool, narrow: str, to: str
) -> tuple[Any, Any]:
    """The codes, and which numbers lie where no code is nearest."""
    by = torch.from_numpy(factor)
    results = numbers.float() / by if divides else numbers.float() * by
    results = results.to(getattr(torch, narrow)).float()
    most = largest_of(floats(to))
    made = results.clamp(-most, most).to(getattr(torch, to)).view(torch.uint8)
    return made.numpy(), (results.abs() >= nearest_below(floats(to))).numpy()


def numbers_like(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    if kind == "weights":
        return rng.standard_normal(shape) * 0.02
    if kind == "wide":
        return np.exp2(rng.uniform(-40, 10, shape)) * rng.choice([-1, 1], shape)
    if kind == "whole":
        # many ties
        return rng.integers(-512, 512, shape) / 64
    if kind == "sparse":
        return rng.standard_normal(shape) * (rng.random(shape) < 0.3)
    return np.exp2(rng.uniform(-149, -120, shape))


@pytest.mark.parametrize("kind", ["weights", "wide", "whole", "sparse", "tiny"])
@pytest.mark.parametrize("to", CODES)
def test_codes_are_those_of_torchs_cast(kind: str, to: str) -> None:
    rng, elements = np.random.default_rng([CODES.index(to), len(kind)]), floats(to)
    for number, (shape, tile) in enumerate(FORMS):
        for dtype, narrow in (
            ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"),
            ("float32", "float32"),
        ):  # fmt: skip
            given = torch.from_numpy(numbers_like(kind, rng, shape).astype("f4"))
            given = given.to(getattr(torch, dtype))
            raw, divides = raw_of(given), number % 2 == 1
            largest = amax(raw, dtype, tile)
            scale = np.maximum(largest, np.float32(1e-4)) / np.float32(largest_of(elements))
            if number % 3 == 2:
                # powers of two, some of which are too small
                scale = np.exp2(np.floor(np.log2(scale))).astype("f4")
            factor = scale if divides else np.float32(1) / scale
            scales = Scales(scale, factor, divides, narrow)
            out = np.empty(shape, "u1")
            fill_codes(raw, dtype, scales, tile, largest, elements, out)
            full = np.repeat(np.repeat(factor, tile[0], 0), tile[1], 1)[: shape[0], : shape[1]]
            wanted, beyond = cast_by_torch(given, full, divides, narrow, to)
            assert np.array_equal(out, wanted), (shape, tile, dtype, narrow)
            found = too_large(out, raw, dtype, scales, tile, elements)
            assert np.array_equal(found, beyond), (shape, tile, dtype, narrow)


@pytest.mark.parametrize("exponent", [-20, -3, 5])
def test_every_bfloat16_of_each_largest_significand(exponent: int) -> None:
    """448 over some of the 128 puts results halfway between codes."""
    patterns = np.arange(1 << 16, dtype="<u2")
    numbers = (patterns.astype("<u4") << 16).view("<f4")
    for significand in range(0, 128, 1):
        most = np.float32((1 + significand / 128) * 2.0**exponent)
        raw = np.ascontiguousarray(patterns[np.abs(numbers) <= most])
        raw = raw[: raw.size // 64 * 64].reshape(1, -1)
        scale = np.full((1, 1), np.maximum(most, np.float32(1e-4)) / np.float32(448), "f4")
        factor, out = np.float32(1) / scale, np.empty(raw.shape, "u1")
        largest = np.full((1, 1), most, "f4")
        elements = floats("float8_e4m3fn")
        fill_codes(raw, "bfloat16", Scales(scale, factor), raw.shape, largest, elements, out)
        given = torch.from_numpy(raw.view("<i2")).view(torch.bfloat16)
        wanted, _ = cast_by_torch(given, factor, False, "float32", "float8_e4m3fn")
        assert np.array_equal(out, wanted), significand


class Listening:
    """What a meter was told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def add(self, wanted: Any, got: Any, amax: Any = None, **counts: Any) -> None:
        self.said.append((np.asarray(wanted).tobytes(), np.asarray(got).tobytes(), counts))


@pytest.mark.parametrize("non_finite", ["refuse", "saturate", "keep"])
@pytest.mark.parametrize(
    ("codec", "said"),
    [
        ("fp8", {"granularity": "channel", "like": "compressed-tensors"}),
        ("fp8", {"granularity": "channel", "like": "torchao", "codes": "float8_e5m2"}),
        ("fp8-block", {"block": (128, 128)}),
        ("mxfp8", {"rule": "floor"}),
    ],
)
def test_a_codec_makes_the_same_with_and_without_torch(
    codec: str, said: dict[str, Any], non_finite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = get(codec)
    args, spec = made.Args(**said, non_finite=non_finite), Spec("bfloat16", (300, 256))
    rng = np.random.default_rng(7)
    numbers = torch.from_numpy((rng.standard_normal(spec.shape) * 0.02).astype("f4"))
    numbers[3] = 0
    if non_finite != "refuse":
        numbers[5, 7], numbers[200, 1], numbers[260, 4] = float("inf"), -float("inf"), float("nan")
    raw = raw_of(numbers.bfloat16())
    found = []
    for beside in (True, False):
        if not beside:
            monkeypatch.setattr(encoding, "imported", lambda: None)
            monkeypatch.setattr(encoding, "typed", None)
        parts, meter, memo = [], Listening(), dict[str, Any]()
        for number, part in enumerate(made.encoded(args, spec)):
            out = np.empty(part.shape, carrier(part.dtype))
            box = tuple((0, n) for n in part.shape)
            made.encode(args, raw, spec, number, box, out, None if number else meter, memo)
            parts.append(out.tobytes())
        counts = {n: sum(c[n] or 0 for *_, c in meter.said) for n in ("saturated", "underflowed")}
        found.append((parts, counts))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<f4"])
def test_entries_are_seen_in_shared_memory_once_they_are_there(dtype: str) -> None:
    room = memoryview(bytearray(_KeptEntries.size((4, 6), dtype)))
    mine, other = _KeptEntries((4, 6), dtype, room), _KeptEntries((4, 6), dtype, room)
    place = (slice(1, 3), slice(0, 6))
    assert other.get(place) is None
    values = np.arange(12).reshape(2, 6).astype(dtype)
    # nothing is told from zero
    mine.put(place, values)
    found = other.get(place)
    assert found is not None
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, values)
    assert other.get((slice(0, 3), slice(0, 6))) is None
