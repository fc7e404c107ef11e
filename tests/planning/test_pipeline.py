"""Ops over groups: one trace for equal geometry, and values where a view would have too many
pieces.
"""

import weakref

import numpy as np
import pytest

from migrate import ops
from migrate.core import view
from migrate.core.errors import MigrateError, Span
from migrate.core.spec import spec
from migrate.planning.graph import ComputedTensor, Tensor
from migrate.planning.pipeline import Views
from migrate.rules.compiled import CompiledCall

F = np.float32


def iota(*shape, start=0):
    return np.arange(start, start + int(np.prod(shape)), dtype=F).reshape(shape)


RULE = (
    'from: "{p}.{e:int}.{w:a|b}", to: "{p}.{h:int}", via: '
    "[{stack: {over: e}}, {concat: {over: w, dim: 1}}, {transpose: {dims: [1, 2]}}, {flip: {dim: "
    "1}}, {split: {into: h, dim: 2, count: 3}}]"
)


def experts():
    return {
        f"{p}.{e}.{w}": iota(3, 2, start=100 * e + 10 * n + 1000 * m)
        for m, p in enumerate("xy")
        for e in range(5)
        for n, w in enumerate("ab")
    }


def few_pieces(monkeypatch, limit):
    monkeypatch.setattr(view, "LIMIT", limit)
    monkeypatch.setattr(view, "GROWTH", 0)


@pytest.mark.parametrize("limit", [1, 2, 5, 12])
def test_what_would_have_too_many_pieces_is_computed_and_has_the_same_bytes(
    engine, monkeypatch, limit
):
    files = engine.rules(RULE)
    want = engine.apply(files, experts())
    few_pieces(monkeypatch, limit)
    out = engine.apply(files, experts())
    assert {k: (v.shape, v.tobytes()) for k, v in out.items()} == {
        k: (v.shape, v.tobytes()) for k, v in want.items()
    }
    computed = [
        t
        for t in out.composition.graph.outputs.values()
        if any(isinstance(s, ComputedTensor) for s in t.sources)
    ]
    assert bool(computed) == (limit < 12)


def test_the_parts_of_one_computed_tensor_share_the_computation(engine, monkeypatch):
    few_pieces(monkeypatch, 1)
    out = engine.apply(
        engine.rules(
            'from: "{p}", to: "{p}.{h:int}", via: [{transpose: {dims: [0, 1]}}, {unbind: {into: '
            "h}}]"
        ),
        {"x": iota(3, 4)},
    )
    calls = {
        id(s.computation)
        for t in out.composition.graph.outputs.values()
        for s in t.sources
        if isinstance(s, ComputedTensor)
    }
    assert len(calls) <= 1


def test_a_computed_group_is_checked_like_a_traced_one(engine, monkeypatch):
    few_pieces(monkeypatch, 1)
    files = engine.rules('from: "x.{e:int}", to: y, via: [{stack: {over: e, dim: 1}}]')
    mixed = {"x.0": iota(2), "x.1": iota(2).astype(np.float16)}
    assert [d.code for d in engine.refusals(files, mixed)] == ["M303"]
    assert [d.code for d in engine.refusals(files, {"x.0": iota(2), "x.1": iota(3)})] == ["M301"]
    assert [d.code for d in engine.refusals(files, {"x.0": iota(2), "x.2": iota(2)})] == ["M207"]


def test_conditions_on_values_hold_for_computed_tensors_too(engine, monkeypatch):
    files = engine.rules(
        'from: "x.{e:int}", to: y, via: [{stack: {over: e, dim: 1}}, {flip: {dim: 0}}, {slice: '
        "{dim: 0, stop: 2, of: 3, value: 0}}]",
        'from: "s.{w:a|b}", to: s, via: [{transpose: {dims: [0, 1]}}, {same: {over: w}}]',
    )
    good = {"x.0": F([0, 1, 2]), "x.1": F([0, 3, 4]), "s.a": iota(2, 3), "s.b": iota(2, 3)}
    few_pieces(monkeypatch, 1)
    out = engine.apply(files, good)
    assert out["y"].view(F).tolist() == [[2, 4], [1, 3]]
    assert {c.kind for c in out.composition.graph.checks} == {"filled", "equal"}
    with pytest.raises(AssertionError, match="cut"):
        engine.apply(files, good | {"x.1": F([9, 3, 4])})
    with pytest.raises(AssertionError):
        engine.apply(files, good | {"s.b": iota(2, 3, start=1)})


