"""The lists and dicts of 0.1 to 0.5, None, and what only looks like them: states that are objects
in a `.pt` file, reached by rules.

The numbers are those of the vector of 0.8, whose dict is the one that 0.3 to 0.5 stored, pickled;
their hashes were worked out by a script of its own.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import contents, done, run
from inert_unpickler import InertUnpickler

import migrate
from migrate.core.errors import CheckpointError
from migrate.extra_state.decode import decode

VECTORS = Path(__file__).resolve().parents[1] / "data" / "te"
NAME = "v0.8_linear_DelayedScaling.pkl"
EXPECTED = json.loads((VECTORS / "expected.json").read_text())[NAME][""]["tensors"]
SCALING = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
HASHES = {name: EXPECTED[name]["sha256"] for name in SCALING}


def as_dict(**more: Any) -> dict[str, Any]:
    """The dict of 0.3 to 0.5."""
    held: dict[str, Any] = InertUnpickler(io.BytesIO((VECTORS / NAME).read_bytes())).load()
    return {key: value for key, value in held.items() if "inv" not in key} | {
        "global_fp8_buffer": {"FWD_AMAX_1": [torch.ones(3)]},
        **more,
    }


def as_list() -> list[Any]:
    """The list of 0.1 and 0.2."""
    held = as_dict()
    return [*(held[name] for name in SCALING), held["global_fp8_buffer"], True, 0, 0, 1, 1]


FORMS = {"dict": as_dict, "list": as_list}


def model(state: Any) -> dict[str, Any]:
    return {
        "a.weight": torch.ones(2, 2),
        "a._extra_state": state,
        "b.weight": torch.zeros(3),
        "b._extra_state": None,
    }


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path / "in.pt", **options)
    return path / "in.pt"


def rules(path: Path, op: bool = True, **policies: str) -> Path:
    written = ", ".join(f"{name}: {value}" for name, value in policies.items())
    via = f", via: [{{extra_state: {{{written}}}}}]" if op else ""
    file = path / "rules.yaml"
    file.write_text(
        "id: demo/v2/x\ntitle: a change\nlineage: demo\nedge: [v1, v2]\nkeep: ['{k...}']\nrules:\n"
        f"  - {{name: state, from: '{{m...}}._extra_state', to: '{{m}}._extra_state'{via}}}\n"
    )
    return file


def hashes(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest() for name in SCALING}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", ["refuse", "pickle-2.x", "tensors"])
def test_delayed_scaling_in_an_object_waits_for_a_person(
    form: str, policy: str, tmp_path: Path
) -> None:
    source, file = saved(tmp_path, model(FORMS[form]())), rules(tmp_path, delayed_scaling=policy)
    found = run(
        "apply",
        source,
        "-o",
        tmp_path / "out.pt",
        "--rules",
        file,
        "--allow",
        "drop",
        "--format",
        "json",
    )
    assert "M951" in found.codes
    assert "a._extra_state" in found.json["diagnostics"][0]["message"]
    assert ("0.3 to 0.5" if form == "dict" else "0.1 to 0.2") in found.json["diagnostics"][0][
        "message"
    ]
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("out", ["out.pt", "out.safetensors"])
def test_an_object_becomes_plain_tensors_with_the_same_bits(
    form: str, out: str, tmp_path: Path
) -> None:
    source, file = saved(tmp_path, model(FORMS[form]())), rules(tmp_path, delayed_scaling="tensors")
    done("apply", source, "-o", tmp_path / out, "--rules", file, "--allow", "delayed-scaling", "-q")
    done("verify", tmp_path / out, "--source", source, "--rules", file, "-q")
    if out.endswith(".pt"):
        made = torch.load(tmp_path / out, weights_only=True)
        assert hashes({name: made[f"a._extra_state.{name}"] for name in SCALING}) == HASHES
    else:
        made = contents(tmp_path / out)
    assert sorted(made) == sorted(
        ["a.weight", "b.weight", *(f"a._extra_state.{name}" for name in SCALING)]
    )


def test_a_dict_becomes_the_pickle_of_2_x(tmp_path: Path) -> None:
    source, file = (
        saved(tmp_path, model(as_dict())),
        rules(tmp_path, stateless="empty", delayed_scaling="pickle-2.x"),
    )
    done(
        "apply",
        source,
        "-o",
        tmp_path / "out.pt",
        "--rules",
        file,
        "--allow",
        "delayed-scaling",
        "-q",
    )
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(made) == list(model(None))
    assert made["b._extra_state"].dtype == torch.uint8
    assert made["b._extra_state"].numel() == 0
    state = InertUnpickler(io.BytesIO(made["a._extra_state"].numpy().tobytes())).load()
    assert hashes(state) == HASHES
    assert state["recipe"].amax_history_len == state["amax_history_fwd"].shape[0]


def test_a_list_does_not_say_its_format_and_no_recipe_is_guessed(tmp_path: Path) -> None:
    source = saved(tmp_path, model(as_list()))
    found = run(
        "plan",
        source,
        "--to",
        "te-extra-state@2.18",
        "--allow",
        "delayed-scaling",
        "--format",
        "json",
    )
    assert found.codes == ["M950"]
    assert "nothing says the largest numbers" in found.json["diagnostics"][0]["message"]
    assert "--set delayed_scaling=drop --allow drop" in found.json["diagnostics"][0]["help"]


@pytest.mark.parametrize("form", FORMS)
def test_an_object_is_left_behind_with_its_tensors(form: str, tmp_path: Path) -> None:
    source, file = saved(tmp_path, model(FORMS[form]())), rules(tmp_path, delayed_scaling="drop")
    assert run(
        "plan", source, "--rules", file, "--allow", "delayed-scaling", "--format", "json"
    ).codes == ["M402"]
    done("apply", source, "-o", tmp_path / "out.pt", "--rules", file, "--allow", "drop", "-q")
    done("verify", tmp_path / "out.pt", "--source", source, "--rules", file, "-q")
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == ["a.weight", "b.weight"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["flat", "nested", "dicts", "old"])
def test_an_object_is_found_wherever_the_state_dict_is_and_belongs_to_0_x(
    form: str, where: str, tmp_path: Path
) -> None:
    value: Any = model(FORMS[form]())
    if where == "nested":
        value = {
            "model": value,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
            "iteration": 3,
        }
    elif where == "dicts":
        value = {
            "model": {
                "a": {"weight": torch.ones(2, 2), "_extra_state": FORMS[form]()},
                "b": {"weight": torch.ones(3)},
            }
        }
    source = saved(tmp_path, value, _use_new_zipfile_serialization=where != "old")
    layouts = done("inspect", source, "--format", "json").json["layouts"]
    assert {"te-extra-state": "0.x", "te-missing-state": "complete"}.items() <= {
        x["lineage"]: x["layout"] for x in layouts
    }.items()
    question = ("--to", "te-extra-state@2.18", "--set", "delayed_scaling=drop", "--allow", "drop")
    done("apply", source, "-o", tmp_path / "out.pt", *question, "-q")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    table = made.get("model", made)
    assert list(table) == (
        ["a", "b"] if where == "dicts" else ["a.weight", "b.weight", "b._extra_state"]
    )
    if where == "nested":
        assert torch.equal(made["optimizer"]["state"][0]["exp_avg"], torch.ones(2))
        assert made["iteration"] == 3


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("form", FORMS)
def test_an_object_that_no_such_rule_reads_stays_what_it_is(form: str, tmp_path: Path) -> None:
    source, file = saved(tmp_path, model(FORMS[form]())), rules(tmp_path, op=False)
    done("apply", source, "-o", tmp_path / "out.pt", "--rules", file, "-q")
    done("apply", source, "-o", tmp_path / "folder", "--output-format", "safetensors", "-q")
    done("apply", tmp_path / "folder", "-o", tmp_path / "back.pt", "--output-format", "torch", "-q")
    for name in ("out.pt", "back.pt"):
        assert same(torch.load(tmp_path / name, weights_only=True), model(FORMS[form]()))


def test_a_tensor_that_two_states_share_stays_with_the_one_that_no_rule_reads(
    tmp_path: Path,
) -> None:
    shared = torch.arange(3.0)
    value = {
        "w": torch.ones(1),
        "a._extra_state": as_dict(global_fp8_buffer={"x": [shared]}),
        "c._extra_state": as_dict(global_fp8_buffer={"x": [shared]}),
    }
    file = rules(tmp_path, delayed_scaling="drop")
    file.write_text(
        file.read_text()
        .replace("'{m...}._extra_state'", "'a._extra_state'")
        .replace("'{m}._extra_state'", "'a._extra_state'")
    )
    done(
        "apply",
        saved(tmp_path, value),
        "-o",
        tmp_path / "out.pt",
        "--rules",
        file,
        "--allow",
        "drop",
        "-q",
    )
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(made) == ["w", "c._extra_state"]
    assert same(made["c._extra_state"], value["c._extra_state"])


ODD: dict[str, Any] = {
    "nine items": lambda: as_list()[:9],
    "items in another order": lambda: as_list()[::-1],
    "an unknown key": lambda: as_dict(scales_of_tomorrow=[1.0]),
    "a key that is not text": lambda: {**as_dict(), 3: torch.ones(1)},
    "scales without numbers": lambda: as_dict(scale_fwd=torch.ones(0)),
    "scales of another dtype": lambda: as_dict(scale_fwd=torch.ones(3, dtype=torch.float64)),
    "slots that do not fit": lambda: as_dict(scale_fwd=torch.ones(4)),
    "a parameter": lambda: as_dict(scale_fwd=torch.nn.Parameter(torch.ones(3))),
    "a tensor with strides": lambda: as_dict(scale_fwd=torch.ones(3, 2)[:, 0]),
    "a buffer inside": lambda: as_dict(extra_fp8_variables={"x": io.BytesIO(b"x")}),
    "a set": lambda: as_dict(extra_fp8_variables={"x": {1, 2}}),
    "a size": lambda: as_dict(extra_fp8_variables={"x": torch.Size([1])}),
    "a dtype": lambda: as_dict(extra_fp8_variables={"x": torch.float16}),
}


@pytest.mark.parametrize("what", ODD)
def test_an_object_that_is_not_understood_to_its_last_value_is_refused(
    what: str, tmp_path: Path
) -> None:
    source = saved(tmp_path, model(ODD[what]()))
    for policy in ("drop", "tensors"):
        file = rules(tmp_path, delayed_scaling=policy)
        found = run(
            "plan",
            source,
            "--rules",
            file,
            "--allow",
            "drop",
            "--allow",
            "delayed-scaling",
            "--format",
            "json",
        )
        assert (found.exit, found.codes) == (3, ["M950"])
        assert "a._extra_state" in found.json["diagnostics"][0]["message"]


class Evil:
    def __reduce__(self) -> Any:
        import os

        return os.mkdir, ("/nowhere/at/all",)


def test_an_object_with_a_call_in_it_is_refused_and_the_call_is_not_made(tmp_path: Path) -> None:
    source, file = (
        saved(tmp_path, model(as_dict(global_fp8_state=Evil()))),
        rules(tmp_path, delayed_scaling="tensors"),
    )
    assert run(
        "plan", source, "--rules", file, "--allow", "delayed-scaling", "--format", "json"
    ).codes == ["M935"]


def test_bytes_of_a_checkpoint_never_pass_for_an_object(tmp_path: Path) -> None:
    packed = bytes(16) + pickle.dumps(None)
    source, file = (
        saved(tmp_path, model(torch.frombuffer(bytearray(packed), dtype=torch.uint8))),
        rules(tmp_path),
    )
    assert run("plan", source, "--rules", file, "--format", "json").codes == ["M930"]
    with pytest.raises(CheckpointError):
        decode(pickle.dumps(as_list()), "x")


@pytest.mark.parametrize("form", FORMS)
def test_an_object_of_a_state_dict_in_memory_goes_the_same_way(form: str, tmp_path: Path) -> None:
    given, file = model(FORMS[form]()), rules(tmp_path, delayed_scaling="tensors")
    with pytest.raises(CheckpointError, match="M951"):
        migrate.apply(given, rules=[file])
    made = migrate.apply(given, rules=[file], allow={"delayed-scaling"})
    assert sorted(made) == sorted(
        ["a.weight", "b.weight", *(f"a._extra_state.{name}" for name in SCALING)]
    )
    assert hashes({name: made[f"a._extra_state.{name}"] for name in SCALING}) == HASHES
    for odd in ODD.values():
        with pytest.raises(CheckpointError):
            migrate.apply(model(odd()), rules=[file], allow={"delayed-scaling"})


def test_odd_numbers_are_carried_and_said(tmp_path: Path) -> None:
    state = as_dict()
    state["scale_fwd"][1], state["amax_history_bwd"][0, 0] = float("inf"), float("nan")
    source, file = saved(tmp_path, model(state)), rules(tmp_path, delayed_scaling="tensors")
    notes = done(
        "plan", source, "--rules", file, "--allow", "delayed-scaling", "--format", "json"
    ).json["notes"]
    assert (
        "scale_fwd holds numbers that are not finite, and stays as it is: a._extra_state" in notes
    )
    assert (
        "amax_history_bwd holds numbers that are not finite, and stays as it is: a._extra_state"
        in notes
    )
    file = rules(tmp_path, delayed_scaling="drop")
    notes = done("plan", source, "--rules", file, "--allow", "drop", "--format", "json").json[
        "notes"
    ]
    assert not any("not finite" in note for note in notes)


def test_states_that_are_none_say_nothing_and_stay_none(tmp_path: Path) -> None:
    held = {
        "decoder.layers.0.input_layernorm.weight": torch.ones(2),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.ones(2, 2),
        "decoder.layers.0.mlp.linear_fc1._extra_state": None,
        "output_layer.weight": torch.ones(2),
        "output_layer._extra_state": None,
    }
    source = saved(tmp_path, {"model": held})
    shown = done("inspect", source, "--format", "json").json
    assert shown["layouts"] == []
    migrate.apply(source, tmp_path / "out.pt", output_format="torch")
    made = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert list(made) == list(held)
    assert made["output_layer._extra_state"] is None
    # a state beside them is still of its release
    held["decoder.layers.1.mlp.linear_fc1._extra_state"] = as_dict()
    shown = done("inspect", saved(tmp_path, {"model": held}), "--format", "json").json
    assert "te-extra-state@0.x" in {f"{x['lineage']}@{x['layout']}" for x in shown["layouts"]}
