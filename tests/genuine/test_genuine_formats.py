"""`inspect` names the number formats of what libraries wrote, with counts and what decides them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commandline import run
from genuine import FOLDER, checkpoint, names

import migrate

BLOCKS = {"rows": 32, "columns": 32}
GPTQMODEL = "GPTQModel, AutoGPTQ"
# name -> for each group: how many tensors, format, producer, arguments
FORMATS = {
    "hf-fp8-block": [(7, "fp8-block", "DeepSeek, transformers", BLOCKS)],
    "hf-fp8-block-moe": [(10, "fp8-block", "DeepSeek, transformers", BLOCKS)],
    "hf-fp8-block-ue8m0": [(7, "fp8-block", "DeepSeek, transformers", BLOCKS)],
    "ct-fp8-tensor": [(7, "fp8", "compressed-tensors", {"granularity": "tensor"})],
    "ct-fp8-channel": [(7, "fp8", "compressed-tensors", {"granularity": "channel"})],
    "ct-fp8-block": [(7, "fp8-block", "compressed-tensors, ModelOpt", BLOCKS)],
    "ct-nvfp4": [(14, "nvfp4", "compressed-tensors", {"form": "compressed-tensors"})],
    "ct-nvfp4a16": [(7, "nvfp4", "compressed-tensors", {"form": "compressed-tensors"})],
    "ct-mxfp4": [(7, "mxfp4", "compressed-tensors", {})],
    "ct-mxfp6": [(7, "mxfp6", "compressed-tensors", {})],
    "ct-sparse24": [(7, "sparse-24", "compressed-tensors", {})],
    "ct-sparse24-fp8": [(7, "sparse-24", "compressed-tensors", {})],
    "ct-sparse24-int8": [(7, "sparse-24", "compressed-tensors", {})],
    "ct-bitmask": [(7, "sparse-bitmask", "compressed-tensors", {})],
    "ct-bitmask-int8": [(7, "sparse-bitmask", "compressed-tensors", {})],
    "ct-bitmask-all": [(12, "sparse-bitmask", "compressed-tensors", {})],
    "ct-mxfp8": [(7, "mxfp8", "compressed-tensors, ModelOpt", {})],
    "ct-marlin24": [
        (3, "marlin-24", "compressed-tensors", {"bits": 8}),
        (4, "marlin-24", "compressed-tensors", {"bits": 4}),
    ],
    "ct-mixed": [
        (8, "fp8", "compressed-tensors", {"granularity": "channel"}),
        (1, "mxfp8", "compressed-tensors, ModelOpt", {}),
        (4, "nvfp4", "compressed-tensors", {"form": "compressed-tensors"}),
    ],
    "ct-w4a16": [(7, "int-pack", "compressed-tensors", {"bits": 4, "group": 32})],
    "ct-w4a16-asym": [(7, "int-pack", "compressed-tensors", {"bits": 4, "group": 32})],
    "ct-w3a16": [(7, "int-pack", "compressed-tensors", {"bits": 3, "group": 32})],
    "ct-w567a16": [
        (2, "int-pack", "compressed-tensors", {"bits": 8}),
        (1, "int-pack", "compressed-tensors", {"bits": 6, "group": 32}),
        (1, "int-pack", "compressed-tensors", {"bits": 7, "group": 32}),
        (2, "int-pack", "compressed-tensors", {"bits": 5, "group": 32}),
        (1, "int-pack", "compressed-tensors", {"bits": 6, "group": 32}),
    ],
    "ct-w8a16": [(7, "int-pack", "compressed-tensors", {"bits": 8})],
    "ct-w8a8": [(7, "int8", "compressed-tensors", {"granularity": "channel"})],
    "ct-mixed-int": [
        (1, "int-pack", "compressed-tensors", {"bits": 8, "group": 32}),
        (2, "int-pack", "compressed-tensors", {"bits": 4, "group": 32}),
        # one group of all 64 columns
        (2, "int-pack", "compressed-tensors", {"bits": 4}),
        (1, "fp8", "compressed-tensors", {"granularity": "channel"}),
        (1, "int8", "compressed-tensors", {"granularity": "channel"}),
    ],
    "kimi-k2": [(6, "int-pack", "compressed-tensors", {"bits": 4, "group": 32})],
    "modelopt-fp8": [(7, "fp8", "ModelOpt", {"granularity": "tensor"})],
    "mistral-fp8": [(7, "fp8", "Mistral", {"granularity": "tensor"})],
    "mistral-fp8-consolidated": [(7, "fp8", "Mistral", {"granularity": "tensor"})],
    "modelopt-fp8-channel": [(7, "fp8", "ModelOpt", {"granularity": "channel"})],
    "modelopt-nvfp4": [(14, "nvfp4", "ModelOpt", {"form": "modelopt"})],
    "modelopt-nvfp4-awq": [
        (6, "nvfp4", "ModelOpt", {"form": "modelopt"}),
        (1, "nvfp4", "ModelOpt", {"form": "modelopt"}),
    ],
    "modelopt-nvfp4-moe": [(10, "nvfp4", "ModelOpt", {"form": "modelopt"})],
    "modelopt-nvfp4-stacked": [
        (
            2,
            "nvfp4",
            "ModelOpt, stacked experts with groups along rows",
            {"form": "modelopt", "transposed": True},
        ),
        (7, "nvfp4", "ModelOpt", {"form": "modelopt"}),
    ],
    "modelopt-fp8-stacked": [
        (2, "fp8", "ModelOpt, stacked experts", {"granularity": "tensor", "form": "modelopt"}),
        (4, "fp8", "ModelOpt", {"granularity": "tensor"}),
    ],
    "modelopt-mxfp8": [(7, "mxfp8", "compressed-tensors, ModelOpt", {})],
    "modelopt-mixed": [
        (8, "fp8", "ModelOpt", {"granularity": "tensor"}),
        (6, "nvfp4", "ModelOpt", {"form": "modelopt"}),
    ],
    "deepseek-v4": [
        (8, "fp8-block", "DeepSeek-V4", BLOCKS),
        (6, "mxfp4", "DeepSeek", {}),
    ],
    "gpt-oss": [(2, "mxfp4", "gpt-oss, transformers", {"form": "blocks"})],
    "torchao-fp8-row": [(7, "fp8", "torchao", {"granularity": "channel"})],
    "torchao-fp8-tensor": [(7, "fp8", "torchao", {"granularity": "tensor"})],
    "torchao-int8": [(7, "int8", "torchao", {"granularity": "channel"})],
    # of 64 columns, and of 32, which are one group
    "torchao-intx": [
        (1, "int8", "torchao", {"group": 32}),
        (6, "int8", "torchao", {"granularity": "channel"}),
    ],
    "torchao-mxfp8": [(7, "mxfp8", "torchao", {"swizzled": True})],
    "torchao-mxfp4": [(7, "mxfp4", "torchao", {"swizzled": True})],
    "torchao-nvfp4": [(7, "nvfp4", "torchao", {"swizzled": True})],
    "gptq-sym": [(7, "gptq", GPTQMODEL, {"bits": 4, "group": 32, "form": "v1"})],
    "gptq-v1": [(14, "gptq", GPTQMODEL, {"bits": 4, "group": 32, "form": "v1"})],
    "gptq-v2-dynamic": [
        (2, "gptq", GPTQMODEL, {"bits": 8, "form": "v2"}),
        (11, "gptq", GPTQMODEL, {"bits": 3, "group": 32, "form": "v2"}),
    ],
    "bnb-nf4": [(7, "bnb-4bit", "bitsandbytes", {"form": "nf4", "blocksize": 64})],
    "bnb-nf4-plain": [(7, "bnb-4bit", "bitsandbytes", {"form": "nf4", "blocksize": 64})],
    "bnb-fp4": [(7, "bnb-4bit", "bitsandbytes", {"form": "fp4", "blocksize": 64})],
    "bnb-int8": [(7, "bnb-int8", "bitsandbytes", {})],
    "gguf-llama": [
        (2, "gguf", "llama.cpp", {"type": "q4_k"}),
        (1, "gguf", "llama.cpp", {"type": "q5_k"}),
        (2, "gguf", "llama.cpp", {"type": "q6_k"}),
        (2, "gguf", "llama.cpp", {"type": "q8_0"}),
        (1, "gguf", "llama.cpp", {"type": "q3_k"}),
        (1, "gguf", "llama.cpp", {"type": "q2_k"}),
        (1, "gguf", "llama.cpp", {"type": "q5_0"}),
        (2, "gguf", "llama.cpp", {"type": "q4_1"}),
        (1, "gguf", "llama.cpp", {"type": "q4_0"}),
        (1, "gguf", "llama.cpp", {"type": "q5_1"}),
        (1, "gguf", "llama.cpp", {"type": "mxfp4"}),
    ],
    "gguf-mistral": [
        (2, "gguf", "llama.cpp", {"type": "q4_0"}),
        (1, "gguf", "llama.cpp", {"type": "q5_1"}),
        (3, "gguf", "llama.cpp", {"type": "q8_0"}),
        (1, "gguf", "llama.cpp", {"type": "q5_0"}),
        (1, "gguf", "llama.cpp", {"type": "q4_1"}),
    ],
    "gguf-qwen2": [
        (3, "gguf", "llama.cpp", {"type": "q8_0"}),
        (1, "gguf", "llama.cpp", {"type": "q4_0"}),
        (1, "gguf", "llama.cpp", {"type": "q5_1"}),
        (1, "gguf", "llama.cpp", {"type": "q5_0"}),
        (1, "gguf", "llama.cpp", {"type": "q4_1"}),
    ],
    "gguf-qwen3": [
        (4, "gguf", "llama.cpp", {"type": "q8_0"}),
        (1, "gguf", "llama.cpp", {"type": "q4_0"}),
        (1, "gguf", "llama.cpp", {"type": "q5_0"}),
    ],
    "awq-gemm": [(13, "awq", "AutoAWQ", {"group": 32, "form": "gemm"})],
    "awq-gemv": [(13, "awq", "AutoAWQ", {"form": "gemv"})],
}


# codes of each expert, and scales of all of them in one tensor: nothing reads these
UNREADABLE = "hf-fp8-block-moe-saved"


def test_every_checkpoint_is_looked_at() -> None:
    assert {*FORMATS, UNREADABLE} == set(names())


def test_codes_without_a_scale_of_their_own_are_no_format() -> None:
    report = migrate.inspect(checkpoint(UNREADABLE).folder)
    read, unread = report.number_formats
    assert (read.count, read.readings[0].format) == (4, "fp8-block")
    assert (unread.count, unread.readings) == (6, ())
    assert unread.problem == "no scale under a known name"


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_are_named(name: str) -> None:
    report = migrate.inspect(checkpoint(name).folder)
    groups = [
        (g.count, r.format, r.producer, r.arguments)
        for g in report.number_formats
        for r in g.readings
    ]
    assert groups == FORMATS[name]
    assert [g.problem for g in report.number_formats] == [None] * len(groups)
    assert [g.missing for g in report.number_formats] == [()] * len(groups)
    # what the configuration says of them is read, and says the same
    assert [g.contradiction for g in report.number_formats] == [None] * len(groups)
    assert [p.contradiction for p in report.plain] == [None] * len(report.plain)


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        (
            "torchao-fp8-row", '"PerRow"', '"PerTensor"',
            "a scale for each channel by its tensors, and fp8, 8 bits, a scale for each tensor by",
        ),
        (
            "torchao-int8", '"PerRow"', '"PerTensor"',
            "a scale for each channel by its tensors, and int8, 8 bits, a scale for each tensor by",
        ),
        (
            "torchao-mxfp4", '"float4_e2m1fn_x2"', '"float8_e4m3fn"',
            "groups of 32 by its tensors, and mxfp8, 8 bits, groups of 32 by config.json",
        ),
        (
            "torchao-nvfp4", '"NVFP4WeightOnlyConfig"', '"Int8WeightOnlyConfig"',
            "by its tensors, and int8, 8 bits by config.json",
        ),
    ],
)  # fmt: skip
def test_a_configuration_of_torchao_that_says_something_else_is_contradicted(
    name: str, old: str, new: str, words: str, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(name).folder, tmp_path / "in")
    config = (tmp_path / "in" / "config.json").read_text()
    assert old in config
    (tmp_path / "in" / "config.json").write_text(config.replace(old, new))
    (group,) = migrate.inspect(tmp_path / "in").number_formats
    assert words in str(group.contradiction)


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_decoded_and_what_stays_plain_are_all_matrices(name: str) -> None:
    report = migrate.inspect(checkpoint(name).folder)
    texts = checkpoint(name).tensors.values()
    # of one all are stored so, vectors too
    every = name == "ct-bitmask-all"
    matrices = sum(every or ("," in text and not text.startswith("I64")) for text in texts)
    counted = [*report.number_formats, *report.plain]
    assert sum(group.count for group in counted) == matrices


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("float8_row", ("fp8", {"granularity": "channel"})),
        ("mx", ("mxfp8", {})),
        ("nvfp4_two", ("nvfp4", {})),
        ("int8_dyn", ("int8", {"granularity": "channel"})),
        ("intx", ("int8", {"group": 32})),
    ],
)
def test_objects_of_torchao_in_pickles_are_named(
    name: str, said: tuple[str, dict[str, object]]
) -> None:
    report = migrate.inspect(FOLDER.parent / "torchao" / f"{name}.pt")
    (group,) = report.number_formats
    (reading,) = group.readings
    assert (reading.format, reading.arguments) == said
    assert reading.producer == "torchao"


@pytest.mark.parametrize(
    ("name", "goal", "size"),
    [("ct-mxfp8", "mxfp8@bf16", 32), ("ct-nvfp4a16", "nvfp4@bf16", 16)],
)
def test_a_configuration_with_groups_of_another_size_is_refused(
    tmp_path: Path, name: str, goal: str, size: int
) -> None:
    folder = shutil.copytree(checkpoint(name).folder, tmp_path / name)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace(f'"group_size": {size}', '"group_size": 64'))
    failed = run("plan", folder, "--to", goal, "--allow", "lossy", "--allow", "drop")
    assert failed.exit == 3
    assert "M315" in failed.err
    assert f"groups of {size}" in failed.err
    assert "groups of 64" in failed.err
