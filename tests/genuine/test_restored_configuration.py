"""What stands in a folder after the way there and back, where nothing was kept for it: a loader
believes the configuration, so that it has to be of the tensors beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done, run
from genuine import checkpoint, names

LOSSY = ("--allow", "lossy", "--allow", "drop")
# beginnings of names -> the layout of plain numbers, the first that fits
GOALS = {
    # stored by transformers with scales of other names than the weights'
    "hf-fp8-block-moe-saved": "",
    "ct-fp8": "fp8@bf16", "ct-nvfp4": "nvfp4@bf16", "ct-mxfp8": "mxfp8@bf16",
    "ct-": "compressed-tensors@bf16", "hf-fp8": "fp8@bf16",
    "mistral-fp8-": "", "mistral": "fp8@bf16",
    "modelopt-fp8": "fp8@bf16", "modelopt-mxfp8": "mxfp8@bf16", "modelopt-": "nvfp4@bf16",
    "bnb": "bnb@bf16", "awq": "awq@fp16", "gptq": "gptq@bf16", "gpt-oss": "gpt-oss@bf16",
    "kimi": "kimi-k2@bf16", "gguf": "gguf-llama@hf", "torchao": "",
    "deepseek-v4": "deepseek-v4@bf16",
}  # fmt: skip
# nothing encodes these, or nothing tells what was encoded
ONE_WAY = ("awq", "gptq", "gguf", "bnb-int8", "modelopt-mixed")
# of which the plan warns: the configuration that transformers wrote for DeepSeek-V4 claims layers
# that it left plain, and ModelOpt has no word for FP8 whose inputs have no scales
MISFITS = {"deepseek-v4", "modelopt-fp8", "modelopt-fp8-stacked"}
MORE = {"gptq-v1": ("--set", "zeros=words")}
# one of each kind; all of them take some seconds
SOME = ("ct-w4a16", "ct-bitmask", "bnb-nf4", "mistral-fp8", "modelopt-mixed")


def goal_of(name: str) -> str:
    return next(goal for start, goal in GOALS.items() if name.startswith(start))


def is_one_way(name: str) -> bool:
    return goal_of(name) == "compressed-tensors@bf16" or name.startswith(ONE_WAY)


EVERY = [name for name in names() if goal_of(name)]


@pytest.mark.parametrize(
    "name",
    [n if n in SOME else pytest.param(n, marks=pytest.mark.thorough) for n in EVERY],
)
def test_a_way_back_is_refused_or_its_configuration_is_of_its_tensors(
    name: str, tmp_path: Path
) -> None:
    folder, out, back = checkpoint(name).folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, "--to", goal_of(name), *LOSSY, *MORE.get(name, ()))
    found = run("downgrade", out, "-o", back, *LOSSY)
    if is_one_way(name):
        assert found.exit == 3
        assert "M405" in found.out + found.err
        assert not back.exists()
        return
    assert found.exit == 0, found.err
    assert ("M519" in found.out + found.err) == (name in MISFITS)


GROUP = "quantization_config.config_groups.group_0"
NVFP4 = {
    f"config.json#{GROUP}.input_activations": None,
    "config.json#quantization_config.quant_algo": "W4A16_NVFP4",
    "hf_quant_config.json#quantization.quant_algo": "W4A16_NVFP4",
}
AWQ = {
    "config.json#quantization_config.quant_algo": "W4A16_NVFP4",
    "hf_quant_config.json#quantization.quant_algo": "W4A16_NVFP4",
    "hf_quant_config.json#quantization.has_zero_point": None,
    "hf_quant_config.json#quantization.pre_quant_scale": None,
}
# whose inputs had scales -> what is said otherwise after the way back, None: no more
STATIC: dict[str, dict[str, Any]] = {
    "mistral-fp8": {"config.json#quantization_config.activation_scheme": "dynamic"},
    "mistral-fp8-consolidated": {"params.json#quantization.qscheme_act": "NO_SCALES"},
    "ct-fp8-tensor": {f"config.json#{GROUP}.input_activations.dynamic": True},
    "ct-nvfp4": {f"config.json#{GROUP}.input_activations": None},
    "modelopt-fp8": {},
    "modelopt-nvfp4": NVFP4,
    "modelopt-nvfp4-awq": AWQ,
}


@pytest.mark.parametrize("name", STATIC)
def test_of_inputs_whose_scales_went_the_configuration_says_that_they_have_none(
    name: str, tmp_path: Path
) -> None:
    folder, out, back = checkpoint(name).folder, tmp_path / "out", tmp_path / "back"
    to = goal_of(name) or "fp8@bf16"
    done("apply", folder, "-o", out, "--to", to, *LOSSY, "--undo", tmp_path / "undo")
    assert any(key.endswith(INPUTS) for key in contents(folder))
    done("downgrade", out, "-o", back, *LOSSY)
    assert not any(key.endswith(INPUTS) for key in contents(back))
    was, now = said(folder), said(back)
    assert {at: now.get(at) for at in was if was[at] != now.get(at)} == STATIC[name]
    assert now.keys() <= was.keys()
    done("downgrade", out, "-o", tmp_path / "all", "--undo", tmp_path / "undo")
    assert said(tmp_path / "all") == was
    assert contents(tmp_path / "all") == contents(folder)


INPUTS = ("input_scale", "activation_scale", "input_global_scale", "qscale_act")


def said(folder: Path) -> dict[str, Any]:
    """place -> value, of all that the side files say; below inputs as one where they are an object
    whose end it is to go.
    """
    out: dict[str, Any] = {}

    def read(place: str, value: Any) -> None:
        if isinstance(value, dict) and not (
            place.endswith("input_activations") and value.get("num_bits") == 4
        ):
            for name, held in value.items():
                read(f"{place}{'' if place.endswith('#') else '.'}{name}", held)
        else:
            out[place] = value

    for name in ("config.json", "hf_quant_config.json", "params.json"):
        if (folder / name).exists():
            read(f"{name}#", json.loads((folder / name).read_text()))
    return out


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in STATIC if name.startswith("ct-")])
def test_transformers_loads_what_came_back_without_scales_of_inputs(
    name: str, tmp_path: Path
) -> None:
    from test_genuine_logits import logits

    folder, out, back = checkpoint(name).folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, "--to", goal_of(name), *LOSSY)
    done("downgrade", out, "-o", back, *LOSSY)
    assert logits(back).isfinite().all()
    # with the configuration as it was, the scales are missing
    (back / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(AssertionError, match=r"assert not \{.*input_"):
        logits(back)


def test_modelopts_fp8_without_scales_of_inputs_is_said_of_each_place(tmp_path: Path) -> None:
    name, out = "modelopt-fp8", tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", out, "--to", "fp8@bf16", *LOSSY)
    stamped = ("downgrade", out, "-o", tmp_path / "back", *LOSSY)
    warned = done(*stamped, "--format", "json").json["warnings"]
    # as of a model that was trained since
    (out / "migrate.history.json").unlink()
    asked = ("--from", "fp8@bf16", "--to", "fp8@modelopt", *LOSSY, "--format", "json")
    warned += done("plan", out, *asked, "--set", "algorithm=FP8").json["warnings"]
    rows = (*asked, "--set", "algorithm=FP8_PER_CHANNEL_PER_TOKEN")
    assert done("plan", out, *rows).json["warnings"] == []
    places = (
        "config.json#quantization_config.quant_algo",
        "hf_quant_config.json#quantization.quant_algo",
    )
    assert [w["message"].partition(":")[0] for w in warned] == [f"{at} is FP8" for at in places] * 2
    assert {w["code"] for w in warned} == {"M519"}
    assert "undo" in warned[0]["help"]
