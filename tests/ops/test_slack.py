"""How far ops that do not promise their bits may be off."""

from __future__ import annotations

import numpy as np
import pytest

from migrate import ops
from migrate.core.spec import BITS
from migrate.elements.numbers import COMPUTED
from migrate.elements.raw import carrier
from migrate.elements.reference import reference_values, spacing

RNG = np.random.default_rng(5)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", COMPUTED)
def test_neighbours_are_as_far_apart_as_the_spacing_says(dtype):
    most = (1 << BITS[dtype]) - 1
    raw = (
        np.arange(most, dtype="u2")
        if BITS[dtype] == 16
        else RNG.integers(0, most, 5000, dtype="u8").astype(carrier(dtype))
    )
    x, up = reference_values(raw, dtype), reference_values(raw + raw.dtype.type(1), dtype)
    inside = np.isfinite(x) & np.isfinite(up)
    assert inside.sum() > 1000
    assert (np.abs(up[inside] - x[inside]) == spacing(x, dtype)[inside]).all()
    assert np.isnan(spacing(np.array([np.inf, np.nan]), dtype)).all()


def test_the_bound_of_a_merge_grows_with_what_cancels():
    merge = ops.get("lora_merge")
    args = merge.Args(alpha=2, rank=2)
    arrays = [np.array(v).view("u8") for v in ([[-6.0]], [[1.0], [2.0]], [[1.0, 2.5]])]
    (slack,) = merge.slack(args, arrays, ["float64"] * 3)
    # base and products are 0 together and 12 without their signs; four numbers, added up in either
    # order
    assert slack[0, 0] == pytest.approx(2 * 4 * 2.0**-53 * 12, rel=1e-3)
    (alone,) = merge.slack(args, arrays[:1], ["float64"])
    assert alone.tolist() == [[0.0]]


def test_the_bound_of_an_exponential_is_one_unit_in_the_last_place():
    (slack,) = ops.get("neg_exp").slack(
        None, [np.float32([0.0, 1.0, -200.0, np.inf]).view("u4")], ["float32"]
    )
    assert slack[:3].tolist() == [2.0**-23, 2.0**-22, 2.0**-149]
    assert np.isnan(slack[3])


def test_an_op_that_says_nothing_may_not_be_off_at_all():
    affine = ops.get("affine")
    (slack,) = affine.slack(affine.Args(), [np.zeros((2, 3), "u4")], ["float32"])
    assert slack.tolist() == [[0.0] * 3] * 2
