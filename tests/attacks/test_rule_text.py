"""What stands in a rule file never drives a terminal and never buries the message, wherever it
stands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from archives import safetensors
from commandline import run
from marks import thorough

RULES = """\
id: demo/v2/x
title: A change
why: because
lineage: demo
edge: [v1, v2]
requires: ">=0.1"
params:
  n: {type: int, minimum: 1, default: 1, config: num}
  k: {type: str, default: abc, choices: [abc, d]}
  s: {shape: {key: a.0, dim: 0}, type: int, optional: true}
files:
  config.json: {quant: null}
names: ["config.json#ignore"]
keep:
  - "c.{n}"
rules:
  - name: r
    from: "a.{e:int}"
    to: "b.{e}"
    where: {e: {min: 0, max: 7}}
    when: {dtype: [uint8], ndim: 1}
    map: {e: {"0": "1"}}
    via:
      - reshape: {to: [2, "$n * 2"]}
      - rearrange: {pattern: "a b -> b a", axes: {a: 2}}
      - cast: {to: float32}
    optional: true
    if_exists: keep
    inverse: skip
tests:
  - name: t
    given:
      a.0: {shape: [4], dtype: uint8, fill: 1}
    expect:
      b.1: {shape: [2, 2], dtype: float32}
"""
PLACES = list(re.finditer(r'"[^"\n]*"|[A-Za-z0-9_.]+', RULES))
HOSTILE = {
    "escapes": '"\\e[31mred\\u202e\\a\\x9b"',
    "escapes in a pattern": '"a.{\\e[31m...}"',
    "a hundred thousand letters": '"' + "x" * 100_000 + '"',
    "a pattern of many letters": '"a.{' + "x" * 50_000 + '}"',
}


@pytest.mark.parametrize("name", thorough(HOSTILE))
def test_no_text_of_a_rule_file_reaches_the_terminal_raw_or_without_end(
    tmp_path: Path, name: str
) -> None:
    good, path = tmp_path / "good.safetensors", tmp_path / "rules.yaml"
    good.write_bytes(safetensors({"a.0": b"abcd", "c.0": b"abcd"}))
    for place in PLACES:
        path.write_text(RULES[: place.start()] + HOSTILE[name] + RULES[place.end() :])
        for command in (["plan", good, "--rules", path], ["lint", path], ["test", path]):
            result = run(*command)
            said = result.out + result.err
            told = f"{place.group()} at {place.start()}, {command[0]}: {said[:600]}"
            assert result.exit in (0, 1, 2, 3), told
            assert all(c.isprintable() or c == "\n" for c in said), told
            assert len(said) < 30_000, told


def test_the_rule_file_is_a_good_one(tmp_path: Path) -> None:
    good, path = tmp_path / "good.safetensors", tmp_path / "rules.yaml"
    good.write_bytes(safetensors({"a.0": b"abcd", "c.0": b"abcd"}))
    path.write_text(RULES)
    result = run("plan", good, "--rules", path, "--allow", "lossy")
    assert result.exit == 0, result.err
    assert run("test", path).exit == 0, run("test", path).out


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
def test_no_rule_hides_in_a_comment(tmp_path: Path, end: str) -> None:
    good, path = tmp_path / "good.safetensors", tmp_path / "rules.yaml"
    good.write_bytes(safetensors({"a.0": b"abcd", "c.0": b"abcd"}))
    hidden = (
        f"  # the router stays as it is{end}  - {{name: gone, from: 'c.0', via: [{{drop: "
        "{why: unused}}]}\n"
    )
    text = RULES.replace('keep:\n  - "c.{n}"\n', "").replace("rules:\n", "rules:\n" + hidden)
    path.write_text(text)
    line = text.count("\n", 0, text.index(end)) + 1
    for command in (
        ["plan", good, "--rules", path, "--allow", "drop"],
        ["lint", path],
        ["test", path],
    ):
        result = run(*command)
        assert result.exit in (1, 2)
        assert f"M116]: U+{ord(end):04X}" in result.out + result.err
        assert f"{path}:{line}:{hidden.index(end) + 1}" in result.out + result.err
