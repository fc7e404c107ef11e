"""The lineages of Transformer Engine: told by what a checkpoint holds, and led to keys and states
that the other release has.

Keys are written down as each release's modules print them, numbers are those of `expected.json`,
which was worked out from the raw bytes by a script of its own. What is made is read with plain
pickle, Transformer Engine's classes being replaced by empty ones.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import contents, done, run, safetensors
from inert_unpickler import InertUnpickler

import migrate
from migrate.core.errors import Report
from migrate.extra_state.states import MOST, ranges
from migrate.rules.layouts import load_layouts

VECTORS = Path(__file__).resolve().parents[1] / "data" / "te"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())
NONE = b"\x80\x04N."
EMPTY = ("U8", (0,), b"")
# the layout by the release that wrote the vector; what 2.17 writes as 2.18 does counts as 2.18
LAYOUTS = {
    "v0.8_linear_DelayedScaling.pkl": "0.x", "v1.13_ops_basic_linear_DelayedScaling.pkl": "1.x",
    "v2.0_linear_DelayedScaling.pkl": "2.0",
    "v2.0_linear_MXFP8BlockScaling.pkl": "2.0", "v2.17_linear_MXFP8BlockScaling.pkl": "2.0",
    "v2.17_linear_NVFP4BlockScaling.pkl": "2.0",
    "v2.17_linear_DelayedScaling.pkl": "2.18", "v2.17_linear_CustomRecipe.pkl": "2.18",
    "HEAD_linear_DelayedScaling.pkl": "2.18",
    "HEAD_linear_DelayedScaling_nofp8.pkl": "2.18", "HEAD_linear_MXFP8BlockScaling.pkl": "2.18",
}  # fmt: skip
ARCHIVES = [
    f"v1.13_linear_DelayedScaling{which}.bytesio.pt"
    for which in ("", "_cuda0", "_hist1024", "_nofp8")
]
DELAYED = [
    "v0.8_linear_DelayedScaling.pkl",
    "v1.13_ops_basic_linear_DelayedScaling.pkl",
    "v2.0_linear_DelayedScaling.pkl",
]


def loaded(data: bytes) -> Any:
    return InertUnpickler(io.BytesIO(data)).load()


def vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def checkpoint(path: Path, **states: bytes) -> Path:
    tensors: dict[str, Any] = {
        f"layers.{name}._extra_state": ("U8", [len(data)], data) for name, data in states.items()
    }
    return safetensors(
        path / "model.safetensors",
        {"layers.fc.weight": ("F32", [2, 2], bytes(range(16))), **tensors},
    )


def found(source: Path) -> dict[str, str]:
    """The layouts that a checkpoint is in, by lineage."""
    return {
        one["lineage"]: one["layout"]
        for one in done("inspect", source, "--format", "json").json["layouts"]
    }


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
        if isinstance(t, torch.Tensor)
    }


def expected(name: str, mode: str = "") -> dict[str, str]:
    # the inverses of scales are what 2.0 stores no more
    return {
        key: one["sha256"]
        for key, one in EXPECTED[name][mode]["tensors"].items()
        if "inv" not in key
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_release_is_told_by_the_bytes_of_the_states(name: str, tmp_path: Path) -> None:
    assert found(checkpoint(tmp_path, fc=vector(name)))["te-extra-state"] == LAYOUTS[name]


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_beside_the_tensors_is_of_1_x(name: str, tmp_path: Path) -> None:
    torch.save(
        {"fc.weight": torch.ones(2, 2), "fc._extra_state": io.BytesIO(vector(name))},
        tmp_path / "model.pt",
    )
    assert found(tmp_path / "model.pt")["te-extra-state"] == "1.x"


def test_what_several_releases_write_is_of_the_latest_and_all_states_count(tmp_path: Path) -> None:
    current, stateless = (
        vector("v2.17_linear_DelayedScaling.pkl"),
        vector("v2.0_linear_MXFP8BlockScaling.pkl"),
    )
    assert found(checkpoint(tmp_path, fc=NONE))["te-extra-state"] == "2.0"
    assert found(checkpoint(tmp_path, fc=NONE, proj=vector(DELAYED[0])))["te-extra-state"] == "0.x"
    assert found(checkpoint(tmp_path, fc=b"", proj=current))["te-extra-state"] == "2.18"
    assert (
        found(checkpoint(tmp_path, fc=b"", proj=current, qkv=stateless))["te-extra-state"] == "2.0"
    )


def test_a_checkpoint_of_two_releases_and_one_without_states_are_asked_about(
    tmp_path: Path,
) -> None:
    mixed = checkpoint(tmp_path, fc=vector(DELAYED[0]), proj=vector(DELAYED[2]))
    refused = run("plan", mixed, "--to", "te-extra-state@2.18", "--format", "json")
    assert refused.codes == ["M504"]
    assert (
        "layers.proj._extra_state is of 2.0 to 2.1, layers.fc._extra_state of 0.8 to 0.11"
        in refused.json["diagnostics"][0]["notes"][0]
    )
    done(
        "plan",
        mixed,
        "--from",
        "te-extra-state@0.x",
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
    )
    plain = safetensors(tmp_path / "plain.safetensors", {"fc.weight": ("F32", [2])})
    assert run("plan", plain, "--to", "te-extra-state@2.18", "--format", "json").codes == ["M504"]


@pytest.mark.parametrize(
    "name", ["crafted_evil.pkl", "crafted_evil_with_mxfp8_recipe.pkl", "crafted_truncated.pkl"]
)
def test_a_hostile_state_is_of_no_release_and_refused_on_every_way(
    name: str, tmp_path: Path
) -> None:
    source = checkpoint(tmp_path, fc=vector(name))
    assert "te-extra-state" not in found(source)
    assert run(
        "apply", source, "-o", tmp_path / "out", "--to", "te-extra-state@2.18", "--format", "json"
    ).codes == ["M504"]
    for start in ("0.x", "1.x", "2.0"):
        question = (
            "--from",
            f"te-extra-state@{start}",
            "--to",
            "te-extra-state@2.18",
            "--allow",
            "delayed-scaling",
        )
        assert run("apply", source, "-o", tmp_path / "out", *question, "--format", "json").codes[
            0
        ] in ("M950", "M930")
    assert not (tmp_path / "out").exists()


def test_detection_looks_at_some_states_and_the_rule_at_all(tmp_path: Path) -> None:
    states = {f"{n:04}": b"" for n in range(MOST)} | {"fc": vector("crafted_evil.pkl")}
    source = checkpoint(tmp_path, **states)
    assert found(source)["te-extra-state"] == "2.18"
    question = ("--from", "te-extra-state@2.0", "--to", "te-extra-state@2.18")
    assert run("plan", source, *question, "--format", "json").codes == ["M950"]


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_of_each_release_reaches_2_18_with_the_same_numbers(
    name: str, tmp_path: Path
) -> None:
    source, out = checkpoint(tmp_path, fc=vector(name), proj=NONE), tmp_path / "out.safetensors"
    if name.startswith("v1.13"):
        source = checkpoint(tmp_path, fc=vector(name))
    refused = run("apply", source, "-o", out, "--to", "te-extra-state@2.18", "--format", "json")
    assert refused.codes == ["M951"]
    assert not out.exists()
    done(
        "apply",
        source,
        "-o",
        out,
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
        "-q",
    )
    done("verify", out, "--source", source, "-q")
    made = contents(out)
    assert made["layers.fc.weight"] == ("F32", (2, 2), bytes(range(16)))
    assert made.get("layers.proj._extra_state", EMPTY) == EMPTY
    state = loaded(made["layers.fc._extra_state"][2])
    if "ops" in name:
        # the two slots of forward are those of input and param
        assert {*state} == {"forward", "backward"}
        assert state["forward"]["scale_fwd"].shape == (2,)
        parts = [state["forward"]["scale_fwd"][n : n + 1] for n in range(2)]
        assert [hashes({"scale_fwd": part}) for part in parts] == [
            {"scale_fwd": expected(name, mode)["scale_fwd"]} for mode in ("input", "param")
        ]
        assert hashes(state["backward"]) == expected(name, "grad_output")
    else:
        assert hashes(state) == expected(name)
        assert (
            state["recipe"].amax_history_len
            == EXPECTED[name][""]["history"]
            == state["amax_history_fwd"].shape[0]
        )


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives_of_1_x_reach_2_18_in_one_command(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "model.pt", tmp_path / "out.pt"
    torch.save({"fc.weight": torch.ones(2, 2), "fc._extra_state": io.BytesIO(vector(name))}, source)
    done(
        "apply",
        source,
        "-o",
        out,
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
        "-q",
    )
    made = torch.load(out, weights_only=True)
    assert sorted(made) == ["fc._extra_state", "fc.weight"]
    data = made["fc._extra_state"].numpy().tobytes()
    assert data == b"" if "nofp8" in name else hashes(loaded(data)) == expected(name)


@pytest.mark.parametrize(
    "name", [n for n in LAYOUTS if "MXFP8" in n or "NVFP4" in n or "nofp8" in n]
)
def test_stateless_states_become_empty_without_a_flag(name: str, tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path, fc=vector(name), proj=b""), tmp_path / "out.safetensors"
    done(
        "apply",
        source,
        "-o",
        out,
        "--from",
        "te-extra-state@2.0",
        "--to",
        "te-extra-state@2.18",
        "-q",
    )
    made = contents(out)
    assert made["layers.fc._extra_state"] == made["layers.proj._extra_state"] == EMPTY


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_can_be_left_behind(name: str, tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path, fc=vector(name)), tmp_path / "out.safetensors"
    question = ("--to", "te-extra-state@2.18", "--set", "delayed_scaling=drop")
    assert run(
        "apply", source, "-o", out, *question, "--allow", "delayed-scaling", "--format", "json"
    ).codes == ["M402"]
    done("apply", source, "-o", out, *question, "--allow", "drop", "-q")
    assert list(contents(out)) == ["layers.fc.weight"]


def test_states_that_are_dicts_in_shards_reach_2_18(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.pt"
    folder.mkdir()
    state = {
        "scale_fwd": torch.tensor([2.0, 3.0, 4.0]),
        "amax_history_fwd": torch.arange(12.0).reshape(4, 3),
        "scale_bwd": torch.tensor([5.0, 6.0]), "amax_history_bwd": torch.arange(8.0).reshape(4, 2),
        "extra_fp8_variables": {"fp8_max_fwd": 448, "fp8_max_bwd": 57344, "num_gemms": 1},
    }  # fmt: skip
    for number, module in enumerate("ab", 1):
        torch.save(
            {f"{module}.weight": torch.ones(2), f"{module}._extra_state": state},
            folder / f"pytorch_model-0000{number}-of-00002.bin",
        )
    done(
        "apply",
        folder,
        "-o",
        out,
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
        "-q",
    )
    made = torch.load(out, weights_only=True)
    assert sorted(made) == ["a._extra_state", "a.weight", "b._extra_state", "b.weight"]
    assert hashes(loaded(made["b._extra_state"].numpy().tobytes())) == hashes(state)


@pytest.mark.parametrize("name", DELAYED)
def test_delayed_scaling_goes_on_as_tensors_where_that_is_wanted_and_allowed(
    name: str, tmp_path: Path
) -> None:
    source, out = checkpoint(tmp_path, fc=vector(name)), tmp_path / "out.safetensors"
    question = ("--to", "te-extra-state@2.18", "--set", "delayed_scaling=tensors")
    assert run("apply", source, "-o", out, *question, "--format", "json").codes == ["M951"]
    done("apply", source, "-o", out, *question, "--allow", "delayed-scaling", "-q")
    done("verify", out, "--source", source, "-q")
    made = contents(out)
    assert made.pop("layers.fc.weight") == ("F32", (2, 2), bytes(range(16)))
    state = {
        key.removeprefix("layers.fc._extra_state."): raw
        for key, (dtype, _, raw) in made.items()
        if dtype == "F32"
    }
    assert len(state) == len(made)
    if "ops" in name:
        parts = [state["forward.scale_fwd"][n : n + 4] for n in (0, 4)]
        assert [hashlib.sha256(part).hexdigest() for part in parts] == [
            expected(name, mode)["scale_fwd"] for mode in ("input", "param")
        ]
    else:
        assert {key: hashlib.sha256(raw).hexdigest() for key, raw in state.items()} == expected(
            name
        )


def test_delayed_scaling_is_refused_where_that_is_wanted_whatever_is_allowed(
    tmp_path: Path,
) -> None:
    question = (
        "--to",
        "te-extra-state@2.18",
        "--set",
        "delayed_scaling=refuse",
        "--allow",
        "delayed-scaling",
        "--allow",
        "drop",
    )
    assert run(
        "plan", checkpoint(tmp_path, fc=vector(DELAYED[2])), *question, "--format", "json"
    ).codes == ["M951"]
    done(
        "apply", checkpoint(tmp_path, fc=NONE), "-o", tmp_path / "out.safetensors", *question, "-q"
    )
    assert contents(tmp_path / "out.safetensors")["layers.fc._extra_state"] == EMPTY


def test_the_way_down_ends_at_2_0(tmp_path: Path) -> None:
    source, out = (
        checkpoint(tmp_path, fc=vector(DELAYED[0]), proj=NONE),
        tmp_path / "out.safetensors",
    )
    done(
        "apply",
        source,
        "-o",
        out,
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
        "-q",
    )
    done("downgrade", out, "-o", tmp_path / "back.safetensors", "--to", "te-extra-state@2.0", "-q")
    assert contents(tmp_path / "back.safetensors") == contents(out)
    assert (
        "M405"
        in run(
            "downgrade",
            out,
            "-o",
            tmp_path / "older",
            "--to",
            "te-extra-state@0.x",
            "--format",
            "json",
        ).codes
    )
    assert not (tmp_path / "older").exists()


# the keys of one layer with attention, by release
ATTENTION = {
    "1.6": "decoder.layers.0.self_attention.core_attention.fused_attention._extra_state",
    "1.8": "decoder.layers.0.self_attention.core_attention._extra_state",
}


def test_the_state_of_attention_moves_there_and_back(tmp_path: Path) -> None:
    offset = {"decoder.layers.0.self_attention.core_attention.softmax_offset": ("F32", [4])}
    source = safetensors(
        tmp_path / "old.safetensors", {ATTENTION["1.6"]: ("U8", [4], NONE), **offset}
    )
    assert found(source)["te-attention"] == "1.6"
    done("apply", source, "-o", tmp_path / "new.safetensors", "--to", "te-attention@1.8", "-q")
    made = contents(tmp_path / "new.safetensors")
    assert {*made} == {ATTENTION["1.8"], *offset}
    assert made[ATTENTION["1.8"]] == ("U8", (4,), NONE)
    done("downgrade", tmp_path / "new.safetensors", "-o", tmp_path / "back.safetensors", "-q")
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_an_attention_of_another_name_moves_where_it_is_named(tmp_path: Path) -> None:
    source = safetensors(
        tmp_path / "old.safetensors", {"block.dpa.fused_attention._extra_state": ("U8", [4], NONE)}
    )
    assert run("plan", source, "--to", "te-attention@1.8", "--format", "json").codes[0] in (
        "M206",
        "M211",
    )
    done(
        "apply",
        source,
        "-o",
        tmp_path / "new.safetensors",
        "--to",
        "te-attention@1.8",
        "--set",
        "names=core_attention,dpa",
        "-q",
    )
    assert list(contents(tmp_path / "new.safetensors")) == ["block.dpa._extra_state"]


def test_an_archive_of_1_6_moves_as_the_object_that_it_is(tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    torch.save(
        {"proj.weight": torch.ones(2), ATTENTION["1.6"]: io.BytesIO(vector(ARCHIVES[0]))}, source
    )
    done("apply", source, "-o", tmp_path / "out.pt", "--to", "te-attention@1.8", "-q")
    with torch.serialization.safe_globals([io.BytesIO]):
        made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(made) == [ATTENTION["1.8"], "proj.weight"]
    assert made[ATTENTION["1.8"]].getvalue() == vector(ARCHIVES[0])


def test_the_archives_of_1_6_move_on_the_way_to_2_18(tmp_path: Path) -> None:
    name, source = ARCHIVES[0], tmp_path / "model.pt"
    torch.save({"proj.weight": torch.ones(2), ATTENTION["1.6"]: io.BytesIO(vector(name))}, source)
    assert found(source)["te-attention"] == "1.6"
    question = (
        "--to",
        "te-attention@1.8",
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
    )
    done("apply", source, "-o", tmp_path / "out.pt", *question, "-q")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(made) == [ATTENTION["1.8"], "proj.weight"]
    assert hashes(loaded(made[ATTENTION["1.8"]].numpy().tobytes())) == expected(name)


def test_norms_have_a_state_from_1_13_on(tmp_path: Path) -> None:
    old = {
        "layers.0.layernorm.weight": ("F32", [4]),
        "layers.0.layernorm.bias": ("F32", [4]),
        "layers.0.proj._extra_state": ("U8", [len(state := vector(DELAYED[0]))], state),
    }
    source = safetensors(tmp_path / "old.safetensors", old)
    assert found(source)["te-norm-state"] == "1.12"
    done(
        "apply",
        source,
        "-o",
        tmp_path / "new.safetensors",
        "--to",
        "te-norm-state@1.13",
        "--set",
        "modules=layers.0.layernorm",
        "-q",
    )
    made = contents(tmp_path / "new.safetensors")
    assert {*made} == {*old, "layers.0.layernorm._extra_state"}
    assert made["layers.0.layernorm._extra_state"] == ("F32", (0,), b"")
    done("downgrade", tmp_path / "new.safetensors", "-o", tmp_path / "back.safetensors", "-q")
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_what_1_13_keeps_for_a_norm_is_of_1_13_and_becomes_what_2_18_keeps(tmp_path: Path) -> None:
    state = vector("v1.13_ops_basic_linear_DelayedScaling.pkl")
    old = {"layernorm.weight": ("F32", [4]), "fc._extra_state": ("U8", [len(state)], state)}
    norm = {"layernorm._extra_state": ("F32", [0], b"")}
    assert (
        found(safetensors(tmp_path / "whole.safetensors", {**old, **norm}))["te-extra-state"]
        == "1.x"
    )
    source, out = safetensors(tmp_path / "old.safetensors", old), tmp_path / "new.safetensors"
    question = (
        "--to",
        "te-norm-state@1.13",
        "--to",
        "te-extra-state@2.18",
        "--set",
        "modules=layernorm",
        "--allow",
        "delayed-scaling",
    )
    done("apply", source, "-o", out, *question, "-q")
    assert contents(out)["layernorm._extra_state"] == EMPTY


def test_norms_without_state_beside_states_of_2_x_are_no_norms_of_ours(tmp_path: Path) -> None:
    state = vector("v2.0_linear_DelayedScaling.pkl")
    source = {
        "layers.0.input_layernorm.weight": ("F32", [4]),
        "layers.0.proj._extra_state": ("U8", [len(state)], state),
    }
    assert "te-norm-state" not in found(safetensors(tmp_path / "old.safetensors", source))


def test_an_extra_state_of_another_library_shows_none_of_these_layouts(tmp_path: Path) -> None:
    source = {
        "fc.weight": ("F32", [4]),
        "fc._extra_state": ("F32", [3]),
        "input_layernorm.weight": ("F32", [4]),
    }
    assert found(safetensors(tmp_path / "old.safetensors", source)) == {}


# parameters of each module, as TE prints them, and with the state that a strict load wants
MODULES = {
    "linear": ["weight", "bias"],
    "layernorm_linear": ["layer_norm_weight", "layer_norm_bias", "weight", "bias"],
    "layernorm_mlp": [
        "layer_norm_weight",
        "layer_norm_bias",
        "fc1_weight",
        "fc1_bias",
        "fc2_weight",
        "fc2_bias",
    ],
    "grouped_linear": ["weight0", "bias0", "weight1", "bias1"],
    "grouped_linear_single": ["weight", "bias"],
    "unfused": [f"{w}_{p}" for w in ("query", "key", "value") for p in ("weight", "bias")],
    "layernorm": ["weight", "bias"],
    "rmsnorm": ["weight"],
}


def test_each_module_gets_the_state_that_a_strict_load_misses(tmp_path: Path) -> None:
    old = {f"{module}.{key}": ("F32", [2]) for module, keys in MODULES.items() for key in keys} | {
        "embedding.weight": ("F32", [3])
    }
    source, out = safetensors(tmp_path / "old.safetensors", old), tmp_path / "new.safetensors"
    assert found(source)["te-missing-state"] == "incomplete"
    done(
        "apply",
        source,
        "-o",
        out,
        "--to",
        "te-missing-state@complete",
        "--set",
        f"modules={','.join(MODULES)}",
        "-q",
    )
    made = contents(out)
    assert {*made} == {*old, *(f"{module}._extra_state" for module in MODULES)}
    assert all(made[f"{module}._extra_state"] == EMPTY for module in MODULES)
    assert {key: one for key, one in made.items() if key in old} == contents(source)
    done(
        "apply",
        out,
        "-o",
        tmp_path / "back.safetensors",
        "--to",
        "te-missing-state@incomplete",
        "-q",
    )
    assert contents(tmp_path / "back.safetensors") == contents(source)


def test_states_that_hold_scales_do_not_go_silently(tmp_path: Path) -> None:
    source, out = (
        checkpoint(tmp_path, fc=vector(DELAYED[2]), proj=NONE),
        tmp_path / "out.safetensors",
    )
    assert run(
        "apply", source, "-o", out, "--to", "te-missing-state@incomplete", "--format", "json"
    ).codes == ["M951"]
    done(
        "apply",
        source,
        "-o",
        out,
        "--to",
        "te-missing-state@incomplete",
        "--set",
        "delayed_scaling=drop",
        "--allow",
        "drop",
        "-q",
    )
    assert list(contents(out)) == ["layers.fc.weight"]


# the state dict of te.ops.Linear with a bias
OPS = [
    "basic_ops.0._extra_state",
    "basic_ops.0.weight",
    "basic_ops.1._extra_state",
    "basic_ops.1.bias",
]


@pytest.mark.parametrize("module", ["", "mlp.fc1"])
def test_a_linear_layer_of_torch_becomes_an_operation_and_one_again(
    module: str, tmp_path: Path
) -> None:
    prefix = f"{module}." if module else ""
    plain = {f"{prefix}weight": ("F32", [2, 3]), f"{prefix}bias": ("F32", [2])}
    source, ops = safetensors(tmp_path / "plain.safetensors", plain), tmp_path / "ops.safetensors"
    start = ("--from", "te-ops-linear@module")
    done(
        "apply",
        source,
        "-o",
        ops,
        *start,
        "--to",
        "te-ops-linear@ops",
        "--set",
        f"modules={module}",
        "-q",
    )
    made = contents(ops)
    assert sorted(made) == [prefix + key for key in OPS]
    assert made[f"{prefix}basic_ops.0.weight"] == contents(source)[f"{prefix}weight"]
    assert made[f"{prefix}basic_ops.1.bias"] == contents(source)[f"{prefix}bias"]
    assert (
        made[f"{prefix}basic_ops.0._extra_state"]
        == made[f"{prefix}basic_ops.1._extra_state"]
        == EMPTY
    )
    assert found(ops)["te-ops-linear"] == "ops"
    done("apply", ops, "-o", tmp_path / "back.safetensors", "--to", "te-ops-linear@module", "-q")
    assert contents(tmp_path / "back.safetensors") == contents(source) | {
        f"{prefix}_extra_state": EMPTY
    }


def test_scales_of_a_module_are_none_of_an_operation(tmp_path: Path) -> None:
    source = checkpoint(tmp_path, fc=vector(DELAYED[2]))
    question = (
        "--to",
        "te-ops-linear@ops",
        "--set",
        "modules=layers.fc",
        "--allow",
        "delayed-scaling",
        "--allow",
        "drop",
    )
    assert run("plan", source, *question, "--format", "json").codes == ["M951"]


def test_the_grouped_linear_of_ops_goes_the_ways_of_the_module(tmp_path: Path) -> None:
    # a Sequential of GroupedLinear, SwiGLU, GroupedLinear: each operation has a state, parameters
    # or not
    states = {f"{n}._extra_state": ("U8", [0], b"") for n in range(3)}
    parameters = {
        f"{n}.{kind}": ("F32", shape)
        for n in (0, 2)
        for kind, shape in (("weight", [2, 3, 4]), ("bias", [2, 3]))
    }
    source, out = (
        safetensors(tmp_path / "single.safetensors", {**parameters, **states}),
        tmp_path / "multi.safetensors",
    )
    question = (
        "--to",
        "te-grouped-weight@multi",
        "--to",
        "te-grouped-bias@multi",
        "--set",
        "modules=0,2",
    )
    done("apply", source, "-o", out, *question, "-q")
    made, given = contents(out), contents(source)
    assert {*made} == {
        *states,
        *(f"{n}.{kind}{i}" for n in (0, 2) for kind in ("weight", "bias") for i in range(2)),
    }
    for n in (0, 2):
        for i in range(2):
            assert made[f"{n}.weight{i}"] == (
                "F32",
                (3, 4),
                given[f"{n}.weight"][2][48 * i : 48 * (i + 1)],
            )
            assert made[f"{n}.bias{i}"] == (
                "F32",
                (3,),
                given[f"{n}.bias"][2][12 * i : 12 * (i + 1)],
            )
    assert found(out)["te-extra-state"] == "2.18"


def test_a_state_dict_in_memory_is_told_as_a_file_is() -> None:
    given = {"fc.weight": torch.ones(2), "fc._extra_state": io.BytesIO(vector(ARCHIVES[0]))}
    made = migrate.apply(given, to="te-extra-state@2.18", allow={"delayed-scaling"})
    assert hashes(loaded(made["fc._extra_state"].numpy().tobytes())) == expected(ARCHIVES[0])


def test_releases_are_written_as_ranges() -> None:
    assert [str(r) for r in ranges("0.3 to 0.11 and 2.0 to 2.3")] == ["0.3 to 0.11", "2.0 to 2.3"]
    assert [str(r) for r in ranges("2.18 and later")] == ["2.18 and later"]
    assert [tuple(r) for r in ranges("1.13")] == [((1, 13), (1, 13))]
    assert ranges("unknown") == ranges("") == []


@pytest.mark.parametrize("written", ["2.x", "2.0", "later", "2.0 to 2.17 "])
def test_a_sign_that_names_no_releases_is_refused(written: str, tmp_path: Path) -> None:
    path, report = tmp_path / "layouts.yaml", Report()
    path.write_text(
        "lineage: x\ntitle: x\nlayouts:\n  a:\n    title: a\n    detect:\n      extra_state: "
        f"'{written}'\n"
    )
    assert load_layouts(path, report) is None
    assert [d.code for d in report.diagnostics] == ["M114"]


def test_what_a_person_reads_names_the_flags_that_lead_on(tmp_path: Path) -> None:
    refused = run(
        "plan",
        checkpoint(tmp_path, fc=vector(DELAYED[0])),
        "--to",
        "te-extra-state@2.18",
        "--format",
        "json",
    )
    assert refused.json["diagnostics"][0]["help"] == (
        "--allow delayed-scaling carries it on; --set delayed_scaling=drop --allow drop leaves it "
        "behind, which is what most users want"
    )


def test_an_archive_that_is_renamed_is_not_said_to_be_missing(tmp_path: Path) -> None:
    source = tmp_path / "model.pt"
    torch.save(
        {
            "a.weight": torch.ones(1),
            "l.core_attention.fused_attention._extra_state": io.BytesIO(vector(ARCHIVES[0])),
        },
        source,
    )
    notes = done("plan", source, "--to", "te-attention@1.8", "--format", "json").json["notes"]
    (note,) = notes
    assert (
        note == "values that rules name: l.core_attention.fused_attention._extra_state is now "
        "l.core_attention._extra_state"
    )
    asked = ("--to", "te-attention@1.8", "--set", "names=core_attention,attn")
    assert (
        "no key has {attention} = attn, which `where` names"
        in done("plan", source, *asked, "--format", "json").json["notes"]
    )


def test_an_index_may_name_states_that_are_no_tensors(tmp_path: Path) -> None:
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    where = {}
    for module, name in zip("ab", names, strict=True):
        torch.save(
            {
                f"{module}.weight": torch.ones(1),
                f"{module}._extra_state": io.BytesIO(vector(ARCHIVES[0])),
            },
            tmp_path / name,
        )
        where |= {f"{module}.weight": name, f"{module}._extra_state": name}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    planned = migrate.plan(tmp_path, to="te-extra-state@2.18", allow={"delayed-scaling"})
    assert sorted(planned.outputs) == ["a._extra_state", "a.weight", "b._extra_state", "b.weight"]
