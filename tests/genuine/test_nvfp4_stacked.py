"""Experts that ModelOpt stacks in one tensor: beside linear layers of a genuine checkpoint, as all
that is encoded, and beside FP8; decoded, and never left under a configuration that calls them
something else.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import folder, refusal, side
from commandline import contents, done
from genuine import checkpoint

ALLOW = ("--allow", "lossy", "--allow", "drop")
STACK = "model.layers.0.mlp.experts"
CODED = f"{STACK}.down_proj"
SCALES = struct.pack("<f", 0.5)
# two experts of 16 rows and 2 columns: each code is 1, the scale of each column 2
EXPERTS: dict[str, tuple[str, list[int], bytes]] = {
    CODED: ("U8", [2, 8, 2], b"\x22" * 32),
    f"{CODED}_weight_scale": ("F8_E4M3", [2, 1, 2], b"\x40" * 4),
    f"{CODED}_weight_scale_2": ("F32", [], SCALES),
    f"{CODED}_input_scale": ("F32", [], SCALES),
}
DECODED = ("BF16", (2, 16, 2), b"\x80\x3f" * 64)


def sides(name: str) -> dict[str, Any]:
    path = checkpoint(name).folder
    found = ("config", "hf_quant_config")
    return {which: side(path, which) for which in found if (path / f"{which}.json").exists()}


def stacked(path: Path, name: str = "modelopt-nvfp4") -> Path:
    """The genuine checkpoint with such experts beside it."""
    return folder(path, contents(checkpoint(name).folder) | EXPERTS, **sides(name))


def alone(path: Path) -> Path:
    """A model of which these experts alone are encoded."""
    plain = {
        k: t for k, t in contents(checkpoint("modelopt-nvfp4").folder).items() if t[0] == "BF16"
    }
    plain["model.layers.0.self_attn.q_proj.weight"] = ("BF16", (4, 16), bytes(128))
    said = sides("modelopt-nvfp4")
    said["config"]["quantization_config"]["ignore"] = ["*self_attn*", "lm_head"]
    del said["hf_quant_config"]
    return folder(path, plain | EXPERTS, **said)


def layouts(path: Path) -> list[str]:
    found = done("inspect", path, "--format", "json").json["layouts"]
    return [f"{one['lineage']}@{one['layout']}" for one in found if one["lineage"] != "meta-llama"]


def warned(answer: Any) -> list[str]:
    return [w["message"] for w in answer["warnings"] if w["code"] == "M519"]


def test_they_are_not_left_as_modelopts_under_the_configuration_of_compressed_tensors(
    tmp_path: Path,
) -> None:
    question = ("--to", "nvfp4@compressed-tensors", "--allow", "lossy")
    found = refusal("plan", stacked(tmp_path / "in"), *question, exit=3)
    assert found["code"] == "M315"
    assert found["message"].startswith(f"{CODED} is nvfp4, groups of 16, modelopt by its tensors")
    assert "compressed-tensors by config.json" in found["message"]
    assert "take a path that decodes them" in found["help"]
    # without them it runs
    done("plan", checkpoint("modelopt-nvfp4").folder, *question)


@pytest.mark.heavy
def test_the_way_back_encodes_them_again(tmp_path: Path) -> None:
    source, out = stacked(tmp_path / "in"), tmp_path / "out"
    done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    assert contents(out)[CODED] == DECODED
    back = tmp_path / "back"
    answer = done("downgrade", out, "-o", back, *ALLOW, "--format", "json").json
    assert warned(answer) == []
    made = contents(back)
    there = {key for key in EXPERTS if not key.endswith("_input_scale")}
    assert {k: made[k][:2] for k in there} == {
        k: (d, tuple(s)) for k, (d, s, _) in EXPERTS.items() if k in there
    }
    # the largest of all is the largest code times the largest scale
    assert made[CODED][2] == b"\x77" * 32
    assert made[f"{CODED}_weight_scale"][2] == b"\x7e" * 4
    assert made[f"{CODED}_weight_scale_2"][2] == struct.pack("<f", 1 / (6 * 448))
    done("verify", back, "--source", out)
    done("apply", back, "-o", tmp_path / "again", "--to", "nvfp4@bf16", *ALLOW)
    assert contents(tmp_path / "again")[CODED] == DECODED


@pytest.mark.heavy
def test_without_a_stamp_they_stay_plain_unless_that_is_asked_for(tmp_path: Path) -> None:
    source, out = stacked(tmp_path / "in"), tmp_path / "out"
    done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    (out / "migrate.history.json").unlink()
    asked = ("--from", "nvfp4@bf16", "--to", "nvfp4@modelopt", *ALLOW, "--format", "json")
    assert warned(done("apply", out, "-o", tmp_path / "new", *asked).json) == []
    assert contents(tmp_path / "new")[CODED] == DECODED
    assert STACK in side(tmp_path / "new")["quantization_config"]["ignore"]
    done("apply", out, "-o", tmp_path / "coded", *asked, "--set", "unstacked=false")
    assert contents(tmp_path / "coded")[CODED][0] == "U8"
    assert STACK not in side(tmp_path / "coded")["quantization_config"]["ignore"]


@pytest.mark.heavy
def test_those_that_modelopt_made_come_back_with_its_scales(tmp_path: Path) -> None:
    name, out, back = "modelopt-nvfp4-stacked", tmp_path / "out", tmp_path / "back"
    source = contents(checkpoint(name).folder)
    done("apply", checkpoint(name).folder, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    done("downgrade", out, "-o", back, *ALLOW)
    made = contents(back)
    scales = [key for key in source if "experts.down_proj_weight_scale" in key]
    stacks = [key for key in source if key.endswith(("experts.down_proj", "experts.gate_up_proj"))]
    assert (len(scales), len(stacks)) == (2, 2)
    assert all(made[key] == source[key] for key in scales)
    # small negative numbers have the code of -0, and ModelOpt encodes -0 as 0
    for key in stacks:
        one, other = (np.frombuffer(tensors[key][2], "u1") for tensors in (source, made))
        for part in ((one & 15, other & 15), (one >> 4, other >> 4)):
            apart = part[0] != part[1]
            assert set(part[0][apart]) | set(part[1][apart]) <= {0, 8}


@pytest.mark.heavy
def test_what_was_kept_brings_them_back_without_a_warning(tmp_path: Path) -> None:
    source, out, kept = stacked(tmp_path / "in"), tmp_path / "out", tmp_path / "kept"
    done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW, "--undo", kept)
    asked = ("-o", tmp_path / "back", "--undo", kept, "--format", "json")
    assert warned(done("downgrade", out, *asked).json) == []
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.heavy
def test_they_are_decoded_where_nothing_else_is_encoded(tmp_path: Path) -> None:
    source, out = alone(tmp_path / "in"), tmp_path / "out"
    assert layouts(source) == ["nvfp4@modelopt"]
    done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
    wanted = {k: t for k, t in contents(source).items() if k not in EXPERTS}
    assert contents(out) == wanted | {CODED: DECODED}
    # attention was plain before, and stays
    answer = done("downgrade", out, "-o", tmp_path / "back", *ALLOW, "--format", "json").json
    assert warned(answer) == []
    back = contents(tmp_path / "back")
    assert {k: t for k, t in back.items() if not k.startswith(CODED)} == wanted
    assert back[CODED][0] == "U8"


@pytest.mark.heavy
def test_they_are_decoded_beside_modules_in_fp8(tmp_path: Path) -> None:
    fp8 = contents(checkpoint("modelopt-fp8").folder)
    for name, tensors in (
        ("both", contents(checkpoint("modelopt-mixed").folder)),
        ("fp8", fp8),
    ):
        config = sides("modelopt-mixed")["config"]
        del config["quantization_config"]
        source = folder(tmp_path / name, tensors | EXPERTS, config=config)
        out = tmp_path / f"{name}-out"
        assert layouts(source) == ["nvfp4@modelopt-mixed"]
        done("apply", source, "-o", out, "--to", "nvfp4@bf16", *ALLOW)
        assert contents(out)[CODED] == DECODED
        assert {dtype for dtype, *_ in contents(out).values()} == {"BF16"}


def test_a_path_that_does_not_take_them_names_them_and_the_way_out(tmp_path: Path) -> None:
    asked = ("--to", "nvfp4@compressed-tensors", "--allow", "lossy", "--format", "json")
    found = done("plan", alone(tmp_path / "in"), *asked, exit=3).json["diagnostics"]
    assert {one["code"] for one in found} == {"M206"}
    assert f"encoded, and not taken: {CODED} (nvfp4, form modelopt" in found[0]["notes"][-1]
    assert "take a path that decodes these tensors" in found[0]["help"]


def test_codes_without_their_scales_are_refused_by_name(tmp_path: Path) -> None:
    tensors = contents(alone(tmp_path / "in"))
    del tensors[f"{CODED}_weight_scale"]
    source = folder(tmp_path / "without", tensors, config={})
    asked = ("--from", "nvfp4@modelopt", "--to", "nvfp4@bf16", *ALLOW)
    found = done("plan", source, *asked, "--format", "json", exit=3).json["diagnostics"]
    assert [(d["code"], f"{CODED}_weight_scale" in d["message"]) for d in found] == [("M207", True)]
