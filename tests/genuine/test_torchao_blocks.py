"""Blocks of 128 x 128 as torchao makes them, of weights of one column of blocks too: its own
`dequantize` says what comes out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.libraries
# the weight of each module, and what has a scale
SHAPES = {
    "narrow": ((384, 128), "block"),
    "rows": ((384, 128), "row"),
    "wide": ((128, 384), "block"),
    "both": ((256, 384), "block"),
    "one": ((128, 128), "block"),
}


def test_blocks_and_rows_are_told_apart_by_lengths(tmp_path: Path) -> None:
    ao: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    random, tensors, wanted = torch.Generator().manual_seed(3), {}, {}
    for name, (shape, what) in SHAPES.items():
        of = ao.PerRow() if what == "row" else ao.PerBlock([128, 128])
        numbers = torch.randn(*shape, generator=random).bfloat16()
        made = ao.Float8Tensor.from_hp(numbers, granularity=of)
        tensors[f"l.{name}._weight_qdata"] = made.qdata
        tensors[f"l.{name}._weight_scale"] = made.scale
        wanted[f"l.{name}.weight"] = made.dequantize(torch.bfloat16)
    assert tensors["l.narrow._weight_scale"].shape == (3, 1)
    source, out = tmp_path / "old.safetensors", tmp_path / "new.safetensors"
    save_file(tensors, source)
    done(
        "apply", source, "-o", out, "--from", "fp8@torchao", "--to", "fp8@bf16", "--allow", "lossy"
    )
    found = load_file(out)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].view(torch.int16), tensor.view(torch.int16)), key
