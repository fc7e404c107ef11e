"""Powers of two that float32 does not hold, and what affine, neg_exp and lora_merge tell of their
errors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from migrate import ops
from migrate.core.spec import BITS, spec
from migrate.elements import numbers
from migrate.elements.raw import carrier
from migrate.ops.base import OpError
from migrate.testing import valuekit

CAST, AFFINE, NEG_EXP, LORA = (ops.get(n) for n in ("cast", "affine", "neg_exp", "lora_merge"))


def bits(dtype, *values):
    """Raw elements of float values, by torch."""
    return (
        torch.tensor(values, dtype=torch.float64)
        .to(getattr(torch, dtype))
        .view(getattr(torch, f"uint{BITS[dtype]}"))
        .numpy()
    )


def run(op, args, arrays, dtypes, meter=None):
    specs = [spec(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
    made = op.infer(args, specs)[0]
    return valuekit.compute(op, args, arrays, specs, 0, tuple((0, n) for n in made.shape), meter)


def affine(raw, dtype, **written):
    return run(AFFINE, AFFINE.Args(**written), [raw], [dtype])


def cast(raw, source, to):
    return run(CAST, CAST.Args(to=to), [raw], [source])


def refused(call, code="M406"):
    with pytest.raises(OpError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("power", [-1070, -290, -149, -130, -128, -127, 127, 128, 130, 277, 1023])
def test_powers_of_two_that_float32_does_not_hold_round_once_and_come_back(dtype, power):
    if dtype != "float64" and abs(power) > 300:
        assert (
            "cannot hold"
            in refused(
                lambda: AFFINE.infer(AFFINE.Args(2.0**power), [spec(dtype, (2,))]), "M303"
            ).message
        )
        return
    if BITS[dtype] == 16:
        raw = np.arange(1 << 16).astype("u2")
    else:
        raw = (
            np.random.default_rng(7)
            .integers(0, 256, 3000 * BITS[dtype] // 8, dtype="u1")
            .view(carrier(dtype))
        )
    raw = np.append(
        raw, cast(np.array([1, -(2.0 ** -(power // 2)), 0, 2.0**-140]).view("u8"), "float64", dtype)
    )
    with np.errstate(all="ignore"):
        x = numbers.numbers(raw, dtype).astype("f8")
        wanted = cast(np.ldexp(x, power).view("u8"), "float64", dtype)
        there = affine(raw, dtype, mul=2.0**power)
        real = ~np.isnan(x)
        assert (there[real] == wanted[real]).all()
        assert (there[~real] == raw[~real]).all()
        made = numbers.numbers(there, dtype).astype("f8")
        # exactly in integers: both are finite, and one is the other with another exponent
        fits = (
            ~np.isfinite(x)
            | (x == 0)
            | (np.isfinite(made) & (np.frexp(made)[0] == np.frexp(x)[0]) & (made != 0))
        )
        if abs(power) > 1022:
            return
        assert (affine(raw[fits], dtype, mul=2.0**power, exact=True) == there[fits]).all()
        assert (affine(there[fits], dtype, mul=2.0**-power, exact=True) == raw[fits]).all()
        for at in np.flatnonzero(~fits)[:20]:
            refused(lambda: affine(raw[at : at + 1], dtype, mul=2.0**power, exact=True))


def test_the_way_back_of_a_power_that_float32_does_not_hold_is_accepted():
    back = AFFINE.invert(AFFINE.Args(2.0**-130, exact=True))
    assert AFFINE.infer(back.args, [spec("float32", (2,))])
    one = bits("float32", 1.0)
    assert (
        affine(
            affine(one, "float32", mul=2.0**-130, exact=True), "float32", mul=2.0**130, exact=True
        )
        == one
    ).all()
    # no float64 is its inverse
    refused(lambda: AFFINE.validate(AFFINE.Args(2.0**-1074, exact=True)), "M308")


class Sure(valuekit.CountingMeter):
    def __init__(self):
        super().__init__()
        self.sure, self.lost, self.vanished, self.worst = True, 0, 0, 0.0

    def add(
        self, wanted, got, amax=None, *, saturated=0, underflowed=0, non_finite=None, sure=True
    ):
        super().add(wanted, got)
        self.sure, self.lost, self.vanished = (
            self.sure and sure,
            self.lost + saturated,
            self.vanished + underflowed,
        )
        if wanted.size:
            self.worst = max(self.worst, float(np.nan_to_num(abs(wanted - got), posinf=0).max()))


def told(op, args, arrays, dtypes):
    meter = Sure()
    run(op, args, arrays, dtypes, meter=meter)
    return meter


def test_affine_is_measured_against_the_factor_that_the_rule_says():
    x = bits("float32", 1, 3, 5)
    meter = told(AFFINE, AFFINE.Args(0.1), [x], ["float32"])
    assert meter.worst == max(
        abs(v * 0.1 - float(np.float32(v) * np.float32(0.1))) for v in (1, 3, 5)
    )
    assert told(AFFINE, AFFINE.Args(2, 1), [x], ["float32"]).sure
    assert not told(AFFINE, AFFINE.Args(1, 2.0**-60), [x], ["float32"]).sure
    assert (
        told(AFFINE, AFFINE.Args(2.0**130), [bits("float32", 2.0**-140, 1e30)], ["float32"]).lost
        == 1
    )
    assert told(AFFINE, AFFINE.Args(3), [bits("float32", 3e38, np.inf)], ["float32"]).lost == 1


@pytest.mark.parametrize(("op", "args"), [(AFFINE, AFFINE.Args(3)), (NEG_EXP, NEG_EXP.Args())])
def test_float64_results_are_not_compared_with_themselves(op, args):
    meter = told(op, args, [np.array([1e308, 0.3, -np.inf, np.inf]).view("u8")], ["float64"])
    assert (meter.count, meter.sure, meter.lost) == (0, False, 1)


def test_the_exponential_of_zero_alone_is_exact_and_what_float64_does_not_hold_is_counted():
    assert told(NEG_EXP, NEG_EXP.Args(), [bits("float32", 0, -0.0, -np.inf)], ["float32"]).sure
    meter = told(NEG_EXP, NEG_EXP.Args(), [bits("float32", 2.0**-70)], ["float32"])
    assert (meter.worst, meter.sure) == (0, False)
    meter = told(
        NEG_EXP, NEG_EXP.Args(), [bits("float32", 1000, 100, -1000, -200, 0.5)], ["float32"]
    )
    assert (meter.lost, meter.vanished) == (2, 2)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_nan_does_not_hide_what_float64_cannot_show_of_the_other_numbers(odd):
    numbers = bits("float32", odd, 1.0, 2.0)
    assert not told(AFFINE, AFFINE.Args(1, 2.0**-100), [numbers], ["float32"]).sure
    assert not told(NEG_EXP, NEG_EXP.Args(), [bits("float32", odd, 2.0**-70)], ["float32"]).sure
    assert told(AFFINE, AFFINE.Args(2, 1), [numbers], ["float32"]).sure
    assert told(NEG_EXP, NEG_EXP.Args(), [bits("float32", odd, 0)], ["float32"]).sure


def test_numbers_of_which_each_is_nan_or_infinite_or_zero_are_scaled_exactly():
    numbers = bits("float32", float("nan"), float("inf"), 0)
    assert told(AFFINE, AFFINE.Args(0.1), [numbers], ["float32"]).sure


def test_a_merge_is_exact_only_where_the_adapter_is_zero():
    base, a, b = (
        bits("float32", *v).reshape(s)
        for v, s in (((1, 2, 3, 4), (2, 2)), ((1, 1), (1, 2)), ((0, 0), (2, 1)))
    )
    assert told(LORA, LORA.Args(1, 1), [base, a, b], ["float32"] * 3).sure
    tiny = told(
        LORA,
        LORA.Args(1, 1),
        [base, a, bits("float32", 0, 2.0**-100).reshape(2, 1)],
        ["float32"] * 3,
    )
    assert (tiny.worst, tiny.sure) == (0, False)
    wide = [
        np.array(v).reshape(s).view("u8")
        for v, s in (((1, 2.0, 3, 1e308), (2, 2)), ((1, 1e308), (1, 2)), ((0, 1e10), (2, 1)))
    ]
    meter = told(LORA, LORA.Args(1, 1), wide, ["float64"] * 3)
    assert (meter.count, meter.sure, meter.lost) == (0, False, 1)
