"""Keys that the way back must not take: how a stamp writes them, and what it makes of a stamp that
somebody else wrote.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.core.errors import Report
from migrate.core.spec import spec
from migrate.core.templates import SLOT
from migrate.planning.bind import BindContext
from migrate.planning.compose import compose
from migrate.planning.unchanged import are_folded_keys, fold_keys, unfold_keys
from migrate.source.blobs import Stored

F = np.float32
SEGMENTS = ["l", "w", "0", "1", "2", "10", "007", "{}", "a{", SLOT, "é", "w1"]


@given(
    st.lists(
        st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=5).map(".".join),
        unique=True,
        max_size=30,
    )
)
def test_what_is_folded_unfolds_to_the_same_keys(keys):
    entries = json.loads(json.dumps(fold_keys(keys)))
    assert are_folded_keys(entries)
    assert len(entries) <= len(keys)
    assert unfold_keys(entries, len(keys)) == set(keys)


def test_keys_of_layers_and_experts_are_one_form():
    keys = [f"l.{n}.experts.{e}.w.weight" for n in (0, 1, 2, 4) for e in range(256)] + [
        "lm_head.weight"
    ]
    assert fold_keys(keys) == [
        ["l.{}.experts.{}.w.weight", [[0, 2], [4, 4]], [[0, 255]]],
        "lm_head.weight",
    ]
    assert fold_keys([]) == []


def test_keys_without_order_are_no_longer_than_their_list():
    keys = [f"l.{n}.{n * n}.w" for n in range(50)]
    assert fold_keys(keys) == keys


def test_a_form_that_stands_for_more_keys_than_there_can_be_is_not_followed():
    assert unfold_keys([["l.{}.{}", [[0, 10**9]], [[0, 10**9]]]], 100_000) == set()
    assert unfold_keys(["a", ["l.{}", [[0, 10**30]]], "b"], 5) == {"a"}


@pytest.mark.parametrize(
    "entries",
    [
        None, {}, "a", [1], [[]], [["a"]], [["a", [[0, 1]]]], [["a.{}", [[1, 0]]]],
        [["a.{}", [[-1, 0]]]], [["a.{}", [[0, 1, 2]]]],
        [["a.{}", [0, 1]]], [["a.{}", [[0, True]]]], [["a.{}", [[0, 1.0]]]], [["{}.{}", [[0, 1]]]],
        [[3, [[0, 1]]]],
        [["a.{}", []]], [["{}.{}", [[0, 10**12]], []]], [["a.{}", [[5, 5], [5, 5]]]],
        [["a.{}", [[3, 4], [0, 1]]]],
        [["a.{}", [[0, 2], [2, 3]]]],
    ],
)  # fmt: skip
def test_what_fold_does_not_write_is_told(entries):
    assert not are_folded_keys(entries)


# ---------------------------------------------------------------------- which keys


def prove(engine, files, shapes):
    """The composition of these files, one after the other, over tensors of these shapes."""
    stored = {key: Stored(spec("float32", shape), 0, 0) for key, shape in shapes.items()}
    report = Report()
    steps = [engine.step([file]) for file in files]
    done = compose(
        stored, steps, BindContext(lambda *_: True, frozenset(("drop", "lossy"))), report
    )
    report.check()
    return done


@pytest.mark.parametrize(
    ("rule", "shapes", "kept"),
    [
        ('from: "{p...}.old", to: "{p}.new"', {"a.old": (2,), "b.new": (2,)}, ["b.new"]),
        ('from: "{p...}.old", to: "{p}.new"', {"a.old": (2,), "b.other": (2,)}, []),
        ('from: "{p...}.old", to: "{p}.new"',
        {"a.old@0": (2,), "a.old@1": (2,), "b.new@0": (2,), "b.new@1": (2,)},
        ["b.new@0", "b.new@1"]),
        # the way back could not even take them: one of three parts, and a tensor that its op
        # refuses
        ('from: "{p...}.qkv", to: "{p}.{w:q|k|v}", via: [{split: {into: w, dim: 0}}]',
        {"a.qkv": (3,), "b.q": (1,)}, ["b.q"]),
        ('from: "{p...}.old", to: "{p}.new", via: [{transpose: {dims: [0, 1]}}]',
        {"a.old": (2, 2), "b.new": (2,)}, ["b.new"]),
        # what `when` refuses on the way back stays without being remembered
        ('from: "{p...}.old", to: "{p}.new", when: {ndim: 2}',
        {"a.old": (2, 2), "b.new": (2,), "c.new": (2, 2)}, ["c.new"]),
        ('from: "{k...}.x", to: "{k}"', {"a.x": (2,), "b": (2,), "c.y": (2,)}, ["b", "c.y"]),
        ("from: a.old, to: b.new, keep_source: true, if_exists: keep",
        {"a.old": (2,), "b.new": (2,)}, ["b.new"]),
        # it stays, and its source went for it: taking it is the only way to have that back
        ("from: a.old, to: b.new, if_exists: keep", {"a.old": (2,), "b.new": (2,)}, []),
    ],
)  # fmt: skip
def test_the_keys_that_stayed_and_that_the_way_back_would_take_are_remembered(
    engine, rule, shapes, kept
):
    done = prove(engine, [*engine.rules(rule, keep=["{k...}"])], shapes)
    assert done.kept == [kept]
    assert (done.inexact == []) is ("if_exists" not in rule or "keep_source" in rule)


def test_each_edge_remembers_them_under_the_names_that_it_left(engine):
    first = engine.rules('from: "{p...}.old", to: "{p}.new"', keep=["{p...}.new"], name="one.yaml")
    second = engine.rules(
        'from: "{p...}.new", to: "{p}.newer"',
        keep=["{p...}.newer"],
        name="two.yaml",
        edge="[v2, v3]",
    )
    done = prove(engine, [*first, *second], {"a.old": (2,), "b.new": (2,)})
    assert set(done.graph.outputs) == {"a.newer", "b.newer"}
    assert done.kept == [["b.new"], []]
    assert done.inexact == []


def test_what_is_remembered_of_an_edge_does_not_hang_on_an_edge_behind_it_that_has_no_way_back(
    engine,
):
    first = engine.rules('from: "{p...}.old", to: "{p}.new"', keep=["{k...}"], name="one.yaml")
    second = engine.rules(
        "from: z, via: [{drop: {why: w}}]", keep=["{k...}"], name="two.yaml", edge="[v2, v3]"
    )
    done = prove(engine, [*first, *second], {"a.old": (2,), "b.new": (2,), "z": (1,)})
    assert done.kept == [["b.new"], []]
    assert done.inexact


def test_a_rule_all_of_whose_keys_stay_is_not_idle(engine):
    files = engine.rules("from: a, to: b, keep_source: true, if_exists: keep", keep=["b"])
    back = engine.apply(files, {"a": F([1]), "b": F([2])}, backwards=True, kept=["b"])
    assert set(back) == {"a", "b"}
    assert [d.code for d in engine.refusals(files, {"a": F([1])}, backwards=True, kept=["b"])] == [
        "M206"
    ]


def test_a_key_that_stays_is_no_member_of_a_group(engine):
    files = engine.rules('from: y, to: "x.{e:int}", via: [{unbind: {into: e}}]', keep=["x.2"])
    there = engine.apply(files, {"y": F([[1], [2]]), "x.2": F([3])}, prove=True)
    assert there.composition.inexact == []
    keys = {key: array.view(F) for key, array in there.items()}
    back = engine.apply(files, keys, backwards=True, kept=there.composition.kept[0])
    assert {key: array.view(F).tolist() for key, array in back.items()} == {
        "y": [[1], [2]],
        "x.2": [3],
    }
    assert set(engine.apply(files, keys, backwards=True)) == {"y"}


def test_without_a_stamp_the_plan_names_what_may_have_stayed(engine):
    files = engine.rules('from: "{p...}.old", to: "{p}.new"', keep=["{p...}.new"])
    there = {"a.new": F([1]), "b.new": F([2])}
    (note,) = notes(engine.apply(files, there, backwards=True))
    assert (
        note == "rule 'r0' takes a.new, b.new, which `keep` may have left unchanged on the way "
        "there: no stamp says so"
    )
    assert notes(engine.apply(files, there, backwards=True, kept=["b.new"])) == []
    assert notes(engine.apply(files, there, backwards=True, kept=[])) == []
    # a `keep` for whatever else there is says nothing of these
    assert (
        notes(
            engine.apply(
                engine.rules('from: "{p...}.old", to: "{p}.new"', keep=["{k...}"]),
                there,
                backwards=True,
            )
        )
        == []
    )


def test_a_key_that_shall_stay_and_is_gone_is_named(engine):
    files = engine.rules('from: "{p...}.old", to: "{p}.new"', keep=["{p...}.new"])
    found = engine.apply(files, {"a.new": F([1])}, backwards=True, kept=["b.new"])
    assert notes(found) == ["the stamp says that b.new stay as they are, and they do not exist"]


def notes(out):
    return [note for _, bound in out.composition.steps for note in bound.notes]
