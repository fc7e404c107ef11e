"""What transformers makes of its checkpoints when it loads them, inferred from values alone: the
rules found of one pair do the same to another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from import_proof import differences, loaded, saved, stored

import migrate

pytestmark = pytest.mark.libraries
pytest.importorskip("transformers")


# of each kind of transform some
SAMPLE = (
    "mixtral", "qwen2_moe", "deepseek_v3", "llava", "LlavaModel", "ernie4_5_vl_moe",
    "Molmo2TextModel",
    "inkling2", "inkling2_text", "nemo_speechlm", "qwen3_vl_moe", "qwen4_exp_text", "radio", "esm",
    "deformable_detr", "flint", "mimo_v2_flash", "GPTNeoXForCausalLM", "ViTModel", "timesfm2_5",
    "phimoe", "olmoe", "detr",
)  # fmt: skip


def pair(entry: str, folder: Path, seed: int) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of random values, and what the library loads of it."""
    import torch
    from safetensors.torch import save_file

    cls, hub = saved(entry, folder)
    (file,) = hub.glob("*.safetensors")
    dice = torch.Generator().manual_seed(seed)
    values = {
        key: torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
        for key, tensor in stored(hub).items()
    }
    save_file(values, file, metadata={"format": "pt"})
    # tied tensors are one, and parameters are no part of a graph
    return hub, {key: tensor.detach() for key, tensor in loaded(cls, hub).items()}


@pytest.mark.parametrize("entry", SAMPLE)
def test_rules_found_by_values_hold_for_other_values(entry: str, tmp_path: Path) -> None:
    hub, wanted = pair(entry, tmp_path / "one", 1)
    file = tmp_path / "rules.yaml"
    migrate.new(file, from_diff=(hub, wanted))
    other, expected = pair(entry, tmp_path / "two", 2)
    migrate.apply(other, tmp_path / "made", rules=[file], allow={"drop"})
    assert not differences(stored(tmp_path / "made"), expected)
