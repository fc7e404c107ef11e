"""A Ministral in FP8 under Mistral's own names: decoded to the bits of transformers, brought to
transformers' names with equal logits, and encoded again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import side
from commandline import contents, done, run
from genuine import checkpoint, digests

NAME = "mistral-fp8-consolidated"
TO = ("--to", "fp8@bf16", "--allow", "lossy", "--allow", "drop")
SCALES = (".qscale_weight", ".qscale_act")


def layouts(path: Path) -> set[str]:
    found = done("inspect", path, "--format", "json").json["layouts"]
    return {f"{one['lineage']}@{one['layout']}" for one in found}


@pytest.mark.heavy
def test_what_comes_out_is_what_transformers_decodes(tmp_path: Path) -> None:
    source, out = checkpoint(NAME), tmp_path / "out"
    # names are those of Meta's files of Llama
    assert layouts(source.folder) == {"fp8@mistral-consolidated", "meta-llama@meta"}
    done("apply", source.folder, "-o", out, *TO)
    assert digests(out) == source.tensors
    said = side(source.folder, "params")
    del said["quantization"]
    assert side(out, "params") == said
    found = done("verify", out, "--source", source.folder, "--format", "json").json
    assert found["equal"] is True


@pytest.mark.heavy
def test_the_way_back_has_the_codes_and_scales_that_were_there(tmp_path: Path) -> None:
    source, out, back = checkpoint(NAME).folder, tmp_path / "out", tmp_path / "back"
    done("apply", source, "-o", out, *TO)
    done("downgrade", out, "-o", back, "--allow", "lossy")
    before, after = contents(source), contents(back)
    kept = {key for key in before if not key.endswith(".qscale_act")}
    assert after.keys() == kept
    codes = [key for key in kept if before[key][0] == "F8_E4M3"]
    assert len(codes) == 7
    assert all(after[key] == before[key] for key in kept if not key.endswith(".qscale_weight"))
    was, now = side(source, "params"), side(back, "params")
    assert was["quantization"].pop("qscheme_act") == "TENSOR"
    assert now["quantization"].pop("qscheme_act") == "NO_SCALES"
    assert now == was
    # trained since: without a stamp
    (out / "migrate.history.json").unlink()
    (out / "migrate.parts").unlink(missing_ok=True)
    asked = ("--from", "fp8@bf16", "--to", "fp8@mistral-consolidated", "--allow", "lossy")
    done("apply", out, "-o", tmp_path / "new", *asked)
    assert contents(tmp_path / "new").keys() == kept
    assert side(tmp_path / "new", "params")["quantization"] == {
        "qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES",
    }  # fmt: skip
    assert "fp8@mistral-consolidated" in layouts(tmp_path / "new")
    done("apply", tmp_path / "new", "-o", tmp_path / "again", *TO)
    assert contents(tmp_path / "again").keys() == contents(out).keys()


def test_scales_of_inputs_go_only_where_that_is_allowed() -> None:
    answer = done("plan", checkpoint(NAME).folder, *TO[:4], "--format", "json", exit=3).json
    assert "M402" in {one["code"] for one in answer["diagnostics"]}


def test_a_weight_without_its_scale_is_refused_by_name(tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(NAME).folder, tmp_path / "in")
    file = source / "consolidated.safetensors"
    file.write_bytes(file.read_bytes().replace(b"wo.qscale_weight", b"wo.qscale_wxxght", 1))
    failed = run("plan", source, *TO)
    assert failed.exit == 3
    assert "layers.0.attention.wo.qscale_weight" in failed.err
    assert "M207" in failed.err


def test_names_alone_are_not_brought_to_transformers(tmp_path: Path) -> None:
    """Rows of codes would be put in order without their scales going along."""
    failed = run("plan", checkpoint(NAME).folder, "--to", "meta-llama@hf")
    assert failed.exit == 3
    assert "qscale_weight" in failed.err


@pytest.mark.heavy
def test_with_the_names_of_transformers_it_is_what_transformers_decodes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint(NAME).folder, "-o", out, *TO, "--to", "meta-llama@hf")
    assert digests(out) == checkpoint("mistral-fp8").tensors


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
def test_it_gives_the_logits_of_the_folder_with_the_names_of_transformers(tmp_path: Path) -> None:
    import torch
    from test_fp8_pack import loaded

    out, one = tmp_path / "out", checkpoint("mistral-fp8").folder
    done("apply", checkpoint(NAME).folder, "-o", out, *TO, "--to", "meta-llama@hf")
    config: dict[str, Any] = json.loads((one / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    made = loaded(out)
    assert made.abs().max() > 0
    assert torch.equal(made, logits_as_stored(one))


def logits_as_stored(folder: Path) -> Any:
    """Of transformers, which decodes where there is no GPU. Scales of inputs are left over then."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(2, 12) % 32).logits
