"""Keys that come out are called as an index of the written files would call them."""

from __future__ import annotations

import numpy as np
import pytest
from rule_text import load_text

from migrate.core.errors import MigrateError, Report
from migrate.core.keys import parse
from migrate.core.spec import spec
from migrate.core.templates import group, matching, rank_of, seen_by
from migrate.planning.module_names import rename
from migrate.planning.pathstate import PathState, PathStep
from migrate.planning.pipeline import Views
from migrate.planning.sides import SideFiles
from migrate.planning.stored import initial
from migrate.rules.compiled import compile_file
from migrate.rules.lineage import Detect, Layout, Lineage, detect
from migrate.source.blobs import Stored
from migrate.source.index import Index
from migrate.source.shards import by_rank, join_ranks


def one(value: float) -> np.ndarray:
    return np.float32([value])


def reopened(keys: list[str]) -> set[str]:
    """The keys of the files that hold `keys`, as they are called when the files are opened."""
    stored = Stored(spec("float32", (1,)), 0, 0)
    return set(
        join_ranks([{short: stored for _, short in part} for part in by_rank(keys)], "folder")
    )


CASES = {
    # rules, keep, source, expected
    "all ranks of a kept key stay": ([], ["{k...}"], ["a@0", "a@1", "b"], {"a@0", "a@1", "b"}),
    "a kept key whose other ranks go is plain": (
        ['from: "a@{r:int}", where: {r: {min: 1}}, via: [{drop: {why: x}}]'], ["{k...}"],
        ["a@0", "a@1"], {"a"}
    ),
    "a made key of rank 0 alone is plain": (
        ['from: "a@{r:int}", to: "b@{r}", where: {r: {max: 0}}'], ["{k...}"],
        ["a@0", "a@1", "c@0", "c@1"], {"b", "a@1", "c@0", "c@1"}
    ),
    "a kept plain key gets rank 0 beside a made one of another rank": (
        ['from: "x", to: "a@{r:int}", via: [{unbind: {into: r, count: 1, start: 1}}]'], ["{k...}"],
        ["a", "x"], {"a@0", "a@1"}
    ),
    "a made plain key gets rank 0 beside a kept one of another rank": (
        ['from: "b", to: "a"'], ["{k...}"], ["a@1", "b"], {"a@0", "a@1"}
    ),
    "a key of a later rank alone keeps it": (['from: "a", to: "b"'], ["{k...}"], ["a@1"], {"b@1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_planned_names_are_those_of_the_written_files(engine, name):
    rules, keep, source, expected = CASES[name]
    files = engine.rules(*(rules or ['from: "none", to: "nil", optional: true']), keep=keep)
    shape = (1, 1) if "unbind" in str(rules) else (1,)
    out = engine.apply(
        files, {key: np.zeros(shape if key == "x" else (1,), np.float32) for key in source}
    )
    assert set(out) == expected
    assert reopened(list(out)) == expected


def test_a_lone_key_that_only_looks_like_a_rank_and_is_kept_is_left_alone(engine):
    files = engine.rules('from: "x", to: "y"', keep=["{k...}"])
    assert set(engine.apply(files, {"q@0": one(1), "x": one(2)})) == {"q@0", "y"}


def test_rank_0_and_a_plain_key_of_one_name_are_two_writers(engine):
    files = engine.rules('from: "b", to: "a"', keep=["{k...}"])
    (found,) = engine.refusals(files, {"a@0": one(1), "a@1": one(1), "b": one(2)})
    assert found.code == "M212"


def test_what_the_first_file_alone_holds_is_of_its_rank(engine):
    files = engine.rules(
        'from: {w: "{m}.w", b: "{m}.b"}, to: {w: "{m}.weight", b: "{m}.bias"}, optional: [b]'
    )
    out = engine.apply(files, {"x.w@0": one(1), "x.w@1": one(2), "x.b": one(3)})
    assert {key: float(value.view(np.float32)[0]) for key, value in out.items()} == {
        "x.weight@0": 1,
        "x.weight@1": 2,
        "x.bias": 3,
    }
    stack = engine.rules('from: "x.{e:int}", to: x, via: [{stack: {over: e}}]', keep=["n"])
    out = engine.apply(stack, {"x.0": one(1), "x.1": one(2), "n@0": one(3), "n@1": one(4)})
    assert set(out) == {"x", "n@0", "n@1"}
    out = engine.apply(stack, {"x.0@0": one(1), "x.0@1": one(2), "x.1": one(3), "n": one(4)})
    assert {key: value.shape for key, value in out.items()} == {
        "x@0": (2, 1),
        "x@1": (1, 1),
        "n": (1,),
    }


def test_flat_keys_of_ranks_are_found_with_and_without_their_rank(engine):
    rule = 'from: {w: "model.{k...}", ema: "e.{k:flat}"}, to: {w: "m.{k}", ema: "ema.{k}"}'
    keys = {
        "model.a.b@0": "m.a.b@0",
        "model.a.b@1": "m.a.b@1",
        "e.ab@0": "ema.a.b@0",
        "e.ab@1": "ema.a.b@1",
        "model.c": "m.c",
        "e.c": "ema.c",
    }
    assert engine.moves(engine.rules(rule), list(keys)) == keys


def test_layouts_are_told_by_patterns_without_ranks_and_by_those_that_name_them():
    keys = ["layers.0.w@0", "layers.0.w@1", "norm"]
    index = Index({key: Stored(spec("float32", (1,)), 0, 0) for key in keys}, ("f",))
    layouts = {
        "plain": Detect(present=("layers.{n:int}.w",)),
        "ranked": Detect(present=("layers.{n:int}.w@{r:int}", "norm@{r:int}")),
        "absent": Detect(absent=("layers.{n:int}.w",)),
        "third": Detect(present=("layers.{n:int}.w@2",)),
        "second": Detect(present=("layers.0.w@1",)),
    }
    found = detect(
        Lineage("t", layouts=tuple(Layout(n, detect=d) for n, d in layouts.items())),
        index,
        lambda path: None,
    )
    assert [f.layout for f in found if f.holds] == ["plain", "ranked", "second"]


def test_the_shape_of_a_param_is_looked_up_on_every_rank(engine):
    assert counted(engine, ["norm@0", "norm@1"], "{key: norm, dim: 0}") == 3
    assert counted(engine, ["norm@0", "norm@1"], "{key: 'norm@{r:int}', dim: 0}") == 3


@pytest.mark.parametrize(
    ("key", "rank"),
    [
        ("a@0", 0),
        ("a.b@12", 12),
        ("a@01", None),
        ("@1", None),
        ("a@", None),
        ("a@-1", None),
        ("a@1.b", None),
    ],
)
def test_a_rank_is_a_canonical_number_after_the_last_at(key, rank):
    assert rank_of(key) == rank


def test_a_pattern_sees_the_keys_of_a_template_with_or_without_their_rank():
    def fitting(text, template):
        pattern = parse(text)
        return list(matching(pattern, seen_by(pattern, template)))

    (template,) = group(["l.0.w@1", "l.1.w@1"])
    assert fitting("l.{n:int}.w", template) == [True, True]
    assert fitting("l.{n:int}.w@{r:int}", template) == [True, True]
    assert fitting("l.1.w@1", template) == [False, True]
    (plain,) = group(["l.0.w"])
    assert fitting("l.{n:int}.w@{r:int}", plain) == [True]


def counted(engine, keys, shape="{key: 'n@{r:int}', count: r}", backwards=False, given=None):
    files = engine.rules(
        'from: "n@{r:int}", to: "m", via: [{same: {over: r, count: $n}}]',
        params=f"n: {{type: int, default: 1, shape: {shape}}}",
    )
    report = Report()
    compiled, keep = compile_file(files[0], report)
    report.check()
    step = PathStep(
        "t",
        "v1",
        "v2",
        backwards,
        tuple((rule, {}) for rule in compiled),
        tuple(keep),
        tuple(files),
    )
    path_state = PathState(given or {}, SideFiles(lambda path: None), carried=False)
    path_state.enter_step(
        step, initial({key: Stored(spec("float32", (3,)), 0, 0) for key in keys}, Views())
    )
    return path_state.params["n"]


def test_a_param_may_be_how_many_ranks_there_are(engine):
    assert counted(engine, ["n@0", "n@1", "n@2", "other@3"]) == 3
    assert counted(engine, ["n", "other@0", "other@1"]) == 1
    assert counted(engine, ["m"], backwards=True) == 1
    assert counted(engine, ["m"], backwards=True, given={"n": "4"}) == 4
    assert (
        counted(
            engine,
            [f"l.{i}.{w}" for i in (0, 1, 5) for w in "ab"],
            "{key: 'l.{i:int}.{w}', count: i}",
        )
        == 3
    )


def test_a_number_that_is_not_that_of_the_ranks_is_refused_once(engine):
    with pytest.raises(MigrateError) as caught:
        counted(engine, ["n@0", "n@1"], given={"n": "4"})
    (found,) = caught.value.diagnostics
    assert found.code == "M510"
    assert "the values of {r} in n@{r:int} says 2" in found.notes


@pytest.mark.parametrize(
    "shape",
    [
        "{key: n, count: r}",
        "{key: ['n@{r:int}', 'l.{i:int}'], count: r}",
        "{key: 'n@{r:int}', count: r, dim: 0}",
    ],
)
def test_what_is_counted_is_a_capture_of_every_key_and_no_axis_beside_it(engine, shape):
    with pytest.raises(MigrateError) as caught:
        counted(engine, [], shape)
    assert [d.code for d in caught.value.diagnostics] == ["M114"]


def test_names_in_side_files_follow_keys_of_ranks(engine):
    files = engine.rules(
        'from: "{p...}.wq.weight@{r:int}", to: "{p}.q.weight", via: [{concat: {over: r, dim: 0}}]',
        keep=["{k...}"],
    )
    keys = [f"l.0.{w}.weight@{r}" for w in ("wq", "wo") for r in (0, 1)]
    bound = engine.apply(files, {key: one(1) for key in keys}, prove=False).composition.steps[0][1]
    text = "id: t/r\ntitle: t\nlineage: t\nedge: [a, b]\nnames: ['config.json#names']\nrules: []\n"
    sides, report = (
        SideFiles({"config.json": b'{"names": ["l.0.wq", "l.0.wo", "wq"]}'}.get),
        Report(),
    )
    rename(load_text(text, "r.yaml"), sides, bound, {}, set(), report)
    assert not report.diagnostics
    assert sides.value_at("config.json", ["names"]) == ["l.0.q", "l.0.wo", "q"]


@pytest.mark.parametrize("backwards", [False, True])
def test_a_rule_of_one_rank_takes_its_key_from_rules_of_all_ranks(engine, backwards):
    """Of both rules the last segment is what the fewest others have, with the rank or without."""
    files = engine.rules(
        'from: "l.a.x@1", to: "l.b.y@1"',
        'from: "l.a.x@{r:int}", to: "l.b.z@{r}"',
        'from: "l.a.{k:w|v}", to: "l.b.{k}"',
    )
    moved = {f"l.a.x@{r}": f"l.b.{'y' if r == 1 else 'z'}@{r}" for r in range(3)}
    moved |= {f"l.a.{k}@{r}": f"l.b.{k}@{r}" for k in "wv" for r in range(3)}
    if backwards:
        moved = {after: before for before, after in moved.items()}
    assert engine.moves(files, list(moved), backwards=backwards) == moved
