"""The arithmetic of blocks in numpy: scales and codes against torch's, and zeros against a look at
each element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from migrate.codecs.kit.encoding_error import RUN, _rare
from migrate.codecs.kit.layout import floats
from migrate.codecs.kit.magnitudes import widened
from migrate.codecs.kit.rounding import looked_up
from migrate.codecs.kit.scale_rules import ScaleRule

# all exponents and both ends of each, what has no reciprocal, and the ties of bfloat16
AMAX = torch.cat(
    [
        torch.arange(0, 0x7F800001, 1 << 19, dtype=torch.int64).to(torch.int32).view(torch.float32),
        (torch.arange(1, 256, dtype=torch.int32) << 23).view(torch.float32),
        ((torch.arange(0, 255, dtype=torch.int32) << 23) + 0x7FFFFF).view(torch.float32),
        torch.tensor(
            [1, 2, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x3F808000, 0x3F818000], dtype=torch.int32
        ).view(torch.float32),
        torch.rand(4096, generator=torch.Generator().manual_seed(0)),
    ]
)


def torchs(amax: torch.Tensor, like: str, stored: str) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's per_block_cast_to_fp8 and transformers' Fp8Quantize as they are written, with what
    is stored rounded by torch.
    """
    if like == "deepseek":
        scale = amax.clamp(min=1e-4) / 448.0
    else:
        factor = torch.where(amax > 0, 448.0 / amax, torch.ones(()))
        scale = 1.0 / factor
    if stored == "f32":
        return scale, 1.0 / scale if like == "deepseek" else factor
    if stored == "bf16":
        scale = scale.bfloat16().float()
    else:
        mantissa, exponent = torch.frexp(scale.double())
        # what is not finite has no exponent: DeepGEMM's bits give it the largest one, transformers'
        # logarithm NaN
        odd = float("nan") if like == "hf" else 2.0**127
        power = torch.ldexp(mantissa.sign(), exponent - (mantissa == 0.5).int()).clamp(
            2.0**-126, 2.0**127
        )
        scale = torch.where(scale.isfinite(), power, odd).float()
    return scale, 1.0 / scale


def same(got: np.ndarray[Any, Any], wanted: torch.Tensor) -> bool:
    """Bit for bit, any NaN for any other."""
    numbers = wanted.numpy()
    return bool(
        ((got.view("u4") == numbers.view("u4")) | (np.isnan(got) & np.isnan(numbers))).all()
    )


@pytest.mark.parametrize("stored", ["f32", "bf16", "pow2"])
@pytest.mark.parametrize("like", ["deepseek", "hf"])
def test_scales_and_factors_are_torchs_bit_for_bit(like: str, stored: str) -> None:
    rule = ScaleRule("float", like, rounding=stored)
    got = rule.scales(floats("float8_e4m3fn"), "float32", AMAX.numpy())
    wanted = torchs(AMAX, like, stored)
    assert not got.divides
    assert got[0].dtype == got[1].dtype == np.float32
    assert same(got[0], wanted[0])
    assert same(got[1], wanted[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_widened_as_torch_widens_them(dtype: str) -> None:
    kind = getattr(torch, dtype)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    numbers = (
        (bits << 16).view(torch.float32) if dtype == "float32" else bits.to(torch.int16).view(kind)
    )
    raw = numbers.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
    assert same(widened(raw.view(f"u{raw.itemsize}"), dtype), numbers.float())


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 1.0])
@pytest.mark.parametrize("size", [1, RUN - 1, RUN, 9 * RUN + 5])
def test_what_becomes_zero_is_found_wherever_it_is(size: int, share: float) -> None:
    rng = np.random.default_rng(size)
    given = rng.integers(1, 0x7F80, size).astype("u2") | rng.integers(0, 2, size).astype("u2") << 15
    given[rng.random(size) < share / 2] = 0x8000
    given[-1] = 0x8001
    made = rng.integers(1, 0x7F, size).astype("u1")
    made[(rng.random(size) < share) | (given == 0x8000)] = 0
    made[-1] = 0
    assert _rare(made, given, "bfloat16", 0x7F) == ((made == 0) & (given & 0x7FFF != 0)).sum() >= 1


def test_the_few_runs_that_hold_a_zero_are_compared_with_their_own_numbers() -> None:
    made, given = np.ones(40 * RUN, "u1"), np.full(40 * RUN, 0x3F80, "u2")
    for run, zeros, stay in ((17, 5, 2), (38, 3, 3), (39, 2, 0)):
        at = run * RUN + np.arange(zeros) * 7
        made[at], given[at[:stay]] = 0, 0x8000
    # zeros that runs without one would be told of by mistake
    given[: 10 * RUN] = 0
    assert _rare(made, given, "bfloat16", 0x7F) == 3 + 0 + 2


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
def test_codes_are_looked_up_as_torch_casts_what_is_in_range(dtype: str) -> None:
    kind = getattr(torch, dtype)
    most = float(torch.finfo(kind).max)
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-20, 17, (1 << 16,), generator=generator)
    numbers = torch.ldexp(torch.randn(1 << 16, generator=generator), exponents)
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    # ties, and what is next to them
    known = torch.sort(every[every.isfinite()]).values
    ties = (known[1:] + known[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.tensor(to)) for to in (float("inf"), -float("inf")))
    ends = torch.tensor([0.0, -0.0, 1e-40])
    numbers = torch.cat([numbers, known, ties, up, down, ends])
    wanted = numbers.clamp(-most, most).to(kind).view(torch.uint8).numpy()
    assert np.array_equal(looked_up(numbers.numpy(), dtype), wanted)
