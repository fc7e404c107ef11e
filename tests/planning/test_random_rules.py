"""Random rule files against the naive oracle; their inverses; their order; and two edges composed
against one after the other.
"""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rule_oracle import document, edges, naive


def same(out, want):
    assert sorted(out) == sorted(want)
    for key, array in want.items():
        assert out[key].shape == array.shape, key
        assert out[key].tobytes() == np.ascontiguousarray(array).tobytes(), key


def load(engine, rules):
    return engine.text(document(rules, keep=["{k...}"]))


@given(edges())
def test_rules_do_what_the_oracle_says_and_their_inverses_undo_it(engine, edge):
    rules, checkpoint = edge
    out = engine.apply(load(engine, rules), checkpoint, prove=True)
    same(out, naive(rules, checkpoint))
    assert out.composition.inexact == []
    back = engine.apply(
        load(engine, rules), {k: v.view(np.float32) for k, v in out.items()}, backwards=True
    )
    same(back, checkpoint)


@given(edges(), st.randoms(use_true_random=False))
def test_the_order_of_rules_and_keys_decides_nothing(engine, edge, rng: random.Random):
    rules, checkpoint = edge
    shuffled = list(rules)
    rng.shuffle(shuffled)
    keys = list(checkpoint)
    rng.shuffle(keys)
    same(
        engine.apply(load(engine, shuffled), {k: checkpoint[k] for k in keys}),
        engine.apply(load(engine, rules), checkpoint),
    )


@given(edges(), st.data())
def test_two_edges_composed_are_one_after_the_other(engine, edge, data):
    first, checkpoint = edge
    middle = {k: np.ascontiguousarray(a) for k, a in naive(first, checkpoint).items()}
    # the second edge works on what the first made: each tensor by itself, and all below one prefix
    # put away
    key = data.draw(st.sampled_from(sorted(k for k, a in middle.items() if a.shape[-1])))
    shape = middle[key].shape
    second = [
        {"name": "broad", "from": "{k...}", "to": "moved.{k}", "optional": True},
        {
            "name": "one",
            "from": key,
            "to": "one.{i:int}",
            "via": [{"flip": {"dim": 0}}, {"unbind": {"into": "i", "dim": len(shape) - 1}}],
        },
    ]
    files = load(engine, first), load(engine, second)
    steps = [engine.step(f) for f in files]
    done, out = engine.walk(steps, checkpoint)
    same(out, naive(second, middle))
    assert done.inexact == []
    back, there = engine.walk(
        [*steps, *(engine.step(f, backwards=True) for f in reversed(files))], checkpoint
    )
    same(there, checkpoint)
    for key, tensor in back.graph.outputs.items():
        assert tensor.sources == ((key,) if checkpoint[key].size else ())
        assert len(tensor.view.pieces) == (1 if checkpoint[key].size else 0)
