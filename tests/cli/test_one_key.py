"""`migrate plan --key`: what a plan says of one key, from either end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commandline import done, mixtral, rules, run, safetensors

LANGUAGE = """rules:
  - {name: swap, from: "{x:a|b}", to: "{x}", map: {x: {a: b, b: a}}}
  - {name: qkv, from: "m.qkv", to: "m.{w:q|k|v}", via: [{split: {into: w}}]}
  - {name: half, from: "h", to: "h", via: [{cast: {to: float16}}]}
  - {name: old, from: "buffer.{n:int}", via: [{drop: {why: the model computes it again}}]}
keep: [w]
"""
TENSORS = {
    "a": ("F32", [2]),
    "b": ("F32", [3]),
    "m.qkv": ("F32", [6, 2]),
    "h": ("F32", [4]),
    "buffer.7": ("I64", [1]),
    "w": ("F32", [5]),
}


def ask(key: str, *arguments: object) -> Any:
    return done("plan", *arguments, "--key", key, "--format", "json").json


@pytest.fixture
def odd(tmp_path: Path) -> list[object]:
    path = safetensors(tmp_path / "x.safetensors", TENSORS)
    given = rules(tmp_path, LANGUAGE)
    return [path, "--rules", given, "--allow", "lossy", "--allow", "drop"]


def keys(tensors: Any) -> list[str]:
    return [tensor["key"] for tensor in tensors]


def test_both_ends_of_a_merge_name_the_same_rule_and_tensors(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "old.safetensors", mixtral())
    new = ask("model.layers.1.mlp.experts.gate_up_proj", path, "--to", "hf-mixtral@v5")
    parts = [
        f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight"
        for e in (0, 1)
        for w in ("w1", "w3")
    ]
    assert sorted(keys(new["sources"])) == parts
    assert (new["after"]["spec"], new["after"]["bytes"]) == ("bfloat16 [2, 12, 4]", 192)
    assert "before" not in new
    (step,) = new["steps"]
    assert (step["change"], step["ops"], step["rule"]) == ("merged", ["stack", "concat"], "gate-up")
    assert step["at"].rpartition(":")[0].endswith("hf-mixtral/v5/fuse-experts.yaml:16")
    for part in parts:
        old = ask(part, path, "--to", "hf-mixtral@v5")
        assert keys(old["outputs"]) == ["model.layers.1.mlp.experts.gate_up_proj"]
        assert old["steps"] == [step]
        assert old["before"] == {"key": part, "spec": "bfloat16 [6, 4]", "bytes": 48}


def test_a_key_of_both_sides_is_followed_both_ways(odd: list[object]) -> None:
    found = ask("a", *odd)
    assert (keys(found["sources"]), keys(found["outputs"])) == (["b"], ["b"])
    assert (found["before"]["bytes"], found["after"]["bytes"]) == (8, 12)
    assert [(keys(s["from"]), s["to"]["key"]) for s in found["steps"]] == [
        (["b"], "a"),
        (["a"], "b"),
    ]


def test_what_is_split_goes_into_each_part(odd: list[object]) -> None:
    found = ask("m.qkv", *odd)
    assert sorted(keys(found["outputs"])) == ["m.k", "m.q", "m.v"]
    assert {s["change"] for s in found["steps"]} == {"split"}
    assert keys(ask("m.k", *odd)["sources"]) == ["m.qkv"]


def test_losses_are_those_of_the_key(odd: list[object]) -> None:
    (rounded,) = ask("h", *odd)["losses"]
    assert (rounded["kind"], rounded["rule"], rounded["keys"]) == ("lossy", "half", ["h"])
    gone = ask("buffer.7", *odd)
    assert gone["outputs"] == []
    (step,) = gone["steps"]
    assert "to" not in step
    assert (step["change"], step["why"]) == ("dropped", "the model computes it again")
    assert gone["losses"][0]["kind"] == "drop"
    assert ask("m.q", *odd)["losses"] == []


def test_what_no_rule_touches_has_no_steps(odd: list[object]) -> None:
    found = ask("w", *odd)
    assert (keys(found["sources"]), keys(found["outputs"]), found["steps"]) == (["w"], ["w"], [])
    assert "no rule touches it" in done("plan", *odd, "--key", "w").out


def test_every_edge_of_a_path_has_its_step(tmp_path: Path) -> None:
    folder = tmp_path / "rules" / "demo"
    folder.mkdir(parents=True)
    layouts = "\n".join(f"  {v}: {{title: {v}}}" for v in ("v1", "v2", "v3"))
    (folder / "layouts.yaml").write_text(
        f"lineage: demo\ntitle: demo\nordered: true\nlayouts:\n{layouts}\n"
    )
    for before, after, rule in (
        ("v1", "v2", "{name: one, from: 'a.{n:int}', to: 'b', via: [{stack: {over: n}}]}"),
        ("v2", "v3", "{name: two, from: b, to: c}"),
    ):
        place = folder / after / "x.yaml"
        place.parent.mkdir()
        place.write_text(
            f"id: demo/{after}/x\ntitle: x\nlineage: demo\nedge: [{before}, {after}]\n"
            f"rules:\n  - {rule}\n"
        )
    path = safetensors(tmp_path / "x.safetensors", {f"a.{n}": ("F32", [2]) for n in range(3)})
    asked = [path, "--from", "demo@v1", "--to", "demo@v3", "--rules", tmp_path / "rules"]
    found = ask("c", *asked)
    assert keys(found["sources"]) == ["a.0", "a.1", "a.2"]
    assert [(s["rule"], s["to"]["key"], s["to"]["spec"]) for s in found["steps"]] == [
        ("one", "b", "float32 [3, 2]"),
        ("two", "c", "float32 [3, 2]"),
    ]
    assert keys(ask("a.1", *asked)["outputs"]) == ["c"]
    text = done("plan", *asked, "--key", "c").out
    assert "made of: 3 tensors, 24 B\n     a.{0..2}  ×3  f32 [2]" in text


def test_an_unknown_key_gets_the_nearest_one_with_its_numbers(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "old.safetensors", mixtral(layers=12))
    wrong = "model.layers.11.mlp.expert.gate_up_proj"
    result = run("plan", path, "--to", "hf-mixtral@v5", "--key", wrong)
    assert (result.exit, result.out) == (2, "")
    assert result.err.startswith(f"error[M115]: --key {wrong}: neither the source nor the output")
    assert "did you mean `model.layers.11.mlp.experts.gate_up_proj`?" in result.err
    assert "--expand" in run("plan", path, "--to", "hf-mixtral@v5", "--key", "?").err


def test_the_answer_is_given_once(odd: list[object]) -> None:
    result = run("plan", *odd, "--key", "w", "-o", "-")
    assert (result.exit, result.out) == (2, "")


def test_a_hostile_key_is_escaped(tmp_path: Path) -> None:
    bad = "a\x1b[2J\n"
    path = safetensors(tmp_path / "x.safetensors", {bad: ("F32", [2])})
    given = rules(tmp_path, 'rules:\n  - {name: r, from: "{k...}", to: "n.{k}"}\n')
    out = done("plan", path, "--rules", given, "--key", bad).out
    assert "\x1b" not in out
    assert ask(bad, path, "--rules", given)["key"] == bad
