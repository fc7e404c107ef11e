"""GGUF files, made byte by byte: what the reader says of them, and what commands make of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done, run
from gguf_files import (
    F16,
    F32,
    IQ4_XS,
    Q8_0,
    Tensor,
    bfloat16,
    floats,
    gguf,
    value,
)  # fmt: skip

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError, MigrateError
from migrate.core.spec import Spec
from migrate.formats._ggufheader import MOST_ITEMS, MOST_KEPT, shortest
from migrate.source.ggml_types import TYPES

CODES = bytes(range(68))
TENSORS = {
    # ggml names the shortest step first
    "a.weight": Tensor((2, 3), F32, floats(0, 1, 2, 3, 4, 5)),
    "b.weight": Tensor((32, 2), Q8_0, CODES),
    "b.bias": bfloat16(5),
    "empty": Tensor((0, 4), F16, b""),
}
VALUES = {
    "general.architecture": value("str", "llama"),
    "llama.block_count": value("u32", 2),
    "llama.attention.layer_norm_rms_epsilon": value("f32", 1e-5),
    "llama.large": value("u64", 2**64 - 1),
    "llama.flags": value("[bool]", [True, False]),
    "tokenizer.chat_template": value("str", "{{ x }}"),
    "tokenizer.chat_template.tools": value("str", "é"),
    "tokenizer.ggml.tokens": value("[str]", [f"t{n}" for n in range(MOST_ITEMS + 1)]),
    "tokenizer.ggml.scores": value("[f32]", [0.5] * (MOST_ITEMS + 1)),
    "tokenizer.ggml.merges": value("[str]", ["a b"] * 3),
}
RULES = """\
id: demo/v2/x
title: A change
lineage: demo
edge: [v1, v2]
params:
  layers: {type: int, config: gguf.json#llama.block_count}
  architecture: {type: str, config: gguf.json#general.architecture}
  epsilon: {type: float, config: gguf.json#llama.attention.layer_norm_rms_epsilon}
  tied: {type: bool, absent: output.weight}
  biased: {type: bool, absent: [b.bias, "{m}.bias"]}
files:
  config.json:
    num_hidden_layers: $layers
    model_type: $architecture
    eps: $epsilon
    tied: $tied
    plain: $biased
  gguf.json: null
keep: ["{k...}"]
rules:
  - {name: a, from: a.weight, to: c.weight, via: [{transpose: {dims: [0, 1]}}]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(TENSORS, VALUES))
    return path


def test_plain_tensors_are_tensors_and_blocks_are_bytes_with_their_type(file: Path) -> None:
    source = formats.open(file)
    assert {key: at.spec for key, at in source.index.tensors.items()} == {
        "a.weight": Spec("float32", (3, 2)),
        "b.weight": Spec("uint8", (2, 34)),
        "b.weight_type": Spec("int32", ()),
        "b.bias": Spec("bfloat16", (5,)),
        "empty": Spec("float16", (4, 0)),
    }
    read = {
        key: source.blobs[at.blob].read(at.offset, at.spec.nbytes)
        for key, at in source.index.tensors.items()
    }
    assert read["a.weight"] == floats(0, 1, 2, 3, 4, 5)
    assert read["b.weight"] == CODES
    assert read["b.weight_type"] == struct.pack("<i", Q8_0)
    assert source.index.notes[0] == "types of GGUF: f32 ×1, q8_0 ×1, bf16 ×1, f16 ×1"
    source.close()


def test_key_values_are_a_side_file_and_long_ones_say_their_length(file: Path) -> None:
    source = formats.open(file)
    text = source.side_file("gguf.json")
    assert [(f.path, f.size) for f in source.index.side_files] == [("gguf.json", len(text))]
    assert json.loads(text) == {
        "general": {"architecture": "llama"},
        "llama": {
            "block_count": 2,
            "attention": {"layer_norm_rms_epsilon": 1e-5},
            "large": 2**64 - 1,
            "flags": [True, False],
        },
        "tokenizer": {
            "chat_template": {"": "{{ x }}", "tools": "é"},
            "ggml": {
                "tokens": {"type": "string", "length": MOST_ITEMS + 1},
                "scores": {"type": "float32", "length": MOST_ITEMS + 1},
                "merges": ["a b"] * 3,
            },
        },
    }
    assert source.index.notes[1:] == (
        "gguf.json has the lengths alone of tokenizer.ggml.tokens, tokenizer.ggml.scores",
    )
    with pytest.raises(KeyError):
        source.side_file("config.json")
    source.close()


@pytest.mark.parametrize("number", [1e-5, 1e-6, 500000.0, 0.1, 1 / 3, 3.4028235e38, 1e-45, 0.0])
def test_a_float32_is_the_shortest_number_that_it_can_be(number: float) -> None:
    (stored,) = struct.unpack("<f", struct.pack("<f", number))
    found = shortest(stored)
    assert struct.pack("<f", found) == struct.pack("<f", number)
    assert len(repr(found)) <= len(repr(stored))
    if number != 1 / 3:
        assert found == number


@pytest.mark.parametrize("number", [float("inf"), float("-inf")])
def test_what_is_not_finite_stays(number: float) -> None:
    assert shortest(number) == number


def test_what_is_kept_of_all_key_values_is_limited(tmp_path: Path) -> None:
    """In JSON a control character takes six letters, and an item of an array a line."""
    path = tmp_path / "m.gguf"
    texts = {f"t.{n}": value("str", "\0" * 60_000) for n in range(40)}
    arrays = {f"a.{n}": value("[u8]", [0] * 1000) for n in range(2000)}
    path.write_bytes(gguf(TENSORS, {**texts, **arrays, "b": value("u32", 7)}))
    source = formats.open(path)
    held = json.loads(source.side_file("gguf.json"))
    kept = [text for text in held["t"].values() if isinstance(text, str)]
    assert len(kept) == MOST_KEPT // 60_000
    assert held["t"]["39"] == {"type": "string", "length": 60_000}
    assert held["a"]["1999"] == {"type": "uint8", "length": 1000}
    assert held["b"] == 7
    assert source.index.side_files[0].size < 8 * MOST_KEPT
    source.close()


def test_a_file_without_tensors_holds_none(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({}, {}))
    with formats.open(path) as source:
        assert not source.index.tensors


def test_version_2_and_any_alignment_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    values = {"general.alignment": value("u32", 8)}
    path.write_bytes(gguf(TENSORS, values, version=2, alignment=8))
    with formats.open(path) as source:  # type: ignore[attr-defined]
        at = source.index.tensors["b.weight"]
        assert at.offset % 8 == 0
        assert source.blobs[0].read(at.offset, 68) == CODES


def test_a_file_is_known_by_its_begin_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "sha256-0a1b"
    path.write_bytes(gguf(TENSORS, VALUES))
    source = formats.open(path)
    assert source.format == "gguf"
    source.close()


def test_types_that_no_rule_reads_are_bytes_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tensors = {
        "a": Tensor((256, 2), IQ4_XS, bytes(272)),
        "b": Tensor((4,), 99, bytes(40)),
        "c": bfloat16(3),
    }
    path.write_bytes(gguf(tensors))
    source = formats.open(path)
    held = {key: at.spec for key, at in source.index.tensors.items()}
    assert held["a"] == Spec("uint8", (2, 136))
    # how long it is nothing says: it has all bytes up to the next one
    assert held["b"] == Spec("uint8", (64,))
    assert source.index.notes[:2] == (
        "types of GGUF: iq4_xs ×1, type 99 ×1, bf16 ×1",
        "1 tensor of unknown types: b; they are carried as bytes, with the padding behind them",
    )
    source.close()


def test_sizes_of_types_are_those_of_whole_blocks() -> None:
    assert all(kind.nbytes * 8 >= kind.elements for kind in TYPES.values())
    assert {number for number, kind in TYPES.items() if kind.number != number} == set()
    assert all((kind.dtype is None) == (kind.elements > 1) for kind in TYPES.values())


def split(folder: Path) -> Path:
    """Two shards as llama-gguf-split writes them: key-values in the first, numbered from 0."""
    folder.mkdir()
    names = list(TENSORS)
    for number, held in enumerate((names[:2], names[2:])):
        values = {
            "split.no": value("u16", number),
            "split.count": value("u16", 2),
            "split.tensors.count": value("i32", 4),
        }
        first = VALUES if number == 0 else {}
        path = folder / f"m-0000{number + 1}-of-00002.gguf"
        path.write_bytes(gguf({n: TENSORS[n] for n in held}, {**first, **values}))
    return folder


@pytest.mark.parametrize("passed", ["", "m-00001-of-00002.gguf"])
def test_shards_are_one_checkpoint(tmp_path: Path, file: Path, passed: str) -> None:
    folder = split(tmp_path / "split")
    source, whole = formats.open(folder / passed), formats.open(file)
    assert source.index.hash() == whole.index.hash()
    assert source.side_file("gguf.json") == whole.side_file("gguf.json")
    assert source.index.files == ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert source.index.tensors["b.bias"].blob == 1
    source.close()
    whole.close()
    assert run("diff", file, folder / passed).exit == 0


def test_the_second_of_two_shards_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"M915.*is not the first file of m-"):
        formats.open(split(tmp_path / "split") / "m-00002-of-00002.gguf")


def test_where_a_folder_has_safetensors_too_those_are_the_checkpoint(
    tmp_path: Path, file: Path
) -> None:
    folder = tmp_path / "both"
    done("apply", file, "-o", folder, "--output-format", "safetensors", "-q")
    (folder / "m.gguf").write_bytes(file.read_bytes())
    source = formats.open(folder)
    assert (source.format, source.index.left_out) == ("safetensors", ("m.gguf",))
    source.close()


def test_without_rules_blocks_stay_bytes_beside_their_types(tmp_path: Path, file: Path) -> None:
    out = tmp_path / "out"
    done("apply", file, "-o", out, "--output-format", "safetensors", "-q")
    held = contents(out / "model.safetensors")
    assert held["b.weight"] == ("U8", (2, 34), CODES)
    assert held["b.weight_type"] == ("I32", (), struct.pack("<i", Q8_0))
    assert held["a.weight"] == ("F32", (3, 2), floats(0, 1, 2, 3, 4, 5))
    source = formats.open(file)
    assert (out / "gguf.json").read_bytes() == source.side_file("gguf.json")
    source.close()
    assert run("diff", file, out).exit == 0


def test_rules_ask_the_key_values_and_change_them(tmp_path: Path, file: Path) -> None:
    rules, out = tmp_path / "r.yaml", tmp_path / "out"
    rules.write_text(RULES)
    done("apply", file, "-o", out, "--rules", rules, "-q")
    assert json.loads((out / "config.json").read_text()) == {
        "num_hidden_layers": 2, "model_type": "llama", "eps": 1e-5, "tied": True, "plain": False,
    }  # fmt: skip
    assert not (out / "gguf.json").exists()
    assert contents(out / "model.safetensors")["c.weight"] == (
        "F32", (2, 3), floats(0, 2, 4, 1, 3, 5),
    )  # fmt: skip
    done("verify", out, "--source", file, "--rules", rules)


def test_a_param_that_the_key_values_contradict_is_refused(tmp_path: Path, file: Path) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text(RULES)
    found = run("plan", file, "--rules", rules, "--set", "layers=3")
    assert found.exit == 2
    assert "M510" in found.err
    assert "gguf.json#llama.block_count says 2" in found.err


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"offset": 0}, ["y: starts at 0 of the data, and x ends at 32: they overlap",
                         "z: starts at 64 of the data, and y ends at 32: 32 unclaimed bytes"]),
        ({"offset": 1 << 40}, ["z: starts at 64 of the data, and x ends at 32: 32 unclaimed",
                               "y: ends at 1099511627"]),
        ({"lengths": (1 << 63,)}, ["y: the shape [9223372036854775808] has more elements than"]),
    ],
)  # fmt: skip
def test_one_tensor_that_lies_is_not_said_of_all_that_follow(
    claims: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    held = Tensor((4,), F32, floats(1, 2, 3, 4))
    path = tmp_path / "x.gguf"
    tensors = {"x": held, "y": held._replace(**claims), "z": held, "last": held}
    path.write_bytes(gguf(tensors))
    for command in ("inspect", "plan"):
        failed = run(command, path, *(["--to", "gguf-llama@hf"] if command == "plan" else []))
        assert failed.exit == 3
        lines = [line for line in failed.err.splitlines() if line.startswith("error[M906]")]
        assert len(lines) == len(said), failed.err
        for line, words in zip(lines, said, strict=True):
            assert words in line
        assert failed.err.count("fetch it again") == len(said)


def test_nothing_is_written_as_gguf(tmp_path: Path, file: Path) -> None:
    found = run("apply", file, "-o", tmp_path / "out", "--output-format", "gguf")
    assert found.exit == 2
    assert "gguf" in found.err
    with pytest.raises(MigrateError, match="M115"):
        migrate.apply(file, tmp_path / "out", output_format="gguf")
    found = run("apply", file, "-o", tmp_path / "out.gguf")
    assert found.exit == 2
    assert "M115" in found.err
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_after_the_plan_is_refused(tmp_path: Path, file: Path) -> None:
    rules, plan = tmp_path / "r.yaml", tmp_path / "plan.json"
    rules.write_text(RULES)
    done("plan", file, "--rules", rules, "-o", plan)
    file.write_bytes(gguf(TENSORS, {**VALUES, "llama.block_count": value("u32", 3)}))
    found = run("apply", plan, "-o", tmp_path / "out")
    assert found.exit != 0
    assert "M903" in found.err
    assert not (tmp_path / "out").exists()


def test_inspect_shows_key_values_types_and_tensors(file: Path) -> None:
    found = run("inspect", file)
    assert found.exit == 0, found.err
    assert "gguf.json" in found.out
    assert "types of GGUF: f32 ×1, q8_0 ×1, bf16 ×1, f16 ×1" in found.out


@pytest.mark.heavy
def test_a_module_is_loaded_from_it(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"weight": TENSORS["a.weight"], "bias": bfloat16(3)}))
    model = torch.nn.Linear(2, 3, dtype=torch.float32)
    migrate.load(model, path)
    assert torch.equal(model.weight, torch.arange(6.0).reshape(3, 2))
    assert torch.equal(model.bias, torch.arange(3.0))
