"""A configuration that says something else of encoded tensors than they are is in the plan."""

from __future__ import annotations

import pytest
from header_files import write_headers

import migrate

TENSORS = {
    "a.q.weight": ("float8_e4m3fn", (512, 512)), "a.q.weight_scale_inv": ("float32", (4, 4)),
    "a.k.weight": ("float8_e4m3fn", (512, 512)), "a.k.weight_scale_inv": ("float32", (4, 4)),
    "a.norm.weight": ("bfloat16", (512,)),
}  # fmt: skip
DECODE = """
id: m/b/decode
title: Decode
lineage: m
edge: [a, b]
keep: ["{p}.norm.weight"]
rules:
  - name: linears
    from: {weight: "{p...}.{w:q|k}.weight", scale: "{p...}.{w}.weight_scale_inv"}
    to: "{p}.{w}.weight"
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128]}}]
"""
RENAME = """
id: m/b/rename
title: Rename
lineage: m
edge: [a, b]
keep: ["{p}.norm.weight"]
rules: [{name: all, from: "a.{w:q|k}.{leaf}", to: "b.{w}.{leaf}"}]
"""


def warnings(tmp_path, quantization, rule=DECODE):
    config = {"model_type": "m"} | ({"quantization_config": quantization} if quantization else {})
    folder = write_headers(tmp_path / "m", TENSORS, config)
    (tmp_path / "rule.yaml").write_text(rule)
    plan = migrate.plan(folder, rules=[tmp_path / "rule.yaml"], allow={"lossy"})
    return [(w["code"], w["message"]) for w in plan.document["warnings"]]


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "fp8-block, 8 bits, blocks of 64 x 64 by config.json#quantization_config",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits, groups of 128"),
    ],
    ids=["block", "format"],
)
def test_tensors_that_are_decoded_otherwise_than_configured_are_named(tmp_path, quantization, said):
    ((code, message),) = warnings(tmp_path, quantization)
    assert code == "M519"
    assert message.startswith(
        "2 modules (a.k, a.q) are decoded as fp8-block, blocks of 128 x 128, and " + said
    )


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["a.q"]},
        None,
    ],
    ids=["the same", "left out", "none"],
)
def test_a_configuration_that_does_not_contradict_is_no_matter(tmp_path, quantization):
    assert warnings(tmp_path, quantization) == []


def test_a_configuration_of_tensors_that_only_move_is_no_matter(tmp_path):
    assert warnings(tmp_path, {"quant_method": "fp8", "weight_block_size": [64, 64]}, RENAME) == []


def test_a_configuration_that_cannot_be_read_is_a_warning(tmp_path):
    ((code, message),) = warnings(tmp_path, {"quant_method": "fp8", "weight_block_size": "large"})
    assert (code, "weight_block_size" in message) == ("M519", True)
