"""GPTQ and AWQ checkpoints that GPTQModel and AutoAWQ packed, decoded by the lineages `gptq` and
`awq`.

What is compared are the numbers that these libraries decode them to, in float16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import contents, done, run, safetensors
from genuine import FOLDER, checkpoint, digests

LOSSY = ("--allow", "lossy")
WORDS = ("--set", "zeros=words")
# name -> where to, and what has to be said
ASKED = {
    "gptq-v1": ("gptq@fp16", *LOSSY, *WORDS),
    "gptq-v2-dynamic": ("gptq@fp16", *LOSSY),
    "gptq-sym": ("gptq@fp16", *LOSSY),
    "awq-gemm": ("awq@fp16", *LOSSY),
    "awq-gemv": ("awq@fp16", *LOSSY),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_decoded_is_what_its_library_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, "--to", *ASKED[name])
    assert digests(out) == genuine.tensors
    before, after = (json.loads((f / "config.json").read_text()) for f in (genuine.folder, out))
    del before["quantization_config"]
    assert after == before
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", ASKED)
def test_there_is_no_way_back(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", out, "--to", *ASKED[name])
    failed = run("downgrade", out, "-o", tmp_path / "back")
    assert failed.exit == 3
    assert "M405" in failed.err
    assert "is only decoded, nothing encodes it" in failed.err
    assert not (tmp_path / "back").exists()


def test_zeros_that_gptqmodel_borrowed_for_are_refused_unless_it_is_said(tmp_path: Path) -> None:
    folder = checkpoint("gptq-v1").folder
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", "gptq@fp16", *LOSSY)
    assert failed.exit == 3
    assert "M406" in failed.err
    assert "is stored as 15, which less 1 can be 0 or 16" in failed.err
    assert "zeros: words" in failed.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ASKED)
def test_bfloat16_is_the_same_numbers_rounded_once(name: str, tmp_path: Path) -> None:
    """Products of float16 scales and codes less zeros are exact in float32."""
    genuine, out = checkpoint(name), tmp_path / "out"
    wide, more = ASKED[name][0].replace("fp16", "bf16"), ASKED[name][1:]
    done("apply", genuine.folder, "-o", out, "--to", wide, *more)
    found, parts = contents(out), contents(genuine.folder)
    decoded = [key for key in found if key not in parts]
    assert decoded
    for key, (dtype, _, data) in found.items():
        if key in parts:
            # what was plain stays what it was
            assert parts[key] == found[key]
            continue
        assert dtype == "BF16"
        exact = numbers(name, key.removesuffix(".weight"), parts)
        bits = exact.astype("<f4").view("<u4").astype("<u8")
        rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
        assert rounded.tobytes() == data, key


def numbers(name: str, module: str, parts: dict[str, Any]) -> Any:
    """The float32 numbers of a module, worked out word by word."""
    raw = {
        role: np.frombuffer(parts[f"{module}.{role}"][2], dtype).reshape(
            parts[f"{module}.{role}"][1]
        )
        for role, dtype in (("qweight", "<u4"), ("qzeros", "<u4"), ("scales", "<f2"))
    }
    scales = raw["scales"].astype("f4")
    rows = scales.shape[1]
    if name == "awq-gemv":
        codes, zeros, scales = fields(raw["qweight"], 4).T, fields(raw["qzeros"], 4).T, scales.T
        index = np.arange(len(codes)) // 32
    elif name == "awq-gemm":
        place = [(n // 8 * 8 + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8]) for n in range(rows)]
        codes, zeros = (np.empty((len(raw[r]), rows), "f4") for r in ("qweight", "qzeros"))
        codes[:, place], zeros[:, place] = fields(raw["qweight"], 4), fields(raw["qzeros"], 4)
        index = np.arange(len(codes)) // 32
    else:
        bits = raw["qzeros"].shape[1] * 32 // rows
        words = (
            raw["qzeros"] + np.uint32(0x11111111)
            if name in ("gptq-v1", "gptq-sym")
            else raw["qzeros"]
        )
        codes, zeros = fields(raw["qweight"].T, bits).T, fields(words, bits)
        index = np.frombuffer(parts[f"{module}.g_idx"][2], "<i4")
    return np.ascontiguousarray(((codes - zeros[index]) * scales[index]).T)


def fields(words: Any, bits: int) -> Any:
    """The codes of rows of words, the lowest bits first."""
    flat = np.unpackbits(np.ascontiguousarray(words).view("u1"), axis=1, bitorder="little")
    each = flat.reshape(len(flat), -1, bits).astype("f4")
    return (each * 2.0 ** np.arange(bits)).sum(-1).astype("f4")


def copied(name: str, folder: Path, **said: Any) -> Path:
    """The checkpoint with another configuration."""
    source = checkpoint(name).folder
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "said", "code", "words"),
    [
        ("gptq-v1", {"bits": 8}, "M315", "4 bits, groups of 32"),
        ("gptq-v1", {"group_size": 64}, "M315", "groups of 64"),
        # GPTQModel's planes look the same
        ("gptq-v2-dynamic", {"checkpoint_format": "gptq_p"}, "M114", "gptq_p"),
        ("awq-gemm", {"group_size": 64}, "M315", "groups of 64"),
        ("awq-gemm", {"bits": 8}, "M315", "awq, 4 bits, groups of 32, gemm by its tensors"),
        ("awq-gemm", {"version": "gemv"}, "M315", "groups of 32, gemm by its tensors"),
        ("awq-gemm", {"version": "marlin"}, "M114", "marlin"),
    ],
)
def test_a_configuration_that_says_something_else_is_refused(
    name: str, said: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    folder = copied(name, tmp_path / "in", **said)
    failed = run("apply", folder, "-o", tmp_path / "x", "--to", *ASKED[name])
    assert failed.exit in (2, 3)
    assert f"error[{code}" in failed.err
    assert failed.err.count("error[") == 1
    assert words in failed.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("goal", ["bf16", "fp16", "compressed-tensors"])
def test_that_v1_is_called_v2_shows_where_zeros_have_to_be_in_the_middle(
    goal: str, tmp_path: Path
) -> None:
    """Nothing else tells: plain weights would be off by a step of their scale."""
    wrong = copied("gptq-sym", tmp_path / "in", checkpoint_format="gptq_v2")
    failed = run("apply", wrong, "-o", tmp_path / "x", "--to", f"gptq@{goal}", *LOSSY)
    assert failed.exit == 3
    assert "error[M406]" in failed.err
    assert not (tmp_path / "x").exists()
    if goal == "compressed-tensors":
        return
    assert "all of the zero are 7 as v2, and as v1 8, the middle of the codes" in failed.err
    assert "correct `checkpoint_format`" in failed.err


def test_that_v2_is_called_v1_shows_too(tmp_path: Path) -> None:
    wrong = copied("gptq-v2-dynamic", tmp_path / "in", checkpoint_format="gptq")
    failed = run("apply", wrong, "-o", tmp_path / "x", "--to", "gptq@fp16", *LOSSY)
    assert failed.exit == 3
    assert "the middle of the codes" in failed.err
    # of other zeros nothing tells
    other = copied("gptq-v2-dynamic", tmp_path / "y", checkpoint_format="gptq", sym=False)
    done("apply", other, "-o", tmp_path / "z", "--to", "gptq@fp16", *LOSSY)


@pytest.mark.parametrize("goal", ["bf16", "fp16", "compressed-tensors"])
def test_an_index_that_the_configuration_tells_of_is_missed_by_name(
    goal: str, tmp_path: Path
) -> None:
    """Columns that were sorted are not in turn, and without the index they would be taken so."""
    module = "model.layers.0.mlp.down_proj"
    for name, sorted_ in (("gptq-v1", True), ("gptq-sym", False)):
        folder = copied(name, tmp_path / name)
        stored = contents(folder)
        del stored[f"{module}.g_idx"]
        safetensors(folder / "model.safetensors", stored)
        made = run("plan", folder, "--to", f"gptq@{goal}", *LOSSY)
        if not sorted_:
            assert made.exit == 0, made.err
            continue
        assert made.exit == 3
        assert (
            f"error[M315]: {module} is gptq, 4 bits, groups of 32, no g_idx by its ten" in made.err
        )
        assert "columns sorted by their groups by config.json" in made.err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gptq-v1", {"dynamic": {r"-:.*\.up_proj$": {}}}),
        ("awq-gemm", {"modules_to_not_convert": ["mlp.up_proj"]}),
    ],
)
def test_codes_that_the_configuration_calls_plain_are_decoded_with_a_warning(
    name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    folder, out = copied(name, tmp_path / "in", **said), tmp_path / "out"
    made = done("apply", folder, "-o", out, "--to", *ASKED[name])
    assert digests(out) == checkpoint(name).tensors
    assert "M519" in made.err
    assert "up_proj" in made.err


def test_both_are_told_apart_without_a_configuration(tmp_path: Path) -> None:
    for name, layout in (("gptq-v1", "gptq"), ("awq-gemm", "awq")):
        folder = checkpoint(name).folder
        bare = tmp_path / f"{name}.safetensors"
        bare.write_bytes((folder / "model.safetensors").read_bytes())
        plan = done("plan", bare, "--to", *ASKED[name], "--format", "json").json
        assert [(step["lineage"], step["from"]) for step in plan["path"]] == [(layout, layout)]


# where to, and what has to be said
REPACKED = {
    "awq-gemm": ("awq@compressed-tensors",),
    "gptq-sym": ("gptq@compressed-tensors",),
    "gptq-v2-dynamic": ("gptq@compressed-tensors",),
}


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_integers_are_the_same_numbers(name: str, tmp_path: Path) -> None:
    """They are decoded by the lineage compressed-tensors to what they are decoded to themselves."""
    folder, packed = checkpoint(name).folder, tmp_path / "packed"
    done("apply", folder, "-o", packed, "--to", *REPACKED[name])
    done("verify", packed, "--source", folder)
    plain = tmp_path / "plain"
    done("apply", folder, "-o", plain, "--to", f"{name.split('-')[0]}@bf16", *LOSSY)
    out = tmp_path / "out"
    done("apply", packed, "-o", out, "--to", "compressed-tensors@bf16", *LOSSY)
    assert digests(out) == digests(plain)


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_integers_return_to_the_bit(name: str, tmp_path: Path) -> None:
    folder, packed, back = checkpoint(name).folder, tmp_path / "packed", tmp_path / "back"
    done("apply", folder, "-o", packed, "--to", *REPACKED[name])
    done("downgrade", packed, "-o", back)
    parts = {k: v for k, v in digests(folder).items() if not k.endswith("g_idx")}
    # which columns belong to a group is what their order says
    assert {k: v for k, v in digests(back).items() if not k.endswith("g_idx")} == parts
    assert quantization(back) == quantization(folder)


def test_integers_with_zeros_of_compressed_tensors_become_awq(tmp_path: Path) -> None:
    folder, awq, out = checkpoint("ct-w4a16-asym").folder, tmp_path / "awq", tmp_path / "out"
    done("apply", folder, "-o", awq, "--from", "awq@compressed-tensors", "--to", "awq@awq")
    assert quantization(awq) == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    done("apply", awq, "-o", out, "--to", "awq@bf16", *LOSSY)
    assert digests(out) == checkpoint("ct-w4a16-asym").tensors


def test_the_bytes_of_awq_are_those_of_compressed_tensors_own_converter(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint("awq-gemm").folder, "-o", out, "--to", *REPACKED["awq-gemm"])
    recoded = json.loads((FOLDER / "recoded.json").read_text())["awq-gemm"]
    assert digests(out).items() >= recoded.items()
    assert sum(key.endswith("weight_packed") for key in recoded) == 13


@pytest.mark.parametrize(
    ("name", "weights", "plain"),
    [
        (
            "awq-gemm",
            {"num_bits": 4, "symmetric": False, "group_size": 32},
            {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate_proj"},
        ),
        (
            "gptq-sym",
            {"num_bits": 4, "symmetric": True, "group_size": 32},
            {"lm_head", "model.embed_tokens"},
        ),
    ],
)
def test_the_configuration_says_how_they_are_packed(
    name: str, weights: dict[str, Any], plain: set[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", out, "--to", *REPACKED[name])
    said = quantization(out)
    assert set(said.pop("ignore")) == plain
    assert said == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "strategy": "group", **weights},
            }
        },
    }
    known = done("inspect", out, "--format", "json").json
    assert {f"{one['lineage']}@{one['layout']}" for one in known["layouts"]} == {
        REPACKED[name][0], "compressed-tensors@int-pack",
    }  # fmt: skip
    assert not any(group["contradiction"] for group in known["number_formats"])


def test_modules_of_other_bits_and_groups_have_a_part_of_the_configuration(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done(
        "apply", checkpoint("gptq-v2-dynamic").folder, "-o", out, "--to", "gptq@compressed-tensors"
    )
    said = quantization(out)
    assert set(said["ignore"]) == {
        "lm_head", "model.embed_tokens", "model.layers.0.self_attn.o_proj"
    }  # fmt: skip
    rest = {"type": "int", "symmetric": True}
    assert said["config_groups"] == {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 3, **rest, "strategy": "group", "group_size": 32},
        },
        "group_1": {
            "targets": [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)],
            "weights": {"num_bits": 8, **rest, "strategy": "channel"},
        },
    }
    known = done("inspect", out, "--format", "json").json
    assert not any(group["contradiction"] for group in known["number_formats"])


@pytest.mark.parametrize(
    ("name", "said", "code", "words"),
    [
        ("gptq-v1", (), "M406", "desc_act"),
        ("awq-gemm", {"version": "gemv"}, "M114", "gemv"),
        ("awq-gemm", {"group_size": 64}, "M510", "group"),
        ("awq-gemm", {"group_size": -1}, "M114", "group"),
        ("gptq-sym", {"bits": 8}, "M315", "gptq, 4 bits, groups of 32"),
    ],
)
def test_what_compressed_tensors_cannot_hold_so_is_refused(
    name: str, said: Any, code: str, words: str, tmp_path: Path
) -> None:
    goal = f"{name.split('-')[0]}@compressed-tensors"
    folder = copied(name, tmp_path / "in", **said) if said else checkpoint(name).folder
    more = ("--set", "group=32") if said == {"group_size": 64} else ()
    failed = run(
        "apply",
        folder,
        "-o",
        tmp_path / "x",
        "--to",
        goal,
        *WORDS[: 2 * (name == "gptq-v1")],
        *more,
    )
    assert failed.exit in (2, 3)
    assert f"error[{code}" in failed.err
    assert words in failed.err
    assert not (tmp_path / "x").exists()
