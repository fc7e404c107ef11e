"""The command line on .pt files: what it shows, what it asks, what it loads into its own process,
and a kill in the middle.
"""

from __future__ import annotations

import argparse
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commandline import done, run, shell, spawn
from test_imports import loaded
from test_kills import partial, wait_for
from work import HANG

import migrate

RULE = """id: demo/2/x
title: x
lineage: demo
edge: ["1", "2"]
keep: ["{k...}.bias"]
rules:
  - {name: r, from: "{p...}.weight", to: "{p}.kernel"}
"""


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    (tmp_path / "r.yaml").write_text(RULE)
    return tmp_path / "r.yaml"


@pytest.fixture
def training(tmp_path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
        tmp_path / "in.pt",
    )
    return tmp_path / "in.pt"


def test_inspect_tells_which_dict_rules_work_on_and_what_is_beside_it(training: Path) -> None:
    out = done("inspect", training).out
    assert "rules work on: model" in out
    assert "carried as they are: 4 tensors" in out
    assert "epoch = 3" in out
    told = done("inspect", training, "--format", "json").json
    assert told["format"] == "torch"
    assert told["at"] == "model"
    assert {"path": "epoch", "value": 3} in told["items"]


def test_inspect_lists_what_it_refuses_to_read_and_apply_refuses_it(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "args": SimpleNamespace(lr=1)}, tmp_path / "in.pt")
    assert (
        "types.SimpleNamespace (not on the allow-list) at args"
        in done("inspect", tmp_path / "in.pt").out
    )
    failed = run(
        "apply", tmp_path / "in.pt", "-o", tmp_path / "out", "--output-format", "safetensors"
    )
    assert failed.exit == 3
    assert "error[M935]" in failed.err
    assert "at args" in failed.err
    done(
        "apply",
        tmp_path / "in.pt",
        "-o",
        tmp_path / "out",
        "--output-format",
        "safetensors",
        "--allow",
        "opaque",
    )


def test_a_plan_says_what_it_converts_and_runs_as_it_was_reviewed(
    training: Path, rule: Path, tmp_path: Path
) -> None:
    shown = done(
        "plan",
        training,
        "--rules",
        rule,
        "--output-format",
        "safetensors",
        "--folder",
        "-o",
        tmp_path / "plan.json",
    ).out
    assert "torch → safetensors" in shown
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "new")
    done("verify", tmp_path / "new", "--source", training, "--rules", rule)
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back.pt", "--rules", rule)
    assert done("diff", training, tmp_path / "back.pt").out
    assert done("plan", training, "--output-format", "torch", "--check", exit=1).out.startswith(
        "torch → torch"
    )


def test_the_name_of_the_output_says_its_format(training: Path, tmp_path: Path) -> None:
    torch.save(torch.load(training, weights_only=True)["model"], tmp_path / "m.pt")
    done(
        "apply",
        tmp_path / "m.pt",
        "-o",
        tmp_path / "m.safetensors",
        "--output-format",
        "safetensors",
    )
    done(
        "apply", tmp_path / "m.safetensors", "-o", tmp_path / "back.pth", "--output-format", "torch"
    )
    torch.load(tmp_path / "back.pth", weights_only=True)
    assert (
        run("apply", training, "-o", tmp_path / "x.safetensors", "--output-format", "torch").exit
        == 2
    )


def test_two_dicts_of_tensors_are_told_apart_by_at(tmp_path: Path, rule: Path) -> None:
    torch.save(
        {"gen": {"a.weight": torch.ones(1)}, "critic": {"b.weight": torch.ones(1)}},
        tmp_path / "in.pt",
    )
    failed = run("inspect", tmp_path / "in.pt")
    assert (failed.exit, "M945" in failed.err, "--at" in failed.err) == (3, True, True)
    done("apply", tmp_path / "in.pt", "-o", tmp_path / "out.pt", "--rules", rule, "--at", "critic")
    made = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: list(held) for name, held in made.items()} == {
        "gen": ["a.weight"],
        "critic": ["b.kernel"],
    }
    done(
        "verify",
        tmp_path / "out.pt",
        "--source",
        tmp_path / "in.pt",
        "--rules",
        rule,
        "--at",
        "critic",
    )


def test_nothing_of_torch_or_numpy_is_loaded_to_read_or_write_these_files(
    training: Path, rule: Path, tmp_path: Path
) -> None:
    heavy = {"torch", "numpy"}
    assert not loaded("inspect", training) & heavy
    assert not loaded("plan", training, "--rules", rule) & heavy
    assert not loaded("apply", training, "-o", tmp_path / "a.pt", "--rules", rule) & heavy
    assert (
        not loaded("apply", training, "-o", tmp_path / "b", "--output-format", "safetensors")
        & heavy
    )
    assert (
        not loaded("apply", tmp_path / "b", "-o", tmp_path / "c.pt", "--output-format", "torch")
        & heavy
    )


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    bits = random.Random(1)
    state = {
        f"w.{i}": torch.frombuffer(bytearray(bits.randbytes(6 << 20)), dtype=torch.uint8)
        for i in range(6)
    }
    torch.save(state, tmp_path / "in.pt")
    arguments = ["apply", tmp_path / "in.pt", "--output-format", "torch", "--no-fsync", "-q", "-o"]
    assert shell(*arguments, tmp_path / "wanted.pt").exit == 0
    for lines in (1, 4):
        out = tmp_path / f"out{lines}.pt"
        child = spawn(*arguments, out)
        wait_for(partial(out) / "journal.jsonl", child, lines)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=HANG)
        if not out.exists():
            assert shell(*arguments, out, "--resume").exit == 0
        assert out.read_bytes() == (tmp_path / "wanted.pt").read_bytes()
        assert not partial(out).exists()


