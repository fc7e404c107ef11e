"""Rules that multiply: refused by their product, before what they would make is made."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

import migrate
from migrate.core.errors import MigrateError
from migrate.core.view import View
from migrate.planning import bind, pipeline

HEAD = "id: t/x\ntitle: t\nlineage: t\nedge: [a, b]\nrules:\n"
THREE = "{k}.{a:int}.{b:int}.{c:int}"


def rule(tmp_path, via, to=THREE, name="r", key="{k...}.w"):
    path = tmp_path / f"{name}.yaml"
    path.write_text(
        f"{HEAD}  - name: {name}\n    from: '{key}'\n    to: '{to}'\n    via: [{via}]\n"
    )
    return path


def refused(state, *rules):
    tracemalloc.start()
    try:
        with pytest.raises(MigrateError) as caught:
            migrate.plan(state, rules=rules)
        return caught.value, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("via", "shape"),
    [
        (
            (
                "{copy: {into: a, count: 1000}}, {tie: {into: b, count: 1000}}, {copy: {into: c, "
                "count: 1000}}"
            ),
            (2,),
        ),
        (
            "{unbind: {into: a, dim: 0}}, {unbind: {into: b, dim: 0}}, {unbind: {into: c, dim: 0}}",
            (1000, 1000, 1000),
        ),
        (
            (
                "{split: {into: a, dim: 0, count: 1000}}, {split: {into: b, dim: 1, count: 1000}}, "
                "{copy: {into: c, count: 1000}}"
            ),
            (1000, 1000),
        ),
        (
            (
                "{unbind: {into: a, dim: 1}}, {cast: {to: float32}}, {unbind: {into: b, dim: 0}}, "
                "{copy: {into: c, count: 1000}}"
            ),
            (1000, 1000),
        ),
    ],
)
def test_steps_that_make_a_thousand_million_are_refused_with_the_product(
    tmp_path, monkeypatch, via, shape
):
    made = []
    records = pipeline.records
    monkeypatch.setattr(pipeline, "records", lambda *given: made.append(1) or records(*given))
    dtype = torch.bfloat16
    error, most = refused(
        {"x.w": torch.empty(shape, dtype=dtype, device="meta")}, rule(tmp_path, via)
    )
    (found,) = error.diagnostics
    assert (found.code, error.exit_code) == ("M313", 2)
    assert "rule 'r' would make 1,000,000,000 tensors of 1 tensor" in found.message
    assert found.notes[0].count("1,000") == 3
    assert (found.spans[0].file, found.spans[0].line) == (str(tmp_path / "r.yaml"), 9)
    assert not made
    assert most < 30 << 20


def test_the_tensors_of_all_keys_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "MOST_TENSORS", 100)
    state = {f"x{i}.w": torch.zeros(2) for i in range(11)}
    error, _ = refused(state, rule(tmp_path, "{copy: {into: a, count: 10}}", "{k}.{a:int}"))
    assert "would make 110 tensors of 11 tensors, at most 100" in error.diagnostics[0].message


def test_the_tensors_of_all_rules_count_together(tmp_path, monkeypatch):
    monkeypatch.setattr(bind, "MOST_TENSORS", 100)
    rules = [
        rule(tmp_path, "{copy: {into: a, count: 40}}", f"{n}.{{k}}.{{a:int}}", n, f"{{k...}}.{n}")
        for n in ("one", "two", "three")
    ]
    text = HEAD + "".join(path.read_text().removeprefix(HEAD) for path in rules)
    (tmp_path / "all.yaml").write_text(text)
    error, _ = refused(
        {f"x.{n}": torch.zeros(2) for n in ("one", "two", "three")}, tmp_path / "all.yaml"
    )
    (found,) = error.diagnostics
    assert found.code == "M313"
    assert "up to 'three' make 117 tensors more than they take" in found.message


def test_names_that_grow_are_refused_before_all_are_made(tmp_path):
    path = rule(tmp_path, "{copy: {into: a, count: 1000}}", "{k}.{a:int}")
    error, most = refused({"x" * 1_000_000 + ".w": torch.zeros(2)}, path)
    (found,) = error.diagnostics
    assert (found.code, error.exit_code) == ("M314", 2)
    assert "rule 'r'" in found.message
    assert len(found.notes[0]) < 300
    # a character of ASCII is a byte
    assert most < 2 * bind.MOST_TEXT


def test_the_shapes_are_foreseen_without_pieces(tmp_path, monkeypatch):
    """Nothing but the shape is looked at, so that looking ahead costs no views."""
    seen = []

    class Noted(View):
        def __new__(cls, shape, pieces):
            seen.append(pieces)
            return View(shape, pieces)

    monkeypatch.setattr(pipeline, "View", Noted)
    migrate.plan(
        {"x.w": torch.zeros(4, 2)},
        rules=[rule(tmp_path, "{unbind: {into: a, dim: 0}}", "{k}.{a:int}")],
    )
    assert set(seen) == {()}
