"""Rules backwards: ops in reverse order with the same captures, or why there is no way back."""

import pytest

from migrate.core.errors import Report
from migrate.ops.base import OneWay
from migrate.planning.pathstate import invert
from migrate.rules.compiled import direct


def back(engine, rule):
    ((compiled, params),) = engine.step(engine.rules(rule)).rules
    return invert(direct(compiled, params, Report()))


def test_ops_are_inverted_in_reverse_order_with_the_same_captures(engine):
    rule = back(
        engine,
        'from: "x.{e:int}.{w:a|b}", to: y, via: [{stack: {over: e}}, {concat: {over: w, dim: 1}}, '
        "{transpose: {dims: [0, 1]}}]",
    )
    assert [(s.name, s.capture) for s in rule.steps] == [
        ("transpose", None),
        ("split", "w"),
        ("unbind", "e"),
    ]
    assert [s.pattern.text for s in rule.reads] == ["y"]
    assert rule.backwards


def test_the_inverse_of_the_inverse_does_what_the_rule_does(engine):
    ((compiled, params),) = engine.step(
        engine.rules(
            'from: "x.{e:int}", to: y, via: [{stack: {over: e, count: 3}}, {flip: {dim: 0}}]'
        )
    ).rules
    rule = direct(compiled, params, Report())
    twice = invert(invert(rule))
    assert [(s.name, s.args) for s in twice.steps] == [(s.name, s.args) for s in rule.steps]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("from: a, via: [{drop: {why: w}}]", "drop"),
        ("from: a, to: b, via: [{slice: {dim: 0, stop: 1}}]", "slice"),
        ('from: "x.{e:int}", to: y, via: [{concat: {over: e}}]', "concat"),
        ('from: "x.{e:int}", to: y, via: [{same: {over: e}}]', "same"),
        ("from: a, to: b, via: [{reshape: {to: [2, 2]}}]", "reshape"),
    ],
)
def test_a_one_way_rule_says_which_op_and_why(engine, rule, said):
    verdict = back(engine, rule)
    assert isinstance(verdict, OneWay)
    assert verdict.because.startswith(f"{said}: ")


def test_a_rule_may_say_itself_that_nothing_leads_back(engine):
    verdict = back(engine, "from: a, to: b, inverse: {refuse: nothing reads it}")
    assert verdict == OneWay("nothing reads it")


def test_an_enumerated_capture_needs_no_count_to_come_back(engine):
    assert not isinstance(
        back(engine, 'from: "x.{w:a|b}", to: y, via: [{concat: {over: w}}]'), OneWay
    )
    assert not isinstance(
        back(engine, 'from: "x.{e:int}", to: y, via: [{concat: {over: e, count: 2}}]'), OneWay
    )


def test_backwards_a_keep_source_rule_only_looks_at_its_targets(engine):
    rule = back(engine, "from: a, to: b, keep_source: true, via: [{slice: {dim: 0, stop: 1}}]")
    assert rule.steps == ()
    assert [s.pattern.text for s in rule.reads] == ["b"]
    assert [s.name for s in rule.forward.steps] == ["slice"]