def test_what_to_run_next_names_the_dict_that_was_asked_for(tmp_path: Path, rule: Path) -> None:
    weights = {"a.weight": torch.ones(2), "a.bias": torch.ones(1)}
    torch.save({"model": weights, "my ema": dict(weights)}, tmp_path / "in.pt")
    told = done(
        "apply", tmp_path / "in.pt", "-o", tmp_path / "out.pt", "--rules", rule, "--at", "my ema"
    ).err
    assert told.rstrip().endswith("--at 'my ema'")
    failed = run("downgrade", tmp_path / "out.pt", "-o", tmp_path / "back.pt")
    assert "it is that of the dict at `my ema`, which has to be named" in failed.err


def test_values_are_shown_as_people_write_them(tmp_path: Path) -> None:
    held = {
        "w": torch.ones(1),
        "dtype": torch.float16,
        "device": torch.device("cuda", 1),
        "raw": b"abcd",
        "none": (),
        "empty": {},
    }
    torch.save({**held, "text": "é"}, tmp_path / "in.pt")
    out = done("inspect", tmp_path / "in.pt").out
    for line in (
        "dtype = torch.float16",
        'device = torch.device("cuda", 1)',
        "raw = bytes, 4 B",
        "none = ()",
        "empty = {}",
    ):
        assert f"  {line}\n" in f"{out}\n"


def test_lint_looks_at_the_dict_that_is_named(tmp_path: Path, rule: Path) -> None:
    torch.save(
        {
            "one": {"a.weight": torch.ones(2), "a.bias": torch.ones(1)},
            "two": {"b.x": torch.ones(1)},
        },
        tmp_path / "in.pt",
    )
    assert "M945" in run("lint", rule, "--index", tmp_path / "in.pt").err
    assert "M945" not in run("lint", rule, "--index", tmp_path / "in.pt", "--at", "one").err


def test_a_torch_dist_folder_and_a_file_without_tensors_make_no_output(
    rule: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "iter_0000010", tmp_path / "out"
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).write_bytes(b"\x80\x04N.")
    torch.save({"args": argparse.Namespace(rank=0), "iteration": 10}, folder / "common.pt")
    for asked in ((), ("--rules", rule)):
        for command in ("inspect", "plan"):
            failed = (
                run(command, folder, "--allow", "opaque", *asked)
                if command == "plan"
                else run(command, folder)
            )
            assert (failed.exit, "error[M938]" in failed.err) == (3, True)
        failed = run(
            "apply",
            folder,
            "-o",
            out,
            "--allow",
            "opaque",
            "--output-format",
            "safetensors",
            *asked,
        )
        assert (failed.exit, "error[M938]" in failed.err) == (3, True)
    done("inspect", folder / "common.pt")
    failed = run(
        "apply",
        folder / "common.pt",
        "-o",
        out,
        "--allow",
        "opaque",
        "--output-format",
        "safetensors",
    )
    assert (failed.exit, "error[M939]" in failed.err) == (3, True)
    for value in ({}, [], {"optimizer": {"state": {}, "param_groups": []}}):
        torch.save(value, tmp_path / "none.pt")
        failed = run("plan", tmp_path / "none.pt", "--output-format", "safetensors")
        assert (failed.exit, "error[M939]" in failed.err) == (3, True)
    assert not out.exists()


def test_a_state_dict_without_tensors_is_refused(rule: Path) -> None:
    for empty in ({}, {"epoch": 3}):
        with pytest.raises(migrate.MigrateError, match="M939"):
            migrate.apply(empty, rules=rule)


@pytest.mark.parametrize("beside", [{}, {"epoch": 3}, {"extra": {"w": torch.ones(2)}}])
@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out"])
def test_rules_that_leave_no_tensor_are_refused(
    beside: dict[str, object], out: str, tmp_path: Path
) -> None:
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}, **beside}, tmp_path / "in.pt")
    file = tmp_path / "r.yaml"
    head = RULE[: RULE.index("keep")]
    words = (tmp_path / "in.pt", "--rules", file, "--allow", "drop", "--format", "json")
    file.write_text(head + 'rules:\n  - {name: gone, from: "{k}", via: [{drop: {why: x}}]}\n')
    for refused in (run("plan", *words), run("apply", *words, "-o", tmp_path / out)):
        assert (refused.exit, refused.codes) == (3, ["M939"])
        (found,) = refused.json["diagnostics"]
        assert "the rules leave no tensor" in found["message"]
        assert found["spans"][0]["file"].endswith("r.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt", "r.yaml"]
    # one that is left is enough
    file.write_text(
        head + "keep: [b]\nrules:\n  - {name: gone, from: a, via: [{drop: {why: x}}]}\n"
    )
    done("apply", tmp_path / "in.pt", "-o", tmp_path / out, "--rules", file, "--allow", "drop")
    done("verify", tmp_path / out, "--source", tmp_path / "in.pt", "--rules", file)


def test_a_state_dict_of_which_rules_leave_no_tensor_is_empty(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    head = RULE[: RULE.index("keep")]
    file.write_text(head + 'rules:\n  - {name: gone, from: "{k}", via: [{drop: {why: x}}]}\n')
    assert migrate.apply({"a": torch.ones(2)}, rules=file, allow={"drop"}) == {}
