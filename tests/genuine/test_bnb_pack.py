"""Checkpoints that transformers stored with bitsandbytes, decoded by the lineage `bnb`, and encoded
again.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done, run
from genuine import checkpoint, digests

ASKED = ("--to", "bnb@bf16", "--allow", "lossy")
BACK = ("--allow", "lossy", "--format", "json")
# not nested
PLAIN = ("bnb-nf4-plain", "bnb-fp4")
NAMES = ("bnb-nf4", *PLAIN, "bnb-int8")


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def codes_of(tensor: tuple[str, tuple[int, ...], bytes]) -> list[int]:
    return [code for byte in tensor[2] for code in (byte >> 4, byte & 15)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_is_what_bitsandbytes_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, *ASKED)
    assert digests(out) == genuine.tensors
    before, after = config_of(genuine.folder), config_of(out)
    del before["quantization_config"]
    assert after == before
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", PLAIN)
def test_what_was_encoded_from_bfloat16_comes_back(name: str, tmp_path: Path) -> None:
    folder, out, back = checkpoint(name).folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, *ASKED)
    report = done("downgrade", out, "-o", back, *BACK).json["restored"]
    was, now = contents(folder), contents(back)
    other = [key for key in was if was[key] != now.get(key)]
    assert now.keys() == was.keys()
    assert report == {
        "tensors": 28, "equal": 28 - len(other), "different": sorted(other), "known": "each"
    }  # fmt: skip
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert done("verify", back, "--source", out, "--format", "json").json["equal"] is True
    # FP4 has two codes of 0, of which the upper one comes back as the lower
    assert bool(other) == (name == "bnb-fp4")
    for key in other:
        before, after = (codes_of(found[key]) for found in (was, now))
        assert {*zip(before, after, strict=True)} <= {(8, 0), *((c, c) for c in range(16))}


def test_of_nested_scales_codes_come_back_and_the_plan_names_what_does_not(tmp_path: Path) -> None:
    folder, out, back = checkpoint("bnb-nf4").folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, *ASKED)
    plan = done("plan", folder, *ASKED)
    assert "downgrade: not exact" in plan.out
    assert "weight.nested_absmax" in plan.out
    report = json.loads(done("downgrade", out, "-o", back, *BACK).out)
    assert any("false at quantization_config.bnb_4bit_use_double" in n for n in report["notes"])
    was, now = contents(folder), contents(back)
    lost = {key for key in was if key not in now}
    assert {key.rpartition(".")[2] for key in lost} == {"nested_absmax", "nested_quant_map"}
    other = {key for key in now if now[key] != was[key]}
    assert {key.rpartition(".")[2] for key in other} == {"absmax", "bitsandbytes__nf4"}
    # a loader believes the configuration, which says what is there now and is else as it was
    stored, written = (config_of(f)["quantization_config"] for f in (folder, back))
    assert stored["bnb_4bit_use_double_quant"] is True
    assert written == {**stored, "bnb_4bit_use_double_quant": False}
    # the decoded numbers are the same as far as scales are bfloat16 numbers
    again = tmp_path / "again"
    done("apply", back, "-o", again, *ASKED)
    assert config_of(again) == config_of(out)


def test_what_an_undo_folder_restores_is_what_the_configuration_said(tmp_path: Path) -> None:
    folder, out, back = checkpoint("bnb-nf4").folder, tmp_path / "out", tmp_path / "back"
    done("apply", folder, "-o", out, *ASKED, "--undo", tmp_path / "undo")
    done("downgrade", out, "-o", back, "--undo", tmp_path / "undo")
    assert contents(back) == contents(folder)
    assert config_of(back) == config_of(folder)


def test_nothing_is_written_into_a_configuration_that_says_nothing_of_it(tmp_path: Path) -> None:
    folder, out, back = tmp_path / "in", tmp_path / "out", tmp_path / "back"
    shutil.copytree(checkpoint("bnb-nf4").folder, folder)
    config = config_of(folder)
    del config["quantization_config"]["bnb_4bit_use_double_quant"]
    (folder / "config.json").write_text(json.dumps(config))
    done("apply", folder, "-o", out, *ASKED)
    done("downgrade", out, "-o", back, *BACK)
    assert config_of(back) == config


def test_a_trained_model_is_encoded_as_transformers_does(tmp_path: Path) -> None:
    folder, out = checkpoint("bnb-nf4-plain").folder, tmp_path / "out"
    done("apply", folder, "-o", out, *ASKED)
    (out / "migrate.history.json").unlink()
    (out / "migrate.parts").unlink()
    made = tmp_path / "made"
    asked = ("--from", "bnb@bf16", "--to", "bnb@4bit", "--allow", "lossy")
    done("apply", out, "-o", made, *asked)
    assert contents(made) == contents(folder)
    written, stored = (config_of(f)["quantization_config"] for f in (made, folder))
    assert written["llm_int8_skip_modules"] == ["lm_head", "model.embed_tokens"]
    same = ("quant_method", "load_in_4bit", "_load_in_4bit", "bnb_4bit_quant_type")
    assert {n: written[n] for n in same} == {n: stored[n] for n in same}
    assert written["bnb_4bit_use_double_quant"] is stored["bnb_4bit_use_double_quant"] is False
    # of a kind that transformers did not choose
    done(
        "apply", out, "-o", tmp_path / "fp4", *asked, "--set", "form=fp4", "--set", "blocksize=128"
    )
    found = contents(tmp_path / "fp4")
    assert "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__fp4" in found
    assert found["model.layers.0.mlp.up_proj.weight.absmax"][1] == (32,)


def test_modules_that_are_to_stay_plain_do(tmp_path: Path) -> None:
    folder, out, made = checkpoint("bnb-nf4-plain").folder, tmp_path / "out", tmp_path / "made"
    done("apply", folder, "-o", out, *ASKED)
    (out / "migrate.history.json").unlink()
    done(
        "apply", out, "-o", made, "--from", "bnb@bf16", "--to", "bnb@4bit", "--allow", "lossy",
        "--set", "plain=model.layers.0.mlp.{w}",
    )  # fmt: skip
    found = contents(made)
    assert found["model.layers.0.mlp.up_proj.weight"][0] == "BF16"
    assert found["model.layers.0.self_attn.q_proj.weight"][0] == "U8"
    skipped = config_of(made)["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.0.mlp.up_proj" in skipped
    assert "model.layers.0.self_attn.q_proj" not in skipped


def test_bytes_that_were_read_while_planning_belong_to_the_plan(tmp_path: Path) -> None:
    folder, saved = tmp_path / "in", tmp_path / "plan.json"
    shutil.copytree(checkpoint("bnb-nf4-plain").folder, folder)
    asked = ("plan", folder, *ASKED, "--format", "json")
    done("plan", folder, *ASKED, "-o", saved)
    before = done(*asked).json["digest"]
    file = folder / "model.safetensors"
    # of which nothing follows: a rule says what the numbers become
    said, other = b'"dtype": "bfloat16"', b'"dtype": "float16" '
    data = file.read_bytes()
    assert said in data
    file.write_bytes(data.replace(said, other, 1))
    assert done(*asked).json["digest"] != before
    found = run("apply", saved, "-o", tmp_path / "out")
    assert "M903" in found.err
    assert not (tmp_path / "out").exists()


def test_eight_bits_have_no_way_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint("bnb-int8").folder, "-o", out, *ASKED)
    failed = run("downgrade", out, "-o", tmp_path / "back")
    assert failed.exit == 3
    assert "M405" in failed.err
    assert "is only decoded, nothing encodes it" in failed.err
    assert not (tmp_path / "back").exists()


def test_a_table_that_the_configuration_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(checkpoint("bnb-nf4").folder, folder)
    config = config_of(folder)
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    failed = run("apply", folder, "-o", tmp_path / "out", *ASKED)
    assert failed.exit == 3
    assert "quant_state.bitsandbytes__fp4" in failed.err
    assert not (tmp_path / "out").exists()


MODULE = "model.layers.0.mlp.up_proj.weight"
STATE = f"{MODULE}.quant_state.bitsandbytes__nf4"
SAID = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 64]}


def said(**other: Any) -> bytes:
    return json.dumps({**SAID, **other}).encode()


def changed(folder: Path, **tensors: tuple[str, tuple[int, ...], bytes]) -> Path:
    """The plain NF4 folder with other tensors, by the end of their names."""
    shutil.copytree(checkpoint("bnb-nf4-plain").folder, folder)
    held = contents(folder)
    assert held[STATE][2] == said()
    ends = {"weight": MODULE, "state": STATE}
    held |= {ends.get(end, f"{MODULE}.{end}"): tensor for end, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(file_of(held))
    return folder


def file_of(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    header, data = {}, b""
    # wide elements first, so that all are aligned
    for key, (dtype, shape, raw) in sorted(tensors.items(), key=lambda t: t[1][0] == "U8"):
        where = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": where}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def bytes_of(raw: bytes) -> tuple[str, tuple[int, ...], bytes]:
    return "U8", (len(raw),), raw


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (b'{"quant_type": "nf4"', "not JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"a":' * 1500 + b"1" + b"}" * 1500, "nested too deeply"),
        (b" " * 65_537, "is uint8 [65537]"),
        (said(shape=[64, 65]), "that of numbers of [64, 65] is [2080, 1]"),
        (said(shape=[2**40, 2**30]), "that of numbers of [1099511627776, 1073741824]"),
        (said(shape=None), "shape of the state is None"),
        (said(blocksize=2**63), "blocksize of the state is 9223372036854775808"),
        (said(blocksize=32), "the absmax is [64], that of numbers of [64, 64]"),
        (said(quant_type="int4"), "quant_type of the state is 'int4', not nf4 or fp4"),
        (said(quant_type="fp4"), "`form` is nf4, the state says fp4"),
        (said(nested_blocksize=256, nested_offset=0), "the state says that there is a nested_"),
    ],
)
def test_json_that_is_broken_or_does_not_fit_is_refused_while_planning(
    state: bytes, words: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "in", state=bytes_of(state))
    failed = run("plan", folder, *ASKED)
    assert failed.exit == 3
    assert words in failed.err
    assert MODULE in failed.err
    assert "= help: " in failed.err


@pytest.mark.parametrize(
    ("end", "tensor", "code", "words"),
    [
        ("absmax", ("F32", (63,), bytes(252)), "M310", "the absmax is [63]"),
        ("absmax", ("F32", (64, 1), bytes(256)), "M310", "the absmax is [64, 1]"),
        ("absmax", ("F32", (1, 64), bytes(256)), "M310", "the absmax is [1, 64]"),
        ("weight", ("U8", (2048, 1, 1), bytes(2048)), "M310", "the weight is [2048, 1, 1]"),
        ("absmax", ("U8", (64,), bytes(64)), "M303", "the absmax is uint8"),
        ("quant_map", ("F32", (15,), bytes(60)), "M310", "codes of 4 bits look up 16 numbers"),
        ("quant_map", ("F32", (256,), bytes(1024)), "M310", "codes of 4 bits look up 16 numbers"),
        ("weight", ("U8", (2047, 1), bytes(2047)), "M310", "the weight is [2047, 1]"),
        # as bnb_4bit_quant_storage has them
        ("weight", ("BF16", (1024, 1), bytes(2048)), "M207", f"missing: {MODULE}"),
    ],
)
def test_parts_that_do_not_fit_are_refused_while_planning(
    end: str, tensor: tuple[str, tuple[int, ...], bytes], code: str, words: str, tmp_path: Path
) -> None:
    failed = run("plan", changed(tmp_path / "in", **{end: tensor}), *ASKED)
    assert failed.exit == 3
    assert f"error[{code}]" in failed.err
    assert words in failed.err
    assert MODULE in failed.err


def test_nested_scales_that_the_configuration_denies_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(checkpoint("bnb-nf4").folder, folder)
    config = config_of(folder)
    config["quantization_config"]["bnb_4bit_use_double_quant"] = False
    (folder / "config.json").write_text(json.dumps(config))
    failed = run("plan", folder, *ASKED)
    assert failed.exit == 3
    assert failed.err.count("error[") == 1
    assert "error[M315]" in failed.err
    assert "bnb-4bit, nf4, scales quantized again by its tensors" in failed.err
    assert "scales not quantized by config.json#quantization_config" in failed.err
    # a configuration that does not say it is none that contradicts
    del config["quantization_config"]["bnb_4bit_use_double_quant"]
    (folder / "config.json").write_text(json.dumps(config))
    done("plan", folder, *ASKED)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_scale_that_no_encoder_makes_stops_the_run_unless_it_is_to_be_kept(
    value: float, tmp_path: Path
) -> None:
    raw = bytearray(contents(checkpoint("bnb-nf4-plain").folder)[f"{MODULE}.absmax"][2])
    raw[12:16] = struct.pack("<f", value)
    folder = changed(tmp_path / "in", absmax=("F32", (64,), bytes(raw)))
    failed = run("apply", folder, "-o", tmp_path / "out", *ASKED)
    assert failed.exit == 3
    assert "error[M406]" in failed.err
    assert f"the absmax of the numbers from [3, 0] on is {value:g}" in failed.err
    assert MODULE in failed.err
    assert not (tmp_path / "out").exists()
    done("apply", folder, "-o", tmp_path / "kept", *ASKED, "--set", "scales=keep")
