"""Value checks say yes only to equal bytes, and where not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from raw_files import random_raw, whole, write_source

from migrate.core import view as views
from migrate.core.errors import CheckpointError
from migrate.core.spec import spec
from migrate.planning.graph import Tensor, ValueCheck
from migrate.running import checks

SHAPE = (1000, 1200)


def check(kind: str, tensors: list[Tensor], value: float | None = None) -> ValueCheck:
    return ValueCheck(
        kind,
        tuple(tensors),
        value,
        "M404",
        "the members of `same` are not equal",
        "rule one",
        ("a", "b"),
    )


def test_equal_tensors_pass_and_the_first_difference_is_named(tmp_path: Path) -> None:
    a = random_raw(np.random.default_rng(0), "bfloat16", SHAPE)
    b = a.copy()
    b[999, 7] ^= 256
    source = write_source(
        tmp_path,
        {
            "a": ("bfloat16", a),
            "same": ("bfloat16", a),
            "b": ("bfloat16", b),
            "t": ("bfloat16", np.ascontiguousarray(a.T)),
        },
    )
    one, same, other = (whole(k, "bfloat16", SHAPE) for k in ("a", "same", "b"))
    turned = Tensor(
        spec("bfloat16", SHAPE), views.permute(views.stored(0, SHAPE[::-1]), (1, 0)), ("t",)
    )
    assert checks.evaluate_check(check("equal", [one, same, turned]), source) == (True, "")
    met, detail = checks.evaluate_check(check("equal", [one, same, other]), source)
    assert not met
    assert detail == "a and b (bfloat16 [1000, 1200]) differ first at [999, 7]"
    assert checks.tensors_equal(one, turned, source)
    assert not checks.tensors_equal(one, other, source)
    assert not checks.tensors_equal(one, whole("t", "bfloat16", SHAPE[::-1]), source)
    assert not checks.evaluate_check(
        check("equal", [one, whole("t", "bfloat16", SHAPE[::-1])]), source
    )[0]


@pytest.mark.parametrize(
    ("dtype", "bits"), [("float32", 0x3F800000), ("bfloat16", 0x3F80), ("uint8", 1)]
)
def test_filled_elements_pass_and_one_that_differs_does_not(
    tmp_path: Path, dtype: str, bits: int
) -> None:
    a = np.full((1100, 1300), bits, {"float32": "u4", "bfloat16": "u2", "uint8": "u1"}[dtype])
    source = write_source(tmp_path, {"a": (dtype, a)})
    tensor = Tensor(
        spec(dtype, (1100, 1299)), views.slice_(views.stored(0, a.shape), 1, 1, 1300), ("a",)
    )
    assert checks.evaluate_check(check("filled", [tensor], 1), source) == (True, "")
    assert not checks.evaluate_check(check("filled", [tensor], 2), source)[0]
    a[1099, 1299] ^= 1
    source = write_source(tmp_path / "b", {"a": (dtype, a)})
    assert not checks.evaluate_check(check("filled", [tensor], 1), source)[0]


def test_an_empty_tensor_is_filled_with_anything(tmp_path: Path) -> None:
    source = write_source(tmp_path, {"a": ("float32", np.zeros((0, 3), "u4"))})
    assert checks.evaluate_check(check("filled", [whole("a", "float32", (0, 3))], 0), source)[0]


def test_all_failed_checks_come_out_at_once(tmp_path: Path) -> None:
    source = write_source(
        tmp_path, {"a": ("uint8", np.zeros(3, "u1")), "b": ("uint8", np.ones(3, "u1"))}
    )
    wrong = check("equal", [whole(k, "uint8", (3,)) for k in ("a", "b")])
    with pytest.raises(CheckpointError) as caught:
        checks.require_checks([wrong, wrong], source)
    assert [d.code for d in caught.value.diagnostics] == ["M404", "M404"]
    assert caught.value.diagnostics[0].notes == (
        "rule one: a, b",
        "a and b (uint8 [3]) differ first at [0]",
    )
