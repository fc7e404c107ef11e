"""Extra states of Transformer Engine in runs of Megatron: what delayed scaling keeps in each module
of each part goes along, whatever release wrote it, and comes back to the bit.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done
from cut_runs import WEIGHTS
from megatron_files import differences, parts, read_as_data
from megatron_runs import ARCHIVES, GRIDS, checkpoint, run_folder

from migrate.extra_state.decode import decode

STATES = ARCHIVES.parent / "te"
VOCABULARY = "vocab=20"


@pytest.fixture(autouse=True)
def _read_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as_data(monkeypatch)


def of_bytes(number: int) -> torch.Tensor:
    """A state of 2.17, whose scales are no other's."""
    data = (STATES / "v2.17_linear_DelayedScaling.pkl").read_bytes()
    held = decode(data, "a state").states[""]
    assert held is not None
    scale = bytes(held.tensors["scale_fwd"].data)
    assert data.count(scale) == 1
    changed = data.replace(scale, struct.pack("<3f", 1, 2, number))
    return torch.frombuffer(bytearray(changed), dtype=torch.uint8)


def of_buffer(number: int) -> io.BytesIO:
    """A state of 1.13, as it stands in memory when it was written."""
    held = torch.load(STATES / "v1.13_linear_DelayedScaling.bytesio.pt", weights_only=True)
    held["scale_fwd"] = held["scale_fwd"] + number
    made = io.BytesIO()
    torch.save(held, made)
    return made


def of_dict(number: int) -> dict[str, Any]:
    """A state of 0.5, a dict of tensors."""
    scale, history = torch.ones(3) + number, torch.zeros(16, 3)
    return {
        "scale_fwd": scale,
        "amax_history_fwd": history,
        "scale_bwd": torch.ones(2),
        "amax_history_bwd": torch.zeros(16, 2),
        "extra_fp8_variables": {},
    }


def run_with(
    run: Path, family: str, grid: str, state: Callable[[int], Any], module: str = ""
) -> dict[str, Any]:
    """A run of megatron-core with a state for each module of each part whose key has `module` in
    it; its parts.
    """
    shutil.copytree(run_folder(family, "legacy", grid), run)
    found = parts(checkpoint(family, "legacy", grid))
    number = 0
    for called, root in found.items():
        for model in (value for key, value in root.items() if key.startswith("model")):
            for key in model:
                if key.endswith("_extra_state") and module in key:
                    number += 1
                    model[key] = state(number)
        torch.save(root, run / "iter_0000010" / called / WEIGHTS)
    assert number
    return found


@pytest.mark.parametrize("state", [of_bytes, of_buffer])
@pytest.mark.parametrize(
    ("family", "grid"),
    [("llama", "1"), ("llama", "tp2-pp2"), ("qwen2", "pp2-vpp2"), ("mixtral", "ep2")],
)
def test_what_delayed_scaling_keeps_comes_back_from_transformers(
    tmp_path: Path, family: str, grid: str, state: Callable[[int], Any]
) -> None:
    run, hf, back = tmp_path / "run", tmp_path / "hf", tmp_path / "back"
    experts = "local_experts" if "ep" in grid else ""
    due = run_with(run, family, grid, state, experts)
    said = done("apply", run, "-o", hf, "--to", f"megatron-gpt@{family}", "--set", VOCABULARY).out
    assert "downgrade: exact" in said
    done("verify", hf, "--source", run)
    done("downgrade", hf, "-o", back)
    made = parts(back / "iter_0000010")
    assert made.keys() == due.keys()
    for called in due:
        assert differences(due[called], made[called]) == []
    done("verify", back, "--source", hf)


