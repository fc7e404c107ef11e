"""What packs make of a folder is loaded by transformers strictly, and gives the logits that
transformers itself gives of the folder as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import done
from genuine import checkpoint, digests

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

# folder -> layouts that it is brought to; transformers decodes these itself, those of
# compressed-tensors by that library
DECODED = {
    "hf-fp8-block": ["fp8@bf16"],
    "hf-fp8-block-ue8m0": ["fp8@bf16"],
    "hf-fp8-block-moe": ["fp8@bf16"],
    "gpt-oss": ["gpt-oss@bf16"],
    "deepseek-v4": ["deepseek-v4@bf16"],
    "ct-fp8-tensor": ["fp8@bf16"],
    "ct-fp8-channel": ["fp8@bf16"],
    "ct-fp8-block": ["fp8@bf16"],
    "ct-mxfp8": ["mxfp8@bf16"],
    "ct-nvfp4": ["nvfp4@bf16"],
    "ct-nvfp4a16": ["nvfp4@bf16"],
    "ct-mixed": ["compressed-tensors@bf16"],
    "ct-mixed-int": ["compressed-tensors@bf16"],
}
# what transformers cannot read
LOADED = {
    "modelopt-fp8": ["fp8@bf16"],
    "modelopt-fp8-channel": ["fp8@bf16"],
    "modelopt-nvfp4": ["nvfp4@bf16"],
    "modelopt-nvfp4-moe": ["nvfp4@bf16"],
    "modelopt-mxfp8": ["mxfp8@bf16"],
    "modelopt-mixed": ["nvfp4@bf16"],
}


def brought(name: str, layouts: list[str], into: Path) -> Path:
    """The folder in other layouts."""
    goals = [word for layout in layouts for word in ("--to", layout)]
    done(
        "apply", checkpoint(name).folder, "-o", into, *goals, "--allow", "lossy", "--allow", "drop"
    )
    return into


def logits(folder: Path, **more: Any) -> Any:
    """Of a few tokens, by the CPU; nothing is missing, left over or of another shape."""
    transformers = pytest.importorskip("transformers")
    import torch

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **more
    )
    # scales of inputs, which it does not need where it decodes
    left = {key for key in info["unexpected_keys"] if not more or ".input_" not in key}
    assert not left
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(torch.arange(16).reshape(2, 8)).logits


def as_it_was(name: str) -> Any:
    folder = checkpoint(name).folder
    if not name.startswith("ct-"):
        return logits(folder)
    pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    from transformers import CompressedTensorsConfig

    return logits(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize("name", DECODED)
def test_the_logits_are_those_of_the_folder_as_it_was(name: str, tmp_path: Path) -> None:
    import torch

    folder = brought(name, DECODED[name], tmp_path / "out")
    assert digests(folder) == checkpoint(name).tensors
    made = logits(folder)
    assert made.abs().max() > 0
    assert torch.equal(made, as_it_was(name))


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_cannot_read_it_reads_afterwards(name: str, tmp_path: Path) -> None:
    made = logits(brought(name, LOADED[name], tmp_path / "out"))
    assert made.isfinite().all()
    assert made.abs().max() > 0
