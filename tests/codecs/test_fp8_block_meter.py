"""What `fp8-block` tells of errors: a sample of them, and all of what saturates or becomes zero,
infinite or NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from migrate.codecs import get
from migrate.codecs.kit import encoding_error
from migrate.codecs.kit.box_decoding import BoxDecoder
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.testing import codeckit

CODEC = get("fp8-block")
Args: Any = CODEC.Args


def raw(tensor: torch.Tensor) -> tuple[np.ndarray, Spec]:
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.contiguous().view(torch.uint8).numpy().view(carrier(name)), Spec(
        name, tuple(tensor.shape)
    )


class Told:
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        self.worst = self.error = self.signal = self.relative = 0.0
        self.count = self.saturated = self.underflowed = self.non_finite = 0
        self.sure = True

    def add(
        self, wanted, got, amax=None, *, saturated=0, underflowed=0, non_finite=0, sure=True
    ) -> None:
        self.sure, self.non_finite = self.sure and sure, self.non_finite + non_finite
        self.saturated, self.underflowed = (
            self.saturated + saturated,
            self.underflowed + underflowed,
        )
        wanted, got, amax = (
            None if x is None else torch.as_tensor(x).double() for x in (wanted, got, amax)
        )
        if not wanted.numel():
            return
        error = (wanted - got).abs()
        self.worst = max(self.worst, float(error.max()))
        self.relative = max(self.relative, float((error / amax).max()))
        self.error, self.signal = (
            self.error + float((error**2).sum()),
            self.signal + float((wanted**2).sum()),
        )
        self.count += wanted.numel()


def test_the_meter_of_a_quantize_is_told_the_error_of_the_code_and_what_became_zero() -> None:
    numbers = torch.randn(40, 24, generator=torch.Generator().manual_seed(1))
    numbers[3, 3], numbers[3, 4], numbers[3, 5] = 1e-6, 0.0, -0.0
    array, spec = raw(numbers)
    args, told = Args(block=(16, 16)), Told()
    codes = np.empty(spec.shape, "u1")
    CODEC.encode(args, array, spec, 0, ((0, 40), (0, 24)), codes, told)
    _, scale = codeckit.encoded(CODEC, args, array, spec)
    specs = CODEC.encoded(args, spec)
    made = torch.from_numpy(CODEC.reference(args, [codes, scale], specs, "float32").view("<f4"))
    assert told.count == 960
    assert told.worst == float((made.double() - numbers.double()).abs().max())
    assert (told.saturated, told.underflowed) == (0, int(((made == 0) & (numbers != 0)).sum()))
    assert told.underflowed >= 1
    assert 30 < 10 * np.log10(told.signal / told.error) < 33
    assert told.relative <= 1 / 28


def test_the_meter_of_a_saturating_quantize_counts_what_saturates() -> None:
    numbers = torch.ones(8, 8)
    numbers[1, 1], numbers[2, 2], numbers[5, 5] = float("inf"), float("-inf"), float("nan")
    array, spec = raw(numbers)
    told = Told()
    CODEC.encode(
        Args(block=(8, 8), non_finite="saturate"),
        array,
        spec,
        0,
        ((0, 8), (0, 8)),
        np.empty((8, 8), "u1"),
        told,
    )
    assert told.saturated == 2


def test_the_meter_of_a_dequantize_is_told_the_error_of_rounding() -> None:
    numbers = torch.randn(64, 32, generator=torch.Generator().manual_seed(2))
    array, spec = raw(numbers)
    args, told = Args(block=(16, 16)), Told()
    parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
    made = np.empty(spec.shape, "<u2")
    CODEC.decode(args, parts, specs, "bfloat16", ((0, 64), (0, 32)), made, told)
    exact = parts[0].view("u1")
    scales = parts[1].view("<f4").astype("f8").repeat(16, 0).repeat(16, 1)
    wanted = torch.from_numpy(exact).view(torch.float8_e4m3fn).double().numpy() * scales
    got = torch.from_numpy(made.view("<i2")).view(torch.bfloat16).double().numpy()
    assert told.count == 2048
    assert told.worst == np.abs(wanted - got).max()
    assert told.error == pytest.approx(((wanted - got) ** 2).sum(), rel=1e-12)


def box_by_box(shape: tuple[int, int], at: Any) -> Told:
    """What a meter is told of boxes of 100 rows, where `at` computes one of them."""
    told = Told()
    for top in range(0, shape[0], 100):
        at(((top, min(top + 100, shape[0])), (0, shape[1])), told)
    return told


def values(codes: np.ndarray) -> np.ndarray:
    """The numbers of e4m3 codes as float64: (-1)^s * 2^(e - 7) * (1 + m / 8), below the smallest
    exponent 2^-6 * m / 8 (OCP OFP8).
    """
    exponent, mantissa = (codes >> 3 & 15).astype("i8"), (codes & 7).astype("f8")
    magnitude = np.where(
        exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0)
    )
    magnitude[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes & 0x80, -magnitude, magnitude)


def decoded(
    codes: np.ndarray, scales: np.ndarray, dtype: str
) -> tuple[Told, np.ndarray, np.ndarray]:
    """What a meter is told of blocks of 64 x 64 that are decoded box by box, the true products, and
    what torch makes of them.
    """
    # scales that are none are kept here
    args = Args(block=(64, 64), non_finite="keep")
    parts = [codes, scales.view("<u4")]
    specs = [Spec("float8_e4m3fn", codes.shape), Spec("float32", scales.shape)]

    def at(box, told) -> None:
        needed = CODEC.decode_needs(args, specs, box)
        given = [
            part[tuple(slice(a, b) for a, b in need)]
            for part, need in zip(parts, needed, strict=True)
        ]
        CODEC.decode(
            args,
            given,
            specs,
            dtype,
            box,
            np.empty([b - a for a, b in box], carrier(dtype)),
            told,
        )

    told = box_by_box(codes.shape, at)
    with np.errstate(all="ignore"):
        true = values(codes) * scales.astype("f8").repeat(64, 0).repeat(64, 1)
    return told, true, torch.from_numpy(true).float().to(getattr(torch, dtype)).double().numpy()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_the_meter_of_a_dequantize_is_told_of_every_finite_number_that_became_infinite(
    dtype: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "other":
        request.getfixturevalue("other_device")
    codes = np.random.default_rng(0).integers(0, 256, (1024, 512)).astype("u1")
    scales = np.full((16, 8), 1e-3, "<f4")
    scales[1, 2], scales[3, 3] = {"float16": 300, "bfloat16": 1e36, "float32": 1e37}[dtype], np.inf
    scales[5, 1], scales[9, 0] = np.nan, -3e38
    told, true, made = decoded(codes, scales, dtype)
    lost = int((np.isinf(made) & np.isfinite(true)).sum())
    assert 2000 < lost < 8000
    assert (told.saturated, told.non_finite, told.sure) == (lost, lost, False)
    assert told.count < codes.size // 10


@pytest.mark.parametrize(
    ("args", "dtype"),
    [
        (Args(block=(64, 64), non_finite="keep"), "float32"),
        (Args(block=(64, 64), non_finite="saturate", scale="pow2"), "float32"),
        (Args(block=(64, 64), like="hf", non_finite="keep"), "bfloat16"),
        (Args(block=(64, 64), like="hf", non_finite="saturate"), "float32"),
        (Args(block=(64, 64), like="hf", non_finite="keep", scale="ue8m0"), "bfloat16"),
    ],
    ids=repr,
)
def test_the_meter_of_a_quantize_is_told_of_every_number_that_comes_back_infinite_or_undefined(
    args: Args, dtype: str
) -> None:
    shape = (1024, 512)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    numbers[70, 70], numbers[200, 200], numbers[201, 3] = float("inf"), float("nan"), float("-inf")
    numbers[320:384, :64] = 3.38e38
    numbers[640:704, :64] *= 1e-38
    numbers[640, :7] = 0
    array, spec = raw(numbers.to(getattr(torch, dtype)))

    def at(box, told) -> None:
        needed = CODEC.encode_needs(args, spec, 0, box)
        given = array[tuple(slice(a, b) for a, b in needed)]
        CODEC.encode(args, given, spec, 0, box, np.empty([b - a for a, b in box], "u1"), told)

    told = box_by_box(shape, at)
    parts, specs = CODEC.reference_parts(args, array, spec), CODEC.encoded(args, spec)
    back = CODEC.reference(args, parts, specs, "float32").view("<f4")
    given = numbers.to(getattr(torch, dtype)).float().numpy()
    lost = ~np.isfinite(back) & (back != given) & ~np.isnan(given)
    assert lost.any()
    assert told.non_finite == lost.sum()


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers are decoded once more each time, for a look at their error."""
    looked: list[int] = []
    plain = BoxDecoder.plain

    def noted(self, at, chunk):
        looked.append(math.prod(high - low for low, high in chunk))
        return plain(self, at, chunk)

    monkeypatch.setattr(BoxDecoder, "plain", noted)
    return looked


