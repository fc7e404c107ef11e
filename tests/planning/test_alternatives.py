"""Alternatives that no key has: mostly a spelling mistake, and half of a rule that does nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from migrate import api
from migrate.core.errors import MigrateError

HEAD = "id: t/b/x\ntitle: x\nlineage: t\nedge: [a, b]\nrequires: '>=0.1'\n"
KEYS = ("enc.layers.0.w", "enc.layers.1.w", "enc.norm", "enc.head")
STAY = '  - {name: layers, from: "enc.layers.{n:int}.w", to: "dec.layers.{n}.w"}\n'


def planned(folder: Path, rule: str, *keys: str, **keywords: object) -> list[str]:
    """What a plan notes of alternatives."""
    (folder / "r.yaml").write_text(HEAD + rule)
    save_file(
        {key: np.zeros((2, 2), np.float32) for key in keys or KEYS}, folder / "in.safetensors"
    )
    notes = api.plan(folder / "in.safetensors", rules=folder / "r.yaml", **keywords).document[
        "notes"
    ]  # type: ignore[arg-type]
    return [note for note in notes if "which its pattern lists" in note]


@pytest.mark.parametrize(
    ("rule", "noted"),
    [
        ('from: "enc.{m:norm|nrom|head}", to: "dec.{m}"', ["nrom"]),
        ('from: "enc.{m}", to: "dec.{m}", map: {m: {norm: ln, head: head, nrom: x}}', ["nrom"]),
        ('from: "enc.{m:norm|head}", to: "dec.{m}", map: {m: {norm: ln}}', []),
        ('from: "enc.{m:norm|nrom|head}", to: "dec.{m}", optional: {m: [nrom]}', []),
        ('from: "enc.{m:norm|nrom|head|x}", to: "dec.{m}", optional: {m: nrom}', ["x"]),
        ('from: "enc.{m:norm|nrom|head}", to: "dec.{m}", optional: true', []),
        ('from: "enc.{m:norm|nrom|head}", to: "dec.{m}", where: {m: [norm, head]}', []),
        # keys that `when` leaves to `keep` are there all the same
        ('from: "enc.{m:norm|head|x}", to: "dec.{m}", when: {ndim: 1}, optional: true', []),
    ],
)
def test_a_plan_notes_alternatives_that_no_key_has(
    tmp_path: Path, rule: str, noted: list[str]
) -> None:
    text = f'keep: ["enc.{{k...}}"]\nrules:\n{STAY}  - {{name: r, {rule}}}\n'
    assert planned(tmp_path, text) == [
        f"rule 'r': no key has {{m}} = {', '.join(noted)}, which its pattern lists"
    ] * bool(noted)


def test_a_key_that_a_narrower_rule_takes_has_the_alternative(tmp_path: Path) -> None:
    text = (
        f'rules:\n{STAY}  - {{name: r, from: "enc.{{m:norm|head}}", to: "dec.{{m}}"}}\n  - '
        "{name: h, from: enc.head, to: head}\n"
    )
    assert planned(tmp_path, text) == []


def test_the_way_back_notes_the_same_in_the_values_of_from(tmp_path: Path) -> None:
    rule = '{name: r, from: "enc.{m:norm|nrom|head}", to: "dec.{m}", map: {m: {nrom: ln2}}}'
    text = f"rules:\n{STAY}  - {rule}\n"
    assert len(planned(tmp_path, text)) == 1
    assert planned(
        tmp_path, text, *(key.replace("enc", "dec") for key in KEYS), backwards=True
    ) == ["rule 'r': no key has {m} = nrom, which its pattern lists"]


@pytest.mark.parametrize(
    "pattern", ["enc.layers.*.w", r"enc\\.layers\\.(\\d+)\\.w", "^enc.[a-z]+$"]
)
def test_a_rule_in_another_notation_is_told_which_one_it_is(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(MigrateError) as caught:
        planned(
            tmp_path, f'keep: ["enc.{{k...}}"]\nrules: [{{name: r, from: "{pattern}", to: x}}]\n'
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M206"
    assert "patterns are neither globs nor regular expressions" in (found.help or "")
