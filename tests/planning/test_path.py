"""Where a checkpoint stands, and what is said of it that leads nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import migrate
from migrate.core.errors import MigrateError

LAYOUTS = """
lineage: demo
title: Demo
layouts:
  v1: {title: one, detect: {present: "{p...}.a"}}
  v2: {title: two, detect: {present: "{p...}.b"}}
"""
RULE = """
id: demo/v2/r
title: t
lineage: demo
edge: [v1, v2]
rules: [{name: r, from: "{p...}.a", to: "{p}.%s"}]
"""


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    folder = tmp_path / "rules" / "demo" / "v2"
    folder.mkdir(parents=True)
    (folder.parent / "layouts.yaml").write_text(LAYOUTS)
    (folder / "r.yaml").write_text(RULE % "b")
    return tmp_path / "rules"


def checkpoint(folder: Path, *keys: str) -> Path:
    save_file({key: np.zeros(2, np.float32) for key in keys}, folder / "x.safetensors")
    return folder / "x.safetensors"


def refused(path: Path, pack: Path, **question: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.plan(path, rules=[pack], **question)
    return str(caught.value)


def test_a_checkpoint_that_fits_two_layouts_is_ambiguous_and_shows_why(
    tmp_path: Path, pack: Path
) -> None:
    said = refused(checkpoint(tmp_path, "x.a", "y.b"), pack, to="demo@v2")
    assert "M503" in said
    assert "v1: x.a fits {p...}.a" in said
    assert 'from_="demo@v1" or from_="demo@v2"' in said


def test_shapes_that_fit_two_layouts_are_ambiguous_and_those_that_fit_one_are_not(
    tmp_path: Path, pack: Path
) -> None:
    (pack / "demo" / "layouts.yaml").write_text(
        """
lineage: demo
title: Demo
layouts:
  v1: {title: one, detect: {shape: {"{p...}.a": [e, h, null], "{p...}.b": [e, null, h]}}}
  v2: {title: two, detect: {shape: {"{p...}.a": [e, null, h], "{p...}.b": [e, h, null]}}}
"""
    )
    (pack / "demo" / "v2" / "r.yaml").write_text(
        """
id: demo/v2/r
title: t
lineage: demo
edge: [v1, v2]
rules: [{name: r, from: "{p...}.{k:a|b}", to: "{p}.{k}", via: [{transpose: {dims: [1, 2]}}]}]
"""
    )

    def made(*shapes: tuple[int, ...]) -> Path:
        held = {f"x.{k}": np.zeros(s, np.float32) for k, s in zip("ab", shapes, strict=True)}
        save_file(held, tmp_path / "x.safetensors")
        return tmp_path / "x.safetensors"

    said = refused(made((2, 3, 3), (2, 3, 3)), pack, to="demo@v2")
    assert "M503" in said
    assert "the checkpoint fits the layouts v1 and v2 of lineage demo" in said
    assert "v1: x.a has the shape [2, 3, 3], which [e, h, null] means of {p...}.a" in said
    assert "v2: x.a has the shape [2, 3, 3], which [e, null, h] means of {p...}.a" in said
    assert 'from_="demo@v1" or from_="demo@v2"' in said
    square = tmp_path / "x.safetensors"
    plan = migrate.plan(square, rules=[pack], to="demo@v2", from_="demo@v1").document
    assert [(leg["from"], leg["to"]) for leg in plan["path"]] == [("v1", "v2")]
    plan = migrate.plan(made((2, 3, 4), (2, 5, 3)), rules=[pack], to="demo@v2").document
    assert [(leg["from"], leg["to"]) for leg in plan["path"]] == [("v1", "v2")]
    assert "M504" in refused(made((2, 3, 4), (2, 5, 6)), pack, to="demo@v2")


def test_a_checkpoint_that_fits_no_layout_shows_what_is_missing(tmp_path: Path, pack: Path) -> None:
    said = refused(checkpoint(tmp_path, "x.z"), pack, to="demo@v2")
    assert "M504" in said
    assert "not v1: no key fits {p...}.a" in said


def test_an_output_that_would_be_taken_for_another_layout_is_refused(
    tmp_path: Path, pack: Path
) -> None:
    (pack / "demo" / "v2" / "r.yaml").write_text(RULE % "c.a")
    said = refused(checkpoint(tmp_path, "x.a"), pack, to="demo@v2")
    assert "M506" in said
    assert "demo@v1, not as demo@v2" in said


def test_a_start_in_a_lineage_without_a_goal_is_refused(tmp_path: Path, pack: Path) -> None:
    said = refused(checkpoint(tmp_path, "x.a"), pack, to="demo@v2", from_="te-grouped-weight@multi")
    assert "`from_` names lineage te-grouped-weight" in said


def test_two_starts_in_one_lineage_are_refused(tmp_path: Path, pack: Path) -> None:
    said = refused(checkpoint(tmp_path, "x.a"), pack, to="demo@v2", from_=["demo@v1", "demo@v2"])
    assert "two layouts of lineage demo" in said


def test_a_start_beside_a_rule_file_is_refused(tmp_path: Path, pack: Path) -> None:
    said = refused(checkpoint(tmp_path, "x.a"), pack / "demo" / "v2" / "r.yaml", from_="demo@v1")
    assert "`from_`" in said
    assert "M115" in said


@pytest.mark.parametrize("name", ["nowhere", "demo/v2/r.yaml"])
def test_where_lineages_are_looked_for_only_a_folder_will_do(
    tmp_path: Path, pack: Path, name: str
) -> None:
    path = checkpoint(tmp_path, "x.a")
    for call in (
        lambda: migrate.inspect(path, rules=[pack / name]),
        lambda: migrate.history(rules=[pack / name]),
    ):
        with pytest.raises(MigrateError, match=name):
            call()


def test_two_files_of_an_edge_may_not_contradict_each_other_in_a_side_file(
    tmp_path: Path, pack: Path
) -> None:
    one, other = pack / "demo" / "v2" / "r.yaml", pack / "demo" / "v2" / "s.yaml"
    second = (
        "id: demo/v2/s\ntitle: t\nlineage: demo\nedge: [v1, v2]\nrules: []\nfiles: "
        "{config.json: %s}\n"
    )
    one.write_text((RULE % "b") + "files: {config.json: {x: {y: 1}, z: 2}}\n")
    path = checkpoint(tmp_path, "x.a")
    for patch in ("{x: null}", "{x: {y: 2}}", "{x: {y: true}}", "{x: 1}", "{x: {y: {z: 1}}}"):
        other.write_text(second % patch)
        said = refused(path, pack, to="demo@v2")
        assert "M516" in said
        assert "config.json at x" in said
    for patch in ("{x: {y: 1}}", "{x: {w: 2}, z: 2}", "{w: null}"):
        other.write_text(second % patch)
        assert migrate.plan(path, to="demo@v2", rules=[pack]).document["path"]


def test_a_value_for_a_param_that_only_the_checkpoint_settles_is_known_all_the_same(
    tmp_path: Path, pack: Path
) -> None:
    text = (RULE % "b").replace(
        "rules:", "params: {n: {type: int, config: n}, m: {type: int}}\nrules:"
    )
    (pack / "demo" / "v2" / "r.yaml").write_text(text)
    path = checkpoint(tmp_path, "x.a")
    said = refused(path, pack, to="demo@v2", params={"k": 1})
    assert "M112" in said
    assert "M509" in said
    assert migrate.plan(path, to="demo@v2", rules=[pack], params={"n": 2, "m": 1}).document[
        "params"
    ] == {"n": 2, "m": 1}
