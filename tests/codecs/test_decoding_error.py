"""What is worked out of scales before the error of decoding is measured."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest

from migrate.codecs.kit.decoding_error import _least


@pytest.mark.parametrize(
    ("numbers", "least"),
    [
        ([], inf),
        ([0.0, -0.0], inf),
        ([nan, nan], inf),
        ([0.0, inf], inf),
        ([nan, 0.0, 2.0, -0.5, inf], 0.5),
        ([3.0, 2.0**-149, -0.0, nan], 2.0**-149),
        ([-(2.0**-126)], 2.0**-126),
    ],
)
def test_the_least_magnitude_of_floats_is_found_by_their_bits(
    numbers: list[float], least: float
) -> None:
    single = np.array(numbers, "f4")
    assert _least(single) == _least(single.astype("f8")) == least


def test_it_is_found_in_matrices_that_are_not_contiguous() -> None:
    numbers = np.random.default_rng(5).standard_normal((17, 40)).astype("f4")
    numbers[3, ::2] = 0
    for part in (numbers, numbers.T, numbers[2:5, ::2], numbers[3:4, ::2]):
        assert _least(part) == _least(part.astype("f8"))
