"""NVFP4 checkpoints that ModelOpt and compressed-tensors wrote, decoded by the lineage `nvfp4`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from commandline import contents, done
from genuine import checkpoint, digests

CT = ["ct-nvfp4", "ct-nvfp4a16"]
MODELOPT = ["modelopt-nvfp4", "modelopt-nvfp4-moe"]
ALLOW = ("--allow", "lossy", "--allow", "drop")


def unsigned_zeros(folder: Path) -> dict[str, str]:
    """`digests` where zeros have no sign: ModelOpt makes +0 of the code of -0."""
    out = {}
    for key, (dtype, shape, data) in contents(folder).items():
        raw = np.frombuffer(data, "<u2")
        kept = np.where(raw == 0x8000, 0, raw).astype("<u2").tobytes()
        out[key] = f"{dtype} {list(shape)} {hashlib.sha256(kept).hexdigest()}"
    return out


@pytest.mark.parametrize("name", [*CT, *MODELOPT])
def test_what_is_decoded_is_what_its_library_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    found = digests(out) if name in CT else unsigned_zeros(out)
    assert found == genuine.tensors
    # the peer's fault is one
    assert (digests(out) == genuine.tensors) == (name in CT)
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"]
    assert not (out / "hf_quant_config.json").exists()
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", [*CT, *MODELOPT])
def test_the_way_back_encodes_what_was_encoded_and_restores_the_configuration(
    name: str, tmp_path: Path
) -> None:
    genuine, out, back = checkpoint(name), tmp_path / "out", tmp_path / "back"
    done("apply", genuine.folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    done("downgrade", out, "-o", back, *ALLOW)
    one, other = contents(genuine.folder), contents(back)
    left_out = {key for key in one if key.endswith(("input_scale", "input_global_scale"))}
    assert {k: v[:2] for k, v in one.items() if k not in left_out} == {
        k: v[:2] for k, v in other.items()
    }
    # plain weights are what they were
    plain = [k for k in other if not k.endswith(("_scale", "_scale_2", "_packed"))]
    plain = [k for k in plain if one[k][0] == "BF16"]
    assert plain
    assert all(one[k] == other[k] for k in plain)
    for file in ("config.json", "hf_quant_config.json"):
        if (genuine.folder / file).exists():
            text = [json.loads((f / file).read_text()) for f in (genuine.folder, back)]
            assert text[0] == text[1]


@pytest.mark.parametrize(
    ("name", "layout"), [(CT[0], "compressed-tensors"), (MODELOPT[0], "modelopt")]
)
def test_the_two_layouts_are_told_apart(name: str, layout: str) -> None:
    plan = done(
        "plan", checkpoint(name).folder, "--to", "nvfp4@bf16", *ALLOW, "--format", "json"
    ).json
    assert [step["from"] for step in plan["path"]] == [layout]
