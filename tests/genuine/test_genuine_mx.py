"""MXFP8 and MXFP4 as libraries stored whole models: decoded as they decode them, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import DATA, done, rules
from genuine import checkpoint, digests

PACKS = {"gpt-oss": "gpt-oss@bf16", "ct-mxfp8": "mxfp8@bf16", "modelopt-mxfp8": "mxfp8@bf16"}


def side(folder: Path, name: str = "config.json") -> Any:
    return json.loads((folder / name).read_text())


@pytest.mark.heavy  # torch encodes
@pytest.mark.parametrize("name", PACKS)
def test_a_pack_decodes_to_what_the_library_decodes_to(name: str, tmp_path: Path) -> None:
    made, out, back = checkpoint(name), tmp_path / "out", tmp_path / "back"
    done("apply", made.folder, "-o", out, "--to", PACKS[name])
    assert digests(out) == made.tensors
    assert "quantization_config" not in side(out)
    assert not (out / "hf_quant_config.json").exists()
    done("verify", out, "--source", made.folder)
    # and back: the same layers in the same dtypes and shapes, and the files beside
    done("downgrade", out, "-o", back, "--allow", "lossy")
    one, other = digests(back), digests(made.folder)
    assert {k: v.rpartition(" ")[0] for k, v in one.items()} == {
        k: v.rpartition(" ")[0] for k, v in other.items()
    }
    for file in made.folder.glob("*.json"):
        if "index" not in file.name:
            assert side(back, file.name) == side(made.folder, file.name)
    # what comes back stands for numbers that decode as before, or nearly
    done("verify", back, "--source", out)


@pytest.mark.heavy  # torch encodes
@pytest.mark.parametrize("name", ["ct-mxfp8", "modelopt-mxfp8"])
def test_a_plain_model_is_encoded_and_its_configuration_says_so(name: str, tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", plain, "--to", "mxfp8@bf16")
    (plain / "migrate.history.json").unlink()
    question = ["--from", "mxfp8@bf16", "--to", "mxfp8@mxfp8", "--allow", "lossy"]
    done("apply", plain, "-o", out, *question)
    assert digests(out).keys() == digests(checkpoint(name).folder).keys()
    said = side(out)["quantization_config"]
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "mxfp8-quantized")
    assert "lm_head" in said["ignore"]
    report = done("inspect", out, "--format", "json").json
    (group,) = report["number_formats"]
    assert group["readings"][0]["format"] == "mxfp8"
    assert group["contradiction"] is None


RULE = """keep: ["{{k...}}"]
rules:
  - name: linears
    from: {{weight: "{{m...}}.{weight}", scale: "{{m...}}.{scale}"}}
    to: "{{m}}.weight"
    via: [{{dequantize: {{codec: {codec}, dtype: bfloat16{more}}}}}]
"""
TORCHAO = ("_weight_qdata", "_weight_scale")
OTHERS = {
    "ct-mxfp4": ("mxfp4", ("weight_packed", "weight_scale"), ""),
    "torchao-mxfp4": ("mxfp4", TORCHAO, ", swizzled: true"),
    "torchao-mxfp8": ("mxfp8", TORCHAO, ", swizzled: true"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rule_file_decodes_to_what_the_library_decodes_to(name: str, tmp_path: Path) -> None:
    codec, (weight, scale), more = OTHERS[name]
    text = RULE.format(codec=codec, weight=weight, scale=scale, more=more)
    file = rules(tmp_path, text)
    done("apply", checkpoint(name).folder, "-o", tmp_path / "out", "--rules", file)
    assert digests(tmp_path / "out") == checkpoint(name).tensors


ENCODE = """keep: ["{{k...}}"]
rules:
  - name: linears
    from: "{{p...}}.{{w:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj}}.weight"
    to: {{weight: "{{p}}.{{w}}.codes", scale: "{{p}}.{{w}}.powers"}}
    via: [{{quantize: {{codec: {codec}, from: bfloat16, {more}}}}}]
"""
STORED = [
    ("mxfp4", "weight: float4_e2m1fn, scale: float8_e8m0fnu", ("float4_e2m1fn", "float8_e8m0fnu")),
    ("mxfp4", "weight: int8, scale: float32, rule: even", ("int8", "float32")),
    ("mxfp4", "form: blocks, rule: floor", ("uint8", "uint8")),
    ("mxfp4", "swizzled: true", ("uint8", "uint8")),
    ("mxfp8", "form: te, codes: float8_e4m3fn", ("uint8", "uint8")),
    ("mxfp8", "codes: float8_e5m2, scale: float32", ("float8_e5m2", "float32")),
    ("mxfp8", "codes: float8_e5m2, weight: uint8, swizzled: true", ("uint8", "uint8")),
]


@pytest.mark.heavy  # torch encodes
@pytest.mark.parametrize(("codec", "more", "dtypes"), STORED)
def test_numbers_return_from_every_form_in_which_they_can_be_stored(
    codec: str, more: str, dtypes: tuple[str, str], tmp_path: Path
) -> None:
    plain, out, back = (tmp_path / name for name in ("plain", "out", "back"))
    # numbers of the format itself: e2m1 numbers are e4m3 and e5m2 numbers as well
    text = RULE.format(codec="mxfp4", weight="weight_packed", scale="weight_scale", more="")
    done("apply", checkpoint("ct-mxfp4").folder, "-o", plain, "--rules", rules(tmp_path, text))
    (plain / "migrate.history.json").unlink()
    file = rules(tmp_path, ENCODE.format(codec=codec, more=more), "encode.yaml")
    done("apply", plain, "-o", out, "--rules", file, "--allow", "lossy")
    done("verify", out, "--source", plain, "--rules", file, "--allow", "lossy")
    found = {k: v.split()[0] for k, v in digests(out).items()}
    assert {v for k, v in found.items() if k.endswith(".codes")} == {TAGS[dtypes[0]]}
    assert {v for k, v in found.items() if k.endswith(".powers")} == {TAGS[dtypes[1]]}
    done("downgrade", out, "-o", back, "--rules", file)
    assert digests(back) == digests(plain)


TAGS = {
    "uint8": "U8", "int8": "I8", "float32": "F32", "float4_e2m1fn": "F4",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


TE = """rules:
  - name: rowwise
    from: {weight: "{w}._rowwise_data", scale: "{w}._rowwise_scale_inv"}
    to: "{w}"
    via: [{dequantize: {codec: mxfp8, dtype: float32, form: te, codes: float8_e4m3fn}}]
  - name: columnwise
    from: "{w}._columnwise_{part:data|scale_inv}"
    via: [{drop: {why: the other direction of a product has a copy of its own}}]
"""


def test_the_padded_form_of_transformer_engine_is_what_it_decodes_itself(tmp_path: Path) -> None:
    folder, out = DATA.parent / "te" / "tensors", tmp_path / "out.safetensors"
    question = ["--output-format", "safetensors", "--allow", "drop"]
    file = rules(tmp_path, TE)
    done("apply", folder / "mxfp8_96x160.pt", "-o", out, "--rules", file, *question)
    wanted = json.loads((folder / "expected.json").read_text())["mxfp8_96x160"]
    assert digests(out) == {"weight": f"F32 {wanted['shape']} {wanted['sha256_f32']}"}
