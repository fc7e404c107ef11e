"""What no included lineage reads is decoded by a few lines of rules: torchao's names, and mixtures
of formats.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commandline import ROOT, done, rules
from genuine import checkpoint, digests

TORCHAO = """
  - name: linears
    from: {{weight: "{{m...}}._weight_qdata", scale: "{{m...}}._weight_scale"{more}}}
    to: "{{m}}.weight"
    via: [{{dequantize: {{dtype: bfloat16, {codec}}}}}]
"""
WHOLE = ', global: "{m...}._weight_per_tensor_scale"'
MIXED = """
  - name: rows
    from: {weight: "{p...}.self_attn.{w}.weight", scale: "{p...}.self_attn.{w}.weight_scale"}
    to: "{p}.self_attn.{w}.weight"
    via: [{dequantize: {codec: fp8, dtype: bfloat16}}]
  - name: groups
    from: {weight: "{p...}.down_proj.weight", scale: "{p...}.down_proj.weight_scale"}
    to: "{p}.down_proj.weight"
    when: {weight: {dtype: [float8_e4m3fn]}}
    via: [{dequantize: {codec: mxfp8, dtype: bfloat16}}]
  - name: two levels
    from:
      weight: "{p...}.{w:gate|up}_proj.weight_packed"
      scale: "{p...}.{w}_proj.weight_scale"
      global: "{p...}.{w}_proj.weight_global_scale"
    to: "{p}.{w}_proj.weight"
    via: [{dequantize: {codec: nvfp4, dtype: bfloat16, form: compressed-tensors}}]
"""
FOURS = """
  - name: groups
    from: {weight: "{m...}.weight_packed", scale: "{m...}.weight_scale"}
    to: "{m}.weight"
    via: [{dequantize: {codec: mxfp4, dtype: bfloat16}}]
"""
INTEGERS = """
  - name: words
    from:
      weight: "{p...}.{w:q_proj|k_proj|v_proj|o_proj|up_proj}.weight_packed"
      scale: "{p...}.{w}.weight_scale"
      shape: "{p...}.{w}.weight_shape"
      zero: "{p...}.{w}.weight_zero_point"
    to: "{p}.{w}.weight"
    optional: [zero]
    via: [{dequantize: {codec: int-pack, dtype: bfloat16}}]
  - name: eight bits
    from: {weight: "{p...}.gate_proj.weight", scale: "{p...}.gate_proj.weight_scale"}
    to: "{p}.gate_proj.weight"
    via: [{dequantize: {codec: int8, dtype: bfloat16}}]
  - name: rows
    from: {weight: "{p...}.down_proj.weight", scale: "{p...}.down_proj.weight_scale"}
    to: "{p}.down_proj.weight"
    via: [{dequantize: {codec: fp8, dtype: bfloat16}}]
"""
RULES = {
    "ct-mixed-int": INTEGERS,
    "torchao-fp8-row": TORCHAO.format(codec="codec: fp8", more=""),
    "torchao-fp8-tensor": TORCHAO.format(codec="codec: fp8", more=""),
    "torchao-mxfp8": TORCHAO.format(codec="codec: mxfp8, swizzled: true", more=""),
    "torchao-mxfp4": TORCHAO.format(codec="codec: mxfp4, swizzled: true", more=""),
    "torchao-nvfp4": TORCHAO.format(codec="codec: nvfp4, swizzled: true", more=WHOLE),
    "ct-mxfp4": FOURS,
    "ct-mixed": MIXED,
}
# torchao's objects in pickles, and what their `dequantize(torch.bfloat16)` gives
PICKLES = {
    "float8_row": (
        "codec: fp8", "", "916ad2b74e64d929715888fbf5be3846e01b74fca1d87c10c3930a6f5b9f3e15"
    ),
    "mx": ("codec: mxfp8", "", "b8fcf49faef29556d5d9eecb26302db09544f18b111dcee4d8d28272f53971c2"),
    "nvfp4_two": (
        "codec: nvfp4", ', global: "{m...}.per_tensor_scale"',
        "d04461ab0bba5318e22bbe2baf72e807ef52b692f4e14bb889155dcf37481d25",
    ),
}  # fmt: skip
HEAD = 'keep: ["{k...}"]\nfiles: {config.json: {quantization_config: null}}\nrules:'


@pytest.mark.parametrize("name", RULES)
def test_a_few_lines_of_rules_decode_it(name: str, tmp_path: Path) -> None:
    file = rules(tmp_path, HEAD + RULES[name])
    source, out = checkpoint(name), tmp_path / "out"
    done("apply", source.folder, "-o", out, "--rules", file, "--allow", "lossy")
    assert digests(out) == source.tensors
    verified = done("verify", out, "--source", source.folder, "--rules", file, "--format", "json")
    assert verified.json["equal"] is True


@pytest.mark.parametrize("name", PICKLES)
def test_objects_of_torchao_in_a_pickle_are_decoded_without_it(name: str, tmp_path: Path) -> None:
    codec, more, digest = PICKLES[name]
    text = f"""
rules:
  - name: objects
    from: {{weight: "{{m...}}.qdata", scale: "{{m...}}.scale"{more}}}
    to: "{{m}}"
    via: [{{dequantize: {{dtype: bfloat16, {codec}}}}}]
"""
    out = tmp_path / "out.safetensors"
    source = ROOT / "tests" / "data" / "torchao" / f"{name}.pt"
    done("apply", source, "-o", out, "--rules", rules(tmp_path, text), "--allow", "lossy")
    assert digests(out) == {"weight": f"BF16 [32, 64] {digest}"}
