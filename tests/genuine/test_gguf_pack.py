"""GGUF files that gguf-py wrote, decoded by the lineage `gguf-llama`: to the bits of gguf-py and of
transformers' own reader, with a configuration that makes the same model.
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
from gguf_files import F16, F32, IQ4_XS, Tensor, floats, gguf, value
from gguf_models import MODELS

import migrate
from migrate import formats

ASKED = ("--to", "gguf-llama@hf", "--allow", "lossy")
FLOAT32: dict[str, Any] = {
    "to": "gguf-llama@hf",
    "params": {"dtype": "float32"},
    "allow": ["lossy"],
}


def file_of(name: str) -> Path:
    return checkpoint(name).folder / "model.gguf"


@pytest.mark.parametrize("name", MODELS)
def test_what_is_decoded_is_what_gguf_py_decodes(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", file_of(name), "-o", out, *ASKED)
    assert digests(out) == checkpoint(name).tensors
    found = done("verify", out, "--source", file_of(name), "--format", "json").json
    assert found["equal"] is True


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", file_of(name), "-o", out, *ASKED, "--set", "dtype=float16")
    kind, said = MODELS[name]
    if name == "gguf-mistral":
        # the file says llama, and Llama computes the same
        name, kind = "gguf-llama", "LlamaForCausalLM"
    written = json.loads((out / "config.json").read_text())
    assert written == {
        "architectures": [kind],
        "model_type": name.removeprefix("gguf-"),
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "rope_scaling": {"rope_type": "default"},
        **said,
    }
    assert not (out / "gguf.json").exists()
    assert {dtype for dtype, _, _ in contents(out).values()} == {"F16"}


def test_float32_holds_all_that_bfloat16_rounds(tmp_path: Path) -> None:
    """Rounded once more, they are the bits that were decoded to bfloat16."""
    import numpy as np

    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    done("apply", file_of("gguf-llama"), "-o", wide, *ASKED, "--set", "dtype=float32")
    done("apply", file_of("gguf-llama"), "-o", narrow, *ASKED)
    rounded = contents(narrow)
    for key, (dtype, shape, data) in contents(wide).items():
        assert (dtype, shape) == ("F32", rounded[key][1])
        bits = np.frombuffer(data, "<u4").astype(np.uint64)
        halves = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        assert halves.astype("<u2").tobytes() == rounded[key][2], key


def test_a_folder_with_other_files_keeps_them_beside(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(checkpoint("gguf-qwen2").folder, folder)
    (folder / "README.md").write_text("read me")
    done("apply", folder, "-o", out, *ASKED)
    assert (out / "README.md").read_text() == "read me"
    assert digests(out) == checkpoint("gguf-qwen2").tensors


@pytest.mark.parametrize("written_as", [("dcp", "out"), ("torch", "out.pt")])
def test_other_formats_hold_the_same(written_as: tuple[str, str], tmp_path: Path) -> None:
    form, name = written_as
    done("apply", file_of("gguf-qwen3"), "-o", tmp_path / "hf", *ASKED)
    done("apply", file_of("gguf-qwen3"), "-o", tmp_path / name, *ASKED, "--output-format", form)
    report = run("diff", tmp_path / "hf", tmp_path / name, "--format", "json")
    assert report.exit == 0, report.out


def test_one_file_has_no_place_for_the_configuration_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    said = done("apply", file_of("gguf-qwen3"), "-o", out, *ASKED)
    assert "changes config.json, gguf.json, which only a folder has" in said.out
    assert digests(out) == checkpoint("gguf-qwen3").tensors


def test_there_is_no_way_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", file_of("gguf-qwen3"), "-o", out, *ASKED)
    failed = run("downgrade", out, "-o", tmp_path / "back")
    assert failed.exit == 3
    assert "M405" in failed.err
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["gguf-llama", "gguf-qwen2"])
def test_with_what_was_kept_all_blocks_come_back_in_safetensors(name: str, tmp_path: Path) -> None:
    out, undo, back = tmp_path / "out", tmp_path / "undo", tmp_path / "back"
    drop = ("--allow", "drop")
    done("apply", file_of(name), "-o", out, *ASKED, *drop, "--undo", undo)
    assert digests(out) == checkpoint(name).tensors
    done("downgrade", out, "-o", back, "--undo", undo)
    assert done("diff", file_of(name), back, "--format", "json").json["tensors_equal"] is True
    source = formats.open(file_of(name))
    assert (back / "gguf.json").read_bytes() == source.side_file("gguf.json")
    source.close()
    assert not (back / "config.json").exists()
    # and are decoded as the file was
    done("apply", back, "-o", tmp_path / "again", *ASKED, *drop)
    assert digests(tmp_path / "again") == checkpoint(name).tensors


def changed(name: str, before: bytes, after: bytes, path: Path) -> Path:
    data = file_of(name).read_bytes()
    assert data.count(before) == 1
    assert len(before) == len(after)
    path.write_bytes(data.replace(before, after))
    return path


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said)) + said.encode()


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    """It has Llama's names, and nothing else shows that its rows may be in another order."""
    path = changed(
        "gguf-llama",
        text("llama") + text("general.name")[:8],
        text("gemma") + text("general.name")[:8],
        tmp_path / "m.gguf",
    )
    failed = run("plan", path, *ASKED)
    assert failed.exit == 2
    assert "M114" in failed.err
    assert "general.architecture" in failed.err or "architecture" in failed.err
    assert "gemma" in failed.err


