"""The pack `torchao` on what torchao stored: what it decodes is what comes out, to the bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import files, side
from commandline import ROOT, contents, done, run
from genuine import checkpoint, digest, digests

TO = ("--to", "torchao@bf16", "--allow", "lossy")
NAMES = ("torchao-int8", "torchao-intx")
# of the object in each file what torchao 0.18 decodes it to
PICKLES = {
    "int8_dyn": "1d4868d2dc516899a626fcdf27f1c86a478ab311c3f0fbd7d908a004a8cbe6c2",
    "intx": "c385f051857380b6d783c38b52309148dcc5b734bf57c8ff97182e674813d364",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_comes_out_is_what_the_library_decodes(name: str, tmp_path: Path) -> None:
    source, out = checkpoint(name), tmp_path / "out"
    found = done("inspect", source.folder, "--format", "json").json["layouts"]
    assert [f"{one['lineage']}@{one['layout']}" for one in found] == ["torchao@int8"]
    done("apply", source.folder, "-o", out, *TO)
    assert digests(out) == source.tensors
    said = side(source.folder)
    del said["quantization_config"]
    assert side(out) == said
    assert files(out).keys() == {"config.json"}
    verified = done("verify", out, "--source", source.folder, "--format", "json").json
    assert verified["equal"] is True


@pytest.mark.parametrize("name", PICKLES)
def test_objects_in_a_file_of_torch_are_decoded_without_torchao(name: str, tmp_path: Path) -> None:
    source, out = ROOT / "tests" / "data" / "torchao" / f"{name}.pt", tmp_path / "out.safetensors"
    done("apply", source, "-o", out, *TO)
    assert digests(out) == {"weight": f"BF16 [32, 64] {PICKLES[name]}"}


def test_objects_whose_codes_share_bytes_are_in_no_layout() -> None:
    failed = run("plan", ROOT / "tests" / "data" / "torchao" / "int4.pt", *TO)
    assert failed.exit == 2
    assert "not int8-objects: weight.zero_point is bfloat16" in failed.err


def test_the_way_back_is_refused_unless_the_folder_is_there(tmp_path: Path) -> None:
    source, out, undo = checkpoint(NAMES[0]).folder, tmp_path / "out", tmp_path / "undo"
    done("apply", source, "-o", out, *TO, "--undo", undo)
    failed = run("downgrade", out, "-o", tmp_path / "back", "--allow", "lossy")
    assert failed.exit == 3
    assert "error[M405]: rule 'linears' has no way back: torchao reads what it" in failed.err
    done("downgrade", out, "-o", tmp_path / "back", "--undo", undo)
    assert contents(tmp_path / "back") == contents(source)
    assert files(tmp_path / "back") == files(source)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("scale of other rows", "M310", "the scale is [31, 1]"),
        ("float zeros", "M303", "the zero is float32"),
        ("no scale", "M207", "missing: model.layers.0.mlp.down_proj._weight_scale"),
        ("a scale of zero", "M406", "the scale of the numbers from [3, 0] on is 0"),
        ("inputs that are multiplied", "M408", "each layer multiplies its inputs by it"),
        ("fp8 beside", "M207", "_weight_qdata"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: str, code: str, words: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(checkpoint(NAMES[0]).folder, tmp_path / "in")
    file, at = source / "model.safetensors", "model.layers.0.mlp.down_proj._weight_"
    held: dict[str, Any] = load_file(file)
    if change == "scale of other rows":
        held[f"{at}scale"] = held[f"{at}scale"][1:].clone()
    elif change == "float zeros":
        held[f"{at}zero_point"] = held[f"{at}zero_point"].float()
    elif change == "no scale":
        del held[f"{at}scale"]
    elif change == "a scale of zero":
        held[f"{at}scale"][3] = 0
    elif change == "fp8 beside":
        held[f"{at}qdata"] = held[f"{at}qdata"].float().to(torch.float8_e4m3fn)
    else:
        held[f"{at}act_pre_scale"] = torch.ones(64)
    save_file(held, file)
    failed = run("apply", source, "-o", tmp_path / "out", "--from", "torchao@int8", *TO)
    assert failed.exit == 3
    assert f"error[{code}]" in failed.err
    assert words in failed.err
    assert not (tmp_path / "out").exists()


def configuration(name: str) -> Any:
    import torch
    import torchao.quantization as ao

    symmetric, asymmetric = ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC
    kind, _, said = name.partition(" ")
    if kind == "int8":
        of = {"tensor": ao.PerTensor(), "row": ao.PerRow(), "group": ao.PerGroup(32)}[said]
        return ao.Int8WeightOnlyConfig(granularity=of)
    if kind == "dynamic":
        return ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=asymmetric)
    dtype = getattr(torch, kind)
    if said == "rows":
        return ao.IntxWeightOnlyConfig(weight_dtype=dtype, mapping_type=symmetric)
    of = ao.PerGroup(32)
    if said == "dynamic":
        return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=of)
    return ao.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=of, mapping_type=asymmetric)


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "int8 tensor", "int8 row", "int8 group", "dynamic", "int1 groups", "int3 rows",
        "int4 dynamic", "int7 groups",
    ],
)  # fmt: skip
def test_what_torchao_makes_of_a_model_is_decoded_from_both_kinds_of_files(
    name: str, tmp_path: Path
) -> None:
    import torch
    from make_genuine import decoded_by_torchao, save, torchao_model

    model = torchao_model(configuration(name))
    wanted = {}
    for key, tensor in model.state_dict().items():
        raw = decoded_by_torchao(tensor).contiguous().view(torch.uint8).numpy().tobytes()
        wanted[key] = digest("BF16", tuple(tensor.shape), raw)
    save(model, tmp_path / "folder")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    done("apply", tmp_path / "folder", "-o", tmp_path / "out", *TO)
    assert digests(tmp_path / "out") == wanted
    out = tmp_path / "out.safetensors"
    done("apply", tmp_path / "model.pt", "-o", out, *TO)
    assert digests(out) == wanted
