"""What compressed-tensors' `convert_checkpoint` makes of the same folders, and where it fails; what
GPTQModel's `dequantize_model` made of them when it was run once (`gptqmodel.json`).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done
from genuine import checkpoint, digests

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore")]

ALLOW = ("--allow", "lossy", "--allow", "drop")
# all that is called `weight` and has no scale; without these it refuses formats whose codes are
# called so as well
PLAIN = ["re:.*(embed_tokens|norm)$"]
# name -> (arguments of CompressedTensorsDequantizer, what it says)
REFUSED = {
    # `targets: [Linear]` is taken for every module, the embedding too
    "ct-fp8-tensor": ({}, "model.embed_tokens.weight_scale not found"),
    "ct-fp8-channel": ({}, "model.embed_tokens.weight_scale not found"),
    "ct-fp8-block": ({}, "model.embed_tokens.weight_scale not found"),
    "ct-mxfp8": ({}, "model.embed_tokens.weight_scale not found"),
    # scales of inputs that its own library wrote
    "ct-nvfp4": ({}, "14 residual quantization param"),
    "ct-fp8-tensor, ignore": ({"ignore": PLAIN}, "7 residual quantization param"),
    # a ragged block is a part of a padded tensor, which it cannot save
    "ct-fp8-block, ignore": ({"ignore": PLAIN}, "non contiguous tensor"),
}


@pytest.fixture(scope="module")
def convert() -> Any:
    """`convert_checkpoint` and its converters; it needs Python 3.11."""
    made = pytest.importorskip("compressed_tensors.entrypoints.convert")
    from loguru import logger

    logger.disable("compressed_tensors")
    return made


def converted(convert: Any, folder: Path, into: Path, *converters: Any) -> Path:
    convert.convert_checkpoint(folder, into, list(converters), max_workers=1, device="cpu")
    return into


@pytest.mark.parametrize(
    "name",
    [
        "ct-fp8-channel",
        "ct-nvfp4a16",
        "ct-mxfp4",
        "ct-mxfp6",
        "ct-mxfp8",
        "ct-mixed",
        "ct-mixed-int",
    ],
)
def test_convert_checkpoint_decodes_what_its_library_wrote(
    convert: Any, name: str, tmp_path: Path
) -> None:
    one = checkpoint(name)
    decode = convert.CompressedTensorsDequantizer(one.folder, ignore=PLAIN)
    assert digests(converted(convert, one.folder, tmp_path / "out", decode)) == one.tensors


@pytest.mark.parametrize("case", REFUSED)
def test_convert_checkpoint_refuses_some_of_it(convert: Any, case: str, tmp_path: Path) -> None:
    arguments, said = REFUSED[case]
    folder = checkpoint(case.split(",")[0]).folder
    with pytest.raises(ValueError, match=said):
        converted(
            convert,
            folder,
            tmp_path / "out",
            convert.CompressedTensorsDequantizer(folder, **arguments),
        )


def test_convert_checkpoint_reads_no_scales_of_one_byte(convert: Any, tmp_path: Path) -> None:
    folder = checkpoint("hf-fp8-block-ue8m0").folder
    decode = convert.FP8BlockDequantizer.from_pretrained(folder, weight_block_size=(32, 32))
    with pytest.raises(KeyError, match="F8_E8M0"):
        converted(convert, folder, tmp_path / "out", decode)


@pytest.mark.parametrize("name", ["hf-fp8-block", "hf-fp8-block-moe"])
def test_convert_checkpoint_decodes_blocks_as_transformers_does(
    convert: Any, name: str, tmp_path: Path
) -> None:
    one = checkpoint(name)
    decode = convert.FP8BlockDequantizer.from_pretrained(one.folder, weight_block_size=(32, 32))
    assert digests(converted(convert, one.folder, tmp_path / "out", decode)) == one.tensors


def test_convert_checkpoint_leaves_codes_whose_scales_it_does_not_know(
    convert: Any, tmp_path: Path
) -> None:
    """As transformers does with what it saved itself: nothing is said, and codes stay codes."""
    one = checkpoint("hf-fp8-block-moe-saved")
    decode = convert.FP8BlockDequantizer.from_pretrained(one.folder, weight_block_size=(32, 32))
    made = digests(converted(convert, one.folder, tmp_path / "out", decode))
    assert made["model.layers.0.mlp.experts.0.down_proj.weight"].startswith("F8_E4M3")


@pytest.mark.parametrize("name", ["modelopt-nvfp4", "modelopt-nvfp4-moe"])
def test_convert_checkpoint_takes_over_nvfp4_of_modelopt(
    convert: Any, name: str, tmp_path: Path
) -> None:
    """Codes and scales of blocks as they are, reciprocals of the others: what the lineage nvfp4
    makes of it. hf_quant_config.json stays, and says that this is ModelOpt's.
    """
    source = checkpoint(name).folder
    take = convert.ModelOptNvfp4Converter(
        targets=["Linear"], ignore=["re:.*mlp.gate$", "lm_head", *PLAIN]
    )
    folder = converted(convert, source, tmp_path / "out", take)
    before, after = contents(source), contents(folder)
    names = {"weight": "weight_packed", "weight_scale": "weight_scale"}
    inverted = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    modules = {key.removesuffix("_2") for key in before if key.endswith("weight_scale_2")}
    for module in (name.removesuffix(".weight_scale") for name in modules):
        for one, other in names.items():
            assert after[f"{module}.{other}"] == before[f"{module}.{one}"]
        for one, other in inverted.items():
            (value,) = struct.unpack("<f", before[f"{module}.{one}"][2])
            assert after[f"{module}.{other}"][2] == struct.pack("<f", 1 / value)
    ours = tmp_path / "ours"
    done("apply", source, "-o", ours, "--to", "nvfp4@compressed-tensors", *ALLOW)
    made = contents(ours)
    # without the axis that its own library gives them
    odd = {key for key, (_, shape, _) in after.items() if not shape}
    assert {key.rpartition(".")[2] for key in odd} == set(inverted.values())
    assert made == {**after, **{key: ("F32", (1,), after[key][2]) for key in odd}}
    assert (folder / "hf_quant_config.json").exists()
    assert not (ours / "hf_quant_config.json").exists()
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["format"] == "nvfp4-pack-quantized"


def test_convert_checkpoint_packs_awq_as_the_lineage_does(convert: Any, tmp_path: Path) -> None:
    """All tensors to the bit. Its list of modules that stay plain is one of expressions."""
    source = checkpoint("awq-gemm").folder
    take = convert.AutoAWQConverter.from_pretrained(source)
    folder = converted(convert, source, tmp_path / "out", take)
    done("apply", source, "-o", tmp_path / "ours", "--to", "awq@compressed-tensors")
    assert contents(tmp_path / "ours") == contents(folder)
    theirs, ours = (
        json.loads((one / "config.json").read_text())["quantization_config"]
        for one in (folder, tmp_path / "ours")
    )
    (group,), (own,) = (said["config_groups"].values() for said in (theirs, ours))
    assert own["weights"].items() <= group["weights"].items()
    assert own["targets"] == group["targets"]
    for name in ("format", "quant_method", "quantization_status"):
        assert ours[name] == theirs[name]
    assert "model.layers.1.mlp.gate_proj" in ours["ignore"]


@pytest.mark.parametrize(
    ("codes", "block"),
    [
        ("float8_e4m3fn", [128, 128]), ("float8_e4m3fnuz", None), ("float8_e5m2fnuz", None),
    ],
)  # fmt: skip
def test_torchao_decodes_what_it_stores_to_the_same_numbers(
    codes: str, block: list[int] | None, tmp_path: Path
) -> None:
    import torch
    import torchao.quantization as quantization
    from safetensors.torch import save_file
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    numbers = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    granularity = quantization.PerBlock(block) if block else quantization.PerRow()
    made = quantization.Float8Tensor.from_hp(numbers, getattr(torch, codes), granularity)
    parts, metadata = flatten_tensor_state_dict({"l.q_proj.weight": made})
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(parts, source, metadata=metadata)
    (group,) = done("inspect", source, "--format", "json").json["number_formats"]
    named = {(one["format"], one["producer"]) for one in group["readings"]}
    assert named == {("fp8-block" if block else "fp8", "torchao")}
    done("apply", source, "-o", out, "--to", "fp8@bf16", "--allow", "lossy")
    ((dtype, shape, data),) = contents(out).values()
    assert (dtype, shape) == ("BF16", (256, 384))
    assert data == made.dequantize(torch.bfloat16).view(torch.uint8).numpy().tobytes()