def small(**more: Tensor) -> dict[str, Tensor]:
    """A model of architecture llama, of one layer and a vocabulary of two, by GGUF's names."""
    plain = {
        "token_embd": (256, 2), "blk.0.attn_q": (256, 4), "blk.0.attn_k": (256, 4),
        "blk.0.attn_v": (256, 4), "blk.0.attn_output": (4, 256), "blk.0.ffn_gate": (256, 2),
        "blk.0.ffn_up": (256, 2), "blk.0.ffn_down": (2, 256),
    }  # fmt: skip
    made = {
        f"{name}.weight": Tensor(lengths, F16, bytes(2 * lengths[0] * lengths[1]))
        for name, lengths in plain.items()
    }
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        made[f"{norm}.weight"] = Tensor((256,), F32, floats(*[1.0] * 256))
    return {**made, **{name.replace("__", "."): tensor for name, tensor in more.items()}}


SAID: dict[str, tuple[str, Any]] = {
    "general.architecture": ("str", "llama"),
    "llama.block_count": ("u32", 1),
    "llama.embedding_length": ("u32", 256),
    "llama.feed_forward_length": ("u32", 2),
    "llama.context_length": ("u32", 8),
    "llama.attention.head_count": ("u32", 1),
    "llama.attention.head_count_kv": ("u32", 1),
    "llama.attention.layer_norm_rms_epsilon": ("f32", 1e-5),
}


def written(path: Path, tensors: dict[str, Tensor], **more: tuple[str, Any]) -> Path:
    said = {**SAID, **{key.replace("__", "."): found for key, found in more.items()}}
    path.write_bytes(gguf(tensors, {key: value(*found) for key, found in said.items()}))
    return path


def test_a_type_that_is_not_decoded_is_refused_by_its_name(tmp_path: Path) -> None:
    held = small(blk__0__attn_v__weight=Tensor((256, 4), IQ4_XS, bytes(4 * 136)))
    path = written(tmp_path / "m.gguf", held)
    failed = run("plan", path, *ASKED)
    assert failed.exit == 3
    assert "M310" in failed.err
    assert "iq4_xs" in failed.err
    assert "blk.0.attn_v.weight" in failed.err
    # as bytes it can be carried
    done("apply", path, "-o", tmp_path / "out", "--output-format", "safetensors")
    assert contents(tmp_path / "out")["blk.0.attn_v.weight"][:2] == ("U8", (4, 136))


def test_the_scaling_of_llama_3_is_asked_for(tmp_path: Path) -> None:
    held = small(rope_freqs__weight=Tensor((2,), F32, floats(1, 8)))
    path = written(tmp_path / "m.gguf", held)
    failed = run("apply", path, "-o", tmp_path / "out", *ASKED)
    assert failed.exit == 3
    assert "rope=llama3" in failed.err
    factors = ("rope=llama3", "rope_factor=8", "rope_low=1", "rope_high=4", "rope_context=8192")
    given = [word for pair in factors for word in ("--set", pair)]
    done("apply", path, "-o", tmp_path / "out", *ASKED, "--allow", "drop", *given)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }


