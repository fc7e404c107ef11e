"""`reciprocal`: quotients that are rounded once, and numbers that have none."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from migrate import ops
from migrate.core.spec import Spec
from migrate.elements import numbers
from migrate.elements.codes import FLOATS
from migrate.elements.raw import carrier
from migrate.ops.base import Loss, OpCall, OpError

OP: Any = ops.get("reciprocal")


def run(raw: Any, dtype: str) -> Any:
    out = np.empty(raw.shape, carrier(dtype))
    box = tuple((0, n) for n in raw.shape)
    OP.compute(OP.Args(), [raw], [Spec(dtype, raw.shape)], 0, box, out)
    return out


def of(dtype: str, *values: float) -> Any:
    return numbers.encode(np.array(values, "f8"), dtype)[0].astype(carrier(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_quotients_are_correctly_rounded(dtype: str) -> None:
    drawn = np.random.default_rng(7).uniform(-900, 900, 300)
    raw = of(dtype, *drawn)
    made = numbers.numbers(run(raw, dtype), dtype)
    form = FLOATS[dtype]
    for x, y in zip(numbers.numbers(raw, dtype), made, strict=True):
        exact = 1 / Fraction(float(x))
        power = max(int(np.frexp(float(exact))[1]) - 1, 1 - form.bias) - form.mantissa
        unit = Fraction(2) ** power
        assert Fraction(float(y)) == round(exact / unit) * unit


def test_powers_of_two_come_back_and_others_need_not() -> None:
    raw = of("float32", 0.25, -8, 1, 2.0**100)
    assert (run(run(raw, "float32"), "float32") == raw).all()
    assert OP.loss(OP.Args()) is Loss.LOSSY
    assert OP.invert(OP.Args()) == OpCall("reciprocal", OP.Args())


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", 0.0),
        ("float32", -0.0),
        ("float32", float("inf")),
        ("float32", float("nan")),
        ("float32", 1e-40),
        ("float16", 2.0**-17),
    ],
)
def test_a_number_without_a_reciprocal_is_refused_with_its_index(dtype: str, value: float) -> None:
    with pytest.raises(OpError) as caught:
        run(of(dtype, 1, 2, value, 0), dtype)
    assert caught.value.code == "M406"
    assert "at [2] has no reciprocal" in caught.value.message
