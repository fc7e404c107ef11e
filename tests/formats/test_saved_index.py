"""Headers alone, which stand for a checkpoint wherever no tensor is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import DATA, run
from safetensors.numpy import save_file

import migrate
from migrate.core.errors import MigrateError

HUB, V5 = DATA / "mixtral__v4" / "hub", DATA / "mixtral__v4" / "v5"


def saved(path: Path, file: Path) -> Path:
    migrate.inspect(path, save_index=file)
    return file


def code(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        call(*args, **options)
    return caught.value.diagnostics[0].code


def test_it_is_inspected_and_planned_as_the_checkpoint_is(tmp_path: Path) -> None:
    index = saved(HUB, tmp_path / "old.json")
    assert json.loads(index.read_text())["kind"] == "saved_index"
    own, other = migrate.inspect(HUB), migrate.inspect(index)
    assert (other.index_hash, other.layouts, other.keys) == (
        own.index_hash, own.layouts, own.keys,
    )  # fmt: skip
    plans = [migrate.plan(path, to="hf-mixtral@v5").report for path in (HUB, index)]
    assert plans[0].rows == plans[1].rows
    assert plans[0].params == plans[1].params


def test_a_stamp_comes_along(tmp_path: Path) -> None:
    migrate.apply(HUB, tmp_path / "new", to="hf-mixtral@v5")
    index = saved(tmp_path / "new", tmp_path / "new.json")
    back = migrate.plan(index, backwards=True).report
    assert back.rows == migrate.plan(tmp_path / "new", backwards=True).report.rows


def test_rules_are_started_from_it_and_held_against_it(tmp_path: Path) -> None:
    save_file({"a.w": np.zeros(2, "f4"), "a.b": np.zeros(3, "f4")}, tmp_path / "a.safetensors")
    save_file({"c.w": np.zeros(2, "f4"), "c.b": np.zeros(3, "f4")}, tmp_path / "c.safetensors")
    old = saved(tmp_path / "a.safetensors", tmp_path / "a.json")
    new = saved(tmp_path / "c.safetensors", tmp_path / "c.json")
    listed = migrate.new(tmp_path / "listed.yaml", index=old)
    assert listed.counts.keep == 2
    made = migrate.new(tmp_path / "made.yaml", from_diff=(old, new), headers=True)
    assert made.counts.guessed == made.counts.rules > 0
    codes = {d.code for d in migrate.lint(tmp_path / "made.yaml", index=old).diagnostics}
    assert not codes & {"M660", "M661"}
    assert "M661" in {d.code for d in migrate.lint(tmp_path / "made.yaml", index=new).diagnostics}


def test_what_needs_tensors_refuses_it(tmp_path: Path) -> None:
    index, goal = saved(HUB, tmp_path / "old.json"), {"to": "hf-mixtral@v5"}
    assert code(migrate.apply, index, tmp_path / "out", **goal) == "M986"
    assert code(migrate.diff, index, HUB) == "M986"
    assert code(migrate.verify, V5, source=index, **goal) == "M986"
    assert code(migrate.new, tmp_path / "m.yaml", from_diff=(index, V5)) == "M986"
    migrate_plan = tmp_path / "plan.json"
    migrate_plan.write_text(migrate.plan(index, **goal).to_json())
    assert code(migrate.apply, migrate_plan, tmp_path / "out") == "M986"
    assert not (tmp_path / "out").exists()
    answer = run("apply", index, "-o", tmp_path / "out", "--to", "hf-mixtral@v5")
    assert answer.exit == 2
    assert "this needs the tensors" in answer.err


def test_nothing_is_replaced_and_the_name_says_what_it_is(tmp_path: Path) -> None:
    index = saved(HUB, tmp_path / "old.json")
    before = index.read_bytes()
    assert code(migrate.inspect, V5, save_index=index) == "M904"
    assert index.read_bytes() == before
    assert code(migrate.inspect, HUB, save_index=tmp_path / "old.txt") == "M115"
    assert code(migrate.inspect, HUB, save_index=tmp_path / "none" / "old.json") == "M115"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors", []),
        ("tensors", {"w": ["float32", [-1]]}),
        ("tensors", {"w": ["float32", [True]]}),
        ("tensors", {"w": ["float31", [1]]}),
        ("tensors", {"w": [["float32"], [1]]}),
        ("tensors", {"w": ["float32"]}),
        ("side_files", {"config.json": {}}),
        ("metadata", None),
        ("history", 1),
        ("format_version", "2.0"),
    ],
)
def test_a_file_that_nothing_has_written_so_is_refused(
    tmp_path: Path, field: str, value: Any
) -> None:
    index = saved(HUB, tmp_path / "old.json")
    said = json.loads(index.read_text())
    index.write_text(json.dumps(said))
    migrate.inspect(index)
    index.write_text(json.dumps(said | {field: value}))
    assert code(migrate.inspect, index) == "M906"


def test_keys_may_hold_anything_and_there_may_be_none(tmp_path: Path) -> None:
    keys = ['a"b', "a\nb", "ключ", "{k}", "\U0001f600"]
    save_file({key: np.zeros((), "f4") for key in keys}, tmp_path / "odd.safetensors")
    index = saved(tmp_path / "odd.safetensors", tmp_path / "odd.json")
    own, other = (migrate.inspect(p, expand=True) for p in (tmp_path / "odd.safetensors", index))
    assert [row.keys for row in other.keys] == [row.keys for row in own.keys]
    save_file({}, tmp_path / "none.safetensors")
    assert migrate.inspect(saved(tmp_path / "none.safetensors", tmp_path / "n.json")).tensors == 0
