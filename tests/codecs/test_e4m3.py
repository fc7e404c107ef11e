"""The arithmetic of e4m3 blocks in numpy: scales against torch's, and zeros against a look at each
element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from migrate.codecs import _e4m3

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
    got, wanted = _e4m3.scales_of(AMAX.numpy(), like, stored), torchs(AMAX, like, stored)
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
    assert same(_e4m3.widened(raw.view(f"u{raw.itemsize}"), dtype), numbers.float())


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 1.0])
@pytest.mark.parametrize("size", [1, _e4m3.RUN - 1, _e4m3.RUN, 9 * _e4m3.RUN + 5])
def test_what_becomes_zero_is_found_wherever_it_is(size: int, share: float) -> None:
    rng = np.random.default_rng(size)
    given = rng.integers(1, 0x7F80, size).astype("u2") | rng.integers(0, 2, size).astype("u2") << 15
    given[rng.random(size) < share / 2] = 0x8000
    given[-1] = 0x8001
    made = rng.integers(1, 0x7F, size).astype("u1")
    made[(rng.random(size) < share) | (given == 0x8000)] = 0
    made[-1] = 0
    assert _e4m3.vanished(made, given) == ((made == 0) & (given & 0x7FFF != 0)).sum() >= 1


def test_the_few_runs_that_hold_a_zero_are_compared_with_their_own_numbers() -> None:
    made, given = np.ones(40 * _e4m3.RUN, "u1"), np.full(40 * _e4m3.RUN, 0x3F80, "u2")
    for run, zeros, stay in ((17, 5, 2), (38, 3, 3), (39, 2, 0)):
        at = run * _e4m3.RUN + np.arange(zeros) * 7
        made[at], given[at[:stay]] = 0, 0x8000
    # zeros that runs without one would be told of by mistake
    given[: 10 * _e4m3.RUN] = 0
    assert _e4m3.vanished(made, given) == 3 + 0 + 2


@pytest.mark.parametrize(("left", "width"), [(0, 7), (3, 1), (3, 9), (2, 2), (0, 1)])
def test_the_entries_of_rows_are_those_of_their_blocks(left: int, width: int) -> None:
    block, top, rows = _e4m3.Block(3, 4), 5, slice(1, None, 3)
    whole = np.arange(600).reshape(20, 30).repeat(3, 0).repeat(4, 1)
    grid = whole[::3, ::4][top // 3 :, left // 4 :]
    wanted = whole[top : top + 12, left : left + width][rows]
    assert np.array_equal(_e4m3.of_rows(grid, block, top, left, rows, wanted.shape), wanted)