@pytest.mark.parametrize(
    ("more", "code"),
    [
        # heads of each layer, which transformers' Llama does not have
        ({"llama__attention__head_count": ("[u32]", [1, 1])}, "M114"),
        ({"llama__attention__key_length": ("u32", 8)}, "M301"),
        ({"llama__embedding_length": ("u32", 128)}, "M510"),
        ({"llama__rope__scaling__type": ("str", "longrope")}, "M114"),
        ({"llama__rope__dimension_count": ("u32", 2), "llama__attention__key_length": ("u32", 4)},
         "M510"),
    ],
)  # fmt: skip
def test_key_values_that_tensors_or_others_contradict_are_refused(
    more: dict[str, Any], code: str, tmp_path: Path
) -> None:
    failed = run("plan", written(tmp_path / "m.gguf", small(), **more), *ASKED)
    assert failed.exit in (2, 3)
    assert code in failed.err, failed.err


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        (
            {"type": ("str", "linear"), "factor": ("f32", 4.0)},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "type": ("str", "yarn"),
                "factor": ("f32", 2.5),
                "original_context_length": ("u32", 32768),
            },
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_the_scaling_of_rope_is_that_of_the_key_values(
    more: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    said = {f"llama__rope__scaling__{name}": found for name, found in more.items()}
    path = written(tmp_path / "m.gguf", small(), **said)
    done("apply", path, "-o", tmp_path / "out", *ASKED)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == scaling


def test_tensors_that_no_rule_takes_are_named(tmp_path: Path) -> None:
    held = small(blk__0__attn_sinks__weight=Tensor((4,), F32, floats(1, 2, 3, 4)))
    failed = run("plan", written(tmp_path / "m.gguf", held), *ASKED)
    assert failed.exit == 3
    assert "blk.0.attn_sinks.weight" in failed.err


def model_of(name: str) -> Any:
    """The model as it was configured before it was stored, without weights of its own."""
    import transformers

    kind, said = MODELS[name]
    config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(**said)
    return getattr(transformers, kind)(config).eval()


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(16).reshape(2, 8)).logits


def at_key(values: Any, key: str) -> Any:
    """What `gguf.json` says at a key of the file."""
    for name in key.split("."):
        values = values[name]
    return values.get("", values) if isinstance(values, dict) else values


@pytest.mark.libraries
@pytest.mark.parametrize("name", MODELS)
def test_key_values_are_those_that_gguf_py_reads(name: str, tmp_path: Path) -> None:
    gguf_py = pytest.importorskip("gguf", reason="gguf-py is an extra of its own")
    import numpy as np

    done("apply", file_of(name), "-o", tmp_path / "out", "--output-format", "safetensors")
    values = json.loads((tmp_path / "out" / "gguf.json").read_text())
    fields = gguf_py.GGUFReader(file_of(name)).fields
    compared = [key for key in fields if not key.startswith("GGUF.")]
    assert len(compared) > 12
    for key in compared:
        found, theirs = at_key(values, key), fields[key].contents()
        if isinstance(theirs, float):
            found = float(np.float32(found))
        assert found == theirs, key


@pytest.mark.libraries
@pytest.mark.parametrize("big", [False, True])
def test_what_gguf_py_splits_and_swaps(big: bool, tmp_path: Path) -> None:
    """Shards are one checkpoint with the same tensors; a big-endian file is refused by name."""
    gguf_py = pytest.importorskip("gguf", reason="gguf-py is an extra of its own")

    source = gguf_py.GGUFReader(file_of("gguf-llama"))
    order = gguf_py.GGUFEndian.BIG if big else gguf_py.GGUFEndian.LITTLE
    folder = tmp_path / "split"
    folder.mkdir()
    writer = gguf_py.GGUFWriter(
        folder / "m.gguf", "llama", endianess=order, split_max_tensors=0 if big else 8
    )
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if big:
        failed = run("inspect", folder)
        assert failed.exit == 3
        assert "M943" in failed.err
        return
    assert len(list(folder.iterdir())) == 3
    ours, theirs = (formats.open(path) for path in (folder, file_of("gguf-llama")))
    assert ours.index.hash() == theirs.index.hash()
    ours.close()
    theirs.close()
    done("apply", folder, "-o", tmp_path / "out", "--output-format", "safetensors")
    done("apply", file_of("gguf-llama"), "-o", tmp_path / "one", "--output-format", "safetensors")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_model_that_it_was(name: str, tmp_path: Path) -> None:
    """Strictly, and with the logits of the model whose configuration never was in the file."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    migrate.apply(file_of(name), out, **FLOAT32)
    model, info = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    known = model_of(name)
    state = load_file(out / "model.safetensors")
    if known.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    known.load_state_dict(state, strict=True)
    made = logits(model)
    assert made.abs().max() > 0
    assert torch.equal(made, logits(known))


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_live_model_is_loaded_from_it(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    model = model_of(name).to(torch.bfloat16)
    migrate.load(model, file_of(name), to="gguf-llama@hf", allow=["lossy"])
    done("apply", file_of(name), "-o", tmp_path / "out", *ASKED)
    held, state = load_file(tmp_path / "out" / "model.safetensors"), model.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in held.items())
    assert state.keys() - held.keys() <= {"lm_head.weight"}


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_those_of_transformers_own_reader(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf-py is an extra of its own")
    import torch
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    migrate.apply(file_of(name), out, **FLOAT32)
    # the width of Qwen3's heads it does not ask the file for
    width = {"head_dim": MODELS[name][1]["head_dim"]} if name == "gguf-qwen3" else {}
    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoint(name).folder, gguf_file="model.gguf", dtype=torch.float32, **width
    )
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(ours), logits(theirs))
