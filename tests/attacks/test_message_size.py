"""No message over 20,000 bytes, in text or JSON, whatever the checkpoint and the command line
hold.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import run, safetensors
from marks import thorough

from migrate.core.errors import Diagnostic, Span, bounded, json_length

MOST = 20_000
ODD = [
    "x" * 1_000_000,
    "\U0001f600" * 100_000,
    '"\\' * 100_000,
    "\x00\x1b" * 100_000,
    "a\n" * 100_000,
]
RULES = (
    "id: t/x\ntitle: t\nlineage: t\nedge: [a, b]\nparams:\n  n: {type: int, config: n, "
    "optional: true}\nrules:\n"
)


@pytest.mark.parametrize("text", ODD, ids=["long", "wide", "quoted", "control", "lines"])
def test_a_diagnostic_is_small_whatever_it_quotes(text):
    spans = tuple(Span(text, n, 50_000, 3, text, text) for n in range(1, 9))
    found = Diagnostic("M201", text, spans, (text,) * 500, text)
    assert len(json.dumps(found.to_json(), indent=1)) <= MOST
    assert len(found.render().encode()) <= MOST
    assert "characters)" in found.message


@pytest.mark.parametrize("text", ODD, ids=["long", "wide", "quoted", "control", "lines"])
@pytest.mark.parametrize("most", [100, 1000])
def test_what_is_cut_is_as_long_as_may_be(text, most):
    for tail in (False, True):
        cut = bounded(text, most, tail=tail)
        assert most - 100 <= json_length(cut) <= most
        assert json_length(text) == len(json.dumps(text)) - 2
    assert bounded("short", most) == "short"


KEYS = {
    "long": f"l.0.{ODD[0]}",
    "digits": f"l.{'9' * 5000}.w",
    "dots": "." * 100_000,
    "wide": f"l.0.{ODD[1][:20_000]}",
}


@pytest.mark.parametrize("key", thorough(KEYS.values()), ids=KEYS)
def test_messages_about_hostile_checkpoints_are_small(tmp_path: Path, key: str):
    folder = tmp_path / "in"
    safetensors(
        folder / "model.safetensors",
        {key: ("F32", [2]), "l.1.w": ("F32", [2]), "other": ("F32", [2])},
    )
    (folder / "config.json").write_text(json.dumps({"model_type": ODD[0], "n": ODD[1]}))
    rule = (
        "  - {name: r, from: 'l.{i:int}.{k...}', to: 'm.{k}', via: [{stack: {over: i, count: "
        "$n}}]}\n"
    )
    (tmp_path / "r.yaml").write_text(RULES + rule)
    plan = ["plan", folder]
    for arguments in (
        [*plan, "--rules", tmp_path / "r.yaml"],
        [*plan, "--to", "latest"],
        [*plan, "--to", key],
        ["inspect", folder],
    ):
        text = run(*arguments)
        assert text.exit in (0, 2, 3)
        assert all(len(one.encode()) <= MOST for one in text.err.split("\n\n"))
        assert all(len(line.encode()) <= MOST for line in text.out.splitlines())
        answer = run(*arguments, "--format", "json").json
        assert all(len(json.dumps(one, indent=1)) <= MOST for one in answer.get("diagnostics", []))
        said = [*answer.get("notes", []), *answer.get("warnings", [])]
        assert all(len(json.dumps(one)) <= MOST for one in said)
