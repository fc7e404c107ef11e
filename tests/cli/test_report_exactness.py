"""What a report may call exact: only what was measured whole, and of what the run computed itself."""

from __future__ import annotations

import json
from pathlib import Path

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
    """The line about values, and the one tensor of the report, of decoding ones of blocks with these scales."""
    rows, columns = high * scale.shape[0], 128 * scale.shape[1]
    (tmp / "old").mkdir()
    codes = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale_inv": scale}, tmp / "old" / "model.safetensors")
    file = rules(tmp, DECODE)
    out = done("apply", tmp / "old", "-o", tmp / "new", "--rules", file, "--allow", "lossy", "--report", tmp / "report.json")
    (tensor,) = json.loads((tmp / "report.json").read_text())["tensors"]
    return out.out, tensor


def test_a_sample_in_which_nothing_was_rounded_is_not_called_exact(tmp_path: Path) -> None:
    scale = torch.ones(16, 16)
    # between the rows that are measured: 0, 509, 1018 and so on
    scale[1], scale[2] = 1e6, 1e-9
    text, tensor = report(tmp_path, scale)
    assert 0 < tensor["elements_measured"] < tensor["elements"]
    assert tensor["exact"] is False
    assert f"measured on {tensor['elements_measured']:,} of {tensor['elements']:,} elements" in text


def test_what_is_measured_whole_and_not_rounded_is_exact(tmp_path: Path) -> None:
    text, tensor = report(tmp_path, torch.ones(1, 1), high=64)
    assert (tensor["elements_measured"], tensor["exact"]) == (64 * 128, True)
    assert "tensor: exact" in text


def test_numbers_that_decoding_makes_zero_or_infinite_are_counted(tmp_path: Path) -> None:
    every = report(tmp_path, torch.tensor([[1e6, 1.0], [1.0, 1e-9]]))[1]
    rows = every["elements_measured"] // 256
    assert every["exact"] is False
    assert every["saturated"] == 128 * len([r for r in range(rows) if r * (256 // rows) < 128])
    assert every["underflowed"] == 128 * len([r for r in range(rows) if r * (256 // rows) >= 128])
