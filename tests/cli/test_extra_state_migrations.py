"""Extra state in plan, apply, verify and downgrade: dropped, kept or rewritten by what it holds,
delayed scaling never unasked.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import fits
from commandline import contents, done, run, safetensors

import migrate
from migrate.core.errors import CheckpointError
from migrate.extra_state.decode import decode
from migrate.extra_state.record import normal

VECTORS = Path(__file__).resolve().parents[1] / "data" / "te"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())
STATELESS = [
    "v2.17_linear_MXFP8BlockScaling.pkl",
    "v2.17_linear_NVFP4BlockScaling.pkl",
    "v2.17_linear_CustomRecipe.pkl",
    "v2.0_linear_MXFP8BlockScaling.pkl",
    "crafted_none.pkl",
    "crafted_empty_dict.pkl",
    "HEAD_linear_DelayedScaling_nofp8.pkl",
    "crafted_mxfp8_proto2.pkl",
]
CURRENT = [
    "HEAD_linear_DelayedScaling.pkl",
    "v2.0_linear_DelayedScaling.pkl",
    "HEAD_dpa_CurrentScaling_local_recipes.pkl",
]
OLD = [
    "v0.8_linear_DelayedScaling.pkl",
    "v1.13_linear_DelayedScaling.bytesio.pt",
    "v1.13_ops_basic_linear_DelayedScaling.pkl",
]
REFUSED = {
    "crafted_evil.pkl": "M950",
    "crafted_evil_with_mxfp8_recipe.pkl": "M950",
    "crafted_truncated.pkl": "M930",
    "crafted_scale_inv_only.pkl": "M952",
    "crafted_memo_stateless_then_delayed.pkl": "M951",
    "crafted_memo_proto2_stateless_then_delayed.pkl": "M951",
}


def vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def checkpoint(path: Path, *names: str) -> Path:
    tensors = {"x.weight": ("F32", [2], b"abcdefgh")}
    for number, name in enumerate(names):
        tensors[f"layers.{number}._extra_state"] = ("U8", [len(vector(name))], vector(name))
    return safetensors(path / "model.safetensors", tensors)


def rules(path: Path, to: str = "blocks.{i}._extra_state", **policies: str) -> Path:
    written = ", ".join(f"{name}: {value}" for name, value in policies.items())
    file = path / "rules.yaml"
    file.write_text(
        "id: demo/v2/x\ntitle: a change\nlineage: demo\nedge: [v1, v2]\nkeep: "
        "['x.weight']\nrules:\n"
        f"  - {{name: state, from: 'layers.{{i:int}}._extra_state', to: '{to}', via: "
        f"[{{extra_state: {{{written}}}}}]}}\n"
    )
    return file


def migrated(
    path: Path, *names: str, allow: tuple[str, ...] = (), **policies: str
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What is in the output beside the weight, after plan, apply and verify agree."""
    source, file = checkpoint(path, *names), rules(path, **policies)
    flags = [word for one in allow for word in ("--allow", one)]
    fits(done("plan", source, "--rules", file, *flags, "--format", "json").json, "plan")
    done("apply", source, "-o", path / "out", "--rules", file, *flags, "-q")
    done("verify", path / "out", "--source", source, "--rules", file, "-q")
    out = contents(path / "out")
    assert out.pop("x.weight") == ("F32", (2,), b"abcdefgh")
    return out


def test_stateless_states_are_dropped_without_a_flag(tmp_path: Path) -> None:
    assert migrated(tmp_path, *STATELESS) == {}


