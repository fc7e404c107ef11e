"""What stands in a folder after the way there and back, where nothing was kept for it: a loader
believes the configuration, so that it has to be of the tensors beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import done, run
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
# of which the plan warns: experts that are stacked stay plain, and the configuration that
# transformers wrote for DeepSeek-V4 claims layers that it left plain
MISFITS = {"modelopt-nvfp4-stacked", "deepseek-v4"}
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


def test_of_inputs_whose_scales_went_the_configuration_says_that_they_have_none(
    tmp_path: Path,
) -> None:
    name = "mistral-fp8"
    folder, out, back = checkpoint(name).folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, "--to", goal_of(name), *LOSSY, "--undo", tmp_path / "undo")
    stored = quantization(folder)
    assert stored["activation_scheme"] == "static"
    done("downgrade", out, "-o", back, *LOSSY)
    assert quantization(back) == {**stored, "activation_scheme": "dynamic"}
    done("downgrade", out, "-o", tmp_path / "all", "--undo", tmp_path / "undo")
    assert quantization(tmp_path / "all") == stored


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found
