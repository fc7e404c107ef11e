"""Floats of eight bits by a table of the codes of all numbers, and by quotients that are rounded
once, against torch's casts and plain arithmetic.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from migrate.codecs.kit import encoding_boxes, shared_scale
from migrate.codecs.kit.encoding import TensorEncoding
from migrate.codecs.kit.layout import Grid, NumberLayout, floats, plain, times
from migrate.codecs.kit.magnitudes import widened
from migrate.codecs.kit.rounding import looked_up
from migrate.codecs.kit.scale_rules import ScaleRule, rounded_to
from migrate.core.spec import Spec
from migrate.running.error_statistics import Tally

TYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
RULES = (
    ScaleRule("float", "compressed-tensors", "bfloat16", "tensor"),
    ScaleRule("float", "modelopt", "float32", "tensor"),
    ScaleRule("float", "torchao", "float32", "tensor"),
    ScaleRule("float", "hf"),
    ScaleRule("float", "deepseek", "pow2"),
)


def of_all(rule: ScaleRule, codes: str, spec: Spec, non_finite: str = "refuse") -> TensorEncoding:
    """A tensor with one scale."""
    layout = NumberLayout("fp8", floats(codes), plain(codes), times(Grid("scale", (0, 0))))
    scale = Spec("float32", (1,) * len(spec.shape))
    parts = {"weight": Spec(codes, spec.shape), "scale": scale}
    return TensorEncoding(layout, spec, parts, rule, non_finite)


def every(dtype: str, most: int) -> Any:
    """All numbers of 16 bits, of both signs, up to the one with the bits `most`."""
    below = np.arange(most + 1).astype("u2")
    both = np.concatenate([below, below | 0x8000])
    return both.reshape(2, -1)


def made(encoding: TensorEncoding, numbers: Any, meter: Any = None) -> Any:
    """The codes."""
    box = tuple((0, n) for n in numbers.shape)
    survey = encoding.survey(numbers, box) if encoding.surveyed else None
    out = np.zeros(numbers.shape, "u1")
    encoding.encode(numbers, "weight", box, out, meter, {}, survey)
    return out


def without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorEncoding, "_by_table", lambda *given: None)


@pytest.mark.heavy
@pytest.mark.parametrize("surveyed", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.like}-{rule.rounding}")
@pytest.mark.parametrize("codes", TYPES)
def test_a_table_has_the_codes_that_torch_casts(
    codes: str, rule: ScaleRule, surveyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if surveyed:
        monkeypatch.setattr(encoding_boxes, "TILE_MOST", 8)
    # a power of two, what 448 goes into, and one more; amid bfloat16 and near its ends
    for dtype, most in (
        ("bfloat16", 0x3F80), ("bfloat16", 0x3CE0), ("bfloat16", 0x7F13), ("bfloat16", 0x0955),
        ("float16", 0x2C9D), ("float16", 0x7BFF),
    ):  # fmt: skip
        numbers = every(dtype, most)
        encoding = of_all(rule, codes, Spec(dtype, numbers.shape))
        assert encoding.surveyed == surveyed
        tallies, stored = (Tally(), Tally()), []
        taken: list[int] = []
        with monkeypatch.context() as patched:
            given = shared_scale.fill_codes
            patched.setattr(
                shared_scale, "fill_codes", lambda *a, given=given: taken.append(1) or given(*a)
            )
            stored.append(made(encoding, numbers, tallies[0]))
        with monkeypatch.context() as patched:
            without_table(patched)
            stored.append(made(encoding, numbers, tallies[1]))
        assert taken, (dtype, most)
        assert np.array_equal(*stored), (dtype, most)
        assert asdict(tallies[0]) == asdict(tallies[1])


def test_a_few_numbers_are_looked_up_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = every("bfloat16", 0x3F80)[:, -200:]
    encoding = of_all(RULES[1], TYPES[0], Spec("bfloat16", numbers.shape))
    few = made(encoding, numbers)
    monkeypatch.setattr(shared_scale, "LARGE", 0)
    assert np.array_equal(made(encoding, numbers), few)
    # 448 and -448 at the ends
    assert few[:, -1].tolist() == [0x7E, 0xFE]


@pytest.mark.heavy
@pytest.mark.parametrize("non_finite", ["keep", "saturate"])
def test_what_is_not_finite_is_left_to_casts(
    non_finite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_scale, "fill_codes", None)
    numbers = every("bfloat16", 0x7F7F)[:, -64:]
    numbers[0, 5:7] = 0x7F80, 0x7FC0
    encoding = of_all(RULES[1], TYPES[0], Spec("bfloat16", numbers.shape), non_finite)
    codes = made(encoding, numbers)
    # the scale that is kept is NaN
    assert codes[0, 6] == 0x7F
    assert (codes[0, 5] == 0x7E) == (non_finite == "saturate")


@pytest.mark.heavy
@pytest.mark.parametrize("codes", TYPES)
def test_quotients_of_rows_are_rounded_to_bfloat16_once(codes: str) -> None:
    layout = NumberLayout("fp8", floats(codes), plain(codes), times(Grid("scale", (1, 0))))
    rng = np.random.default_rng(0)
    tops = rng.integers(0x3000, 0x4800, 96)
    numbers = (tops[:, None] - rng.integers(0, 0x700, (96, 512))).astype("u2")
    numbers[:, 7], numbers[3] = tops, 0
    numbers[:, ::3] |= 0x8000
    parts = {"weight": Spec(codes, numbers.shape), "scale": Spec("bfloat16", (96, 1))}
    rule = ScaleRule("float", "compressed-tensors", "bfloat16", "row")
    encoding = TensorEncoding(layout, Spec("bfloat16", numbers.shape), parts, rule)
    wide = widened(numbers, "bfloat16")
    scales = rule.scales(floats(codes), "bfloat16", np.abs(wide).max(1, keepdims=True))
    wanted = looked_up(rounded_to(wide / scales.factor, "bfloat16"), codes)
    assert np.array_equal(made(encoding, numbers), wanted)


def test_one_scale_for_all_needs_no_torch() -> None:
    code = (
        "import sys; import numpy as np\n"
        "from migrate.codecs import get\n"
        "from migrate.core.spec import Spec\n"
        "codec = get('fp8')\n"
        "args, spec = codec.Args(granularity='tensor'), Spec('bfloat16', (300, 256))\n"
        "numbers = np.arange(300 * 256).astype('u2').reshape(300, 256) % 0x4000\n"
        "out = np.zeros((300, 256), 'u1')\n"
        "codec.encode(args, numbers, spec, 0, ((0, 300), (0, 256)), out, None, {})\n"
        "assert out.any(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
