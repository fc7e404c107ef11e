"""What packs make of a folder is loaded by transformers strictly, and gives the logits that
transformers itself gives of the folder as it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done
from genuine import FOLDER, checkpoint, digest, digests
from test_gptq_awq_packs import numbers as word_numbers

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

# folder -> layouts that it is brought to; transformers decodes these itself, those of
# compressed-tensors by that library
DECODED = {
    "hf-fp8-block": ["fp8@bf16"],
    "hf-fp8-block-ue8m0": ["fp8@bf16"],
    "hf-fp8-block-moe": ["fp8@bf16"],
    "mistral-fp8": ["fp8@bf16"],
    "gpt-oss": ["gpt-oss@bf16"],
    "deepseek-v4": ["deepseek-v4@bf16"],
    "torchao-fp8-row": ["fp8@bf16"],
    "torchao-fp8-tensor": ["fp8@bf16"],
    "torchao-intx": ["torchao@bf16"],
    "ct-fp8-tensor": ["fp8@bf16"],
    "ct-fp8-channel": ["fp8@bf16"],
    "ct-fp8-block": ["fp8@bf16"],
    "ct-mxfp8": ["mxfp8@bf16"],
    "ct-nvfp4": ["nvfp4@bf16"],
    "ct-nvfp4a16": ["nvfp4@bf16"],
    "ct-mxfp4": ["compressed-tensors@bf16"],
    "ct-mxfp6": ["compressed-tensors@bf16"],
    "ct-w4a16": ["compressed-tensors@bf16"],
    "ct-w4a16-asym": ["compressed-tensors@bf16"],
    "ct-w3a16": ["compressed-tensors@bf16"],
    "ct-w8a16": ["compressed-tensors@bf16"],
    "ct-w8a8": ["compressed-tensors@bf16"],
    "kimi-k2": ["kimi-k2@bf16"],
}
# what transformers runs of GPTQ and AWQ needs a GPU: folder -> where to, and what is said
WORDS = {
    "gptq-v1": ("gptq@fp16", "--set", "zeros=words"),
    "gptq-v2-dynamic": ("gptq@fp16",),
    "gptq-sym": ("gptq@fp16",),
    "awq-gemm": ("awq@fp16",),
}
# what transformers cannot read: of a mixture it takes each module as of one format, and stops
LOADED = {
    "ct-w567a16": ["compressed-tensors@bf16"],
    # it multiplies by the scales of rows what a product of codes gives, which rounds elsewhere
    "torchao-int8": ["torchao@bf16"],
    "ct-mixed": ["compressed-tensors@bf16"],
    "ct-mixed-int": ["compressed-tensors@bf16"],
    "ct-marlin24": ["compressed-tensors@bf16"],
    "ct-sparse24": ["compressed-tensors@bf16"],
    "ct-sparse24-fp8": ["compressed-tensors@bf16"],
    "ct-sparse24-int8": ["compressed-tensors@bf16"],
    "ct-bitmask": ["compressed-tensors@bf16"],
    "ct-bitmask-all": ["compressed-tensors@bf16"],
    "ct-bitmask-int8": ["compressed-tensors@bf16"],
    "modelopt-fp8": ["fp8@bf16"],
    "modelopt-fp8-channel": ["fp8@bf16"],
    "modelopt-nvfp4": ["nvfp4@bf16"],
    "modelopt-nvfp4-awq": ["nvfp4@bf16"],
    "modelopt-nvfp4-moe": ["nvfp4@bf16"],
    "modelopt-nvfp4-stacked": ["nvfp4@bf16"],
    "modelopt-fp8-stacked": ["fp8@bf16"],
    "modelopt-mxfp8": ["mxfp8@bf16"],
    "modelopt-mixed": ["nvfp4@bf16"],
}


def brought(name: str, layouts: list[str], into: Path) -> Path:
    """The folder in other layouts."""
    goals = [word for layout in layouts for word in ("--to", layout)]
    done(
        "apply", checkpoint(name).folder, "-o", into, *goals, "--allow", "lossy", "--allow", "drop"
    )
    return into


def logits(folder: Path, dtype: str = "bfloat16", **more: Any) -> Any:
    """Of a few tokens, by the CPU; nothing is missing, left over or of another shape."""
    transformers = pytest.importorskip("transformers")
    import torch

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), output_loading_info=True, **more
    )
    # scales of inputs, which it does not need where it decodes
    left = {key for key in info["unexpected_keys"] if not more or ".input_" not in key}
    assert not left
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    return answers(model)


def answers(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(16).reshape(2, 8)).logits


def as_deepseek(folder: Path, into: Path) -> Path:
    """A folder of Kimi K2's under the name of the architecture that it shares: its own code is not
    in transformers.
    """
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    return into


def as_it_was(name: str, work: Path) -> Any:
    folder = checkpoint(name).folder
    if name == "kimi-k2":
        folder = as_deepseek(folder, work)
    elif not name.startswith("ct-"):
        return logits(folder)
    pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    from transformers import CompressedTensorsConfig

    return logits(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


@pytest.mark.parametrize("name", DECODED)
def test_the_logits_are_those_of_the_folder_as_it_was(name: str, tmp_path: Path) -> None:
    import torch

    folder = brought(name, DECODED[name], tmp_path / "out")
    assert digests(folder) == checkpoint(name).tensors
    if name == "kimi-k2":
        folder = as_deepseek(folder, tmp_path / "loaded")
    made = logits(folder)
    assert made.abs().max() > 0
    assert torch.equal(made, as_it_was(name, tmp_path / "was"))


@pytest.mark.parametrize("name", WORDS)
def test_the_logits_are_those_of_a_model_with_the_numbers_of_its_library(
    name: str, tmp_path: Path
) -> None:
    """These are worked out once more here, word by word, and are what GPTQModel or AutoAWQ made."""
    transformers = pytest.importorskip("transformers")
    import torch

    one, out, (goal, *said) = checkpoint(name), tmp_path / "out", WORDS[name]
    done("apply", one.folder, "-o", out, "--to", goal, *said, "--allow", "lossy")
    made = logits(out, "float16")
    parts, state = contents(one.folder), {}
    for key, text in one.tensors.items():
        tensor = parts.get(key)
        if tensor is None:
            numbers = word_numbers(name, key.removesuffix(".weight"), parts).astype("<f2")
            tensor = "F16", numbers.shape, numbers.tobytes()
        assert digest(*tensor) == text
        raw = torch.frombuffer(bytearray(tensor[2]), dtype=torch.float16)
        state[key] = raw.reshape(tensor[1])
    config = transformers.AutoConfig.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.load_state_dict(state, strict=True)
    assert made.abs().max() > 0
    assert torch.equal(made, answers(model))


@pytest.mark.parametrize("name", WORDS)
def test_the_logits_are_those_of_kernels_that_multiply_by_words(name: str, tmp_path: Path) -> None:
    """GPTQModel's, on a CPU, as `run_kernels.py` found them. There they are the same bits, but
    three of 512 in the last place where there are three bits. Another processor adds in another
    order: no more apart than float16 is from float32, or the last place.
    """
    import torch

    said = json.loads((FOLDER / "kernels.json").read_text())["logits"]
    theirs = {
        one: torch.frombuffer(bytearray.fromhex(text), dtype=torch.float16).float()
        for one, text in said.items()
    }
    goal, *more = WORDS[name]
    out = tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", out, "--to", goal, *more, "--allow", "lossy")
    made = logits(out, "float16").flatten().float()
    apart = {one: (made - other).abs().max().item() for one, other in theirs.items()}
    rounding = (logits(out, "float32").flatten() - made).abs().max().item()
    assert apart.pop(name) <= max(2**-11, rounding)
    # models of the same weights in other numbers are much further away
    assert min(apart.values()) > 2**-6


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_cannot_read_it_reads_afterwards(name: str, tmp_path: Path) -> None:
    made = logits(brought(name, LOADED[name], tmp_path / "out"))
    assert made.isfinite().all()
    assert made.abs().max() > 0


def test_of_several_formats_transformers_decodes_the_first_alone(tmp_path: Path) -> None:
    """With `dequantize=True` it takes the scheme of one group for all modules, and fails. As it is
    stored it reads each module in its own format; what encodes activations is switched off here.
    """
    transformers = pytest.importorskip("transformers")
    import torch

    with pytest.raises(RuntimeError, match="CONVERSION"):
        as_it_was("ct-mixed", tmp_path / "was")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("ct-mixed").folder, dtype=torch.bfloat16
    )
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_enabled = False
    made = logits(brought("ct-mixed", ["compressed-tensors@bf16"], tmp_path / "out"))
    assert torch.equal(made, answers(model))


@pytest.mark.parametrize("name", ["awq-gemm", "gptq-sym", "gptq-v2-dynamic"])
def test_integers_that_were_repacked_are_loaded_with_equal_logits(
    name: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")
    import torch
    from transformers import CompressedTensorsConfig

    lineage = name.partition("-")[0]
    folders = [tmp_path / "ct", tmp_path / "plain"]
    for layout, folder in zip(("compressed-tensors", "fp16"), folders, strict=True):
        goal = f"{lineage}@{layout}"
        done("apply", checkpoint(name).folder, "-o", folder, "--to", goal, "--allow", "lossy")
    plain = logits(folders[1], "float16")
    assert plain.abs().max() > 0
    # of several sizes of codes transformers 5.23 decodes the first alone
    if name != "gptq-v2-dynamic":
        decoded = CompressedTensorsConfig(dequantize=True)
        assert torch.equal(plain, logits(folders[0], "float16", quantization_config=decoded))
    if name != "awq-gemm":
        # with zeros transformers 5.23 cannot load what is not decoded
        assert torch.equal(plain, logits(folders[0], "float16"))
