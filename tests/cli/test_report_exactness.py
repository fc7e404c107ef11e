"""What a report may call exact: only what was measured whole, and of what the run computed
itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import done, rules
from safetensors.torch import save_file

DECODE = """keep: ["{k...}"]
rules:
  - name: lin
    from: {weight: "{p...}.weight", scale: "{p...}.weight_scale_inv"}
    to: "{p}.weight"
    via: [{dequantize: {codec: fp8-block, dtype: float16}}]
"""


def report(tmp: Path, scale: torch.Tensor, high: int = 128) -> tuple[str, dict]:
    """The line about values, and the one tensor of the report, of decoding ones of blocks with
    these scales.
    """
    rows, columns = high * scale.shape[0], 128 * scale.shape[1]
    (tmp / "old").mkdir()
    codes = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale_inv": scale}, tmp / "old" / "model.safetensors")
    file = rules(tmp, DECODE)
    out = done(
        "apply",
        tmp / "old",
        "-o",
        tmp / "new",
        "--rules",
        file,
        "--allow",
        "lossy",
        "--report",
        tmp / "report.json",
    )
    (tensor,) = json.loads((tmp / "report.json").read_text())["tensors"]
    return out.out, tensor


def test_a_sample_in_which_nothing_was_rounded_is_not_called_exact(tmp_path: Path) -> None:
    scale = torch.ones(16, 16)
    # between the rows that are measured: 0, 509, 1018 and so on
    scale[1], scale[2] = 1e6, 1e-9
    text, tensor = report(tmp_path, scale)
    assert 0 < tensor["elements_measured"] < tensor["elements"]
    assert tensor["exact"] is False
    sample = f"measured on {tensor['elements_measured']:,} of {tensor['elements']:,} elements"
    assert (
        f": max error at least 0, 0 of the block's amax ({sample}), 262,144 saturated, 262,144 "
        "underflowed" in text
    )


def test_what_becomes_infinite_between_the_rows_that_are_measured_is_counted(
    tmp_path: Path,
) -> None:
    scale = torch.ones(16, 16)
    scale[1, 3] = 1e6
    text, tensor = report(tmp_path, scale)
    assert (tensor["saturated"], tensor["non_finite"]) == (128 * 128, 128 * 128)
    assert "16,384 saturated, 0 underflowed, 16,384 not finite" in text


def test_what_becomes_zero_between_the_rows_that_are_measured_is_counted(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    weight = torch.ones(2048, 2048)
    weight[1:101] = 1e-6
    weight[1, :5] = 0
    save_file({"w": weight}, tmp_path / "old" / "model.safetensors")
    encode = (
        "rules:\n  - {name: q, from: w, to: {weight: w, scale: s}, via: [{quantize: {codec: "
        "fp8-block}}]}\n"
    )
    saved = tmp_path / "report.json"
    out = done(
        "apply",
        tmp_path / "old",
        "-o",
        tmp_path / "new",
        "--rules",
        rules(tmp_path, encode),
        "--allow",
        "lossy",
        "--report",
        saved,
    )
    (tensor,) = json.loads(saved.read_text())["tensors"]
    assert tensor["elements_measured"] < tensor["elements"]
    assert tensor["underflowed"] == 100 * 2048 - 5
    assert ": max error at least 0, 0 of the block's amax (measured on " in out.out
    assert " elements), 0 saturated, 204,795 underflowed" in out.out


@pytest.mark.parametrize("via", ["affine: {mul: 0.1}", "neg_exp: {}", "cast: {to: bfloat16}"])
def test_an_op_without_blocks_is_compared_with_the_tensor(tmp_path: Path, via: str) -> None:
    text, (tensor,) = computed(tmp_path, via, torch.tensor([0.3, 1.7]))
    assert (
        f"max error {tensor['max_abs_error']:.3g}, {tensor['max_relative_error']:.3g} of the "
        "tensor's amax, SQNR " in text
    )


COMPUTE = """keep: ["{k...}"]
rules:
  - name: a
    from: "a{n}"
    to: "b{n}"
    via: [{%s}]
"""


def computed(tmp: Path, via: str, *numbers: torch.Tensor) -> tuple[str, list[dict]]:
    (tmp / "old").mkdir(parents=True)
    save_file({f"a{i}": x for i, x in enumerate(numbers)}, tmp / "old" / "model.safetensors")
    file = rules(tmp, COMPUTE % via)
    out = done(
        "apply",
        tmp / "old",
        "-o",
        tmp / "new",
        "--rules",
        file,
        "--allow",
        "lossy",
        "--report",
        tmp / "report.json",
    )
    return out.out, json.loads((tmp / "report.json").read_text())["tensors"]


@pytest.mark.parametrize("via", ["affine: {mul: 0.1}", "neg_exp: {}"])
def test_float64_results_are_not_measured_and_not_called_exact(tmp_path: Path, via: str) -> None:
    text, (tensor,) = computed(
        tmp_path, via, torch.tensor([0.5, 800.0, float("inf")], dtype=torch.float64)
    )
    assert (tensor["exact"], tensor["elements_measured"], tensor["max_abs_error"]) == (
        False,
        0,
        None,
    )
    lost = 1 if "neg_exp" in via else 0
    assert (tensor["saturated"], tensor["non_finite"]) == (lost, lost)
    assert f"tensor: error not measured, {lost} saturated" in text


def test_affine_is_compared_with_what_the_rule_says_and_not_with_what_float32_made_of_it(
    tmp_path: Path,
) -> None:
    _, (tensor,) = computed(tmp_path, "affine: {mul: 0.1}", torch.tensor([3.0]))
    assert tensor["max_abs_error"] == abs(3 * 0.1 - float(np.float32(3) * np.float32(0.1)))
    assert tensor["exact"] is False
    _, (tensor,) = computed(tmp_path / "two", "affine: {mul: 2}", torch.tensor([3.0e38]))
    assert (tensor["saturated"], tensor["non_finite"]) == (1, 1)


def test_affine_is_exact_only_where_the_sum_is(tmp_path: Path) -> None:
    # in float64, too, 1 + 2^-60 is 1
    _, tensors = computed(
        tmp_path, "affine: {add: 1}", torch.tensor([0.5]), torch.tensor([2.0**-60])
    )
    assert [t["exact"] for t in tensors] == [True, False]


def test_integers_that_float64_does_not_hold_are_not_called_exact(tmp_path: Path) -> None:
    _, tensors = computed(
        tmp_path, "cast: {to: float64}", torch.tensor([2**53]), torch.tensor([2**53 + 1])
    )
    assert [(t["exact"], t["elements_measured"]) for t in tensors] == [(True, 1), (False, 0)]


def test_what_is_measured_whole_and_not_rounded_is_exact(tmp_path: Path) -> None:
    text, tensor = report(tmp_path, torch.ones(1, 1), high=64)
    assert (tensor["elements_measured"], tensor["exact"]) == (64 * 128, True)
    assert "tensor: exact" in text


def test_numbers_that_decoding_makes_zero_or_infinite_are_counted(tmp_path: Path) -> None:
    every = report(tmp_path, torch.tensor([[1e6, 1.0], [1.0, 1e-9]]))[1]
    assert every["exact"] is False
    assert every["saturated"] == every["non_finite"] == 128 * 128
    assert every["elements_measured"] < every["elements"]
    assert every["underflowed"] == 128 * 128
