"""What becomes of the scales of a KV cache, beside weights of each pack that decodes a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_scales import add_scales
from commandline import done, run
from genuine import checkpoint, digests

from migrate.rules.files import files_below, shipped_files, shipped_folder

DECODED = {
    "ct-mxfp8": "mxfp8@bf16",
    "modelopt-mxfp8": "mxfp8@bf16",
    "kimi-k2": "kimi-k2@bf16",
    "torchao-fp8-row": "fp8@bf16",
    "awq-gemm": "awq@bf16",
    "gptq-sym": "gptq@fp16",
    "gpt-oss": "gpt-oss@bf16",
    "deepseek-v4": "deepseek-v4@bf16",
    "bnb-nf4": "bnb@bf16",
    "bnb-int8": "bnb@bf16",
}
SCALES = [f"model.layers.0.self_attn.{what}" for what in ("k_scale", "v_scale", "k_zero_point")]


@pytest.mark.heavy
@pytest.mark.parametrize("name", DECODED)
def test_scales_of_the_cache_go_with_the_configuration(name: str, tmp_path: Path) -> None:
    source = add_scales(checkpoint(name).folder, tmp_path / "in", SCALES, [1])
    to = ("--to", DECODED[name], "--allow", "lossy")
    failed = run("apply", source, "-o", tmp_path / "x", *to)
    assert failed.exit == 3
    assert "--allow drop" in failed.err
    assert not (tmp_path / "x").exists()
    plan = done("plan", source, *to, "--allow", "drop")
    assert " - model.layers.0.self_attn." in plan.out
    assert "it scales what attention keeps" in plan.out
    assert ", 3 dropped" in plan.out
    done("apply", source, "-o", tmp_path / "plain", *to, "--allow", "drop")
    done("apply", checkpoint(name).folder, "-o", tmp_path / "without", *to)
    assert digests(tmp_path / "plain") == digests(tmp_path / "without")


def test_all_packs_that_leave_plain_weights_drop_them() -> None:
    home = shipped_folder()
    left = set()
    for lineage in sorted(path for path in home.iterdir() if path.is_dir()):
        for file in shipped_files(files_below(lineage)) or ():
            patch = file.model.files.get("config.json")
            if not isinstance(patch, dict) or patch.get("quantization_config", "") is not None:
                continue
            names = [rule.name for rule in file.model.rules]
            if "the cache of keys and values" not in names:
                left.add(file.model.id)
    # stamps of it hold the hash of what its rules mean
    assert left == {"deepseek-v3/bf16/dequantize"}