def test_stateless_states_become_empty_or_stay(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    keys = [f"blocks.{n}._extra_state" for n in range(len(STATELESS))]
    assert migrated(tmp_path / "a", *STATELESS, stateless="empty") == dict.fromkeys(
        keys, ("U8", (0,), b"")
    )
    kept = migrated(tmp_path / "b", *STATELESS, stateless="keep")
    assert kept == {
        key: ("U8", (len(vector(name)),), vector(name))
        for key, name in zip(keys, STATELESS, strict=True)
    }


def refusal(
    path: Path, *names: str, allow: tuple[str, ...] = (), **policies: str
) -> list[dict[str, str]]:
    """The diagnostics of apply, which leaves nothing behind; those of plan are the same."""
    source, file = checkpoint(path, *names), rules(path, **policies)
    flags = [word for one in allow for word in ("--allow", one)]
    found = run("apply", source, "-o", path / "out", "--rules", file, *flags, "--format", "json")
    assert found.exit == 3
    assert not (path / "out").exists()
    assert run("plan", source, "--rules", file, *flags, "--format", "json").json == found.json
    diagnostics: list[dict[str, str]] = found.json["diagnostics"]
    return diagnostics


@pytest.mark.parametrize("name", [*CURRENT, *OLD])
@pytest.mark.parametrize("form", ["pickle-2.x", "tensors"])
def test_delayed_scaling_is_refused_without_the_flag_whatever_the_rule_and_the_environment_say(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    (found,) = refusal(tmp_path, name, delayed_scaling=form, allow=("drop", "lossy", "opaque"))
    assert found["code"] == "M951"
    assert "layers.0._extra_state" in found["message"]
    assert "--allow delayed-scaling" in found["help"]


@pytest.mark.parametrize("name", [*CURRENT, *OLD])
def test_delayed_scaling_is_refused_without_a_form_whatever_is_allowed(
    name: str, tmp_path: Path
) -> None:
    (found,) = refusal(tmp_path, name, allow=("delayed-scaling", "drop"))
    assert found["code"] == "M951"
    assert "pickle-2.x" in found["help"]


def test_a_rule_file_and_a_params_file_cannot_allow_it(tmp_path: Path) -> None:
    file = rules(tmp_path, delayed_scaling="tensors")
    for line in ("allow: [delayed-scaling]\n", "lint: {allow: [delayed-scaling]}\n"):
        other = tmp_path / "other.yaml"
        other.write_text(file.read_text() + line)
        assert run("plan", checkpoint(tmp_path, CURRENT[0]), "--rules", other).exit != 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_whatever_is_allowed(name: str, tmp_path: Path) -> None:
    everything = (
        "drop",
        "lossy",
        "opaque",
        *(() if REFUSED[name] == "M951" else ("delayed-scaling",)),
    )
    (found,) = refusal(tmp_path, name, delayed_scaling="pickle-2.x", allow=everything)
    assert found["code"] == REFUSED[name]
    assert "layers.0._extra_state" in found["message"]
    assert found["help"]


@pytest.mark.parametrize("name", [*CURRENT, *OLD])
def test_a_state_of_each_release_goes_to_the_form_of_2_x_with_the_same_numbers(
    name: str, tmp_path: Path
) -> None:
    (made,) = migrated(
        tmp_path, name, delayed_scaling="pickle-2.x", allow=("delayed-scaling",)
    ).values()
    assert made[0] == "U8"
    if name in CURRENT:
        assert made[2] == vector(name)
    found = decode(made[2], name)
    assert found.releases.startswith("2.")
    assert {mode: s.tensors for mode, s in found.states.items() if s} == {
        mode: s.tensors for mode, s in normal(decode(vector(name), name)).items()
    }
    if found.api == "module":
        # as the independent reading has them
        expected = {
            k: v["sha256"] for k, v in EXPECTED[name][""]["tensors"].items() if "inv" not in k
        }
        state = found.states[""]
        assert state is not None
        assert {k: hashlib.sha256(t.data).hexdigest() for k, t in state.tensors.items()} == expected


@pytest.mark.parametrize("name", [*CURRENT, *OLD])
def test_a_state_of_each_release_goes_to_plain_tensors(name: str, tmp_path: Path) -> None:
    made = migrated(tmp_path, name, delayed_scaling="tensors", allow=("delayed-scaling",))
    expected = {}
    for mode, state in normal(decode(vector(name), name)).items():
        for key, tensor in state.tensors.items():
            expected[f"blocks.0._extra_state{'.' if mode else ''}{mode}.{key}"] = (
                "F32",
                tensor.shape,
                bytes(tensor.data),
            )
    assert made == expected
    assert len(made) == 4


def test_dropping_delayed_scaling_needs_the_permission_to_drop(tmp_path: Path) -> None:
    (found,) = refusal(
        tmp_path, *CURRENT, *STATELESS, *OLD, delayed_scaling="drop", allow=("delayed-scaling",)
    )
    assert found["code"] == "M402"
    assert "6 tensors" in found["message"]
    assert (
        migrated(tmp_path, *CURRENT, *STATELESS, *OLD, delayed_scaling="drop", allow=("drop",))
        == {}
    )


def test_a_recipe_that_no_tensor_can_hold_is_a_loss(tmp_path: Path) -> None:
    name = "crafted_memo_stateless_then_delayed.pkl"
    (found,) = refusal(tmp_path, name, delayed_scaling="tensors", allow=("delayed-scaling",))
    assert found["code"] == "M402"


def settings(name: str, field: str) -> bytes:
    """A state that holds a recipe with one field and nothing else."""
    words = [word.encode() for word in ("recipe", "transformer_engine.common.recipe", name, field)]
    key, module, cls, said = (b"\x8c" + bytes([len(word)]) + word for word in words)
    return b"\x80\x04}" + key + module + cls + b"\x93)\x81}" + said + b"K\x00sbs."


def test_the_plan_says_what_goes_and_a_saved_plan_notices_that_it_is_another_state(
    tmp_path: Path,
) -> None:
    before, after = settings("MXFP8BlockScaling", "ma"), settings("DelayedScaling", "margi")
    assert len(before) == len(after)
    source = tmp_path / "model.safetensors"
    file = rules(tmp_path, delayed_scaling="pickle-2.x")
    for payload in (before, after):
        safetensors(
            source,
            {
                "x.weight": ("F32", [2], b"abcdefgh"),
                "layers.0._extra_state": ("U8", [len(payload)], payload),
            },
        )
        if payload is before:
            done(
                "plan",
                source,
                "--rules",
                file,
                "--allow",
                "delayed-scaling",
                "-o",
                tmp_path / "plan.json",
            )
            plan = json.loads((tmp_path / "plan.json").read_text())
            assert plan["decided"] == {"layers.0._extra_state": True}
            assert [(r["from"], r["why"]) for r in plan["rows"] if r["change"] == "dropped"] == [
                (
                    ["layers.0._extra_state"],
                    "the modules of Transformer Engine make these settings again",
                )
            ]
            done("apply", tmp_path / "plan.json", "-o", tmp_path / "out.safetensors", "-q")
            assert list(contents(tmp_path / "out.safetensors")) == ["x.weight"]
    found = run(
        "apply", tmp_path / "plan.json", "-o", tmp_path / "again.safetensors", "--format", "json"
    )
    assert (found.exit, found.codes) == (2, ["M903"])
    assert (
        "values that decide keys"
        in found.json["diagnostics"][0]["notes"][0] + found.json["diagnostics"][0]["notes"][1]
    )
    assert not (tmp_path / "again.safetensors").exists()


def test_a_downgrade_says_that_there_is_no_way_back(tmp_path: Path) -> None:
    source, file = (
        checkpoint(tmp_path, STATELESS[0], CURRENT[0]),
        rules(tmp_path, delayed_scaling="pickle-2.x"),
    )
    done(
        "apply", source, "-o", tmp_path / "out", "--rules", file, "--allow", "delayed-scaling", "-q"
    )
    found = run(
        "downgrade", tmp_path / "out", "-o", tmp_path / "back", "--rules", file, "--format", "json"
    )
    assert found.exit == 3
    assert found.codes == ["M405"]


def test_thousands_of_states_that_differ_in_numbers_are_each_carried_with_their_own(
    tmp_path: Path,
) -> None:
    payload = vector("v0.8_linear_DelayedScaling.pkl")
    record = decode(payload, "x").states[""]
    assert record is not None
    first = bytes(record.tensors["scale_fwd"].data)
    assert payload.count(first) == 1
    scales = [struct.pack("<3f", n, n + 0.5, -n) for n in range(50)]
    tensors = {"x.weight": ("F32", [2], b"abcdefgh")}
    tensors |= {
        f"layers.{n}._extra_state": ("U8", [len(payload)], payload.replace(first, own))
        for n, own in enumerate(scales)
    }
    source, file = (
        safetensors(tmp_path / "model.safetensors", tensors),
        rules(tmp_path, delayed_scaling="pickle-2.x"),
    )
    done(
        "apply", source, "-o", tmp_path / "out", "--rules", file, "--allow", "delayed-scaling", "-q"
    )
    made = contents(tmp_path / "out")
    for n, own in enumerate(scales):
        state = decode(made[f"blocks.{n}._extra_state"][2], "x").states[""]
        assert state is not None
        assert bytes(state.tensors["scale_fwd"].data) == own


def test_what_is_no_row_of_bytes_is_refused_and_an_empty_tensor_of_any_dtype_holds_nothing(
    tmp_path: Path,
) -> None:
    file = rules(tmp_path)
    for dtype, shape, code in (("F32", [2], "M950"), ("U8", [2, 2], "M950"), ("F32", [0], None)):
        source = safetensors(
            tmp_path / "model.safetensors",
            {"x.weight": ("F32", [1]), "layers.0._extra_state": (dtype, shape)},
        )
        found = run("plan", source, "--rules", file, "--format", "json")
        assert (found.codes if found.exit else None) == (code and [code])


def test_python_opts_in_by_the_same_word(tmp_path: Path) -> None:
    source, file = checkpoint(tmp_path, CURRENT[0]), rules(tmp_path, delayed_scaling="tensors")
    with pytest.raises(CheckpointError) as caught:
        migrate.plan(source, rules=[file])
    assert [d.code for d in caught.value.diagnostics] == ["M951"]
    planned = migrate.plan(source, rules=[file], allow={"delayed-scaling"})
    assert len(planned.outputs) == 5


STATE_DICTS = {
    "v1.13_ops_basic_linear_DelayedScaling": ".pkl",
    "v2.17_linear_DelayedScaling": ".pkl",
    "v1.13_linear_DelayedScaling_cuda0": ".bytesio.pt",
    "v1.13_linear_DelayedScaling_nofp8": ".bytesio.pt",
}


def one_state(path: Path, key: str = "_extra_state", **policies: str) -> Path:
    """Rules for a state dict with one state."""
    written = ", ".join(f"{name}: {value}" for name, value in policies.items())
    path.write_text(
        "id: demo/v2/x\ntitle: a change\nlineage: demo\nedge: [v1, v2]\nkeep: [weight, "
        "bias]\nrules:\n"
        f"  - {{name: state, from: {key}, to: {key}, via: [{{extra_state: {{{written}}}}}], "
        "optional: true}\n"
    )
    return path


@pytest.mark.parametrize("name", STATE_DICTS)
def test_a_state_in_a_file_of_torch_save_goes_the_same_way(name: str, tmp_path: Path) -> None:
    source, file = (
        VECTORS / f"{name}.ckpt.pt",
        one_state(tmp_path / "rules.yaml", delayed_scaling="pickle-2.x", stateless="keep"),
    )
    expected = normal(decode(vector(name + STATE_DICTS[name]), name))
    if expected:
        assert run(
            "apply", source, "-o", tmp_path / "out.pt", "--rules", file, "--format", "json"
        ).codes == ["M951"]
    for out in ("out.safetensors", "out.pt"):
        done(
            "apply",
            source,
            "-o",
            tmp_path / out,
            "--rules",
            file,
            "--allow",
            "delayed-scaling",
            "-q",
        )
        done("verify", tmp_path / out, "--source", source, "--rules", file, "-q")
    made = contents(tmp_path / "out.safetensors")["_extra_state"][2]
    found = decode(made, name)
    assert {mode: s.tensors for mode, s in found.states.items() if s} == {
        mode: s.tensors for mode, s in expected.items()
    }
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert sorted(loaded) == ["_extra_state", "bias", "weight"]
    assert loaded["_extra_state"].numpy().tobytes() == made
    assert loaded["_extra_state"].dtype == torch.uint8


def test_an_object_that_no_such_rule_reads_stays_what_it_is(tmp_path: Path) -> None:
    name = "v1.13_linear_DelayedScaling_cuda0"
    source, file = (
        VECTORS / f"{name}.ckpt.pt",
        one_state(tmp_path / "rules.yaml", "other._extra_state"),
    )
    done("apply", source, "-o", tmp_path / "out.pt", "--rules", file, "-q")
    with torch.serialization.safe_globals([io.BytesIO]):
        found = torch.load(tmp_path / "out.pt", weights_only=True)["_extra_state"]
    assert type(found) is io.BytesIO
    assert found.getvalue() == vector(name + ".bytesio.pt")


def test_states_in_a_state_dict_in_memory_go_the_same_way(tmp_path: Path) -> None:
    name = "v1.13_linear_DelayedScaling.bytesio.pt"
    given = {
        "weight": torch.ones(2),
        "_extra_state": io.BytesIO(vector(name)),
        "other": io.BytesIO(b"as it is"),
    }
    file = one_state(tmp_path / "rules.yaml", delayed_scaling="tensors")
    with pytest.raises(CheckpointError):
        migrate.apply(given, rules=[file])
    made = migrate.apply(given, rules=[file], allow={"delayed-scaling"})
    expected = normal(decode(vector(name), name))[""].tensors
    assert made["other"] is given["other"]
    assert "_extra_state" not in made
    for key, tensor in expected.items():
        assert made[f"_extra_state.{key}"].numpy().tobytes() == tensor.data
    assert given["_extra_state"].getvalue() == vector(name)
