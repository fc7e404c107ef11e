"""Lineages with a rule file for each way: what a plan says of the downgrade is what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import contents, done, run, safetensors
from test_te_lineages import EMPTY, vector

HEAD = "id: demo/{0}/x\ntitle: x\nwhy: x\nlineage: demo\nedge: {1}\n"


@pytest.mark.parametrize("state", ["none", "empty", "v2.0_linear_MXFP8BlockScaling.pkl"])
def test_the_plan_says_what_the_other_edge_brings_back(state: str, tmp_path: Path) -> None:
    """The way back is a rule file of its own, which gives each module an empty state."""
    plain: dict[str, Any] = {"fc.weight": ("F32", [2, 3]), "fc.bias": ("F32", [2])}
    if state != "none":
        data = b"" if state == "empty" else vector(state)
        plain["fc._extra_state"] = ("U8", [len(data)], data)
    source, ops = safetensors(tmp_path / "in.safetensors", plain), tmp_path / "ops.safetensors"
    question = ("--to", "te-ops-linear@ops", "--from", "te-ops-linear@module")
    question += ("--set", "modules=fc")
    told = done("plan", source, *question, "--format", "json").json["downgrade"]
    done("apply", source, "-o", ops, *question, "-q")
    done("downgrade", ops, "-o", tmp_path / "back.safetensors", "-q")
    back = contents(tmp_path / "back.safetensors")
    assert back == contents(source) | {"fc._extra_state": EMPTY}
    assert told["exact"] is (back == contents(source)) is (state == "empty")
    if state == "none":
        (why,) = told["because"]
        assert "module-state" in why
        assert why.endswith("returns, but was not there before: fc._extra_state")


@pytest.mark.parametrize("present", [False, True])
def test_empty_states_that_are_made_go_again_and_one_that_was_there_does_not_return(
    present: bool, tmp_path: Path
) -> None:
    held: dict[str, Any] = {f"layers.{name}.weight": ("F32", [2, 3]) for name in ("fc", "norm")}
    if present:
        held["layers.fc._extra_state"] = ("U8", [0], b"")
    source, out = safetensors(tmp_path / "in.safetensors", held), tmp_path / "out.safetensors"
    question = ("--to", "te-missing-state@complete", "--from", "te-missing-state@incomplete")
    question += ("--set", "modules=layers.fc,layers.norm")
    told = done("plan", source, *question, "--format", "json").json["downgrade"]
    done("apply", source, "-o", out, *question, "-q")
    done("downgrade", out, "-o", tmp_path / "back.safetensors", "-q")
    assert told["exact"] is (contents(tmp_path / "back.safetensors") == contents(source))
    assert told["exact"] or present


def pack(folder: Path, back: str) -> Path:
    """A lineage whose layouts are a and b; `back` leads from b to a."""
    home = folder / "rules" / "demo"
    for layout in ("a", "b"):
        (home / layout).mkdir(parents=True)
    layouts = (
        "lineage: demo\ntitle: x\nordered: false\nlayouts:\n  a: {title: a}\n  b: {title: b}\n"
    )
    (home / "layouts.yaml").write_text(layouts)
    there = "rules: [{name: there, from: w, to: v}]\n"
    (home / "b" / "there.yaml").write_text(HEAD.format("b", "[a, b]") + there)
    (home / "a" / "back.yaml").write_text(HEAD.format("a", "[b, a]") + back)
    return folder / "rules"


@pytest.mark.parametrize(
    ("back", "why"),
    [
        ("rules: [{name: back, from: v, to: w}]\n", ""),
        (
            "rules: [{name: back, from: v, to: w, via: [{transpose: {dims: [0, 1]}}]}]\n",
            "other values return: w",
        ),
        (
            (
                "rules:\n  - {name: gone, from: v, via: [{drop: {why: x}}]}\n"
                "  - {name: made, from: v, to: w, keep_source: true, "
                "via: [{fill: {value: 0, dtype: float32, shape: [3, 3]}}]}\n"
            ),
            "other values return: w",
        ),
        ("rules: [{name: back, from: v, to: other}]\n", "not restored: w"),
        (
            (
                "params: {p: {type: int}}\n"
                "rules: [{name: back, from: v, to: w, via: [{slice: {dim: 0, start: $p, stop: 3, "
                "of: 3}}]}]\n"
            ),
            "`p`",
        ),
    ],
    ids=["names", "turned", "filled", "elsewhere", "asks"],
)
def test_the_way_back_is_that_of_its_own_file(back: str, why: str, tmp_path: Path) -> None:
    source = safetensors(tmp_path / "in.safetensors", {"w": ("F32", [3, 3], bytes(range(36)))})
    rules, out = pack(tmp_path, back), tmp_path / "out.safetensors"
    question = ("--rules", rules, "--to", "demo@b", "--from", "demo@a")
    told = done("plan", source, *question, "--format", "json").json["downgrade"]
    done("apply", source, "-o", out, *question, "-q")
    found = run(
        "downgrade",
        out,
        "-o",
        tmp_path / "b.safetensors",
        "--rules",
        rules,
        "-q",
        "--allow",
        "drop",
    )
    exact = found.exit == 0 and contents(tmp_path / "b.safetensors") == contents(source)
    assert (told["exact"], exact) == (not why, not why)
    assert not why or any(why in one for one in told["because"])