def test_a_tame_tensor_is_not_looked_at_for_what_is_not_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, looked = [], looked_at(monkeypatch)
    monkeypatch.setattr(encoding_error, "_lost", lambda *arrays: lost.append(arrays) or (0, 0, 0))
    spec = Spec("bfloat16", (256, 256))
    array = codeckit.numbers(spec)
    parts = CODEC.reference_parts(Args(), array, spec)
    for args in (Args(scale="pow2"), Args(non_finite="saturate")):
        CODEC.encode(args, array, spec, 0, ((0, 256), (0, 256)), np.empty(spec.shape, "u1"), Told())
    CODEC.decode(
        Args(),
        parts,
        CODEC.encoded(Args(), spec),
        "bfloat16",
        ((0, 256), (0, 256)),
        np.empty(spec.shape, "<u2"),
        Told(),
    )
    assert lost == []
    # one row of eight, for the sample
    assert sum(looked) == 256 * 256 // 8
    array[0, 0] = 0x7F80
    args = Args(non_finite="keep")
    CODEC.encode(args, array, spec, 0, ((0, 256), (0, 256)), np.empty(spec.shape, "u1"), Told())
    assert len(lost) == 1


def test_of_a_large_box_a_few_rows_of_each_block_are_measured() -> None:
    told = Told()
    spec = Spec("float32", (1024, 512))
    array = codeckit.numbers(spec)
    CODEC.encode(Args(), array, spec, 0, ((0, 1024), (0, 512)), np.empty(spec.shape, "u1"), told)
    assert told.count == 1024 * 512 / 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "args", [Args(block=(64, 64)), Args(block=(64, 64), scale="pow2", like="hf")], ids=repr
)
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_the_meter_of_a_quantize_is_told_of_every_number_that_becomes_zero(
    args: Args, dtype: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "other":
        request.getfixturevalue("other_device")
    shape = (1024, 512)
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(
        getattr(torch, dtype)
    )
    # rows of a large tensor that are not in the sample
    numbers[100:160] *= 1e-5
    numbers[100, ::2] = 0
    array, spec = raw(numbers)

    def at(box, told) -> None:
        needed = CODEC.encode_needs(args, spec, 0, box)
        CODEC.encode(
            args,
            array[tuple(slice(a, b) for a, b in needed)],
            spec,
            0,
            box,
            np.empty([b - a for a, b in box], "u1"),
            told,
        )

    told = box_by_box(shape, at)
    codes = CODEC.reference_parts(args, array, spec)[0]
    lost = int(((codes & 0x7F == 0) & (numbers != 0).numpy()).sum())
    assert lost > 10000
    assert told.underflowed == lost
    assert told.count < codes.size // 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_the_meter_of_a_dequantize_is_told_of_every_product_that_becomes_zero(
    dtype: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "other":
        request.getfixturevalue("other_device")
    codes = np.random.default_rng(3).integers(0, 256, (1024, 512)).astype("u1")
    scales = np.full((16, 8), 1.0, "<f4")
    # what float32 rounds down to half of the least number of the dtype, a tie, is among them
    scales[1, 2] = {
        "float16": 2.0**-16,
        "bfloat16": 2.0**-125 * (1 + 2.0**-23),
        "float32": 2.0**-141,
    }[dtype]
    scales[3, 3], scales[4, 1], scales[5, 5] = 0, np.nan, -scales[1, 2] / 4
    told, true, made = decoded(codes, scales, dtype)
    lost = int(((made == 0) & (true != 0)).sum())
    assert lost > 100
    assert told.underflowed == lost


def test_products_are_looked_at_for_zeros_only_where_a_scale_is_small_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, times = looked_at(monkeypatch), []
    specs = [Spec("float8_e4m3fn", (4, 4)), Spec("float32", (1, 1))]
    args = Args(non_finite="keep")
    for scale in (2.0**-15, 2.0**-16, 0.0, np.nan):
        parts = [np.ones((4, 4), "u1"), np.array([[scale]], "<f4").view("<u4")]
        CODEC.decode(
            args, parts, specs, "float16", ((0, 4), (0, 4)), np.empty((4, 4), "<u2"), Told()
        )
        times.append(sum(looked) // 16)
        looked.clear()
    # once for the sample, which is all; NaN could be infinity as well
    assert times == [1, 2, 1, 2]


def test_an_infinity_that_comes_back_as_one_did_not_saturate() -> None:
    numbers = torch.ones(8, 8)
    numbers[1, 1], numbers[2, 2] = float("inf"), float("-inf")
    array, spec = raw(numbers)
    for scale in ("pow2", "ue8m0"):
        args, told = Args(block=(8, 8), scale=scale, non_finite="keep"), Told()
        parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
        back = CODEC.reference(args, parts, specs, "float32").view("<f4")
        CODEC.encode(args, array, spec, 0, ((0, 8), (0, 8)), np.empty((8, 8), "u1"), told)
        assert np.isinf(back).sum() == 2
        assert (told.saturated, told.non_finite, told.underflowed) == (0, 0, 62)
