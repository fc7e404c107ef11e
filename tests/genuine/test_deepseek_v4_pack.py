"""DeepSeek-V4 as it is released, a tiny one: to bfloat16 as transformers decodes it, and all in FP8
with the same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done, fingerprint
from genuine import checkpoint, digests

SOURCE = checkpoint("deepseek-v4")
EXPERT = "layers.0.ffn.experts.0.w1"


def config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_it_is_known_by_its_experts(tmp_path: Path) -> None:
    found = done("inspect", SOURCE.folder, "--format", "json").json["layouts"]
    assert [f"{one['lineage']}@{one['layout']}" for one in found] == ["deepseek-v4@fp4"]


def test_it_becomes_what_transformers_decodes_it_to(tmp_path: Path) -> None:
    before, out = fingerprint(SOURCE.folder), tmp_path / "out"
    # every number is one of bfloat16: nothing has to be allowed
    done("apply", SOURCE.folder, "-o", out, "--to", "deepseek-v4@bf16")
    assert digests(out) == SOURCE.tensors
    assert not {"quantization_config", "expert_dtype"} & config(out).keys()
    done("verify", out, "--source", SOURCE.folder)
    done("downgrade", out, "-o", tmp_path / "back", "--allow", "lossy")
    was, back = digests(SOURCE.folder), digests(tmp_path / "back")
    assert {k: v.rpartition(" ")[0] for k, v in back.items()} == {
        k: v.rpartition(" ")[0] for k, v in was.items()
    }
    assert config(tmp_path / "back") == config(SOURCE.folder)
    assert fingerprint(SOURCE.folder) == before


def test_its_experts_become_fp8_and_stand_for_the_same_numbers(tmp_path: Path) -> None:
    eight, plain = tmp_path / "eight", tmp_path / "plain"
    done("apply", SOURCE.folder, "-o", eight, "--to", "deepseek-v4@fp8")
    done("verify", eight, "--source", SOURCE.folder)
    was, made = contents(SOURCE.folder), contents(eight)
    assert made.keys() == was.keys()
    experts = {key for key in was if ".ffn.experts." in key}
    assert all(made[key] == was[key] for key in was.keys() - experts)
    assert (made[f"{EXPERT}.weight"][:2], made[f"{EXPERT}.scale"][:2]) == (
        ("F8_E4M3", (32, 64)),
        ("F8_E8M0", (1, 2)),
    )
    assert config(eight) == config(SOURCE.folder) | {
        "expert_dtype": "fp8",
        "quantization_config": config(SOURCE.folder)["quantization_config"]
        | {"expert_dtype": "fp8"},
    }
    done("apply", eight, "-o", plain, "--to", "deepseek-v4@bf16")
    assert digests(plain) == SOURCE.tensors


def test_the_way_back_from_fp8_is_refused_or_takes_what_was_kept(tmp_path: Path) -> None:
    eight, kept = tmp_path / "eight", tmp_path / "kept"
    done("apply", SOURCE.folder, "-o", eight, "--to", "deepseek-v4@fp8", "--undo", kept)
    answer = done("downgrade", eight, "-o", tmp_path / "x", "--format", "json", exit=3).json
    (one,) = answer["diagnostics"]
    assert one["code"] == "M405"
    assert "one scale of fp8-block stands for several of mxfp4" in one["message"]
    done("downgrade", eight, "-o", tmp_path / "back", "--undo", kept)
    assert digests(tmp_path / "back") == digests(SOURCE.folder)
    assert config(tmp_path / "back") == config(SOURCE.folder)


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_what_became_fp8_loads_in_transformers_as_what_was_released(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    eight = tmp_path / "eight"
    done("apply", SOURCE.folder, "-o", eight, "--to", "deepseek-v4@fp8")
    tokens = torch.arange(24).reshape(2, 12) % 32

    def logits(folder: Path) -> Any:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            output_loading_info=True,
            quantization_config=FineGrainedFP8Config(dequantize=True),
        )
        assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys")), found
        assert not found["mismatched_keys"]
        with torch.no_grad():
            return model.eval()(tokens).logits

    assert torch.equal(logits(eight), logits(SOURCE.folder))