@pytest.mark.parametrize("state", [of_bytes, of_buffer])
@pytest.mark.parametrize("grid", ["pp2-vpp2", "ep2"])
def test_they_go_through_distributed_checkpoints(
    tmp_path: Path, grid: str, state: Callable[[int], Any]
) -> None:
    family = "mixtral" if grid == "ep2" else "llama"
    run, dist, hf, back = (tmp_path / name for name in ("run", "dist", "hf", "back"))
    due = run_with(run, family, grid, state, "local_experts" if grid == "ep2" else "")
    done("apply", run, "-o", dist, "--output-format", "torch_dist")
    done("verify", dist, "--source", run)
    done("apply", dist, "-o", hf, "--to", f"megatron-gpt@{family}", "--set", VOCABULARY)
    done("downgrade", hf, "-o", back)
    done("diff", dist, back)
    shutil.rmtree(back)
    axes = dict(zip(("tp", "pp", "vpp", "ep"), map(str, GRIDS[grid]), strict=True))
    cut = [word for axis, size in axes.items() for word in ("--set", f"{axis}={size}")]
    done("apply", dist, "-o", back, "--to", "megatron-gpt@mcore", *cut, "--allow", "drop")
    for called, root in parts(back / "iter_0000010").items():
        for name in (key for key in root if key.startswith("model")):
            held = {k: v for k, v in root[name].items() if k.endswith("_extra_state")}
            for key, value in held.items():
                assert differences(due[called][name][key], value, key) == []
            assert held


