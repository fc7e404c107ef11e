"""`int4-rows` on a folder that ModelOpt exports, which is made when the test runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from commandline import ROOT, done, run
from safetensors.torch import load_file
from work import HANG

PEERS = ROOT / ".venv-peers" / "bin" / "python"
RULE = """
id: local/bf16/w4a16
title: ModelOpt's integers of four bits become bfloat16
lineage: local
edge: [w4a16, bf16]
files: {config.json: {quantization_config: null}, hf_quant_config.json: null}
keep: ["{k...}"]
rules:
  - name: linears
    from: {weight: "{m...}.weight", scale: "{m...}.weight_scale"%s}
    to: "{m}.weight"
    when: {weight: {dtype: [uint8]}}
    %s
    via: [{dequantize: {codec: int4-rows, dtype: bfloat16}}]
"""
INPUTS = RULE % (', pre_quant_scale: "{m...}.pre_quant_scale"', "optional: [pre_quant_scale]")


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.skipif(not PEERS.exists(), reason="ModelOpt is not installed: make peers")
def test_a_folder_of_modelopt_is_named_and_decoded(tmp_path: Path) -> None:
    folder, out, rule = tmp_path / "in", tmp_path / "out", tmp_path / "r.yaml"
    subprocess.run(
        [PEERS, ROOT / "tests" / "genuine" / "make_integers.py", folder],
        check=True, capture_output=True, timeout=HANG,
    )  # fmt: skip
    named = done("inspect", folder).out
    assert "int4-rows (ModelOpt), group 128" in named
    assert "groups of 128 (config.json#quantization_config)" in named
    rule.write_text(RULE % ("", ""))
    stranded = run("plan", folder, "--rules", rule, "--allow", "lossy")
    assert stranded.exit == 3
    assert "M408" in stranded.err
    assert "pre_quant_scale" in stranded.err
    rule.write_text(INPUTS)
    done("apply", folder, "-o", out, "--rules", rule, "--allow", "lossy")
    stored, made = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    computed = load_file(f"{folder}.safetensors")
    assert {key for key in computed if key in made} == {*computed}
    assert any(key.endswith("pre_quant_scale") for key in stored)
    for key, used in computed.items():
        low, high = stored[key] & 15, stored[key] >> 4
        codes = torch.stack([low, high], 1).flatten(0, 1).int()
        scale = stored[f"{key}_scale"].repeat_interleave(128, 1)
        inputs = stored.get(key.replace("weight", "pre_quant_scale"))
        if inputs is not None:
            scale = scale * inputs.float()
        numbers = (codes - 16 * (codes > 7)).float() * scale
        assert torch.equal(made[key].view(torch.int16), numbers.bfloat16().view(torch.int16))
        if inputs is None:
            # others' are multiplied into the norm before them
            continue
        # what the model computes with, up to the rounding of scales and of bfloat16
        assert (made[key].float() - used).abs().max() <= used.abs().max() / 64
    assert done("verify", out, "--source", folder, "--rules", rule, "--format", "json").json[
        "equal"
    ]