def test_layers_of_equal_geometry_share_one_view(engine):
    outputs = engine.apply(engine.rules(RULE), experts()).composition.graph.outputs
    assert outputs["x.0"].view is outputs["y.0"].view
    assert set(outputs["x.0"].sources).isdisjoint(outputs["y.0"].sources)


def test_one_source_that_occurs_twice_is_one_leaf(engine):
    first = engine.rules('from: a, to: "b.{w:x|y}", via: [{copy: {into: w}}]')
    second = engine.rules('from: "b.{w:x|y}", to: c, via: [{concat: {over: w}}]', name="two.yaml")
    done, out = engine.walk([engine.step(first), engine.step(second)], {"a": iota(2)})
    assert out["c"].tolist() == [0, 1, 0, 1]
    assert done.graph.outputs["c"].sources == ("a",)


def test_a_value_that_the_dtype_cannot_hold_is_refused_for_computed_tensors_too(
    engine, monkeypatch
):
    files = engine.rules("from: a, to: b, via: [{pad: {dim: 1, size: 3, value: -1}}]")
    ckpt = {"a": np.zeros((2, 2), np.uint8)}
    traced = [d.code for d in engine.refusals(files, ckpt)]
    few_pieces(monkeypatch, 1)
    assert [d.code for d in engine.refusals(files, ckpt)] == traced


def test_a_step_lives_as_long_as_what_was_traced_for_it():
    """Results are found by the identity of the step; another step must never come to lie where it
    lay.
    """

    class Args:
        dim = 0
        only = None

    views = Views()
    step = CompiledCall("flip", ops.get("flip"), Args(), None, Span("r.yaml", 1, 1, 1, ""))
    args = weakref.ref(step.args)
    views.trace(step, [Tensor(spec("float32", (5,)), views.stored((5,)), ("a",))], 1, "r", ("a",))
    del step
    assert args() is not None


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ('from: "x.{e:int}", to: "y", via: [{stack: {over: e, count: 9007199254740991}}]', "M207"),
        (
            (
                'from: "x.0", to: "y.{e:int}", optional: true, via: [{copy: {into: e, count: '
                "9007199254740991}}]"
            ),
            "M313",
        ),
        (
            'from: "x.0", to: "y.{e:int}", optional: true, via: [{tie: {into: e, count: 5000000}}]',
            "M313",
        ),
    ],
)
def test_a_count_beyond_all_measure_is_refused_and_not_tried(engine, rule, code):
    with pytest.raises(MigrateError) as caught:
        engine.apply(engine.rules(rule), {"x.0": iota(2), "x.1": iota(2)})
    assert code in [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("said", "params", "help"),
    [
        ("", {}, "write `count`"),
        (", count: $n", {}, '`count` is $n, which has no value: params={"n": …}'),
        (", count: $n", {"n": 2}, None),
    ],
)
def test_a_count_by_a_param_without_a_value_asks_for_the_param(engine, said, params, help):
    rule = f'from: "x", to: "y.{{e:int}}", via: [{{split: {{into: e, dim: 0{said}}}}}]'
    file = engine.rules(rule, params="n: {type: int, optional: true}")
    if help is None:
        assert sorted(engine.apply(file, {"x": iota(4)}, params)) == ["y.0", "y.1"]
    else:
        (found,) = engine.refusals(file, {"x": iota(4)}, params)
        assert (found.code, found.help) == ("M305", help)


def test_sizes_by_a_param_without_a_value_ask_for_the_param(engine):
    rule = 'from: "x", to: "y.{w:q|k}", via: [{split: {into: w, dim: 0, sizes: $s}}]'
    (found,) = engine.refusals(
        engine.rules(rule, params="s: {type: list, items: int, optional: true}"), {"x": iota(3)}, {}
    )
    assert (found.code, found.help) == (
        "M302",
        '`sizes` is $s, which has no value: params={"s": …}',
    )


@pytest.mark.parametrize(
    ("via", "optional"),
    [
        ("{dequantize: {codec: fp8-block, dtype: bfloat16}}", False),
        ("{concat: {over: role, dim: 0}}", True),
    ],
)
def test_a_part_without_which_there_are_no_numbers_is_not_called_optional(engine, via, optional):
    rule = f'from: {{weight: "{{p...}}.w", scale: "{{p...}}.s"}}, to: "{{p}}.o", via: [{via}]'
    found = next(
        d for d in engine.refusals(engine.rules(rule), {"a.w": iota(4)}) if d.code == "M207"
    )
    assert ("optional: [scale]" in found.help) is optional
