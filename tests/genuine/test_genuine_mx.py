"""MXFP8 and MXFP4 as libraries stored whole models: decoded as they decode them, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import done, rules
from genuine import checkpoint, digests

PACKS = {"gpt-oss": "gpt-oss@bf16", "ct-mxfp8": "mxfp8@bf16", "modelopt-mxfp8": "mxfp8@bf16"}


def side(folder: Path, name: str = "config.json") -> Any:
    return json.loads((folder / name).read_text())


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