@pytest.fixture
def of_groups(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A run of two expert groups in Transformer Engine's spec, each with states of its own for all
    of its experts, and one group with another state of attention in a layer; its parts.
    """
    run = tmp_path / "run"
    source = run_folder("mixtral", "legacy", "ep2")
    spec = ("--set", "experts=te", "--set", "impl=te", "--set", VOCABULARY, *DROPPED)
    done("apply", source, "-o", run, "--to", "megatron-gpt@mcore", *spec)
    number, found = 0, parts(run / "iter_0000010")
    for called, root in found.items():
        model = dict(root["model"])
        root["model"].clear()
        for key, held in model.items():
            root["model"][key] = held
            module, _, leaf = key.rpartition(".")
            if leaf == "weight1" and ".experts." in key:
                number += 1
                root["model"][f"{module}._extra_state"] = of_bytes(number)
            elif key.endswith("linear_qkv.weight"):
                other = "layers.2." in key and called.endswith("1")
                root["model"][f"{module}._extra_state"] = of_bytes(200 if other else 100)
        torch.save(root, run / "iter_0000010" / called / WEIGHTS)
    (run / "iter_0000010" / "migrate.history.json").unlink()
    return run, found


DROPPED = ("--set", "states=drop", "--allow", "drop")


def test_states_that_expert_groups_have_otherwise_are_kept_by_part(
    of_groups: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, due = of_groups
    hf, back, same = tmp_path / "hf", tmp_path / "back", tmp_path / "same"
    said = done("apply", run, "-o", hf, "--to", "megatron-gpt@mixtral").out
    assert "downgrade: exact" in said
    done("verify", hf, "--source", run)
    done("downgrade", hf, "-o", back)
    done("apply", run, "-o", same, "--to", "megatron-gpt@mcore", "--set", "padded=48")
    for folder in (back, same):
        made = parts(folder / "iter_0000010")
        assert made.keys() == due.keys()
        for called in due:
            before, after = (root[called]["model"] for root in (due, made))
            assert list(before) == list(after)
            for key in (key for key in before if folder == back or key.endswith("_extra_state")):
                assert differences(before[key], after[key], key) == []
    done("verify", same, "--source", run)


def test_states_of_all_experts_are_left_out_by_a_word_where_groups_are_others(
    of_groups: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, _ = of_groups
    hf, out = tmp_path / "hf", tmp_path / "out"
    cut = ("-o", out, "--to", "megatron-gpt@mcore", "--set")
    done("apply", run, "-o", hf, "--to", "megatron-gpt@mixtral")
    key = "decoder.layers.0.mlp.experts.linear_fc1._extra_state"
    for source in (run, hf):
        for grid in ("ep=4", "pp=2"):
            said = done("apply", source, *cut, grid, "--allow", "drop", exit=2)
            assert "M929" in said.err
            assert key in said.err
            assert "--set states=drop --allow drop" in said.err
            done("apply", source, *cut, grid, *DROPPED)
            made = parts(out / "iter_0000010")
            assert len(made) == 4
            for root in made.values():
                assert not any(name.endswith("_extra_state") for name in root["model"])
                assert "migrate.states" not in root
            done("verify", out, "--source", source)
            shutil.rmtree(out)


@pytest.mark.parametrize("state", [of_bytes, of_buffer])
def test_states_that_ranks_have_otherwise_are_kept_or_left_out_by_a_word(
    tmp_path: Path, state: Callable[[int], Any]
) -> None:
    run, out, back = tmp_path / "run", tmp_path / "out", tmp_path / "back"
    due = run_with(run, "llama", "tp2-pp2", state)
    cut = (
        "apply",
        run,
        "-o",
        out,
        "--to",
        "megatron-gpt@mcore",
        "--set",
        "tp=1",
        "--allow",
        "drop",
    )
    said = done(*cut, exit=3).err
    assert "_extra_state" in said
    assert "states=follow, and --set may choose" in " ".join(said.split())
    done(*cut, "--set", "states=drop")
    for root in parts(out / "iter_0000010").values():
        assert not any(key.endswith("_extra_state") for key in root["model"])
    shutil.rmtree(out)
    done(*cut, "--set", "states=keep")
    done("verify", out, "--source", run)
    first, second = parts(out / "iter_0000010").values()
    assert any("_extra_state" in name for name in first["migrate.kept"])
    # of all parts the first has what is kept
    assert "migrate.kept" not in second
    done("downgrade", out, "-o", back, "--allow", "drop")
    for called, root in parts(back / "iter_0000010").items():
        assert differences(due[called]["model"], root["model"]) == []


def test_states_that_are_none_on_all_ranks_are_one(tmp_path: Path) -> None:
    run, hf = tmp_path / "run", tmp_path / "hf"
    shutil.copytree(run_folder("llama", "legacy", "tp2-pp2"), run)
    due = parts(checkpoint("llama", "legacy", "tp2-pp2"))
    # a state of one rank alone; it is None on the other
    only = "decoder.layers.0.self_attention.linear_proj._extra_state"
    called = min(due)
    assert due[called]["model"][only] is None
    due[called]["model"][only] = of_buffer(1)
    torch.save(due[called], run / "iter_0000010" / called / WEIGHTS)
    asked = ("--to", "megatron-gpt@llama", "--set", VOCABULARY)
    plan = json.loads(done("plan", run, *asked, "--expand", "--format", "json").out)
    gone = {key for row in plan["rows"] if row["change"] == "dropped" for key in row["from"]}
    assert {key for key in gone if "@" in key} == {f"{only}@0", f"{only}@1"}
    assert len({key for key in gone if "@" not in key}) > 4
    # what is None there alone has no name that stands for all
    said = " ".join(done("apply", run, "-o", hf, *asked).out.split())
    assert f"not restored: {only}@0, {only}@1 " in said, said


def test_states_that_are_dicts_are_refused_by_name_and_left_out_by_a_word(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run_with(run, "llama", "1", of_dict)
    cut = ("apply", run, "-o", out, "--to", "megatron-gpt@llama", "--set", VOCABULARY)
    said = done(*cut, exit=3).err
    assert "M402" in said
    assert "decoder.layers.0.self_attention.linear_qkv._extra_state" in said
    assert "--allow drop" in said
    assert "downgrade: not exact" in done(*cut, "--allow", "drop").out
    done("verify", out, "--source", run)


def test_states_that_nothing_tells_apart_before_a_run_are_left_out_by_a_word(
    of_groups: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run, due = of_groups
    out = tmp_path / "out"
    for called, root in due.items():
        # streams of before torch 1.6 have no checksums
        path = run / "iter_0000010" / called / WEIGHTS
        torch.save(root, path, _use_new_zipfile_serialization=False)
    cut = ("apply", run, "-o", out, "--to", "megatron-gpt@mixtral")
    said = done(*cut, exit=3).err
    assert "M923" in said
    assert "--set states=drop --allow drop" in said
    done(*cut, *DROPPED)
    done("verify", out, "--source", run)
